"""Few clusters: labels in another order where the label varies inside clusters, and intervals of bounded scores."""

import numpy as np
import pytest
from scipy.stats import binom

from llmgeom.errors import UserError
from llmgeom.probes.labels.answers import scored
from llmgeom.probes.labels.probe import LabelProbe
from llmgeom.stats.label_scores import LEAST_ORDERS, coded, few_orders, moved
from llmgeom.stats.nested_probe import Design, HeldOut, held_out, stratified_folds
from llmgeom.stats.tests import tail_p
from studies.planted_labels import World
from tests.refusals import refused

TEMPLATE = np.repeat(np.arange(16), 4)  # templates by fillers, each template with its fillers in the same order
BY_FILLER = np.tile([0, 0, 1, 1], 16)


def read(x: np.ndarray, label: np.ndarray, cluster: np.ndarray, seed: int = 0, draws: int = 99) -> HeldOut:
    fold = stratified_folds("binary", label, cluster, 0)
    return held_out(Design("binary", coded("binary", label), fold), [lambda: x], moved(label, cluster, draws, seed))


def p_of(own: HeldOut) -> float:
    return float(tail_p(own.value, own.moved, "upper"))


def activations(seed: int, strength: float = 0.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((16, 12))[TEMPLATE] + rng.standard_normal((64, 12))
    x[:, 0] += strength * (2 * BY_FILLER - 1)
    return x


def test_labels_of_a_crossed_design_change_places_inside_their_template():
    orders = moved(BY_FILLER, TEMPLATE, 200, 0)
    assert all((np.sort(order) == np.arange(64)).all() for order in orders)
    assert (BY_FILLER[orders] != BY_FILLER).any(1).all()
    assert (BY_FILLER[orders].reshape(200, 16, 4).sum(2) == 2).all()  # each template keeps its composition
    assert BY_FILLER[orders].mean(0) == pytest.approx(0.5, abs=0.15)  # each row meets both labels


def by_cluster(seed: int, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A label that goes by cluster but for one row in ten, and the cluster of each row."""
    rng, cluster = np.random.default_rng(seed), np.repeat(np.arange(len(sizes)), sizes)
    label = rng.permutation(np.arange(len(sizes)) % 2)[cluster]
    return np.where(rng.random(len(cluster)) < 0.1, 1 - label, label), cluster


def test_clusters_of_unequal_sizes_exchange_their_labels():
    """Where those of a size of their own stayed, orders of this label scored .92 and the label itself .93."""
    label, cluster = by_cluster(0, np.arange(3, 30))
    x = np.random.default_rng(1).standard_normal((len(label), 12))
    x[:, 0] += 2 * label
    own = read(x, label, cluster)
    assert own.value > 0.85 and np.median(own.moved) == pytest.approx(0.5, abs=0.05)
    whole = cluster % 2  # the same exchange where the label is constant in every cluster
    order = moved(whole, cluster, 200, 0)
    assert all(len(set(whole[one][cluster == i])) == 1 for one in order for i in (0, 26))
    assert whole[order].mean(0) == pytest.approx(whole[np.unique(cluster, return_index=True)[1]].mean(), abs=0.15)


def test_no_order_leaves_a_class_in_one_fold():
    """Five rows of a class in large clusters: small ones that take a part of such a cluster seldom take that row."""
    cluster = np.concatenate([np.repeat(np.arange(5), 20), np.repeat(np.arange(5, 65), 2)])
    label = np.zeros(len(cluster), dtype=int)
    label[np.arange(5) * 20] = 1
    fold = stratified_folds("binary", label.astype(str), cluster, 0)
    orders = moved(label, cluster, 100, 0, fold)
    assert all(len(set(fold[label[order] == 1])) > 1 for order in orders)
    assert len(np.unique(label[orders], axis=0)) == 100


def test_p_of_a_label_that_goes_with_nothing_is_uniform_in_a_crossed_design():
    p = np.array([p_of(read(activations(seed), BY_FILLER, TEMPLATE, seed, 39)) for seed in range(120)])
    for level in (0.05, 0.25, 0.5, 0.75):
        low, high = binom.ppf([0.005, 0.995], 120, level)
        assert low <= (p <= level).sum() <= high


def test_clusters_exchange_inside_their_fold_alone():
    cluster, fold = np.repeat(np.arange(20), 3), np.repeat(np.arange(20) % 5, 3)
    for label in (cluster % 2, np.arange(60) % 2):  # constant within clusters, or not
        orders = moved(label, cluster, 50, 0, fold)
        assert (fold[orders] == fold).all() and (cluster[orders] != cluster).any()


@pytest.mark.parametrize(
    ("label", "cluster", "fold"),
    [
        (np.arange(10) // 5, np.arange(10), np.arange(10) % 5),  # 2 ** 5 = 32
        (np.arange(30) // 3 // 5, np.arange(30) // 3, np.arange(30) // 3 % 5),  # the same, of 3 rows each
        (np.arange(15) % 3 // 2, np.arange(15), np.arange(15) // 3),  # 3 ** 5 = 243
        (np.arange(10) // 5, np.arange(10), None),  # 10 over 5 = 252
        (np.arange(5) // 4, np.arange(5), None),  # 5
        (np.arange(10) % 2, np.arange(10) // 2, None),  # each cluster has both: 2 ** 5 = 32
        (np.array([0, 1, 1] * 2 + [0, 0, 1] * 3), np.arange(15) // 3, None),  # 10 * 3 ** 5 = 2,430
    ],
)
def test_a_label_that_can_stand_in_few_orders_is_refused(label, cluster, fold):
    """The orders are counted by drawing: 20,000 draws of at most 2,430 orders leave none out."""
    count = len(np.unique(label[moved(label, cluster, 20_000, 0, fold)], axis=0))
    why = few_orders(label, cluster, fold)
    said = (f"fewer than {LEAST_ORDERS} different orders", "add clusters")
    assert all(part in why for part in said) if count < LEAST_ORDERS else not why


def test_a_label_probe_of_few_templates_says_why_it_is_not_measured():
    with refused(UserError, "different orders over 6 clusters in 5 folds"):
        LabelProbe("label").measure(World(n=12, strength=3.0).data(0))


def test_intervals_of_few_clusters_stay_within_the_score_and_p_is_that_of_the_error(monkeypatch):
    data = World(n=20, strength=0.7).data(2, in_tokens=True)
    ends = ("low", "high", "null_low", "null_high")
    result = LabelProbe("label").measure(data)
    whole = [estimate for estimate in result.estimates if estimate.claim or estimate.null]
    monkeypatch.setattr("llmgeom.probes.labels.probe.cut", lambda estimate, *_: estimate)
    monkeypatch.setattr("llmgeom.claims.cut", lambda estimate, *_: estimate)
    uncut = LabelProbe("label").measure(data).estimates
    assert max(getattr(one, end) for one in uncut for end in ends) > 1
    assert all(0 <= getattr(one, end) <= 1 for one in whole for end in ends)
    assert all(0 <= span <= 1 for span in result.arrays["residual_interval"].flat)
    assert all(0 <= one.excess.hurdle <= 1 for one in whole)
    every = ([(one.name, one.p, one.excess.p_excluded, one.excess.p_opposite) for one in of] for of in (whole, uncut))
    assert next(every) == next(every)


def test_right_answers_that_can_stand_in_few_orders_are_no_control_and_the_run_says_why():
    """Of 5 clusters, one of which has another right answer, there are 5 orders: a p of them is never below 1/5."""
    rng = np.random.default_rng(0)
    log_prob, cluster = np.log(rng.dirichlet(np.ones(3), 40)).tolist(), np.arange(40) // 8
    for right, orders in ((cluster // 4, 5), (np.zeros(40, dtype=int), 1)):
        assert len(np.unique(right[moved(right, cluster, 2000, 0)], axis=0)) == orders < LEAST_ORDERS
        result = scored(log_prob, right, cluster, 0, ())
        (why,) = result.warnings
        assert "fewer than 100 different orders over 5 clusters" in why
        nulls = {h.name: h.null for h in result.estimates}
        assert nulls.pop("calibration error (ECE)").startswith("a calibrated model") and set(nulls.values()) == {""}
    right = rng.integers(0, 3, 40)
    result = scored(log_prob, right, cluster, 0, ())
    assert result.warnings == () and all(h.null for h in result.estimates)


@pytest.mark.slow
def test_p_of_a_label_that_goes_with_nothing_in_clusters_of_unequal_sizes_is_no_smaller_than_it_says():
    p = []
    for seed in range(120):
        label, cluster = by_cluster(seed, np.arange(2, 22))
        rng = np.random.default_rng([seed, 1])
        x = 0.7 * rng.standard_normal((20, 8))[cluster] + rng.standard_normal((len(label), 8))
        p.append(p_of(read(x, label, cluster, seed, 39)))
    for level in (0.05, 0.25, 0.5):
        assert (np.array(p) <= level).sum() <= binom.ppf(0.995, 120, level)


@pytest.mark.slow
def test_p_of_classes_that_nothing_predicts_is_uniform():
    """Folds are stratified by the true label. Before labels moved inside folds alone, permuted ones scored .18."""
    rng, alone, own = np.random.default_rng(5), np.arange(80), []
    for seed in range(60):
        label = rng.permutation(np.repeat(list("abcd"), 20))
        x = rng.standard_normal((80, 10))
        fold = stratified_folds("classes", label, alone, seed)
        orders = moved(label, alone, 39, seed, fold)
        assert all(
            (np.sort(label[order][fold == i]) == np.sort(label[fold == i])).all() for order in orders for i in fold[:5]
        )
        own.append(held_out(Design("classes", coded("classes", label), fold), [lambda x=x: x], orders))
    assert np.mean([one.moved.mean() for one in own]) == pytest.approx(0.25, abs=0.01)
    p = np.array([p_of(one) for one in own])
    for level in (0.05, 0.25, 0.5, 0.75):
        low, high = binom.ppf([0.005, 0.995], 60, level)
        assert low <= (p <= level).sum() <= high


def test_accuracy_of_few_answers_stays_within_0_and_1():
    log_prob = [np.log([0.9, 0.1])] * 6
    found = scored(log_prob, np.array([0, 0, 0, 0, 0, 1]), np.arange(6), 0, ())
    assert all(one.low >= 0 and one.high <= (2 if "Brier" in one.name else 1) for one in found.estimates)
