"""The clusters that a claim asks for find its effect in nine of ten experiments by our own verdicts."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats as scipy_stats

from llmgeom.claims import Claim, Null, estimate, judge
from llmgeom.result import Measured
from llmgeom.stats import resampling, tests
from llmgeom.stats.power import Setting, needed
from tests.made import changed
from tests.simulated import shapes_checked

MEAN = Claim(
    name="x", unit="fraction", side="upper", effect=0.1, claim="It holds."
)  # fmt: skip
TWO_EACH = 2  # prompts of a unit


def passes(found, claims: int) -> bool:
    """Whether it holds, or is small, in a record whose other claims are nowhere near theirs."""
    others = [changed(found, name=f"other {i}", p=1.0) for i in range(claims - 1)]
    made = Measured("", "", "", "", "", (found, *others), {}, {})
    return judge({"toy": made})["toy"].estimates[0].verdict in ("holds", "small")


def share_passed(experiment, many: int) -> float:
    return float(np.mean([experiment(np.random.default_rng(seed)) for seed in shapes_checked(range(many))]))


def clustered(rng, clusters: int, sd: float, alike: float = 0.7) -> tuple[np.ndarray, np.ndarray]:
    """[prompt] deviations whose unit means have this sd, and the unit of each."""
    own, shared = rng.normal(size=(clusters, TWO_EACH)), rng.normal(size=(clusters, 1))
    x = math.sqrt(alike) * shared + math.sqrt((1 - alike) * TWO_EACH) * own
    return (sd * x).ravel(), np.repeat(np.arange(clusters), TWO_EACH)


def of_a_mean(claim: Claim, setting: Setting, clusters: int, truth: float):
    """One experiment: the mean of prompts in clusters, a further draw and more, against draws or the number 0."""
    sd, spread = setting.noise * claim.effect, setting.spread * claim.effect
    noise = sd / math.sqrt(clusters) if setting.noisy else 0.0

    def experiment(rng) -> bool:
        x, unit = clustered(rng, clusters, sd)
        x = x + (truth if claim.side == "upper" else -truth) + rng.normal(0, spread) * bool(setting.draws)
        span, value = resampling.jackknife(np.mean, x, unit), float(x.mean())
        draws = rng.normal(0, math.hypot(spread, noise), setting.draws)
        null = Null.of("untrained controls", draws, claim.side, noisy=noise > 0)
        null = null if setting.draws else Null.number("0", 0.0)
        return passes(estimate(claim, value, span, [null], n=len(x), clusters=clusters), setting.claims)

    return experiment


EQUAL = {"equivalence": "within"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({}, Setting(2.0, 0.1, 20, claims=8)),
        ({"side": "lower"}, Setting(2.0, 0.05, 20)),
        ({}, Setting(2.0, 0.08, 20, noisy=True, claims=4)),
        ({}, Setting(2.0, 0.0, 0, claims=8)),
        (EQUAL, Setting(2.0, 0.0, 0, claims=8, sides=2)),
        ({"equivalence": "at most"}, Setting(2.0, 0.0, 0, claims=3)),
    ],
)
def test_the_needed_clusters_find_a_mean_in_nine_of_ten_experiments(changes, setting):
    claim, clusters = replace(MEAN, **changes), needed(setting)
    truth = 0.0 if claim.equivalence else 0.1
    for n, low, high in ((clusters, 0.85, 0.95), (clusters // 2, 0.0, 0.72)):
        found = share_passed(of_a_mean(claim, setting, n, truth), 300)
        assert low < found < high
        assert found == pytest.approx(setting.power(n), abs=0.07)


def test_without_draws_the_power_is_that_of_student_s_test():
    setting = Setting(3.0, 0.0, 0)
    assert 95 <= needed(setting) <= tests.needed_n_mean(0.1, 0.3) == 97  # ((1.960 + 1.282) s / d)^2 and a little
    for clusters in (10, 40, 100):
        level = scipy_stats.t.isf(0.025, clusters - 1)
        exact = scipy_stats.nct.sf(level, clusters - 1, 0.1 * math.sqrt(clusters) / 0.3)
        assert setting.power(clusters) == pytest.approx(exact, abs=0.015)


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
