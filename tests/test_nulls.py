"""Bands of draws, p-values and the n that a verdict needs, by hand, t tests and simulation."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats as scipy_stats

from llmgeom.claims import Claim, Null, estimate, layer_band
from llmgeom.errors import UserError
from llmgeom.probes.shared.nulls import compare
from llmgeom.stats import resampling, tests
from llmgeom.stats.resampling import Interval
from tests.refusals import refused
from tests.simulated import contains, draws
from tests.words import prediction_p


@pytest.mark.parametrize(
    ("m", "ends", "expected"),
    [
        (20, "both", (1, 20)),
        (39, "both", (1, 39)),
        (199, "both", (5, 195)),
        (19, "upper", (1, 19)),
        (199, "upper", (1, 190)),
    ],
)
def test_band_by_hand(m, ends, expected):
    assert resampling.band(draws(0).permutation(np.arange(1.0, m + 1)), ends) == expected


def test_a_new_draw_falls_in_the_band_as_often_as_it_says():
    rng, hits = draws(28), 0
    for _ in range(2000):
        low, high = resampling.band(rng.normal(size=39))
        hits += low <= rng.normal() <= high
    assert contains(hits, 2000, 0.95)


def test_the_null_that_reaches_farther_decides():
    untrained, shuffled = np.linspace(0.1, 0.3, 20), np.linspace(0.0, 0.4, 200)
    layers = {"untrained controls": np.stack([untrained, untrained], 1), "other": np.stack([shuffled, shuffled - 1], 1)}
    assert layer_band(layers).tolist() == [[*resampling.band(shuffled)], [0.1, 0.3]]
    assert layer_band(layers, "lower").tolist() == [[*resampling.band(shuffled)], [*resampling.band(shuffled - 1)]]


def test_tail_p_by_hand():
    null = np.arange(1.0, 21.0)
    assert tests.tail_p(21.0, null) == 1 / 21
    assert tests.tail_p(20.0, null) == 2 / 21
    assert tests.tail_p(2.0, null, "lower") == 3 / 21
    with refused(UserError, "nan", 1):
        tests.tail_p(0.5, [0.1, math.nan])
    with refused(UserError, "draw"):
        resampling.band([])


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


def test_equivalence_p_is_the_larger_of_two_one_sided_t_tests():
    x = draws(33).normal(0.1, 1.0, size=30)
    interval = resampling.jackknife(lambda rows: rows.mean(), x, np.arange(30))
    expected = max(
        scipy_stats.ttest_1samp(x, -0.4, alternative="greater").pvalue,
        scipy_stats.ttest_1samp(x, 0.6, alternative="less").pvalue,
    )
    assert tests.equivalence_p(float(x.mean()), interval, -0.4, 0.6, 30) == pytest.approx(expected)
    point = Interval(0.1, 0.1, 0.95, "")
    assert tests.equivalence_p(0.1, point, -0.4, 0.6, 30) == 1e-6
    assert tests.equivalence_p(0.7, point, -0.4, 0.6, 30) == 1.0
    assert tests.equivalence_p(0.1, interval, -math.inf, math.inf, 30) == 1e-6


@pytest.mark.parametrize("end", [1e-9, -1e-9])
def test_equivalence_p_and_the_interval_agree_where_its_two_sides_differ(end):
    x = np.exp(draws(34).normal(0.3, 0.5, size=12))
    found = resampling.jackknife(lambda rows: float(rows.mean()), x, np.arange(12), "log")
    value = float(x.mean())
    assert found.high - value > 1.2 * (value - found.low)
    # With far just beyond the interval's end p is just under 2.5 %; so it is on the other side.
    assert (tests.equivalence_p(value, found, 0.0, found.high + end, 12) < 0.025) == (end > 0)
    assert (tests.equivalence_p(value, found, found.low - end, 1e9, 12) < 0.025) == (end > 0)
    # An end that is cut says nothing of the other one.
    cut = replace(found, high=value)
    assert tests.equivalence_p(value, cut, 0.9, math.inf, 12) == tests.equivalence_p(value, found, 0.9, math.inf, 12)


def test_holm_by_hand():
    # sorted .005 .01 .03 .04 times 4 3 2 1 = .02 .03 .06 .04, and .04 may not fall below .06
    np.testing.assert_allclose(tests.holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    np.testing.assert_allclose(tests.holm([0.6, 0.7]), [1, 1])


def test_needed_n_gives_a_correlation_its_power_under_the_verdict_itself():
    rho = 0.5
    n = tests.needed_n_correlation(rho)
    pearson = 2 * math.sin(math.pi * rho / 6)  # the Pearson correlation of normals whose Spearman's rho this is
    claim = Claim(name="rho", unit="|rho|", side="upper", effect=rho)
    rng, above = draws(29), 0
    for i in range(200):
        a = rng.normal(size=n)
        b = pearson * a + math.sqrt(1 - pearson**2) * rng.normal(size=n)
        test, interval = tests.correlation_test(a, b, a, 499, i), tests.correlation_interval(a, b, a)
        null = Null("permuted", 0.0, test.null_high, 0.0, test.p, 499)
        above += estimate(claim, test.value, interval, [null], n=n, clusters=n).p < 0.05
    assert n == 45
    assert 0.83 <= above / 200 <= 0.96


def test_needed_n_gives_a_mean_its_power():
    n = tests.needed_n_mean(0.6, 1.0)
    x = draws(30).normal(0.6, 1.0, size=(4000, n))
    low = x.mean(1) - scipy_stats.t.ppf(0.975, n - 1) * x.std(1, ddof=1) / math.sqrt(n)
    assert contains((low > 0).sum(), 4000, 0.9)
    assert tests.needed_n_mean(0.06, 0.1) == n


def test_needed_n_refuses_an_effect_of_nothing():
    with refused(ValueError, "effect", 0):
        tests.needed_n_correlation(0.0)
    with refused(ValueError, "effect", 0):
        tests.needed_n_mean(0.0, 1.0)


@pytest.mark.parametrize("read", [30, 50])
def test_a_control_on_some_of_the_prompts_gives_their_difference_and_says_so(read):
    """Mean of 50 prompts, of which the control reads some: the interval is scipy's paired t interval of these."""
    rng = np.random.default_rng(0)
    data = rng.normal(0.6, 0.2, 50)
    own, cut = data[:read], data[:read] - rng.normal(0.1, 0.05, read)
    claimed = Claim(
        name="x", unit="fraction", side="upper", effect=0.1, claim="It holds.", null="n", source="s",
    )  # fmt: skip
    clusters = np.arange(50)
    h = compare(claimed, lambda x, rows: x[rows].mean(), data, clusters, {}, without=(own, cut, clusters[:read]))
    expected = scipy_stats.ttest_rel(own, cut).confidence_interval()
    assert h.difference == pytest.approx((expected.low, expected.high))
    assert (
        h.paired and h.value - h.centre == pytest.approx((own - cut).mean()) and h.value == pytest.approx(data.mean())
    )
    some = " (from the difference on 30 prompts)" * (read < 50)
    assert h.null == f"without context{some}"
    assert read < 50 or h.centre == pytest.approx(cut.mean())
