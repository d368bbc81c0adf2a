"""Bands of draws, p-values and the n that a verdict needs, by hand, t tests and simulation."""

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from llmgeom.errors import UserError
from llmgeom.stats import resampling, tests
from tests.refusals import refused
from tests.simulated import contains, draws
from tests.words import prediction_p


def test_a_new_draw_falls_in_the_band_as_often_as_it_says():
    rng, hits = draws(28), 0
    for _ in range(2000):
        low, high = resampling.band(rng.normal(size=39))
        hits += low <= rng.normal() <= high
    assert contains(hits, 2000, 0.95)


@pytest.mark.parametrize(
    ("scale", "forward"),
    [
        ("identity", lambda v: v),
        ("log", np.log),
        ("fisher", np.arctanh),
        ("folded", lambda v: np.sqrt(np.arctanh(np.abs(v)))),
    ],
)
@pytest.mark.parametrize(("side", "alternative"), [("upper", "greater"), ("lower", "less")])
def test_prediction_p_is_the_two_sample_t_test_of_one_against_the_draws(scale, forward, side, alternative):
    # With a sample of one, the pooled variance is that of the draws: the same t, m - 1 degrees of freedom.
    null, value = draws(31).uniform(0.1, 0.6, size=20), 0.7
    expected = scipy_stats.ttest_ind([forward(value)], forward(null), alternative=alternative).pvalue
    assert prediction_p(value, null, side, scale) == pytest.approx(expected)


def test_prediction_p_of_a_normal_draw_is_uniform_and_has_room_below_the_rank_p():
    rng = draws(32)
    p = np.array([prediction_p(row[0], row[1:]) for row in rng.normal(size=(2000, 21))])
    assert scipy_stats.kstest(p, "uniform").pvalue > 0.01
    assert contains((p < 0.01).sum(), 2000, 0.01) and p.min() < 1 / 21
    assert prediction_p(100.0, rng.normal(size=20)) == 1e-6


def test_the_folded_scale_makes_half_normal_correlations_normal_enough():
    """What the docstring says happens at the normal's .05 and .00625, by numerical integration of the half-normal."""
    root = scipy_stats.norm.expect(lambda z: np.sqrt(abs(z)))
    sd = math.sqrt(scipy_stats.norm.expect(abs) - root**2)
    for nominal, happens in ((0.05, 0.051), (0.05 / 8, 0.0041)):
        end = (root + scipy_stats.norm.isf(nominal) * sd) ** 2
        assert 2 * scipy_stats.norm.sf(end) == pytest.approx(happens, rel=0.02)


def test_draws_that_do_not_vary_are_a_number_and_few_draws_tell_nothing_of_a_tail():
    assert prediction_p(0.5, np.full(20, 0.4)) == 1e-6 and prediction_p(0.4, np.full(20, 0.4)) == 1
    assert prediction_p(0.5, [0.4]) == prediction_p(0.5, [0.4, 0.3, 0.35, 0.2]) == 1 / 2
    with refused(UserError, -0.1, "identity"):
        prediction_p(0.5, [0.4, -0.1, 0.3, 0.2, 0.1], "upper", "log")


def test_needed_n_gives_a_mean_its_power():
    n = tests.needed_n_mean(0.6, 1.0)
    x = draws(30).normal(0.6, 1.0, size=(4000, n))
    low = x.mean(1) - scipy_stats.t.ppf(0.975, n - 1) * x.std(1, ddof=1) / math.sqrt(n)
    assert contains((low > 0).sum(), 4000, 0.9)
    assert tests.needed_n_mean(0.06, 0.1) == n
