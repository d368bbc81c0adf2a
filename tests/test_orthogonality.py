"""Mean |cosine| and its references, judged by hand in small dimensions, by enumeration and by simulation."""

import math
from itertools import combinations

import numpy as np
import pytest
from scipy.stats import ortho_group

from llmgeom.errors import UserError
from llmgeom.stats.cosines import mean_abs_cosine, random_cosine, seen_through
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
    assert mean_abs_cosine(np.eye(corners), centre=True) == pytest.approx(1 / (corners - 1))


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


def test_what_has_no_direction_is_refused():
    with refused(UserError, 1, 2):
        mean_abs_cosine(np.ones((1, 4)))
    with refused(UserError, "vector 2"):
        mean_abs_cosine(np.eye(4) * [1, 1, 0, 1])
    with refused(UserError, "vector 0"):
        mean_abs_cosine(np.ones((3, 4)), centre=True)
    with refused(UserError, "vector 1", "nan"):
        mean_abs_cosine(np.array([[1.0, 2], [np.nan, 1]]))
    with refused(UserError, 0):
        random_cosine(0)
