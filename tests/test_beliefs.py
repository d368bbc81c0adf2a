"""Beliefs in context: planted readers are recognised as what they are, and every number has a brute-force oracle."""

import itertools

import numpy as np
import pytest
import scipy.stats
import torch
from sklearn.linear_model import LinearRegression, Ridge

import llmgeom
from llmgeom.errors import UserError
from llmgeom.verbs import beliefs as module
from llmgeom.verbs.beliefs import FOLDS, PENALTIES, held_out, interval_of_r2, less, long, rivals
from llmgeom.wind_tunnels import load_world

SLOW = "edge-hmm:stay=0.97,emit=0.6"  # evidence adds up over dozens of symbols


def filtered(world, symbols):
    """The belief after some symbols, by the forward recursion in plain Python."""
    moves, pi = world.matrices().numpy(), world.first().numpy()
    belief = pi
    for symbol in symbols:
        belief = belief @ moves[symbol]
        belief = belief / belief.sum()
    return belief


def test_rivals_are_what_a_reader_of_a_few_symbols_knows():
    world = long("edge-hmm:process=rrxor", 24)
    symbols = world.sample(3, 0).inputs.data.numpy()
    found = rivals(world, symbols, 12)
    for s, i in itertools.product(range(3), (12, 17, 23)):
        for k in (1, 3, 6):
            name = f"last {k} symbol{'s' * (k > 1)}"
            np.testing.assert_allclose(
                found[name][s, i - 12], filtered(world, symbols[s, i - k + 1 : i + 1]), atol=1e-9
            )
        for order in (0, 1, 3):
            now, tally = symbols[s, i - order + 1 : i + 1] if order else [], np.full(2, 0.5)
            for j in range(order, i + 1):
                if order == 0 or (symbols[s, j - order : j] == now).all():
                    tally[symbols[s, j]] += 1
            np.testing.assert_allclose(found[f"counts of order {order}"][s, i - 12], tally / tally.sum())
        wanted = [
            (1 - d) * sum(d ** (i - j) for j in range(i + 1) if symbols[s, j] == x)
            for d in module.DECAYS
            for x in (0, 1)
        ]
        np.testing.assert_allclose(found["six exponential filters"][s, i - 12], wanted)


def test_the_held_out_read_out_is_ridge_regression_with_the_penalty_that_a_fold_chooses():
    rng = np.random.default_rng(0)
    cluster = np.repeat(np.arange(8), 20)
    x = rng.normal(size=(160, 6)) * [1, 2, 3, 1e-3, 5, 1]
    y = x @ rng.normal(size=(6, 2)) + rng.normal(size=(160, 2)) * [0.1, 20]

    def ridge(rows, penalty, new):
        centre, spread = x[rows].mean(0), x[rows].std(0)
        fit = Ridge(alpha=penalty * rows.sum()).fit((x[rows] - centre) / spread, y[rows])
        return fit.predict((x[new] - centre) / spread)

    found, chosen = held_out(x, y, cluster), set()
    for k in range(FOLDS):
        here, choosing = cluster % FOLDS == k, cluster % FOLDS == (k + 1) % FOLDS
        error = [np.square(ridge(~(here | choosing), p, choosing) - y[choosing]).sum(0) for p in PENALTIES]
        for column, best in enumerate(np.argmin(error, 0)):
            chosen.add(best)
            np.testing.assert_allclose(found[here, column], ridge(~here, PENALTIES[best], here)[:, column], rtol=1e-6)
    assert len(chosen) > 1


def test_what_a_reader_leaves_is_what_least_squares_on_other_sequences_leaves():
    rng = np.random.default_rng(2)
    cluster, x, y = np.repeat(np.arange(8), 5), rng.normal(size=(40, 3)), rng.normal(size=(40, 2))
    found = less(y, x, cluster)
    for k in range(FOLDS):
        here = cluster % FOLDS == k
        fit = LinearRegression().fit(x[~here], y[~here])
        np.testing.assert_allclose(found[here], y[here] - fit.predict(x[here]), rtol=1e-9)


def test_the_interval_is_the_jackknife_over_sequences():
    rng = np.random.default_rng(1)
    cluster = np.repeat(np.arange(9), 7)
    truth, noise = rng.normal(size=(63, 2)), rng.normal(size=(63, 2))
    value, low, high = interval_of_r2(truth, truth + 0.3 * noise, cluster)
    spread, missed = np.square(truth - truth.mean(0)), np.square(0.3 * noise)
    left = [1 - missed[cluster != c].sum() / spread[cluster != c].sum() for c in range(9)]
    half = scipy.stats.t.ppf(0.975, 8) * np.sqrt(8 / 9 * np.square(np.subtract(left, np.mean(left))).sum())
    assert value == pytest.approx(1 - missed.sum() / spread.sum())
    assert (low, high) == pytest.approx((value - half, value + half))


@pytest.fixture(scope="module")
def planted():
    """(exact belief, features of each rival, cluster) of a process where a few symbols say little."""
    world = long(SLOW, 240)
    shown = world.sample(12, 0)
    features = rivals(world, shown.inputs.data.numpy(), 120)
    exact = shown.exact.belief.exp().numpy()[:, 120:]
    return (
        exact.reshape(-1, 3),
        {k: v.reshape(len(exact) * 120, -1) for k, v in features.items()},
        np.repeat(np.arange(12), 120),
    )


@pytest.mark.parametrize("reader", ["exact belief", "last 3 symbols", "six exponential filters"])
def test_a_planted_reader_is_recognised(planted, reader):
    """A stream that holds what a reader knows, in random directions with a little noise."""
    target, features, cluster = planted
    rng = np.random.default_rng(3)
    held = target if reader == "exact belief" else features[reader]
    stream = held @ rng.normal(size=(held.shape[1], 40)) + 0.01 * rng.normal(size=(len(held), 40))
    r2 = {name: module._r2(target, held_out(x, target, cluster)) for name, x in features.items()}
    known = features["six exponential filters"]
    left = less(target, known, cluster)
    assert max(r2, key=r2.get) == "six exponential filters" and r2["last 6 symbols"] < 0.85
    beyond = held_out(less(stream, known, cluster), left, cluster)
    value, (_, low, high) = module._r2(target, held_out(stream, target, cluster)), interval_of_r2(left, beyond, cluster)
    if reader == "exact belief":
        assert value > 0.98 and low > 0.5
    else:
        assert value == pytest.approx(r2[reader], abs=0.02) and high < 0.05


def test_a_language_model_is_read_beside_its_rivals():
    """The embedding of a letter is a function of the last symbol, and so is everything without attention."""
    subject = llmgeom.load("pocket:llama", device="cpu")
    found = subject.beliefs("edge-hmm", sequences=8, length=48, controls=1)
    assert found["R2"][0] == pytest.approx(found.rivals["last 1 symbol"], abs=0.02)
    assert found["R2 with mean-ablated attention"][-1] == pytest.approx(found["R2"][0], abs=0.05)
    assert found.attrs["best rival"] in found.rivals and found.rivals["exact next symbol"] > 0.999
    assert set(found.points) >= {"exact belief", "read-out", "untrained copy"}
    assert len(found.simplex().data) == len(found.points)
    uniform = found.answers["an even answer"]
    world = long("edge-hmm", 48)
    predictive = world.sample(8, 0).exact.predictive.exp().numpy()[:, 24:]
    assert uniform == pytest.approx(float((predictive * np.log2(predictive * 3)).sum(-1).mean()), rel=1e-6)


def test_a_rendering_changes_what_stands_between_symbols_and_nothing_else():
    subject = llmgeom.load("pocket:llama", device="cpu")
    symbols = load_world("edge-hmm:steps=20").sample(2, 0).inputs.data
    texts = {}
    for rendering in module.RENDERINGS:
        ids, places, tokens = module.written(subject, symbols, 3, rendering, 0)
        assert torch.equal(ids[:, places], tokens.gather(1, symbols))
        texts[rendering] = subject.tokenizer.decode(ids[0, places[0] : places[3] + 1])
    letters = [letter for letter in texts["spaces"] if letter.isupper()]
    assert texts["spaces"].strip() == " ".join(letters) and len(letters) == 4
    assert texts["commas"].count(",") == 3 and texts["lines"].count("\n") == 3


@pytest.mark.parametrize(
    "options, said",
    [
        ({"world": "markov"}, "no hidden state"),
        ({"world": "hmm"}, "no form as text"),
        ({"length": 4}, "16 or more"),
        ({"sequences": 2}, "8 sequences or more"),
        ({"rendering": "dots"}, "rendering"),
        ({"length": 5000}, "ask for fewer symbols"),
    ],
)
def test_what_cannot_be_asked_is_said(options, said):
    subject = llmgeom.load("pocket:llama", device="cpu")
    with pytest.raises(UserError, match=said):
        subject.beliefs(**{"world": "edge-hmm", "sequences": 8, "length": 32, "controls": 0} | options)
