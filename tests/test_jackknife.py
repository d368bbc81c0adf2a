"""The jackknife: of means the t interval, of ratios a loop that leaves each row out."""

import numpy as np
import pytest
from scipy import stats as scipy_stats

from llmgeom.errors import UserError
from llmgeom.stats import pca, resampling
from tests.refusals import refused
from tests.simulated import draws


def test_jackknife_of_a_mean_is_the_t_interval():
    x = draws(9).normal(size=(12, 1))
    found = resampling.jackknife(lambda rows: rows.mean(), x, np.arange(12))
    expected = scipy_stats.t.interval(0.95, 11, loc=x.mean(), scale=scipy_stats.sem(x[:, 0]))
    assert (found.low, found.high) == pytest.approx(expected)
    assert (found.level, found.method) == (0.95, "jackknife over 12 clusters")


def test_jackknife_of_pairs_is_the_t_interval_of_the_pairs():
    pairs = draws(10).normal(size=(9, 2))
    clusters = [f"template {i}" for i in range(9)] * 2
    found = resampling.jackknife(lambda rows: rows.mean(), pairs.T.ravel()[:, None], clusters, level=0.9)
    means = pairs.mean(1)
    expected = scipy_stats.t.interval(0.9, 8, loc=means.mean(), scale=scipy_stats.sem(means))
    assert (found.low, found.high) == pytest.approx(expected)


@pytest.mark.parametrize("transform", ["identity", "log"])
def test_the_jackknife_of_means_is_the_jackknife(transform):
    """Of a ratio of means of 9 rows; the other road computes it anew without each row."""
    x = np.random.default_rng(3).uniform(1, 2, (9, 4, 2))

    def ratio(means):
        return (means[..., 0] / means[..., 1]).max(-1)

    other = resampling.jackknife(lambda rows: float(ratio(rows.mean(0))), x, np.arange(9), transform)
    found = resampling.jackknife_of_means(ratio, x, transform)
    assert (found.low, found.high) == pytest.approx((other.low, other.high), rel=1e-12)
    assert found.method == other.method and found.deletions.groups == other.deletions.groups
    np.testing.assert_allclose(found.deletions.without, other.deletions.without, rtol=1e-12)
    with refused(UserError, 4, 5):
        resampling.jackknife_of_means(ratio, x[:4])


def test_jackknife_refuses_four_units():
    with refused(UserError, 4, 5):
        pca.share_intervals(draws(0).normal(size=(8, 3)), [0, 0, 1, 1, 2, 2, 3, 3])


@pytest.mark.parametrize("sizes", [[1] * 30 + [100, 60], [1] * 10 + [20] * 5], ids=["two large", "five large"])
def test_a_mean_over_clusters_of_unequal_size_is_covered(sizes):
    """Where all rows of a cluster are the same draw; .79 and .91 with as many degrees of freedom as clusters less 1."""
    clusters, rng = np.repeat(np.arange(len(sizes)), sizes), np.random.default_rng(1)
    covered = 0
    for _ in range(400):
        found = resampling.jackknife(np.mean, rng.normal(size=len(sizes))[clusters], clusters)
        covered += found.low <= 0 <= found.high
    assert covered / 400 > 0.93


def test_equal_clusters_count_in_full():
    found = resampling.jackknife(np.mean, np.arange(14.0), np.arange(14) // 2)
    assert (found.units, found.deletions.units) == (7, 7)
