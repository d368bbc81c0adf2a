"""Observers of processes with several labels, an order or items: rules against the processes' own exact answers."""

import numpy as np
import pytest

from llmgeom.claims import judge
from llmgeom.probes.evidence.observer_fit import (
    BAYESIAN,
    OTHER,
    called,
    divergence,
    log_odds,
    of_log_odds,
    parameter_intervals,
)
from llmgeom.probes.evidence.sequence_observers import FORGETTING_BAYES, OF_PROCESS, ProcessSequences
from llmgeom.probes.evidence.which_observer import BAYES, measure_observers
from llmgeom.prompts.processes import load_process
from llmgeom.result import BEST_RULE, CALLED
from llmgeom.stats.resampling import Interval
from tests.test_observers import simulation


def rule(process: str, name: str):
    (found,) = [observer for observer in OF_PROCESS[process] if observer.name == name]
    return found.rule


def sample(spec: str, n: int = 40):
    batch = load_process(spec).sample(n, 0)
    rows = np.flatnonzero(np.array(batch.columns["k"]) > 0)
    return ProcessSequences.of(batch).take(rows), np.array(batch.cluster)[rows]


@pytest.mark.parametrize(
    ("spec", "name", "values"),
    [
        ("dirichlet:a=2.5", "Bayes: fitted prior", (2.5,)),
        ("markov:a=1.5", "Bayes: fitted prior", (1.5,)),
        ("markov:labels=3,a=0.7", "Bayes: fitted prior", (0.7,)),
        ("hmm:stays=0.7,0.3,reliability=0.8", "Bayes: fitted chains", (0.7, 0.8)),
        ("hmm:labels=3,stays=0.6,0.4,reliability=0.75", "Bayes: fitted chains", (0.6, 0.75)),
        ("recall", "Bayes with a lapse", (0.0,)),
        ("bijection", "Bayes with a lapse", (0.0,)),
    ],
)
def test_bayesian_observers_are_the_exact_answers_of_their_own_process(spec, name, values):
    shown, _ = sample(spec)
    process = spec.partition(":")[0]
    np.testing.assert_allclose(rule(process, name)(shown, *values), shown.answers, atol=1e-12)
    np.testing.assert_allclose(rule(process, "exact")(shown), shown.answers)


@pytest.mark.parametrize(
    ("process", "at_one"),
    [
        ("dirichlet", (1.0, 1.0)),
        ("markov", (1.0, 0.5)),
        ("hmm", (0.9, 0.9, 1.0)),
        ("recall", (0.0, 1.0)),
        ("bijection", (0.0, 1.0)),
    ],
)
def test_bayes_that_forgets_is_exact_where_nothing_is_forgotten(process, at_one):
    shown, _ = sample(process)
    np.testing.assert_allclose(rule(process, FORGETTING_BAYES)(shown, *at_one), shown.answers, atol=1e-9)


def planted(labels, items, size: int = 3) -> ProcessSequences:
    """One prompt; the item asked for is the last of `items`."""
    asked = np.array([[item == items[-1] for item in items[:-1]]])
    return ProcessSequences(np.array([labels]), np.log(np.full((1, size), 1 / size)), asked, np.zeros(1, int))


@pytest.mark.parametrize(
    ("process", "name", "values", "labels", "items", "expected"),
    [
        # counts .25 and .5 + 1 with a discount of .5: labels 0, 1, 1
        ("dirichlet", FORGETTING_BAYES, (0.5, 1.0), [0, 1, 1], "abcd", [1.25 / 4.75, 2.5 / 4.75, 1 / 4.75]),
        # 1 -> 0 two steps ago (age 2), 1 -> 1 just now (age 0)
        ("markov", FORGETTING_BAYES, (0.5, 1.0), [1, 0, 1, 1], "abcde", [1.25 / 4.25, 2 / 4.25, 1 / 4.25]),
        ("dirichlet", "logit-linear counter", (np.log(2),), [0, 1, 1], "abcd", [2 / 7, 4 / 7, 1 / 7]),
        ("dirichlet", "majority", (0.3,), [0, 1, 1], "abcd", [0.1, 0.8, 0.1]),
        ("dirichlet", "copy-last", (0.3,), [1, 1, 2], "abcd", [0.1, 0.1, 0.8]),
        ("recall", "Bayes with a lapse", (0.3,), [2, 1, 0], "abca", [0.1, 0.1, 0.8]),
        ("recall", FORGETTING_BAYES, (0.0, 0.5), [2, 1, 0], "abca", [0.25, 0.25, 0.5]),
        ("recall", FORGETTING_BAYES, (0.0, 0.5), [2, 1, 0], "abcd", [1 / 3, 1 / 3, 1 / 3]),
        # label 1 is out for certain, label 0 with probability 1/2: shares .5, 0 and 1 of what is left
        ("bijection", FORGETTING_BAYES, (0.0, 0.5), [0, 1], "abc", [1 / 3, 0, 2 / 3]),
        ("bijection", "binds, does not eliminate", (0.0,), [0, 1], "abc", [1 / 3, 1 / 3, 1 / 3]),
        ("bijection", "eliminates, does not bind", (0.0,), [0, 1], "aba", [0, 0, 1]),
        ("recall", "tells new items, does not bind", (0.3,), [2, 1, 2], "abca", [0.1, 0.7 / 3 + 0.1, 1.4 / 3 + 0.1]),
        ("recall", "tells new items, does not bind", (0.3,), [2, 1, 2], "abcd", [1 / 3, 1 / 3, 1 / 3]),
        ("bijection", "tells new items, does not bind", (0.0,), [2, 1], "aba", [0, 0.5, 0.5]),
        ("bijection", "tells new items, does not bind", (0.0,), [2, 1], "abc", [1, 0, 0]),
    ],
)
def test_rules_by_hand(process, name, values, labels, items, expected):
    shown = planted(labels, items)
    assert rule(process, name)(shown, *values)[0] == pytest.approx(expected, abs=1e-12)


def test_a_filter_that_forgets_everything_knows_only_the_last_step():
    """discount 0: after each step the belief is even, so the answer is even too."""
    shown, _ = sample("hmm")
    np.testing.assert_allclose(rule("hmm", FORGETTING_BAYES)(shown, 0.9, 0.9, 0.0), 0.5, atol=1e-12)


def test_two_labels_as_one_number_or_as_two_have_one_divergence_and_one_noise():
    p, q = np.array([0.2, 0.7]), np.array([0.4, 0.1])
    pairs = [np.stack([x, 1 - x], 1) for x in (p, q)]
    np.testing.assert_allclose(divergence(p, q), divergence(*pairs), atol=1e-12)
    np.testing.assert_allclose(log_odds(pairs[0])[:, 0] * 2, log_odds(p))
    for x in (p, pairs[1], np.array([[0.5, 0.2, 0.3]])):
        np.testing.assert_allclose(of_log_odds(log_odds(x)), x)


def test_who_forgets_is_not_called_bayesian():
    gain = Interval(0.01, 0.02, 0.95, "")
    assert called(gain, 0.1, 0.5) == BAYESIAN and called(gain, 0.1, 0.5, forgets=True) == OTHER


@pytest.mark.parametrize(
    ("process", "rival"), [("dirichlet", "counter, slope .8"), ("recall", "unigram"), ("bijection", "no elimination")]
)
def test_simulated_observers_are_called_what_they_are(process, rival):
    """One data set each; benchmarks/observers.json holds the rates."""
    assert simulation.row(process, rival, 1, seed=3)["called"] == {OTHER: 1}
    assert simulation.row(process, "exact", 1, seed=3)["called"] == {BAYESIAN: 1}


def test_the_discount_of_a_model_that_forgets_is_in_its_interval_and_below_one():
    batch = load_process("markov").sample(50, 0)
    shown, clusters = sample("markov", 50)
    (forgetting,) = [one for one in OF_PROCESS["markov"] if one.nests]
    p = of_log_odds(
        log_odds(forgetting.rule(shown, 0.6, 0.5)) + np.random.default_rng(0).normal(0, 0.1, shown.exact.shape)
    )
    (discount, _), (span, _) = parameter_intervals(forgetting, shown, p, clusters)
    assert span.low < 0.6 < span.high < 1 and span.low < discount < span.high
    whole = np.full((len(batch), 2), 0.5)
    whole[np.array(batch.columns["k"]) > 0] = p
    result = measure_observers(batch, [whole, np.full_like(whole, 0.5)], 0)
    place = result.ticks["parameter"].index(f"{FORGETTING_BAYES}: discount")
    assert result.parameter.value[place] == pytest.approx(discount) and result.exact_parameter[place] == pytest.approx(
        1
    )
    assert result.notes[0] == f"the rule that fits the answers best: {FORGETTING_BAYES}; the model is: not Bayesian"
    assert result.facts == {BEST_RULE: FORGETTING_BAYES, CALLED: OTHER}
    assert BAYES in {h.name for h in result.estimates}


def mixed_with_noise(p, seed=0):
    return of_log_odds(log_odds(p) + np.random.default_rng(seed).normal(0, 0.1, p.shape))


@pytest.mark.parametrize(("answers", "claimed"), [("exact", True), ("the last three", False)])
def test_bayes_ahead_of_the_rivals_is_no_claim_where_bayes_with_forgetting_is_ahead_of_bayes(answers, claimed):
    """A counter of the last three marks is nearer to Bayes' rule than to any rival, and counts."""
    batch = load_process("dirichlet").sample(50, 0)
    p = np.exp(batch.exact.predictive[:, 0].numpy())
    if answers != "exact":
        recent = [[row[-3:].count(str(mark)) for mark in range(3)] for row in batch.columns["seen"]]
        p = (1.0 + np.array(recent)) / (3.0 + np.sum(recent, 1, keepdims=True))
    even = np.full_like(p, 1 / 3)
    result = measure_observers(batch, [mixed_with_noise(p), *(mixed_with_noise(even, i) for i in range(1, 6))], 0)
    assert result.gain[0] > 0 and result.facts[CALLED] == (BAYESIAN if claimed else OTHER)
    (lead,) = [h for h in result.estimates if h.name == BAYES]
    assert bool(lead.claim) == claimed and (BAYES in result.unmeasured) != claimed


def test_a_model_that_a_rival_predicts_better_has_no_gain_however_far_below_it_untrained_models_are():
    batch = load_process("dirichlet").sample(50, 0)
    rows = np.array(batch.columns["k"]) > 0
    copied = np.full((len(batch), 3), 0.1)
    copied[np.arange(len(batch))[rows], [int(row[-1]) for row in batch.columns["seen"] if row]] = 0.8
    weak, strong = 0.5 * copied + 0.5 / 3, copied
    result = measure_observers(batch, [mixed_with_noise(weak), *(mixed_with_noise(strong, i) for i in range(1, 6))], 0)
    (lead,) = [h for h in judge({"sula_observers": result.lowered()})["sula_observers"].estimates if h.name == BAYES]
    assert lead.control_draws == 0 and lead.verdict not in ("holds", "small") and result.gain[1] < 0
