"""Steps that every probe shares: an estimate with its interval and nulls, and the bands of curves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
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

    A claim on the log scale falls back to the identity where a value or draw has no logarithm: the effect of an edit
    that reaches no output is exactly 0.

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
    numbers = {name: np.array([statistic(draw, slice(None)) for draw in draws]) for name, draws in controls.items()}
    if claim.scale == "log" and any((of <= 0).any() for of in (np.array(value), *numbers.values())):
        claim = replace(claim, scale="identity")
    drawn = [Null.of(name, of, claim.side) for name, of in numbers.items()]
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


def log_if_positive(claim: Claim, clusters: Clusters, *sides: np.ndarray) -> Transform:
    """The scale of an interval of a mean, or of a ratio of them: the log if the claim's is and each side [row] has a
    positive sum, whichever cluster is left out; else the identity."""
    positive = all(side.min() >= 0 and len(set(np.asarray(clusters)[side > 0])) > 1 for side in sides)
    return "log" if claim.scale == "log" and positive else "identity"


def mean_of(values: np.ndarray, rows: np.ndarray | slice) -> float:
    """The mean over rows, as a Statistic."""
    return float(values[rows].mean())


def ratio_of(parts: tuple[np.ndarray, np.ndarray], rows: np.ndarray | slice = slice(None)) -> float:
    """The mean of the first over that of the second, over rows, as a Statistic; 0 where the second is 0."""
    above, below = (part[rows].mean() for part in parts)
    return float(above / below) if below else 0.0


def cross_selected(effects: np.ndarray, half: np.ndarray, *ranks: int) -> tuple[np.ndarray, tuple[int, ...]]:
    """The effect of the component of a given rank, selected on one half of the prompts and measured on the other.

    A largest effect that is measured on the prompts that select it is biased upwards; this one is not.

    Args:
        effects: [component prompt].
        half: [prompt] 0 or 1, by cluster.
        ranks: 0 is the largest; several ranks are averaged.

    Returns:
        [prompt] the effect on each prompt of the component selected on the other half; and the components of the first
        rank selected on halves 0 and 1.
    """
    value, selected = np.zeros(effects.shape[1]), []
    for part in (0, 1):
        order = np.argsort(-effects[:, half == part].mean(1), kind="stable")
        selected.append(int(order[ranks[0]]))
        value[half != part] = effects[order[list(ranks)]][:, half != part].mean(0)
    return value, tuple(selected)


def permutation_null(
    name: str, value: float, draws: np.ndarray, side: Side = "upper", centre: float | None = None
) -> Null:
    """Null of permuted labels or rows, with its rank p; the default centre is its median."""
    centre = float(np.median(draws)) if centre is None else centre
    return Null(name, *band(draws), centre, tail_p(value, draws, side), len(draws))


def null_band(draws: Mapping[str, Iterable[Any]], side: Side = "upper") -> np.ndarray | None:
    """[layer bound] band of the null that decides at each layer, from name -> curve [layer] of each draw."""
    return layer_band({name: np.array(list(curves)) for name, curves in draws.items()}, side)
