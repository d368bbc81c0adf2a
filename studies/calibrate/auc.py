"""ROC areas and error rates of a score that should separate two kinds of models, with intervals over clusters.

A subject has a score, a stratum (subjects of one stratum differ only in kind and seed) and a cluster of strata (a
task).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from jaxtyping import Bool, Float, Shaped
from scipy.special import expit, logit
from scipy.stats import beta, norm, rankdata

from llmgeom.stats.resampling import effective_units, jackknife_error, student_quantile
from llmgeom.stats.tests import holm

Kind = TypeVar("Kind", bound=str)
LEVEL = 0.95
Scores = Float[np.ndarray, " subject"]
Names = Shaped[np.ndarray, " subject"]


@dataclass(frozen=True)
class Area:
    """An area under the ROC curve: P(a subject of the kind scores higher than one of the other kind), ties half.

    1 separates the kinds, 1/2 does not, and 0 separates them in the wrong direction.

    Attributes:
        low, high: ends of its interval over tasks.
        p: two-sided p-value of an area of 1/2 on these tasks; the null permutes kinds within strata.
        pairs: number of pairs compared; positives, negatives: number of subjects.
        clusters: number of tasks.
        units: effective number of tasks.
        error: standard error of the logit of A', which makes the interval.
    """

    value: float
    low: float
    high: float
    p: float
    pairs: int
    positives: int
    negatives: int
    clusters: int
    units: float
    error: float

    def upper(self, areas: int) -> float:
        """The upper end of its interval as one of so many areas, which all hold at once (Bonferroni)."""
        fewer = min(self.positives, self.negatives)
        return float(expit(logit(_shrunk(self.value, fewer)) + _reach(self.units, self.error, 1 - (1 - LEVEL) / areas)))


@dataclass(frozen=True)
class Rate:
    """k of n, with the interval of Clopper and Pearson at `effective` subjects (see `rate`)."""

    k: int
    n: int
    low: float
    high: float
    effective: float

    @property
    def value(self) -> float:
        return self.k / self.n


def area(score: Scores, positive: Bool[np.ndarray, " subject"], stratum: Names, cluster: Names) -> Area | None:
    """ROC area within strata: over all pairs of a positive and a negative of the same stratum.

        A = sum_s U_s / sum_s n+_s n-_s,    U_s = #{positive > negative in s} + #{ties} / 2

    Pairs of different strata are not compared: a task, or an architecture, that gives large scores to all its subjects
    would otherwise look like a kind. The interval is on the logit of A' = (A m + 1/2) / (m + 1), m the smaller number
    of subjects, so that it has a width where A is 1. It uses Student's t with `effective_units` - 1 degrees of freedom
    (a cluster counts by its pairs) and the larger of two variances: the jackknife's over clusters, and Hanley and
    McNeil's (1982) for independent subjects, summed over strata at A'. Derived here. Where one task of six has 12 of
    17 strata, it covers 1,000 of 1,000 simulated samples (.92 with degrees of freedom from the number of tasks).

    p comes from the stratified rank test (Wilcoxon; van Elteren 1960): z^2 = (sum_s (U_s - n+ n- / 2))^2 / sum_s V_s,
    V_s the variance of U_s under permutation, n+ n- (N^3 - N - sum (t^3 - t)) / (12 N (N - 1)), t the sizes of ties.

    None where fewer than two clusters have a pair.
    """
    won, sizes, clusters, variance = [], [], [], 0.0
    for name in np.unique(stratum):
        here = stratum == name
        ours, theirs = score[here & positive], score[here & ~positive]
        if len(ours) and len(theirs):
            won.append((np.sign(ours[:, None] - theirs) + 1).sum() / 2)
            sizes.append((len(ours), len(theirs)))
            _, ties = np.unique([*ours, *theirs], return_counts=True)
            n = len(ours) + len(theirs)
            variance += len(ours) * len(theirs) * (n**3 - n - (ties**3 - ties).sum()) / (12 * n * (n - 1))
            clusters.append(cluster[here][0])
    groups, cluster_of = np.unique(clusters), np.array(clusters)
    if len(groups) < 2:
        return None
    wins, (n_high, n_low) = np.array(won), np.array(sizes).T
    pairs, fewer = n_high * n_low, min(n_high.sum(), n_low.sum())

    def shrunk(kept: np.ndarray) -> float:
        return _shrunk(wins[kept].sum() / pairs[kept].sum(), fewer)

    a = shrunk(np.ones(len(cluster_of), bool))
    between = jackknife_error(np.array([logit(shrunk(cluster_of != group)) for group in groups]))
    q1, q2 = a / (2 - a) - a * a, 2 * a * a / (1 + a) - a * a
    within = (pairs * (a * (1 - a) + (n_high - 1) * q1 + (n_low - 1) * q2)).sum() / pairs.sum() ** 2
    units = effective_units(np.repeat(cluster_of, pairs))
    error = max(between, math.sqrt(within) / (a * (1 - a)))
    reach = _reach(units, error, LEVEL)
    z = (wins.sum() - pairs.sum() / 2) / math.sqrt(variance) if variance else 0.0
    return Area(
        value=float(wins.sum() / pairs.sum()),
        low=float(expit(logit(a) - reach)),
        high=float(expit(logit(a) + reach)),
        p=float(2 * norm.sf(abs(z))),
        pairs=int(pairs.sum()),
        positives=int(n_high.sum()),
        negatives=int(n_low.sum()),
        clusters=len(groups),
        units=float(units),
        error=float(error),
    )


def _shrunk(value: float, fewer: int) -> float:
    """A' of an area A; see `area`."""
    return (value * fewer + 0.5) / (fewer + 1)


def _reach(units: float, error: float, level: float) -> float:
    """Half the width of an interval on the logit."""
    return student_quantile(units, level) * error


def rate(hit: Bool[np.ndarray, " subject"], cluster: Names) -> Rate:
    """Share of hits, with Clopper and Pearson's interval at the effective number of subjects (Korn & Graubard 1998).

        n_eff = min(n, p (1 - p) / v),   v = c / (c - 1) sum_c (k_c - p n_c)^2 / n^2

    v is the variance of k / n when clusters, not subjects, are sampled. If all subjects hit or none does, v is 0 and
    uninformative: n_eff is then n, and the bound is that of independent subjects.
    """
    hit = np.asarray(hit, bool)
    n, k = len(hit), int(hit.sum())
    if not n:
        raise ValueError("a rate over no models is undefined; give at least one")
    p, groups, effective = k / n, np.unique(cluster), float(n)
    if 0 < k < n and len(groups) > 1:
        deviation = np.array([hit[cluster == group].sum() - p * (cluster == group).sum() for group in groups])
        v = len(groups) / (len(groups) - 1) * np.square(deviation).sum() / n**2
        effective = min(n, p * (1 - p) / v) if v > 0 else float(n)
    x, tail = p * effective, (1 - LEVEL) / 2
    low = float(beta.ppf(tail, x, effective - x + 1)) if k else 0.0
    high = float(beta.ppf(1 - tail, x + 1, effective - x)) if k < n else 1.0
    return Rate(k, n, low, high, effective)


@dataclass(frozen=True)
class Correlation:
    """Spearman's rho of score and target within strata, its interval, and its numbers of subjects and clusters."""

    value: float
    low: float
    high: float
    n: int
    clusters: int


def rank_correlation(score: Scores, target: Scores, stratum: Names, cluster: Names) -> Correlation | None:
    """The mean over strata of Spearman's rho, each weighted by its subjects less one.

    The interval is the jackknife's over clusters, by Student's t with `effective_units` - 1 degrees of freedom (a
    cluster counts by its weight), cut at -1 and 1. Strata with fewer than three subjects, or with a constant score or
    target, are left out. None where fewer than two clusters are left.
    """
    correlations, clusters, count = [], [], 0
    for name in np.unique(stratum):
        here = stratum == name
        x, y = (rankdata(values[here]) for values in (score, target))
        if here.sum() < 3 or not np.ptp(x) or not np.ptp(y):
            continue
        correlations.append((np.corrcoef(x, y)[0, 1], here.sum() - 1))
        clusters.append(cluster[here][0])
        count += int(here.sum())
    groups, cluster_of = np.unique(clusters), np.array(clusters)
    if len(groups) < 2:
        return None
    rho, weight = np.array(correlations).T

    def mean(kept: np.ndarray) -> float:
        return float((rho * weight)[kept].sum() / weight[kept].sum())

    value, units = mean(np.ones(len(cluster_of), bool)), effective_units(np.repeat(cluster_of, weight.astype(int)))
    reach = student_quantile(units, LEVEL) * jackknife_error(np.array([mean(cluster_of != g) for g in groups]))
    return Correlation(value, max(-1.0, value - reach), min(1.0, value + reach), count, len(groups))


def told_apart(areas: Sequence[Mapping[Kind, Area | None]], smallest: float = 0.75) -> list[str]:
    """One word for each metric: does it separate one kind from all others? From its areas against every other kind.

    - "yes": every area is above 1/2, both on these tasks (p by Holm over all metrics) and on other tasks (its
      interval). A conjunction needs no correction over kinds: its p is the largest of their p (Berger 1982).
    - "reversed": an area is below 1/2 by both criteria, Bonferroni over kinds.
    - "no": an area of `smallest` is excluded against some kind, Bonferroni over kinds. Without it, a metric
      that has this area against each of seven kinds would get the word up to one time in six.
    - "undecided": anything else. A metric without an area against some kind is never "yes".
    """
    tests = [[area for area in by_kind.values() if area] for by_kind in areas]
    up = holm(np.array([max((_one_sided(a) for a in present), default=1.0) for present in tests]))
    down = holm(np.array([min((_one_sided(a, -1) * len(present) for a in present), default=1.0) for present in tests]))
    words = []
    for by_kind, present, p_up, p_down in zip(areas, tests, up, down, strict=True):
        if None not in by_kind.values() and p_up < (1 - LEVEL) / 2 and all(area.low > 0.5 for area in present):
            words.append("yes")
        elif p_down < (1 - LEVEL) / 2 and any(area.high < 0.5 for area in present):
            words.append("reversed")
        else:
            words.append("no" if any(area.upper(len(present)) < smallest for area in present) else "undecided")
    return words


def _one_sided(area: Area, sign: int = 1) -> float:
    """One-sided p-value that the area is not above 1/2 or, for sign -1, not below it."""
    return area.p / 2 if sign * (area.value - 0.5) > 0 else 1 - area.p / 2
