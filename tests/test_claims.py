"""A metric must beat each of its controls, and a claim is corrected for the other claims of its record."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats as scipy_stats

from llmgeom.claims import Null, cut, described, estimate, judge, judge_estimates, judged_together
from llmgeom.result import Result
from llmgeom.stats.resampling import Interval, jackknife
from llmgeom.stats.verdict import Setting, because, needed
from tests.made import changed
from tests.refusals import refused
from tests.toy import claim

SAID = dict(claim="It holds.", source="s")
EASY, HARD = np.linspace(0.0, 0.1, 20), np.linspace(0.3, 0.6, 20)


def made(value, low, high, nulls, side="upper", **changes):
    found = [Null.of(name, draws, side) for name, draws in nulls.items()]
    interval = Interval(low, high, 0.95, "by hand")
    return estimate(claim(side=side, **changes), value, interval, found, n=80, clusters=40)


def measured(*estimates) -> Result:
    return Result("t", estimates)


def judged(*estimates):
    return judge({"toy": measured(*estimates)})["toy"].estimates


def welch(value, half, draws, side=1, extra=0.0):
    """t and its p by hand: the value with its interval's half-width over 40 clusters, as a further draw."""
    error, m = half / scipy_stats.t.ppf(0.975, 39), len(draws)
    parts = (error**2, draws.var(ddof=1) * (1 + 1 / m))
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / 39 + parts[1] ** 2 / (m - 1))
    return scipy_stats.t.sf(side * (value - draws.mean() - extra) / math.sqrt(sum(parts)), freedom)


def test_turning_a_control_off_supports_nothing():
    """With 20 draws of the hard control the claim holds, with 4 or 1 it is open, and without it there is no claim."""
    easy = np.linspace(0.0, 0.1, 199)
    drawn = [made(0.9, 0.88, 0.92, {"hard": HARD[:n], "easy": easy}, claim="It is so.") for n in (20, 4, 1, 0)]
    assert [h.verdict for each in drawn for h in judged(each)] == ["holds", "open", "open", ""]
    assert (drawn[-1].claim, drawn[-1].null) == ("", "easy (199 draws)")
    changes = {"equivalence": "within", "claim": "It is so."}
    drawn = [made(0.05, 0.04, 0.06, {"off": EASY[:n], "easy": EASY}, **changes) for n in (20, 0)]
    assert [h.verdict for each in drawn for h in judged(each)] == ["holds", ""]


# One control, its p and its hurdle


@pytest.mark.parametrize("nulls", [{"easy": EASY, "hard": HARD}, {"hard": HARD, "easy": EASY}])
def test_the_hardest_control_gives_name_centre_band_p_and_hurdle(nulls):
    h = made(0.6, 0.55, 0.65, nulls)
    assert (h.null, h.null_low, h.null_high, h.centre) == ("hard (20 draws)", 0.3, 0.6, pytest.approx(0.45))
    assert h.p == pytest.approx(welch(0.6, 0.05, HARD))
    assert h.excess.p_excluded == pytest.approx(1 - welch(0.6, 0.05, HARD, extra=0.1))
    # A value at the hurdle has p = .025.
    at = made(end := h.excess.hurdle, end - 0.05, end + 0.05, nulls)
    assert at.p == pytest.approx(0.025)
    assert made(0.6, 0.55, 0.65, {"easy": EASY}).null == "easy (20 draws)"


def test_a_claim_below_its_control_turns_everything_but_the_numbers():
    h, turned = made(0.1, 0.0, 0.3, {"x": HARD}), made(-0.1, -0.3, 0.0, {"x": -HARD}, side="lower")
    names = ("p", "p_excluded", "p_opposite")
    ours, theirs = ([getattr(one.excess, name) for name in names] for one in (h, turned))
    assert ours == pytest.approx(theirs)
    assert h.excess.setting.noise == pytest.approx(turned.excess.setting.noise) and h.excess.room
    assert (turned.centre, turned.excess.hurdle) == pytest.approx((-h.centre, -h.excess.hurdle))


def test_an_interval_that_is_not_symmetric_has_an_error_on_each_side():
    h = made(0.6, 0.59, 0.9, {"x": HARD})
    assert h.p == pytest.approx(welch(0.6, 0.01, HARD))
    assert h.excess.p_excluded == pytest.approx(1 - welch(0.6, 0.3, HARD, extra=0.1))


def test_a_control_made_for_the_other_side_is_refused():
    null = Null.of("untrained controls", HARD, "upper")
    with refused(ValueError, "x", "lower", "untrained controls"):
        estimate(claim(side="lower"), 0.1, Interval(0.0, 0.2, 0.95, ""), [null], n=80, clusters=40)


def test_a_number_that_nobody_drew_is_compared_by_a_t_test_of_one_sample():
    x = np.random.default_rng(0).normal(0.7, 0.3, 40)
    span = jackknife(np.mean, x, np.arange(40))
    h = estimate(claim(), x.mean(), span, [Null.half()], n=40, clusters=40)
    assert (h.null, h.null_low, h.null_high, h.centre) == ("one half", 0.5, 0.5, 0.5)
    assert h.p == pytest.approx(scipy_stats.ttest_1samp(x, 0.5, alternative="greater").pvalue)
    assert h.excess.p_excluded == pytest.approx(scipy_stats.ttest_1samp(x, 0.6, alternative="less").pvalue)


@pytest.mark.parametrize("side", ["upper", "lower"])
def test_one_deterministic_control_is_compared_by_a_paired_t_test(side):
    rng = np.random.default_rng(1)
    shared = rng.normal(0.5, 1.0, 40)  # of the prompts: it cancels in the difference
    own, control = shared + rng.normal(0.2, 0.1, 40), shared + rng.normal(0, 0.1, 40)
    span = jackknife(np.mean, own, np.arange(40))
    difference = jackknife(np.mean, own - control, np.arange(40))
    null = Null.paired("no context", own.mean(), control.mean(), difference)
    h = estimate(claim(side=side), own.mean(), span, [null], n=40, clusters=40)
    way, other, end = ("greater", "less", 0.1) if side == "upper" else ("less", "greater", -0.1)
    assert h.null == "no context" and h.centre == pytest.approx(control.mean())
    expected = [
        scipy_stats.ttest_rel(own, control, alternative=way),
        scipy_stats.ttest_rel(own, control, alternative=other),
        scipy_stats.ttest_1samp(own - control, end, alternative=other),
    ]
    found = (h.p, h.excess.p_opposite, h.excess.p_excluded)
    assert found == pytest.approx([max(test.pvalue, 1e-6) for test in expected])
    assert (h.null_low, h.null_high) == pytest.approx((own.mean() - difference.high, own.mean() - difference.low))


def test_draws_that_have_the_noise_of_the_value_count_it_once():
    spread = HARD.std(ddof=1)
    interval = Interval(0.65, 0.75, 0.95, "")
    noisy = estimate(claim(), 0.7, interval, [Null.of("x", HARD, noisy=True)], n=80, clusters=40)
    # The draws vary more than the value does.
    assert noisy.p == pytest.approx(scipy_stats.ttest_ind([0.7], HARD, alternative="greater").pvalue)
    wide = Interval(0.2, 1.2, 0.95, "")
    noisy = estimate(claim(), 0.7, wide, [Null.of("x", HARD, noisy=True)], n=80, clusters=40)
    error = 0.5 / scipy_stats.t.ppf(0.975, 39)
    parts = (error**2, spread**2 / 20)
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / 39 + parts[1] ** 2 / 19)
    assert noisy.p == pytest.approx(scipy_stats.t.sf(0.25 / math.sqrt(sum(parts)), freedom))
    assert noisy.p < made(0.7, 0.2, 1.2, {"x": HARD}).p


@pytest.mark.parametrize(("scale", "forward"), [("log", np.log), ("folded", lambda x: np.sqrt(np.arctanh(x)))])
def test_value_interval_and_draws_are_compared_on_the_declared_scale(scale, forward):
    h = made(0.7, 0.65, 0.74, {"x": HARD}, scale=scale)
    reach = forward(0.7) - forward(0.65)
    assert h.p == pytest.approx(welch(forward(0.7), reach, forward(HARD)))
    assert forward(h.centre) == pytest.approx(forward(HARD).mean())
    far = forward(0.74) - forward(0.7)
    step = forward(h.centre + 0.1) - forward(HARD).mean()
    assert h.excess.p_excluded == pytest.approx(1 - welch(forward(0.7), far, forward(HARD), extra=step))


def test_a_rank_p_of_permutations_counts_as_it_is_until_no_draw_is_as_large():
    interval = Interval(0.2, 0.4, 0.95, "")
    middling = Null("permuted", 0.0, 0.1, 0.0, 0.004, 10_000)
    draws = Null.of("easy", EASY)
    h = estimate(claim(), 0.3, interval, [draws, middling], n=80, clusters=40)
    assert (h.null, h.p) == ("permuted (10000 draws)", 0.004)
    least = replace(middling, p=1 / 10_001)
    # p = 1 / 10,001 says "small", and Student's p of the interval says how small: the draws are harder to beat.
    assert estimate(claim(), 0.3, interval, [draws, least], n=80, clusters=40).null == "easy (20 draws)"
    few = replace(middling, p=1 / 100, draws=99)
    assert estimate(claim(), 0.9, Interval(0.85, 0.95, 0.95, ""), [draws, few], n=80, clusters=40).p == 0.01


@pytest.mark.parametrize("draws", [np.zeros(20), np.array([0.0])])
def test_draws_that_do_not_vary_are_a_number_and_one_draw_is_nothing(draws):
    h = made(0.5, 0.4, 0.6, {"x": draws})
    expected = scipy_stats.t.sf(0.5 / (0.1 / scipy_stats.t.ppf(0.975, 39)), 39) if len(draws) > 1 else 0.5
    assert h.p == pytest.approx(max(expected, 1e-6))


# The five words


def strong(name="a", **changes):
    """A claim that is beaten, of which no effect is excluded, with its p-values set by hand."""
    h = made(0.9, 0.8, 1.0, {"hard": HARD}, name=name, claim=f"{name} holds.", source="s")
    return changed(h, **{"p": 0.001, "p_excluded": 0.9, "p_opposite": 0.999, **changes})


WORDS_BY_P = [
    ("holds", dict()),
    ("holds", dict(p=0.0249, p_excluded=0.026)),
    ("small", dict(p=0.0249, p_excluded=0.0249)),
    ("open", dict(p=0.026, p_excluded=0.9)),
    ("open", dict(p=0.049, p_excluded=0.001)),
    ("ruled out", dict(p=0.05, p_excluded=0.0249)),
    ("ruled out", dict(p=0.9, p_excluded=0.0249)),
    ("open", dict(p=0.9, p_excluded=0.026)),
    ("opposite", dict(p=0.999, p_excluded=0.0001, p_opposite=0.0249)),
    ("ruled out", dict(p=0.97, p_excluded=0.0001, p_opposite=0.026)),
    ("small", dict(p=0.0001, p_excluded=1.0, room=False)),
    ("open", dict(p=0.04, p_excluded=0.96, room=False)),
    ("open", dict(p=0.9, p_excluded=0.1, room=False)),
    ("ruled out", dict(p=0.999, p_excluded=0.001, room=False)),
    ("opposite", dict(p=0.9, p_opposite=0.0001, room=False)),
]


@pytest.mark.parametrize(("expected", "given"), WORDS_BY_P)
def test_exactly_one_word_for_every_claim(expected, given):
    assert judged(strong(**given))[0].verdict == expected


def test_a_value_that_lies_below_a_control_at_the_end_of_the_scale_is_ruled_out():
    """.77 [.61, .92] under a control of .97: the effect of .1 has no room, and more data cannot lift the value."""
    full = claim(range=(-math.inf, 1.0), **SAID)
    pair = [Null.number("a bag of tokens", 0.97), Null.number("one half", 0.5)]
    (h,) = judge_estimates([estimate(full, 0.77, Interval(0.61, 0.92, 0.95, ""), pair, n=80, clusters=40)])
    assert (h.verdict, h.excess.room, h.null) == ("ruled out", False, "a bag of tokens")
    (near,) = judge_estimates([estimate(full, 0.95, Interval(0.91, 0.99, 0.95, ""), pair, n=80, clusters=40)])
    assert near.verdict == "open" and because(near).startswith("no room above the control: ")
    (above,) = judge_estimates([estimate(full, 0.994, Interval(0.99, 0.998, 0.95, ""), pair, n=80, clusters=40)])
    assert above.verdict == "small"


def test_no_n_is_asked_for_that_the_source_does_not_have():
    wide = estimate(claim(**SAID), 0.5, Interval(0.4, 0.6, 0.95, ""), [Null.number("0.47", 0.47)], n=80, clusters=40)
    for available, short in ((0, "needs {}"), (10**6, "needs {}"), (60, "no n here decides, of 60 templates in all")):
        (h,) = judge_estimates([replace(wide, available=available)])
        assert h.needed > 60 and because(h, "templates").startswith(short.format(f"{h.needed:,} templates: "))


def test_a_permutation_at_its_least_p_does_not_hide_a_control_that_is_nearer():
    """199 orders give no p below .005; the bag of tokens is beaten by p < .001, and is the control to beat."""
    orders = Null("labels in another order", 0.4, 0.6, 0.5, p=1 / 200, draws=199)
    bag = Null.paired("bag of tokens", 0.9, 0.73, Interval(0.09, 0.25, 0.95, ""))
    h = estimate(claim(range=(-math.inf, 1.0)), 0.9, Interval(0.85, 0.95, 0.95, ""), [orders, bag], n=80, clusters=40)
    assert (h.controls[0].name, h.p, h.centre) == ("bag of tokens", 1 / 200, 0.73)
    assert [(c.name, c.centre) for c in h.controls] == [("bag of tokens", 0.73), ("labels in another order", 0.5)]
    assert h.controls[0].difference == (0.09, 0.25) and h.controls[0].p < 0.001 < h.controls[1].p
    reached = replace(orders, p=0.2)  # an order reaches the value: then it is the control to beat
    h = estimate(claim(), 0.9, Interval(0.85, 0.95, 0.95, ""), [reached, bag], n=80, clusters=40)
    assert h.controls[0].name == orders.name


def test_a_model_that_ignores_its_context_is_ruled_out_by_a_difference_without_error():
    """The value's own interval, .3 to .9, holds the control at .4 and .1 above it; the difference decides."""
    null = Null.paired("without context", 0.4, 0.4, Interval(0.0, 0.0, 0.95, "jackknife"))
    (h,) = judged(estimate(claim(**SAID), 0.4, Interval(0.3, 0.9, 0.95, ""), [null], n=40, clusters=40))
    assert h.verdict == "ruled out" and h.difference == (0, 0)


def test_holm_runs_over_all_claims_and_over_nothing_else_for_each_question_by_itself():
    a, b, c = strong("a", p=0.01, p_opposite=0.5), strong("b", p=0.005), strong("c", p=0.02, p_excluded=0.001)
    plain = strong("d", p=1e-6).saying("")
    found = judge({"one": measured(a, plain), "two": measured(b, c)})
    (a, d), (b, c) = found["one"].estimates, found["two"].estimates
    # .005 * 3, .01 * 2, .02 * 1, none below the one before
    assert [h.adjusted[0] for h in (a, b, c)] == pytest.approx([0.02, 0.015, 0.02])
    assert [h.adjusted[1] for h in (a, b, c)] == pytest.approx([1, 1, 0.003])
    assert [h.adjusted[2] for h in (a, b, c)] == pytest.approx([1, 1, 1])
    assert [h.verdict for h in (a, b, c)] == ["holds", "holds", "small"]
    assert d == plain and (d.verdict, d.why) == ("", "")
    assert "by Holm over 3 claims" in a.why


def test_the_company_of_other_claims_takes_words_away_and_never_makes_one_stronger():
    (alone,) = judged(strong(p=0.02))
    together = judged(strong("a", p=0.02), strong("b", p=0.02))
    assert (alone.verdict, together[0].verdict, together[0].adjusted[0]) == ("holds", "open", pytest.approx(0.04))
    out = [strong(name, p=0.9, p_excluded=0.02) for name in "ab"]
    assert judged(out[0])[0].verdict == "ruled out" and judged(*out)[0].verdict == "open"
    below = [strong(name, p=0.99, p_excluded=0.02, p_opposite=0.02) for name in "ab"]
    assert judged(below[0])[0].verdict == "opposite" and judged(*below)[0].verdict == "open"
    # "small" is a limit on a claim that is shown: its exclusion is not corrected, or company would turn it to "holds".
    (small, *_) = judged(strong("a", p=1e-5, p_excluded=0.02), *(strong(name) for name in "bcdefgh"))
    assert small.verdict == "small"


def test_a_value_between_two_controls_is_not_on_the_other_side_of_both():
    low, high = np.linspace(0.0, 0.1, 20), np.linspace(0.8, 0.9, 20)
    (between,) = judged(made(0.45, 0.43, 0.47, {"low": low, "high": high}, **SAID))
    assert between.verdict == "ruled out" and between.null.startswith("high")
    (below,) = judged(made(-0.45, -0.47, -0.43, {"low": low, "high": high}, **SAID))
    assert below.verdict == "opposite" and "below every control" in below.why


def test_a_word_without_a_claim_is_refused():
    with refused(ValueError, "x", "holds"):
        replace(made(0.9, 0.8, 1.0, {"hard": HARD}), verdict="holds")


# No room, and no n


@pytest.mark.parametrize(
    ("changes", "draws", "room"),
    [
        (dict(range=(-math.inf, 1.0)), np.linspace(0.88, 0.9, 20), True),
        (dict(range=(-math.inf, 1.0)), np.linspace(0.91, 0.93, 20), False),
        (dict(), np.linspace(0.91, 0.93, 20), True),
        (dict(side="lower", range=(0.0, math.inf)), np.linspace(0.04, 0.06, 20), False),
        (dict(scale="folded"), np.linspace(0.91, 0.93, 20), False),
        (dict(scale="folded"), np.linspace(0.5, 0.6, 20), True),
        (dict(side="lower", scale="log"), np.linspace(0.04, 0.06, 20), False),
    ],
)
def test_an_effect_that_leaves_the_scale_has_no_room(changes, draws, room):
    value = draws.mean()
    h = judged(made(value, value - 0.01, value + 0.01, {"x": draws}, **SAID, **changes))[0]
    assert h.excess.room == room
    assert (h.verdict == "open" and "no room" in because(h)) != room


def test_the_n_of_a_verdict_is_the_n_of_the_plan():
    draws = np.random.default_rng(0).normal(0.5, 0.02, 20)
    (h,) = judged(made(0.53, 0.40, 0.66, {"x": draws}, **SAID))
    spread = 0.13 / scipy_stats.t.ppf(0.975, 39) * math.sqrt(40)
    plan = Setting(spread / 0.1, draws.std(ddof=1) / 0.1, 20)
    assert h.needed == needed(plan) > 40
    assert h.verdict == "open" and f"needs {h.needed} clusters: for the claimed effect of 0.1, has 40" in h.why
    (_, h) = judged(strong(), made(0.53, 0.40, 0.66, {"x": draws}, **SAID))
    assert h.needed == needed(replace(plan, claims=2)) > needed(plan)


def test_the_n_against_the_mean_of_trainings_counts_the_error_of_their_mean():
    """As of a further draw, whose error has no n: it was said that more data will not help."""
    rng, rule = np.random.default_rng(0), claim(claim="It holds.", source="s", effect=0.2)

    def measured(n, truth, m=20):
        x = truth + 0.2 * rng.standard_normal(n)
        reach = scipy_stats.t.ppf(0.975, n - 1) * x.std(ddof=1) / math.sqrt(n)
        span = Interval(x.mean() - reach, x.mean() + reach, 0.95, "")
        null = replace(Null.of("trainings", 0.2 * rng.standard_normal(m)), mean=True)
        return judged(estimate(rule, x.mean(), span, [null], n=n, clusters=n))[0]

    h = next(h for h in iter(lambda: measured(5, 0.15), None) if h.verdict == "open" and h.excess.room)
    assert "needs " in h.why and 5 < h.needed < 100
    n = needed(Setting(1.0, 1 / math.sqrt(21), 20))  # as both standard deviations are
    assert np.mean([measured(n, 0.2).verdict == "holds" for _ in range(400)]) == pytest.approx(0.9, abs=0.05)
    h = next(h for h in iter(lambda: measured(5, 0.15, 5), None) if h.verdict == "open" and h.excess.room)
    assert h.needed == 0 and "more data will not help: 5 draws fix the mean of the control only to within" in h.why


def equal(value, half, null=None, **changes):
    """An equivalence claim with margin .1 around a control at 0.5."""
    interval = Interval(value - half, value + half, 0.95, "")
    given = dict(equivalence="within", claim="no effect.", source="s")
    null = null or Null.number("the exact answer", 0.5)
    return estimate(claim(**{**given, **changes}), value, interval, [null], n=80, clusters=40)


def test_a_claim_of_no_effect_is_two_one_sided_tests():
    passed, failed, wide = (judged(equal(*case))[0] for case in ((0.52, 0.05), (0.75, 0.10), (0.52, 0.12)))
    assert (passed.verdict, failed.verdict, wide.verdict) == ("holds", "ruled out", "open")
    assert (passed.excess.least, passed.excess.hurdle) == pytest.approx((0.4, 0.6))
    # The interval with level 1 - 2p has the nearer margin, .6, for its end.
    error = 0.05 / scipy_stats.t.ppf(0.975, 39)
    assert 0.52 + scipy_stats.t.isf(passed.p, 39) * error == pytest.approx(0.6)
    assert failed.excess.p_excluded == pytest.approx(scipy_stats.t.sf(0.15 / (0.10 / scipy_stats.t.ppf(0.975, 39)), 39))
    assert "clusters: for the claimed effect of 0.1" in wide.why
    assert judged(equal(0.25, 0.10))[0].verdict == "ruled out"


def test_the_words_of_an_equivalence_claim_are_corrected_too():
    near, far = equal(0.545, 0.05), equal(0.665, 0.06)
    assert (judged(near)[0].verdict, judged(far)[0].verdict) == ("holds", "ruled out")
    assert [h.verdict for h in judged(near, changed(near, name="y"))] == ["open", "open"]
    assert [h.verdict for h in judged(far, changed(far, name="y"))] == ["open", "open"]


def test_no_more_than_the_control_has_no_lower_end():
    cases = (0.1, 0.05), (0.75, 0.1), (0.52, 0.12)
    far_below, more, wide = (judged(equal(*case, equivalence="at most"))[0] for case in cases)
    assert (far_below.verdict, more.verdict, wide.verdict) == ("holds", "ruled out", "open")
    assert "within the range up to 0.6" in far_below.why and "outside the range up to 0.6" in more.why
    # Only the upper end is tested.
    error = 0.05 / scipy_stats.t.ppf(0.975, 39)
    assert equal(0.55, 0.05, equivalence="at most").p == pytest.approx(scipy_stats.t.sf(0.05 / error, 39))
    assert "at most 0.1 fraction above" in described("p", claim(equivalence="at most"))[1]


def test_no_effect_must_hold_against_every_control():
    given = dict(equivalence="within", claim="no effect.", source="s")
    interval = Interval(0.51, 0.57, 0.95, "")  # within .1 of .5 and .65 lies .55 to .6
    nulls = [Null.number("a", 0.5), Null.number("b", 0.65)]
    (found,) = judged(estimate(claim(**given), 0.54, interval, nulls, n=80, clusters=40))
    assert (found.excess.least, found.excess.hurdle) == pytest.approx((0.55, 0.60)) and found.verdict == "open"
    (apart,) = judged(estimate(claim(**given), 0.3, Interval(0.2, 0.44, 0.95, ""), nulls, n=80, clusters=40))
    assert apart.verdict == "ruled out"


def with_draws(error, other, m, clusters=40):
    """Standard error and degrees of freedom of a value less something known from m draws."""
    whole = error**2 + other**2
    return whole**0.5, whole**2 / (error**4 / (clusters - 1) + other**4 / (m - 1))


def test_no_effect_holds_against_the_mean_of_draws_and_is_ruled_out_beyond_a_further_draw():
    draws = np.random.default_rng(1).gamma(2, 0.02, 21)
    null, error = Null.of("random directions", draws), 0.05 / scipy_stats.t.ppf(0.975, 39)
    centre, s = draws.mean(), draws.std(ddof=1)
    h = equal(centre + 0.02, 0.05, null, equivalence="at most")
    size, degrees = with_draws(error, s / 21**0.5, 21)
    assert h.excess.hurdle == pytest.approx(centre + 0.1)
    assert h.p == pytest.approx(scipy_stats.t.sf(0.08 / size, degrees))
    h = equal(centre + 0.2, 0.05, null, equivalence="at most")
    size, degrees = with_draws(error, s * (1 + 1 / 21) ** 0.5, 21)
    assert h.excess.p_excluded == pytest.approx(scipy_stats.t.sf(0.1 / size, degrees))
    few = equal(centre, 1e-4, Null.of("random directions", draws[:4]))
    assert min(few.p, few.excess.p_excluded) == 0.5 and "4 draws decide nothing" in judged(few)[0].why


def test_the_n_that_no_effect_needs_counts_the_error_of_the_mean_of_draws():
    draws = np.random.default_rng(3).normal(0.5, 0.1, 40)
    (h,) = judged(equal(0.55, 0.12, Null.of("x", draws), equivalence="at most"))
    plan = Setting(h.excess.setting.noise, draws.std(ddof=1) / 41**0.5 / 0.1, 40)
    assert h.verdict == "open" and h.needed == needed(plan) and plan.power(h.needed) >= 0.9
    wide = np.random.default_rng(3).normal(0.5, 1.0, 40)
    (h,) = judged(equal(0.55, 0.12, Null.of("x", wide), equivalence="at most"))
    known = wide.std(ddof=1) / 40**0.5
    assert h.needed == 0 and f"40 draws fix the mean of the control only to within {known:.2g} fraction" in h.why
    (h,) = judged(equal(1.1, 0.02, Null.of("x", wide), equivalence="at most"))
    assert "is neither clearly inside nor clearly outside the range up to" in h.why


def test_the_range_that_a_claim_of_no_effect_allows_is_not_cut():
    found = cut(equal(0.52, 0.05), 0.0, 0.55)
    assert found.excess.hurdle == pytest.approx(0.6) and found.high == pytest.approx(0.55)


@pytest.mark.parametrize("nulls", [[], [Null.of("x", np.linspace(-0.2, 1.4, 20))]])
def test_an_interval_ends_where_the_metric_does_with_controls_and_without(nulls):
    reaching = Interval(-0.1, 1.1, 0.95, "jackknife")
    found = estimate(claim(range=(0.0, 1.0)), 0.6, reaching, nulls, n=20, clusters=20)
    assert (found.low, found.high) == found.rule.range == (0.0, 1.0)
    assert (found.null_low, found.null_high, found.excess.hurdle) == ((0.0, 1.0, 1.0) if nulls else (0.0, 0.0, 0.0))


@pytest.mark.parametrize(("scale", "widest"), [("folded", 1.0), ("fisher", 2.0)])
def test_a_difference_from_a_control_on_the_same_prompts_ends_where_two_correlations_do(scale, widest):
    null = Null.paired("without context", 0.4, 0.3, Interval(-3.4, 3.6, 0.95, "jackknife"))
    found = estimate(claim(scale=scale), 0.4, Interval(0.1, 0.7, 0.95, "jackknife"), [null], n=20, clusters=20)
    assert found.difference == (-widest, widest)


@pytest.mark.parametrize(
    ("scale", "ends"), [("folded", (0.0, 1.0)), ("fisher", (-1.0, 1.0)), ("identity", (-1.4, 1.3))]
)
def test_no_control_of_a_correlation_reaches_what_no_correlation_can_be(scale, ends):
    """A paired control spans the value less the interval of the difference: -1.25 to 1.30 of a |rho| was printed."""
    null = Null.paired("without context", 0.2, 0.1, Interval(-1.1, 1.6, 0.95, "jackknife"))
    found = estimate(claim(scale=scale), 0.2, Interval(0.0, 0.6, 0.95, "jackknife"), [null], n=20, clusters=20)
    assert (found.null_low, found.null_high) == pytest.approx(ends)


def test_records_of_one_run_share_one_correction_and_a_number_of_the_weights_is_one_test():
    """Holm over the distinct tests of both records: three, of p .01, .02 and .02, and not two in each record."""

    def measured(*ps):
        made = [replace(strong(name, p=p), value=0.9 + p) for name, p in zip(("weights", "b"), ps, strict=True)]
        return {"probe": Result("", tuple(made))}

    both = judged_together([measured(0.01, 0.02), measured(0.01, 0.021)])
    found = [[round(h.adjusted[0], 6) for h in record["probe"].estimates] for record in both]
    assert found == [[0.03, 0.04], [0.03, 0.04]] and {h.among for r in both for h in r["probe"].estimates} == {3}
    again = judged_together(both)
    assert [h for r in again for h in r["probe"].estimates] == [h for r in both for h in r["probe"].estimates]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            dict(p=0.03, p_excluded=8e-6),
            "a smaller one open: of 0.45 + 0.1, p = 8e-06 for this claim alone; that there",
        ),
        (dict(p=0.0106, p_excluded=8e-6), "by Holm undecided: of 0.45 + 0.1, p = 8e-06 for this claim alone; that"),
        (dict(p=0.5, p_excluded=0.02), "p = 0.02 for this claim alone, p = 0.16 by Holm over 8"),
    ],
)
def test_an_open_claim_whose_p_excludes_the_claimed_effect_says_so(given, said):
    """The p of the claimed effect decides the sentence, whatever n would find that effect."""
    for clusters in (0, 10, 10**6):
        h = judged(strong(**given, noise=1.0, needed=clusters), *(strong(str(i), p=0.9) for i in range(7)))[0]
        assert h.verdict == "open" and said in h.why and "the claimed effect is excluded, " in h.why
        assert "possible" not in h.why and "needs" not in h.why
    possible = judged(strong(p=0.03, p_excluded=0.03), *(strong(str(i), p=0.9) for i in range(7)))[0]
    assert "is excluded, " not in possible.why


def test_where_the_draws_differ_too_much_no_n_decides_and_the_verdict_says_so():
    wide = np.random.default_rng(0).normal(0.5, 0.2, 20)
    (h,) = judged(made(0.53, 0.52, 0.54, {"x": wide}, **SAID))
    assert h.verdict == "open" and h.needed == 0
    assert f"more data will not help: the control's own draws vary by {wide.std(ddof=1):.2g} fraction (one" in h.why
    assert needed(Setting(0.5, wide.std(ddof=1) / 0.1, 20)) is None


def test_a_random_direction_is_not_ruled_out_as_more_than_random_directions_and_a_larger_effect_is():
    """By the error of the value alone, a direction that is one more draw was ruled out in up to 25 %."""
    rng, words = np.random.default_rng(2), {}
    for more in (0.0, 2.0):
        found = []
        for _ in range(400):
            draws = rng.normal(0.5, 0.2, 40)
            value = draws[0] + more + rng.normal(0, 0.01)
            found.append(judged(equal(value, 0.01 * 2.02, Null.of("x", draws[1:]), equivalence="at most"))[0].verdict)
        words[more] = found
    assert words[0.0].count("ruled out") / 400 < 0.025 and words[2.0].count("ruled out") == 400
