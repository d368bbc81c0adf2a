"""Entropies and divergences, cosines, the n that a claim asks for, bands of draws: by scipy, by hand, by loops."""

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from scipy import stats as scipy_stats

from llmgeom.claims import Claim, layer_band
from llmgeom.errors import UserError
from llmgeom.probes.shared.nulls import compare
from llmgeom.stats import information, resampling, tests
from llmgeom.stats.information import best_of_input, bits, entropy, kl, kl_of_rounded, tv
from llmgeom.stats.resampling import Interval
from llmgeom.stats.similarity import mean_abs_cosine, random_cosine, seen_through
from llmgeom.stats.verdict import Setting, needed
from tests.refusals import refused
from tests.simulated import contains, draws
from tests.words import prediction_p

P = np.array([[0.5, 0.25, 0.25, 0.0], [1.0, 0.0, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4]])
Q = np.array([[0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.1, 0.1], [0.1, 0.2, 0.3, 0.4]])
LOG_P, LOG_Q = torch.tensor(P).log(), torch.tensor(Q).log()


def test_entropy_is_scipy_s_and_zeros_add_nothing():
    np.testing.assert_allclose(entropy(LOG_P).numpy(), scipy_stats.entropy(P, axis=1), atol=1e-12)


def test_kl_is_scipy_s_and_zeros_of_the_posterior_add_nothing():
    np.testing.assert_allclose(kl(LOG_P, LOG_Q).numpy(), scipy_stats.entropy(P, Q, axis=1), atol=1e-12)
    assert torch.isinf(kl(LOG_Q, LOG_P)[:2]).all()
    for log_p in (LOG_P, LOG_P.numpy()):  # zeros of both, in the same places
        np.testing.assert_array_equal(np.asarray(kl(log_p, log_p)), np.zeros(3))


@pytest.mark.parametrize("step", [1e-3, 0.1, 2.0])
def test_kl_in_float32_is_that_of_float64_however_small_and_of_equals_nothing(step):
    """In float64 the same logits give 5e-7 nats at .001: float32 rounds each log-probability by 1e-6."""
    logits = torch.randn(4, 20_000, generator=torch.Generator().manual_seed(0)).double() * 3
    other = logits + step * torch.randn(4, 20_000, generator=torch.Generator().manual_seed(1))
    exact = kl(logits.log_softmax(-1), other.log_softmax(-1)).numpy()
    p, q = (x.float().log_softmax(-1) for x in (logits, other))
    np.testing.assert_allclose(kl_of_rounded(p, q).numpy(), exact, rtol=1e-3)
    assert (kl_of_rounded(p, p) == 0).all()


def test_tv_is_half_the_l1_distance():
    np.testing.assert_allclose(tv(LOG_P, LOG_Q).numpy(), np.abs(P - Q).sum(1) / 2, atol=1e-12)


def test_a_fair_coin_is_one_bit():
    assert bits(math.log(2)) == 1.0
    assert bits(entropy(torch.tensor([0.5, 0.5]).log())).item() == 1.0


@pytest.mark.parametrize(
    ("array", "shape"), [(np.asarray, (3, 5, 40)), (torch.as_tensor, (7, 40)), (torch.as_tensor, (40,))]
)
def test_many_rows_give_what_all_at_once_gives_bit_for_bit(array, shape, monkeypatch):
    rng = np.random.default_rng(0)
    p, q = (array(np.log(rng.dirichlet(np.ones(shape[-1]), shape[:-1]))) for _ in range(2))
    at_once = [np.asarray(found) for found in (entropy(p), kl(p, q))]
    monkeypatch.setattr(information, "BLOCK", 90)  # two rows of forty
    for whole, parts in zip(at_once, (entropy(p), kl(p, q)), strict=True):
        assert whole.shape == shape[:-1]
        np.testing.assert_array_equal(np.asarray(parts), whole)


@pytest.mark.parametrize("real", [False, True])
def test_the_best_answer_of_an_input_is_a_mean_over_those_alike_and_over_the_rare_ones_together(real):
    rng = np.random.default_rng(1)
    exact, query = np.log(rng.dirichlet(np.ones(3), 60)), np.repeat([0, 1], 30)
    token = np.where(rng.random(60) < 0.2, rng.integers(5, 9, 60), rng.integers(0, 2, 60))
    inputs = np.stack([token * 0.1, -token], axis=1) if real else token
    counts = [np.sum((token == t) & (query == q)) for t, q in zip(token, query, strict=True)]
    assert min(counts) < 5 <= max(counts)
    for least in (1, 5):
        rare = np.array(counts) < least
        alike = [(query == query[i]) & (rare if rare[i] else token == token[i]) for i in range(60)]
        mean = np.log([np.exp(exact[rows]).mean(0) for rows in alike])
        np.testing.assert_allclose(best_of_input(exact, query, inputs, least), mean, rtol=1e-12)


# ---- cosines


MANY = (4096, math.sqrt(2 / (math.pi * 4096)) * (1 + 1 / (4 * 4096)))  # Stirling's series


@pytest.mark.parametrize(("dim", "expected"), [(1, 1.0), (2, 2 / math.pi), (3, 0.5), MANY])
def test_random_cosine_in_few_dimensions_by_hand_and_in_many(dim, expected):
    assert random_cosine(dim) == pytest.approx(expected)


def test_gaussian_vectors_sit_on_the_floor():
    x = np.random.default_rng(0).standard_normal((5, 400, 64))
    assert mean_abs_cosine(x).mean() == pytest.approx(random_cosine(64), rel=0.005)


def test_mean_over_pairs_is_what_two_loops_give():
    x = np.random.default_rng(1).standard_normal((7, 3)) + 1
    for centre in (False, True):
        y = x - x.mean(0) if centre else x
        pairs = [abs(a @ b) / math.sqrt((a @ a) * (b @ b)) for a, b in combinations(y, 2)]
        assert mean_abs_cosine(x, centre) == pytest.approx(np.mean(pairs))


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


# ---- the n that a claim asks for


def test_without_draws_the_power_is_that_of_student_s_test():
    setting = Setting(3.0, 0.0, 0)
    assert 95 <= needed(setting) <= tests.needed_n_mean(0.1, 0.3) == 97  # ((1.960 + 1.282) s / d)^2 and a little
    for clusters in (10, 40, 100):
        level = scipy_stats.t.isf(0.025, clusters - 1)
        exact = scipy_stats.nct.sf(level, clusters - 1, 0.1 * math.sqrt(clusters) / 0.3)
        assert setting.power(clusters) == pytest.approx(exact, abs=0.015)


@pytest.mark.parametrize("setting", [Setting(2.0, 0.2, 5), Setting(2.0, 0.2, 20, noisy=True, claims=4)])
def test_against_draws_the_power_is_the_share_of_experiments_that_pass(setting):
    """40,000 experiments: Welch's t by the error of the value and the draws' spread; noisy ones count the larger."""
    rng, m, wide = np.random.default_rng(0), setting.draws, setting.spread**2
    for clusters in (20, 60, 100):
        error = setting.noise**2 / clusters
        value = 1 + rng.normal(0, math.sqrt(wide + error), 40_000)
        draws = rng.normal(0, math.sqrt(wide + setting.noisy * error), (40_000, m))
        own, drawn = error * rng.chisquare(clusters - 1, 40_000) / (clusters - 1), draws.var(1, ddof=1)
        others = drawn * (1 + 1 / m)
        if setting.noisy:
            own, others = np.where(drawn >= own, [0 * own, others], [own, drawn / m])
        freedom = (own + others) ** 2 / (own**2 / (clusters - 1) + others**2 / (m - 1))
        passed = (value - draws.mean(1)) / np.sqrt(own + others) > scipy_stats.t.isf(0.025 / setting.claims, freedom)
        assert setting.power(clusters) == pytest.approx(passed.mean(), abs=0.015)


def test_more_claims_wider_draws_and_larger_spreads_need_more():
    base = Setting(3.0, 0.1, 20)
    each = [replace(base, claims=8), replace(base, spread=0.2), replace(base, noise=4.0), replace(base, sides=2)]
    assert all(needed(one) > needed(base) for one in each)
    # Twenty draws as wide as the effect: no number of units makes them less.
    assert needed(replace(base, spread=1.2, claims=8)) is None
    assert base.power(4) == 0  # no interval is made of fewer than five units


@pytest.mark.parametrize(("draws", "can"), [(1, False), (4, False), (5, True), (20, True), (40, True)])
def test_no_units_make_up_for_too_few_draws(draws, can):
    assert (needed(Setting(3.0, 0.1, draws)) is not None) == can


# ---- bands of draws and p-values


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


def test_needed_n_refuses_an_effect_of_nothing():
    with refused(ValueError, "effect", 0):
        tests.needed_n_mean(0.0, 1.0)


@pytest.mark.parametrize("read", [30, 50])
def test_a_control_on_some_of_the_prompts_gives_their_difference_and_says_so(read):
    """Mean of 50 prompts, of which the control reads some: the interval is scipy's paired t interval of these."""
    rng = np.random.default_rng(0)
    data = rng.normal(0.6, 0.2, 50)
    own, cut = data[:read], data[:read] - rng.normal(0.1, 0.05, read)
    claimed = Claim(name="x", unit="fraction", side="upper", effect=0.1, claim="It holds.", null="n", source="s")
    clusters = np.arange(50)
    h = compare(claimed, lambda x, rows: x[rows].mean(), data, clusters, {}, without=(own, cut, clusters[:read]))
    expected = scipy_stats.ttest_rel(own, cut).confidence_interval()
    assert h.difference == pytest.approx((expected.low, expected.high))
    assert h.paired and (h.value - h.centre, h.value) == pytest.approx(((own - cut).mean(), data.mean()))
    some = " (from the difference on 30 prompts)" * (read < 50)
    assert h.null == f"without context{some}"
    assert read < 50 or h.centre == pytest.approx(cut.mean())


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
