"""Mean |cosine| and its references, judged by hand in small dimensions, by enumeration and by simulation."""

import math
from itertools import combinations

import numpy as np
import pytest
from scipy.stats import kstest, ortho_group

from llmgeom.errors import UserError
from llmgeom.stats.cosines import (
    class_cosine,
    gaussian_like,
    mean_abs_cosine,
    permuted_class_cosine,
    random_cosine,
    seen_through,
    simplex_cosine,
)
from tests.refusals import refused


@pytest.mark.parametrize(("dim", "expected"), [(1, 1.0), (2, 2 / math.pi), (3, 0.5)])
def test_random_cosine_in_the_dimensions_one_can_do_by_hand(dim, expected):
    assert random_cosine(dim) == pytest.approx(expected)


def test_random_cosine_is_near_root_2_over_pi_d_in_many_dimensions():
    assert random_cosine(4096) == pytest.approx(math.sqrt(2 / (math.pi * 4096)), rel=1e-3)


def test_gaussian_vectors_sit_on_the_floor():
    x = np.random.default_rng(0).standard_normal((5, 400, 64))
    assert mean_abs_cosine(x).mean() == pytest.approx(random_cosine(64), rel=0.005)


def test_mean_over_pairs_is_what_two_loops_give():
    x = np.random.default_rng(1).standard_normal((7, 3)) + 1
    for centre in (False, True):
        y = x - x.mean(0) if centre else x
        pairs = [abs(a @ b) / math.sqrt((a @ a) * (b @ b)) for a, b in combinations(y, 2)]
        assert mean_abs_cosine(x, centre) == pytest.approx(np.mean(pairs))


def test_orthonormal_vectors_give_0_parallel_ones_1_and_sign_does_not_cancel():
    frame = ortho_group.rvs(6, random_state=0)
    assert mean_abs_cosine(frame) == pytest.approx(0, abs=1e-12)
    assert mean_abs_cosine(np.array([[1.0, 2], [2, 4], [-1, -2]])) == pytest.approx(1)
    assert mean_abs_cosine(np.array([[1.0, 0], [1, 1], [1, -1]])) == pytest.approx(2 / 3 / math.sqrt(2))


@pytest.mark.parametrize("corners", [2, 3, 20])
def test_orthonormal_vectors_less_their_mean_are_a_regular_simplex(corners):
    assert mean_abs_cosine(np.eye(corners), centre=True) == pytest.approx(simplex_cosine(corners))
    assert simplex_cosine(20) == pytest.approx(0.0526, abs=1e-4)


def test_a_bias_moves_raw_cosines_and_not_centred_ones():
    x = np.random.default_rng(2).standard_normal((50, 16))
    assert mean_abs_cosine(x + 3) > 0.8
    assert mean_abs_cosine(x + 3, centre=True) == pytest.approx(mean_abs_cosine(x, centre=True))


def test_keys_seen_through_a_metric_have_the_cosines_of_their_scores():
    """With queries that fill all directions, cosines of k' M l are those of the score vectors q . k."""
    rng = np.random.default_rng(3)
    keys, queries = rng.standard_normal((1, 30, 5)), rng.standard_normal((1, 40, 5)) * np.arange(1, 6)
    seen = seen_through(keys, queries.swapaxes(1, 2) @ queries)
    scores = keys @ queries.swapaxes(1, 2)
    assert mean_abs_cosine(seen) == pytest.approx(mean_abs_cosine(scores))
    assert mean_abs_cosine(seen) != pytest.approx(mean_abs_cosine(keys), rel=0.01)


def test_a_spectrum_alone_explains_gaussian_keys_but_for_its_own_estimation():
    rng = np.random.default_rng(4)
    m, d = 256, 32
    x = rng.standard_normal((6, m, d))
    ratio = gaussian_like(x, 4, 0) / mean_abs_cosine(x).mean()
    assert ratio == pytest.approx(math.sqrt(1 + d / m), rel=0.01)
    uneven = 3 + x * np.linspace(0.1, 3, d)
    for centre in (False, True):
        assert 1 <= gaussian_like(uneven, 4, 0, centre) / mean_abs_cosine(uneven, centre).mean() < 1.08


def test_a_simplex_lies_far_below_what_its_spectrum_gives():
    assert gaussian_like(np.eye(20), 20, 0, centre=True) > 3 * mean_abs_cosine(np.eye(20), centre=True)


def test_gaussian_like_is_the_same_for_a_seed_and_in_a_rotated_basis():
    x = np.random.default_rng(5).standard_normal((40, 8)) * np.arange(1, 9)
    np.random.seed(7)
    assert gaussian_like(x, 3, 1) == gaussian_like(x, 3, 1)
    assert gaussian_like(x, 3, 1) != gaussian_like(x, 3, 2)
    turned = x @ ortho_group.rvs(8, random_state=1)
    assert gaussian_like(turned, 200, 1) == pytest.approx(gaussian_like(x, 200, 2), rel=0.01)


def by_hand(x, labels):
    """`class_cosine` in loops."""
    found = []
    for head in range(x.shape[1]):
        y = x[:, head] - x[:, head].mean(0)
        means = [y[labels == label].mean(0) for label in sorted(set(labels))]
        found += [abs(a @ b) / np.linalg.norm(a) / np.linalg.norm(b) for a, b in combinations(means, 2)]
    return np.mean(found)


def test_class_cosine_and_its_null_are_what_loops_give():
    rng = np.random.default_rng(6)
    x, labels = rng.standard_normal((22, 2, 5)), np.array(list("aaaaabbbbbbccccccccddd"))
    assert class_cosine(x, labels) == pytest.approx(by_hand(x, labels))
    # Enumeration: 5 units in classes of 2, 2, 1 have 30 arrangements, and a long null finds each as often.
    x, labels = x[:5], np.array(list("aabbc"))
    arrangements = {}
    for a in combinations(range(5), 2):
        for b in combinations(sorted({*range(5)} - {*a}), 2):
            new = np.array(["c"] * 5)
            new[list(a)], new[list(b)] = "a", "b"
            arrangements[a, b] = by_hand(x, new)
    null = permuted_class_cosine(x, labels, 6000, 0)
    every = np.array(sorted(arrangements.values()))
    assert np.abs(null[:, None] - every).min(1).max() < 1e-9
    assert null.mean() == pytest.approx(every.mean(), rel=0.02)


def test_the_permutation_p_is_uniform_where_classes_mean_nothing():
    rng, p = np.random.default_rng(7), []
    labels = np.repeat(list("abcd"), (6, 7, 9, 12))
    for seed in range(150):
        x = rng.standard_normal((34, 2, 6)) @ np.diag([4, 2, 1, 1, 1, 1])
        null = permuted_class_cosine(x, labels, 199, seed)
        p.append((1 + (null <= class_cosine(x, labels)).sum()) / 200)
    assert kstest(p, "uniform").pvalue > 0.01
    assert np.mean(np.array(p) <= 0.05) < 0.11


def test_orthogonal_classes_lie_below_random_ones():
    rng = np.random.default_rng(8)
    labels = np.repeat(np.arange(5), 6).astype(str)
    x = 0.1 * rng.standard_normal((30, 1, 8))
    x[np.arange(30), 0, np.arange(30) // 6] += 2
    assert class_cosine(x, labels) == pytest.approx(simplex_cosine(5), rel=0.05)
    assert class_cosine(x, labels) < np.quantile(permuted_class_cosine(x, labels, 500, 0), 0.02)


def test_what_has_no_direction_is_refused():
    with refused(UserError, 1, 2):
        mean_abs_cosine(np.ones((1, 4)))
    with refused(UserError, "vector 2"):
        mean_abs_cosine(np.eye(4) * [1, 1, 0, 1])
    with refused(UserError, "vector 0"):
        mean_abs_cosine(np.ones((3, 4)), centre=True)
    with refused(UserError, "vector 1", "nan"):
        mean_abs_cosine(np.array([[1.0, 2], [np.nan, 1]]))
    with refused(UserError, 2, 3):
        class_cosine(np.random.default_rng(0).standard_normal((6, 1, 4)), list("aaabbb"))
    with refused(UserError, 1):
        simplex_cosine(1)
    with refused(UserError, 0):
        random_cosine(0)
