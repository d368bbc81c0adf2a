"""CKA and RSA of records and of rows: by their definitions, with p from permuted units, and where they mean nothing."""

import math
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from scipy.spatial.distance import pdist
from scipy.stats import kstest, spearmanr, t

from llmgeom.errors import UserError
from llmgeom.reports import comparison as compare
from llmgeom.reports.comparison import permuted
from llmgeom.result import Quantity
from llmgeom.stats import tests
from llmgeom.stats.similarity import cka, rsa
from tests.compared import two
from tests.refusals import refused


@pytest.mark.parametrize("similarity", [cka, rsa])
def test_a_similarity_sees_neither_rotation_nor_scale_nor_place_and_sees_a_stretch(similarity):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(25, 4)) * (1, 2, 3, 4)
    turned = 7 * x @ np.linalg.qr(rng.normal(size=(4, 4)))[0] + 5
    assert similarity(x, turned) == pytest.approx(1)
    assert similarity(x, x * (8, 1, 1, 0.1)) < 0.9
    y = rng.normal(size=(25, 2)) + x[:, :2]
    assert similarity(turned, y) == pytest.approx(similarity(x, y))


def test_rsa_is_spearman_s_rho_of_the_distances():
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(30, 2)), rng.integers(0, 3, (30, 5)).astype(float)  # with ties
    y[:, 0] += x[:, 0]
    assert rsa(x, y) == pytest.approx(spearmanr(pdist(x), pdist(y)).statistic)
    y = np.round(y)
    assert rsa(x, y) == pytest.approx(spearmanr(pdist(x), pdist(y)).statistic)


def test_related_records_beat_the_null_and_say_of_what_they_are_related():
    first, other = two(np.random.default_rng(4), ours=0.95, theirs=0.95, alike=0.95)
    ours, theirs = compare.compare([first, other]).pairs[0].similarities
    assert (ours["measure"], theirs["measure"]) == ("CKA", "RSA") and ours["of"] == "CKA of the first 2 components"
    for s in (ours, theirs):
        assert s["null_high"] < s["low"] < s["value"] < s["high"] < 1
        assert (s["p"], s["n"], s["clusters"]) == (1 / 2000, 60, 30)
    x, y = (r.results["value_manifold"].arrays["scores"] for r in (first, other))
    unit = np.array(first.prompts["template"])
    without = np.array([rsa(x[unit != u], y[unit != u]) for u in dict.fromkeys(unit)])
    assert theirs["value"] == pytest.approx(spearmanr(pdist(x), pdist(y)).statistic)
    half = t.ppf(0.975, 29) * np.arctanh(without).std() * math.sqrt(29)  # Fisher's scale
    ends = np.tanh(np.arctanh(theirs["value"]) + half * np.array([-1, 1]))
    assert (theirs["low"], theirs["high"]) == pytest.approx(tuple(ends))
    assert compare.compare([first, other]).pairs[0].similarities == (ours, theirs)


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


def test_cka_needs_rows_that_differ():
    with refused(UserError, 3):
        cka(np.eye(3), np.eye(3))
    with refused(UserError, 5):
        cka(np.ones((5, 2)), np.eye(5))


@pytest.mark.parametrize(("measure", "similarity"), [("CKA", cka), ("RSA", rsa)])
def test_p_is_uniform_where_clustered_records_are_unrelated(measure, similarity):
    """10 units of 4 rows that lie close together in both: to permute rows would call nearly all of these related."""
    rng, unit = np.random.default_rng(3), np.repeat(np.arange(10), 4)
    p, of_rows = [], []
    for _ in range(150):
        a, b = (rng.normal(size=(10, 2))[unit] + 0.2 * rng.normal(size=(40, 2)) for _ in range(2))
        p.append(tests.tail_p(similarity(a, b), permuted(measure, a, b, unit.tolist(), 99, int(rng.integers(2**31)))))
        of_rows.append(tests.tail_p(similarity(a, b), permuted(measure, a, b, range(40), 19, 0)))
    assert kstest(np.array(p) - rng.random(150) / 100, "uniform").pvalue > 0.01
    assert kstest(np.array(of_rows) - rng.random(150) / 20, "uniform").pvalue < 1e-6


def test_the_fullest_places_that_both_hold_are_compared_whatever_their_width():
    rng = np.random.default_rng(5)
    first, other = two(rng)

    def fuller(r, columns):
        m = r.results["value_manifold"]
        wide = {"wide": Quantity(("prompt", "axis"), "", ""), "by_layer": Quantity(("layer", "axis"), "", "")}
        arrays = {**m.arrays, "wide": rng.normal(size=(60, columns)), "by_layer": np.ones((60, 99))}
        return replace(r, results={"value_manifold": replace(m, quantities={**m.quantities, **wide}, arrays=arrays)})

    (s, _) = compare.compare([fuller(first, 7), fuller(other, 4)]).pairs[0].similarities
    assert (s["array"], s["components"], s["of"]) == ("wide", (7, 4), "CKA of the first 7 and 4 components")
    (s, _) = compare.compare([fuller(first, 7), other]).pairs[0].similarities
    assert (s["array"], s["components"]) == ("scores", (2, 2))
