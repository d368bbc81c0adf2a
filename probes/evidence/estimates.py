"""Estimates of in-context evidence: a statistic of the model, its interval over clusters, and the controls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from llmgeom.claims import Null, declared, estimate
from llmgeom.result import Estimate
from llmgeom.stats.resampling import Interval, jackknife

UNTRAINED = "untrained"
Statistic = Callable[[Any, np.ndarray], float]  # (what was measured of one model, rows of prompts) -> value


def mean_by(group: np.ndarray, values: np.ndarray) -> np.ndarray:
    """[group] means, in rising order of the group."""
    return np.array([values[group == one].mean() for one in np.unique(group)])


def indicators(group: np.ndarray) -> np.ndarray:
    """[row group] 0 or 1, without the first group: what a rank correlation holds fixed."""
    return (group[:, None] == np.unique(group)[1:]).astype(float)


def against_untrained(
    probe: str,
    name: str,
    statistic: Statistic,
    models: Sequence[Any],
    rows: np.ndarray,
    cluster: np.ndarray,
    interval: Interval | None = None,
) -> Estimate:
    """A statistic of the first model against the same of the others, its untrained controls; jackknifed by default."""
    (own, *untrained), claim = models, declared(probe)[name]
    value = statistic(own, rows)
    interval = interval or jackknife(partial(statistic, own), rows, cluster[rows])
    draws = np.array([statistic(control, rows) for control in untrained])
    null = Null.of(UNTRAINED, draws, claim.side)
    return estimate(claim, value, interval, [null], n=len(rows), clusters=len(set(cluster[rows])))
