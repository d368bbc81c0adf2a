"""Intervals, permutations and null bands that respect clusters.

A cluster is what was drawn independently: a template, a document, a sequence. Rows of one cluster are not separate
evidence: permutations move whole clusters, intervals delete whole clusters, and the n of a verdict counts clusters.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from jaxtyping import Float, Int, Real

from llmgeom.errors import UserError

Clusters = Sequence[Hashable] | np.ndarray
Draws = Sequence[float] | np.ndarray
Transform = Literal["identity", "log", "fisher", "share"]  # share: see `share_ends`
GROUPS = 20  # groups of clusters for a statistic that is refitted without each group
LEAST_CLUSTERS = 5  # 5! = 120 arrangements; 4 equal clusters have 24, too few for a permutation p clearly below .05
TIE = 1e-12  # two ways to compute one correlation differ in the last bits; a tie with the null must count as a tie


@dataclass(frozen=True, eq=False)
class Deletions:
    """A statistic recomputed without each group of clusters; it can be paired with that of another model.

    Attributes:
        groups: hash of the group of every row; statistics with equal hashes can be paired.
        without: [way group] the statistic without each group. There are two ways if the interval takes the geometric
            mean of two errors (`nested_probe.interval`).
        units: the equivalent number of groups of equal size, see `effective_units`.
    """

    groups: str
    without: np.ndarray
    units: float

    @classmethod
    def of(cls, group: Clusters, without: np.ndarray) -> Deletions:
        """Deletions from the group of each row."""
        names = "\n".join(map(str, group))
        return cls(hashlib.sha256(names.encode()).hexdigest()[:16], np.atleast_2d(without), effective_units(group))

    @property
    def error(self) -> float:
        """Standard error of the statistic: the geometric mean over the ways of `jackknife_error`."""
        return float(np.prod([jackknife_error(way) for way in self.without]) ** (1 / len(self.without)))

    def less(self, other: Deletions) -> Deletions:
        """The difference of two statistics of the same rows, each without the same group.

        Raises:
            ValueError: other groups, or another number of ways.
        """
        if self.groups != other.groups or self.without.shape != other.without.shape:
            raise ValueError(f"groups {self.groups} and {other.groups} have different rows: they cannot be paired")
        return replace(self, without=self.without - other.without)


@dataclass(frozen=True)
class Interval:
    """A confidence interval.

    Attributes:
        low, high: Its ends, in the unit of the statistic.
        level: As a fraction.
        method: How it was computed.
        units: Student's quantile in it has units - 1 degrees of freedom; 0 stands for the number of clusters.
        deletions: The deletions of a jackknife interval.
    """

    low: float
    high: float
    level: float
    method: str
    units: float = 0.0
    deletions: Deletions | None = field(default=None, repr=False, compare=False)


TRANSFORMS: dict[str, tuple[Callable, Callable]] = {
    "identity": (lambda v: v, lambda v: v),
    "log": (np.log, np.exp),
    "fisher": (lambda rho: np.arctanh(np.clip(rho, TIE - 1, 1 - TIE)), np.tanh),  # clip: atanh(1) is infinite
}


def jackknife(
    statistic: Callable[[np.ndarray], float],
    x: Real[np.ndarray, " prompt *rest"],
    clusters: Clusters,
    transform: Transform = "identity",
    level: float = 0.95,
) -> Interval:
    """Delete-one-cluster jackknife interval of a statistic of rows.

    g(t) +- q sqrt((u - 1) / u sum_k (g(t_k) - mean)^2), mapped back through g: t of all rows, t_k of all but cluster
    k, u clusters, g the transform (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 11). q is
    Student's quantile with `effective_units` - 1 degrees of freedom. A mean of values from 0 to 1 has the ends of
    `share_ends` with the transform "share". A statistic of several arrays takes x = np.arange(n) and indexes them.

    Raises:
        UserError: fewer than 5 clusters.
    """
    whole, without = deletions(lambda rows: np.array([statistic(rows)]), x, clusters)
    return jackknife_interval(whole[0], without[:, 0], clusters, transform, level)


def jackknife_of_means(
    statistic: Callable[[np.ndarray], np.ndarray],
    x: Real[np.ndarray, " row *rest"],
    transform: Transform = "identity",
    level: float = 0.95,
) -> Interval:
    """`jackknife` of a function of means over independent rows; one pass gives the means without each row.

    Args:
        statistic: From means [... *rest] to numbers [...].
        x: Rows; each is a cluster.
        transform: As in `jackknife`.
        level: As a fraction.

    Raises:
        UserError: fewer than 5 rows.
    """
    require_clusters(len(x))
    without = statistic((x.sum(0) - x) / (len(x) - 1))
    return jackknife_interval(float(statistic(x.mean(0))), without, np.arange(len(x)), transform, level)


def in_groups(clusters: Clusters, seed: int) -> Int[np.ndarray, " row"]:
    """The group number of each row: clusters are assigned at random to GROUPS groups of nearly equal size.

    For a jackknife over groups, when refitting without each cluster takes too long. With fewer clusters than GROUPS,
    each cluster is a group.
    """
    cluster = np.unique(np.asarray([str(name) for name in clusters]), return_inverse=True)[1]
    count = int(cluster.max()) + 1
    return np.random.default_rng([seed, 17]).permutation(np.arange(count) % GROUPS)[cluster]


def effective_units(clusters: Clusters) -> float:
    """Effective number of clusters, (sum n)^2 / sum n^2 over their sizes n (Kish, 1965); equal sizes give their number.

    A few large clusters dominate a mean over rows, and its error is then estimated from those few. Simulated with equal
    rows inside clusters (`python -m studies.simulated_coverage`, 1,000 samples each): 95 % intervals of a mean with
    (clusters - 1) degrees of freedom cover .79 for cluster sizes of thirty times 1, 100 and 60, and .92 for ten of 1
    and five of 20; with effective units .98 and .95, and at least .946 in each of six designs.
    """
    sizes = np.unique(np.asarray([str(name) for name in clusters]), return_counts=True)[1]
    return float(sizes.sum() ** 2 / np.square(sizes).sum())


def student_quantile(units: int | float, level: float = 0.95) -> float:
    """Student's two-sided quantile with units - 1 (at least 1) degrees of freedom: half an interval over its error."""
    from scipy.special import stdtrit

    return float(stdtrit(max(units - 1, 1), (1 + level) / 2))


def mean_intervals(
    values: Real[np.ndarray, "mean value"] | Sequence[np.ndarray], clusters: Clusters | None = None, level: float = 0.95
) -> Float[np.ndarray, "mean bound"]:
    """Student's intervals of several means, mean +- q sd / sqrt(n); for a mean `jackknife` gives the same.

    Args:
        values: The values of each mean; independent if no clusters are given.
        clusters: The cluster of each value.
        level: As a fraction.
    """
    x = np.asarray(values)
    if clusters is not None:
        return interval_ends(jackknife(np.mean, row, clusters, level=level) for row in x)
    half = student_quantile(x.shape[1], level) * x.std(1, ddof=1) / math.sqrt(x.shape[1])
    return x.mean(1)[:, None] + half[:, None] * np.array([-1, 1])


def interval_ends(spans: Iterable[Interval]) -> Float[np.ndarray, "interval bound"]:
    """The ends of several intervals."""
    return np.array([(span.low, span.high) for span in spans])


def geometric_mean(values: Draws) -> tuple[float, float, float]:
    """Geometric mean of independent positive values and its 95 % interval; a single value is returned three times."""
    x = np.log(values)
    low, high = mean_intervals([x])[0] if len(x) > 1 else (x[0], x[0])
    return math.exp(x.mean()), math.exp(low), math.exp(high)


def jackknife_error(without: Float[np.ndarray, " unit"]) -> float:
    """Standard error sqrt((u - 1) / u sum_k (t_k - mean)^2), where t_k is the statistic without cluster k of u."""
    return math.sqrt((len(without) - 1) / len(without) * np.square(without - without.mean()).sum())


def deletions(statistic: Callable, x: np.ndarray, clusters: Clusters) -> tuple[np.ndarray, np.ndarray]:
    groups = rows_by_cluster(clusters, len(x))
    require_clusters(len(groups))
    return statistic(x), np.stack([statistic(np.delete(x, rows, axis=0)) for rows in groups])


def require_clusters(n: int) -> None:
    if n < LEAST_CLUSTERS:
        raise UserError(f"an interval needs at least {LEAST_CLUSTERS} clusters, got {n}: add templates or documents")


def jackknife_interval(
    whole: float, without: np.ndarray, clusters: Clusters, transform: Transform, level: float
) -> Interval:
    lost, u = Deletions.of(clusters, without), len(without)
    quantile = student_quantile(lost.units, level)
    if transform == "share":
        scale, ends = ", Wilson", share_ends(whole, jackknife_error(without), lost.units, quantile)
    else:
        forward, back = TRANSFORMS[transform]
        centre, half = forward(whole), quantile * jackknife_error(forward(without))
        scale = "" if transform == "identity" else f", {transform} scale"
        ends = float(back(centre - half)), float(back(centre + half))
    return Interval(*ends, level, f"jackknife over {u} clusters{scale}", lost.units, lost)


def paired_interval(value: float, own: Interval, other: Interval) -> Interval:
    """The interval of a difference of two statistics of the same rows, from the jackknife interval of each."""
    if own.deletions is None or other.deletions is None:
        raise ValueError("only jackknife intervals can be paired")
    lost = own.deletions.less(other.deletions)
    half = student_quantile(lost.units, own.level) * lost.error
    return replace(own, low=value - half, high=value + half, deletions=lost)


def share_ends(share: float, error: float, units: float, quantile: float) -> tuple[float, float]:
    """Ends of Wilson's interval (1927) of a mean of values from 0 to 1: p where |share - p| = q sqrt(p (1 - p) / n).

    n = share (1 - share) / error^2 is the number of trials that have this error; with share 0 or 1 the number of
    clusters. The ends stay within 0 to 1, and a share of 1 has an interval. Simulated, 4,000 means of 20 or 40 clusters
    of 1 to 12 trials: 95 % intervals cover .94 to .98 of shares of .5 to .98, and .90 to .98 of .995. A symmetric
    interval covers .33 to .96 and .10 to .90: with 20 trials it ends where it starts in one of three.
    """
    if share in (0, 1):
        n = units
    elif error <= TIE:
        return share, share
    else:
        n = share * (1 - share) / error**2
    part = quantile**2 / n
    centre, half = share + part / 2, math.sqrt(part * share * (1 - share) + part**2 / 4)
    return max((centre - half) / (1 + part), 0.0), min((centre + half) / (1 + part), 1.0)


def permute_clusters(
    rng: np.random.Generator, clusters: Clusters, n_permutations: int
) -> Int[np.ndarray, "permutation row"]:
    """Permutations of rows that move whole clusters; row order inside a cluster stays.

    Clusters of equal size change places; a cluster of unique size stays.
    Entry [p, r] is the row whose value moves to row r.

    Raises:
        UserError: fewer than 100 arrangements (5 clusters of one size allow 120, 4 allow 24).
    """
    groups = rows_by_cluster(clusters, len(clusters))
    sizes: dict[int, list[np.ndarray]] = {}
    for rows in groups:
        sizes.setdefault(len(rows), []).append(rows)
    arrangements = math.prod(math.factorial(len(alike)) for alike in sizes.values())
    if arrangements < 100:
        exchangeable = sum(len(alike) for alike in sizes.values() if len(alike) > 1)
        raise UserError(
            f"{exchangeable} of {len(groups)} clusters can change places with one of equal size, in {arrangements} "
            f"way{'s' * (arrangements != 1)}; a permutation test needs {LEAST_CLUSTERS} such clusters or 100 "
            "ways: add templates or even out their sizes"
        )
    order = np.tile(np.arange(len(clusters)), (n_permutations, 1))
    for alike in sizes.values():
        blocks = np.stack(alike)
        places = rng.permuted(np.tile(np.arange(len(blocks)), (n_permutations, 1)), axis=1)
        order[:, blocks.ravel()] = blocks[places].reshape(n_permutations, -1)
    return order


def band(null_values: Draws, ends: Literal["both", "upper"] = "both") -> tuple[float, float]:
    """The band that contains a new draw of the null with probability .95, from m draws (unit of the draws).

    Order statistics: a new draw falls in each of the m + 1 gaps between draws with equal probability (derived here), so
    (m + 1) .025 gaps, rounded down, are left out at each end; for "upper" twice as many at the upper end.
    Fewer than 39 draws are too few for two-sided 95 %: the band is then the whole range, which holds (m - 1) / (m + 1).

    Raises:
        UserError: for no draws or a draw that is not finite.
    """
    ordered = np.sort(null_draws(null_values))
    out = max((len(ordered) + 1) // (40 if ends == "both" else 20) - 1, 0)
    return float(ordered[0 if ends == "upper" else out]), float(ordered[len(ordered) - 1 - out])


def plus_one(as_extreme: np.ndarray) -> np.ndarray:
    return np.asarray((1 + as_extreme.sum(0)) / (1 + len(as_extreme)))


def null_draws(null_values: Draws) -> Float[np.ndarray, " draw"]:
    null = np.asarray(null_values, dtype=np.float64)
    if null.ndim != 1 or not len(null):
        raise UserError(f"a null needs at least one draw, in one dimension; its shape is {null.shape}")
    require_finite(null, "a null", "draw")
    return null


def rows_by_cluster(clusters: Clusters, n: int) -> list[np.ndarray]:
    """Rows of each cluster, in order of first appearance, so that renaming clusters changes nothing."""
    if len(clusters) != n:
        raise ValueError(f"{len(clusters)} cluster labels for {n} rows: give one for each row")
    rows: dict[Hashable, list[int]] = {}
    for row, cluster in enumerate(clusters):
        rows.setdefault(cluster, []).append(row)
    return [np.array(members) for members in rows.values()]


def require_finite(x: np.ndarray, what: str, *axes: str) -> None:
    if not np.isfinite(x).all():
        at = np.argwhere(~np.isfinite(x))[0]
        where = ", ".join(f"{axis} {i}" for axis, i in zip(axes, at, strict=True))
        raise UserError(f"{what} cannot use {x[tuple(at)]} at {where}; drop it or find out why it is not finite")


def least_at_best(value: float, low: float, layers: int) -> float:
    """The lower end of a 95 % interval, widened for the choice of the best of many layers.

    value - z(1 - .025 / layers) / z(.975) (value - low), z the normal quantile: Bonferroni over the layers, so that
    where no layer has an effect at most 2.5 % of these ends lie above 0 (derived here; simulated in tests).

    Args:
        value: The largest of the layers' values.
        low: The lower end of its interval, as if no other layer had been read.
        layers: How many were read.
    """
    from scipy.special import ndtri

    return float(value - ndtri(1 - 0.025 / layers) / ndtri(0.975) * (value - low))
