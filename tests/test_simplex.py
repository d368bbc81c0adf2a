"""Belief as a point of the simplex and as a hidden state: planted beliefs, and marginals by enumeration of paths."""

from itertools import pairwise, product

import numpy as np
import pytest
from sklearn.linear_model import Ridge as SklearnRidge

from llmgeom.errors import UserError
from llmgeom.probes.evidence import belief
from llmgeom.probes.evidence.belief import HIDDEN, Coordinates, hidden, measure_belief
from llmgeom.probes.evidence.depths import Ridge, blocks
from llmgeom.probes.evidence.predictions import Read
from llmgeom.prompts import text as in_text
from llmgeom.wind_tunnels import load_world
from tests.refusals import refused

WIDTH = 24


@pytest.fixture(scope="module")
def recall():
    return in_text.sample(load_world("recall", text=True), 40, 0, ks=(2, 4))


@pytest.fixture(scope="module")
def hmm():
    return in_text.sample(load_world("hmm-mixture", text=True), 100, 0, ks=(4, 8))


def planted(batch, strength, seed=0, more=0.0):
    """What is read of a model whose stream holds `strength` along its labels' rows, and `more`; [depth prompt ...]."""
    rng = np.random.default_rng(seed)
    words = [row.split() for row in batch.columns["marks"]]
    rows = {word: rng.standard_normal(WIDTH) for word in sorted({word for row in words for word in row})}
    u = np.array([[rows[word] for word in row] for row in words])
    u = u - u.mean(1, keepdims=True)
    x = np.einsum("pl,pld->pd", strength, u) + 0.3 * rng.standard_normal((len(batch), WIDTH)) + more
    z = np.einsum("pd,pld->pl", x / np.linalg.norm(x, axis=1, keepdims=True), u)
    return Coordinates(np.stack([z, z]), np.stack([x, x]))


def measure_simplex(batch, models, seed, cut=None):
    """The first of some models, compared with the others on all prompts."""
    return belief.measure_simplex(batch, models[0], Read(batch, models[0], models[1:], cut), seed)


def strangers(batch, count=6):
    labels = batch.exact.predictive.shape[-1]
    return [planted(batch, np.random.default_rng(i).normal(size=(len(batch), labels)), i) for i in range(1, count + 1)]


def centred(batch):
    p = batch.exact.predictive[:, -1].exp().numpy()
    return 4 * (p - 1 / p.shape[1])


def test_an_answer_that_excludes_marks_is_read_as_a_point_where_log_odds_are_refused(recall):
    own = planted(recall, centred(recall))
    with refused(UserError, "exact probability of 0"):
        measure_belief(recall, one := Coordinates(own.along), Read(recall, one), 0)
    found = measure_simplex(recall, [own, *strangers(recall)], 0, planted(recall, 0 * centred(recall), 9))
    assert found["along"].min() > 0.7 and found["along_interval"][:, 0].min() > 0.5
    assert max(found[f"along_{control}"].max() for control in ("null", "shuffled", "without")) < 0.1
    assert "chain" not in found.arrays and HIDDEN in found.unmeasured


def test_a_point_of_the_wrong_labels_is_not_read(recall):
    turned = np.roll(centred(recall), 1, 1)
    assert measure_simplex(recall, [planted(recall, turned), *strangers(recall)], 0)["along"].max() < 0.1


def test_marginals_of_the_hidden_state_are_sums_over_paths(hmm):
    state, chain = hidden(hmm)
    for i in range(0, len(hmm), 37):
        seen = [int(mark) for mark in hmm.columns["seen"][i]]
        weight = np.zeros((2, 2))  # chain, last state
        for c, stay in enumerate((0.9, 0.1)):
            for path in product((0, 1), repeat=len(seen)):
                p = 0.25
                for a, b in pairwise(path):
                    p *= stay if a == b else 1 - stay
                for s, mark in zip(path, seen, strict=True):
                    p *= 0.9 if s == mark else 0.1
                weight[c, path[-1]] += p
        np.testing.assert_allclose(state[i], weight.sum(0) / weight.sum(), atol=1e-12)
        np.testing.assert_allclose(chain[i], weight.sum(1) / weight.sum(), atol=1e-12)


@pytest.mark.parametrize("where", ["one direction", "a direction of each cluster", "nowhere"])
def test_state_and_chain_are_read_where_they_are(hmm, where):
    state, chain = hidden(hmm)
    rng = np.random.default_rng(3)
    ways = {name: rng.standard_normal(WIDTH) for name in sorted({*hmm.cluster, ""})}
    names = hmm.cluster if where == "a direction of each cluster" else ("",) * len(hmm)
    more = (chain[:, :1] - 0.5) * np.array([ways[name] for name in names]) * 2 * (where != "nowhere")
    found = measure_simplex(hmm, [planted(hmm, 4 * (state - 0.5), more=more), *strangers(hmm)], 0)
    assert found["state"].min() > 0.5 and found["state_shuffled"].max() < 0.2
    assert (found["chain"].min() > 0.5) == (where == "one direction")
    assert where == "one direction" or found["chain"].max() < 0.25
    assert found["chain_shuffled"].max() < 0.2 and found["chain_null"].max() < 0.2


def test_ridge_is_that_of_scikit_learn_and_an_order_of_its_own_rows_changes_nothing():
    rng = np.random.default_rng(0)
    n, fold = 80, np.arange(80) % 5
    x, stratum = rng.standard_normal((n, 3)), np.zeros(n, dtype=int)
    y = x @ rng.standard_normal((3, 1)) + 0.5 * rng.standard_normal((n, 1))
    y -= y.mean(0)
    ridge = Ridge(y, stratum, fold)
    fits = [SklearnRidge(1e-3).fit(x[fold != f], y[fold != f]) for f in range(5)]  # so little noise: the least penalty
    missed = sum(np.square(y[fold == f] - fit.predict(x[fold == f]).reshape(-1, 1)).sum() for f, fit in enumerate(fits))
    assert ridge.r2(x) == pytest.approx(1 - missed / np.square(y).sum(), abs=0.01)
    every = np.arange(n)
    assert ridge.subset_r2(x, every) == pytest.approx(ridge.r2(x))
    order = rng.permutation(n)
    moved = Ridge(y[order], stratum, fold).r2(x)
    np.testing.assert_allclose(ridge.exchanged_r2(x, np.stack([every, order])), [ridge.r2(x), moved])


def test_probabilities_that_do_not_vary_are_refused():
    batch = in_text.sample(load_world("dirichlet:a=500", text=True), 40, 0, ks=(1, 2))
    own = planted(batch, np.zeros((len(batch), 3)))
    with refused(UserError, "show more"):
        measure_simplex(batch, [own, own], 0)


@pytest.mark.parametrize(("spec", "still"), [("stays=0.9,0.1,0.5,weights=1,1,0", "3"), ("weights=1,0", "1, 2")])
def test_a_chain_that_cannot_be_is_left_out_and_named(spec, still):
    """A chain without prior weight has the probability 0 in every prompt; the others are read as without it."""
    batch = in_text.sample(load_world(f"hmm-mixture:{spec}", text=True), 60, 0, ks=(4, 8))
    state, chain = hidden(batch)
    own = planted(batch, 4 * (state - 0.5), more=2 * (chain[:, :1] - 0.5) * np.ones(WIDTH))
    found = measure_simplex(batch, [own, *strangers(batch, 2)], 0)
    assert found["state"].min() > 0.5 and f"chain {still} hardly varies" in found.notes[1]
    if len(still) > 1:
        assert "chain" not in found.arrays and f"chain {still} hardly varies" in found.unmeasured[HIDDEN]
    else:
        k, fold = np.array(batch.columns["k"]), blocks([np.array(batch.cluster)], 0)[:, 0]
        at_k = np.array([chain[k == number, :1].mean(0) for number in k])
        read = Ridge(chain[:, :1] - at_k, k, fold).r2(own.stream[0])
        assert found["chain"] == pytest.approx([read, read]) and HIDDEN not in found.unmeasured and read > 0.5
