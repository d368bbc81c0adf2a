"""The intrinsic dimension, on shapes whose answer is known and against scikit-learn's own."""

import numpy as np
import pytest
from scipy.stats import kstest
from sklearn.datasets import make_swiss_roll
from sklearn.neighbors import NearestNeighbors

from llmgeom.errors import UserError
from llmgeom.stats.manifold import distances, independent, intrinsic_dimension, matched_gaussian, standardised, twonn
from tests.refusals import refused


def embedded(points: np.ndarray, seed: int, wide: int = 40) -> np.ndarray:
    """The points in more dimensions, turned by a random rotation."""
    rng = np.random.default_rng(seed)
    return points @ np.linalg.qr(rng.standard_normal((wide, points.shape[1])))[0].T


def shape(name: str, n: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if name == "circle":
        angle = rng.uniform(0, 2 * np.pi, n)
        return np.stack([np.cos(angle), np.sin(angle)], axis=1)
    if name == "swiss roll":
        return make_swiss_roll(n, random_state=seed)[0]
    return rng.standard_normal((n, int(name.split()[0])))


@pytest.mark.parametrize(
    ("name", "n", "dimension", "within"),
    [("circle", 75, 1, 0.1), ("5 straight", 400, 5, 0.4), ("swiss roll", 400, 2, 0.25)],
)
def test_dimensions_that_are_known_are_found(name, n, dimension, within):
    found = [distances(embedded(shape(name, n, seed), seed)) for seed in range(25)]
    assert np.mean([twonn(d) for d in found]) == pytest.approx(dimension, abs=within)


def test_a_row_is_no_distance_from_itself():
    x = np.random.default_rng(0).standard_normal((3, 50, 7)) + 1e3
    assert (np.diagonal(distances(x), axis1=1, axis2=2) == 0).all()


def test_the_estimator_is_its_formula_written_out():
    x = np.random.default_rng(3).standard_normal((50, 6))
    near = NearestNeighbors(n_neighbors=3).fit(x).kneighbors(x)[0][:, 1:]
    mu = sorted(second / first for first, second in near[:, :2])
    rate = 44 / (sum(np.log(m) for m in mu[:45]) + 5 * np.log(mu[44]))
    assert twonn(distances(x)) == pytest.approx(rate)
    many = np.random.default_rng(4).standard_normal((3, 50, 6))
    np.testing.assert_allclose(twonn(distances(many)), [twonn(distances(one)) for one in many])


def test_a_matched_gaussian_has_the_spectrum_to_the_last_digit():
    x = standardised(np.random.default_rng(1).standard_normal((30, 80)) * np.geomspace(1, 9, 80))
    drawn = matched_gaussian(x, 4, 2)
    assert drawn.shape == (4, 30, 29)
    for one in drawn:
        np.testing.assert_allclose(one.mean(0), 0, atol=1e-12)
        np.testing.assert_allclose(
            np.linalg.svd(one, compute_uv=False), np.linalg.svd(x, compute_uv=False)[:29], rtol=1e-9
        )
    np.testing.assert_array_equal(drawn, matched_gaussian(x, 4, 2))
    assert np.abs(drawn[0] - drawn[1]).max() > 0.1
    narrow = matched_gaussian(np.random.default_rng(1).standard_normal((30, 5)), 2, 2)
    assert narrow.shape == (2, 30, 5)


def test_a_curve_has_a_lower_dimension_than_its_gaussian_and_a_plane_has_not():
    place = np.random.default_rng(0).uniform(0, 1, 75)
    angle = 2 * np.pi * place
    spiral = (0.5 + place[:, None]) * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    found = intrinsic_dimension(embedded(spiral, 0, 30), np.arange(75), 99, 0)
    assert found.ratio < 0.75 and (found.gaussian <= found.twonn).mean() < 0.05
    interval = found.ratio_interval()
    assert interval.low * interval.high == pytest.approx(found.ratio**2) and interval.high < 1
    assert interval.method == "100 random halves of 75 points, log scale"
    flat = [intrinsic_dimension(shape("3 straight", 75, 1000 + s), np.arange(75), 39, s).ratio for s in range(60)]
    assert np.median(flat) == pytest.approx(1, abs=0.07)


def test_one_row_a_unit_counts_and_coinciding_rows_once():
    rng = np.random.default_rng(8)
    x = rng.standard_normal((40, 12))
    doubled = np.vstack([x, x + 1e-3 * rng.standard_normal(x.shape)])
    clusters = np.tile(np.arange(40), 2)
    alone, both = intrinsic_dimension(x, np.arange(40), 9, 0), intrinsic_dimension(doubled, clusters, 9, 0)
    assert both.twonn == pytest.approx(alone.twonn) and both.points == 40
    assert intrinsic_dimension(doubled, np.arange(80), 9, 0).twonn < alone.twonn
    copies = np.vstack([x, x[:7]])
    found = intrinsic_dimension(copies, np.arange(47), 9, 0)
    assert (found.points, found.coinciding) == (40, 7)
    assert found.twonn == pytest.approx(intrinsic_dimension(x, np.arange(40), 9, 0).twonn, rel=0.15)


def test_coinciding_rows_are_told_up_to_rounding():
    x = np.random.default_rng(0).standard_normal((6, 3))
    x[4], x[5] = x[1] + 1e-7, x[1]
    assert independent(distances(x), range(6)).tolist() == [0, 1, 2, 3]
    assert independent(distances(x), list("abbcde")).tolist() == [0, 1, 3]
    assert independent(distances(np.ones((4, 2))), range(4)).tolist() == [0]


def test_too_few_points_and_coinciding_ones_are_refused():
    x = np.random.default_rng(0).standard_normal((9, 3))
    with refused(UserError, 9, 10):
        twonn(distances(x))
    with refused(UserError, "coinciding"):
        twonn(distances(np.vstack([x, x])))


@pytest.mark.slow
@pytest.mark.parametrize(("n", "d"), [(40, 15), (40, 120)])
def test_the_gaussian_s_p_is_uniform_for_gaussians_of_any_spectrum(n, d):
    p = []
    for seed in range(300):
        rng = np.random.default_rng([1, seed])  # another stream than the Gaussian clouds', which the same seed starts
        x = rng.standard_normal((n, d)) * np.exp(-np.arange(d) / 5) @ rng.standard_normal((d, d))
        found = intrinsic_dimension(x, np.arange(n), 39, seed)
        # p lies on a grid of 40 values; spread over its cell it is uniform.
        p.append((1 + (found.gaussian <= found.twonn).sum() - rng.uniform()) / 40)
    assert kstest(p, "uniform").pvalue > 0.01
