"""The planned number of units finds the declared effect in nine experiments of ten by our own verdicts, half as many do
not."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats as scipy_stats

from llmgeom.claims import Claim, Null, estimate, judge
from llmgeom.probes.shared.representation_geometry import Axis, correlation
from llmgeom.probes.shared.targets import Target
from llmgeom.result import Measured
from llmgeom.stats import resampling, tests
from llmgeom.stats.power import Design, detectable, needed, needed_in_any_layer
from tests.simulated import shapes_checked

MEAN = Claim(
    probe="toy", name="x", unit="fraction", side="upper", needed="mean", effect=0.1, claim="It holds.", scale="identity"
)  # fmt: skip
RHO = replace(MEAN, unit="|rho|", needed="correlation", effect=0.3, scale="folded")
TWO_EACH = 2  # prompts of a unit


def passes(found, claims: int) -> bool:
    """Whether it holds, or is small, in a record whose other claims are nowhere near theirs."""
    others = [replace(found, name=f"other {i}", p=1.0) for i in range(claims - 1)]
    made = Measured("", "", "", "", "", (found, *others), {}, {})
    return judge({"toy": made})["toy"].estimates[0].verdict in ("holds", "small")


def share_passed(experiment, many: int) -> float:
    return float(np.mean([experiment(np.random.default_rng(seed)) for seed in shapes_checked(range(many))]))


def clustered(rng, clusters: int, sd: float, alike: float = 0.7) -> tuple[np.ndarray, np.ndarray]:
    """[prompt] deviations whose unit means have this sd, and the unit of each."""
    own, shared = rng.normal(size=(clusters, TWO_EACH)), rng.normal(size=(clusters, 1))
    x = math.sqrt(alike) * shared + math.sqrt((1 - alike) * TWO_EACH) * own
    return (sd * x).ravel(), np.repeat(np.arange(clusters), TWO_EACH)


def of_a_mean(design: Design, clusters: int, truth: float):
    """One experiment: the mean of prompts in clusters, a further draw and more, against draws or the number 0."""
    claim = design.claim
    drawn = not claim.equivalence and design.control != "number"
    noise = design.spread / math.sqrt(clusters) if design.control == "noisy draws" else 0.0

    def experiment(rng) -> bool:
        x, unit = clustered(rng, clusters, design.spread)
        x = x + (truth if claim.side == "upper" else -truth) + rng.normal(0, design.null_spread) * drawn
        span, value = resampling.jackknife(np.mean, x, unit), float(x.mean())
        draws = rng.normal(0, math.hypot(design.null_spread, noise), design.draws)
        null = Null.of("untrained controls", draws, claim.side, noisy=noise > 0) if drawn else Null.number("0", 0.0)
        return passes(estimate(claim, value, span, [null], n=len(x), clusters=clusters), design.claims)

    return experiment


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "null_spread", "claims", "control"),
    [
        ({}, 0.01, 8, "draws"),
        ({"side": "lower"}, 0.005, 1, "draws"),
        ({}, 0.008, 4, "noisy draws"),
        ({}, 0.0, 8, "number"),
        ({"equivalence": True, "effect": 0.0, "margin": 0.1}, 0.0, 8, "draws"),
        ({"equivalence": True, "effect": 0.0, "margin": 0.1, "one_sided": True}, 0.0, 3, "draws"),
    ],
)
def test_the_planned_units_find_a_mean_in_nine_of_ten_experiments(changes, null_spread, claims, control):
    design = Design(replace(MEAN, **changes), 0.2, null_spread, 20, claims, control)
    clusters, claim = needed(design), design.claim
    truth = 0.0 if claim.equivalence else 0.1
    for n, low, high in ((clusters, 0.85, 0.95), (clusters // 2, 0.0, 0.72)):
        found = share_passed(of_a_mean(design, n, truth), 300)
        assert low < found < high
        assert found == pytest.approx(design.power(n), abs=0.07)


def of_a_correlation(design: Design, clusters: int, rho: float):
    """One experiment: |rho| of scores and entropy of prompts in clusters, against controls and permutations."""

    def experiment(rng) -> bool:
        entropy, unit = clustered(rng, clusters, 1.0, 0.99)

        def scores(true: float) -> np.ndarray:
            r = 2 * math.sin(math.pi * true / 6)  # the Pearson correlation whose Spearman's is `true`
            return r * entropy + math.sqrt(1 - r**2) * clustered(rng, clusters, 1.0, 0.99)[0]

        untrained = [abs(tests.spearman(scores(math.tanh(z)), entropy)) for z in rng.normal(0, design.null_spread, 20)]
        own = scores(rho)
        test = tests.correlation_test(own, entropy, unit, 1000, 0)
        axis = Axis.of(own[:, None], Target(entropy, np.zeros(len(entropy), dtype=int), False), unit, 0)
        found = correlation(design.claim, axis, test, {"untrained controls": np.array(untrained)})
        return passes(found, design.claims)

    return experiment


@pytest.mark.slow
def test_the_planned_units_find_a_correlation_in_nine_of_ten_experiments():
    design = Design(RHO, 0.0, 0.03, 20, 2)
    clusters = needed(design)
    for n, low, high in ((clusters, 0.83, 0.97), (clusters // 2, 0.3, 0.72)):
        # The effect counts from the centre of the draws, which have the sampling error of |rho| besides.
        rho = 0.3 + math.tanh(scipy_stats.norm.ppf(0.75) * math.hypot(0.03, (n - 3) ** -0.5))
        found = share_passed(of_a_correlation(design, n, rho), 80)
        assert low < found < high
        assert found == pytest.approx(design.power(n), abs=0.1)


def test_one_layer_of_several_is_found_by_the_p_of_the_largest():
    layers, many = 6, 150

    def share(clusters: int, rho: float, alone: bool = False) -> float:
        found = 0
        for seed in range(many):
            rng = np.random.default_rng(seed)
            entropy = rng.normal(size=clusters)
            scores = rng.normal(size=(layers, clusters))
            r = 2 * math.sin(math.pi * rho / 6)
            scores[3] = r * entropy + math.sqrt(1 - r**2) * scores[3]
            corrected = tests.max_statistic(scores, entropy, np.arange(clusters), 600, seed)[1]
            found += corrected[3] < 0.05
        return found / many

    clusters = needed_in_any_layer(0.3, layers)
    whole, half = share(clusters, 0.3), share(clusters // 2, 0.3)
    assert whole == pytest.approx(0.9, abs=0.06) and half < 0.7
    assert needed_in_any_layer(0.3, 1) < clusters < needed_in_any_layer(0.3, 24)


def test_of_one_layer_and_no_draws_the_plans_are_the_textbook_s():
    # n = 3 + ((1.960 + 1.282) / atanh(.3))^2 (1 + .3^2 / 2), and for a mean ((1.960 + 1.282) s / d)^2 and a little.
    assert needed_in_any_layer(0.3, 1) == math.ceil(3 + (3.2415 / math.atanh(0.3)) ** 2 * 1.045)
    design = Design(MEAN, 0.3, 0.0, 20, 1, "number")
    assert 95 <= needed(design) <= tests.needed_n_mean(0.1, 0.3) == 97
    for clusters in (10, 40, 100):
        exact = scipy_stats.nct.sf(
            scipy_stats.t.isf(0.025, clusters - 1), clusters - 1, 0.1 * math.sqrt(clusters) / 0.3
        )
        assert design.power(clusters) == pytest.approx(exact, abs=0.015)


@pytest.mark.parametrize(
    "design",
    [
        Design(MEAN, 0.3, 0.01, 20, 8),
        Design(MEAN, 0.3, 0.01, 39, 3, "noisy draws"),
        Design(RHO, 0.0, 0.02, 40, 1),
        Design(replace(RHO, scale="fisher"), 0.0, 0.02, 20, 4),
        Design(replace(MEAN, equivalence=True, effect=0.0, margin=0.1), 0.3, 0.0, 20, 5),
    ],
)
def test_the_effect_found_with_the_units_needed_is_the_declared_one(design):
    clusters = needed(design)
    assert design.power(clusters) >= 0.9 > design.power(clusters - 1)
    assert detectable(design, clusters) == pytest.approx(design.claim.smallest, rel=0.03)
    assert detectable(design, clusters) <= design.claim.smallest * 1.002
    assert detectable(design, 2 * clusters) < detectable(design, clusters) < detectable(design, clusters // 2)
    assert needed(design, 0.5) < clusters <= needed(replace(design, claims=design.claims + 20))


def test_more_claims_wider_draws_and_larger_spreads_need_more():
    base = Design(MEAN, 0.3, 0.01, 20, 1)
    each = [replace(base, claims=8), replace(base, null_spread=0.02), replace(base, spread=0.4)]
    assert all(needed(one) > needed(base) for one in each)
    rho = Design(RHO, 0.0, 0.05, 20, 8)
    assert needed(replace(rho, null_spread=0.0)) < needed(rho) and needed(replace(rho, null_spread=0.1)) is None
    # Twenty draws as wide as the effect: no number of units makes them less.
    assert needed(replace(base, null_spread=0.12, claims=8)) is None
    assert 0.1 < detectable(replace(base, null_spread=0.12, claims=8), 10**6) < 0.6
    assert base.power(4) == 0  # no interval is made of fewer than five units


@pytest.mark.parametrize(("draws", "can"), [(1, False), (4, False), (5, True), (20, True), (40, True)])
def test_no_units_make_up_for_too_few_draws(draws, can):
    assert (needed(Design(MEAN, 0.3, 0.01, draws, 1)) is not None) == can
    assert (detectable(Design(RHO, 0.0, 0.01, draws, 1), 500) is not None) == can
    assert needed(Design(MEAN, 0.3, 0.01, draws, 1, "number")) is not None  # it has no draws


def test_a_correlation_leaves_no_room_beyond_one():
    near = Design(replace(RHO, effect=0.85), 0.0, 0.25, 20, 1)
    assert near.power(10**5) == 0 and math.tanh(0.6745 * 0.25) + detectable(near, 10**5) < 1
