"""The findings of a run as sentences made by rules, so that page, terminal and notebook agree.

A sentence names the claim by the field's term and its paper, says what was measured in the model and in the control,
and then what this shows or excludes.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmgeom.record import Record
from llmgeom.reports.table import CHECKS, Row, claims, distinct, heads, lacking
from llmgeom.reports.text import (
    clusters_of,
    control_of,
    difference_of,
    number_of,
    pretty,
    short,
    sizes,
    unit,
    value_of,
    visible,
)
from llmgeom.result import SENTENCE, WORDS, Estimate
from llmgeom.stats.verdict import because

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
# The name of a control that is drawn -> what a sentence calls one draw and several.
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


def counting(records: Sequence[Record], every: Sequence[Row]) -> str:
    """The counting sentence: how many tests gave each word, of whose claims; before it what makes them moot."""
    flat = dict.fromkeys(f"{record.facts['flat entropy']} " for record in records if "flat entropy" in record.facts)
    before = "".join(flat)
    if any("preview" in record.facts for record in records):
        return before + "A preview without controls: values and intervals. Claims are judged at the end of the run."
    tested = distinct(every)
    about = [row for row in tested if row.probe not in CHECKS]
    checked = "".join(f" The check of the instrument {COUNTED[row.word][0]}." for row in tested if row.probe in CHECKS)
    if not tested:
        numbers = sum(row.h is not None for row in every)
        failed = len({probe for record in records for probe in record.unmeasured})
        lead = "This run tests no claim" if len(records) == 1 else "These runs test no claim"
        measured = f", and measures {number_of(numbers, 'numbers')}" * bool(numbers)
        return (
            f"{before}{lead}{measured}" + f"; {number_of(failed, 'probes')} could not be measured" * bool(failed) + "."
        )
    if not about:
        return f"{before}No claim about the model is tested {_where(records)}.{checked}"
    count = {word: sum(row.word == word for row in about) for word in WORDS}
    words = "; ".join(f"{n} {COUNTED[word][n > 1]}" for word, n in count.items() if n)
    number = len({row.key for row in about})
    lead = f"{number_of(len(about), 'tests')} of " * (number < len(about)) + number_of(number, "claims")
    papers = sorted({row.paper for row in about if row.paper}, key=lambda paper: (len(paper), paper))
    *others, last = [paper.removeprefix("Paper ") for paper in papers] or [""]
    of = f"{', '.join(others)} and {last}" if others else last
    by = f" of {AUTHORS} (Paper{'s' * (len(papers) > 1)} {of})" if papers else ""
    return f"{before}{lead}{by} {_where(records)}: {words}.{checked}"


def _where(records: Sequence[Record]) -> str:
    """On which prompts, or in how many models and runs."""
    if len(records) > 1:
        models, sources = (
            {str(facts["name"]) for facts in part if "name" in facts}
            for part in ([r.subject for r in records], [r.source for r in records])
        )
        if len(models) == 1 and len(sources) == len(records):
            pooled = any(r.source.get("kind") == POOLED for r in records)
            return f"on {len(records) - 1} processes" if pooled else f"on {len(records)} sets of prompts"
        return f"in {len(records)} {'models' if len(models) == len(records) and len(sources) == 1 else 'runs'}"
    (record,) = records
    if any(h.rule.counts == "training runs" for measured in record.results.values() for h in measured.estimates):
        return "in these trainings"
    n, clusters = sizes(record.prompts)
    if not n:
        return "in this run"
    noun = "sequences" if record.source.get("kind") == "task" else "prompts"
    of = f" from {number_of(clusters, clusters_of(record.source, n, clusters))}" if clusters < n else ""
    return f"on {n:,} {noun}{of}" if n > 1 else f"on one {noun.removesuffix('s')}"


def findings(every: Sequence[Row], records: Sequence[Record] = (), most: int = SHOWN) -> list[str]:
    """The first findings: decided claims before open ones, the largest effects first; then what was not measured.

    Claims that pool several records come before all others, and one more finding is shown then.
    """
    groups = claims(distinct(every))
    names = heads(groups)
    ranked = sorted(groups, key=lambda group: min(map(_rank, group)))
    of_all = {str(record.source.get("name")) for record in records if record.source.get("kind") == POOLED}
    pooled = [group for group in ranked if group[0].record in of_all]
    ranked, most = [*pooled, *(group for group in ranked if group not in pooled)], most + bool(pooled)
    several = len({row.record for row in every}) > 1
    sentences = []
    for group in ranked[:most]:  # by the run where the effect is largest, and its words elsewhere
        row = min(group, key=_rank)
        on = f" on {row.record}" * (several and len(group) > 1)
        others = [f"{other.word} on {other.record}" for other in group if other.word != row.word]
        text = sentence(row, names[row.key], on)
        sentences.append(text + f" Elsewhere: {', '.join(others)}." * bool(others))
    said = []
    for record in records:  # the verdict on the label whose direction was edited, as the direction's file carries it
        axis = record.facts.get("axis")
        if isinstance(axis, dict) and "read" in axis:
            read = Estimate.of(axis["read"]["claim"])
            row = Row("", "label", read, read.why, counts="prompts" if read.n == read.clusters else "clusters")
            there = f"At the direction's place, {axis['place']}: {short(axis['read']['score'])}."
            said.append(f"Label “{axis['label']}”. {sentence(row, row.head)} {there}")
    missing = [f"Not measured: {what}, because {why}." for what, why in lacking(records)]
    ordered = told(records) + sentences[: len(pooled)] + said + sentences[len(pooled) :] + missing
    return [visible(text) for text in ordered[:most]]


def _rank(row: Row) -> tuple[bool, bool, float]:
    """Open claims late, checks of the instrument last, and within each part the largest effect over margin first."""
    return row.probe in CHECKS, row.word == "open", -abs(row.distance)


def sentence(row: Row, head: str, on: str = "") -> str:
    """A claim with its paper; the value and its control; then what they show."""
    h, paper = row.estimate, f" ({AUTHORS}, {row.paper})" if row.paper else ""
    measured = f"{pretty(h.rule.noun or h.name)} is {value_of(h)}{on} (n = {row.clusters})"
    control, called = h.controls[0], h.controls[0].name
    if n := control.draws:
        called = f"{n} {DRAWN.get(called, (f'draw of “{called}”', f'draws of “{called}”'))[n > 1]}"
    elif control.low == control.high and called[:1].isdigit():
        called = "the control is"
    apart = f" on the same prompts, a difference of {difference_of(h)}" if h.paired else ""
    beside = f"{called} {control_of(h)}" if called == "the control is" else f"{pretty(called)}: {control_of(h)}{apart}"
    return f"{head}{paper}: {measured}; {beside}. {_shown(row)}."


def _shown(row: Row) -> str:
    """What a value beside its control shows, by its word."""
    h = row.estimate
    more = f"{short(h.rule.effect)}{unit(h)}"
    way, other = ("above", "below") if h.rule.side == "upper" else ("below", "above")
    if row.word == "open":
        return f"Open: {pretty(because(h, row.counts))}"
    if h.rule.equivalence:
        return f"{'Within' if row.word == 'holds' else 'Beyond'} the {more} that the claim allows"
    if row.word == "opposite":
        return f"The opposite of the claim: it lies {other} every control"
    if row.word == "ruled out":
        ruled_out = f"It lies {other} this control: the claim is ruled out"
        return f"An excess of {more} is ruled out" if h.excess.room else ruled_out
    if row.word == "holds":
        return f"It lies {way} every control, and {more} beyond is not excluded"
    if not h.excess.room:
        return f"It lies {way} every control, which leave no room for the {more} claimed"
    return f"It lies {way} every control, by less than the {more} claimed"


def told(records: Sequence[Record]) -> list[str]:
    """What is the case, in a probe's own sentence; of several records, that of the one that pools the others, or of two
    both."""
    every = [(r.source, m.facts[SENTENCE]) for r in records for m in r.results.values() if SENTENCE in m.facts]
    if pooled := [text for source, text in every if source.get("kind") == POOLED]:
        return pooled
    if len(records) > 2:
        return []
    return [f"On {source.get('name')}: {text}" if len(records) > 1 else text for source, text in every]
