"""Hidden and visible Markov chains: exact answers against every path written out, and laws a posterior obeys."""

import math
from itertools import pairwise, permutations

import numpy as np
import pytest
import torch
from scipy.integrate import dblquad

from llmgeom.answers import dirichlet_multinomial, forward_filter
from llmgeom.stats.conjugate import beta_bernoulli
from llmgeom.stats.information import bits, entropy, kl
from llmgeom.task import seeded
from llmgeom.wind_tunnels.chains import hundredths
from llmgeom.wind_tunnels.tasks.hmm import HMM
from llmgeom.wind_tunnels.tasks.keyed_hmm import KeyedHMM
from llmgeom.wind_tunnels.tasks.markov import Markov
from tests import brute_force
from tests.chains import EVERY, WAYS, read, read_keyed, spelt
from tests.refusals import refused

# Numbers of states and of symbols differ, so that one cannot stand in for the other.
SIZES = [(3, 2, 5), (2, 4, 6)]


def close(found, expected):
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-12)


# ---- by enumeration --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("states", "symbols", "steps"), SIZES)
@pytest.mark.parametrize(("encoding", "predict", "fixed"), WAYS)
def test_hmm_belief_and_answer_are_those_of_all_hidden_paths(states, symbols, steps, encoding, predict, fixed):
    task = HMM(states, symbols, steps, encoding, predict, fixed)
    batch = task.sample(3, seed=4)
    inputs = batch.inputs.ids if encoding == "tokens" else batch.inputs.values
    for i in range(3):
        move, emit, shown = read(task, inputs[i])
        belief = brute_force.filtered(shown, move, emit)
        close(batch.posterior.belief[i].exp(), belief)
        expected = belief if predict == "state" else brute_force.next_symbol(shown, move, emit)
        close(batch.posterior.predictive[i].exp(), expected)


@pytest.mark.parametrize(("states", "symbols", "steps", "chains"), [(2, 3, 8, 2), (3, 2, 6, 3), (2, 2, 6, 1)])
def test_keyed_belief_is_that_of_all_paths_of_all_chains(states, symbols, steps, chains):
    task = KeyedHMM(states, symbols, steps, chains)
    batch = task.sample(6, seed=1)
    for inputs, log_p, belief in zip(
        batch.inputs.values, batch.posterior.predictive, batch.posterior.belief, strict=True
    ):
        move, emit, shown, keys = read_keyed(task, inputs)
        close(log_p.exp(), brute_force.keyed(shown, keys, chains, move, emit))
        assert torch.equal(log_p, belief)


def test_markov_with_matrices_of_their_own_is_a_ratio_of_exact_integrals():
    for task in (Markov(3, 9, fixed=False), Markov(2, 9, fixed=False), Markov(5, 12, fixed=False)):
        batch = task.sample(10, seed=2)
        for inputs, log_p in zip(batch.inputs.ids.tolist(), batch.posterior.predictive, strict=True):
            expected = brute_force.chain_next(inputs, task.symbols)
            close(log_p.exp(), [[float(p) for p in row] for row in expected])


def test_markov_of_two_symbols_by_integration_over_both_rows():
    task = Markov(2, 6, fixed=False)
    batch = task.sample(2, seed=3)

    def likelihood(chain, a, b):
        row = [[a, 1 - a], [1 - b, b]]
        return math.prod(row[x][y] for x, y in pairwise(chain))

    def chance(chain):
        return dblquad(lambda a, b: likelihood(chain, a, b), 0, 1, 0, 1)[0]

    for inputs, log_p in zip(batch.inputs.ids.tolist(), batch.posterior.predictive, strict=True):
        for t in range(1, 7):
            expected = chance([*inputs[:t], 0]) / chance(inputs[:t])
            assert log_p[t - 1, 0].exp().item() == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("predict", ["state", "observation"])
@pytest.mark.parametrize("encoding", ["rows", "tokens"])
def test_predictors_that_do_not_infer_are_what_their_names_say(encoding, predict):
    task = HMM(3, 4, 5, encoding, predict)
    inputs = task.draw_split(4, seeded("any", 0)).inputs
    found = task.trivial(inputs)
    assert set(found) == {"memoryless", "bag of values"}
    for i in range(4):
        move, emit, shown = read(task, inputs[i])
        stays = [[float(a == b) for b in range(3)] for a in range(3)]
        beliefs = {
            "memoryless": [brute_force.filtered([o], move, emit)[0] for o in shown],
            "bag of values": brute_force.filtered(shown, stays, emit),
        }
        for name, belief in beliefs.items():
            if predict == "observation":
                belief = [
                    [sum(b[i] * move[i][j] * emit[j][o] for i in range(3) for j in range(3)) for o in range(4)]
                    for b in belief
                ]
            close(found[name][i].exp(), belief)


def test_without_keys_two_chains_are_taken_for_one():
    task = KeyedHMM(3, 2, 6, chains=2)
    inputs = task.draw_split(4, seeded("any", 0)).inputs
    found = task.trivial(inputs)
    assert set(found) == {"memoryless", "one chain"}
    for i in range(4):
        move, emit, shown, _ = read_keyed(task, inputs[i])
        close(found["one chain"][i].exp(), brute_force.filtered(shown, move, emit))
        close(found["memoryless"][i].exp(), [brute_force.filtered([o], move, emit)[0] for o in shown])
    # With one chain there is nothing to bind.
    single = KeyedHMM(chains=1)
    inputs = single.draw_split(4, seeded("any", 0)).inputs
    torch.testing.assert_close(single.trivial(inputs)["one chain"], single.log_predictive(inputs))


def test_a_bag_of_symbols_has_one_row_for_all_of_them():
    task = Markov(4, 7, fixed=False)
    inputs = task.draw_split(5, seeded("any", 0)).inputs
    for row, ids in zip(task.trivial(inputs)["bag of values"].exp(), inputs.tolist(), strict=True):
        close(row, [[(1 + ids[:t].count(j)) / (4 + t) for j in range(4)] for t in range(1, 8)])


# ---- the numbers of the papers' production code ----------------------------------------------------------------------


def test_the_papers_format_has_the_papers_numbers():
    task = HMM(5, 5, 20, encoding="tokens")
    assert task.header == 53 and task.length == 93 and task.vocabulary == 110
    assert task.query == tuple(53 + 2 * t + 1 for t in range(20))
    assert task.answers.tokens == (105, 106, 107, 108, 109)
    assert HMM(5, 5, 20, "tokens", "observation").answers.tokens == (100, 101, 102, 103, 104)
    assert HMM(5, 5, 20, "tokens", "observation").vocabulary == 105
    assert HMM(5, 5, 20, "tokens", fixed=True).query == tuple(range(1, 40, 2))


def test_entropies_of_the_papers_generator():
    """Bits, as measured with the production generator on 1,500 sequences of twenty steps with five states and symbols.
    The tolerances are three standard errors of such a measurement; ours is on ten times as many."""
    task = HMM(5, 5, 20)
    inputs = task.draw_split(15_000, seeded("papers", 0)).inputs
    exact, memoryless = task.log_predictive(inputs), task.trivial(inputs)["memoryless"]
    h = bits(entropy(exact))
    assert h.mean().item() == pytest.approx(1.909, abs=0.009)
    assert h.std().item() == pytest.approx(0.248, abs=0.009)
    for t, expected in {1: 2.022, 2: 1.922, 3: 1.916, 5: 1.901, 10: 1.908}.items():
        assert h[:, t - 1].mean().item() == pytest.approx(expected, abs=0.018)
    assert (math.log2(5) - h).abs().mean().item() == pytest.approx(0.412, abs=0.009)
    assert bits(kl(exact, torch.full_like(exact, -math.log(5)))).mean().item() == pytest.approx(0.413, abs=0.009)
    assert (bits(entropy(memoryless)) - h).abs().mean().item() == pytest.approx(0.159, abs=0.006)
    assert bits(kl(exact, memoryless)).mean().item() == pytest.approx(0.112, abs=0.005)


def test_the_ring_stays_more_than_it_says():
    ring = Markov().ring().numpy()
    np.testing.assert_allclose(ring.sum(1), 1)
    np.testing.assert_allclose(np.diag(ring), 0.349802, atol=5e-7)
    np.testing.assert_allclose(ring[3, [2, 1, 0, 7]], [0.166, 0.083, 0.0553, 0.0415], atol=5e-5)
    assert (-ring * np.log(ring)).sum(1).mean() == pytest.approx(1.829188, abs=5e-7)
    # Counted once, as intended: .3 on the diagonal, the rest by distance.
    once = Markov(stay=0.0).ring().numpy() * 0.7 + 0.3 * np.eye(8)
    assert (-once * np.log(once)).sum(1).mean() == pytest.approx(1.8833, abs=5e-5)
    task = Markov()
    inputs = task.draw_split(3, seeded("any", 0)).inputs
    close(task.log_predictive(inputs).exp(), [[ring[y].tolist() for y in ids] for ids in inputs.tolist()])


@pytest.mark.parametrize("columns", [2, 3, 4, 5, 7, 10])
def test_hundredths_are_mended_one_unit_at_a_time(columns):
    generator = seeded("shares", columns)
    even = torch.empty(400, columns, dtype=torch.float64).exponential_(generator=generator)
    extreme = even**6  # few entries hold nearly everything, which is where most has to be taken back
    corner = torch.eye(columns, dtype=torch.float64)
    share = torch.cat([even, extreme, corner])
    share = share / share.sum(1, keepdim=True)
    found = hundredths(share).tolist()
    for row, expected in zip(found, map(brute_force.hundredths, share.tolist()), strict=True):
        assert sum(row) == 100 and min(row) >= 5
        assert row == expected


@pytest.mark.parametrize(("states", "symbols"), [(2, 2), (3, 2), (3, 4)])
def test_log2_hypotheses_counts_the_rows_there_are(states, symbols):
    def ways(columns, left=100):
        return int(left >= 5) if columns == 1 else sum(ways(columns - 1, left - first) for first in range(5, left + 1))

    expected = states * (math.log2(ways(states)) + math.log2(ways(symbols)))
    assert HMM(states, symbols).log2_hypotheses == pytest.approx(expected)
    assert KeyedHMM(states, symbols).log2_hypotheses == pytest.approx(expected)
    assert HMM(states, symbols, fixed=True).log2_hypotheses == Markov().log2_hypotheses == 0
    assert Markov(fixed=False).log2_hypotheses == math.inf


# ---- laws of a posterior ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", EVERY, ids=spelt)
def test_what_is_drawn_is_drawn_as_the_exact_answer_says(task):
    n = 20_000
    drawn = task.draw_split(n, seeded("calibration", 1))
    log_p = task.log_predictive(drawn.inputs)
    p, h = log_p.exp(), entropy(log_p)
    torch.testing.assert_close(p.sum(-1), torch.ones_like(h))
    assert log_p.dtype == torch.float64 and log_p.isfinite().all()
    assert h.min() >= 0 and h.max() <= math.log(log_p.shape[-1]) + 1e-12
    # The mean loss is the mean entropy, at every step.
    surplus = -log_p.gather(-1, drawn.target[..., None])[..., 0] - h
    assert (surplus.mean(0).abs() < 4 * surplus.std(0) / math.sqrt(n) + 1e-12).all()
    # Outcomes are as frequent as predicted, over all and among those where the outcome is predicted strongly.
    error = torch.nn.functional.one_hot(drawn.target, p.shape[-1]) - p
    for weight in (torch.ones_like(p), (p > p.mean()).double()):
        spread = (weight * p * (1 - p)).sum(0).sqrt()
        assert ((weight * error).sum(0).abs() <= 4.5 * spread + 1e-9).all()


@pytest.mark.parametrize("task", EVERY, ids=spelt)
def test_what_comes_later_changes_no_answer_and_what_is_asked_about_does(task):
    inputs = task.draw_split(200, seeded("causal", 0)).inputs
    other = task.draw_split(200, seeded("causal", 1)).inputs
    exact, trivial = task.log_predictive(inputs), task.trivial(inputs)
    for number, q in enumerate(task.query):
        later = torch.cat([inputs[:, : q + 1], other[:, q + 1 :]], 1)
        assert torch.equal(exact[:, : number + 1], task.log_predictive(later)[:, : number + 1])
        for name, predictor in task.trivial(later).items():
            assert torch.equal(predictor[:, : number + 1], trivial[name][:, : number + 1])
        here = inputs.clone()
        here[:, q] = other[:, q]
        differs = (inputs[:, q] != other[:, q]).reshape(200, -1).any(1)
        moved = (task.log_predictive(here)[:, number] - exact[:, number]).abs().sum(-1) > 0
        # Of a matrix not yet seen, no symbol tells anything: there the answer is even whatever stands there.
        assert differs.any() and (moved[differs].any() or (isinstance(task, Markov) and number == 0))


@pytest.mark.parametrize("encoding", ["rows", "tokens"])
def test_the_belief_of_tomorrow_is_in_the_mean_the_belief_of_today_moved_on(encoding):
    task, after = HMM(3, 4, 6, encoding), HMM(3, 4, 6, encoding, "observation")
    inputs = task.draw_split(50, seeded("martingale", 0)).inputs
    belief, following = task.log_belief(inputs).exp(), after.log_predictive(inputs).exp()
    t = 3
    mean = torch.zeros(50, 3, dtype=torch.float64)
    for symbol in range(4):
        changed, q = inputs.clone(), task.query[t]
        changed[:, q] = 100 + symbol if encoding == "tokens" else torch.eye(20 - 6)[10 + symbol]
        mean += following[:, t - 1, symbol, None] * task.log_belief(changed)[:, t].exp()
    for i in range(50):
        move, *_ = read(task, inputs[i])
        close(mean[i], [sum(belief[i, t - 1, a].item() * move[a][b] for a in range(3)) for b in range(3)])


def test_only_the_chain_whose_turn_it_is_moves():
    """Its next belief is in the mean the last one moved on, however often the other chain had its turn between."""
    task = KeyedHMM(3, 2, 5, chains=2)
    inputs = task.draw_split(40, seeded("martingale", 0)).inputs
    inputs[:, 3:, -2:] = torch.eye(2)[torch.tensor([0, 1, 1, 1, 0])]
    before = task.log_belief(inputs)[:, 0].exp()
    beliefs = []
    for symbol in range(2):
        inputs[:, -1, 8:10] = torch.eye(2)[symbol]
        beliefs.append(task.log_belief(inputs)[:, -1].exp())
    for i in range(40):
        move, emit, *_ = read_keyed(task, inputs[i])
        ahead = [sum(before[i, a].item() * move[a][b] for a in range(3)) for b in range(3)]
        chance = [sum(ahead[b] * emit[b][o] for b in range(3)) for o in range(2)]
        close(chance[0] * beliefs[0][i] + chance[1] * beliefs[1][i], ahead)


@pytest.mark.parametrize("predict", ["state", "observation"])
def test_relabelling_symbols_and_states_relabels_the_answer(predict):
    task = HMM(3, 4, 6, predict=predict)
    inputs = task.draw_split(30, seeded("labels", 0)).inputs
    exact = task.log_predictive(inputs)
    for order in list(permutations(range(4)))[1::5]:
        # Columns: 3 of T, 4 of E, 3 of the state's mark, 4 of the symbol.
        swapped = inputs[..., [0, 1, 2, *(3 + o for o in order), 7, 8, 9, *(10 + o for o in order)]]
        expected = exact if predict == "state" else exact[..., list(order)]
        torch.testing.assert_close(task.log_predictive(swapped), expected)
    for order in list(permutations(range(3)))[1:]:
        rows = [*order, *range(3, 9)]
        swapped = inputs[:, rows][..., [*order, *range(3, 7), *(7 + s for s in order), *range(10, 14)]]
        expected = exact[..., list(order)] if predict == "state" else exact
        torch.testing.assert_close(task.log_predictive(swapped), expected)


def test_relabelling_keys_changes_nothing_and_relabelling_a_visible_chain_relabels_its_answer():
    task = KeyedHMM(3, 2, 7, chains=3)
    inputs = task.draw_split(30, seeded("labels", 0)).inputs
    for order in permutations(range(3)):
        swapped = inputs[..., [*range(10), *(10 + k for k in order)]]
        torch.testing.assert_close(task.log_predictive(swapped), task.log_predictive(inputs))
    chain = Markov(4, 9, fixed=False)
    ids = chain.draw_split(30, seeded("labels", 0)).inputs
    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(chain.log_predictive(order[ids])[..., order], chain.log_predictive(ids))


# ---- the closed forms ------------------------------------------------------------------------------------------------


def test_the_forward_algorithm_takes_certainties_and_long_sequences():
    ring = torch.eye(3, dtype=torch.float64).roll(1, 1)  # 0 to 1 to 2 to 0
    noisy = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64).expand(4000, 3).log()
    first = torch.full((3,), -math.log(3), dtype=torch.float64)
    belief = forward_filter(first, ring.log()[None], noisy).exp()
    # State 2 is impossible at every step, and only one path of two steps avoids it.
    close(belief[0], [0.5, 0.5, 0.0])
    close(belief[1], [0.0, 1.0, 0.0])
    slow = forward_filter(first, torch.full((1, 3, 3), 1 / 3).double().log(), torch.full((4000, 3), -50.0).double())
    close(slow[-1].exp(), [1 / 3] * 3)


def test_each_step_may_have_a_matrix_of_its_own():
    generator = seeded("matrices", 0)
    moves = torch.rand(2, 4, 3, 3, generator=generator, dtype=torch.float64).softmax(-1)
    seen = torch.rand(2, 4, 3, generator=generator, dtype=torch.float64)
    found = forward_filter(torch.zeros(3, dtype=torch.float64), moves.log(), seen.log()).exp()
    for i in range(2):
        weight = seen[i, 0]
        for t in range(1, 4):
            close(found[i, t - 1], (weight / weight.sum()).tolist())
            weight = (weight @ moves[i, t - 1]) * seen[i, t]


def test_two_symbols_are_a_coin_and_a_prior_without_mass_is_named():
    counts = torch.tensor([[0, 0], [3, 1], [5, 40]])
    np.testing.assert_allclose(dirichlet_multinomial(counts, 0.5), beta_bernoulli(*counts.numpy().T, 0.5, 0.5))
    assert dirichlet_multinomial(counts).dtype == torch.float64
    with refused(ValueError, "Dirichlet(0)"):
        dirichlet_multinomial(counts, 0)
