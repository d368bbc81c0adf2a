"""CKA against its definition over quadruples of rows, against inner products, and where it means nothing."""

import math
from itertools import permutations

import numpy as np
import pytest

from llmgeom.errors import UserError
from llmgeom.stats.similarity import cka
from tests.refusals import refused


def u_centred_cka(x, y):
    """From U-centred inner products, k_ij - (r_i + r_j) / (n - 2) + s / ((n - 1)(n - 2)), 0 on the diagonal."""

    def gram(x):
        n, k = len(x), x @ x.T
        np.fill_diagonal(k, 0)
        rows = k.sum(0) / (n - 2)
        k = k + rows.sum() / (n - 1) - rows - rows[:, None]
        np.fill_diagonal(k, 0)
        return k

    a, b = gram(x - x.mean(0)), gram(y - y.mean(0))
    return np.vdot(a, b) / math.sqrt(np.vdot(a, a) * np.vdot(b, b))


def test_cka_is_the_ratio_of_means_over_quadruples_of_rows():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((7, 3)), rng.standard_normal((7, 9))

    def hsic(a, b):
        k, m = a @ a.T, b @ b.T
        terms = [
            k[i, j] * m[i, j] + k[i, j] * m[q, r] - 2 * k[i, j] * m[i, q] for i, j, q, r in permutations(range(7), 4)
        ]
        return np.mean(terms)

    assert cka(x, y) == pytest.approx(hsic(x, y) / math.sqrt(hsic(x, x) * hsic(y, y)))


@pytest.mark.parametrize(("rows", "wide", "wider"), [(30, 7, 12), (10, 12, 40), (12, 5, 40)])
def test_cka_is_the_debiased_alignment_of_inner_products(rows, wide, wider):
    rng = np.random.default_rng(0)
    x, y = rng.normal(3, 1, (rows, wide)), rng.normal(-1, 2, (rows, wider))
    y[:, :3] += 2 * x[:, :3]
    assert cka(x, y) == pytest.approx(u_centred_cka(x, y), abs=1e-12)
    turn = np.linalg.qr(rng.normal(size=(wide, wide)))[0]
    assert cka(x, 5 * x @ turn + 1) == pytest.approx(1)


def test_unrelated_vectors_have_none_in_the_mean():
    rng = np.random.default_rng(0)
    unrelated = [cka(rng.normal(size=(20, 30)), rng.normal(size=(20, 30))) for _ in range(4000)]
    assert np.mean(unrelated) == pytest.approx(0, abs=0.01)  # the biased form gives 0.6


def test_cka_needs_rows_that_differ():
    with refused(UserError, 3):
        cka(np.eye(3), np.eye(3))
    with refused(UserError, 5):
        cka(np.ones((5, 2)), np.eye(5))
