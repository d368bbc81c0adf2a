"""Do models hold their uncertainty differently? Records of the same prompts, compared without loading a model."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, islice
from typing import Any, Literal

import numpy as np

from llmgeom.errors import UserError
from llmgeom.record import Record
from llmgeom.reports.text import grid, numbers, visible
from llmgeom.result import Estimate
from llmgeom.stats import tests
from llmgeom.stats.resampling import Interval, band, jackknife, permute_clusters, student_quantile
from llmgeom.stats.similarity import alignment, cka, distance_ranks, rsa

ALPHA, LEVEL = 0.05, 0.95
PERMUTATIONS = 1999
AGREES = 1e-3  # records keep entropy to six decimals: the ties that makes among ranks move a rho by less than this
RHO, ORDER, R2 = "|rho| of PC1 and entropy", "order along the curve", "entropy decodability (held-out R2)"
VALUES, FOCUS, KEYS = "value_manifold", "attention_focus", "key_orthogonality"
SHARE, WRITE = "PC1+PC2 share", "attention write: "

Measure = Literal["CKA", "RSA"]
Method = Literal["paired", "unpaired"]
Word = Literal["differs", "equivalent", "undecided"]
# Metrics that stored arrays give again: |Spearman| of the array's first column and the record's entropy.
PLACES = {(VALUES, RHO): "scores", (VALUES, ORDER): "unrolled", (VALUES, WRITE + RHO): "attention_write_scores"}
# What Paper III takes to change with the kind of attention ("dynamic") and what not: title -> probe and metric.
SIGNATURES = {
    "dynamic": {
        "focusing": (FOCUS, "focusing"),
        "without first": (FOCUS, "focusing without the first token"),
        "monotonicity": (FOCUS, "monotonicity"),
    },
    "static": {
        "values PC1+2": (VALUES, SHARE),
        "values |rho|": (VALUES, RHO),
        "values R2": (VALUES, R2),
        "writes PC1+2": (VALUES, WRITE + SHARE),
        "writes |rho|": (VALUES, WRITE + RHO),
        "writes R2": (VALUES, WRITE + R2),
        "W_K columns": (KEYS, "columns of W_K"),
        "token keys": (KEYS, "token keys, by head"),
    },
}
# On how many coordinates the numbers of a probe depend, rank correlations excepted.
WIDTHS = {VALUES: ("kv_heads", "head_dim"), KEYS: ("kv_heads", "head_dim", "d_model")}
TESTS = "p = 0: no difference; p beyond: one of the declared effect or more; both by Holm over all rows"
UNPAIRED = (
    "unpaired: from the two stored intervals as if their errors were independent; on the same prompts these are as a "
    "rule positively correlated, and then interval and p are conservative"
)
SIMILAR = (
    "CKA and RSA: p is against permuted units and says that the places are not unrelated; those of untrained models "
    "that read the same tokens need not be unrelated either"
)
STRATIFIED = (
    "the prompts were spread evenly over the entropy of {}: that widens its range there and favours what follows it; "
    "prompts chosen without regard to entropy (--prompts FILE) favour no model"
)


@dataclass(frozen=True)
class Difference:
    """One metric of two records.

    ours, theirs  as the reference and the other record print it. value: theirs less ours. low, high: 95 % interval of
                  it, for this row alone; error: its standard error. All in `unit`.
    method        paired: both recomputed from stored arrays on the same rows, jackknife of the difference over units.
                  unpaired: error^2 is the sum of those of the two stored intervals, as if independent.
    p, p_within   of no difference; of one of `effect` (the claim's) or more, by two one-sided tests. Student's t with
                  units - 1 degrees of freedom, then Holm over all rows of the comparison.
    needed        units at which, with power 90 % each and whatever the other rows say, a true difference of `effect`
                  is found, and none is called equivalent (Bonferroni's level).
    verdict       equivalent: p_within < .05. differs: p < .05, and not equivalent. Else undecided.
    note          where the two have different numbers of coordinates, so that a difference is partly arithmetic.
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
    note: str
    needed: int = 0
    verdict: Word = "undecided"
    why: str = ""


@dataclass(frozen=True)
class Similarity:
    """How alike two records place the same prompts: 1 where places are equal up to rotation and scale (RSA: where the
    distances have one order), about 0 where they are unrelated.

    components  how many of the probe's `array` [prompt component] the reference and the other record hold; `of` says so
                in words: nothing is said of those that are not stored.
    low, high   95 % jackknife interval over units, Fisher's scale. null_low, null_high: 95 % of the permutations of
                units; p one-sided against these, with the +1 rule.
    """

    probe: str
    array: str
    measure: Measure
    components: tuple[int, int]
    value: float
    low: float
    high: float
    null_low: float
    null_high: float
    p: float
    n: int
    clusters: int
    of: str


@dataclass(frozen=True)
class Pair:
    """A record against the reference; left_out: a sentence for each thing that was not compared."""

    reference: str
    record: str
    differences: tuple[Difference, ...]
    similarities: tuple[Similarity, ...]
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class Architecture:
    """A record's kind of attention, its window (tokens, as the config says) and, by title, [value, low, high] of its
    SIGNATURES."""

    record: str
    attention: str
    window: str
    dynamic: Mapping[str, tuple[float, float, float]]
    static: Mapping[str, tuple[float, float, float]]


@dataclass(frozen=True)
class Comparison:
    """All that is said of records of the same prompts; the first is the reference of every pair."""

    prompts: int
    clusters: int
    texts: str
    pairs: tuple[Pair, ...]
    architectures: tuple[Architecture, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Tables for a terminal, safe to print."""
        return list(map(visible, _lines(self)))


def compare(records: Sequence[Record]) -> Comparison:
    """Every record against the first. Two models have two tokenizers, so prompts are the same where their texts are.

    UserError for fewer than two records, and naming the first of these that differs: texts in order, their units,
    claims, draws of the nulls, seed. (`Record.load` has already refused another schema.)
    """
    if len(records) < 2:
        raise UserError(f"{len(records)} run was given, a comparison needs two or more: llmgeom report RUN RUN")
    names, first = [str(record.subject["name"]) for record in records], records[0]
    labels = [f"{name} (run {i})" if names.count(name) > 1 else name for i, name in enumerate(names, 1)]
    others = list(zip(labels, records, strict=True))[1:]
    for label, other in others:
        _check(labels[0], first, label, other)
    pairs = [_pair(labels[0], first, label, other) for label, other in others]
    judged = _judged([d for pair in pairs for d in pair.differences])
    return Comparison(
        prompts=len(first.prompts["text"]),
        clusters=len(set(first.prompts["template"])),
        texts=_hash(first.prompts["text"]),
        pairs=tuple(replace(pair, differences=tuple(islice(judged, len(pair.differences)))) for pair in pairs),
        architectures=tuple(map(_architecture, labels, records)),
        notes=tuple(_notes(labels, records, pairs)),
    )


def _check(reference: str, first: Record, label: str, other: Record) -> None:
    for name, read, remedy in (
        ("prompt texts", lambda r: _hash(r.prompts["text"]), ""),
        ("template units", lambda r: _hash(r.prompts["template"]), ""),
        ("claims_hash", lambda r: r.facts.get("claims_hash"), ", and that one too, in one version of llmgeom"),
        ("nulls", lambda r: r.facts.get("nulls"), " and --nulls {}"),
        ("seed", lambda r: r.facts.get("seed"), " and --seed {}"),
    ):
        ours, theirs = read(first), read(other)
        if ours != theirs:
            raise UserError(
                f"{label} cannot be compared with {reference}: {name} {str(theirs)[:12]}, expected {str(ours)[:12]}; "
                f"scan it again with --prompts-from RUN, the folder of {reference}{remedy.format(ours)}"
            )


def _hash(column: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(list(column)).encode()).hexdigest()


def _pair(reference: str, first: Record, label: str, other: Record) -> Pair:
    differences: list[Difference] = []
    similarities: list[Similarity] = []
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
                differences.append(_difference(probe, ours[name], first, theirs[name], other))
        for measure, similarity in MEASURES.items():
            try:
                similarities += _similarity(probe, measure, similarity, first, other)
            except UserError as refusal:
                left_out.append(f"{probe}: {measure}: not measured, because {refusal}")
    return Pair(reference, label, tuple(differences), tuple(similarities), tuple(left_out))


# ---- differences ----------------------------------------------------------------------------------------------------


def _difference(probe: str, ours: Estimate, first: Record, theirs: Estimate, other: Record) -> Difference:
    method: Method
    a, b = _again(first, probe, ours), _again(other, probe, theirs)
    if a and b:
        labels, rows = first.prompts["template"], np.arange(len(first.prompts["text"]))
        value, clusters, method = b(rows) - a(rows), len(set(labels)), "paired"
        over = jackknife(lambda kept: b(kept) - a(kept), rows, labels)
        error = (over.high - over.low) / 2 / student_quantile(clusters, LEVEL)
    else:
        # One end may be cut off (|rho| at 0, a share at 1): the longer half of an interval is the honest one.
        halves = [(max(h.value - h.low, h.high - h.value), max(h.clusters, 2)) for h in (ours, theirs)]
        error = math.hypot(*(half / student_quantile(clusters, LEVEL) for half, clusters in halves))
        value, clusters, method = theirs.value - ours.value, min(clusters for _, clusters in halves), "unpaired"
    half = student_quantile(clusters, LEVEL) * error
    low, high, effect = value - half, value + half, ours.effect
    p = max(tests.two_sided_p(value, error, clusters), tests.LEAST_P)
    p_within = tests.equivalence_p(value, Interval(low, high, LEVEL, method), -effect, effect, clusters)
    widths = ("d_model",) if ours.name.startswith(WRITE) else WIDTHS.get(probe, ())
    sizes = [" x ".join(str(r.subject.get(name)) for name in widths) for r in (first, other)]
    arithmetic = "rho" not in ours.unit and sizes[0] != sizes[1]
    note = f"partly arithmetic: {' x '.join(widths)} is {sizes[1]} against {sizes[0]}" if arithmetic else ""
    found = (ours.value, theirs.value, value, low, high, error)
    return Difference(probe, ours.name, ours.unit, *found, method, clusters, effect, p, p_within, note)


def _again(record: Record, probe: str, h: Estimate) -> Callable[[np.ndarray], float] | None:
    """The metric as a function of rows, in the direction that all rows have; None where arrays do not give it."""
    place = record.results[probe].arrays.get(PLACES.get((probe, h.name), ""))
    entropy = np.array(record.prompts["entropy"])
    if place is None or len(place) != len(entropy):
        return None
    whole = tests.spearman(place[:, 0], entropy)
    if abs(abs(whole) - h.value) > AGREES:
        return None
    return lambda rows: math.copysign(1, whole) * tests.spearman(place[rows, 0], entropy[rows])


def _judged(raw: Sequence[Difference]) -> Iterator[Difference]:
    adjusted, within = tests.holm([d.p for d in raw]).tolist(), tests.holm([d.p_within for d in raw]).tolist()
    over, alpha = f"by Holm over {len(raw)} rows", ALPHA / max(len(raw), 1)
    for d, p, p_within in zip(raw, adjusted, within, strict=True):
        sd = max(d.error * d.clusters**0.5, 1e-12)
        # The two one-sided tests must both be won, each at alpha.
        needed = max(tests.needed_n_mean(d.effect, sd, *asked) for asked in ((0.9, 1 - alpha), (0.95, 1 - 2 * alpha)))
        why = f"p = {p:.2g} of no difference and {p_within:.2g} of {d.effect:g} {d.unit} or more, {over}"
        verdict: Word = "equivalent" if p_within < ALPHA else "differs" if p < ALPHA else "undecided"
        if verdict == "undecided":
            enough = f"{d.clusters} units suffice for {d.effect:g} {d.unit} (n >= {needed}); less is not excluded"
            why = (
                f"needs n >= {needed} units for {d.effect:g} {d.unit}, has {d.clusters}"
                if d.clusters < needed
                else enough
            )
        yield replace(d, p=p, p_within=p_within, needed=needed, verdict=verdict, why=why)


# ---- similarities ---------------------------------------------------------------------------------------------------


MEASURES: dict[Measure, Callable[[np.ndarray, np.ndarray], float]] = {"CKA": cka, "RSA": rsa}


def permuted(
    measure: Measure, x: np.ndarray, y: np.ndarray, clusters: Sequence, permutations: int, seed: int
) -> np.ndarray:
    """[draw] similarities of x with y whose clusters have changed places. UserError as `permute_clusters`."""
    orders = permute_clusters(np.random.default_rng(seed), clusters, permutations)
    if measure == "CKA":
        return np.array([cka(x, y[order]) for order in orders])
    a, b = distance_ranks(x), distance_ranks(y)  # ranking 2,775 distances again for each order takes 20 times as long
    return np.array([alignment(a, b[np.ix_(order, order)]) for order in orders])


def _similarity(
    probe: str, measure: Measure, similarity: Callable[[np.ndarray, np.ndarray], float], first: Record, other: Record
) -> list[Similarity]:
    """Of each site, the fullest array of places that both hold, of equals the first by name; nothing without one.

    Places in a control (`control_scores`) are not the models' own and are left out.
    """
    ours, theirs = _places(first, probe), _places(other, probe)
    shared = {name for name in ours.keys() & theirs.keys() if not name.endswith("control_scores")}
    both = sorted((-min(ours[name].shape[1], theirs[name].shape[1]), name) for name in shared)
    # The last assignment wins: the first array of each site, "" where the name says none.
    sites = {name.removesuffix("scores") if name.endswith("_scores") else "": name for _, name in reversed(both)}
    return [
        _similar(probe, name, measure, similarity, ours[name], theirs[name], first) for _, name in sorted(sites.items())
    ]


def _similar(
    probe: str,
    name: str,
    measure: Measure,
    similarity: Callable[[np.ndarray, np.ndarray], float],
    x: np.ndarray,
    y: np.ndarray,
    first: Record,
) -> Similarity:
    clusters, seed = first.prompts["template"], first.facts.get("seed", 0)
    value, null = similarity(x, y), permuted(measure, x, y, clusters, PERMUTATIONS, seed)
    over = jackknife(lambda rows: similarity(x[rows], y[rows]), np.arange(len(x)), clusters, "fisher")
    found = (value, over.low, over.high, *band(null, "upper"), tests.tail_p(value, null))
    few = (x.shape[1], y.shape[1])
    of = f"{measure} of the first {' and '.join(map(str, dict.fromkeys(few)))} components"
    return Similarity(probe, name, measure, few, *found, len(x), len(set(clusters)), of)


def _places(record: Record, probe: str) -> dict[str, np.ndarray]:
    """The probe's arrays [prompt component], of one row a prompt."""
    found, n = record.results[probe], len(record.prompts["text"])
    shaped = [name for name, q in found.quantities.items() if len(q.axes) == 2 and q.axes[0] == "prompt"]
    return {name: found.arrays[name].astype(np.float64) for name in shaped if len(found.arrays[name]) == n}


# ---- architectures, notes and tables --------------------------------------------------------------------------------


def kind(heads: int, kv_heads: int) -> str:
    """MHA where every query head has keys and values of its own, MQA where all share one pair, else GQA r:1."""
    return "MHA" if heads == kv_heads else "MQA" if kv_heads == 1 else f"GQA {heads / kv_heads:g}:1"


def _architecture(label: str, record: Record) -> Architecture:
    facts, longest = record.subject, max(record.prompts["tokens"])
    attention = kind(facts["heads"], facts["kv_heads"]) if facts.get("kv_heads") else "not recorded"
    window = "none" if not facts.get("window") else f"{facts['window']}{', inactive' * (longest <= facts['window'])}"
    found = {(probe, h.name): (h.value, h.low, h.high) for probe, m in record.results.items() for h in m.estimates}
    held = [{t: found[place] for t, place in titles.items() if place in found} for titles in SIGNATURES.values()]
    return Architecture(label, attention, window, *held)


def _notes(labels: Sequence[str], records: Sequence[Record], pairs: Sequence[Pair]) -> Iterator[str]:
    chose = [label for label, record in zip(labels, records, strict=True) if record.source.get("stratified")]
    if chose:
        yield STRATIFIED.format(" and ".join(chose))
    if any(d.method == "unpaired" for pair in pairs for d in pair.differences):
        yield UNPAIRED
    if any(pair.similarities for pair in pairs):
        yield SIMILAR


def _lines(c: Comparison) -> Iterator[str]:
    yield f"{c.prompts} prompts of {c.clusters} units, sha256 of the texts {c.texts[:12]}"
    for pair in c.pairs:
        rows: list[tuple[str, ...]] = []
        for probe, found in groupby(pair.differences, key=lambda d: d.probe):
            rows += [(f"[{probe}]", *[""] * 8), *map(_row, found)]
        head = (pair.reference, pair.record, "difference", "95 % interval", "method", "p = 0", "p beyond", "verdict")
        yield from grid(f"{pair.record} less {pair.reference}", head, rows)
        yield from (f"† {note}" for note in dict.fromkeys(d.note for d in pair.differences if d.note))
        rows = [
            (f"{s.probe}: {s.of}", f"{s.value:.2f}", f"{s.low:.2f} to {s.high:.2f}",
             f"{s.null_low:.2f} to {s.null_high:.2f}", f"{s.p:.2g}", f"{s.n} prompts, {s.clusters} units")
            for s in pair.similarities
        ]  # fmt: skip
        title = f"places of the prompts in {pair.record} and in {pair.reference}"
        yield from grid(title, ("value", "95 % interval", "95 % of the null", "p", "n"), rows)
        yield from (f"not compared: {sentence}" for sentence in pair.left_out)
    for nature, titles in SIGNATURES.items():
        rows = []
        for a in c.architectures:
            held = getattr(a, nature)
            values = (f"{held[title][0]:.3g}" if title in held else "–" for title in titles)
            rows.append((a.record, a.attention, a.window, *values))
        yield from grid(f"{nature} signatures", ("attention", "window", *titles), rows)
    yield from ("", f"note: {TESTS}", *(f"note: {note}" for note in c.notes))


def _row(d: Difference) -> tuple[str, ...]:
    value, low, high = numbers(d.value, d.low, d.high)
    found = (f"{d.ours:.3g}", f"{d.theirs:.3g}", value, f"{low} to {high}", d.method, f"{d.p:.2g}", f"{d.p_within:.2g}")
    lacking = f" (needs n >= {d.needed} units)" if d.verdict == "undecided" and d.clusters < d.needed else ""
    return (d.metric + " †" * bool(d.note), *found, d.verdict + lacking)
