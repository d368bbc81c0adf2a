"""Curves over training: drifts and gradients of several runs, their settling steps, and metrics by snapshot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from llmgeom import claims
from llmgeom.dynamics import SEEDS
from llmgeom.dynamics.attention_gradients import Signals
from llmgeom.dynamics.drift import LEVEL, Drifts, Ratio, Settled, fallen, settled
from llmgeom.dynamics.runs import Run
from llmgeom.errors import UserError
from llmgeom.record import Record
from llmgeom.result import Estimate, Figure, Lack, Measured, Quantity, read_prose, with_parts
from llmgeom.stats.resampling import Interval, geometric_mean, mean_intervals

# Part drawn around a curve -> its meaning, an addition if a control has the same prompts, and its ends.
AROUND = {
    "interval": ("95 % interval", "; where the control is of the same prompts, of the difference", "deciding_interval"),
    "null": ("95 % band of the control that decides", "; a control on the same prompts is one number", "control_range"),
}


def over_training(steps: Sequence[int], records: Mapping[int, Record]) -> dict[str, Measured]:
    """A section for each probe, with one curve for each of its metrics.

    Args:
        steps: steps of all snapshots, ascending.
        records: step -> scan of that snapshot; a metric may be missing at some steps.

    Returns:
        Probe -> Measured without estimates, since a curve over training has no claim.
    """
    sections = {}
    for probe in sorted({probe for record in records.values() for probe in record.results}):
        measured = {step: record.results[probe] for step, record in records.items() if probe in record.results}
        by_metric: dict[str, dict[int, Estimate]] = {}
        for step, result in measured.items():
            for metric in result.estimates:
                by_metric.setdefault(metric.name, {})[step] = metric
        refusals = {step: record.unmeasured.get(probe) for step, record in records.items()}
        notes = tuple(f"step {step}: not measured, {why}" for step, why in refusals.items() if why)
        if by_metric:
            first = next(iter(measured.values()))
            sections[probe] = _section(first, steps, by_metric, notes)
    return sections


def _section(
    first: Measured, steps: Sequence[int], by_metric: Mapping[str, Mapping[int, Estimate]], notes: tuple[str, ...]
) -> Measured:
    quantities: dict[str, Quantity] = {}
    arrays, ticks = {}, {}
    for i, (name, metrics) in enumerate(by_metric.items()):
        missing = [str(step) for step in steps if step not in metrics]
        axis = f"step (not measured at {', '.join(missing)})" if missing else "step"
        ticks[axis] = tuple(map(str, metrics))
        key, unit = f"metric_{i:02}", next(iter(metrics.values())).unit
        arrays[key] = np.array([metric.value for metric in metrics.values()])
        paired = any(metric.paired for metric in metrics.values())
        meanings = {part: meaning + of_paired * paired for part, (meaning, of_paired, _) in AROUND.items()}
        quantities |= with_parts(key, Quantity((axis,), unit, name, Figure("curve")), meanings)
        for part, (*_, ends) in AROUND.items():
            arrays[f"{key}_{part}"] = np.array([getattr(metric, ends) for metric in metrics.values()])
    return replace(
        first,
        title=f"{first.title}, over training",
        estimates=(),
        quantities=quantities,
        arrays=arrays,
        warnings=(),
        notes=notes,
        ticks=ticks,
        unmeasured={},
        facts={},
    )


DRIFT, GRADIENTS = "drift", "gradients"
TITLES = {DRIFT: "Frame, values and precision", GRADIENTS: "Gradients of scores and of values"}
TEXTS = Path(__file__).with_name("texts")
HALF = 0.5
NO_END = -claims.NO_END  # upper end of an interval over one training seed
RUNS, RANDOM = "runs", "random-target runs"
Unseen = Literal["least", "most", "between"]  # kinds of Lack that a note of the record counts
BOUNDS: tuple[Unseen, ...] = ("least", "most")  # what a longer run would tell of a Ratio
# (RUNS or RANDOM, kind of Lack) -> of how many ratios that is not known. "coarse" is there where "between" is not.
Bounds = Mapping[tuple[str, str], Lack]


@dataclass(frozen=True)
class Trajectory:
    """Curves of one run over its snapshots.

    Attributes:
        drifts: drifts of attention, values and answers; None if they are not measured.
        signals: gradients at each snapshot; empty if they are not measured.
        losses: a language model's loss on the prompts at each snapshot, in nats per token; empty in a wind tunnel.
        weights: the hash of the weights of each snapshot.
    """

    run: Run
    drifts: Drifts | None
    signals: tuple[Signals, ...] = ()
    losses: tuple[float, ...] = ()
    weights: tuple[str, ...] = ()

    def drift(self, name: str) -> np.ndarray:
        """A drift curve, [step]. Raises UserError if drifts were not measured, or this one has no CKA somewhere."""
        if self.drifts is None:
            raise UserError(f"the drifts of {self.run.name} were not measured")
        if why := self.drifts.missing.get(name):
            raise UserError(f"{self.run.name}, {why}")
        return getattr(self.drifts, name)

    def gradient(self, name: str) -> np.ndarray:
        """[step] root mean square over layers (for the spread, the mean), divided by its largest value in training.

        Raises UserError: the gradient is 0 at every snapshot.
        """
        each = np.array([getattr(signals, name) for signals in self.signals])
        curve = each.mean(1) if name == "spread" else np.sqrt(np.square(each).mean(1))
        if not curve.max() > 0:
            raise UserError(f"the {name.replace('_', ' ')} of {self.run.name} is 0 at every snapshot")
        return curve / curve.max()


# ---- sections --------------------------------------------------------------------------------------------------------


class Section:
    """A builder of one Measured: curves over steps, settling steps by run, and their ratios with verdicts.

    Attributes:
        own: the runs that learn.
        null: the runs on random targets.
        bounds: metric -> which of its ratios a longer run may move to one side only, or more snapshots to either.
        extremes: each estimate, if every ratio had the end that favours its claim most, of those that the snapshots
            allow, and if it had the other.
    """

    def __init__(self, probe: str, trajectories: Sequence[Trajectory]) -> None:
        self.probe = probe
        self.own = [c for c in trajectories if not c.run.random]
        self.null = [c for c in trajectories if c.run.random]
        self.steps = trajectories[0].run.steps
        self.quantities: dict[str, Quantity] = {}
        self.arrays: dict[str, np.ndarray] = {}
        self.estimates: list[Estimate] = []
        self.extremes: list[tuple[Estimate, Estimate]] = []
        self.bounds: dict[str, Bounds] = {}
        self.notes: list[str] = []

    def curve(self, name: str, unit: str, meaning: str, measure: Callable[[Trajectory], np.ndarray]) -> None:
        """Add the mean curve of the runs that learn, with its interval, and the range of the random-target runs."""
        try:
            learnt, null = (np.array([measure(course) for course in group]) for group in (self.own, self.null))
        except UserError as refusal:
            self.notes.append(f"{meaning}: not measured, {refusal}")
            return
        interval, band = f"{name}_interval" * (len(learnt) > 1), f"{name}_null" * (len(null) > 0)
        self._add(name, "step", unit, meaning, learnt.mean(0), Figure("curve", band=band, interval=interval))
        if interval:
            self._add(interval, "step bound", unit, "95 % interval over training seeds", mean_intervals(learnt.T))
        if band:
            ends = np.stack([null.min(0), null.max(0)], 1)
            self._add(band, "step bound", unit, f"range of {len(null)} models trained on random targets", ends)
        self._add(f"{name}_runs", "run step", unit, f"{meaning}, by run", np.array([*learnt, *null]))

    def settles(self, name: str, measure: Callable[[Trajectory], Settled]) -> None:
        """Add the step at which a curve settles, for each run."""
        try:
            found = [measure(course) for course in (*self.own, *self.null)]
        except UserError as refusal:
            self.notes.append(f"when {name.replace('_', ' ')} settles is not measured: {refusal}")
            return
        self._add(f"{name}_settled", "run", "step", "first step with 5 % left", np.array([step.step for step in found]))
        censored = np.array([float(step.censored) for step in found])
        self._add(
            f"{name}_censored", "run", "", "1 where that step is right-censored: the end of the run sets it", censored
        )

    def ratio(self, name: str, measure: Callable[[Trajectory], Ratio]) -> None:
        """Add a ratio of settling steps, compared with 1 and with the random-target runs."""
        try:
            ratios, others = ([measure(course) for course in group] for group in (self.own, self.null))
        except UserError as refusal:
            self.notes.append(f"{name}: not measured, {refusal}")
            return
        groups = ((RUNS, "training seeds", ratios), (RANDOM, "random-target runs (--corrupt 1)", others))
        lacks = [Lack("steps", what, sum(x.bound != "open" for x in of), len(of)) for what, _, of in groups]
        lacks += [Lack("runs", runs, len(of), SEEDS) for _, runs, of in groups]
        missing = tuple(lack for lack in lacks if lack.has < lack.needed)

        def estimate(own: Sequence[Ratio], random: Sequence[Ratio]) -> Estimate:
            compared = _compared(claims.declared(self.probe)[name], [x.value for x in own], [x.value for x in random])
            return replace(compared, lacks=missing)

        self.estimates.append(estimate(ratios, others))
        ends: tuple[tuple[Literal[0, 1], Literal[0, 1]], ...] = ((0, 1), (1, 0))
        favoured, other = (estimate([x.at(i) for x in ratios], [x.at(j) for x in others]) for i, j in ends)
        self.extremes.append((favoured, other))
        counts: list[tuple[str, Unseen, list[bool]]] = [
            (what, bound, [x.bound == bound for x in of]) for what, _, of in groups for bound in BOUNDS
        ]
        counts += [(what, "between", [x.unordered for x in of]) for what, _, of in groups]
        known: Bounds = {
            (what, kind): Lack(kind, what, row.count(False), len(row)) for what, kind, row in counts if any(row)
        }
        self.notes += [f"{name}: {lack}" for lack in known.values()]
        coarse = {(what, "coarse"): Lack("coarse", what, 0, len(of)) for what, _, of in groups}
        self.bounds[name] = known if any(kind == "between" for _, kind in known) else {**known, **coarse}

    def measured(self) -> Measured:
        return Measured(
            TITLES[self.probe],
            **read_prose(TEXTS / f"{self.probe}.md")[TITLES[self.probe]],
            estimates=tuple(self.estimates),
            quantities=self.quantities,
            arrays=self.arrays,
            notes=tuple(self.notes),
            ticks={"step": tuple(map(str, self.steps)), "run": tuple(c.run.name for c in (*self.own, *self.null))},
        )

    def _add(self, name: str, axes: str, unit: str, meaning: str, array: np.ndarray, figure: Any = None) -> None:
        if not np.isfinite(array).all():
            raise ValueError(f"{name} is not finite")  # no NaN travels
        self.quantities[name], self.arrays[name] = Quantity(tuple(axes.split()), unit, meaning, figure), array


def _compared(claim: claims.Claim, learnt: Sequence[float], random: Sequence[float]) -> Estimate:
    """Ratios of runs that learn, compared with 1 and with those of random-target runs."""
    value, low, high = geometric_mean(np.array(learnt))
    span = Interval(low, high, 0.95, "Student's t of logarithms over training seeds, 95 %")
    if len(learnt) == 1:
        span = Interval(0.0, NO_END, 0.95, "one training seed has no interval")
    nulls = [claims.Null.number("1 (both at once)", 1.0)]
    if len(random):
        _, least, most = geometric_mean(np.array(random))
        drawn = claims.Null.of("mean of random-target models", np.array(random), "lower")
        nulls.append(replace(drawn, low=least, high=most, mean=True))
    return claims.estimate(claim, value, span, nulls, n=len(learnt), clusters=len(learnt))


def sections(trajectories: Sequence[Trajectory]) -> dict[str, Measured]:
    """Sections of drifts and of gradients, if every run has them, with verdicts; too few runs leave a claim open."""
    by_probe = {DRIFT: _drift(trajectories)} if all(c.drifts for c in trajectories) else {}
    if all(c.signals for c in trajectories):
        by_probe[GRADIENTS] = _gradients(trajectories)
    measured = {probe: section.measured() for probe, section in by_probe.items()}
    judged = claims.judge(measured)
    extremes = [
        claims.judge({p: replace(m, estimates=tuple(e[i] for e in by_probe[p].extremes)) for p, m in measured.items()})
        for i in (0, 1)
    ]

    def safe(probe: str) -> tuple[Estimate, ...]:
        three = zip(*(result[probe].estimates for result in (judged, *extremes)), strict=True)
        # An end at which the value lies above every control leaves "ruled out", which one control suffices for.
        unseen = [
            (h, any(end.verdict != h.verdict and (h.verdict, end.verdict) != ("ruled out", "opposite") for end in ends))
            for h, *ends in three
        ]
        return tuple(_safe(h, by_probe[probe].bounds.get(h.name, {}), differs) for h, differs in unseen)

    return {probe: replace(measured, estimates=safe(probe)) for probe, measured in judged.items()}


def _safe(h: Estimate, bounds: Bounds, unseen: bool) -> Estimate:
    """A judged claim; open if a longer run, or more snapshots, could take its word away.

    Own ratios that may be larger do not show that they lie below a control, and own ratios that may be smaller do not
    exclude it. Of the random-target runs it is the other way round. If `unseen`, the claim has another word where the
    ratios have the ends that the snapshots allow.

    Simulated, 5 runs whose answers settle at step 23 and attention at 30, snapshots at 0, 50, 200, 800, 3200, and
    random-target runs: by the interpolated ratios, .88, attention was called first in 40 of 40 studies. With the 16
    snapshots of `dynamics --task`, and curves of other shapes in runs and random-target runs with one true ratio, .25,
    attention was called earlier than in random-target runs ("small") in up to 20 of 60 studies.
    """
    below, above = [(RUNS, "least"), (RANDOM, "most")], [(RUNS, "most")]
    # "Opposite" says that the value lies above every control (docs/claims.md). Ratios of random-target runs that are
    # lower bounds may pass it in a longer run; the control of 1 then leaves "ruled out". So that word is open, too.
    # "Ruled out" needs one control: where 1 decides, it stays whatever the random-target runs show.
    if h.averaged or h.verdict == "opposite":
        above.append((RANDOM, "least"))
    needed = [*{"holds": below, "small": below + above, "ruled out": above, "opposite": above}.get(h.verdict, [])]
    needed += [(what, kind) for kind in ("between", "coarse") for what in (RUNS, RANDOM)] if unseen else []
    lacks = tuple(bounds[kind] for kind in needed if kind in bounds)
    return replace(h, lacks=lacks, verdict="open", why="; ".join(map(str, lacks))) if h.claim and lacks else h


def _drift(trajectories: Sequence[Trajectory]) -> Section:
    section = Section(DRIFT, trajectories)
    exact = "KL(exact || model)" if trajectories[0].run.task else "KL(last snapshot || model)"
    section.curve("frame", "1 - CKA", "attention: distance from its end", lambda c: c.drift("frame"))
    section.curve("value", "1 - CKA", "values: distance from their end", lambda c: c.drift("value"))
    section.curve("precision", "bits", exact, lambda c: c.drift("precision"))
    section.curve("tv", "total variation", "attention weights: distance from their end", lambda c: c.drift("tv"))

    def settling(name: str, level: float = LEVEL) -> Callable[[Trajectory], Settled]:
        return lambda c: settled(c.run.steps, c.drift(name), level)

    def over(name: str, first: Callable[[Trajectory], Settled], second: Callable[[Trajectory], Settled]) -> None:
        section.ratio(name, lambda c: Ratio.of(first(c), second(c)))

    over("frame over precision", settling("frame"), settling("precision"))
    over("frame over values", settling("frame"), settling("value"))
    over("frame over precision, half-way", settling("frame", HALF), settling("precision", HALF))
    over("frame over values, half-way", settling("frame", HALF), settling("value", HALF))
    over(
        "total variation of attention over log precision",
        settling("tv"),
        lambda c: settled(c.run.steps, fallen(c.drift("precision"))),
    )
    for name in ("frame", "value", "precision", "tv"):
        section.settles(name, settling(name))
    return section


def _gradients(trajectories: Sequence[Trajectory]) -> Section:
    section = Section(GRADIENTS, trajectories)
    names = {
        "score_gradient": "rms of dL/ds over its largest",
        "value_gradient": "rms of dL/dv over its largest",
        "spread": "spread of b over its largest",
    }

    def gradient(name: str) -> Callable[[Trajectory], np.ndarray]:
        return lambda c: c.gradient(name)

    def settling(name: str, level: float = LEVEL) -> Callable[[Trajectory], Settled]:
        return lambda c: settled(c.run.steps, c.gradient(name), level, whole=1.0)

    def both(level: float) -> Callable[[Trajectory], Ratio]:
        return lambda c: Ratio.of(settling("score_gradient", level)(c), settling("value_gradient", level)(c))

    def left(name: str) -> Callable[[Trajectory], Ratio]:
        return lambda c: Ratio(float(c.gradient(name)[-1] / c.gradient("value_gradient")[-1]))

    for name, meaning in names.items():
        section.curve(name, "fraction", meaning, gradient(name))
        section.settles(name, settling(name))
    section.ratio("scores over values", both(LEVEL))
    section.ratio("scores over values, half-way", both(HALF))
    section.ratio("scores over values, what is left", left("score_gradient"))
    section.ratio("spread of b over values, what is left", left("spread"))
    return section
