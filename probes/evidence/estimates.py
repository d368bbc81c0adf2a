"""Estimates of in-context evidence: a statistic of the model with an interval over clusters and controls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from llmgeom.claims import Null, declared
from llmgeom.probe import UNTRAINED
from llmgeom.probes.shared.nulls import Statistic, compare
from llmgeom.result import Curve, Estimate
from llmgeom.stats.resampling import Interval, mean_intervals

SHUFFLED = "evidence of other prompts"


def mean_by(group: np.ndarray, values: np.ndarray) -> np.ndarray:
    """[group] means, in ascending order of the group."""
    return np.array([values[group == name].mean() for name in np.unique(group)])


def curve_by(group: np.ndarray, values: np.ndarray, cluster: np.ndarray) -> Curve:
    """`mean_by` with 95 % intervals over clusters."""
    at = [np.flatnonzero(group == name) for name in np.unique(group)]
    interval = np.concatenate([mean_intervals(values[None, rows], cluster[rows]) for rows in at])
    return Curve(mean_by(group, values), interval=interval)


def indicators(group: np.ndarray) -> np.ndarray:
    """[row group] indicators of all groups but the first, as covariates of a rank correlation."""
    return (group[:, None] == np.unique(group)[1:]).astype(float)


def exchanged(group: np.ndarray, draws: int, rng: np.random.Generator) -> Int[np.ndarray, "draw row"]:
    """[draw row] the row that replaces each row: random permutations within groups."""
    order = np.tile(np.arange(len(group)), (draws, 1))
    for one in np.unique(group):
        at = np.flatnonzero(group == one)
        order[:, at] = rng.permuted(np.tile(at, (draws, 1)), axis=1)
    return order


def against_untrained(
    probe: str,
    name: str,
    statistic: Statistic,
    models: Sequence[Any],
    rows: np.ndarray,
    cluster: np.ndarray,
    interval: Interval | None = None,
    nulls: Sequence[Null] = (),
) -> Estimate:
    """A statistic of the first model compared with the others, its untrained controls, and with further `nulls`; by
    default jackknifed."""
    (own, *untrained), claim = models, declared(probe)[name]

    def of_rows(model: Any, kept: np.ndarray) -> float:
        return statistic(model, rows[kept])

    return compare(claim, of_rows, own, cluster[rows], {UNTRAINED: untrained}, nulls, interval=interval)
