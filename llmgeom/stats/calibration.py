"""Calibration of probabilities of answers: adaptive calibration error, Brier score and ranking of right over wrong."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.stats import rankdata

BINS = 10


def bins(confidence: Float[np.ndarray, " prompt"], count: int = BINS) -> Int[np.ndarray, " prompt"]:
    """The bin of each prompt: bins of about equally many, in order of confidence; equal confidences share a bin.

    Nixon and others (2019), Measuring calibration in deep learning. Fewer than 5 prompts a bin make fewer bins.
    """
    n = len(confidence)
    count = max(1, min(count, n // 5))
    place = rankdata(confidence, method="min") - 1
    return np.unique((place * count / n).astype(np.int64), return_inverse=True)[1]


def reliability(
    confidence: Float[np.ndarray, " prompt"], right: Bool[np.ndarray, " prompt"]
) -> tuple[Float[np.ndarray, " bin"], Float[np.ndarray, " bin"], Int[np.ndarray, " bin"]]:
    """Mean confidence, share of right answers, and number of prompts, bin by bin."""
    of = bins(confidence)
    count = np.bincount(of)
    return np.bincount(of, confidence) / count, np.bincount(of, right) / count, count


def calibration_error(confidence: Float[np.ndarray, " prompt"], right: Bool[np.ndarray, " prompt"]) -> float:
    """Adaptive ECE: sum over bins of (prompts in it / prompts) |mean confidence - share right|.

    0 for infinitely many prompts of a calibrated model; above 0 for few, so compare with `calibrated_errors`.
    """
    mean, share, count = reliability(confidence, right)
    return float((count * np.abs(mean - share)).sum() / count.sum())


def calibrated_errors(confidence: Float[np.ndarray, " prompt"], draws: int, seed: int) -> Float[np.ndarray, " draw"]:
    """The calibration error of a model that is calibrated: each answer is right with the confidence it has."""
    rng = np.random.default_rng(seed)
    return np.array([calibration_error(confidence, rng.random(len(confidence)) < confidence) for _ in range(draws)])


def brier(probability: Float[np.ndarray, "prompt answer"], right: Int[np.ndarray, " prompt"]) -> float:
    """Mean over prompts of sum over answers of (p - 1 if it is the right one, else p)^2: 0 is perfect, 2 the worst."""
    truth = right[:, None] == np.arange(probability.shape[1])
    return float(np.square(probability - truth).sum(1).mean())


def ranking(score: Float[np.ndarray, " prompt"], right: Bool[np.ndarray, " prompt"]) -> float:
    """AUROC: P(a right answer scores higher than a wrong one), ties half; 1/2 where all are right or all wrong."""
    yes = int(right.sum())
    no = len(right) - yes
    if not yes or not no:
        return 0.5
    return float((rankdata(score)[right].sum() - yes * (yes + 1) / 2) / (yes * no))
