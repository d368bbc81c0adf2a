"""Beliefs in context: planted readers are recognised as what they are, and every number has a brute-force oracle."""

import functools
import itertools

import numpy as np
import pytest
import scipy.stats
import torch
from sklearn.linear_model import LinearRegression, Ridge

import llmgeom
from llmgeom.errors import UserError
from llmgeom.stats.partial_ridge import FOLDS, PENALTIES, basis, held_out, interval_of_r2, r2
from llmgeom.stats.resampling import least_at_best
from llmgeom.verbs import contexts
from llmgeom.verbs.belief_use import BELIEF, CHANCE, PATCH, SAME, _kernel
from llmgeom.verbs.beliefs import ABLATED, KL, MIXED
from llmgeom.verbs.contexts import exact, long, mixture, rivals, written
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
    found = rivals([world], np.zeros(3, dtype=int), symbols)
    for s, i in itertools.product(range(3), (0, 3, 12, 17, 23)):
        for k in (1, 3, 6):
            name = f"last {k} symbol{'s' * (k > 1)}"
            seen = symbols[s, max(i - k + 1, 0) : i + 1]
            np.testing.assert_allclose(found[name][s, i], filtered(world, seen), atol=1e-9)
        for order in (0, 1, 3):
            now, tally = symbols[s, max(i - order + 1, 0) : i + 1] if order else [], np.full(2, 0.5)
            for j in range(order, i + 1):
                if order == 0 or (len(now) == order and (symbols[s, j - order : j] == now).all()):
                    tally[symbols[s, j]] += 1
            np.testing.assert_allclose(found[f"counts of order {order}"][s, i], tally / tally.sum())
        wanted = [
            (1 - d) * sum(d ** (i - j) for j in range(i + 1) if symbols[s, j] == x)
            for d in contexts.DECAYS
            for x in (0, 1)
        ]
        np.testing.assert_allclose(found["six exponential filters"][s, i], wanted)


def test_who_knows_a_list_of_matrices_weighs_every_path_of_hidden_states():
    worlds = [load_world(spec).showing(4) for spec in ("edge-hmm", "edge-hmm:stay=0.1", "edge-hmm:process=hmm")]
    symbols = torch.tensor([[0, 2, 1, 1], [2, 2, 2, 0]])
    belief, predictive = mixture(worlds, symbols)
    for s, t in itertools.product(range(2), range(1, 5)):
        joint, ahead = np.zeros(3), np.zeros(3)
        for world in worlds:
            moves, pi = world.matrices().numpy(), world.first().numpy()
            for path in itertools.product(range(3), repeat=t + 1):
                weight = pi[path[0]] * np.prod([moves[symbols[s, i], path[i], path[i + 1]] for i in range(t)])
                joint[path[-1]] += weight
                ahead += weight * moves[:, path[-1]].sum(1)
        np.testing.assert_allclose(belief[s, t - 1], joint / joint.sum(), rtol=1e-9)
        np.testing.assert_allclose(predictive[s, t - 1], ahead / ahead.sum(), rtol=1e-9)


def test_the_held_out_read_out_is_ridge_regression_with_the_penalty_that_a_fold_chooses():
    rng = np.random.default_rng(0)
    cluster, known = np.repeat(np.arange(8), 20), rng.normal(size=(160, 2))
    fitted = rng.random(160) < 0.8
    x = rng.normal(size=(160, 6)) * [1, 2, 3, 1e-3, 5, 1] + known @ rng.normal(size=(2, 6))
    chosen = set()
    for noise, name in itertools.product((0.1, 20), ("", "known")):
        y = x @ rng.normal(size=(6, 2)) + noise * rng.normal(size=(160, 2))
        truth, found = held_out(x, y, cluster, {name: basis(known) if name else None}, fitted)[name]
        left = [x.copy(), y.copy()]
        for of, k in itertools.product(left if name else [], range(FOLDS)):
            here, whole = cluster % FOLDS == k, x if of is left[0] else y
            of[here] -= LinearRegression().fit(known[~here & fitted], whole[~here & fitted]).predict(known[here])
        np.testing.assert_allclose(truth, left[1], rtol=1e-6, atol=1e-9)

        def ridge(rows, penalty, new, z=left[0], y=left[1]):
            rows = rows & fitted
            centre, spread = z[rows].mean(0), z[rows].std(0)
            fit = Ridge(alpha=penalty * rows.sum()).fit((z[rows] - centre) / spread, y[rows])
            return fit.predict((z[new] - centre) / spread)

        for k in range(FOLDS):
            here, choosing = cluster % FOLDS == k, (cluster % FOLDS == (k + 1) % FOLDS) & fitted
            inner = ~(here | (cluster % FOLDS == (k + 1) % FOLDS))
            error = [np.square(ridge(inner, p, choosing) - left[1][choosing]).sum() for p in PENALTIES]
            best = int(np.argmin(error))
            chosen.add(best)
            np.testing.assert_allclose(found[here], ridge(~here, PENALTIES[best], here), rtol=1e-5, atol=1e-9)
    assert len(chosen) > 1


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
def sequences():
    """(exact belief, features of each rival, R2 of each, cluster) of a process where a few symbols say little."""
    world = long(SLOW, 240)
    symbols = world.sample(12, 0).inputs.data
    features = rivals([world], np.zeros(12, dtype=int), symbols.numpy())
    second = {name: of[:, 120:].reshape(12 * 120, -1) for name, of in features.items()}
    target, cluster = exact(world, symbols)[0][:, 120:].reshape(-1, 3), np.repeat(np.arange(12), 120)
    own = {name: r2(target, held_out(x, target, cluster)[""][1]) for name, x in second.items()}
    return target, second, own, cluster


@pytest.mark.parametrize("reader", ["exact belief", "last 3 symbols", "last 6 symbols", "six exponential filters"])
def test_a_planted_reader_is_recognised(sequences, reader):
    """A stream that holds what a reader knows, in random directions with a little noise."""
    target, features, own, cluster = sequences
    rng = np.random.default_rng(3)
    held = target if reader == "exact belief" else features[reader]
    stream = held @ rng.normal(size=(held.shape[1], 40)) + 0.01 * rng.normal(size=(len(held), 40))
    assert max(own, key=own.get) == "six exponential filters" and own["last 6 symbols"] < 0.85
    best, every = features["six exponential filters"], np.hstack([*features.values()])
    known = {"R2": None, "best": basis(best), "all": basis(every)}
    spans = {name: interval_of_r2(*of, cluster) for name, of in held_out(stream, target, cluster, known).items()}
    if reader == "exact belief":
        assert spans["R2"][0] > 0.98 and spans["best"][1] > 0.5 and spans["all"][1] > 0.5
    else:
        assert spans["R2"][0] == pytest.approx(own[reader], abs=0.02) and spans["all"][2] < 0.05
        assert (spans["best"][1] > 0.1) == (reader == "last 6 symbols")  # which filters do not know


@pytest.fixture(scope="module")
def llama():
    return llmgeom.load("pocket:llama", device="cpu")


def planted(subject, world, uses):
    """A language model whose stream, from the embedding on, holds the exact belief that it computes from its tokens.

    Its answer is the exact one (`uses`), or that of a reader of the last symbol, with the belief in directions that the
    unembedding does not read. No layer writes anything.
    """
    _, _, tokens = written(subject, world.sample(8, 0).inputs.data, world.vocabulary, "spaces", 0)
    rows, gain = subject.model.lm_head.weight[tokens[0]], subject.model.model.norm.weight
    reads = rows.detach().double() * gain.detach().double()
    onto, d = torch.linalg.pinv(reads).T, reads.shape[1]
    noise = torch.randn(d, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    free = torch.linalg.qr(torch.hstack([reads.T, noise]))[0].T[len(reads) :]

    @functools.cache
    def known(symbols):
        """(belief, answer) after each of a sequence's symbols."""
        symbols = torch.tensor([symbols])
        belief, answer = exact(world.showing(symbols.shape[1]), symbols)
        return belief[0], answer[0] if uses else exact(world.showing(1), symbols.T)[1][:, 0]

    def plant(x, where):
        shown = torch.zeros_like(x, dtype=torch.float64)
        for row, ids in enumerate(where.tokens):
            start = int((ids[:, None] == tokens[0]).any(1).int().argmax())
            belief, answer = known(tuple((ids[start:, None] == tokens[0]).int().argmax(1).tolist()))
            log_p = np.log(answer)
            shown[row, start:] = torch.from_numpy(log_p - log_p.mean(1, keepdims=True)) @ onto
            shown[row, start:] += torch.from_numpy(belief) @ free[1 : 1 + belief.shape[1]] * (not uses)
        rest = (d - shown.square().sum(-1, keepdim=True)).clamp_min(1e-6).sqrt()  # the final norm divides by 1
        return (shown + rest * free[0]).to(x)

    still = subject.edit("residual", plant, layers=0, spec={"planted": uses})
    return still.edit("attn_out", 0.0).edit("mlp_out", 0.0)


@pytest.mark.parametrize("uses", [True, False])
def test_a_model_that_uses_the_belief_and_one_that_only_holds_it_are_told_apart(llama, uses):
    world = long(SLOW, 48)
    found = planted(llama, world, uses).beliefs(SLOW, sequences=8, length=48, controls=0)
    moved = {name.partition(": ")[2]: [found.used[f"moved{end}"][i] for end in ("", ", low", ", high")]
             for i, name in enumerate(found.used.ticks["edit"])}  # fmt: skip
    assert found["R2"][0] > (0.9 if uses else 0.99)
    if uses:
        assert found.answers[KL].max() < 1e-3 and found.attrs["weight of evidence"][0] == pytest.approx(1, abs=0.01)
        assert moved[PATCH][0] == pytest.approx(1, abs=0.01) and moved[BELIEF][1] > 0.7
        assert abs(moved[CHANCE][0]) < 0.2
    else:
        assert max(np.abs(moved[name]).max() for name in (PATCH, BELIEF)) < 0.02
    assert np.abs(moved[SAME]).max() < 0.05


def test_the_kernel_has_the_changes_of_a_belief_that_the_next_symbol_does_not_show():
    world = long("edge-hmm:process=rrxor", 40)
    belief, answer = (of.reshape(-1, of.shape[2]) for of in exact(world, world.sample(20, 0).inputs.data))
    kernel, emission = _kernel(belief, answer), world.matrices().sum(2).T.numpy()  # [state symbol]
    np.testing.assert_allclose(kernel @ emission, 0, atol=1e-9)
    np.testing.assert_allclose(kernel @ kernel, kernel, atol=1e-9)
    assert round(np.trace(kernel)) == 3  # of four dimensions of five states, two symbols tell one
    mess3 = long("edge-hmm", 40)
    of_mess3 = exact(mess3, mess3.sample(20, 0).inputs.data)
    assert np.abs(_kernel(*(of.reshape(-1, 3) for of in of_mess3))).max() < 1e-9


def test_a_language_model_is_read_beside_its_rivals(llama):
    """The embedding of a letter is a function of the last symbol, and so is everything without attention."""
    found = llama.beliefs(["edge-hmm", "edge-hmm:stay=0.1"], sequences=16, length=48, controls=1)
    single = llama.beliefs("edge-hmm", sequences=8, length=48, controls=1)
    assert single["R2"][0] == pytest.approx(single.rivals["last 1 symbol"], abs=0.02)
    assert single[ABLATED][-1] == pytest.approx(single["R2"][0], abs=0.05)
    assert single.attrs["best rival"] in single.rivals and single.rivals["exact next symbol"] > 0.999
    assert MIXED in found.values and (found.answers["KL of who knows that it is one of them"][1:] < 0.1).all()
    predictive = exact(long("edge-hmm", 48), long("edge-hmm", 48).sample(8, 0).inputs.data)[1][:, 32:]
    even = float((predictive * np.log2(predictive * 3)).sum(-1).mean())
    assert single.answers["KL of an even answer"][-1] == pytest.approx(even, rel=1e-6)


def test_a_symbol_is_predicted_by_what_stands_just_before_it(llama):
    symbols = load_world("edge-hmm:steps=20").sample(4, 0).inputs.data
    for rendering in ("spaces", "commas", "lines", "anew"):
        ids, asked, tokens = written(llama, symbols, 3, rendering, 0)
        following = torch.tensor(asked[:-1]) + 1
        assert torch.equal(ids[:, following], tokens.gather(1, symbols[:, 1:]))
        assert asked[-1] == ids.shape[1] - 1
        assert (len(tokens.unique(dim=0)) > 1) == (rendering == "anew")


@pytest.mark.parametrize(
    "options, said",
    [
        ({"world": "coin"}, "one symbol a step"),
        ({"world": "hmm"}, "no form as text"),
        ({"world": ["edge-hmm", "edge-hmm:process=rrxor"]}, "same number"),
        ({"length": 4}, "16 or more"),
        ({"sequences": 2}, "8 sequences or more"),
        ({"rendering": "dots"}, "rendering"),
        ({"length": 5000}, "ask for fewer symbols"),
    ],
)
def test_what_cannot_be_asked_is_said(llama, options, said):
    with pytest.raises(UserError, match=said):
        llama.beliefs(**{"world": "edge-hmm", "sequences": 8, "length": 32, "controls": 0} | options)


def test_the_best_of_many_layers_without_an_effect_is_seldom_above_nothing():
    """31 independent layers of standard normal values, 20,000 times: their own intervals exclude 0 in over half."""
    best = np.random.default_rng(0).standard_normal((20_000, 31)).max(1)
    assert (best - 1.96 > 0).mean() > 0.5
    widened = np.mean([least_at_best(value, value - 1.96, 31) > 0 for value in best])
    assert scipy.stats.binomtest(round(20_000 * widened), 20_000, 0.025).pvalue > 0.01
    assert least_at_best(2.0, 1.5, 1) == pytest.approx(1.5)
