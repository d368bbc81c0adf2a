"""Steps that every probe shares: an estimate with its interval and nulls, and the bands of curves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from llmgeom.claims import Claim, Null, estimate, layer_band
from llmgeom.probe import NO_CONTEXT
from llmgeom.result import Estimate
from llmgeom.stats.resampling import Clusters, Interval, Transform, band, jackknife
from llmgeom.stats.tests import Side, tail_p

# What `null_band` of both is, in the caption of a curve.
HARDEST_BAND = "band of untrained copies or of shuffled prompts, whichever is harder to beat"
HARDEST_OF_THREE = "band of untrained copies, permuted weights or shuffled prompts, whichever is hardest to beat"

Statistic = Callable[[Any, Any], float]  # (data, rows to use: an index array or slice(None)) -> value


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
        statistic: (data, rows) -> number; the jackknife leaves out the rows of one cluster.
        data: data of the model, in any form that the statistic can index by rows.
        clusters: [row] the cluster of each row of `data`.
        controls: name of a null -> data of each of its draws; their rows may differ.
        transform: scale of the jackknife.
        interval: an interval instead of the jackknife's.
        without: on the prompts that controls read: the model's data, its data without context, the cluster of each row.
    """
    rows = np.arange(len(clusters))
    value = statistic(data, rows)
    drawn = [
        Null.of(name, np.array([statistic(draw, slice(None)) for draw in draws]), claim.side)
        for name, draws in controls.items()
    ]
    interval = interval or jackknife(lambda kept: statistic(data, kept), rows, clusters, transform)
    if without is not None:
        model, cut, groups = without
        every = np.arange(len(groups))
        difference = jackknife(lambda kept: statistic(model, kept) - statistic(cut, kept), every, groups)
        control = statistic(cut, every)
        name = NO_CONTEXT
        if len(groups) < len(rows):  # the difference is over the prompts that controls read
            name += f" (from the difference on {len(groups):,} prompts)"
        drawn.append(Null.paired(name, value, value - (statistic(model, every) - control), difference))
    return estimate(claim, value, interval, [*drawn, *nulls], n=len(rows), clusters=len(set(clusters)))


def mean_of(values: np.ndarray, rows: np.ndarray | slice) -> float:
    """The mean over rows, as a Statistic."""
    return float(values[rows].mean())


def permutation_null(
    name: str, value: float, draws: np.ndarray, side: Side = "upper", centre: float | None = None
) -> Null:
    """Null of permuted labels or rows, with its rank p; the default centre is its median."""
    centre = float(np.median(draws)) if centre is None else centre
    return Null(name, *band(draws), centre, tail_p(value, draws, side), len(draws))


def null_band(draws: Mapping[str, Iterable[Any]], side: Side = "upper") -> np.ndarray | None:
    """[layer bound] band of the null that decides at each layer, from name -> curve [layer] of each draw."""
    return layer_band({name: np.array(list(curves)) for name, curves in draws.items()}, side)
