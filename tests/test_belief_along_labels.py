"""The belief read along the labels' own directions: against scikit-learn, planted beliefs, and one prompt at a time."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression

from llmgeom.batch import Posterior
from llmgeom.claims import judge
from llmgeom.errors import UserError
from llmgeom.model.model import Model
from llmgeom.probes.evidence import belief, depths
from llmgeom.probes.evidence.belief import Coordinates
from llmgeom.probes.evidence.depths import Line, blocks
from llmgeom.probes.evidence.predictions import ExactAnswers, Read
from llmgeom.prompts import text as in_text
from llmgeom.stats.ridge_probe import decodability, folds
from llmgeom.wind_tunnels import load_world
from studies import labels_along
from tests.observed import observe
from tests.refusals import refused
from tests.words import beyond, named

WIDTH = 24


@pytest.fixture(scope="module")
def batch():
    return in_text.sample(load_world("two-point", text=True), 60, 0)


@pytest.fixture(scope="module")
def odds(batch):
    """[prompt label] the exact answer's log-probabilities less their mean."""
    log_p = ExactAnswers(batch).log_p
    return log_p - log_p.mean(1, keepdims=True)


# ---- the line -------------------------------------------------------------------------------------------------------


def test_one_line_for_all_slots_is_least_squares_with_indicators_fitted_on_other_blocks():
    rng = np.random.default_rng(0)
    n = 120
    x, stratum = rng.standard_normal((n, 3)), rng.integers(0, 4, n)
    y = 0.7 * x + rng.standard_normal((4, 3))[stratum] + 0.5 * rng.standard_normal((n, 3))
    fold = np.stack([rng.integers(0, 5, n), rng.integers(0, 3, n)], 1)
    expected = np.empty_like(y)
    intercepts = np.eye(12)[stratum[:, None] * 3 + np.arange(3)]  # [row slot indicator]
    design = np.concatenate([x[..., None], intercepts], -1)
    for row in range(n):
        rest = [other for other in range(n) if not (fold[other] == fold[row]).any()]
        model = LinearRegression(fit_intercept=False).fit(design[rest].reshape(-1, 13), y[rest].ravel())
        expected[row] = model.predict(design[row])
    line = Line(y, stratum, fold)
    np.testing.assert_allclose(line.predicted(x), expected, atol=1e-10)
    within = sum(np.square(y[stratum == s] - y[stratum == s].mean(0)).sum() for s in range(4))
    assert line.r2(x) == pytest.approx(1 - np.square(y - expected).sum() / within)
    some = np.flatnonzero(rng.random(n) < 0.8)
    assert line.subset_r2(x, some) == pytest.approx(Line(y[some], stratum[some], fold[some]).r2(x[some]))


def test_blocks_hold_out_every_grouping_that_another_does_not_hold_out_already():
    pair = [f"p{i % 30}" for i in range(300)]
    lead = [f"l{i % 10}" for i in range(300)]  # a pair lies in one lead-in
    cluster = [f"c{i // 10}" for i in range(300)]  # crosses both
    assert blocks([pair, lead], 0).shape == (300, 1)
    found = blocks([cluster, pair, lead], 0)
    assert found.shape == (300, 2)
    for grouping, place in ((cluster, 0), (pair, 1), (lead, 1)):
        assert len({*zip(grouping, found[:, place], strict=True)}) == len({*grouping}), "a group lies in one block"
    assert blocks([pair, ["one"] * 300], 0).shape == (300, 1)  # one surface cannot be held out


# ---- planted beliefs ------------------------------------------------------------------------------------------------


def planted(batch, strength, seed=0, along=None):
    """What is read of a model whose residual stream holds `strength` along the rows of its labels, [prompt label]."""
    rng = np.random.default_rng(seed)
    words = sorted({*batch.columns["first"], *batch.columns["second"]})
    rows = dict(zip(words, rng.standard_normal((len(words), WIDTH)), strict=True))
    u = np.array([[rows[a], rows[b]] for a, b in zip(batch.columns["first"], batch.columns["second"], strict=True)])
    along = u if along is None else along
    x = np.einsum("pl,pld->pd", strength, along) + 0.3 * rng.standard_normal((len(batch), WIDTH))
    u = u - u.mean(1, keepdims=True)
    z = np.einsum("pd,pld->pl", x / np.linalg.norm(x, axis=1, keepdims=True), u)
    return x, Coordinates(np.stack([z, z, z]))


def measure_belief(batch, models, seed, cut=None):
    """The first of some models, compared with the others on all prompts."""
    return belief.measure_belief(batch, models[0], Read(batch, models[0], models[1:], cut), seed)


def strangers(batch, count=20):
    return [planted(batch, np.random.default_rng(i).normal(size=(len(batch), 2)), i)[1] for i in range(1, count + 1)]


def test_a_belief_along_the_labels_is_read_where_no_common_direction_can(batch, odds):
    truth = ExactAnswers(batch)
    x, own = planted(batch, odds)
    found = measure_belief(batch, [own, *strangers(batch)], 0)
    assert found["along"].min() > 0.7
    assert named(found)[belief.LAST].null_high < 0.1 and named(found)[belief.LAST].low > 0.5
    # One direction for all pairs, the earlier read-out, finds nothing in the same vectors.
    rows = truth.observed
    np.testing.assert_allclose(found["coordinate"][:, 0], odds[rows, 0] / np.log(2))  # shown in bits
    fold = folds(truth.cluster[rows], 0)
    assert decodability(x[rows], odds[rows, 0], fold) < 0.1


def test_without_untrained_copies_no_belief_is_claimed(batch, odds):
    found = measure_belief(batch, [planted(batch, odds)[1]], 0)
    assert found["along"].min() > 0.7 and "along_null" not in found.arrays
    assert not any(h.claim for h in found.estimates) and named(found)[belief.LAST].null.startswith(depths.SHUFFLED)


def test_a_direction_of_each_pairs_own_is_not_taken_for_the_labels(batch, odds):
    rng = np.random.default_rng(5)
    own_way = {pair: rng.standard_normal((2, WIDTH)) for pair in set(batch.cluster)}
    along = np.array([own_way[pair] for pair in batch.cluster])
    found = measure_belief(batch, [planted(batch, odds, along=along)[1], *strangers(batch)], 0)
    assert found["along"].max() < 0.1


@pytest.mark.parametrize("known", ["k", "slot", "nothing"])
def test_what_is_known_without_the_evidence_is_no_belief(batch, known):
    k = np.array(batch.columns["k"], dtype=float)
    strength = {"k": np.stack([k, -k], 1), "slot": np.tile([2.0, -2.0], (len(k), 1)), "nothing": np.zeros((len(k), 2))}
    found = measure_belief(batch, [planted(batch, strength[known])[1], *strangers(batch)], 0)
    assert found["along"].max() < 0.05
    assert beyond(named(found)[belief.LAST]) != "yes"


def test_the_order_in_which_labels_are_named_changes_nothing(batch, odds):
    _, own = planted(batch, odds)
    turned = replace(
        batch,
        columns={**batch.columns, "first": batch.columns["second"], "second": batch.columns["first"]},
        posterior=Posterior(batch.exact.predictive.flip(-1), batch.exact.belief),
    )
    other = Coordinates(own.along[..., ::-1].copy())
    one, two = measure_belief(batch, [own, *strangers(batch, 3)], 0), measure_belief(turned, [other, other], 0)
    np.testing.assert_allclose(one["along"], two["along"])


def test_three_labels_are_a_simplex(batch):
    """K labels: centred log-ratio coordinates, one slope."""
    rng = np.random.default_rng(3)
    n, words = len(batch), [f"w{i}" for i in range(14)]
    rows = rng.standard_normal((len(words), WIDTH))
    chosen = np.array([rng.permutation(len(words))[:3] for _ in range(n)])
    log_p = np.log(rng.dirichlet([1.0, 1.0, 1.0], n) * 0.97 + 0.01)
    three = replace(
        batch,
        columns={"k": batch.columns["k"], "marks": tuple(" ".join(words[i] for i in row) for row in chosen)},
        posterior=Posterior(torch.from_numpy(log_p)[:, None]),
        cluster=tuple("-".join(words[i] for i in sorted(row)) for row in chosen),
    )
    u = rows[chosen] - rows[chosen].mean(1, keepdims=True)
    clr = log_p - log_p.mean(1, keepdims=True)

    def read(strength):
        x = np.einsum("pl,pld->pd", strength, rows[chosen]) + 0.3 * rng.standard_normal((n, WIDTH))
        z = np.einsum("pd,pld->pl", x / np.linalg.norm(x, axis=1, keepdims=True), u)
        return Coordinates(z[None])

    noise = [read(rng.standard_normal((n, 3))) for _ in range(3)]
    assert measure_belief(three, [read(clr), *noise], 0)["along"][0] > 0.6
    # The total alone, exchanged between slots: what is right for one label and wrong for two others is not read.
    assert measure_belief(three, [read(np.roll(clr, 1, 1)), *noise], 0)["along"][0] < 0.35


@pytest.mark.parametrize("needs_context", [True, False])
def test_what_is_as_well_read_without_context_is_no_belief(batch, odds, needs_context):
    own, nothing = planted(batch, odds)[1], planted(batch, np.zeros_like(odds), 3)[1]
    cut = nothing if needs_context else planted(batch, odds, 3)[1]
    found = measure_belief(batch, [own, *strangers(batch)], 0, cut)
    (claim,) = [h for h in judge({"sula_belief": found})["sula_belief"].estimates if h.name == belief.LAST]
    assert (claim.verdict == "holds") == needs_context, claim.why
    line = measure_belief(batch, [cut, own], 0)["along"]
    np.testing.assert_allclose(found.arrays["without_context"], line)


def test_evidence_is_exchanged_among_prompts_with_as_many_labels():
    stratum = np.repeat([1, 2, 4], 20)
    orders = depths.exchanged(stratum, depths.PERMUTATIONS, np.random.default_rng(0))
    assert (stratum[orders] == stratum).all() and all(sorted(order) == list(range(60)) for order in orders)
    assert (orders == np.arange(60)).mean() < 0.1


def test_log_odds_that_do_not_vary_are_refused():
    batch = in_text.sample(load_world("coin:prior=beta:500,500", text=True), 40, 0, ks=(1, 2))
    _, own = planted(batch, np.zeros((len(batch), 2)))
    with refused(UserError, "at least 0.072 are needed"):
        measure_belief(batch, [own, own], 0)


# ---- a model --------------------------------------------------------------------------------------------------------


def test_coordinates_are_those_of_one_prompt_at_a_time():
    pythia = Model.load("pocket:pythia", device="cpu", offline=True)
    batch = in_text.sample(load_world("two-point", text=True), 3, 0, pythia.tokenizer)
    found = observe(pythia, batch, belief.NEEDS)
    weight = pythia.model.get_output_embeddings().weight.detach().double()
    for i, text in enumerate(batch.text):
        ids = torch.tensor([pythia.tokenizer(text)["input_ids"]])
        with torch.no_grad():
            hidden = pythia.model(ids, output_hidden_states=True).hidden_states
        first, second = (
            weight[pythia.tokenizer(f" {batch.columns[name][i]}")["input_ids"][0]] for name in ("first", "second")
        )
        for depth, each in enumerate(hidden[:-1]):  # the last one is after the final norm
            x = each[0, -1].double()
            z = float(x @ (first - second) / x.norm())
            assert found.along[depth, i, 0] - found.along[depth, i, 1] == pytest.approx(z, abs=1e-4)


def test_the_stored_areas_between_models_are_those_of_their_readings():
    """docs/pictures/labels.svg shows them."""
    stored = json.loads(labels_along.STORED.read_text(encoding="utf-8"))
    models = stored["models"]
    assert [*models] == [*labels_along.LEARNT, *labels_along.OTHERS] and labels_along.areas(models) == stored["AUC"]
    assert labels_along.area([1.0, 0.0], [0.0, -1.0]) == 3.5 / 4
    assert max(one["controls"] for one in models.values()) < 0
    words = {name: one["word"] for name, one in models.items()}
    assert all((words[name] == "holds") == (name in labels_along.LEARNT) for name in models)
