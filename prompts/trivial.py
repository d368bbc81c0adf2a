"""Observers that do not infer: the best answers that know one simple feature of each outcome, such as its count."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from jaxtyping import Float, Int

from llmgeom.prompts.process import Draw


def counts(draws: Sequence[Draw], answers: int) -> Int[np.ndarray, "prompt outcome"]:
    """How often each outcome was seen."""
    return np.array([np.bincount(np.array(draw.seen, dtype=int), minlength=answers) for draw in draws])


def is_commonest(draws: Sequence[Draw], answers: int) -> Int[np.ndarray, "prompt outcome"]:
    """1 for the outcome that was seen most often, above 1 for those that share that place, 0 for all others."""
    seen = counts(draws, answers)
    first = seen == seen.max(1, keepdims=True)
    return first * first.sum(1, keepdims=True)


def is_last(draws: Sequence[Draw], answers: int) -> Int[np.ndarray, "prompt outcome"]:
    """1 for the outcome that was seen last."""
    last = np.array([draw.seen[-1] if draw.seen else -1 for draw in draws])
    return (last[:, None] == np.arange(answers)).astype(int)


def steps(draws: Sequence[Draw], answers: int) -> Int[np.ndarray, "prompt outcome"]:
    """How often each outcome followed the one that was seen last."""
    followers = [[b for a, b in pairwise(draw.seen) if a == draw.seen[-1]] for draw in draws]
    return np.array([np.bincount(np.array(row, dtype=int), minlength=answers) for row in followers])


def best_by_feature(
    exact: Float[np.ndarray, "prompt outcome"], draws: Sequence[Draw], feature: Int[np.ndarray, "prompt outcome"]
) -> Float[np.ndarray, "prompt outcome"]:
    """Log-probabilities of an observer that knows k and the feature of each outcome, nats.

    Each outcome has the mean exact probability of all outcomes with its k and feature, over these prompts;
    then rows are normalised. Fitted to the exact answers, so it is at least as good as one that had to learn. Derived
    here. An outcome has probability 0 only if the exact answer excludes all outcomes like it.
    """
    k = np.array([len(draw.seen) for draw in draws])
    keys = np.stack([np.broadcast_to(k[:, None], feature.shape), feature], -1).reshape(-1, 2)
    _, group = np.unique(keys, axis=0, return_inverse=True)
    group = group.reshape(-1)
    means = np.bincount(group, np.exp(exact).reshape(-1)) / np.bincount(group)
    p = means[group].reshape(feature.shape)
    with np.errstate(divide="ignore"):
        return np.log(p / p.sum(1, keepdims=True))
