"""Areas, rates and thresholds: against scikit-learn, closed forms, and how often the intervals hold the truth."""

from itertools import combinations

import numpy as np
import pytest
from scipy.stats import binom, binomtest, mannwhitneyu, norm, spearmanr, t as student_t
from sklearn.metrics import roc_auc_score

from studies.calibrate.auc import Area, area, rank_correlation, rate, told_apart
from tests.refusals import refused


def bench(rng, tasks=6, positives=6, negatives=9, apart=0.0, spread=0.0):
    """Subjects of two kinds in `tasks` strata, each a cluster; the kinds' scores are apart + N(0, spread) sd apart."""
    score, positive, stratum = [], [], []
    for task in range(tasks):
        shift = apart + spread * rng.normal()
        level = 10 * rng.normal()
        score += [*(level + shift + rng.normal(size=positives)), *(level + rng.normal(size=negatives))]
        positive += [True] * positives + [False] * negatives
        stratum += [task] * (positives + negatives)
    return np.array(score), np.array(positive), np.array(stratum)


def test_the_area_of_one_stratum_a_cluster_is_the_mean_of_scikit_learns():
    score, positive, stratum = bench(np.random.default_rng(0), apart=1.0)
    each = [roc_auc_score(positive[stratum == s], score[stratum == s]) for s in range(6)]
    assert area(score, positive, stratum, stratum).value == pytest.approx(np.mean(each))


def test_strata_weigh_by_their_pairs_and_levels_of_strata_say_nothing():
    score = np.array([1.0, 0.0, 5.0, 6.0, 7.0, 8.0])
    positive = np.array([True, False, True, False, False, True])
    stratum = np.array(["a", "a", "b", "b", "b", "b"])
    found = area(score, positive, stratum, stratum)
    assert found.pairs == 1 + 4
    assert found.value == pytest.approx((1 + 2) / 5)  # of b: 8 beats 6 and 7, 5 beats neither
    moved = area(score + 100 * (stratum == "a"), positive, stratum, stratum)
    assert moved == found


def test_ties_count_half():
    score, positive = np.zeros(8), np.array([True, False] * 4)
    stratum = np.repeat(["a", "b"], 4)
    found = area(score, positive, stratum, stratum)
    assert found.value == 0.5
    assert found.p == 1


def test_one_task_bounds_nothing():
    score, positive, stratum = bench(np.random.default_rng(0), tasks=1)
    assert area(score, positive, stratum, stratum) is None
    assert rank_correlation(score, score, stratum, stratum) is None


@pytest.mark.parametrize(("apart", "spread"), [(0.0, 0.0), (1.0, 0.0), (0.5, 1.0), (2.5, 0.0)])
def test_the_interval_holds_the_truth(apart, spread):
    """P(positive > negative) = E Phi((apart + spread z) / sqrt 2), which is Phi(apart / sqrt(2 + spread^2))."""
    truth = norm.cdf(apart / np.sqrt(2 + spread**2))
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(150):
        score, positive, stratum = bench(rng, apart=apart, spread=spread)
        found = area(score, positive, stratum, stratum)
        inside += found.low <= truth <= found.high
    assert inside >= binom.ppf(0.001, 150, 0.95)


def test_areas_of_nothing_are_seldom_told_apart():
    rng = np.random.default_rng(2)
    hits = 0
    for _ in range(200):
        score, positive, stratum = bench(rng, spread=0.5)
        hits += told_apart([{"other": area(score, positive, stratum, stratum)}]) in (["yes"], ["reversed"])
    assert hits <= binom.ppf(0.999, 200, 0.05)


def test_p_is_scipys_rank_test_and_that_of_every_relabelling():
    rng = np.random.default_rng(7)
    score, positive, stratum = bench(rng, tasks=2, positives=3, negatives=4, apart=1.2)
    score = score.round()  # with ties
    alone = area(np.tile(score[:7], 2), np.tile(positive[:7], 2), np.repeat([0, 1], 7), np.repeat([0, 1], 7))
    one = mannwhitneyu(score[:7][positive[:7]], score[:7][~positive[:7]], method="asymptotic", use_continuity=False)
    assert norm.isf(alone.p / 2) == pytest.approx(np.sqrt(2) * norm.isf(one.pvalue / 2))

    def away(labels: list[tuple[int, ...]]) -> float:
        wins = 0.0
        for s, high in enumerate(labels):
            x = score[7 * s : 7 * s + 7]
            low = [i for i in range(7) if i not in high]
            wins += (np.sign(x[list(high)][:, None] - x[low]) + 1).sum() / 2
        return abs(wins - 12)

    every = [away([a, b]) for a in combinations(range(7), 3) for b in combinations(range(7), 3)]
    exact = np.mean(np.array(every) >= away([(0, 1, 2), (0, 1, 2)]) - 1e-9)
    assert area(score, positive, stratum, stratum).p == pytest.approx(exact, abs=0.03)


def test_a_number_that_orders_every_task_is_told_beside_seventy_that_say_nothing():
    rng = np.random.default_rng(8)
    found = [area(*(made := bench(rng)), made[2]) for _ in range(70)]
    found.append(area(*(made := bench(rng, apart=100)), made[2]))
    found.append(area(*(made := bench(rng, apart=-100)), made[2]))
    words = told_apart([{"other": one} for one in found])
    assert words[-2:] == ["yes", "reversed"] and not {"yes", "reversed"} & {*words[:-2]}


def test_a_perfect_area_has_a_width():
    score, positive, stratum = bench(np.random.default_rng(3), apart=100)
    found = area(score, positive, stratum, stratum)
    assert found.value == 1
    assert 0.8 < found.low < 0.99
    fewer = area(*bench(np.random.default_rng(3), positives=2, negatives=2, apart=100), np.repeat(range(6), 4))
    assert fewer.low < found.low


def test_a_rate_of_independent_subjects_is_clopper_and_pearsons():
    hit = np.array([True] * 3 + [False] * 17)
    found = rate(hit, np.zeros(20))
    exact = binomtest(3, 20).proportion_ci(0.95, "exact")
    assert (found.k, found.n, found.effective) == (3, 20, 20)
    assert (found.low, found.high) == pytest.approx((exact.low, exact.high))
    assert rate(np.zeros(20, bool), np.arange(20) % 4).high == pytest.approx(1 - 0.025 ** (1 / 20))
    assert rate(np.ones(20, bool), np.arange(20) % 4).low == pytest.approx(0.025 ** (1 / 20))


def test_subjects_that_hit_by_task_count_as_tasks():
    """Two tasks of four hit always, two never: n_eff = (1/4) / v = 3, one fewer than the tasks."""
    cluster = np.repeat(range(4), 5)
    found = rate(cluster < 2, cluster)
    v = 4 / 3 * 4 * 2.5**2 / 20**2
    assert found.effective == pytest.approx(0.25 / v)
    assert found.effective == pytest.approx(3)
    assert found.high > 0.9


def test_no_subject_has_no_rate():
    with refused(ValueError, "one"):
        rate(np.zeros(0, bool), np.zeros(0))


def test_rank_correlation_is_scipys_within_strata():
    rng = np.random.default_rng(5)
    x, stratum = rng.normal(size=60), np.repeat(range(6), 10)
    y = x + rng.normal(size=60) + 100 * stratum
    each = [spearmanr(x[stratum == s], y[stratum == s]).statistic for s in range(6)]
    found = rank_correlation(x, y, stratum, stratum)
    assert found.value == pytest.approx(np.mean(each))
    assert found.low < found.value < found.high
    assert (found.n, found.clusters) == (60, 6)
    assert rank_correlation(x, y, stratum, stratum // 3).clusters == 2


def test_constant_and_tiny_strata_are_left_out_of_a_rank_correlation():
    x = np.array([1.0, 2, 3, 4, 5, 6, 0, 0, 0, 7, 8])
    stratum = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3])
    found = rank_correlation(x, x, stratum, stratum)
    assert (found.value, found.n, found.clusters) == (pytest.approx(1), 6, 2)


def made(value, low, high, p, clusters=6, error=0.2):
    return Area(value, low, high, p, 10, 5, 5, clusters, units=clusters, error=error)


def test_words():
    found = [made(0.9, 0.7, 1, 1e-4), made(0.6, 0.4, 0.7, 0.2), made(0.2, 0.1, 0.4, 1e-4), made(0.7, 0.4, 0.9, 0.1)]
    assert told_apart([{"other": one} for one in found]) == ["yes", "no", "reversed", "undecided"]
    # Alone p = .03 would do; among four Holm asks for .0125.
    assert told_apart([{"other": made(0.8, 0.55, 0.9, 0.03)}]) == ["yes"]
    assert told_apart([{"other": made(0.8, 0.55, 0.9, 0.03)}] * 4) == ["undecided"] * 4


@pytest.mark.parametrize(
    ("second", "word"),
    [
        (made(0.9, 0.7, 1, 1e-4), "yes"),
        (made(0.55, 0.45, 0.8, 0.4, error=0.5), "undecided"),  # told from untrained models, and not from this kind
        (made(0.5, 0.3, 0.7, 0.9), "no"),
        (made(0.1, 0.05, 0.3, 1e-4), "reversed"),
        (None, "undecided"),  # no model of this kind gives the metric
        (made(1.0, 0.3, 1, 1e-4, clusters=2), "undecided"),  # two tasks are too few
        (made(0.9, 0.45, 1, 1e-4), "undecided"),  # on other tasks it may be otherwise
    ],
)
def test_a_metric_tells_what_it_tells_from_every_kind(second, word):
    assert told_apart([{"untrained": made(1.0, 0.9, 1, 1e-5), "second": second}]) == [word]


def test_of_a_metric_that_tells_one_kind_alone_yes_is_said_seldom():
    """The conjunction keeps its level without a correction over kinds: the other kind is at chance."""
    rng, yes = np.random.default_rng(9), 0
    for _ in range(200):
        one, other = bench(rng, apart=3.0), bench(rng)
        areas = {name: area(*some, some[2]) for name, some in (("one", one), ("other", other))}
        yes += told_apart([areas]) == ["yes"]
    assert yes <= binom.ppf(0.999, 200, 0.025)


def test_the_end_of_an_interval_among_several():
    score, positive, stratum = bench(np.random.default_rng(3), apart=0.5)
    found = area(score, positive, stratum, stratum)
    assert found.upper(1) == pytest.approx(found.high, abs=1e-12)
    a = found.value * min(found.positives, found.negatives)
    a = (a + 0.5) / (min(found.positives, found.negatives) + 1)
    middle, reach = np.log(a / (1 - a)), np.log(found.high / (1 - found.high)) - np.log(a / (1 - a))
    wider = reach * student_t.isf(0.025 / 7, found.units - 1) / student_t.isf(0.025, found.units - 1)
    assert found.upper(7) == pytest.approx(1 / (1 + np.exp(-middle - wider)))


def test_no_is_said_seldom_of_a_metric_that_has_the_area_against_every_kind():
    """An area of .75 is excluded against some kind: its level is that of the metric, however many kinds there are."""
    rng, no, alone = np.random.default_rng(10), 0, 0
    apart = norm.ppf(0.75) * np.sqrt(2 + 0.8**2)
    for _ in range(150):
        some = [bench(rng, apart=apart, spread=0.8) for _ in range(7)]
        areas = {f"kind {i}": area(*one, one[2]) for i, one in enumerate(some)}
        no += told_apart([areas]) == ["no"]
        alone += any(one.high < 0.75 for one in areas.values())
    assert no <= binom.ppf(0.999, 150, 0.025) < alone


def test_a_task_with_most_of_the_pairs_leaves_few_degrees_of_freedom():
    """Twelve architectures of one task and five tasks of one: with five degrees of freedom .92 and .85 were covered."""
    rng, sizes, held, held_rho = np.random.default_rng(6), [12, 1, 1, 1, 1, 1], 0, 0
    for _ in range(300):
        score, positive, stratum, cluster, target = [], [], [], [], []
        for task, count in enumerate(sizes):
            shift, slope = 0.5 + rng.normal(), rng.normal()
            for _ in range(count):
                score += [*(shift + rng.normal(size=4)), *rng.normal(size=4)]
                positive += [True] * 4 + [False] * 4
                stratum += [len(cluster)] * 8
                cluster += [task] * 8
                target += [*(slope * np.array(score[-8:]) + rng.normal(size=8))]
        arrays = [np.array(x) for x in (score, positive, stratum, cluster)]
        found = area(*arrays)
        held += found.low <= norm.cdf(0.5 / np.sqrt(3)) <= found.high
        rho = rank_correlation(arrays[0], np.array(target), *arrays[2:])
        held_rho += rho.low <= 0 <= rho.high
    assert held / 300 >= 0.95 and held_rho / 300 >= 0.95
