"""How Markov chains are drawn: seeds, held-out matrices, frequencies, and fields that cannot be."""

import math

import pytest
import torch

from llmgeom.errors import UserError
from llmgeom.stats.information import bits, kl
from llmgeom.task import held_out, seeded
from llmgeom.wind_tunnels import load_task
from llmgeom.wind_tunnels.tasks.hmm import HMM, _fixed
from llmgeom.wind_tunnels.tasks.keyed_hmm import KeyedHMM
from llmgeom.wind_tunnels.tasks.markov import Markov
from tests.chains import EVERY, read, read_keyed, spelt
from tests.refusals import refused

HIDING = [task for task in EVERY if not task.memorisable]


@pytest.mark.parametrize("task", EVERY, ids=spelt)
def test_the_same_seed_gives_the_same_bits_whatever_ran_before(task):
    torch.manual_seed(0)
    once = task.sample(20, seed=7)
    before = torch.get_rng_state()
    _fixed.cache_clear()
    torch.manual_seed(1)
    again, other = task.sample(20, seed=7), task.sample(20, seed=8)
    shown = [b.inputs.values if task.features else b.inputs.ids for b in (once, again, other)]
    assert torch.equal(shown[0], shown[1]) and not torch.equal(shown[0], shown[2])
    assert torch.equal(once.target, again.target) and not torch.equal(once.target, other.target)
    assert torch.equal(once.posterior.predictive, again.posterior.predictive)
    torch.manual_seed(0)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("task", EVERY, ids=spelt)
def test_a_title_reads_back_as_the_task_and_batches_have_the_lengths_it_says(task):
    assert load_task(task.title) == task
    batch = task.sample(3, seed=0)
    shown = batch.inputs.values if task.features else batch.inputs.ids
    assert shown.shape == ((3, task.length, task.features) if task.features else (3, task.length))
    assert batch.target.shape == (3, len(task.query)) == batch.posterior.predictive.shape[:2]
    assert batch.posterior.predictive.shape[2] == len(task.answers.tokens)
    assert max(task.answers.tokens) < task.vocabulary
    if not task.features:
        assert shown.max() < task.vocabulary and shown.dtype == torch.int64


@pytest.mark.parametrize("task", HIDING, ids=spelt)
def test_no_held_out_hypothesis_is_drawn_in_training_and_no_other_in_the_examination(task):
    generator = seeded("splits", 0)
    for split, expected in (("seen", False), ("held-out", True)):
        if isinstance(task, Markov):
            hidden = held_out(task.split_key(task._hypotheses(300, generator, split)))
        else:
            reader = read_keyed if isinstance(task, KeyedHMM) else read
            pairs = [
                reader(task, inputs)[:2] for inputs in task.draw_split(300, generator, split, training=True).inputs
            ]
            rows = [[[*a, *b] for a, b in zip(*pair, strict=True)] for pair in pairs]
            hidden = held_out(torch.tensor(rows, dtype=torch.float64).mul(100).round().long().flatten(1))
        assert hidden.tolist() == [expected] * 300
    among = held_out(task.split_key(task.hypothesis(4000, generator))).double().mean().item()
    assert among == pytest.approx(0.1, abs=0.02)


def test_a_chain_of_two_symbols_has_enough_cells_to_hold_a_tenth_out():
    task = Markov(2, fixed=False)
    side = (torch.arange(100) + 0.5) / 100
    p, q = torch.meshgrid(side, side, indexing="ij")
    every = torch.stack([p, 1 - p, 1 - q, q], -1).reshape(-1, 2, 2)
    assert held_out(task.split_key(every)).double().mean().item() == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize("task", [task for task in EVERY if task.memorisable], ids=spelt)
def test_what_is_always_the_same_is_not_held_out(task):
    with refused(UserError, "hypotheses"):
        task.draw_split(3, seeded("any", 0), "seen")
    many = task.hypothesis(5, seeded("any", 3))
    assert torch.equal(many, task.hypothesis(1, seeded("any", 4)).expand_as(many))


@pytest.mark.parametrize(
    ("spec", "least"),
    [("hmm", 0.1), ("hmm:fixed=true", 0.2), ("hmm:fixed=true,predict=observation", 0.015), ("keyed_hmm", 0.035)],
)
def test_no_predictor_that_does_not_infer_comes_near_the_exact_answer(spec, least):
    """Bits of KL; a task in which they came near could be done without inference."""
    task = load_task(spec)
    inputs = task.draw_split(2000, seeded("trivial", 0)).inputs
    exact = task.log_predictive(inputs)
    constant = exact.exp().mean(0, keepdim=True).log().expand_as(exact)
    predictors = {"constant": constant, **task.trivial(inputs)}
    assert len(predictors) == 3
    assert min(bits(kl(exact, q)).mean().item() for q in predictors.values()) > least


def test_keys_and_first_states_are_even_and_later_ones_follow_the_matrix():
    task = KeyedHMM(2, 2, 4, chains=4)
    drawn = task.draw_split(20_000, seeded("keys", 0))
    keys = drawn.inputs[:, 2:, -4:].mean(0)
    torch.testing.assert_close(keys, torch.full_like(keys, 0.25), rtol=0, atol=4 * math.sqrt(0.1875 / 20_000))
    ring = Markov(5, 3, stay=0.5)
    chain = ring.draw_split(60_000, seeded("ring", 0))
    assert torch.equal(chain.inputs[:, 1:], chain.target[:, :-1])
    pairs = torch.bincount(chain.inputs[:, 2] * 5 + chain.target[:, 2], minlength=25).view(5, 5) / 60_000
    expected = ring.ring() / 5
    assert ((pairs - expected).abs() < 4.5 * (expected / 60_000).sqrt()).all()


@pytest.mark.parametrize("task", [HMM(3, 4, 9, fixed=True), HMM(3, 4, 9), KeyedHMM(3, 4, 9, chains=2)], ids=spelt)
def test_states_move_and_emit_as_often_as_the_matrices_say(task):
    """Summed over all steps, fine enough to see one hundredth go astray."""
    n, generator = 30_000, seeded("frequency", 0)
    hypothesis = task.hypothesis(n, generator)
    drawn = task.draw(hypothesis, generator)
    states, shown = drawn.target, drawn.inputs[:, -9:]
    keyed = isinstance(task, KeyedHMM)
    symbols = (shown[..., 10:14] if keyed else shown[..., -4:]).argmax(-1)
    # Only where the same chain has its turn twice running is it known where it came from.
    keys = shown[..., 14:].argmax(-1) if keyed else torch.zeros_like(states)
    again = keys[:, :-1] == keys[:, 1:]
    move, emission = (hypothesis.double() / 100).split([3, 4], -1)
    for matrix, before, after, known in [
        (emission, states, symbols, torch.ones_like(states, dtype=torch.bool)),
        (move, states[:, :-1], states[:, 1:], again),
    ]:
        columns = matrix.shape[-1]
        p = matrix.gather(1, before[..., None].expand(-1, -1, columns))[known]
        error = torch.nn.functional.one_hot(after[known], columns) - p
        assert (error.sum(0).abs() < 4.5 * (p * (1 - p)).sum(0).sqrt()).all()


def test_two_chains_have_nothing_in_common_but_their_matrices():
    """Two turns of one chain, then two of the other: the states are i, j, k, l with probability T_ij T_kl / 4."""
    task, generator = KeyedHMM(2, 2, 4, chains=2), seeded("apart", 0)
    hypothesis = task.hypothesis(1, generator).expand(60_000, -1, -1)
    drawn = task.draw(hypothesis, generator)
    keys = drawn.inputs[:, 2:, -2:].argmax(-1)
    states = drawn.target[(keys[:, 0] == keys[:, 1]) & (keys[:, 2] == keys[:, 3]) & (keys[:, 0] != keys[:, 2])]
    found = torch.bincount(states @ torch.tensor([8, 4, 2, 1]), minlength=16) / len(states)
    move = (hypothesis[0, :, :2].double() / 100).flatten()
    expected = (move[:, None] * move / 4).flatten()
    assert ((found - expected).abs() < 4 * (expected * (1 - expected) / len(states)).sqrt()).all()


def test_rows_of_a_visible_chain_are_even_over_the_simplex():
    """Each entry of Dirichlet(1, 1, 1) has mean 1/3 and P(p > 1/2) = (1 - 1/2)^2."""
    rows = Markov(3, fixed=False).hypothesis(20_000, seeded("rows", 0)).flatten(0, 1)
    torch.testing.assert_close(rows.mean(0), torch.full((3,), 1 / 3), rtol=0, atol=0.005)
    torch.testing.assert_close((rows > 0.5).float().mean(0), torch.full((3,), 0.25), rtol=0, atol=0.01)


def test_a_horizon_is_the_first_steps_and_none_is_all():
    assert (
        HMM(steps=9).trained_queries == 9
        and HMM(steps=9, horizon=4).trained_queries == 4
        and len(HMM(steps=9, horizon=4).query) == 9
    )


@pytest.mark.parametrize(
    ("spec", "values"),
    [
        ("hmm:encoding=bits", ("hmm:encoding=bits", "rows", "tokens")),
        ("hmm:predict=next", ("predict", "next", "state", "observation")),
        ("hmm:horizon=13", ("horizon", 13, 12)),
        ("hmm:horizon=-1", ("horizon", -1)),
        ("hmm:states=1", ("hmm:states=1", 2, 10)),
        ("hmm:symbols=11", ("hmm:symbols=11", 2, 10)),
        ("hmm:steps=0", ("steps", 0, 1)),
        ("keyed_hmm:states=11", ("keyed_hmm:states=11", 2, 10)),
        ("keyed_hmm:steps=0", ("steps", 0, 1)),
        ("keyed_hmm:chains=0", ("chains", 0, 1)),
        ("markov:symbols=1", ("markov:symbols=1", 2)),
        ("markov:steps=0", ("markov:steps=0", 1)),
        ("markov:stay=1", ("stay", 1.0)),
        ("markov:stay=-0.1", ("stay", -0.1)),
    ],
)
def test_a_field_that_cannot_be_is_named(spec, values):
    with refused(UserError, *values):
        load_task(spec)
