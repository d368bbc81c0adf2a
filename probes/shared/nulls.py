"""Estimates with their interval and nulls, and the bands of curves: the same steps for every probe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from llmgeom.claims import Claim, Null, estimate, layer_band
from llmgeom.result import Estimate
from llmgeom.stats.resampling import Clusters, Interval, Transform, band, jackknife
from llmgeom.stats.tests import Side, tail_p

UNTRAINED, SHUFFLED, NO_CONTEXT = "untrained", "shuffled prompts", "without context"

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
    without: tuple[Any, Any, Clusters] | None = None,
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
        without: the model's data on the prompts that controls read, those without context, and the cluster of each row.
    """
    rows = np.arange(len(clusters))
    value = statistic(data, rows)
    drawn = [
        Null.of(name, np.array([statistic(draw, slice(None)) for draw in draws]), claim.side)
        for name, draws in controls.items()
    ]
    interval = interval or jackknife(lambda kept: statistic(data, kept), rows, clusters, transform)
    if without is not None:
        model, cut, theirs = without
        every = np.arange(len(theirs))
        difference = jackknife(lambda kept: statistic(model, kept) - statistic(cut, kept), every, theirs)
        control = statistic(cut, every)
        name = NO_CONTEXT
        if len(theirs) < len(rows):  # the difference is that over the prompts that controls read
            name += f" (value minus the difference on {len(theirs):,} prompts, where its own value is {control:.3g})"
        drawn.append(Null.paired(name, value, value - (statistic(model, every) - control), difference))
    return estimate(claim, value, interval, [*drawn, *nulls], n=len(rows), clusters=len(set(clusters)))


def permutation_null(
    name: str, value: float, draws: np.ndarray, side: Side = "upper", centre: float | None = None
) -> Null:
    """Null of permuted labels or rows, whose rank p is fine enough as it is; by default its centre is its median."""
    centre = float(np.median(draws)) if centre is None else centre
    return Null(name, *band(draws), centre, tail_p(value, draws, side), len(draws))


def null_band(draws: Mapping[str, Iterable[Any]], side: Side = "upper") -> np.ndarray | None:
    """[layer bound] band of the null that decides at each layer, from name -> curve [layer] of each draw."""
    return layer_band({name: np.array(list(curves)) for name, curves in draws.items()}, side)
