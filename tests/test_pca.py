"""Shares and scores of principal components, by scikit-learn and loops, and the coverage of their intervals."""

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats
from sklearn.decomposition import PCA
from sklearn.preprocessing import StandardScaler

from llmgeom.errors import UserError
from llmgeom.stats import manifold
from tests.refusals import refused
from tests.simulated import coverage, draws


@pytest.mark.parametrize(("n", "d", "dtype"), [(30, 80, np.float32), (80, 30, np.float64), (40, 40, np.float64)])
def test_shares_and_scores_are_those_of_scikit_learn(n, d, dtype):
    rng = draws(0)
    x = (rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) + 3).astype(dtype)
    found = manifold.shares(x)
    reference = PCA(svd_solver="full").fit(StandardScaler().fit_transform(x.astype(np.float64)))
    expected = reference.transform(StandardScaler().fit_transform(x.astype(np.float64)))[:, :2]
    kept = min(n - 1, d)
    assert found.shares.shape == (kept,) and found.shares.dtype == np.float64
    np.testing.assert_allclose(found.shares, reference.explained_variance_ratio_[:kept], atol=1e-12)
    np.testing.assert_allclose(np.abs(found.scores), np.abs(expected), atol=1e-8)
    assert found.numbers[0] == pytest.approx(reference.explained_variance_ratio_[0])
    assert found.numbers[1] == pytest.approx(reference.explained_variance_ratio_[:2].sum())
    assert found.numbers[2] == pytest.approx(1 / np.square(reference.explained_variance_ratio_).sum())
    np.testing.assert_allclose(manifold._share_summary(x.astype(np.float64)), found.numbers)
    assert (found.n, found.d, found.dropped) == (n, d, 0)


def test_scores_have_the_variance_of_their_component_and_a_stated_sign():
    x = draws(3).normal(size=(20, 50))
    found, turned = manifold.shares(x), manifold.shares(-x)
    np.testing.assert_allclose(found.scores.var(0), found.shares[:2] * 50)
    for column in found.scores.T:
        assert column[np.abs(column).argmax()] > 0
    np.testing.assert_allclose(turned.scores, found.scores, atol=1e-10)


@pytest.mark.parametrize("width", [40, 300])
def test_rows_that_differ_by_rounding_share_a_score_and_no_others_do(width):
    rng = draws(30)
    distinct = rng.normal(size=(25, width)) + 3
    row = rng.permutation(np.repeat(np.arange(25), 4))
    exact = manifold.shares(distinct[row]).scores
    rounded = manifold.shares((distinct[row] * (1 + 1e-6 * rng.uniform(-1, 1, (100, width)))).astype(np.float32)).scores
    for scores in (exact, rounded):
        assert len(np.unique(scores[:, 0])) == len(np.unique(scores[:, 1])) == 25
        for one in range(25):
            assert len(np.unique(scores[row == one], axis=0)) == 1
    np.testing.assert_allclose(rounded, exact, atol=1e-3)


def test_constant_coordinates_are_dropped_and_counted():
    x = draws(5).normal(size=(20, 6))
    padded = np.hstack([x, np.full((20, 3), 0.1)]).astype(np.float32)
    found = manifold.shares(padded)
    assert (found.d, found.dropped) == (6, 3)
    np.testing.assert_allclose(found.shares, manifold.shares(x.astype(np.float32)).shares)


def test_shares_refuse_what_has_no_spectrum():
    x = np.ones((5, 4))
    with refused(UserError, 4, 5):
        manifold.shares(x)
    with refused(UserError, 3, "(2, 4)"):
        manifold.shares(x[:2])
    x[3, 2] = np.nan
    with refused(UserError, "nan", "row 3", "column 2"):
        manifold.shares(x)


def test_share_intervals_match_a_loop_that_deletes_standardises_and_decomposes():
    rng = draws(11)
    clusters = np.array([0, 1, 1, 2, 3, 3, 4, 5, 5, 6, 7, 8, 8, 0])
    x = rng.normal(size=(14, 1)) * rng.normal(size=30) + rng.normal(size=(14, 30))
    x[:, 7] = 0.0
    x[0, 7] = 5.0  # constant once unit 0 is gone
    replicates = []
    for unit in range(9):
        ratios = PCA().fit(StandardScaler().fit_transform(x[clusters != unit])).explained_variance_ratio_
        replicates.append([ratios[0], ratios[0] + ratios[1], 1 / np.square(ratios).sum()])
    logs = np.log(replicates)
    whole = manifold.shares(x)
    for i, value in enumerate(whole.numbers):
        error = math.sqrt(8 / 9 * sum((one - logs[:, i].mean()) ** 2 for one in logs[:, i]))
        units = 14**2 / (4 * 1**2 + 5 * 2**2)  # four clusters of one row and five of two
        half = scipy_stats.t.ppf(0.975, units - 1) * error
        found = manifold.share_intervals(x, clusters)[i]
        ends = [value * math.exp(-half), value * math.exp(half)]
        ends = [max(ends[0], 1), ends[1]] if i == 2 else [ends[0], min(ends[1], 1)]
        assert [found.low, found.high] == pytest.approx(ends)
        assert found.method == "jackknife over 9 clusters, log scale"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "repetitions", "low", "high"),
    [("strong", 500, 0.90, 0.97), ("close", 500, 0.90, 0.97), ("curve", 40, 0.79, 1), ("t4", 40, 0.79, 1)],
)
def test_share_intervals_cover_the_expected_share(kind, repetitions, low, high):
    # 500 repetitions: at 200 the simulation's own error (1.5 %) is as wide as what is tested; 40 show gross errors.
    found = coverage(kind, repetitions)
    assert ((found >= low) & (found <= high)).all()
