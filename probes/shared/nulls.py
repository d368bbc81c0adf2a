"""Estimates with their interval and nulls, and the bands of curves: the same steps for every probe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from llmgeom.claims import Claim, Null, estimate, layer_band
from llmgeom.result import Estimate
from llmgeom.stats.resampling import Clusters, Interval, Transform, band, jackknife
from llmgeom.stats.tests import Side, tail_p

UNTRAINED, SHUFFLED = "re-initialised", "shuffled prompts"

Statistic = Callable[[Any, Any], float]  # of data and of the rows to use, an index array or slice(None)


def compare(
    claim: Claim,
    statistic: Statistic,
    data: Any,
    clusters: Clusters,
    controls: Mapping[str, Iterable[Any]],
    nulls: Sequence[Null] = (),
    *,
    transform: Transform = "identity",
    interval: Interval | None = None,
) -> Estimate:
    """Estimate of a statistic, with an interval over clusters and one null for each kind of control.

    Args:
        claim: side, unit and effect of the metric.
        statistic: (data, rows) -> number; the jackknife leaves the rows of one cluster out.
        data: the model's, in any form that the statistic can index by rows.
        clusters: [row] the cluster of each row of `data`.
        controls: name of a null -> the same data of each of its draws, whose rows may be others.
        nulls: further nulls.
        transform: scale of the jackknife.
        interval: in place of the jackknife.
    """
    rows = np.arange(len(clusters))
    value = statistic(data, rows)
    drawn = [
        Null.of(name, value, np.array([statistic(draw, slice(None)) for draw in draws]), claim.side)
        for name, draws in controls.items()
    ]
    interval = interval or jackknife(lambda kept: statistic(data, kept), rows, clusters, transform)
    return estimate(claim, value, interval, [*drawn, *nulls], n=len(rows), clusters=len(set(clusters)))


def centred_null(name: str, value: float, draws: np.ndarray, side: Side = "upper") -> Null:
    """Null whose draws carry the sampling noise of the value itself.

    p is against all draws, and the interval must clear only their median: to ask both of one interval would count that
    noise twice.
    """
    return replace(Null.of(name, value, draws, side), margin=float(np.median(draws)))


def permutation_null(
    name: str, value: float, draws: np.ndarray, side: Side = "upper", margin: float | None = None
) -> Null:
    """Null of permuted labels or rows, whose rank p is fine enough as it is; by default its margin is its median."""
    margin = float(np.median(draws)) if margin is None else margin
    return Null(name, *band(draws), margin, tail_p(value, draws, side), len(draws))


def null_band(draws: Mapping[str, Iterable[Any]], side: Side = "upper") -> np.ndarray:
    """[layer bound] band of the null that decides at each layer, from name -> curve [layer] of each draw."""
    return layer_band({name: np.array(list(curves)) for name, curves in draws.items()}, side)
