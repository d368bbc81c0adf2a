"""The findings of a run as sentences made by rules, so that page, terminal and notebook agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from llmgeom.record import Record
from llmgeom.reports.outcomes import CHECKS, Outcome, claims, heads
from llmgeom.reports.text import clusters_of, difference_of, number_of, pretty, short, sizes, unit, visible, why_not
from llmgeom.result import SENTENCE, STRONGEST, WORDS, Estimate
from llmgeom.stats.verdict import because, number_of_draws

ALONE = {
    "holds": "holds",
    "small": "shows a small effect",
    "ruled out": "is ruled out",
    "opposite": "shows the opposite",
    "open": "is open",
}
SHOWN = 3  # findings on the first screen
POOLED = "processes"  # kind of the record whose claims pool those of the others
# The name of a control that is drawn -> what a sentence calls one draw and several; of one that is not, the control.
DRAWN = {
    "untrained, own entropy": ("untrained copy, with its own entropy,", "untrained copies, each with its own entropy,"),
    "untrained": ("untrained copy", "untrained copies"),
    "untrained controls": ("untrained copy", "untrained copies"),
    "shuffled prompts": ("shuffle of the words", "shuffles of the words"),
    "permuted templates": ("permutation of the templates", "permutations of the templates"),
    "same variance": ("edit of the same variance", "edits of the same variance"),
    "same size": ("edit of the same size", "edits of the same size"),
}
FIXED = {
    "without context": ("the same weights without context", "give"),
}


def counting(records: Sequence[Record], every: Sequence[Outcome]) -> str:
    """The counting sentence: how many claims hold, and the verdicts of the others."""
    if any("preview" in record.facts for record in records):
        return "A preview without controls: values and intervals. Claims are judged at the end of the run."
    if checks := [outcome for outcome in every if outcome.probe in CHECKS]:
        about = [outcome for outcome in every if outcome.probe not in CHECKS]
        sentence = counting(records, about) if about else f"No claim about the model is tested {_where(records)}."
        words = "; elsewhere it ".join(dict.fromkeys(ALONE[outcome.word].rstrip(",") for outcome in checks))
        return f"{sentence} The check of the instrument {words}."
    if not every:
        return _no_claims(records)
    groups, most = claims(every), _mostly_unmeasured(records)
    holding = [group for group in groups if all(outcome.word == "holds" for outcome in group)]
    where = _where(records)
    if len(every) == 1:
        return f"{most}The one claim{' that was measured' * bool(most)} {ALONE[every[0].word]} {where}."
    lead = _holding(len(holding), len(groups), where, any(outcome.word == "holds" for outcome in every))
    rest = _rest(every, len(records) > 1)
    return f"{most}{lead} {rest}" if rest else f"{most}{lead}"


def _holding(holding: int, claims: int, where: str, somewhere: bool) -> str:
    """How many claims hold in every test; `somewhere`: some test shows the claimed effect."""
    if claims == 1:
        if somewhere and not holding:
            return f"The one claim does not hold {where}."
        return f"The one claim holds {where if holding else where.replace('every', 'no')}."
    if not holding:
        none = "Neither" if claims == 2 else "None"
        return f"{none} of the {claims} claims holds {where if somewhere else where.replace('every', 'any')}."
    if holding == claims:
        return f"{'Both' if claims == 2 else f'All {claims}'} claims hold {where}."
    return f"{holding} of the {claims} claims {'holds' if holding == 1 else 'hold'} {where}."


def _no_claims(records: Sequence[Record]) -> str:
    """The counting sentence of a run without claims: how many numbers it has."""
    numbers_of = sum(len(measured.estimates) for record in records for measured in record.results.values())
    failed = len({probe for record in records for probe in record.unmeasured})
    lead = "This run tests no claim" if len(records) == 1 else "These runs test no claim"
    rest = f"; {_plural(failed, 'probe')} could not be measured" if failed else ""
    measured = f", and measures {_plural(numbers_of, 'number')}" if numbers_of else ""
    return f"{lead}{measured}{rest}."


def _mostly_unmeasured(records: Sequence[Record]) -> str:
    """How many probes could not be measured, with the commonest reason, where at least half could not; else empty."""
    measured = {probe for record in records for probe in record.results}
    lacks = {probe: why for r in records for probe, why in r.unmeasured.items() if probe.partition(": ")[0] == probe}
    lacks = {probe: why for probe, why in lacks.items() if probe not in measured}
    if len(lacks) < max(2, len(measured)):
        return ""
    ((why, count),) = Counter(lacks.values()).most_common(1)
    of_them = "" if count == len(lacks) else f", {count} because"
    return (
        f"{len(lacks)} of {len(lacks) + len(measured)} probes could not be measured{of_them or ':'} {why.rstrip('.')}. "
    )


def _where(records: Sequence[Record]) -> str:
    if len(records) > 1:
        models, sources = ({str(facts["name"]) for facts in part if "name" in facts} for part in
                           ([r.subject for r in records], [r.source for r in records]))  # fmt: skip
        if len(models) == 1 and len(sources) == len(records):
            return (
                "in every process"
                if any(r.source.get("kind") == POOLED for r in records)
                else "on every set of prompts"
            )
        return "in every model" if len(models) == len(records) and len(sources) == 1 else "in every run"
    (record,) = records
    if any(h.counts == "training runs" for measured in record.results.values() for h in measured.estimates):
        return "in these trainings"
    n, clusters = sizes(record.prompts)
    if not n:
        return "in this run"
    noun = "sequences" if record.source.get("kind") == "task" else "prompts"
    of = f" from {number_of(clusters, clusters_of(record.source, n, clusters))}" if clusters < n else ""
    return f"on these {n:,} {noun}{of}" if n > 1 else f"on this {noun.removesuffix('s')}"


def _rest(every: Sequence[Outcome], several: bool) -> str:
    count = {word: sum(one.word == word for one in every) for word in WORDS}
    no_effect = any(one.word == "ruled out" and one.estimate.equivalence for one in every)
    excluding = ("rules the claim out", "rule the claim out") if no_effect else (
        "rules out an effect of the claimed size", "rule out an effect of the claimed size",
    )  # fmt: skip
    words = {
        "holds": ("shows the claimed effect", "show the claimed effect") if several else None,
        "small": ("shows a small effect", "show a small effect"),
        "ruled out": excluding,
        "opposite": ("shows the opposite", "show the opposite"),
        "open": ("is open", "are open"),
    }
    if several_alike := [forms for word, forms in words.items() if forms and count[word] == len(every) > 1]:
        (forms,) = several_alike
        return f"{'Both' if len(every) == 2 else f'All {len(every)}'} tests {forms[1]}."
    some = [(count[word], forms[count[word] > 1]) for word, forms in words.items() if forms and count[word]]
    if not some:
        return ""
    (first, verb), *others = some
    lead = f"Of {len(every)} tests, {first} {verb}" if several else f"{_plural(first, 'test')} {verb}"
    return f"{'; '.join([lead, *(f'{n} {other}' for n, other in others)])}."


def findings(every: Sequence[Outcome], records: Sequence[Record] = (), most: int = SHOWN) -> list[str]:
    """The first findings: decided claims before open ones, the largest effects first; then what was not measured.

    Claims that pool several records come before all others, and one more finding is shown then.
    Where a label's direction was edited, how well the probe reads the label stands before them.
    """
    groups = claims(every)
    names = heads(groups)
    stricter = {group[0].key: _stricter(group[0], groups) for group in groups}
    part_of_another = {one[0].key for one in stricter.values() if one}
    ranked = sorted(
        (group for group in groups if group[0].key not in part_of_another),
        key=lambda group: min(_rank(one) for one in group),
    )
    of_all = {str(record.source.get("name")) for record in records if record.source.get("kind") == POOLED}
    pooled = [group for group in ranked if group[0].record in of_all]
    ranked, most = [*pooled, *(group for group in ranked if group not in pooled)], most + bool(pooled)
    sentences = [_finding(group, names[group[0].key], stricter[group[0].key]) for group in ranked[:most]]
    facts = strongest(records) + [text for record in records for text in _readable(record)]
    missing = [f"Not measured: {what}, because {why}." for what, why in lacking(records)]
    ordered = told(records) + sentences[: len(pooled)] + facts + sentences[len(pooled) :] + missing
    return [visible(text) for text in ordered[:most]]


def _rank(outcome: Outcome) -> tuple[bool, bool, float]:
    """Open claims late, checks of the instrument last, and within each part the largest effect over margin first.

    Of an effect that the control has as well, its size counts without the control: it is what a reader would believe.
    """
    h = outcome.estimate
    return (
        outcome.probe in CHECKS,
        outcome.word == "open",
        -(abs(h.value) / h.effect if _as_large(outcome) else abs(outcome.distance)),
    )


def _as_large(one: Outcome) -> bool:
    """Whether a claim looks true by its value alone, and its control gives as much."""
    h = one.estimate
    within = h.null_low <= h.value <= h.null_high
    # A claim that the value is low does not look true because the value is large.
    return one.word == "ruled out" and h.side == "upper" and not h.equivalence and abs(h.value) >= h.effect and within


def _readable(record: Record) -> list[str]:
    """The probe's verdict on the label whose direction was edited, as the direction's file carries it."""
    axis = record.facts.get("axis")
    if not isinstance(axis, dict) or "read" not in axis:
        return []
    read = Estimate(**axis["read"]["claim"])
    claim = Outcome("", "label", read, "prompts" if read.n == read.clusters else "clusters")
    there = f"At the direction's place, {axis['place']}: {short(axis['read']['score'])}."
    return [f"Label “{axis['label']}”. {_sentence(claim, claim.head)}. {there}"]


def told(records: Sequence[Record]) -> list[str]:
    """What is the case, in a probe's own sentence; of several records, that of the one that pools the others."""
    of = {
        record.source.get("kind"): measured.facts[SENTENCE]
        for record in records
        for measured in record.results.values()
        if SENTENCE in measured.facts
    }
    return [of[POOLED]] if POOLED in of else [*of.values()] if len(records) == 1 else []


def strongest(records: Sequence[Record]) -> list[str]:
    """Which head has the largest effect, by each way to replace one: `llmgeom ablate --what heads`."""
    ways: dict[str, list[str]] = {}
    for measured in (measured for record in records for measured in record.results.values()):
        if STRONGEST in measured.facts:
            ways.setdefault(measured.facts[STRONGEST], []).append(measured.title.partition(": ")[2])
    named = (f"{head} when {' or '.join(by)}" for head, by in ways.items())
    return [f"The head with the largest effect: {'; '.join(named)} (LiHj: layer i, head j, from 0)."] if ways else []


def lacking(records: Sequence[Record]) -> list[tuple[str, str]]:
    """What could not be measured, and why, without repetition; numbers of one probe with one reason are counted."""
    every = {name: why_not(why) for r in records for name, why in sorted(r.unmeasured.items())}
    of: dict[tuple[str, str], int] = {}
    for name, why in every.items():
        probe, of_probe, _ = name.partition(": ")
        of[probe, why] = of.get((probe, why), 0) + bool(of_probe)
    count = {key: f" ({_plural(n, 'number')})" if n else "" for key, n in of.items()}
    return [(f"{probe.replace('_', ' ')}{count[probe, why]}", why) for probe, why in of]


def _stricter(raw: Outcome, groups: Sequence[Sequence[Outcome]]) -> list[Outcome]:
    """The tests of the same claim with something held fixed: metric "A, given B" of the same probe."""
    for group in groups:
        if group[0].probe == raw.probe and group[0].estimate.name.startswith(f"{raw.estimate.name}, given "):
            return list(group)
    return []


def _finding(group: Sequence[Outcome], head: str, stricter: Sequence[Outcome]) -> str:
    """One claim in one or two sentences, by the run where the effect is largest."""
    most = min(group, key=_rank)
    said = _sentence(most if any(one.value != most.value for one in group) else replace(most, record=""), head)
    fixed = next((one for one in stricter if one.record == most.record), None)
    if fixed:
        said += _with_fixed(most, fixed)
    others = [f"{one.word} on {one.record}" for one in group if one is not most and one.word != most.word]
    return f"{said}." + f" Elsewhere: {', '.join(others)}." * bool(others)


def _sentence(outcome: Outcome, head: str) -> str:
    h, on = outcome.estimate, f" on {outcome.record}" if outcome.record else ""
    name = "it" if outcome.head == pretty(h.claim.rstrip(".")) else pretty(h.noun or h.name)
    first = name.split()[0]
    are = first.endswith("s") and not first.endswith("ss")
    metric = f"{name} {'are' if are else 'is'} {outcome.value}{on} (n = {number_of(h.clusters, outcome.counts)})"
    control = _control(outcome)
    more = f"{short(h.effect)}{unit(h)}"
    if outcome.word == "holds":
        allows = f", and the claim allows a difference of {more}" if h.equivalence else ""
        return f"{head}: this holds. {_capital(metric)}; {control}{allows}"
    if outcome.word == "small":
        return f"{head}, but by less than claimed. {_capital(metric)}; {control}, and an effect of {more} is excluded"
    if outcome.word == "opposite":
        way = "higher" if h.value > h.centre else "lower"
        return f"The opposite of “{head}” holds: {metric}, {way} than the control; {control}"
    if outcome.word == "open":
        return f"“{head}” is open: {metric}; {control}. {_undecided(outcome)}"
    if h.equivalence:
        return f"“{head}” is ruled out: {metric}; {control}, and the claim allows a difference of {more}"
    if _as_large(outcome):
        return f"“{head}” looks true, but the control is as large: {metric}; {control}"
    return f"“{head}” is ruled out at the claimed size: {metric}; {control}, and an effect of {more} is excluded"


def _control(outcome: Outcome) -> str:
    """What the control gives, in words."""
    h = outcome.estimate
    control, gives = _names_of(h)
    if h.null == "one half":
        return "the control is one half"
    if h.null_low == h.null_high and not h.control_draws and control[:1].isdigit():
        return f"the control is {outcome.control}"
    if h.null_low == h.null_high and control.startswith("no "):
        return f"the control ({control}) is {outcome.control}"
    apart = f", a difference of {difference_of(h)}" * h.paired
    return f"{control} {gives} {outcome.control}{apart}"


def _with_fixed(raw: Outcome, fixed: Outcome) -> str:
    """The remaining effect when something is held fixed."""
    what = fixed.estimate.name.removeprefix(f"{raw.estimate.name}, given ")
    if fixed.word in ("holds", "small"):
        left = "holds" if fixed.word == "holds" else "is a small effect"
        return f". With {what} held fixed {fixed.value} is left, which still {left}"
    if fixed.word == "open":
        return f". With {what} held fixed {fixed.value} is left; this test is open"
    if raw.word in ("holds", "small"):
        return f". With {what} held fixed {fixed.value} is left, and an effect of the claimed size is excluded"
    return f". With {what} held fixed {fixed.value} is left"


def _undecided(outcome: Outcome) -> str:
    """Why a claim is open, and what would settle it."""
    h = outcome.estimate
    return _capital(pretty(because(h, h.among, outcome.counts)))


def _names_of(h: Estimate) -> tuple[str, str]:
    """A control as a sentence calls it, and its verb: 20 draws of "untrained" are "20 untrained copies", which give."""
    name, count = h.control or h.null, h.control_draws
    more = h.null.removeprefix(f"{name} ({number_of_draws(count)})" if count else name)  # e.g. of which trainings
    if not count:
        words, gives = FIXED.get(name, (name, "gives"))
        return words + more, gives
    one, several = DRAWN.get(name, (f"draw of “{name}”", f"draws of “{name}”"))
    return f"{count} {one if count == 1 else several}{more}", "gives" if count == 1 else "give"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:] if text[:1].isascii() else text


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + "s" * (count != 1)
