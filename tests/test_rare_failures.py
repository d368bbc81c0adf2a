"""Bounds of means that rest on rare failures: simulated coverage, and the exact binomial by another road."""

import math

import numpy as np
import pytest
from scipy import optimize, stats as scipy_stats

from llmgeom.stats.rare_failures import RareFailures, Rest
from llmgeom.stats.resampling import jackknife_of_means, mean_intervals


@pytest.mark.parametrize("share, size", [(1e-3, 20.0), (1e-2, 2.0)])
def test_it_covers_a_mean_that_rests_on_rare_values(share, size):
    rng = np.random.default_rng(7)
    n, repeats, true = 1000, 400, 0.003 * (1 - share) + share * size
    covered, student = 0, 0
    for _ in range(repeats):
        x = np.where(rng.random(n) < share, size, rng.exponential(0.003, n))
        bounds = RareFailures(1.0, 20.0)
        interval = bounds.interval_of(bounds.cut(x))
        covered += interval.low <= true <= interval.high
        low, high = mean_intervals([x])[0]
        student += low <= true <= high
    assert covered / repeats >= 0.95
    if share * n == 1:  # what is mended: Student's interval misses where no rare value was drawn
        assert student / repeats < 0.7


def test_it_is_student_s_below_and_binomial_above():
    x, bounds = np.array([0.1, 0.2, 0.3, 0.2, 0.1, 5.0]), RareFailures(1.0, 10.0)
    interval, clipped = bounds.interval_of(bounds.cut(x)), np.array([0.1, 0.2, 0.3, 0.2, 0.1, 1.0])
    # Clopper and Pearson: the share p at which 1 or fewer of 6 have probability .0125.
    share = optimize.brentq(lambda p: scipy_stats.binom.cdf(1, 6, p) - 0.0125, 0.1, 0.999)
    spread = scipy_stats.sem(clipped)
    assert interval.low == pytest.approx(clipped.mean() - scipy_stats.t.ppf(0.975, 5) * spread)
    upper = clipped.mean() + scipy_stats.t.ppf(0.9875, 5) * spread + 9 * share
    assert interval.high == pytest.approx(upper)
    with pytest.raises(ValueError, match="expected values of at least 0"):
        bounds.cut(np.array([-0.1, 0.2]))


def test_p_and_interval_agree_at_the_interval_s_end():
    x = np.random.default_rng(0).exponential(0.003, 500)
    bounds = RareFailures(1.0, 10.0)
    alone, less = bounds.cut(x), bounds.cut(x, x)
    assert bounds.within_p_of(alone, bounds.interval_of(alone).high) == pytest.approx(0.025, rel=1e-6)
    assert bounds.within_p_of(less, bounds.interval_of(less).high) == pytest.approx(0.025, rel=1e-6)
    assert bounds.within_p_of(alone, 0.0) == 1.0 and bounds.within_p_of(alone, 9.0) == 1e-6


def test_the_needed_n_is_the_first_at_which_an_exact_model_is_within_the_margin():
    bounds = RareFailures(1.0, 10.0)
    n = bounds.needed(0.01, 0.025)
    assert n == 3942 == math.ceil(math.log(0.0125) / math.log(1 - 0.01 / 9))
    enough, fewer = (bounds.cut(np.zeros(count)) for count in (n, n - 1))
    assert bounds.within_p_of(enough, 0.01) < 0.025 < bounds.within_p_of(fewer, 0.01)


def test_a_ratio_without_failures_is_the_jackknife_s_plus_the_binomial_s_over_the_mean_below():
    rng, bounds = np.random.default_rng(0), RareFailures(1.0, 10.0)
    x, y = rng.random(50), 1 + rng.random(50)
    span = bounds.interval_of(bounds.ratio(x, y))
    old = jackknife_of_means(lambda means: means[..., 0] / means[..., 1], np.stack([x, y], -1), level=0.975)
    assert span.high == pytest.approx(old.high + 9 * (1 - 0.0125 ** (1 / 50)) / y.mean())
    assert bounds.within_p_of(bounds.ratio(x, y), span.high) == pytest.approx(0.025, rel=1e-6)


def test_unequal_weights_are_bounded_by_the_worst_relation_of_failure_and_weight():
    weights = np.array([0.0, 0.0, 1.0, 2.0, 2.0] * 4)
    share = 1 - 0.0125 ** (1 / 20)  # of 20 rows none fails
    assert Rest(0, np.ones(20)).bound(0.0125) == pytest.approx(share)
    assert 3 < 20 * share < 4  # the largest 3.9 weights are 2
    assert Rest(0, weights).bound(0.0125) == pytest.approx(2 * share)
    high = scipy_stats.beta.ppf(0.9875, 7, 14)  # of 6 failures
    assert 20 * high > 8  # more than the rows of weight 2
    every = optimize.linprog(-weights / 20, A_ub=np.ones((1, 20)), b_ub=[20 * high], bounds=(0, 1))
    assert Rest(6, weights).bound(0.0125) == pytest.approx(-every.fun)


def test_the_error_of_a_matched_difference_is_the_jackknife_s_of_the_cut_values():
    rng, bounds = np.random.default_rng(2), RareFailures(1.0, 10.0)
    x, marked = rng.exponential(0.4, (60, 3)), rng.random((60, 3)) < 0.3

    def difference(values, at):
        others = [values[~at[:, q], q].mean() for q in range(3)]
        some = [(v[here] - np.array(others)[here]).mean() for v, here in zip(values, at, strict=True) if here.any()]
        return np.mean(some)

    cut = bounds.matched(x, marked)
    assert cut.value == pytest.approx(difference(x, marked))
    assert cut.mean == pytest.approx(difference(x.clip(max=1), marked))
    without = [difference(np.delete(x, k, 0).clip(max=1), np.delete(marked, k, 0)) for k in range(60)]
    assert cut.spread == pytest.approx(math.sqrt(59) * np.std(without))
    assert [rest.rare for rest in cut.rests] == [((x > 1) & at).any(1).sum() for at in (marked, ~marked)]
    assert cut.rests[0].weights == pytest.approx(marked.any(1) / marked.any(1).mean())
    # Where a whole row fails, what it adds and subtracts is its weight over the number of rows.
    for rest, at, sign in zip(cut.rests, (marked, ~marked), (1, -1), strict=True):
        change = difference(x + 10 * at * (np.arange(60) == 7)[:, None], marked) - cut.value
        assert change == pytest.approx(sign * 10 * rest.weights[7] / 60)


def test_it_covers_the_difference_of_two_means():
    rng, bounds, covered = np.random.default_rng(8), RareFailures(1.0, 10.0), 0
    true = 1e-3 * 10 - 2e-3 * 10 + 0.003 * (2e-3 - 1e-3)
    for _ in range(300):
        x, y = (np.where(rng.random(1000) < share, 10.0, rng.exponential(0.003, 1000)) for share in (1e-3, 2e-3))
        interval = bounds.interval_of(bounds.cut(x, y))
        covered += interval.low <= true <= interval.high
    assert covered / 300 >= 0.95


def test_a_ratio_is_bounded_where_the_jackknife_s_interval_misses():
    """10 bits in 1 row of 1,000, over .14 bits: .071, and a sample of 1,000 without a failure says 0."""
    rng, bounds, covered, jackknifed = np.random.default_rng(9), RareFailures(1.0, 10.0), 0, 0
    for _ in range(300):
        y = rng.gamma(2, 0.07, 1000)
        x = np.where(rng.random(1000) < 1e-3, 10.0, 0.01 * y)
        span = bounds.interval_of(bounds.ratio(x, y))
        old = jackknife_of_means(lambda means: means[..., 0] / means[..., 1], np.stack([x, y], -1))
        truth = 0.01 / 0.14 + 0.00999
        covered += span.low <= truth <= span.high
        jackknifed += old.low <= truth <= old.high
    assert covered / 300 >= 0.95 > 0.7 > jackknifed / 300
