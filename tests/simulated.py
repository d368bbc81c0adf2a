"""Simulations: seeded draws, a factor model, and coverage of intervals."""

import math
from collections.abc import Iterable, Iterator
from typing import TypeVar

import jaxtyping
import numpy as np
from scipy import stats as scipy_stats

from llmgeom.stats import manifold

T = TypeVar("T")


def shapes_checked(items: Iterable[T], first: int = 1) -> Iterator[T]:
    """The items of a simulation; shapes are checked while the `first` of them are worked on.

    Repetitions differ in their numbers, not in shapes, and checks take a quarter of the time.
    """
    try:
        for i, item in enumerate(items):
            jaxtyping.config.update("jaxtyping_disable", i >= first)
            yield item
    finally:  # a simulation may end early
        jaxtyping.config.update("jaxtyping_disable", False)


def draws(seed):
    return np.random.default_rng(seed)


def contains(successes, trials, rate):
    """Whether the 95 % Clopper-Pearson interval of successes out of trials holds the rate."""
    found = scipy_stats.binomtest(successes, trials).proportion_ci()
    return found.low <= rate <= found.high


D, UNITS = 128, 40
LOADINGS = draws(99).normal(size=(2, D))


def factor_model(rng, kind):
    """Rows from one strong factor, two close ones, a skewed or heavy-tailed one, or a curve; independent noise."""
    if kind == "exponential":
        factors, size = rng.exponential(size=(UNITS, 1)) - 1, [[1.2]]
    elif kind == "t4":
        factors, size = rng.standard_t(4, size=(UNITS, 1)) / math.sqrt(2), [[1.2]]
    elif kind == "curve":
        angle = rng.uniform(0, math.pi, UNITS)
        factors, size = math.sqrt(2) * np.stack([np.cos(angle), np.sin(angle)], axis=1), [[1.2], [1.2]]
    elif kind == "strong":
        factors, size = rng.normal(size=(UNITS, 1)), [[1.2]]
    else:
        factors, size = rng.normal(size=(UNITS, 2)), [[0.9], [0.8]]
    return factors @ (LOADINGS[: len(size)] * size) + rng.normal(size=(UNITS, D))


def coverage(kind, repetitions):
    """How often each interval holds the expected value at this n and d, by simulation of the expectation."""
    rng = draws(13)
    truth = np.mean([manifold._share_summary(factor_model(rng, kind)) for _ in range(3000)], axis=0)
    hits = np.zeros(3)
    for _ in shapes_checked(range(repetitions)):
        found = manifold.share_intervals(factor_model(rng, kind), np.arange(UNITS))
        hits += [one.low <= expected <= one.high for one, expected in zip(found, truth, strict=True)]
    return hits / repetitions
