"""The findings of a run as sentences made by rules, so that page, terminal and notebook agree.

A sentence names the claim by the field's term and its paper, says what was measured in the model and in the control,
and then what this shows or excludes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from llmgeom.record import Record
from llmgeom.reports.outcomes import CHECKS, Outcome, claims, distinct, heads
from llmgeom.reports.text import clusters_of, difference_of, number_of, pretty, short, sizes, unit, visible, why_not
from llmgeom.result import SENTENCE, STRONGEST, WORDS, Estimate
from llmgeom.stats.verdict import because, number_of_draws

SHOWN = 3  # findings on the first screen
POOLED = "processes"  # kind of the record whose claims pool those of the others
AUTHORS = "Agarwal et al. 2025"
COUNTED = {  # word -> what one test does, and several
    "holds": ("holds", "hold"),
    "small": ("shows a smaller effect than claimed", "show a smaller effect than claimed"),
    "ruled out": ("rules the claimed effect out", "rule the claimed effect out"),
    "opposite": ("shows the opposite", "show the opposite"),
    "open": ("is open", "are open"),
}
# The name of a control that is drawn -> what a sentence calls one draw and several; of one that is not, the control.
DRAWN = {
    "untrained, own entropy": ("untrained copy, with its own entropy", "untrained copies, each with its own entropy"),
    "untrained": ("untrained copy", "untrained copies"),
    "untrained controls": ("untrained copy", "untrained copies"),
    "shuffled prompts": ("shuffle of the words", "shuffles of the words"),
    "permuted weights": ("copy with permuted weights", "copies with permuted weights"),
    "permuted templates": ("permutation of the templates", "permutations of the templates"),
    "same variance": ("edit of the same variance", "edits of the same variance"),
    "same size": ("edit of the same size", "edits of the same size"),
}
FIXED = {"without context": "without context"}


def counting(records: Sequence[Record], every: Sequence[Outcome]) -> str:
    """The counting sentence: how many tests gave each word, of whose claims; before it what makes them moot."""
    flat = dict.fromkeys(str(record.facts["flat entropy"]) for record in records if "flat entropy" in record.facts)
    return " ".join([*flat, _counting(records, every)])


def _counting(records: Sequence[Record], every: Sequence[Outcome]) -> str:
    if any("preview" in record.facts for record in records):
        return "A preview without controls: values and intervals. Claims are judged at the end of the run."
    tested = distinct(every)
    about = [one for one in tested if one.probe not in CHECKS]
    checked = "".join(f" The check of the instrument {COUNTED[one.word][0]}." for one in tested if one.probe in CHECKS)
    if not tested:
        return _no_claims(records)
    if not about:
        return f"No claim about the model is tested {_where(records)}.{checked}"
    count = {word: sum(one.word == word for one in about) for word in WORDS}
    words = "; ".join(f"{n} {COUNTED[word][n > 1]}" for word, n in count.items() if n)
    number = len(claims(about))
    of = f" of {_plural(number, 'claim')}" if number < len(about) else ""
    lead = f"{_plural(len(about), 'test')}{of}" if of else _plural(number, "claim")
    return f"{_mostly_unmeasured(records)}{lead}{_papers(about)} {_where(records)}: {words}.{checked}"


def _papers(every: Sequence[Outcome]) -> str:
    """Whose claims these are, where papers are named: " of Agarwal et al. 2025 (Papers I and III)"."""
    named = sorted({one.paper for one in every if one.paper}, key=lambda paper: (len(paper), paper))
    *others, last = [paper.removeprefix("Paper ") for paper in named] or [""]
    numbers = f"{', '.join(others)} and {last}" if others else last
    return f" of {AUTHORS} (Paper{'s' * (len(named) > 1)} {numbers})" if named else ""


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
    of_them = ":" if count == len(lacks) else f", {count} because"
    every = len(lacks) + len(measured)
    return f"{len(lacks)} of {every} probes could not be measured{of_them} {why.rstrip('.')}. "


def _where(records: Sequence[Record]) -> str:
    """On which prompts, or in how many models and runs."""
    if len(records) > 1:
        models, sources = ({str(facts["name"]) for facts in part if "name" in facts} for part in
                           ([r.subject for r in records], [r.source for r in records]))  # fmt: skip
        if len(models) == 1 and len(sources) == len(records):
            pooled = any(r.source.get("kind") == POOLED for r in records)
            return f"on {len(records) - 1} processes" if pooled else f"on {len(records)} sets of prompts"
        alike = len(models) == len(records) and len(sources) == 1
        return f"in {len(records)} {'models' if alike else 'runs'}"
    (record,) = records
    if any(h.counts == "training runs" for measured in record.results.values() for h in measured.estimates):
        return "in these trainings"
    n, clusters = sizes(record.prompts)
    if not n:
        return "in this run"
    noun = "sequences" if record.source.get("kind") == "task" else "prompts"
    of = f" from {number_of(clusters, clusters_of(record.source, n, clusters))}" if clusters < n else ""
    return f"on {n:,} {noun}{of}" if n > 1 else f"on one {noun.removesuffix('s')}"


def findings(every: Sequence[Outcome], records: Sequence[Record] = (), most: int = SHOWN) -> list[str]:
    """The first findings: decided claims before open ones, the largest effects first; then what was not measured.

    Claims that pool several records come before all others, and one more finding is shown then.
    """
    tested = distinct(every)
    groups = claims(tested)
    names = heads(groups)
    ranked = sorted(groups, key=lambda group: min(_rank(one) for one in group))
    of_all = {str(record.source.get("name")) for record in records if record.source.get("kind") == POOLED}
    pooled = [group for group in ranked if group[0].record in of_all]
    ranked, most = [*pooled, *(group for group in ranked if group not in pooled)], most + bool(pooled)
    sentences = [_finding(group, names[group[0].key]) for group in ranked[:most]]
    said = [*strongest(records), *(text for record in records for text in _readable(record))]
    missing = [f"Not measured: {what}, because {why}." for what, why in lacking(records)]
    ordered = told(records) + sentences[: len(pooled)] + said + sentences[len(pooled) :] + missing
    return [visible(text) for text in ordered[:most]]


def _rank(outcome: Outcome) -> tuple[bool, bool, float]:
    """Open claims late, checks of the instrument last, and within each part the largest effect over margin first."""
    return outcome.probe in CHECKS, outcome.word == "open", -abs(outcome.distance)


def _finding(group: Sequence[Outcome], head: str) -> str:
    """One claim, by the run where the effect is largest, and its words elsewhere."""
    most = min(group, key=_rank)
    on = f" on {most.record}" * (len(group) > 1 and bool(most.record))
    others = [f"{one.word} on {one.record}" for one in group if one is not most and one.word != most.word]
    return sentence(most, head, on) + f" Elsewhere: {', '.join(others)}." * bool(others)


def sentence(outcome: Outcome, head: str, on: str = "") -> str:
    """A claim with its paper; the value and its control; then what they show."""
    h, paper = outcome.estimate, f" ({AUTHORS}, {outcome.paper})" if outcome.paper else ""
    name = pretty(h.noun or h.name)
    measured = f"{name} is {outcome.value}{on} (n = {number_of(h.clusters, outcome.counts)})"
    return f"{head}{paper}: {measured}; {_control(outcome)}. {_shown(outcome)}."


def _shown(outcome: Outcome) -> str:
    """What a value beside its control shows, by its word."""
    h, more = outcome.estimate, f"{short(outcome.estimate.effect)}{unit(outcome.estimate)}"
    way, other = ("above", "below") if h.side == "upper" else ("below", "above")
    if outcome.word == "open":
        return f"Open: {pretty(because(h, h.among, outcome.counts))}"
    if h.equivalence:
        return f"{'Within' if outcome.word == 'holds' else 'Beyond'} the {more} that the claim allows"
    if outcome.word == "opposite":
        return f"The opposite of the claim: it lies {other} every control"
    if outcome.word == "ruled out":
        return (
            f"An excess of {more} is ruled out" if h.room else f"It lies {other} this control: the claim is ruled out"
        )
    if outcome.word == "holds":
        return f"It lies {way} every control, and {more} beyond is not excluded"
    if not h.room:
        return f"It lies {way} every control, which leave no room for the {more} claimed"
    return f"It lies {way} every control, by less than the {more} claimed"


def _control(outcome: Outcome) -> str:
    """What the hardest control gives."""
    h = outcome.estimate
    name, count = h.control or h.null, h.control_draws
    more = h.null.removeprefix(f"{name} ({number_of_draws(count)})" if count else name)  # e.g. of which trainings
    called = FIXED.get(name, name)
    if count:
        called = f"{count} " + DRAWN.get(name, (f"draw of “{name}”", f"draws of “{name}”"))[count > 1]
    elif h.null_low == h.null_high and name[:1].isdigit():
        return f"the control is {outcome.control}"
    apart = f" on the same prompts, a difference of {difference_of(h)}" if h.paired else ""
    return f"{pretty(called)}{more}: {outcome.control}{apart}"


def _readable(record: Record) -> list[str]:
    """The probe's verdict on the label whose direction was edited, as the direction's file carries it."""
    axis = record.facts.get("axis")
    if not isinstance(axis, dict) or "read" not in axis:
        return []
    read = Estimate(**axis["read"]["claim"])
    claim = Outcome("", "label", read, "prompts" if read.n == read.clusters else "clusters")
    there = f"At the direction's place, {axis['place']}: {short(axis['read']['score'])}."
    return [f"Label “{axis['label']}”. {sentence(claim, claim.head)} {there}"]


def told(records: Sequence[Record]) -> list[str]:
    """What is the case, in a probe's own sentence; of several records, that of the one that pools the others, or of two
    both."""
    of = [
        (record.source, measured.facts[SENTENCE])
        for record in records
        for measured in record.results.values()
        if SENTENCE in measured.facts
    ]
    if pooled := [text for source, text in of if source.get("kind") == POOLED]:
        return pooled
    if len(records) > 2:
        return []
    return [f"On {source.get('name')}: {text}" if len(records) > 1 else text for source, text in of]


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


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + "s" * (count != 1)
