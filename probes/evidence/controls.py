"""Controls of in-context evidence: changes of the answers under changes of the prompt with a known exact effect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmgeom.claims import declared
from llmgeom.probe import UNTRAINED, Needs, ProbeInput, exact_answers
from llmgeom.probes.evidence.predictions import (
    ENDS,
    LABELS,
    MAIN,
    MOVED,
    VARIANTS,
    ExactAnswers,
    LabelPredictions,
    by_sample,
    label_entropy,
)
from llmgeom.probes.shared.nulls import Statistic, compare
from llmgeom.result import Curve, Estimate, Result, curve
from llmgeom.stats.resampling import mean_intervals

CONTROLS = "sula_controls"
CLAIMS = declared(CONTROLS)
NEEDS = Needs(controls=frozenset({UNTRAINED}), check=exact_answers, samples=tuple(VARIANTS), observers=(LABELS,))


@dataclass(frozen=True, kw_only=True)
class Controls(Result):
    """Changes of the model's answers when the prompt changes with a known effect on the exact answer."""

    TITLE = "Controls (SULA)"

    movement: Curve = curve(
        "control", "probability", "mean |change of P(first)| beyond the exact one", interval="label pairs"
    )


def measure(data: ProbeInput) -> Controls:
    """Movement of the answers under changes with a known effect."""
    return measure_controls(*by_sample(data, (MAIN, *VARIANTS)))


def measure_controls(truth: Mapping[str, ExactAnswers], models: Sequence[Mapping[str, LabelPredictions]]) -> Controls:
    """`measure` from exact answers and predictions by sample: `models` are the model, then its untrained controls."""
    (alike, mixed), main, (trained, *copies) = ENDS, truth[MAIN], models
    rows, cluster = np.flatnonzero(main.k >= 2), main.cluster

    def movement(model: Mapping[str, LabelPredictions], name: str) -> np.ndarray:
        """[prompt] |change of P(first)| beyond the exact change, after mirroring where labels are exchanged."""
        before, exact_before = model[MAIN].p, np.exp(main.log_p[:, 0])
        if name == "swap":
            before, exact_before = 1 - before, 1 - exact_before
        return np.abs(model[name].p - before - (np.exp(truth[name].log_p[:, 0]) - exact_before))

    def mean_movement(name: str) -> Statistic:
        return lambda model, chosen: float(movement(model, name)[chosen].mean())

    def separation(model: Mapping[str, LabelPredictions], chosen: np.ndarray) -> float:
        fall = model[mixed].h_label[chosen] - model[alike].h_label[chosen]
        exact = label_entropy(truth[mixed].log_p)[chosen] - label_entropy(truth[alike].log_p)[chosen]
        return float(fall.mean() / exact.mean())

    def against_untrained(name: str, of: Statistic) -> Estimate:
        return compare(CLAIMS[name], lambda model, at: of(model, rows[at]), trained, cluster[rows], {UNTRAINED: copies})

    statistics = {f"movement: {name}": mean_movement(name) for name in MOVED}
    statistics["consistent against alternating"] = separation
    moved = [movement(trained, name)[rows] for name in MOVED]
    return Controls(
        movement=Curve(np.array([x.mean() for x in moved]), interval=mean_intervals(moved, cluster[rows])),
        estimates=tuple(against_untrained(name, statistic) for name, statistic in statistics.items()),
        ticks={"control": MOVED},
    )
