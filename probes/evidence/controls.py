"""Controls of in-context evidence: changes of the answers under changes of the prompt with a known exact effect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from llmgeom.claims import declared
from llmgeom.probe import Needs, ProbeInput, exact_answers
from llmgeom.probes.evidence.depths import exchanged
from llmgeom.probes.evidence.predictions import (
    CONTROL_PROMPTS,
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
from llmgeom.result import Estimate, Result, line
from llmgeom.stats.resampling import mean_intervals

CONTROLS = "sula_controls"
CLAIMS = declared(CONTROLS)
OTHERS, AT_RANDOM = "answers to other prompts", "conditions exchanged at random"
DRAWS = 19  # of each control
LEAST_SHOWN = 2  # observations of a prompt that conditions change
# Untrained copies are no control: they hardly move, whatever the prompt, and were half of the tokens of a run.
NEEDS = Needs(
    controls=frozenset(),
    check=exact_answers,
    samples=tuple(VARIANTS),
    control_prompts=CONTROL_PROMPTS,
    observers=(LABELS,),
)


def measure(data: ProbeInput) -> Result:
    """Movement of the answers under changes with a known effect. Raises UserError: the prompts lack a sample."""
    truth: dict[str, ExactAnswers] = {}
    model: dict[str, LabelPredictions] = {}
    for name, of in by_sample(data, (MAIN, *VARIANTS)).items():
        rows = np.flatnonzero(ExactAnswers(of.capture.batch).k >= LEAST_SHOWN)
        truth[name] = ExactAnswers(of.capture.batch.take(rows))
        model[name] = LabelPredictions.of(of.capture).of_rows(rows)
    return measure_controls(truth, model, data.seed)


def measure_controls(truth: Mapping[str, ExactAnswers], own: Mapping[str, LabelPredictions], seed: int = 0) -> Result:
    """`measure` from exact answers and the model's predictions by sample.

    Its controls are made of the same answers: each changed prompt is given the answer to that of another prompt with as
    many labels; alike and alternating labels are exchanged in a random half of the prompts.
    """
    (alike, mixed), main, rng = ENDS, truth[MAIN], np.random.default_rng([seed, 29])
    rows, cluster = np.flatnonzero(main.k >= LEAST_SHOWN), main.cluster
    others = [{**own, **{name: own[name].of_rows(order) for name in MOVED}} for order in exchanged(main.k, DRAWS, rng)]
    coins = rng.random((DRAWS, len(main.k))) < 0.5
    at_random = [
        {**own, alike: own[alike].or_else(own[mixed], coin), mixed: own[mixed].or_else(own[alike], coin)}
        for coin in coins
    ]

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

    def against(name: str, of: Statistic, control: str, draws: Sequence[Mapping[str, LabelPredictions]]) -> Estimate:
        return compare(CLAIMS[name], lambda model, at: of(model, rows[at]), own, cluster[rows], {control: draws})

    estimates = [against(f"movement: {name}", mean_movement(name), OTHERS, others) for name in MOVED]
    estimates.append(against("consistent against alternating", separation, AT_RANDOM, at_random))
    moved = [movement(own, name)[rows] for name in MOVED]
    means, over = [x.mean() for x in moved], ("label pairs", mean_intervals(moved, cluster[rows]))
    said = "mean |change of P(first)| beyond the exact one"
    return Result.of(
        "Controls (SULA)",
        line("movement", means, "control", "probability", said, interval=over),
        __name__,
        estimates=tuple(estimates),
        ticks={"control": MOVED},
    )
