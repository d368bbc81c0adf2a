"""Curves over training: drifts and gradients of several runs, their settling steps, and metrics by snapshot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llmgeom import claims
from llmgeom.dynamics import SEEDS
from llmgeom.dynamics.drift import FARTHEST, Settled, fallen, settled
from llmgeom.dynamics.gradients import Signals
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
Course = Callable[["Trajectory"], np.ndarray]
Ratio = tuple[float, float, float]  # its value, and the least and the largest that the snapshots allow


@dataclass(frozen=True)
class Trajectory:
    """What is kept of one run over its snapshots.

    Attributes:
        distances: `drift.distances` of each snapshot; empty if they are not measured.
        signals: gradients at each snapshot; empty if they are not measured.
        losses: a language model's loss on the prompts at each snapshot, in nats per token; empty in a wind tunnel.
        weights: the hash of the weights of each snapshot.
    """

    run: Run
    distances: Sequence[Mapping[str, float | str]] = ()
    signals: Sequence[Signals] = ()
    losses: tuple[float, ...] = ()
    weights: tuple[str, ...] = ()

    def drift(self, name: str) -> np.ndarray:
        """[step] one of the distances. Raises UserError if there is none at some snapshot."""
        found = [distances[name] for distances in self.distances]
        for place, why in enumerate(found, 1):
            if isinstance(why, str):
                raise UserError(f"{self.run.name}, snapshot {place} of {len(found)} and the last, {why}")
        return np.array(found)

    def gradient(self, name: str) -> np.ndarray:
        """[step] root mean square over layers, divided by its largest value in training.

        Raises UserError: the gradient is 0 at every snapshot.
        """
        curve = np.sqrt(np.square([getattr(signals, name) for signals in self.signals]).mean(1))
        if not curve.max() > 0:
            raise UserError(f"the {name.replace('_', ' ')} of {self.run.name} is 0 at every snapshot")
        return curve / curve.max()


# ---- sections --------------------------------------------------------------------------------------------------------


class Section:
    """A builder of one Result: curves over steps, settling steps by run, and their ratios with verdicts.

    Attributes:
        own: the runs that learn.
        null: the runs on random targets.
        estimates: each ratio three times: as it is; with every run's ratio at the end that favours its claim most, of
            those that the snapshots allow; and at the other end.
        unseen: metric -> what would show which of these is right.
    """

    def __init__(self, probe: str, trajectories: Sequence[Trajectory]) -> None:
        self.probe = probe
        self.own = [c for c in trajectories if not c.run.random]
        self.null = [c for c in trajectories if c.run.random]
        self.labelled: dict[str, Labelled | None] = {}
        self.estimates: list[tuple[Estimate, Estimate, Estimate]] = []
        self.unseen: dict[str, str] = {}
        self.notes: list[str] = []

    def curve(self, name: str, unit: str, meaning: str, measure: Course, settles: Callable[..., Settled]) -> None:
        """Add the mean curve of the runs that learn, with its interval, the range of the random-target runs, and the
        step at which it settles in each run."""
        try:
            learnt, null = (np.array([measure(course) for course in group]) for group in (self.own, self.null))
        except UserError as refusal:
            self.notes.append(f"{meaning}: not measured, {refusal}")
            return
        interval = mean_intervals(learnt.T) if len(learnt) > 1 else None
        band = np.stack([null.min(0), null.max(0)], 1) if len(null) else None
        around: Any = {"interval": ("training seeds", interval)}
        around["null"] = (f"range of {len(null)} models trained on random targets", band)
        self.labelled |= line(name, learnt.mean(0), "step", unit, meaning, **around)
        self.labelled[f"{name}_runs"] = labelled(np.array([*learnt, *null]), "run step", unit, f"{meaning}, by run")
        try:
            found = [settles(course) for course in (*self.own, *self.null)]
        except UserError as refusal:
            self.notes.append(f"when {name.replace('_', ' ')} settles is not measured: {refusal}")
            return
        steps, late = [one.step for one in found], [float(one.censored) for one in found]
        self.labelled[f"{name}_settled"] = labelled(steps, "run", "step", "first step with 5 % left")
        meaning = "1 where that step is right-censored: the end of the run sets it"
        self.labelled[f"{name}_censored"] = labelled(late, "run", "", meaning)

    def ratio(self, name: str, measure: Callable[[Trajectory], Ratio]) -> None:
        """Add a ratio of settling steps, compared with 1 and with the random-target runs."""
        try:
            own, random = ([measure(course) for course in group] for group in (self.own, self.null))
        except UserError as refusal:
            self.notes.append(f"{name}: not measured, {refusal}")
            return
        groups = ((RUNS, own), (RANDOM, random))
        few = [f"needs {SEEDS} {what}: has {len(of)}" for what, of in groups if len(of) < SEEDS]
        claim = claims.declared(self.probe)[name]
        compared = (_compared(claim, [x[i] for x in own], [x[j] for x in random]) for i, j in ((0, 0), (1, 2), (2, 1)))
        value, favoured, other = (replace(h, lacks=tuple(few)) for h in compared)
        self.estimates.append((value, favoured, other))
        late = [x[1] <= 1 / FARTHEST or x[2] >= FARTHEST for x in (*own, *random)]
        which = f"in {late.count(True)} of {len(late)} runs a curve does not settle before the last two snapshots"
        if any(late):
            self.unseen[name] = f"train longer: {which}, and the word depends on when"
        else:
            self.unseen[name] = "take more snapshots: curves settle between snapshots, and the word depends on where"

    def measured(self, way: int = 0) -> Result:
        """The section, with the ratios as they are or at one of their ends (`estimates`)."""
        return Result.of(
            TITLES[self.probe],
            self.labelled,
            __name__,
            estimates=tuple(each[way] for each in self.estimates),
            notes=tuple(self.notes),
            ticks={
                "step": tuple(map(str, self.own[0].run.steps)),
                "run": tuple(c.run.name for c in (*self.own, *self.null)),
            },
        )


def _compared(claim: claims.Claim, learnt: Sequence[float], random: Sequence[float]) -> Estimate:
    """Ratios of runs that learn, compared with 1 and with those of random-target runs."""
    value, low, high = geometric_mean(np.array(learnt))
    span = Interval(low, high, 0.95, "Student's t of logarithms over training seeds, 95 %")
    if len(learnt) == 1:
        span = Interval(0.0, UNBOUNDED, 0.95, "one training seed has no interval")
    nulls = [claims.Null.number("1 (both at once)", 1.0)]
    if len(random):
        _, least, most = geometric_mean(np.array(random))
        drawn = claims.Null.of("mean of random-target models", np.array(random), "lower")
        nulls.append(replace(drawn, low=least, high=most, mean=True))
    return claims.estimate(claim, value, span, nulls, n=len(learnt), clusters=len(learnt))


def sections(trajectories: Sequence[Trajectory]) -> dict[str, Result]:
    """Sections of drifts and of gradients, if every run has them, with verdicts; too few runs leave a claim open.

    So does a claim that has another word where its ratios have the ends that the snapshots allow. Simulated, 5 runs
    whose answers settle at step 23 and attention at 30, snapshots at 0, 50, 200, 800, 3200, and random-target runs: by
    the interpolated ratios, .88, attention was called first in 40 of 40 studies. With the 16 snapshots of `dynamics
    --task`, and curves of other shapes in runs and random-target runs with one true ratio, .25, attention was called
    earlier than in random-target runs ("small") in up to 20 of 60 studies.
    """
    built = {DRIFT: _drift(trajectories)} if all(c.distances for c in trajectories) else {}
    if all(c.signals for c in trajectories):
        built[GRADIENTS] = _gradients(trajectories)
    judged, *ends = (claims.judge({p: section.measured(way) for p, section in built.items()}) for way in range(3))

    def safe(h: Estimate, others: Sequence[Estimate], unseen: str) -> Estimate:
        # An end at which the value lies above every control leaves "ruled out", which one control suffices for.
        words = {(h.verdict, end.verdict) for end in others}
        if not h.claim or all(word == other or (word, other) == ("ruled out", "opposite") for word, other in words):
            return h
        return replace(h, lacks=(unseen,), verdict="open", why=unseen)

    found = {}
    for probe, measured in judged.items():
        three = zip(measured.estimates, *(end[probe].estimates for end in ends), strict=True)
        estimates = tuple(safe(h, others, built[probe].unseen[h.name]) for h, *others in three)
        found[probe] = replace(measured, estimates=estimates)
    return found


def _drift(trajectories: Sequence[Trajectory]) -> Section:
    section = Section(DRIFT, trajectories)
    exact = "KL(exact || model)" if trajectories[0].run.task else "KL(last snapshot || model)"

    def drift(name: str) -> Course:
        return lambda c: c.drift(name)

    def settles(name: str) -> Callable[[Trajectory], Settled]:
        return lambda c: settled(c.run.steps, c.drift(name))

    for name, unit, meaning in (
        ("frame", "1 - CKA", "attention: distance from its end"),
        ("value", "1 - CKA", "values: distance from their end"),
        ("precision", "bits", exact),
        ("tv", "total variation", "attention weights: distance from their end"),
    ):
        section.curve(name, unit, meaning, drift(name), settles(name))
    section.ratio("frame over precision", lambda c: settles("frame")(c).over(settles("precision")(c)))
    section.ratio("frame over values", lambda c: settles("frame")(c).over(settles("value")(c)))
    section.ratio(
        "total variation of attention over log precision",
        lambda c: settles("tv")(c).over(settled(c.run.steps, fallen(c.drift("precision")))),
    )
    return section


def _gradients(trajectories: Sequence[Trajectory]) -> Section:
    section = Section(GRADIENTS, trajectories)

    def gradient(name: str) -> Course:
        return lambda c: c.gradient(name)

    def settles(name: str) -> Callable[[Trajectory], Settled]:
        return lambda c: settled(c.run.steps, c.gradient(name), whole=1.0)

    for name, meaning in (
        ("score_gradient", "rms of dL/ds over its largest"),
        ("value_gradient", "rms of dL/dv over its largest"),
    ):
        section.curve(name, "fraction", meaning, gradient(name), settles(name))

    def left(c: Trajectory) -> Ratio:
        return (float(c.gradient("score_gradient")[-1] / c.gradient("value_gradient")[-1]),) * 3

    section.ratio("scores over values", lambda c: settles("score_gradient")(c).over(settles("value_gradient")(c)))
    section.ratio("scores over values, what is left", left)
    return section
