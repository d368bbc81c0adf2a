"""Do two models differ on the same prompts? Records compared metric by metric and curve by curve; loads no model."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, islice
from typing import Any, Literal, get_args

import numpy as np

from llmgeom.errors import UserError
from llmgeom.files import digest
from llmgeom.record import Record
from llmgeom.reports.comparable import check, settings
from llmgeom.reports.similarity import MEASURES, Similarity, similarities
from llmgeom.reports.text import columns, grid, independent, names_of, number_of, numbers, visible, wrapped
from llmgeom.result import Estimate
from llmgeom.stats import tests
from llmgeom.stats.resampling import Deletions, Interval, student_quantile

ALPHA, LEVEL = 0.05, 0.95
SHORT, WIDTH = 19, 100  # lines of a comparison on a terminal, and characters of a line
Method = Literal["paired", "unpaired"]
Word = Literal["differs", "differs, less than the effect", "equivalent", "undecided"]
SAID = {
    "differs": ("differs", "differ"),
    "differs, less than the effect": ("differs by less than the effect", "differ by less than the effect"),
    "equivalent": ("is equivalent", "are equivalent"),
    "undecided": ("is undecided", "are undecided"),
}
# Two records are equivalent within this share of the effect that a claim declares: an effect says what is worth a
# claim about one model, which is no margin for calling two models the same.
MARGIN = 1 / 3
WIDTHS = ("d_model", "kv_heads", "head_dim")
TESTS = (
    "p = 0: no difference; p beyond: one of a third of the declared effect or more; both by Holm over all rows. A "
    "difference whose interval excludes 0 is never equivalent"
)
UNPAIRED = (
    "unpaired: from the two stored intervals as if their errors were independent; on the same prompts these are as a "
    "rule positively correlated, and then interval and p are conservative"
)
SIMILAR = (
    "CKA and RSA: p is against permuted clusters and says that the places are not unrelated; those of untrained models "
    "that read the same tokens need not be unrelated either"
)
STRATIFIED = (
    "the prompts were spread evenly over the entropy of {}: that widens its range there and favours what follows it; "
    "prompts chosen without regard to entropy (--prompts FILE) favour no model"
)


@dataclass(frozen=True)
class Difference:
    """One metric of two records.

    Attributes:
        ours, theirs: the value in the reference and in the other record. value: theirs less ours. low, high: its 95 %
            interval, for this row alone; error: its standard error. All in `unit`.
        method: paired: the jackknife of the difference, from both values without each cluster. unpaired: error^2 is
            the sum of those of the two intervals, as if independent.
        margin: MARGIN of `effect`, the claim's.
        p, p_within, p_less: of no difference; of one of `margin` or more, and of one of `effect` or more, by two
            one-sided tests. Student's t, then Holm over all rows of the comparison.
        counts: what `clusters` counts, e.g. templates.
        needed: clusters at which a true difference of `effect` is found with power 90 %, whatever the other rows say
            (Bonferroni's level).
        verdict: differs: p < .05; if p_less < .05, it is less than the effect. equivalent: p_within < .05, and the
            interval of this row alone includes 0. Else undecided.
    """

    probe: str
    metric: str
    unit: str
    ours: float
    theirs: float
    value: float
    low: float
    high: float
    error: float
    method: Method
    clusters: int
    effect: float
    p: float
    p_within: float
    p_less: float
    margin: float
    counts: str = "clusters"
    needed: int = 0
    verdict: Word = "undecided"
    why: str = ""


@dataclass(frozen=True)
class CurveDifference:
    """A curve of two records: [place] theirs minus ours, with a paired 95 % interval at each place separately."""

    probe: str
    name: str
    meaning: str
    unit: str
    axis: str
    places: tuple
    value: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True)
class Pair:
    """A record less the reference; notes: what to know of this pair; left_out: what was not compared, and why.

    `counted` and `findings` say in sentences what was found: how many numbers differ, and the largest differences.
    """

    reference: str
    record: str
    differences: tuple[Difference, ...]
    curves: tuple[CurveDifference, ...]
    similarities: tuple[Similarity, ...]
    notes: tuple[str, ...]
    left_out: tuple[str, ...]
    counted: str = ""
    findings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """Records of the same prompts; the first is the reference of every pair."""

    prompts: int
    clusters: int
    texts: str
    pairs: tuple[Pair, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Tables for a terminal, safe to print."""
        return list(map(visible, _lines(self)))

    def brief(self) -> list[str]:
        """Lines of at most WIDTH characters: of each pair how many numbers differ, its notes, and the numbers."""
        lines: list[str] = []
        for pair in self.pairs:
            lines += ["", *textwrap.wrap(visible(pair.counted), WIDTH)]
            lines += [line for note in pair.notes for line in textwrap.wrap(f"note: {visible(note)}", WIDTH)]
            rows = _brief(pair, WIDTH)
            room = max(SHORT // len(self.pairs) - 8, 4)
            lines += ["", *(line for row in rows[:room] for line in row)]
            lines += [f"and {len(rows) - room} more (--table)"] if len(rows) > room else []
            alike = (
                f"{one.of} ({one.probe}): {one.value:.2f} [{one.low:.2f}, {one.high:.2f}]"
                for one in pair.similarities[:2]
            )
            lines += [line for text in alike for line in wrapped(text, WIDTH)]
            if left := len(pair.left_out):
                lines.append(f"{left} number{'s' * (left > 1)} could not be compared (--table says why)")
        return lines[1:]


def compare(records: Sequence[Record], folders: Sequence[str] = ()) -> Comparison:
    """Every record less the first. Two models have two tokenizers, so prompts are the same where their texts are.

    Args:
        records: two or more.
        folders: where each lies, for the sentence of a refusal; else it names the models.

    Raises:
        UserError: fewer than two records; two revisions of a model with the same weights; or the first of these that
            differs: texts in order, their clusters, claims, draws of the controls, seed, the label and how it is read.
    """
    if len(records) < 2:
        raise UserError(f"{len(records)} run was given, a comparison needs two or more: llmgeom report RUN RUN")
    labels, first = labelled(records), records[0]
    others = list(zip(labels, records, strict=True))[1:]
    names = folders or labels
    for name, other in zip(names[1:], records[1:], strict=True):
        check(names[0], first, name, other, bool(folders))
    pairs = [_pair(labels[0], first, label, other) for label, other in others]
    judged = _judged([d for pair in pairs for d in pair.differences])
    return Comparison(
        prompts=len(first.prompts["text"]),
        clusters=len(set(first.prompts["template"])),
        texts=digest(list(first.prompts["text"])),
        pairs=tuple(
            _found(replace(pair, differences=tuple(islice(judged, len(pair.differences)))), first.prompts["text"])
            for pair in pairs
        ),
        notes=tuple(_notes(labels, records, pairs)),
    )


def labelled(records: Sequence[Record]) -> list[str]:
    """The model of each record; of several alike with the revision, or else the place."""
    names = [str(record.subject["name"]) for record in records]
    revisions = [str(record.subject.get("revision") or "") for record in records]
    full = [f"{name} @ {revision}" if revision else name for name, revision in zip(names, revisions, strict=True)]
    return [
        name if names.count(name) == 1 else long if full.count(long) == 1 else f"{name} (run {i})"
        for i, (name, long) in enumerate(zip(names, full, strict=True), 1)
    ]


def _pair(reference: str, first: Record, label: str, other: Record) -> Pair:
    differences: list[Difference] = []
    curves: list[CurveDifference] = []
    alike: list[Similarity] = []
    left_out: list[str] = []
    for probe in sorted(first.results.keys() | other.results.keys()):
        absent = [(who, r) for who, r in ((reference, first), (label, other)) if probe not in r.results]
        for who, record in absent:
            left_out.append(f"{probe}: not measured in {who}: {record.unmeasured.get(probe, 'not asked for')}")
        if absent:
            continue
        ours, theirs = ({h.name: h for h in r.results[probe].estimates} for r in (first, other))
        for name in dict.fromkeys((*ours, *theirs)):
            if name not in ours or name not in theirs:
                left_out.append(f"{probe}: {name}: not measured in {label if name in ours else reference}")
            elif not ours[name].effect > 0:
                left_out.append(f"{probe}: {name}: declares no effect of interest to compare with; scan again")
            else:
                counts = independent(ours[name], first.source, first.prompts)
                differences.append(replace(_difference(probe, ours[name], theirs[name]), counts=counts))
        curves += _curves(probe, first, other)
        for measure in MEASURES:
            try:
                alike += similarities(probe, measure, first, other)
            except UserError as refusal:
                left_out.append(f"{probe}: {measure}: not measured, because {refusal}")
    notes = (*settings(reference, first, label, other), *_arithmetic(first, other, differences))
    return Pair(reference, label, tuple(differences), tuple(curves), tuple(alike), notes, tuple(left_out))


def _arithmetic(first: Record, other: Record, differences: Sequence[Difference]) -> Iterator[str]:
    """A caution where vectors of the two models have different numbers of coordinates."""
    sizes = [(name, first.subject.get(name), other.subject.get(name)) for name in WIDTHS]
    unlike = [f"{name} is {theirs} against {ours}" for name, ours, theirs in sizes if ours != theirs]
    if unlike and differences:
        yield (
            f"{', '.join(unlike)}: shares of components, dimensions, cosines and R2 of vectors depend on the number of "
            "coordinates, so that their differences are partly arithmetic; rank correlations and bits do not"
        )


def _difference(probe: str, ours: Estimate, theirs: Estimate) -> Difference:
    method: Method
    value, clusters = theirs.value - ours.value, max(min(ours.clusters, theirs.clusters), 2)
    if (without := _together(theirs.deletions, ours.deletions)) is not None:
        # Student's t counts the groups that were left out; `clusters` those that a reader can add to.
        error, units, method = without.error, without.units, "paired"
    else:
        # One end may be cut off (|rho| at 0, a share at 1): the longer half of an interval is the honest one.
        halves = [(max(h.value - h.low, h.high - h.value), h.units or max(h.clusters, 2)) for h in (ours, theirs)]
        error = math.hypot(*(half / student_quantile(n, LEVEL) for half, n in halves))
        units, method = min(n for _, n in halves), "unpaired"
    half, effect = student_quantile(units, LEVEL) * error, ours.effect
    low, high = value - half, value + half
    p = max(tests.two_sided_p(value, error, units), tests.LEAST_P)
    interval, margin = Interval(low, high, LEVEL, method, float(units)), MARGIN * effect
    within, less = (tests.equivalence_p(value, interval, -end, end, clusters) for end in (margin, effect))
    widest = ours.widest or math.inf
    span = (ours.value, theirs.value, value, max(low, -widest), min(high, widest), error)
    return Difference(probe, ours.name, ours.unit, *span, method, clusters, effect, p, within, less, margin)


def _together(theirs: Deletions | None, ours: Deletions | None) -> Deletions | None:
    """The deletions of the difference; None where the two left out different rows, or one was no jackknife."""
    if theirs is None or ours is None or theirs.groups != ours.groups or theirs.without.shape != ours.without.shape:
        return None
    return theirs.less(ours)


def _curves(probe: str, first: Record, other: Record) -> Iterator[CurveDifference]:
    """The curves that both records hold without each group of clusters too: NAME and NAME_without [place way group]."""
    ours, theirs = first.results[probe], other.results[probe]
    for name, declared in ours.quantities.items():
        without = [m.arrays.get(f"{name}_without") for m in (ours, theirs)]
        if without[0] is None or without[1] is None or without[0].shape != without[1].shape:
            continue
        lost = [next((h.deletions for h in m.estimates if h.deletions), None) for m in (ours, theirs)]
        axis = declared.axes[0]
        places = ours.ticks.get(axis, tuple(range(len(without[0]))))
        if not (lost[0] and lost[1]) or lost[0].groups != lost[1].groups or places != theirs.ticks.get(axis, places):
            continue
        value = theirs.arrays[name] - ours.arrays[name]
        errors = [replace(lost[0], without=way).error for way in without[1] - without[0]]
        half = student_quantile(lost[0].units, LEVEL) * np.array(errors)
        ends = (tuple(x.tolist()) for x in (value, value - half, value + half))
        yield CurveDifference(probe, name, declared.meaning, declared.unit, axis, tuple(places), *ends)


def _judged(raw: Sequence[Difference]) -> Iterator[Difference]:
    names = ("p", "p_within", "p_less")
    adjusted = zip(*(tests.holm([getattr(d, name) for d in raw]).tolist() for name in names), strict=True)
    over, alpha = f"by Holm over {len(raw)} rows", ALPHA / max(len(raw), 1)
    for d, corrected in zip(raw, adjusted, strict=True):
        sd = max(d.error * d.clusters**0.5, 1e-12)
        needed = tests.needed_n_mean(d.effect, sd, 0.9, 1 - alpha)
        d = replace(d, **dict(zip(names, corrected, strict=True)), needed=needed)
        verdict, size = _word(d), f"{d.effect:.3g} {d.unit}".rstrip()
        why = f"p = {d.p:.2g} of no difference and {d.p_less:.2g} of {size} or more, {over}"
        if verdict == "equivalent":
            why = f"p = {d.p_within:.2g} of a difference of {d.margin:.3g} {d.unit} or more, {over}"
        elif verdict == "undecided" and d.p_less < ALPHA:
            why = f"less than {size}, p = {d.p_less:.2g}; 0 and {d.margin:.3g} are both possible"
        elif verdict == "undecided":
            lacking = f"needs n >= {needed:,} {d.counts} for {size}, has {d.clusters:,}"
            enough = f"{number_of(d.clusters, d.counts)} suffice for {size} (n >= {needed:,}) in nine of ten runs"
            why = lacking if d.clusters < needed else enough
        yield replace(d, verdict=verdict, why=why)


def _word(d: Difference) -> Word:
    """By interval: a difference that excludes 0 is never equivalent, not even before the correction."""
    if d.p < ALPHA:
        return "differs, less than the effect" if d.p_less < ALPHA else "differs"
    return "equivalent" if d.p_within < ALPHA and d.low <= 0 <= d.high else "undecided"


def _found(pair: Pair, prompts: Sequence[str]) -> Pair:
    """The pair with its sentences: a count of every word, and the largest difference of each of three probes."""
    count = {word: sum(d.verdict == word for d in pair.differences) for word in get_args(Word)}
    words = [f"{n} {SAID[word][n > 1]}" for word, n in count.items() if n]
    both = f"{pair.record} against {pair.reference} on the same {len(prompts)} prompts"
    counted = f"{both}: of {len(pair.differences)} numbers {', '.join(words)}." if words else f"{both}."
    largest = sorted(
        (d for d in pair.differences if d.verdict.startswith("differs")), key=lambda d: -abs(d.value / d.effect)
    )
    findings = []
    for d in list({d.probe: d for d in reversed(largest)}.values())[::-1][:3]:
        value, low, high = numbers(d.value, d.low, d.high)
        difference = f"difference {value} [{low}, {high}] {d.unit}".rstrip()
        theirs = f"{d.theirs:.3g} in {pair.record}, {d.ours:.3g} in {pair.reference}"
        n = number_of(d.clusters, d.counts)
        findings.append(f"{d.probe.replace('_', ' ')}, {d.metric}: {theirs}; {difference} (n = {n}).")
    return replace(pair, counted=counted, findings=tuple(findings))


def _notes(labels: Sequence[str], records: Sequence[Record], pairs: Sequence[Pair]) -> Iterator[str]:
    chose = [label for label, record in zip(labels, records, strict=True) if record.source.get("stratified")]
    if chose:
        yield STRATIFIED.format(" and ".join(chose))
    if any(d.method == "unpaired" for pair in pairs for d in pair.differences):
        yield UNPAIRED
    if any(pair.similarities for pair in pairs):
        yield SIMILAR


# ---- for a terminal -------------------------------------------------------------------------------------------------


def _lines(c: Comparison) -> Iterator[str]:
    yield f"{c.prompts} prompts of {c.clusters} clusters, sha256 of the texts {c.texts[:12]}"
    for pair in c.pairs:
        yield from ("", pair.counted, *(f"- {text}" for text in pair.findings))
        rows: list[tuple[str, ...]] = []
        for probe, group in groupby(pair.differences, key=lambda d: d.probe):
            rows += [(f"[{probe}]", *[""] * 8), *map(_row, group)]
        head = (pair.reference, pair.record, "difference", "95 % interval", "method", "p = 0", "p beyond", "verdict")
        yield from grid(f"{pair.record} less {pair.reference}", head, rows)
        yield from map(_curve_line, pair.curves)
        yield from pair.notes
        rows = [
            (f"{s.probe}: {s.of}", f"{s.value:.2f}", f"{s.low:.2f} to {s.high:.2f}",
             f"{s.null_low:.2f} to {s.null_high:.2f}", f"{s.p:.2g}", f"{s.n} prompts, {s.clusters} clusters")
            for s in pair.similarities
        ]  # fmt: skip
        title = f"similarity of representations, {pair.record} and {pair.reference}"
        yield from grid(title, ("value", "95 % interval", "permuted clusters", "p", "n"), rows)
        yield from (f"not compared: {sentence}" for sentence in pair.left_out)
    yield from ("", f"note: {TESTS}", *(f"note: {note}" for note in c.notes))


def _brief(pair: Pair, width: int) -> list[list[str]]:
    """The heads, and lines for each number; those that differ come first, the undecided ones last."""
    order = get_args(Word)
    ranked = sorted(pair.differences, key=lambda d: order.index(d.verdict))
    cells = [
        (d.verdict, visible(name), f"{d.ours:.3g}", f"{d.theirs:.3g}", _with_interval(d))
        for name, d in zip(names_of([(d.probe, d.metric) for d in ranked]), ranked, strict=True)
    ]
    titles = ("", "number", pair.reference, pair.record, "difference [95 %]")
    return columns([titles, *cells], 1, width) if cells else []


def _with_interval(d: Difference) -> str:
    value, low, high = numbers(d.value, d.low, d.high)
    return f"{value} [{low}, {high}]"


def _row(d: Difference) -> tuple[str, ...]:
    value, low, high = numbers(d.value, d.low, d.high)
    span = (f"{d.ours:.3g}", f"{d.theirs:.3g}", value, f"{low} to {high}", d.method, f"{d.p:.2g}", f"{d.p_within:.2g}")
    lacking = (
        f" (needs n >= {d.needed} {d.counts})"
        if d.verdict == "undecided" and d.clusters < d.needed and d.p_less >= ALPHA
        else ""
    )
    return (d.metric, *span, d.verdict + lacking)


def _curve_line(c: CurveDifference) -> str:
    """The place with the largest difference, as a description: it was selected, so it is not a test."""
    i = int(np.abs(c.value).argmax())
    value, low, high = numbers(c.value[i], c.low[i], c.high[i])
    where = f"{len(c.value)} {c.axis}s, largest at {c.axis} {c.places[i]}"
    return f"curve {c.probe}.{c.name}: {where}, {value} [{low}, {high}] {c.unit} (of this place alone)"
