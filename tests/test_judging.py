"""Verdicts on published numbers: by Student's t as scipy has it, under simulated nulls, and what may never pass."""

import math

import numpy as np
import pytest
from scipy import stats

from llmgeom.claims import Claim, Null, estimate, judge_estimates
from llmgeom.errors import UserError
from llmgeom.papers.published_numbers import Check, Entry
from llmgeom.papers.verdicts import NO_NULL, Row, combined, judged, over_seeds, pose
from llmgeom.result import Lack
from llmgeom.stats.resampling import Interval
from llmgeom.stats.tests import needed_n_mean
from tests.refusals import refused


def asks(compare: str, **given) -> Check:
    numbers = {"unit": "bits", "tolerance": 0.1} if compare != "claim" else {}
    return Check(measure="m", compare=compare, **{**numbers, **given})


def entry(test: Check, name: str = "q") -> Entry:
    said = {"quantity": name, "published": "as printed", "source": "a table", "definition": "d"}
    return Entry(id=name, rows=("3.1",), small=test, full=test, **said)


def row(of: Entry, test: Check, estimate) -> Row:
    return Row(of, estimate, "", test)


def verdict(values, test: Check, *, others: int = 0, **given):
    """Of one entry, among others that are certain."""
    sure = asks("above", bound=0.0)
    rows = [row(entry(test), test, over_seeds(values, "bits", test.scale, **given))]
    rows += [row(entry(sure, f"o{i}"), sure, over_seeds([5, 5.001, 5.002], "bits")) for i in range(others)]
    return judged(rows)[0].estimate


VALUES = (0.30, 0.34, 0.29, 0.35, 0.31)


def test_intervals_are_student_s():
    h = over_seeds(VALUES, "bits")
    assert (h.low, h.high) == pytest.approx(stats.t.interval(0.95, 4, np.mean(VALUES), stats.sem(VALUES)))
    assert (h.value, h.n, h.clusters) == (pytest.approx(np.mean(VALUES)), 5, 5)
    h, logs = over_seeds(VALUES, "times", "log"), np.log(VALUES)
    assert h.value == pytest.approx(stats.gmean(VALUES))
    ends = stats.t.interval(0.95, 4, logs.mean(), stats.sem(logs))
    assert (h.low, h.high) == pytest.approx(tuple(np.exp(ends)))
    with refused(UserError, 1):
        over_seeds([1.0], "bits")
    with refused(UserError, "logarithm"):
        over_seeds([1.0, 0.0], "times", "log")


def test_the_interval_of_an_accuracy_ends_at_1_and_its_p_is_that_of_the_whole_interval():
    posed = {}
    for unit in ("fraction", "bits"):
        test = asks("above", bound=0.5, unit=unit)
        posed[unit] = pose(entry(test), test, over_seeds([0.99, 1.0, 0.93], unit), 1)
    assert posed["fraction"].high == 1 < posed["bits"].high and posed["fraction"].low == posed["bits"].low
    assert posed["fraction"].p == posed["bits"].p < 0.05


def test_what_was_measured_alike_is_no_more_certain_than_its_resolution():
    h = over_seeds([1.0, 1.0, 1.0], "fraction", least=0.01)
    assert h.high - h.value == pytest.approx(stats.t.ppf(0.975, 2) * 0.01 / math.sqrt(3))
    spread = over_seeds([0.9, 1.0, 1.1], "fraction", least=0.01)
    assert spread.high == over_seeds([0.9, 1.0, 1.1], "fraction").high


@pytest.mark.parametrize(("compare", "bound", "side"), [("above", 0.25, "greater"), ("below", 0.4, "less")])
@pytest.mark.parametrize("scale", ["identity", "log"])
def test_p_against_a_bound_is_the_one_sided_t_test(compare, bound, side, scale):
    test = asks(compare, bound=bound, scale=scale)
    h = pose(entry(test), test, over_seeds(VALUES, "bits", scale), 1)
    f = np.log if scale == "log" else np.asarray
    expected = stats.ttest_1samp(f(VALUES), f(bound), alternative=side).pvalue
    assert h.p == pytest.approx(expected)
    assert h.margin == bound and h.effect == 0.1 and h.published == "as printed" and h.name == "q"


@pytest.mark.parametrize("scale", ["identity", "log"])
def test_p_within_a_range_is_the_larger_of_two_one_sided_tests(scale):
    test = asks("within", values=[0.30, 0.33], tolerance=0.05, scale=scale)
    h = pose(entry(test), test, over_seeds(VALUES, "bits", scale), 1)
    f = np.log if scale == "log" else np.asarray
    tests = [(0.25, "greater"), (0.38, "less")]
    p = [stats.ttest_1samp(f(VALUES), f(end), alternative=side).pvalue for end, side in tests]
    assert h.p == pytest.approx(max(p)) and (h.margin_low, h.margin) == pytest.approx((0.25, 0.38))


def test_what_fits_passes_what_does_not_fails_and_noise_is_inconclusive():
    near, far, noisy = (0.31, 0.32, 0.315), (0.71, 0.72, 0.715), (0.1, 0.5, 0.35)
    for test in (
        asks("within", values=[0.3], tolerance=0.1),
        asks("below", bound=0.5),
        asks("within", values=[0.3], tolerance=0.1, scale="log"),
    ):
        assert [verdict(x, test).verdict for x in (near, far, noisy)] == ["holds", "ruled out", "open"]
    above = asks("above", bound=0.5)
    assert [verdict(x, above).verdict for x in (far, near, noisy)] == ["holds", "ruled out", "open"]
    h = verdict(noisy, above)
    wanted = needed_n_mean(0.1, float(np.std(noisy, ddof=1)), level=0.95)
    assert h.needed == wanted and f"needs n >= {wanted} clusters" in h.why
    assert verdict(noisy, above, others=9).needed == needed_n_mean(0.1, float(np.std(noisy, ddof=1)), level=0.995)
    logs = verdict((0.2, 0.9, 0.6), asks("above", bound=0.5, scale="log"))
    sd = float(np.std(np.log((0.2, 0.9, 0.6)), ddof=1))
    assert logs.needed == needed_n_mean(math.log(0.6 / 0.5), sd, level=0.95)


def test_a_bound_is_failed_where_the_smallest_difference_of_interest_is_excluded():
    """Alike and precise: neither above nor below, and surely not above by as much as matters."""
    assert verdict((1.0, 1.001, 0.999), asks("above", bound=1.0)).verdict == "ruled out"
    assert verdict((1.0, 1.001, 0.999), asks("below", bound=1.0)).verdict == "ruled out"
    assert verdict((1.05, 1.051, 1.049), asks("above", bound=1.0)).verdict == "small"
    assert verdict((1.2, 1.21, 1.19), asks("above", bound=1.0)).verdict == "holds"


def test_the_more_is_asked_the_harder_it_is_to_pass():
    test = asks("above", bound=0.28, tolerance=0.05)
    p = stats.ttest_1samp(VALUES, 0.28, alternative="greater").pvalue
    assert 0.05 / 10 < p < 0.05
    assert verdict(VALUES, test).verdict == "holds"
    assert verdict(VALUES, test, others=9).verdict == "holds"  # Holm: the others are certain, and go first
    unsure = [row(entry(test, f"u{i}"), test, over_seeds(VALUES, "bits")) for i in range(10)]
    assert {one.verdict for one in judged(unsure)} == {"open"}


def test_what_a_trivial_predictor_has_too_does_not_pass():
    below = asks("below", bound=0.5)
    assert verdict(VALUES, below, null=("constant", 0.9)).verdict == "holds"
    assert verdict(VALUES, below, null=("constant", 0.30)).verdict == "ruled out"
    above = asks("above", bound=0.1)
    assert verdict(VALUES, above, null=("constant", 0.2)).verdict == "holds"
    assert verdict(VALUES, above, null=("constant", 0.4)).verdict == "ruled out"
    within = asks("within", values=[0.3], tolerance=0.1)
    h = verdict(VALUES, within, null=("constant", 0.25))
    assert h.verdict == "open" and "constant lies in the printed range too" in h.why
    assert h.lacks == (Lack("control", "constant"),) and judge_estimates([h])[0].verdict == "open"
    assert verdict(VALUES, within, null=("constant", 0.45)).verdict == "holds"
    nothing = asks("within", values=[0.3], tolerance=0.1, nothing=True)
    assert verdict(VALUES, nothing, null=("constant", 0.25)).verdict == "holds"


@pytest.mark.slow
def test_under_the_null_few_pass():
    """Truth at the bound, five entries at a time: PASS anywhere in no more than 5 % of the tables."""
    rng, test = np.random.default_rng(0), asks("above", bound=1.0)
    at_the_edge = asks("within", values=[0.5], tolerance=0.5)
    hits = 0
    for _ in range(300):
        rows = [
            row(entry(t, f"{i}"), t, over_seeds(rng.normal(1.0, 0.2, 4), "bits"))
            for i, t in enumerate([test] * 4 + [at_the_edge])
        ]
        hits += any(one.verdict == "holds" for one in judged(rows))
    assert hits <= stats.binom.ppf(0.995, 300, 0.05)


def test_the_n_that_is_named_decides():
    """Truth beyond the bound by the difference of interest, as many seeds as the verdict asks for."""
    rng, sd = np.random.default_rng(1), 0.15
    test = asks("above", bound=1.0)
    n = needed_n_mean(0.1, sd, level=0.95)
    passed = sum(verdict(rng.normal(1.1, sd, n), test).verdict == "holds" for _ in range(200))
    assert stats.binom.ppf(0.005, 200, 0.88) <= passed


def drawn(value: float, null: np.ndarray, claim: str = "", side: str = "upper"):
    said = {"claim": claim} if claim else {}
    declared = Claim(probe="p", name="n", unit="bits", side=side, needed="mean", effect=0.1, **said)
    at = Interval(value - 0.05, value + 0.05, 0.95, "jackknife")
    return estimate(declared, value, at, [Null.of("untrained controls", null, side)], n=40, clusters=40)


def test_trainings_are_compared_with_the_hardest_of_their_nulls():
    rng = np.random.default_rng(2)
    low, high = rng.normal(0, 0.01, 20), rng.normal(1.0, 0.01, 20)
    h = combined([drawn(0.9, low), drawn(0.92, high), drawn(0.91, low)])
    assert h.value == pytest.approx(0.91) and h.clusters == 3 and h.null_high == pytest.approx(high.max(), abs=0.01)
    assert h.p > 0.9 and "hardest of 3 trainings" in h.null
    test = asks("above", bound=0.5)
    (one,) = judged([row(entry(test), test, h)])
    assert one.verdict == "ruled out"
    (one,) = judged([row(entry(test), test, combined([drawn(v, low) for v in (0.9, 0.92, 0.91)]))])
    assert one.verdict == "holds"
    below = asks("below", bound=0.5)
    mirrored = [drawn(-0.9, -low, side="lower"), drawn(-0.92, -high, side="lower"), drawn(-0.91, -low, side="lower")]
    (one,) = judged([row(entry(below), below, combined(mirrored))])
    assert one.verdict == "ruled out"
    with refused(ValueError, "upper"):
        pose(entry(below), below, h, 1)


def paired(value: float, centre: float):
    """Against the same weights without context, which give `centre`; the difference is known to .01."""
    declared = Claim(probe="p", name="n", unit="bits", side="upper", needed="mean", effect=0.1)
    at, apart = Interval(value - 0.05, value + 0.05, 0.95, ""), value - centre
    null = Null.paired("without context", value, centre, Interval(apart - 0.01, apart + 0.01, 0.95, ""))
    return estimate(declared, value, at, [null], n=40, clusters=40)


def test_a_control_on_the_same_prompts_is_one_number_where_a_printed_number_decides():
    """The value's own interval is compared with what was printed: nothing is told of the difference."""
    h = paired(0.9, 0.7)
    assert h.paired and (h.null_low, h.null_high) != (h.centre, h.centre) == (0.7, 0.7)
    above, within = asks("above", bound=0.5), asks("within", values=[0.9], tolerance=0.1)
    for test, bound in ((above, 0.7), (within, 0.7)):
        (one,) = judged([row(entry(test), test, h)])
        (posed,) = [one.estimate]
        assert (posed.null_low, posed.null_high, posed.centre) == pytest.approx((0.7, 0.7, bound)), test.compare
        assert posed.verdict == "holds" and posed.deciding_interval == (posed.low, posed.high) == (h.low, h.high)
        assert "difference" not in posed.why
    (farther,) = judged([row(entry(asks("above", bound=0.8)), asks("above", bound=0.8), h)])
    assert farther.estimate.centre == 0.8 and "0.9 [0.85, 0.95]" in farther.why
    # .68 to .72 is the value less the interval of the difference; the control itself, .7, is not in the range.
    edge = asks("within", values=[0.9], tolerance=0.195)
    assert judged([row(entry(edge), edge, h)])[0].verdict == "holds"


def test_of_several_trainings_a_control_on_the_same_prompts_is_one_number():
    h = combined([paired(0.9, 0.7), paired(0.92, 0.8), paired(0.91, 0.6)])
    assert not h.paired and (h.null_low, h.null_high, h.centre) == pytest.approx((0.8, 0.8, 0.8))


def test_too_few_draws_decide_nothing():
    few = np.random.default_rng(4).normal(0, 0.01, 4)
    h = combined([drawn(v, few) for v in (0.9, 0.92, 0.91)])
    test = asks("above", bound=0.5)
    (one,) = judged([row(entry(test), test, h)])
    assert h.p == pytest.approx(0.5) and one.verdict == "open"


def test_a_claim_keeps_its_own_terms():
    test, rng = asks("claim"), np.random.default_rng(3)
    h = drawn(0.9, rng.normal(0, 0.01, 40), claim="It is so.")
    rows = [row(entry(test), test, h)]
    assert judged(rows)[0].verdict == "holds"
    unsure = row(entry(test), test, drawn(0.9, np.zeros(40), claim="It is so."))
    lacking = [row(unsure.entry, test, _inconclusive(unsure.estimate))]
    (one,) = judged(lacking)
    assert one.verdict == "open" and one.why == "needs 5 training seeds, has 2"


def _inconclusive(h):
    import dataclasses

    return dataclasses.replace(h, verdict="open", why="needs 5 training seeds, has 2")


def test_what_was_not_measured_stays_not_tested():
    test = asks("above", bound=0.5)
    rows = [Row(entry(test), None, "no code"), row(entry(test), test, over_seeds(VALUES, "bits"))]
    found = judged(rows)
    assert found[0].verdict == "NOT TESTED" and found[0].why == "no code" and found[1].estimate.null == NO_NULL
    assert "Holm over 1 claim" in found[1].why
