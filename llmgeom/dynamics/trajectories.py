"""Curves over training: drifts and gradients of several runs, their settling steps, and metrics by snapshot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llmgeom import claims
from llmgeom.dynamics import SEEDS
from llmgeom.dynamics.drift import FARTHEST, Settled, fallen, settled
from llmgeom.dynamics.gradients import PULLS
from llmgeom.dynamics.runs import Run
from llmgeom.errors import UserError
from llmgeom.record import Record
from llmgeom.result import PROSE, Estimate, Labelled, Result, labelled, line
from llmgeom.stats.resampling import Interval, geometric_mean, mean_intervals
from llmgeom.stats.verdict import NO_END


def over_training(steps: Sequence[int], records: Mapping[int, Record]) -> dict[str, Result]:
    """A section for each probe, with one curve for each of its metrics.

    Args:
        steps: steps of all snapshots, ascending.
        records: step -> scan of that snapshot; a metric may be missing at some steps.

    Returns:
        Probe -> Result without estimates, since a curve over training has no claim.
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
        if not by_metric:
            continue
        curves: dict[str, Labelled | None] = {}
        ticks: dict[str, tuple] = {}
        for i, (name, metrics) in enumerate(by_metric.items()):
            missing, every = [str(step) for step in steps if step not in metrics], metrics.values()
            axis = f"step (not measured at {', '.join(missing)})" if missing else "step"
            ticks[axis] = tuple(map(str, metrics))
            paired = any(metric.paired for metric in every)
            of_difference = "; where the control is of the same prompts, of the difference" * paired
            decides = "95 % band of the control that decides" + "; a control on the same prompts is one number" * paired
            curves |= line(
                f"metric_{i:02}",
                [metric.value for metric in every],
                axis,
                next(iter(every)).unit,
                name,
                interval=(f"the units of its metric{of_difference}", [metric.deciding_interval for metric in every]),
                null=(decides, [metric.control_range for metric in every]),
            )
        first = next(iter(measured.values()))
        made = Result.of(f"{first.title}, over training", curves, notes=notes, ticks=ticks)
        sections[probe] = replace(made, **{name: getattr(first, name) for name in PROSE})
    return sections


DRIFT, GRADIENTS = "drift", "gradients"
TITLES = {DRIFT: "Frame, values and precision", GRADIENTS: "Gradients of scores and of values"}
UNBOUNDED = -NO_END  # upper end of an interval over one training seed
RUNS, RANDOM = "training seeds", "random-target runs (--corrupt 1)"
# Section -> name, unit and meaning of each of its curves.
CURVES = {
    DRIFT: (
        ("frame", "1 - CKA", "attention: distance from its end"),
        ("value", "1 - CKA", "values: distance from their end"),
        ("precision", "bits", "KL({} || model)"),
        ("tv", "total variation", "attention weights: distance from their end"),
    ),
    GRADIENTS: (
        (PULLS[0], "fraction", "rms of dL/ds over its largest"),
        (PULLS[1], "fraction", "rms of dL/dv over its largest"),
    ),
}
# Section -> metric -> the two curves whose settling steps it compares, or with LEFT their last values.
LEFT = "scores over values, what is left"
RATIOS = {
    DRIFT: {
        "frame over precision": ("frame", "precision"),
        "frame over values": ("frame", "value"),
        "total variation of attention over log precision": ("tv", "log precision"),
    },
    GRADIENTS: {"scores over values": PULLS, LEFT: PULLS},
}


@dataclass(frozen=True)
class Trajectory:
    """What is kept of one run over its snapshots.

    Attributes:
        snapshots: The numbers of each: `drift.distances`, `gradients.over_layers`, and of a language model `loss`, in
            nats per token of the prompts; a text says why a number is not known.
        weights: the hash of the weights of each snapshot.
    """

    run: Run
    snapshots: Sequence[Mapping[str, float | str]]
    weights: tuple[str, ...] = ()

    def curve(self, name: str) -> np.ndarray:
        """[step] one number of each snapshot, or `fallen` of the precision as "log precision"; a gradient is divided by
        its largest value in training.

        Raises UserError: it is not known at some snapshot; the gradient is 0 at every one.
        """
        if name == "log precision":
            return fallen(self.curve("precision"))
        found = [one[name] for one in self.snapshots]
        for place, why in enumerate(found, 1):
            if isinstance(why, str):
                raise UserError(f"{self.run.name}, snapshot {place} of {len(found)} and the last, {why}")
        curve = np.array(found, dtype=float)
        if name not in PULLS:
            return curve
        if not curve.max() > 0:
            raise UserError(f"the {name.replace('_', ' ')} of {self.run.name} is 0 at every snapshot")
        return curve / curve.max()

    def settled(self, name: str) -> Settled:
        """When 5 % of its first value is left of a curve, or 5 % of the largest gradient. Raises UserError."""
        return settled(self.run.steps, self.curve(name), whole=1.0 if name in PULLS else None)

    def ratio(self, metric: str, first: str, second: str) -> tuple[float, float, float]:
        """One of RATIOS, the least and the largest that the snapshots allow. Raises UserError."""
        if metric == LEFT:
            left = float(self.curve(first)[-1] / self.curve(second)[-1])
            return left, left, left
        return self.settled(first).over(self.settled(second))


# ---- sections --------------------------------------------------------------------------------------------------------


def sections(trajectories: Sequence[Trajectory]) -> dict[str, Result]:
    """Sections of drifts and of gradients, if every run has them, with verdicts; too few runs leave a claim open.

    So does a claim that has another word where its ratios have the ends that the snapshots allow. Simulated, 5 runs
    whose answers settle at step 23 and attention at 30, snapshots at 0, 50, 200, 800, 3200, and random-target runs: by
    the interpolated ratios, .88, attention was called first in 40 of 40 studies. With the 16 snapshots of `dynamics
    --task`, and curves of other shapes in runs and random-target runs with one true ratio, .25, attention was called
    earlier than in random-target runs ("small") in up to 20 of 60 studies.
    """
    own, null = ([c for c in trajectories if c.run.random is random] for random in (False, True))
    ways: tuple[dict[str, Result], ...] = ({}, {}, {})
    unseen: dict[str, str] = {}
    for probe, curves in CURVES.items():
        if all(curves[0][0] in one for c in trajectories for one in c.snapshots):
            notes: list[str] = []
            drawn, estimates = _curves(probe, own, null, notes), []
            for metric, pair in RATIOS[probe].items():
                try:
                    three, unseen[metric] = _compared(probe, metric, pair, own, null)
                    estimates.append(three)
                except UserError as refusal:
                    notes.append(f"{metric}: not measured, {refusal}")
            names = tuple(c.run.name for c in (*own, *null))
            ticks = {"step": tuple(map(str, own[0].run.steps)), "run": names}
            built = Result.of(TITLES[probe], drawn, __name__, notes=tuple(notes), ticks=ticks)
            for way, each in enumerate(ways):
                each[probe] = replace(built, estimates=tuple(three[way] for three in estimates))
    judged, *ends = map(claims.judge, ways)

    def safe(h: Estimate, others: Sequence[Estimate]) -> Estimate:
        # An end at which the value lies above every control leaves "ruled out", which one control suffices for.
        words = {(h.verdict, end.verdict) for end in others}
        if not h.claim or all(word == other or (word, other) == ("ruled out", "opposite") for word, other in words):
            return h
        return replace(h, lacks=(unseen[h.name],), verdict="open", why=unseen[h.name])

    found = {}
    for probe, measured in judged.items():
        together = zip(measured.estimates, *(end[probe].estimates for end in ends), strict=True)
        found[probe] = replace(measured, estimates=tuple(safe(h, others) for h, *others in together))
    return found


def _curves(
    probe: str, own: Sequence[Trajectory], null: Sequence[Trajectory], notes: list[str]
) -> dict[str, Labelled | None]:
    """The mean of each curve over the runs that learn, with its interval, the range of the random-target runs, and the
    step at which it settles in each run; `notes` gets the reasons where there is none."""
    drawn: dict[str, Labelled | None] = {}
    for name, unit, meaning in CURVES[probe]:
        meaning = meaning.format("exact" if own[0].run.task else "last snapshot")
        try:
            learnt, random = (np.array([c.curve(name) for c in group]) for group in (own, null))
        except UserError as refusal:
            notes.append(f"{meaning}: not measured, {refusal}")
            continue
        interval = mean_intervals(learnt.T) if len(learnt) > 1 else None
        band = np.stack([random.min(0), random.max(0)], 1) if len(random) else None
        around: Any = {"interval": ("training seeds", interval)}
        around["null"] = (f"range of {len(random)} models trained on random targets", band)
        drawn |= line(name, learnt.mean(0), "step", unit, meaning, **around)
        drawn[f"{name}_runs"] = labelled(np.array([*learnt, *random]), "run step", unit, f"{meaning}, by run")
        try:
            found = [c.settled(name) for c in (*own, *null)]
        except UserError as refusal:
            notes.append(f"when {name.replace('_', ' ')} settles is not measured: {refusal}")
            continue
        steps, late = [one.step for one in found], [float(one.censored) for one in found]
        drawn[f"{name}_settled"] = labelled(steps, "run", "step", "first step with 5 % left")
        censored = "1 where that step is right-censored: the end of the run sets it"
        drawn[f"{name}_censored"] = labelled(late, "run", "", censored)
    return drawn


def _compared(
    probe: str, metric: str, pair: tuple[str, str], own: Sequence[Trajectory], null: Sequence[Trajectory]
) -> tuple[tuple[Estimate, ...], str]:
    """Ratios of the runs that learn, compared with 1 and with those of random-target runs.

    Returns:
        The estimate as it is; with every run's ratio at the end that favours its claim most, of those that the
        snapshots allow; at the other end. And what would show which of these is right.

    Raises:
        UserError: a curve does not settle.
    """
    learnt, random = (np.array([c.ratio(metric, *pair) for c in group]).reshape(-1, 3) for group in (own, null))
    claim, estimates = claims.declared(probe)[metric], []
    few = [f"needs {SEEDS} {what}: has {len(x)}" for what, x in ((RUNS, learnt), (RANDOM, random)) if len(x) < SEEDS]
    for i, j in ((0, 0), (1, 2), (2, 1)):
        value, low, high = geometric_mean(learnt[:, i])
        span = Interval(low, high, 0.95, "Student's t of logarithms over training seeds, 95 %")
        if len(learnt) == 1:
            span = Interval(0.0, UNBOUNDED, 0.95, "one training seed has no interval")
        nulls = [claims.Null.number("1 (both at once)", 1.0)]
        if len(random):
            _, least, most = geometric_mean(random[:, j])
            drawn = claims.Null.of("mean of random-target models", random[:, j], "lower")
            nulls.append(replace(drawn, low=least, high=most, mean=True))
        h = claims.estimate(claim, value, span, nulls, n=len(learnt), clusters=len(learnt))
        estimates.append(replace(h, lacks=tuple(few)))
    late = [x[1] <= 1 / FARTHEST or x[2] >= FARTHEST for x in (*learnt, *random)]
    which = f"in {late.count(True)} of {len(late)} runs a curve does not settle before the last two snapshots"
    if any(late):
        return tuple(estimates), f"train longer: {which}, and the word depends on when"
    between = "take more snapshots: curves settle between snapshots, and the word depends on where"
    return tuple(estimates), between
