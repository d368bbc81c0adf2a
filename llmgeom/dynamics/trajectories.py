"""What runs of one training recipe did, snapshot by snapshot, and the ratios of the steps at which curves settle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llmgeom import claims
from llmgeom.dynamics.drift import LEVEL, SEEDS, Drifts, Ratio, Settled, fallen, settled
from llmgeom.dynamics.runs import Run
from llmgeom.errors import UserError
from llmgeom.model.attention_gradients import Signals
from llmgeom.result import Estimate, Figure, Measured, Quantity
from llmgeom.stats.resampling import Interval, geometric_mean, mean_intervals

DRIFT, GRADIENTS = "drift", "gradients"
HALF = 0.5
NO_END = -claims.NO_END  # of an interval over one training seed


@dataclass(frozen=True)
class Course:
    """What one run did: its drifts, and at each snapshot the gradients and a language model's loss on the prompts.

    None and empty where they are not measured.
    """

    run: Run
    drifts: Drifts | None
    signals: tuple[Signals, ...] = ()
    losses: tuple[float, ...] = ()

    def drift(self, name: str) -> np.ndarray:
        """[step]. Raises UserError where drifts were not had."""
        if self.drifts is None:
            raise UserError(f"the drifts of {self.run.name} were not measured")
        return getattr(self.drifts, name)

    def pull(self, name: str) -> np.ndarray:
        """[step], root mean square over layers (of the spread the mean), over its largest value in training.

        Raises UserError where it is 0 throughout.
        """
        each = np.array([getattr(one, name) for one in self.signals])
        curve = each.mean(1) if name == "spread" else np.sqrt(np.square(each).mean(1))
        if not curve.max() > 0:
            raise UserError(f"the {name.replace('_', ' ')} of {self.run.name} is 0 at every snapshot")
        return curve / curve.max()


# ---- sections --------------------------------------------------------------------------------------------------------


class Section:
    """One Measured in the making: curves over steps, settling steps run by run, and ratios of these with verdicts.

    own, null   the runs that learn, and those of random targets.
    """

    def __init__(self, probe: str, courses: Sequence[Course]) -> None:
        self.probe = probe
        self.own = [c for c in courses if not c.run.random]
        self.null = [c for c in courses if c.run.random]
        self.steps = courses[0].run.steps
        self.quantities: dict[str, Quantity] = {}
        self.arrays: dict[str, np.ndarray] = {}
        self.estimates: list[Estimate] = []
        self.lacking: dict[str, str] = {}
        self.notes: list[str] = []

    def curve(self, name: str, unit: str, meaning: str, of: Callable[[Course], np.ndarray]) -> None:
        """Mean over the runs that learn of `of(course)`, [step], with their interval and the others' range."""
        try:
            own, null = (np.array([of(course) for course in group]) for group in (self.own, self.null))
        except UserError as refusal:
            self.notes.append(f"{meaning}: not measured, {refusal}")
            return
        interval, band = f"{name}_interval" * (len(own) > 1), f"{name}_null" * (len(null) > 0)
        self._add(name, "step", unit, meaning, own.mean(0), Figure("curve", band=band, interval=interval))
        if interval:
            self._add(interval, "step bound", unit, "95 % interval over training seeds", mean_intervals(own.T))
        if band:
            ends = np.stack([null.min(0), null.max(0)], 1)
            self._add(band, "step bound", unit, f"range of {len(null)} models trained on random targets", ends)
        self._add(f"{name}_runs", "run step", unit, f"{meaning}, run by run", np.array([*own, *null]))

    def settles(self, name: str, of: Callable[[Course], Settled]) -> None:
        """When a curve settles, run by run."""
        try:
            found = [of(course) for course in (*self.own, *self.null)]
        except UserError as refusal:
            self.notes.append(f"when {name.replace('_', ' ')} settles is not measured: {refusal}")
            return
        self._add(f"{name}_settled", "run", "step", "first step with 5 % left", np.array([one.step for one in found]))
        pinned = np.array([float(one.pinned) for one in found])
        self._add(f"{name}_pinned", "run", "", "1 where the run's end sets that step", pinned)

    def ratio(self, name: str, of: Callable[[Course], Ratio]) -> None:
        """Of the runs that learn, against 1 and against those of random targets."""
        try:
            found, others = ([of(course) for course in group] for group in (self.own, self.null))
        except UserError as refusal:
            self.notes.append(f"{name}: not measured, {refusal}")
            return
        own, null = (np.array([ratio.value for ratio in each]) for each in (found, others))
        value, low, high = geometric_mean(own)
        nulls = [claims.Null.number("1, both at once; training seeds", 1.0)]
        if len(null):
            _, least, most = geometric_mean(null)
            drawn = claims.Null.of("mean of random-target models", value, null, "lower")
            nulls.append(replace(drawn, low=least, high=most, mean=True))
        span = Interval(low, high, 0.95, "Student's t of logarithms over training seeds, 95 %")
        if len(own) == 1:
            span = Interval(0.0, NO_END, 0.95, "one training seed has no interval")
        claim, n = claims.declared(self.probe)[name], len(own)
        self.estimates.append(claims.estimate(claim, value, span, nulls, n=n, clusters=n))
        open_, lacking = sum(ratio.open for ratio in found), []
        if open_:
            lacking.append(f"in {open_} of {n} runs neither settles before the last two snapshots: train longer")
        for count, what in ((n, "training seeds"), (len(null), "random-target runs (--corrupt 1)")):
            if count < SEEDS:
                lacking.append(f"needs {SEEDS} {what}, has {count}")
        if lacking:
            self.lacking[name] = "; ".join(lacking)

    def measured(self) -> Measured:
        return replace(
            TEXTS[self.probe],
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


DRIFT_TEXTS = Measured(
    title="Frame, values and precision",
    meaning=(
        "How far attention (the frame) and values still are from where training leaves them, and how far the answers "
        "are from the exact ones. A ratio of settling steps below 1 says that attention settles first."
    ),
    computed=(
        "On fixed held-out inputs, F(t) = 1 - debiased linear CKA of the attention weights of snapshot t and of the "
        "last one, rows: queries, features: the weight on each key; V(t) the same of value vectors, rows: positions; "
        "both averaged over layers and heads. P(t) = KL(exact || model), bits a query (without a tunnel: KL(last "
        "snapshot || model)). A curve has settled at the first step from which on it stays at or below 5 % of its "
        "value at the first snapshot, straight in log(1 + step) between snapshots; half-way: 50 %. The ratio is taken "
        "run by run; geometric mean over training seeds, Student's interval of its logarithm. The last ratio is the "
        "form that the papers' wording suggests: total variation of attention at 5 %, over the step at which log P "
        "has done 95 % of its fall."
    ),
    null="Settling together (1), and the same ratio in models trained alike on random targets, by Welch's t.",
    failure_modes=(
        "A curve that is compared with its own end always reaches 0 there: where it crosses only between the last two "
        "snapshots, the step says how long the run was, and if both curves of a ratio do, nothing is decided. At a "
        "constant rate weights keep moving and may never settle to 5 %; with a falling rate they settle because of it. "
        "Linear CKA does not see rotations, and reads mostly the directions of largest variance: the causal mask and "
        "the tokens themselves keep it high from the start, so a drift at step 0 below 1 is no learning. Precision is "
        "held against the truth, the others against their own end."
    ),
    estimates=(),
    quantities={},
    arrays={},
)
GRADIENT_TEXTS = Measured(
    title="What the loss asks of routing and of values",
    meaning=(
        "How strongly the loss pulls at attention scores and at values. Paper II argues that the pull at scores stops "
        "first, because the values attended to become equally useful, while values go on improving."
    ),
    computed=(
        "Of the cross-entropy of the outcomes drawn, summed over queries, in nats: root mean square of dL/ds_ij over "
        "pairs of query and key, and of dL/dv_j over positions and coordinates, over layers; the spread is the sd of "
        "b_ij = dL/dz_i . v_j over keys, weighted by attention, mean over layers. Each over its own largest value over "
        "training. Vanished: from this step on at or below 5 % of that. What is left: the fraction at the end."
    ),
    null="Vanishing together (1), and the same ratio in models trained alike on random targets, by Welch's t.",
    failure_modes=(
        "Outcomes are drawn, so the gradient of one sequence does not vanish where the answer is right but open: it "
        "falls to what chance leaves, and neither curve need reach 5 %. Both gradients hold dL/dz, so both vanish "
        "where it does; only their ratio speaks about routing. Scores and values have different scales and signs of "
        "life: a larger value vector makes the score gradient larger."
    ),
    estimates=(),
    quantities={},
    arrays={},
)
TEXTS = {DRIFT: DRIFT_TEXTS, GRADIENTS: GRADIENT_TEXTS}


def sections(courses: Sequence[Course]) -> dict[str, Measured]:
    """Drifts and gradients where every run has them, with verdicts: none of these where too little was trained."""
    made = {DRIFT: _drift(courses)} if all(c.drifts for c in courses) else {}
    if all(c.signals for c in courses):
        made[GRADIENTS] = _gradients(courses)
    judged = claims.judge({probe: section.measured() for probe, section in made.items()})
    return {
        probe: replace(measured, estimates=tuple(_final(h, made[probe].lacking) for h in measured.estimates))
        for probe, measured in judged.items()
    }


def _final(h: Estimate, lacking: Mapping[str, str]) -> Estimate:
    if h.name not in lacking:
        return h
    return replace(h, verdict="open", why=lacking[h.name]) if h.claim else h


def _drift(courses: Sequence[Course]) -> Section:
    section = Section(DRIFT, courses)
    exact = "KL(exact || model)" if courses[0].run.task else "KL(last snapshot || model)"
    section.curve("frame", "1 - CKA", "attention, apart from its end", lambda c: c.drift("frame"))
    section.curve("value", "1 - CKA", "values, apart from their end", lambda c: c.drift("value"))
    section.curve("precision", "bits", exact, lambda c: c.drift("precision"))
    section.curve("tv", "total variation", "attention weights, apart from their end", lambda c: c.drift("tv"))

    def at(name: str, level: float = LEVEL) -> Callable[[Course], Settled]:
        return lambda c: settled(c.run.steps, c.drift(name), level)

    def over(name: str, first: Callable[[Course], Settled], second: Callable[[Course], Settled]) -> None:
        section.ratio(name, lambda c: Ratio.of(first(c), second(c)))

    over("frame over precision", at("frame"), at("precision"))
    over("frame over values", at("frame"), at("value"))
    over("frame over precision, half-way", at("frame", HALF), at("precision", HALF))
    over("frame over values, half-way", at("frame", HALF), at("value", HALF))
    over(
        "total variation of attention over log precision",
        at("tv"),
        lambda c: settled(c.run.steps, fallen(c.drift("precision"))),
    )
    for name in ("frame", "value", "precision", "tv"):
        section.settles(name, at(name))
    return section


def _gradients(courses: Sequence[Course]) -> Section:
    section = Section(GRADIENTS, courses)
    names = {
        "score_gradient": "rms of dL/ds over its largest",
        "value_gradient": "rms of dL/dv over its largest",
        "spread": "spread of b over its largest",
    }

    def pull(name: str) -> Callable[[Course], np.ndarray]:
        return lambda c: c.pull(name)

    def at(name: str, level: float = LEVEL) -> Callable[[Course], Settled]:
        return lambda c: settled(c.run.steps, c.pull(name), level, whole=1.0)

    def both(level: float) -> Callable[[Course], Ratio]:
        return lambda c: Ratio.of(at("score_gradient", level)(c), at("value_gradient", level)(c))

    def left(name: str) -> Callable[[Course], Ratio]:
        return lambda c: Ratio(float(c.pull(name)[-1] / c.pull("value_gradient")[-1]), False)

    for name, meaning in names.items():
        section.curve(name, "fraction", meaning, pull(name))
        section.settles(name, at(name))
    section.ratio("scores over values", both(LEVEL))
    section.ratio("scores over values, half-way", both(HALF))
    section.ratio("scores over values, what is left", left("score_gradient"))
    section.ratio("spread of b over values, what is left", left("spread"))
    return section
