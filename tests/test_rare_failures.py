"""Bounds of means that rest on rare failures: simulated coverage, and the exact binomial by another road."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import optimize
from scipy import stats as scipy_stats

from llmgeom.stats.rare_failures import RareFailures
from llmgeom.stats.resampling import mean_intervals


@pytest.mark.parametrize("share, size", [(0.0, 0.0), (1e-3, 20.0), (3e-4, 10.0), (1e-2, 2.0)])
def test_it_covers_a_mean_that_rests_on_rare_values(share, size):
    rng = np.random.default_rng(7)
    n, repeats, true = 1000, 400, 0.003 * (1 - share) + share * size
    covered, student = 0, 0
    for _ in range(repeats):
        x = np.where(rng.random(n) < share, size, rng.exponential(0.003, n))
        interval = RareFailures(1.0, 20.0).interval(x)
        covered += interval.low <= true <= interval.high
        low, high = mean_intervals([x])[0]
        student += low <= true <= high
    assert covered / repeats >= 0.95
    if share * n == 1:  # what is mended: Student's interval misses where no rare value was drawn
        assert student / repeats < 0.7


@pytest.mark.parametrize("less_share", [0.0, 2e-3])
def test_it_covers_the_difference_of_two_means(less_share):
    rng = np.random.default_rng(8)
    n, repeats = 1000, 300
    true, covered = 1e-3 * 10 - less_share * 10 + 0.003 * (less_share - 1e-3), 0
    for _ in range(repeats):
        x, y = (np.where(rng.random(n) < share, 10.0, rng.exponential(0.003, n)) for share in (1e-3, less_share))
        interval = RareFailures(1.0, 10.0).interval(x, y)
        covered += interval.low <= true <= interval.high
    assert covered / repeats >= 0.95


def test_it_is_student_s_below_and_binomial_above():
    x, bounds = np.array([0.1, 0.2, 0.3, 0.2, 0.1, 5.0]), RareFailures(1.0, 10.0)
    interval, clipped = bounds.interval(x), np.array([0.1, 0.2, 0.3, 0.2, 0.1, 1.0])
    # Clopper and Pearson: the share p at which 1 or fewer of 6 have probability .0125.
    share = optimize.brentq(lambda p: scipy_stats.binom.cdf(1, 6, p) - 0.0125, 0.1, 0.999)
    spread = scipy_stats.sem(clipped)
    assert interval.low == pytest.approx(clipped.mean() - scipy_stats.t.ppf(0.975, 5) * spread)
    upper = clipped.mean() + scipy_stats.t.ppf(0.9875, 5) * spread + 9 * share
    assert interval.high == pytest.approx(upper)
    with pytest.raises(ValueError, match="expected values from 0 on"):
        bounds.interval(np.array([-0.1, 0.2]))


def test_p_and_interval_agree_at_the_interval_s_end():
    x = np.random.default_rng(0).exponential(0.003, 500)
    bounds = RareFailures(1.0, 10.0)
    assert bounds.within_p(x, bounds.interval(x).high) == pytest.approx(0.025, rel=1e-6)
    assert bounds.within_p(x, bounds.interval(x, x).high, x) == pytest.approx(0.025, rel=1e-6)
    assert bounds.within_p(x, 0.0) == 1.0 and bounds.within_p(x, 9.0) == 1e-6


def test_the_needed_n_is_the_first_at_which_an_exact_model_is_within_the_margin():
    bounds = RareFailures(1.0, 10.0)
    n = bounds.needed(0.01)
    assert n == 3942 == math.ceil(math.log(0.0125) / math.log(1 - 0.01 / 9))
    assert bounds.within_p(np.zeros(n), 0.01) < 0.025 < bounds.within_p(np.zeros(n - 1), 0.01)
