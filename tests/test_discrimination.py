"""Areas, rates and thresholds: against scikit-learn, closed forms, and how often the intervals hold the truth."""

from itertools import combinations

import numpy as np
import pytest
from scipy.stats import binom, binomtest, mannwhitneyu, norm, spearmanr
from sklearn.metrics import roc_auc_score

from studies.calibrate.auc import area, rank_correlation, rate


def bench(rng, tasks=6, positives=6, negatives=9, apart=0.0, spread=0.0):
    """Subjects of two kinds in `tasks` strata, each a cluster; the kinds' scores are apart + N(0, spread) sd apart."""
    score, positive, stratum = [], [], []
    for task in range(tasks):
        shift = apart + spread * rng.normal()
        level = 10 * rng.normal()
        score += [*(level + shift + rng.normal(size=positives)), *(level + rng.normal(size=negatives))]
        positive += [True] * positives + [False] * negatives
        stratum += [task] * (positives + negatives)
    return np.array(score), np.array(positive), np.array(stratum)


def test_the_area_of_one_stratum_a_cluster_is_the_mean_of_scikit_learns():
    score, positive, stratum = bench(np.random.default_rng(0), apart=1.0)
    each = [roc_auc_score(positive[stratum == s], score[stratum == s]) for s in range(6)]
    assert area(score, positive, stratum, stratum).value == pytest.approx(np.mean(each))


@pytest.mark.parametrize(("apart", "spread"), [(0.0, 0.0), (0.5, 1.0), (2.5, 0.0)])
def test_the_interval_holds_the_truth(apart, spread):
    """P(positive > negative) = E Phi((apart + spread z) / sqrt 2), which is Phi(apart / sqrt(2 + spread^2))."""
    truth = norm.cdf(apart / np.sqrt(2 + spread**2))
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(150):
        score, positive, stratum = bench(rng, apart=apart, spread=spread)
        found = area(score, positive, stratum, stratum)
        inside += found.low <= truth <= found.high
    assert inside >= binom.ppf(0.001, 150, 0.95)


def test_p_is_scipys_rank_test_and_that_of_every_relabelling():
    rng = np.random.default_rng(7)
    score, positive, stratum = bench(rng, tasks=2, positives=3, negatives=4, apart=1.2)
    score = score.round()  # with ties
    alone = area(np.tile(score[:7], 2), np.tile(positive[:7], 2), np.repeat([0, 1], 7), np.repeat([0, 1], 7))
    one = mannwhitneyu(score[:7][positive[:7]], score[:7][~positive[:7]], method="asymptotic", use_continuity=False)
    assert norm.isf(alone.p / 2) == pytest.approx(np.sqrt(2) * norm.isf(one.pvalue / 2))

    def away(labels: list[tuple[int, ...]]) -> float:
        wins = 0.0
        for s, high in enumerate(labels):
            x = score[7 * s : 7 * s + 7]
            low = [i for i in range(7) if i not in high]
            wins += (np.sign(x[list(high)][:, None] - x[low]) + 1).sum() / 2
        return abs(wins - 12)

    every = [away([a, b]) for a in combinations(range(7), 3) for b in combinations(range(7), 3)]
    exact = np.mean(np.array(every) >= away([(0, 1, 2), (0, 1, 2)]) - 1e-9)
    assert area(score, positive, stratum, stratum).p == pytest.approx(exact, abs=0.03)


def test_a_rate_of_independent_subjects_is_clopper_and_pearsons():
    hit = np.array([True] * 3 + [False] * 17)
    found = rate(hit, np.zeros(20))
    exact = binomtest(3, 20).proportion_ci(0.95, "exact")
    assert (found.k, found.n, found.effective) == (3, 20, 20)
    assert (found.low, found.high) == pytest.approx((exact.low, exact.high))
    assert rate(np.zeros(20, bool), np.arange(20) % 4).high == pytest.approx(1 - 0.025 ** (1 / 20))
    assert rate(np.ones(20, bool), np.arange(20) % 4).low == pytest.approx(0.025 ** (1 / 20))


def test_rank_correlation_is_scipys_within_strata():
    rng = np.random.default_rng(5)
    x, stratum = rng.normal(size=60), np.repeat(range(6), 10)
    y = x + rng.normal(size=60) + 100 * stratum
    each = [spearmanr(x[stratum == s], y[stratum == s]).statistic for s in range(6)]
    found = rank_correlation(x, y, stratum, stratum)
    assert found.value == pytest.approx(np.mean(each))
    assert found.low < found.value < found.high
    assert (found.n, found.clusters) == (60, 6)
    assert rank_correlation(x, y, stratum, stratum // 3).clusters == 2
