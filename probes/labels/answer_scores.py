"""Probability, accuracy and calibration of scored answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from llmgeom.claims import Null, cut, declared, estimate
from llmgeom.probes.shared.nulls import permutation_null
from llmgeom.result import Curve, Estimate, Result, curve, quantity
from llmgeom.stats.label_scores import (
    BINS,
    brier,
    calibrated_errors,
    calibration_error,
    cluster_correlation,
    few_orders,
    moved,
    ranking,
    reliability,
)
from llmgeom.stats.resampling import Transform, jackknife

PROBE = "answers"
DRAWS = 199
CLAIMS = declared(PROBE)
MOST = {"Brier score": 2.0}  # the largest value; 1 for every other score


@dataclass(frozen=True, kw_only=True)
class Answers(Result):
    """Probability, accuracy and calibration of the answers."""

    TITLE = "Given answers"

    share: Curve = curve(
        "confidence",
        "fraction",
        "share of right answers, by confidence",
        interval="prompts, taken as independent",
        beside="confidence",
    )
    confidence: np.ndarray = quantity("confidence", "fraction", "mean confidence: a calibrated model lies here")
    count: np.ndarray = quantity("confidence", "prompts", "prompts in each bin")
    log_prob: np.ndarray | None = quantity("prompt answer", "bits", "log2-probability of each answer, all its tokens")
    entropy: np.ndarray = quantity(
        "prompt", "bits", "entropy of the next token; of the answers where only these are known"
    )
    tokens: np.ndarray | None = quantity("prompt", "count", "tokens of each prompt")


def probabilities(log_prob: Sequence[Sequence[float]]) -> np.ndarray:
    """[prompt answer] probabilities among the answers of a prompt; 0 beyond its last answer."""
    x = np.full((len(log_prob), max(map(len, log_prob))), -np.inf)
    for i, row in enumerate(log_prob):
        x[i, : len(row)] = row
    x = np.exp(x - x.max(1, keepdims=True))
    return x / x.sum(1, keepdims=True)


def scored(
    log_prob: Sequence[Sequence[float]],
    right: np.ndarray,
    clusters: np.ndarray,
    seed: int,
    notes: Sequence[str],
    *,
    names: tuple[str, ...] = (),
    entropy: np.ndarray | None = None,
    tokens: np.ndarray | None = None,
) -> Answers:
    """Accuracy, calibration and ranking of answers, with intervals by cluster.

    The control of most scores permutes the right answers. If these have too few orders (`few_orders`; only one if all
    right answers have one index), the scores have no control, and a warning says why.

    Args:
        log_prob: [prompt][answer] nats.
        right: [prompt] index of the right answer.
        clusters: [prompt] the independently drawn cluster.
        notes: Notes on the answers.
        names: Names of the answers, if all prompts have the same.
        entropy: [prompt] bits, of the next token; by default that of the answers.
        tokens: [prompt] number of tokens.

    Raises:
        UserError: fewer than 5 clusters.
    """
    probability = probabilities(log_prob)
    if entropy is None:
        entropy = -(probability * np.log2(np.where(probability > 0, probability, 1))).sum(1)
    answer, sure = probability.argmax(1), probability.max(1)
    rows, why = np.arange(len(right)), few_orders(right, clusters)
    orders = moved(right, clusters, DRAWS, seed)[: 0 if why else DRAWS]

    def measured(name: str, statistic: Callable[[np.ndarray, np.ndarray], float], null: str = "") -> Estimate:
        """`statistic` of rows and of their right answers; its default null permutes the right answers."""
        value = statistic(rows, right)
        scale: Transform = "share" if name == "accuracy" else "identity"
        span = jackknife(lambda subset: statistic(subset, right[subset]), rows, clusters, scale)
        if null:
            correlation = cluster_correlation(sure, answer == right, clusters)
            draws = calibrated_errors(sure, DRAWS, seed, clusters, correlation)
        else:
            draws = np.array([statistic(rows, right[order]) for order in orders])
        kind, side = null or "right answers in another order", CLAIMS[name].side
        other = permutation_null(kind, value, draws, side) if len(draws) else Null.of(kind, draws, side)
        result = estimate(CLAIMS[name], value, span, [other], n=len(right), clusters=len(set(clusters.tolist())))
        return cut(result, 0.0, MOST.get(name, 1.0))

    mean, share, count = reliability(sure, answer == right)
    regular = len(set(map(len, log_prob))) == 1
    return Answers(
        share=Curve(share, interval=_binomial(share, count)),
        confidence=mean,
        count=count.astype(np.float64),
        log_prob=np.array(log_prob, dtype=np.float64) / np.log(2) if regular else None,
        entropy=entropy,
        tokens=None if tokens is None else tokens.astype(np.float64),
        estimates=(
            measured("accuracy", lambda subset, truth: float((answer[subset] == truth).mean())),
            measured(
                "calibration error (ECE)",
                lambda subset, truth: calibration_error(sure[subset], answer[subset] == truth),
                "a calibrated model of these confidences",
            ),
            measured("Brier score", lambda subset, truth: brier(probability[subset], truth)),
            measured(
                "AUROC of the largest probability", lambda subset, truth: ranking(sure[subset], answer[subset] == truth)
            ),
            measured("AUROC of low entropy", lambda subset, truth: ranking(-entropy[subset], answer[subset] == truth)),
        ),
        notes=(*notes, f"at most {BINS} bins of equally many prompts"),
        warnings=(f"accuracy, Brier score and AUROC have no control: {why}",) if why else (),
        ticks={"confidence": tuple(f"{value:.2f}" for value in mean), **({"answer": names} if names else {})},
    )


def _binomial(share: np.ndarray, count: np.ndarray) -> np.ndarray:
    """[bin bound] Wilson's 95 % interval of a share."""
    z = 1.959964
    centre = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * np.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return np.stack([centre - half, centre + half], 1)
