"""What a run found, in sentences made by rules, so that page, terminal and notebook agree.

A claim has one of five words: holds, small (the controls are beaten, and an effect of the claimed size is excluded),
ruled out, opposite, open. On the common scale 0 is the centre of the control, and 1 lies the claimed effect beyond it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from llmgeom.record import Record
from llmgeom.reports.text import (
    clusters_of,
    control_of,
    difference_of,
    independent,
    number_of,
    pretty,
    short,
    sizes,
    told_apart,
    unit,
    value_of,
    visible,
)
from llmgeom.result import WORDS, Estimate, Lack
from llmgeom.stats.undecided import Reason, reason, remedy, too_few

ALONE = {
    "holds": "holds",
    "small": "shows a small effect",
    "ruled out": "is ruled out",
    "opposite": "shows the opposite",
    "open": "is open",
}
CHECKS = ("ablation_control",)  # probes whose claim is that the instrument works: no finding about the model
SHOWN = 3  # findings on the first screen
INSEPARABLE = "cannot part Bayes' rule"  # of the warning that the sentence about the best rule repeats
POOLED = "processes"  # kind of the record whose claims pool those of the others
# What tells two edits of one axis apart -> how a sentence says it.
ALONG = {"pc1": "along PC1", "ridge": "along the ridge direction"}
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
    "without context": "the same weights without context",
    "the observer that skill is counted from": "that observer",
}


@dataclass(frozen=True)
class Outcome:
    """One claim tested in one run: its label (empty if there is one run), the probe, the numbers, what n counts."""

    record: str
    probe: str
    estimate: Estimate
    counts: str = "prompts"

    @property
    def key(self) -> tuple[str, str]:
        """What tests of one claim in several runs share."""
        return self.probe, self.estimate.name

    @property
    def word(self) -> str:
        """One of WORDS. Raises ValueError for a verdict that is none of them."""
        if self.estimate.verdict not in WORDS:
            raise ValueError(
                f"the claim {self.estimate.name!r} has the verdict {self.estimate.verdict!r}; "
                f"expected one of {', '.join(WORDS)}"
            )
        return self.estimate.verdict

    @property
    def head(self) -> str:
        """The claim in a few words: its sentence up to the colon."""
        return pretty(self.estimate.claim.partition(":")[0].rstrip("."))

    def scaled(self, value: float) -> float:
        """A value on the common scale of all claims: 0 is the control's centre and 1 the claimed effect beyond it.

        For a claim of no effect 0 is the control, and the claim says that the value lies between -1 and 1. Raises
        ValueError where the claim declares no effect.
        """
        h = self.estimate
        if not h.effect > 0:
            raise ValueError(f"the claim {h.name!r} declares an effect of {h.effect}; expected a number above 0")
        if not h.equivalence:
            return (value - h.centre) / (h.effect if h.side == "upper" else -h.effect)
        # A range that is wider than twice the effect has no lower end: a claim that the value is not larger.
        two_sided = h.margin - h.margin_low <= 2.001 * h.effect
        return (value - ((h.margin_low + h.margin) / 2 if two_sided else h.margin - h.effect)) / h.effect

    @property
    def distance(self) -> float:
        """Effect over margin: where the value lies on the common scale."""
        return self.scaled(self.estimate.value)

    @property
    def value(self) -> str:
        """The value with its 95 % interval and its unit."""
        return value_of(self.estimate)

    @property
    def control(self) -> str:
        """The control's range (its middle 95 %), or the one number that it is, with the value's decimals."""
        return control_of(self.estimate)


def outcomes(records: Sequence[Record], labels: Sequence[str]) -> list[Outcome]:
    """Every claim of every record; tests of one claim follow each other, claims as they come."""
    several = len(records) > 1
    every = [
        Outcome(label if several else "", probe, h, independent(h, record.source, record.prompts))
        for label, record in zip(labels, records, strict=True)
        for probe in in_order(record.results)
        for h in record.results[probe].estimates
        if h.claim
    ]
    first = {key: place for place, key in reversed(list(enumerate(one.key for one in every)))}
    return sorted(every, key=lambda one: first[one.key])


def in_order(probes: Iterable[str], first: Sequence[str] = ()) -> list[str]:
    """Probes in the order in which they are shown: `first`, then by name, checks of the instrument last."""
    return sorted(probes, key=lambda probe: (probe not in first, probe in CHECKS, probe))


def claims(every: Iterable[Outcome]) -> list[list[Outcome]]:
    """The tests claim by claim."""
    return [list(group) for _, group in groupby(every, key=lambda one: one.key)]


def heads(groups: Sequence[Sequence[Outcome]]) -> dict[tuple[str, str], str]:
    """What each claim is called; where two share their words, with what tells their probes or their metrics apart."""
    short = {group[0].key: group[0].head for group in groups}
    names = list(short.values())
    titles = {}
    for (probe, name), head in short.items():
        alike = [key for key, other in short.items() if other == head]
        apart = told_apart([key[0] for key in alike])
        more = apart[probe] if len(apart) == len(alike) else pretty(name)
        named = f"{head} ({ALONG[more]})" if more in ALONG else f"{more}: {head}"
        titles[probe, name] = named if names.count(head) > 1 else head
    return titles


def counting(records: Sequence[Record], every: Sequence[Outcome]) -> str:
    """The sentence that counts: how many claims hold, and what became of the others."""
    looks = [str(record.facts["first_look"]) for record in records if "first_look" in record.facts]
    if looks:
        read = looks[0].removeprefix("controls: ")
        return (
            f"A first look, after {read} controls: values and intervals. Claims are judged when all controls are read."
        )
    if checks := [outcome for outcome in every if outcome.probe in CHECKS]:
        about = [outcome for outcome in every if outcome.probe not in CHECKS]
        sentence = counting(records, about) if about else f"No claim about the model is tested {_where(records)}."
        words = "; elsewhere it ".join(dict.fromkeys(ALONE[outcome.word].rstrip(",") for outcome in checks))
        return f"{sentence} The check of the instrument {words}."
    if not every:
        numbers_of = sum(len(measured.estimates) for record in records for measured in record.results.values())
        failed = len({probe for record in records for probe in record.unmeasured})
        lead = "This run tests no claim" if len(records) == 1 else "These runs test no claim"
        rest = f"; {_plural(failed, 'probe')} could not be measured" if failed else ""
        measured = f", and measures {_plural(numbers_of, 'number')}" if numbers_of else ""
        return f"{lead}{measured}{rest}."
    groups, most = claims(every), _mostly_unmeasured(records)
    holding = [group for group in groups if all(outcome.word == "holds" for outcome in group)]
    where = _where(records)
    if len(every) == 1:
        return f"{most}The one claim{' that was measured' * bool(most)} {ALONE[every[0].word]} {where}."
    if not holding:
        if len(records) > 1 and not any(outcome.word == "holds" for outcome in every):
            where = where.replace("every", "any")
        lead = f"None of the {len(groups)} claims holds {where}."
    elif len(holding) == len(groups):
        lead = f"{'Both' if len(groups) == 2 else f'All {len(groups)}'} claims hold {where}."
    else:
        lead = f"{len(holding)} of the {len(groups)} claims {'holds' if len(holding) == 1 else 'hold'} {where}."
    rest = _rest(every, len(records) > 1)
    return f"{most}{lead} {rest}" if rest else f"{most}{lead}"


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
    found = sentences[: len(pooled)] + observers(records) + [text for record in records for text in _readable(record)]
    found += sentences[len(pooled) :]
    found += [f"Not measured: {what}, because {why}." for what, why in lacking(records)]
    return [visible(text) for text in found[:most]]


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
    """What the probe's claim said of the label whose direction was edited; the direction's file carries it."""
    axis = record.facts.get("axis")
    if not isinstance(axis, dict) or "read" not in axis:
        return []
    read = Estimate(**axis["read"]["claim"])
    claim = Outcome("", "label", read, "prompts" if read.n == read.clusters else "clusters")
    there = f"At the direction's place, {axis['place']}: {short(axis['read']['score'])}."
    return [f"Label “{axis['label']}”. {_sentence(claim, claim.head)}. {there}"]


def observers(records: Sequence[Record]) -> list[str]:
    """Which rule predicts the model's answers best, and whether that is Bayes' rule; of several runs their words.

    One sentence, or none where no run asked: a run of every process has 20 lines, too.
    """
    one_model = len({str(record.subject["name"]) for record in records}) == 1
    rows = [
        (
            str(record.source.get("name")) if one_model else record.title,
            hit[1],
            hit[2],
            any(INSEPARABLE in text for text in measured.warnings),
        )
        for record in records
        for measured in record.results.values()
        for note in measured.notes
        if (hit := re.fullmatch(r"the rule that fits the answers best: (.+); the model is: (.+)", note))
    ]
    if len(records) == 1:
        return [_observer(rule, word, alike) for _, rule, word, alike in rows[:1]]
    calls = {word: [label for label, _, other, _ in rows if other == word] for _, _, word, _ in rows}
    said = "; ".join(f"{'undecided' if word == 'open' else word} on {', '.join(calls[word])}" for word in sorted(calls))
    return [f"By the rule that fits its answers best, the model is {said}."] if said else []


def _observer(rule: str, word: str, alike: bool) -> str:
    more = " These prompts cannot tell Bayes' rule from counting; --process stated can." * alike
    said = "Whether the model is Bayesian here is open" if word == "open" else f"The model is {word} here"
    return f"The rule that fits the answers best: {rule}. {said}.{more}"


def lacking(records: Sequence[Record]) -> list[tuple[str, str]]:
    """What could not be measured, and why, each once; numbers of one probe that share their reason are counted."""
    every = {name: why.removeprefix("not measured: ") for r in records for name, why in sorted(r.unmeasured.items())}
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
    h, of = outcome.estimate, _names_of(outcome.estimate.null)
    if h.null == "one half":
        return "the control is one half"
    if h.null_low == h.null_high and of[:1].isdigit():
        return f"the control is {outcome.control}"
    if h.null_low == h.null_high and of.startswith("no "):
        return f"the control ({of}) is {outcome.control}"
    several = (of[:1].isdigit() and not of.startswith("1 ")) or of.startswith("the same weights")
    apart = f", a difference of {difference_of(h)}" * h.paired
    return f"{of} {'give' if several else 'gives'} {outcome.control}{apart}"


def _with_fixed(raw: Outcome, fixed: Outcome) -> str:
    """What is left of an effect once something is held fixed."""
    what = fixed.estimate.name.removeprefix(f"{raw.estimate.name}, given ")
    if fixed.word in ("holds", "small"):
        left = "holds" if fixed.word == "holds" else "is a small effect"
        return f". With {what} held fixed {fixed.value} is left, which still {left}"
    if fixed.word == "open":
        return f". With {what} held fixed {fixed.value} is left; this test is open"
    if raw.word in ("holds", "small"):
        return f". With {what} held fixed {fixed.value} is left, and an effect of the claimed size is excluded"
    return f". With {what} held fixed {fixed.value} is left"


# Of llmgeom/dynamics/trajectories.py: runs that learn, or runs on random targets, are too short.
def _undecided(outcome: Outcome) -> str:
    """Why a claim is open, and what would settle it."""
    h = outcome.estimate
    match reason(h):
        case Reason.LACK:
            return _capital(pretty("; ".join(map(_lack, h.lacks))))
        case Reason.ROOM:
            return _capital(pretty(h.why))
        case Reason.DRAWS:
            return f"{_capital(too_few(h.draws))} (--nulls)"
        case Reason.NEVER:
            return _capital(pretty(remedy(h)))
        case Reason.CLUSTERS:
            would = f"{h.needed:,} {outcome.counts} would find the claimed effect in 9 of 10 runs"
            return f"{would}; this run has {h.clusters:,}"
    if h.equivalence:
        inside = "" if h.low < h.margin_low or h.high > h.margin else ", corrected for several claims,"
        return (
            f"The claim allows a difference of {short(h.effect)}{unit(h)}, and the interval{inside} reaches beyond it"
        )
    claimed = f"the claimed {short(h.effect)}{unit(h)}"
    low, high = h.deciding_interval
    beyond = h.centre + (h.effect if h.side == "upper" else -h.effect)
    if low <= min(h.centre, beyond) and max(h.centre, beyond) <= high:
        return f"The interval includes both no effect and {claimed}"
    return f"With the correction for several claims, neither no effect nor {claimed} is excluded"


def _lack(lack: Lack) -> str:
    """What must change besides the number of prompts."""
    return f"{lack.needed} {lack.what} are needed, and this run has {lack.has}" if lack.kind == "runs" else str(lack)


def _names_of(null: str) -> str:
    """A control as a sentence calls it: "untrained (20 draws)" is "20 untrained copies"."""
    for name, words in FIXED.items():
        if null.startswith(name):
            return words + null.removeprefix(name)
    if not (drawn := re.fullmatch(r"(.+) \((\d+) draws?\)(.*)", null)):
        return null
    name, count, rest = drawn.groups()
    one, several = DRAWN.get(name, (f"draw of “{name}”", f"draws of “{name}”"))
    return f"{count} {one if count == '1' else several}{rest}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:] if text[:1].isascii() else text


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + "s" * (count != 1)
