"""Rank correlations, p-values, corrections for several tests, and sample sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
from jaxtyping import Float, Real

from llmgeom.errors import UserError
from llmgeom.stats.resampling import (
    TIE,
    TRANSFORMS,
    Clusters,
    Draws,
    Interval,
    band,
    jackknife,
    jackknife_interval,
    null_draws,
    permute_clusters,
    plus_one,
    require_finite,
    rows_by_cluster,
    student_quantile,
)

Covariates = Real[np.ndarray, "prompt covariate"] | None  # of a category its indicators, of a number `rank_spline`
Prompts = Real[np.ndarray, " prompt"]
Side = Literal["upper", "lower"]
Scale = Literal["identity", "log", "fisher", "folded"]
KNOTS = (0.5, 0.25, 0.75)
ROWS_PER_COLUMN = 10  # of a spline
LEAST_P = 1e-6  # a Student's tail beyond this is a statement about the tail, not about the data


@dataclass(frozen=True)
class Test:
    """A rank correlation without sign and its permutation null.

    Attributes:
        value: |rho|, Spearman's (unitless).
        p: (1 + #{null >= value}) / (1 + permutations).
        null_high: end of the band from 0 that contains 95 % of the null; a value above it and p < .05 are one event.
        n, clusters: number of prompts; number of independent clusters.
    """

    __test__: ClassVar[bool] = False  # pytest collects classes called Test

    value: float
    p: float
    null_high: float
    n: int
    clusters: int


def spearman(a: Prompts, b: Prompts, covariates: Covariates = None) -> float:
    """Spearman's rho; given covariates, the correlation of the ranks' residuals on a constant and the covariates.

    The columns are used as they are: a category is given as indicators, a number as `rank_spline`. Raises UserError
    when a or b is constant, or determined by the covariates.
    """
    basis = _basis(covariates, len(a))
    return float(_rank_residual(a, basis, "the first variable") @ _rank_residual(b, basis, "the second variable"))


def correlation_test(
    scores: Prompts,
    target: Prompts,
    clusters: Clusters,
    n_permutations: int = 10_000,
    seed: int = 0,
    covariates: Covariates = None,
) -> Test:
    """|Spearman's rho| of scores and target, tested by permuting whole clusters.

    The sign of scores is a convention (that of a principal component is arbitrary) and is dropped. With covariates,
    Freedman and Lane's scheme (1983) on ranks: the ranked target is regressed on the covariates C, its residual e is
    permuted by cluster, t* = fit + e*, and the partial correlation is computed again. With M = I - C C' (C
    orthonormal), M t* = M e*, so the fit drops out: rho* = <M s, e*> / (|M s| |M e*|), and |M e*|^2 = |e|^2 -
    |C' e*|^2. Simulated at 5 % with 75 prompts and a `rank_spline` of their lengths: 3.0 % rejected without
    confounding, 6.3 % under a strong linear, 4.3 and 6.0 % under a strong curved effect of length (a sine, a V: 100 %
    with the ranks alone), and 27 % under a jump (93 %). Raises UserError as `spearman` and `permute_clusters` do.
    """
    n, count = len(target), len(rows_by_cluster(clusters, len(target)))
    basis = _basis(covariates, n)
    ranks, residual = _rank_residual(scores, basis, "the scores"), _rank_residual(target, basis, "the target")
    moved = residual[permute_clusters(np.random.default_rng(seed), clusters, n_permutations)]
    null = np.abs(moved @ ranks) / np.sqrt((1 - np.square(moved @ basis).sum(1)).clip(TIE))
    value = abs(float(ranks @ residual))
    return Test(value, float(plus_one(null >= value - TIE)), band(null, "upper")[1], n, count)


def correlation_interval(
    a: Prompts, b: Prompts, clusters: Clusters, covariates: Covariates = None, signed: bool = False
) -> Interval:
    """Jackknife interval over clusters of Spearman's rho on Fisher's scale, atanh(rho).

    For unsigned scores it is the interval of rho in the observed direction, cut at 0, since |rho| is not negative.
    Measured at 40 clusters of 2 prompts: covers 95-97 % for rho of 0 to 0.8, partial or not.
    """
    sign = 1 if signed or spearman(a, b, covariates) >= 0 else -1

    def rho(rows: np.ndarray) -> float:
        return sign * spearman(a[rows], b[rows], None if covariates is None else covariates[rows])

    span = jackknife(rho, np.arange(len(a)), clusters, "fisher")
    return span if signed else _above_0(span)


def regrouped_interval(rho: float, without: Float[np.ndarray, " group"], group: Clusters) -> Interval:
    """As `correlation_interval`, over groups of clusters, when recomputing the scores for each cluster takes too long.

    Without some groups two competing components may change places, and |rho| is then far from normal on either scale.
    Each end is the outer of the ends on Fisher's scale and on the scale of rho.

    Args:
        rho: The correlation, in the direction that is positive.
        without: The correlation in that direction, with scores recomputed without each group.
        group: [row] the group of whole clusters of each row (`resampling.in_groups`).
    """
    plain, fisher = (jackknife_interval(rho, without, group, scale, 0.95) for scale in ("identity", "fisher"))
    method = f"{plain.method.replace('clusters', 'groups of clusters')}, the wider of rho's and Fisher's scale"
    ends = min(plain.low, fisher.low), min(max(plain.high, fisher.high), 1.0)
    return _above_0(replace(plain, low=ends[0], high=ends[1], method=method))


def _above_0(span: Interval) -> Interval:
    return replace(span, low=max(span.low, 0.0), high=max(span.high, 0.0))


def rank_spline(x: Prompts) -> Float[np.ndarray, "prompt column"]:
    """A cubic spline in the ranks u of x, with knots at their quartiles: what a smooth function of x can explain.

    u is the share of prompts up to x, in (0, 1]. The columns are, in this order, u, u^2, u^3, and (u - knot)^3 above
    each knot, else 0 (truncated powers: Harrell 2015, section 2.4): one for each 10 prompts, at most 6.
    """
    u = _average_ranks(x) / len(x)
    columns = [u, u**2, u**3, *(np.clip(u - knot, 0, None) ** 3 for knot in KNOTS)]
    return np.column_stack(columns[: max(1, len(x) // ROWS_PER_COLUMN)])


def _average_ranks(x: np.ndarray) -> np.ndarray:
    """As scipy's rankdata, which takes four times as long, thousands of times."""
    _, place, count = np.unique(x, return_inverse=True, return_counts=True)
    return (count.cumsum() - (count - 1) / 2)[place]


def _basis(covariates: np.ndarray | None, n: int) -> Float[np.ndarray, "prompt column"]:
    """Orthonormal columns that span the constant and the covariates."""
    constant = np.full((n, 1), n**-0.5)
    if covariates is None:
        return constant
    require_finite(covariates, "a partial correlation", "prompt", "covariate")
    columns, sizes, _ = np.linalg.svd(covariates - covariates.mean(0), full_matrices=False)
    basis = np.hstack([constant, columns[:, sizes > 1e-10 * np.linalg.norm(covariates)]])
    if n - basis.shape[1] < 3:
        raise UserError(
            f"{basis.shape[1] - 1} independent covariates leave {n} prompts fewer than 3 degrees of freedom"
        )
    return basis


def _rank_residual(values: np.ndarray, basis: np.ndarray, what: str) -> Float[np.ndarray, " prompt"]:
    """Average ranks minus their projection on the basis, scaled to length 1."""
    n, values = len(basis), np.asarray(values)
    if values.shape != (n,):
        raise ValueError(f"{what} has shape {values.shape} for {n} prompts")
    require_finite(values, f"a rank correlation ({what})", "prompt")
    ranks = _average_ranks(values)
    ranks -= basis @ (basis.T @ ranks)
    length = np.linalg.norm(ranks)
    if length <= 1e-10 * n**1.5:
        raise UserError(f"{what} is constant over {n} prompts, or determined by the covariates: no rank correlation")
    return ranks / length


def tail_p(observed: float, null_values: Draws, side: Side = "upper") -> float:
    """(1 + #{null at least as extreme as observed}) / (1 + draws).

    The observed value counts as a draw of the null, so p is never 0; with 20 draws the smallest p is 1/21 < .05.
    """
    null, slack = null_draws(null_values), TIE * max(1.0, abs(observed))
    return float(plus_one(null >= observed - slack if side == "upper" else null <= observed + slack))


SCALES: dict[str, tuple[Callable, Callable]] = {
    **TRANSFORMS,
    "folded": (
        lambda rho: np.sqrt(TRANSFORMS["fisher"][0](np.abs(rho))),
        lambda root: np.tanh(np.square(np.maximum(root, 0.0))),
    ),
}


def on_scale(values: float | np.ndarray, scale: Scale) -> np.ndarray:
    """Values on the scale where a value and its draws are compared as normal variables (`stats.controls.excess`).

    "identity", also for participation ratios, whose logarithm is skewed (4,000 values of untrained models: nominal p of
    .05 and .00625 occurred with frequency .048 and .008, for their logarithms .054 and .013). "log" for shares and
    ratios (8,000 shares: .051 and .008). "fisher", atanh(rho). "folded", sqrt(atanh(|rho|)), for a correlation without
    sign: the root of a half-normal variable has nearly the upper tail of a normal one (derived here: nominal p of .05
    and .00625 occur with .051 and .0041), and its power changes little if the draws are far from 0. A held-out R2 has a
    heavier upper tail than any of these: nominal .05 and .00625 occurred with .029 to .047 and .009 to .013 (10,098
    trials of 100 untrained models at each of three widths); transforms that shrink negative values (1 - R2 on a log
    scale, signed roots) make it heavier still. Its claim has a second null of draws, and the larger p keeps its level.
    Raises UserError: a value that is not positive, on the logarithmic scale; one that is not finite.
    """
    x = np.asarray(values, dtype=np.float64)
    require_finite(np.atleast_1d(x), "a comparison with a control", "draw")
    if scale == "log" and x.min() <= 0:
        raise UserError(f"{x.min():.3g} has no logarithm: declare scale 'identity' for this metric")
    return np.asarray(SCALES[scale][0](x))


def equivalence_p(value: float, interval: Interval, near: float, far: float, clusters: int) -> float:
    """p of two one-sided tests (Schuirmann, 1987) that the value does not lie between near and far; at least 1e-6.

    The larger of P(T > (v - near) / s) and P(T > (far - v) / s): v the value, s its standard error on that side
    (distance from v to the interval's end over Student's quantile), T with its degrees of freedom. So p and interval
    agree even if the two sides differ, as on a log scale or if an end is cut at a bound of the value.
    """
    return max(
        _beyond(value - near, value - interval.low, interval, clusters),
        _beyond(far - value, interval.high - value, interval, clusters),
        LEAST_P,
    )


def outside_p(value: float, interval: Interval, near: float, far: float, clusters: int) -> float:
    """p of a one-sided test that the value does not lie outside near and far, on its side; at least 1e-6.

    The smaller of P(T > (v - far) / s) and P(T > (near - v) / s), with v, s and T as in `equivalence_p`. In a range
    much wider than s, only one of the two can reject at either end, so p <= .025 has probability .025 there.
    """

    def past(room: float, reach: float) -> float:
        return 1.0 if clusters < 2 or room <= 0 else _beyond(room, reach, interval, clusters)

    return max(min(past(value - far, value - interval.low), past(near - value, interval.high - value)), LEAST_P)


def _beyond(room: float, reach: float, interval: Interval, clusters: int) -> float:
    """P(T > room / s), s the standard error on the side on which the interval's end is `reach` away from the value."""
    from scipy.special import stdtr  # tenths of a second, which a page of a stored record need not take

    if math.isinf(room) or reach <= 0:
        return float(room <= 0)
    units = interval.units or clusters
    return float(stdtr(max(units - 1, 1), -room / reach * student_quantile(units, interval.level)))


def two_sided_p(value: float, error: float, units: int | float) -> float:
    """Student's p that a value with this standard error is 0, with units - 1 (at least 1) degrees of freedom."""
    from scipy.special import stdtr

    return 2 * float(stdtr(max(units - 1, 1), -abs(value) / error)) if error > 0 else float(value == 0)


def holm(p_values: Draws) -> Float[np.ndarray, " test"]:
    """Holm's adjusted p-values: the i-th smallest (from 0) of m times m - i, never below the one before, at most 1."""
    p = np.asarray(p_values, dtype=np.float64)
    order, adjusted = np.argsort(p, kind="stable"), np.empty_like(p)
    adjusted[order] = np.maximum.accumulate(p[order] * (len(p) - np.arange(len(p)))).clip(max=1)
    return adjusted


def needed_n_mean(effect: float, sd: float, power: float = 0.9, level: float = 0.95) -> int:
    """Clusters needed for the interval of a mean, `effect` beyond the null's end, to exclude that end with this power.

    n = ((z_a + z_b) sd / effect)^2 + z_a^2 / 2, sd between clusters in the unit of effect; the last term is
    Guenther's (1981), for an estimated variance. For a jackknifed statistic sd is its standard error times
    sqrt(clusters).
    """
    from scipy.special import ndtri

    if effect == 0 or sd <= 0:
        raise ValueError(f"declared effect {effect}, sd {sd}: the effect must not be 0 and the sd must be positive")
    a = ndtri((1 + level) / 2)
    return math.ceil(((a + ndtri(power)) * sd / effect) ** 2 + a**2 / 2)
