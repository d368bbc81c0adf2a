"""Do two models differ on the same prompts? Records compared metric by metric and curve by curve; loads no model."""

from __future__ import annotations

import math
import shlex
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Literal

import numpy as np

from llmgeom.errors import UserError
from llmgeom.files import digest
from llmgeom.record import Record
from llmgeom.reports.table import labels
from llmgeom.reports.text import columns, grid, independent, names_of, number_of, numbers, pretty, visible, wrapped
from llmgeom.result import Estimate
from llmgeom.stats import tests
from llmgeom.stats.resampling import Interval, band, jackknife, permute_clusters, student_quantile
from llmgeom.stats.similarity import alignment, cka, distance_ranks, rsa

ALPHA, LEVEL = 0.05, 0.95
SHORT, WIDTH = 19, 100  # lines of a comparison on a terminal, and characters of a line
PERMUTATIONS = 1999
# Two records are equivalent within this share of the effect that a claim declares: an effect says what is worth a
# claim about one model, which is no margin for calling two models the same.
MARGIN = 1 / 3
Word = Literal["differs", "differs, less than the effect", "equivalent", "undecided"]
# Word -> what one number does, and several; its class on the page.
SAID = {
    "differs": ("differs", "differ", "opposite"),
    "differs, less than the effect": ("differs by less than the effect", "differ by less than the effect", "less"),
    "equivalent": ("is equivalent", "are equivalent", "holds"),
    "undecided": ("is undecided", "are undecided", "open"),
}
MEASURES: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {"CKA": cka, "RSA": rsa}
LABEL_FACTS = ("target", "answers", "given", "positions")  # flags of `llmgeom probe`
# Flags that say which model is read, where, on which prompts and what of it is measured: a difference in these is the
# question, or it is refused or left out elsewhere. All others change what a number is.
NO_SETTING = {
    "--model", "--revision", "--device", "--device-map", "--offline", "--trust-remote-code", "--batch-tokens", "--also",
    "--domain", "--prompts", "--prompts-from", "--task", "--process", "--n", "--limit", "--labels",
    "--cluster", "--probes", "--axis", "--seed", "--control-models", "--random-edits",
}  # fmt: skip
OF_TRAINING = ("horizon", "corrupt")  # facts of `llmgeom grade`: which queries are scored, and against which targets
NOTES = {
    "tested": "p = 0: no difference; p beyond: one of a third of the declared effect or more; both by Holm over all "
    "rows",
    "stratified": "the prompts were spread evenly over the entropy of {}: that widens its range there and favours what "
    "follows it; prompts chosen without regard to entropy (--prompts FILE) favour no model",
    "unpaired": "unpaired: from the two stored intervals as if their errors were independent; on the same prompts they "
    "are as a rule positively correlated, and then interval and p are conservative",
    "similar": "CKA and RSA: p is against permuted clusters and says that the places are not unrelated; those of "
    "untrained models that read the same tokens need not be unrelated either",
    "widths": "{}: shares of components, dimensions, cosines and R2 of vectors depend on the number of coordinates, so "
    "that their differences are partly arithmetic; rank correlations and bits do not",
}


@dataclass(frozen=True)
class Difference:
    """One metric of two records.

    Attributes:
        ours, theirs: the value in the reference and in the other record. value: theirs less ours. low, high: its 95 %
            interval, for this row alone; error: its standard error. All in `unit`.
        method: paired: the jackknife of the difference, from both values without each cluster. unpaired: error^2 is
            the sum of those of the two intervals, as if independent.
        clusters, counts: how many are independent, and what, e.g. templates.
        effect: the smallest difference of interest that the metric declares.
        p, p_within, p_less: of no difference; of one of MARGIN of `effect` or more, and of one of `effect` or more, by
            two one-sided tests. Student's t, then Holm over all rows of the comparison.
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
    method: Literal["paired", "unpaired"]
    clusters: int
    effect: float
    p: float
    p_within: float
    p_less: float
    counts: str = "clusters"
    needed: int = 0
    verdict: Word = "undecided"
    why: str = ""

    @property
    def shown(self) -> str:
        """The difference with its interval and unit."""
        value, low, high = numbers(self.value, self.low, self.high)
        return f"{value} [{low}, {high}] {self.unit}".rstrip()

    @property
    def called(self) -> str:
        """The metric with its probe, as the page calls it."""
        return f"{pretty(self.metric)} ({self.probe.replace('_', ' ')})"

    @property
    def chip(self) -> str:
        """The class of the verdict on the page."""
        return SAID[self.verdict][2]


@dataclass(frozen=True)
class Pair:
    """A record less the reference.

    Attributes:
        counted, findings: in sentences: how many numbers differ, and the largest differences.
        curves: of each curve that both hold without each group of clusters: probe, name, meaning, unit, axis, places,
            and [place] value, low, high, paired at each place separately.
        similarities: how alike both place the same prompts: probe, array, measure, components of each, value with its
            95 % jackknife interval on Fisher's scale, the band of permuted clusters, p against these, n, clusters.
        notes, left_out: what to know of this pair; what was not compared, and why.
    """

    reference: str
    record: str
    differences: tuple[Difference, ...]
    curves: tuple[dict[str, Any], ...]
    similarities: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]
    left_out: tuple[str, ...]
    counted: str = ""
    findings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """Records of the same prompts; the first is the reference of every pair. texts: sha256 of the prompts."""

    prompts: int
    clusters: int
    texts: str
    pairs: tuple[Pair, ...]
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """Tables for a terminal, safe to print."""
        lines = [f"{self.prompts} prompts of {self.clusters} clusters, sha256 of the texts {self.texts[:12]}"]
        for pair in self.pairs:
            lines += ["", pair.counted, *(f"- {text}" for text in pair.findings)]
            rows: list[tuple[str, ...]] = []
            for at, d in enumerate(pair.differences):
                if not at or d.probe != pair.differences[at - 1].probe:
                    rows.append((f"[{d.probe}]", *[""] * 8))
                lacking = d.verdict == "undecided" and d.clusters < d.needed and d.p_less >= ALPHA
                verdict = d.verdict + f" (needs n >= {d.needed} {d.counts})" * lacking
                value, low, high = numbers(d.value, d.low, d.high)
                span = (f"{d.ours:.3g}", f"{d.theirs:.3g}", value, f"{low} to {high}", d.method)
                rows.append((d.metric, *span, f"{d.p:.2g}", f"{d.p_within:.2g}", verdict))
            heads = ("difference", "95 % interval", "method", "p = 0", "p beyond", "verdict")
            lines += grid(f"{pair.record} less {pair.reference}", (pair.reference, pair.record, *heads), rows)
            for curve in pair.curves:  # the largest, as a description: it was selected, so it is not a test
                i = int(np.abs(curve["value"]).argmax())
                value, low, high = numbers(*(curve[key][i] for key in ("value", "low", "high")))
                where = f"{len(curve['value'])} {curve['axis']}s, largest at {curve['axis']} {curve['places'][i]}"
                said = f"{value} [{low}, {high}] {curve['unit']} (of this place alone)"
                lines.append(f"curve {curve['probe']}.{curve['name']}: {where}, {said}")
            lines += pair.notes
            rows = [
                (
                    f"{s['probe']}: {s['of']}",
                    f"{s['value']:.2f}",
                    f"{s['low']:.2f} to {s['high']:.2f}",
                    f"{s['null_low']:.2f} to {s['null_high']:.2f}",
                    f"{s['p']:.2g}",
                    f"{s['n']} prompts, {s['clusters']} clusters",
                )
                for s in pair.similarities
            ]
            title = f"similarity of representations, {pair.record} and {pair.reference}"
            lines += grid(title, ("value", "95 % interval", "permuted clusters", "p", "n"), rows)
            lines += [f"not compared: {sentence}" for sentence in pair.left_out]
        return list(map(visible, [*lines, "", f"note: {NOTES['tested']}", *(f"note: {note}" for note in self.notes)]))

    def brief(self) -> list[str]:
        """Lines of at most WIDTH characters: of each pair how many numbers differ, its notes, and the numbers, those
        that differ first."""
        lines: list[str] = []
        for pair in self.pairs:
            lines += ["", *textwrap.wrap(visible(pair.counted), WIDTH)]
            lines += [line for note in pair.notes for line in textwrap.wrap(f"note: {visible(note)}", WIDTH)]
            ranked = sorted(pair.differences, key=lambda d: list(SAID).index(d.verdict))
            names = names_of([(d.probe, d.metric) for d in ranked])
            cells = [
                (d.verdict, name, f"{d.ours:.3g}", f"{d.theirs:.3g}", d.shown.removesuffix(f" {d.unit}"))
                for d, name in zip(ranked, names, strict=True)
            ]
            heads = ("", "number", pair.reference, pair.record, "difference [95 %]")
            rows = columns([heads, *cells], 1, WIDTH) if cells else []
            room = max(SHORT // len(self.pairs) - 8, 4)
            lines += ["", *(line for row in rows[:room] for line in row)]
            lines += [f"and {len(rows) - room} more (--table)"] if len(rows) > room else []
            for one in pair.similarities[:2]:
                lines += wrapped("{of} ({probe}): {value:.2f} [{low:.2f}, {high:.2f}]".format(**one), WIDTH)
            if left := len(pair.left_out):
                lines.append(f"{number_of(left, 'numbers')} could not be compared (--table says why)")
        return lines[1:]


def compare(records: Sequence[Record], folders: Sequence[str] = ()) -> Comparison:
    """Every record less the first. Two models have two tokenizers, so prompts are the same where their texts are.

    Args:
        records: two or more.
        folders: where each lies, for the sentence of a refusal; else it names the models.

    Raises:
        UserError: fewer than two records; two revisions of a model with the same weights; or the first of these that
            differs: texts in order, their clusters, claims, the label and how it is read, seed.
    """
    if len(records) < 2:
        raise UserError(f"{len(records)} run was given, a comparison needs two or more: llmgeom report RUN RUN")
    called, first = labels(records), records[0]
    names = folders or called
    for name, other in zip(names[1:], records[1:], strict=True):
        _check(names[0], first, name, other, bool(folders))
    pairs = [_pair(called[0], first, label, other) for label, other in zip(called[1:], records[1:], strict=True)]
    judged, told = _judged([d for pair in pairs for d in pair.differences]), []
    for pair in pairs:
        differences = tuple(islice(judged, len(pair.differences)))
        count = {word: sum(d.verdict == word for d in differences) for word in SAID}
        words = [f"{n} {SAID[word][n > 1]}" for word, n in count.items() if n]
        of = f": of {len(differences)} numbers {', '.join(words)}" if words else ""
        counted = f"{pair.record} against {pair.reference} on the same {len(first.prompts['text'])} prompts{of}."
        largest: dict[str, Difference] = {}  # of each probe
        for d in sorted(differences, key=lambda d: -abs(d.value / d.effect)):
            if d.verdict.startswith("differs"):
                largest.setdefault(d.probe, d)
        findings = []
        for d in [*largest.values()][:3]:
            both = f"{d.theirs:.3g} in {pair.record}, {d.ours:.3g} in {pair.reference}"
            n = number_of(d.clusters, d.counts)
            findings.append(f"{d.probe.replace('_', ' ')}, {d.metric}: {both}; difference {d.shown} (n = {n}).")
        told.append(replace(pair, differences=differences, counted=counted, findings=tuple(findings)))
    chose = [label for label, record in zip(called, records, strict=True) if record.source.get("stratified")]
    notes = [NOTES["stratified"].format(" and ".join(chose))] if chose else []
    notes += [NOTES["unpaired"]] * any(d.method == "unpaired" for pair in pairs for d in pair.differences)
    notes += [NOTES["similar"]] * any(pair.similarities for pair in pairs)
    texts, clusters = list(first.prompts["text"]), set(first.prompts["template"])
    return Comparison(len(texts), len(clusters), digest(texts), tuple(told), tuple(notes))


# ---- do two records answer one question? -----------------------------------------------------------------------------


def _check(reference: str, first: Record, label: str, other: Record, placed: bool) -> None:
    """Raise UserError for the first thing in which two records of one question differ; placed: both are folders."""
    for name, record in ((reference, first), (label, other)):
        if not record.prompts:  # a training that was followed, a search that found nothing
            raise UserError(f"{name} keeps no prompts, so that nothing can be paired; each run has a page of its own")
    # The commands that made them; "" where Python did.
    verbs = [str(r.facts.get("command", "")).removeprefix("llmgeom ").partition(" ")[0] for r in (other, first)]
    seed, its = (record.facts.get("seed") for record in (first, other))
    flags = f" --seed {seed}" if seed is not None and seed != its else ""
    folder = reference if placed else f"RUN (the folder of {reference})"
    if (kind := first.source.get("kind")) in ("task", "process"):
        again = f"run both with the same --{kind}{' and' * bool(flags)}{flags}"
    elif verbs[0] == "ablate":  # its record holds the half that was edited, which does not make it again
        again = f"run both with the same file of --prompts{flags}"
    elif verbs[0] in ("scan", ""):
        again = f"scan it again with --prompts-from {folder}{flags}"
    else:
        again = f"run `llmgeom {verbs[0]}` again with --prompts {folder}/prompts.jsonl{flags}"
    for difference, remedy in _unlike(first, other, again):
        if all(verbs) and verbs[0] != verbs[1]:
            difference = f"it is a run of `llmgeom {verbs[0]}`, not of `llmgeom {verbs[1]}`, and {difference}"
            remedy = "differences need two runs of one command on the same prompts"
        raise UserError(f"{label} cannot be compared with {reference}: {difference}; {remedy}")
    ours, theirs = first.subject, other.subject
    another_name = ours["name"] == theirs["name"] and ours.get("revision") != theirs.get("revision")
    if another_name and ours.get("weights") and ours["weights"] == theirs.get("weights"):
        raise UserError(
            f"{reference} and {label} hold the same weights (sha256 {ours['weights'][:12]}): one of the two revisions "
            "is not what its name says; give another one"
        )


def _unlike(first: Record, other: Record, again: str) -> Iterator[tuple[str, str]]:
    """What differs between two records, the most informative first, and how to run both alike."""
    (texts, others), (clusters, groups) = (
        [tuple(record.prompts[column]) for record in (first, other)] for column in ("text", "template")
    )
    if texts != others and sorted(texts) == sorted(others):
        yield "it holds the same prompts in another order", again
    elif texts != others:
        ours, theirs = (record.source.get("name", "its own") for record in (first, other))
        shared = f"{len({*texts} & {*others})} texts are in both"
        yield f"it holds other prompts ({len(others)} of {theirs}, not {len(texts)} of {ours}; {shared})", again
    if clusters != groups:
        here, there = len(set(clusters)), len(set(groups))
        counts = f"{there} clusters, not {here}" if here != there else f"{here} clusters in both, but other ones"
        yield f"it groups the prompts differently ({counts})", again
    remedies = {"claims_hash": "run both in one version of llmgeom", "seed": again}
    for name in ("claims_hash", *LABEL_FACTS, "seed"):
        mine, its = (record.facts.get(name) for record in (first, other))
        if mine != its:
            flag, said = f"--{name}" if name in LABEL_FACTS else name, "none" if its is None else its
            what = f"its {flag} is {said}, not {'none' if mine is None else mine}"
            if name == "claims_hash":
                what = "it was judged by another list of claims"
            yield what, remedies.get(name, f"run both with --{name} {its if mine is None else mine}")
    if label := first.facts.get("target") or first.facts.get("answers"):
        values = [[str(cell) for cell in record.prompts.get(str(label), ())] for record in (first, other)]
        if values[0] != values[1]:
            count = sum(a != b for a, b in zip(*values, strict=False))
            yield f"{count} prompts have another value of the label {label}", "run both with the labels of one file"


def _flags(record: Record) -> list[str]:
    """Options that change the meaning of a number: flags of the record's command; how a graded model was trained."""
    try:
        words = shlex.split(str(record.facts.get("command", "")))
    except ValueError:  # no command that llmgeom wrote
        words = []
    flags: list[str] = []
    for word in words:
        if word.startswith("--"):
            flags.append(word)
        elif flags:
            flags[-1] += f" {word}"
    kept = [flag for flag in flags if flag.split()[0] not in NO_SETTING]
    return [*kept, *(f"{name} {record.facts[name]}" for name in OF_TRAINING if name in record.facts)]


# ---- one record less another -----------------------------------------------------------------------------------------


def _pair(reference: str, first: Record, label: str, other: Record) -> Pair:
    differences: list[Difference] = []
    curves: list[dict[str, Any]] = []
    alike: list[dict[str, Any]] = []
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
            elif not ours[name].rule.effect > 0:
                left_out.append(f"{probe}: {name}: declares no effect of interest to compare with")
            else:
                counts = independent(ours[name], first.source, first.prompts)
                differences.append(replace(difference(probe, ours[name], theirs[name]), counts=counts))
        curves += _curves(probe, first, other)
        for measure in MEASURES:
            try:
                alike += _similarities(probe, measure, first, other)
            except UserError as refusal:
                left_out.append(f"{probe}: {measure}: not measured, because {refusal}")
    notes = []
    its, mine = map(_flags, (other, first))
    alone = [[flag for flag in its if flag not in mine], [flag for flag in mine if flag not in its]]
    if any(alone):  # e.g. two edits: not only the model differs
        said = [f"{name}: {' '.join(some) or 'defaults'}" for name, some in zip((label, reference), alone, strict=True)]
        notes.append(f"the runs have different settings ({'; '.join(said)}), and each difference may come from these")
    sizes = [(name, first.subject.get(name), other.subject.get(name)) for name in ("d_model", "kv_heads", "head_dim")]
    unlike = [f"{name} is {its} against {mine}" for name, mine, its in sizes if mine != its]
    if unlike and differences:
        notes.append(NOTES["widths"].format(", ".join(unlike)))
    return Pair(reference, label, tuple(differences), tuple(curves), tuple(alike), tuple(notes), tuple(left_out))


def difference(probe: str, ours: Estimate, theirs: Estimate) -> Difference:
    """One metric of two records, not yet judged; paired where both values lack the same groups of clusters in turn."""
    method: Literal["paired", "unpaired"] = "unpaired"
    value, clusters = theirs.value - ours.value, max(min(ours.clusters, theirs.clusters), 2)
    a, b = theirs.deletions, ours.deletions
    if a and b and a.groups == b.groups and a.without.shape == b.without.shape:
        # Student's t counts the groups that were left out; `clusters` those that a reader can add to.
        without, method = a.less(b), "paired"
        error, units = without.error, without.units
    else:
        # One end may be cut off (|rho| at 0, a share at 1): the longer half of an interval is the honest one.
        halves = [(max(h.value - h.low, h.high - h.value), h.units or max(h.clusters, 2)) for h in (ours, theirs)]
        error = math.hypot(*(half / student_quantile(n, LEVEL) for half, n in halves))
        units = min(n for _, n in halves)
    half, effect, (least, most) = student_quantile(units, LEVEL) * error, ours.rule.effect, ours.rule.range
    low, high = max(value - half, least - most), min(value + half, most - least)
    interval = Interval(value - half, value + half, LEVEL, method, float(units))
    p = max(tests.two_sided_p(value, error, units), tests.LEAST_P)
    within, less = (tests.equivalence_p(value, interval, -end, end, clusters) for end in (MARGIN * effect, effect))
    span = (ours.value, theirs.value, value, low, high, error)
    return Difference(probe, ours.name, ours.unit, *span, method, clusters, effect, p, within, less)


def _curves(probe: str, first: Record, other: Record) -> Iterator[dict[str, Any]]:
    """The curves that both records hold without each group of clusters too: NAME and NAME_without [place way group]."""
    ours, theirs = first.results[probe], other.results[probe]
    for name, declared in ours.quantities.items():
        without = [m.arrays.get(f"{name}_without") for m in (ours, theirs)]
        if without[0] is None or without[1] is None or without[0].shape != without[1].shape:
            continue
        lost = [next((h.deletions for h in m.estimates if h.deletions), None) for m in (ours, theirs)]
        axis = declared.axes[0]
        places = tuple(ours.ticks.get(axis, range(len(without[0]))))
        if not (lost[0] and lost[1]) or lost[0].groups != lost[1].groups or places != theirs.ticks.get(axis, places):
            continue
        value = theirs.arrays[name] - ours.arrays[name]
        errors = [replace(lost[0], without=way).error for way in without[1] - without[0]]
        half = student_quantile(lost[0].units, LEVEL) * np.array(errors)
        ends = {"value": value.tolist(), "low": (value - half).tolist(), "high": (value + half).tolist()}
        about = {"probe": probe, "name": name, "meaning": declared.meaning, "unit": declared.unit, "axis": axis}
        yield about | {"places": places} | ends


def permuted(
    measure: str, x: np.ndarray, y: np.ndarray, clusters: Sequence, permutations: int, seed: int
) -> np.ndarray:
    """[draw] similarities of x with y whose clusters have changed places. UserError as `permute_clusters`."""
    orders = permute_clusters(np.random.default_rng(seed), clusters, permutations)
    if measure == "CKA":
        return np.array([cka(x, y[order]) for order in orders])
    a, b = distance_ranks(x), distance_ranks(y)  # ranking 2,775 distances again for each order takes 20 times as long
    return np.array([alignment(a, b[np.ix_(order, order)]) for order in orders])


def _similarities(probe: str, measure: str, first: Record, other: Record) -> Iterator[dict[str, Any]]:
    """The similarity at each site, of the array [prompt component] with the most components that both hold.

    Of several such arrays it takes the first by name. Places in a control (`control_scores`) are not the models' own
    and are left out. Raises UserError: coordinates that are all alike, or clusters that cannot change places.
    """
    clusters, seed, similarity = first.prompts["template"], first.facts.get("seed", 0), MEASURES[measure]
    held = []
    for record in (first, other):
        measured = record.results[probe]
        names = [name for name, q in measured.quantities.items() if len(q.axes) == 2 and q.axes[0] == "prompt"]
        arrays = {name: measured.arrays[name].astype(np.float64) for name in names}
        held.append({name: x for name, x in arrays.items() if len(x) == len(clusters)})

    def kept(x: np.ndarray, y: np.ndarray, rows: np.ndarray) -> float:
        return similarity(x[rows], y[rows])

    ours, theirs = held
    shared = {name for name in ours.keys() & theirs.keys() if not name.endswith("control_scores")}
    ranked = sorted((-min(ours[name].shape[1], theirs[name].shape[1]), name) for name in shared)
    # The last assignment wins: the first array of each site, "" where the name says none.
    sites = {name.removesuffix("scores") if name.endswith("_scores") else "": name for _, name in reversed(ranked)}
    for site, name in sorted(sites.items()):
        x, y = ours[name], theirs[name]
        value, null = similarity(x, y), permuted(measure, x, y, clusters, PERMUTATIONS, seed)
        over = jackknife(partial(kept, x, y), np.arange(len(x)), clusters, "fisher")
        few, (null_low, null_high) = (x.shape[1], y.shape[1]), band(null, "upper")
        of = f"{measure} of the first {' and '.join(map(str, dict.fromkeys(few)))} components"
        yield {
            "probe": probe,
            "array": name,
            "measure": measure,
            "components": few,
            "value": value,
            "low": over.low,
            "high": over.high,
            "null_low": null_low,
            "null_high": null_high,
            "p": tests.tail_p(value, null),
            "n": len(x),
            "clusters": len(set(clusters)),
            "of": site.replace("_", " ") + of,
        }


# ---- verdicts and sentences ------------------------------------------------------------------------------------------


def _judged(raw: Sequence[Difference]) -> Iterator[Difference]:
    names = ("p", "p_within", "p_less")
    adjusted = zip(*(tests.holm([getattr(d, name) for d in raw]).tolist() for name in names), strict=True)
    over, alpha = f"by Holm over {len(raw)} rows", ALPHA / max(len(raw), 1)
    for d, corrected in zip(raw, adjusted, strict=True):
        sd = max(d.error * d.clusters**0.5, 1e-12)
        needed = tests.needed_n_mean(d.effect, sd, 0.9, 1 - alpha)
        d = replace(d, **dict(zip(names, corrected, strict=True)), needed=needed)
        size, margin = (f"{end:.3g} {d.unit}".rstrip() for end in (d.effect, MARGIN * d.effect))
        verdict: Word = "undecided"
        why = f"p = {d.p:.2g} of no difference and {d.p_less:.2g} of {size} or more, {over}"
        if d.p < ALPHA:
            verdict = "differs, less than the effect" if d.p_less < ALPHA else "differs"
        elif d.p_within < ALPHA and d.low <= 0 <= d.high:  # not even before the correction is 0 excluded
            verdict, why = "equivalent", f"p = {d.p_within:.2g} of a difference of {margin} or more, {over}"
        elif d.p_less < ALPHA:
            why = f"less than {size}, p = {d.p_less:.2g}; 0 and {margin} are both possible"
        elif d.clusters < needed:
            why = f"needs n >= {needed:,} {d.counts} for {size}, has {d.clusters:,}"
        else:
            enough = number_of(d.clusters, d.counts)
            why = f"{enough} suffice for {size} (n >= {needed:,}) in nine of ten runs"
        yield replace(d, verdict=verdict, why=why)
