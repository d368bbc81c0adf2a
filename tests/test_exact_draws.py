"""How sequences of the tasks are drawn and held out: seeds, frequencies, and fields that are out of range."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from llmgeom.errors import UserError
from llmgeom.stats.information import bits, kl
from llmgeom.task import held_out, seeded
from llmgeom.wind_tunnels import load_task
from llmgeom.wind_tunnels.tasks.bijection import Bijection
from llmgeom.wind_tunnels.tasks.coin import Coin
from llmgeom.wind_tunnels.tasks.hmm import HMM, _fixed
from llmgeom.wind_tunnels.tasks.keyed_hmm import KeyedHMM
from llmgeom.wind_tunnels.tasks.markov import Markov
from llmgeom.wind_tunnels.tasks.recall import Recall
from llmgeom.wind_tunnels.tasks.recurrence import Recurrence
from llmgeom.wind_tunnels.tasks.regression import Regression
from tests.chains import EVERY, read, read_keyed, spelt
from tests.refusals import refused


def test_sticky_keys_come_again_as_often_as_said_and_in_training_alone():
    task = Bijection(vocab=50, pairs=6, replacement=True, sticky=0.6)

    def again(training):
        keys = task.draw_split(4000, seeded("here", 0), training=training).inputs[:, 0::2]
        return (keys[:, :, None] == keys[:, None, :]).tril(-1).any(2).double().mean(0)

    assert again(False)[1].item() == pytest.approx(1 / 50, abs=0.01)
    assert again(True)[1].item() == pytest.approx(0.6 + 0.4 / 50, abs=0.03)
    assert again(True)[0] == 0


def test_a_sticky_key_is_any_earlier_one_alike():
    """With probability `sticky` a key is one of the distinct keys before it, each alike; else one that is new."""
    always = Bijection(200, 5, True, sticky=1.0)._sticky_keys(6000, seeded("here", 0))
    assert (always == always[:, :1]).all()
    never = Bijection(5, 7, True, sticky=0.0)._sticky_keys(6000, seeded("here", 0))
    assert (never[:, :5].sort(1).values == torch.arange(5)).all()
    assert ((never[:, 5:, None] == never[:, None, :5]).sum(2) == 1).all()  # nothing is new any more
    half = Bijection(200, 4, True, sticky=0.5)._sticky_keys(40_000, seeded("here", 0))
    first, second, third, fourth = half.unbind(1)
    assert torch.bincount(first, minlength=200).double().std() < 3 * 200**0.5
    assert (second == first).double().mean().item() == pytest.approx(0.5, abs=0.01)
    both = (second == first) & (third == first)
    assert (fourth[both] == first[both]).double().mean().item() == pytest.approx(0.5, abs=0.02)
    # first, first, other: the two distinct keys are alike though one came twice.
    twice = (second == first) & (third != first)
    for key in (first, third):
        assert (fourth[twice] == key[twice]).double().mean().item() == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize(("a", "b"), [(2, 5), (0.5, 0.5)])
def test_the_bias_of_a_coin_has_its_prior(a, b):
    found = Coin(prior=f"beta:{a},{b}").hypothesis(5000, seeded("here", 0))[:, 0]
    assert stats.kstest(found.numpy(), stats.beta(a, b).cdf).pvalue > 1e-4


def test_a_horizon_puts_a_loss_on_the_first_numbers_alone():
    assert Recurrence(horizon=5).trained_queries == 5 and Recurrence().trained_queries == 15
    assert Bijection().trained_queries == 7


def test_a_held_out_beginning_is_in_no_training_sequence_of_either_kind():
    task = Recurrence(modulus=7, steps=8)
    seen = task.draw_split(4000, seeded("here", 0), "seen").inputs[:, :3]
    kept = task.draw_split(4000, seeded("here", 1), "held-out").inputs[:, :3]
    seen, kept = set(map(tuple, seen.tolist())), set(map(tuple, kept.tolist()))
    assert not seen & kept and len(seen) + len(kept) > 330 and len(kept) > 15


def test_the_order_in_which_pairs_are_stored_does_not_make_a_new_hypothesis():
    task = Recall(keys=5, values=4, pairs=3, queries=3)
    hypotheses = task.hypothesis(6000, seeded("here", 0))
    maps = {tuple(sorted(zip(*rows, strict=True))) for rows in hypotheses.tolist()}
    cells = {tuple(cell) for cell in task.split_key(hypotheses).tolist()}
    assert len(maps) == len(cells) == round(2**task.log2_hypotheses) == 10 * 24


@pytest.mark.parametrize("layout", ["compact", "papers"])
def test_any_stored_pair_is_asked_first_as_often(layout):
    drawn = Recall(4, 2, 1, layout=layout).draw_split(4000, seeded("here", 0)).inputs
    step, query = (4, 4 * 4 + 1 + 1) if layout == "papers" else (2, 2 * 4 + 1)
    place = (drawn[:, step // 2 - 1 : 4 * step : step] == drawn[:, query, None]).double()
    assert place.sum(1).eq(1).all()
    np.testing.assert_allclose(place.mean(0), 0.25, atol=0.03)


def test_a_filler_takes_a_token_where_there_is_one():
    assert Recall(keys=8, values=8).vocabulary == 16
    task = Recall(keys=8, values=6, pairs=4, queries=1, filler=2)
    assert task.vocabulary == 15
    assert (task.draw_split(9, seeded("here", 0)).inputs == 14).sum(1).tolist() == [2] * 9


REFUSED = [
    (lambda: Recall(layout="long"), ("recall:layout=long", "compact", "papers")),
    (lambda: Recall(pairs=9), ("recall:pairs=9", "queries")),
    (lambda: Recall(queries=5), ("queries",)),
    (lambda: Recall(filler=-1), ("filler",)),
    (lambda: Regression(layout="x"), ("layout", "x", "paired", "separate")),
    (lambda: Regression(noise=0.0), ("noise",)),
    (lambda: Regression(scale=math.inf), ("scale",)),
    (lambda: Regression(noise=math.nan), ("noise",)),
    (lambda: Regression(bins=1), ("bins", 1, 2)),
    (lambda: Recurrence(modulus=9), ("modulus", 9, "prime")),
    (lambda: Recurrence(modulus=1), ("modulus", 1, "prime")),
    (lambda: Recurrence(steps=3), ("steps", 3, 4)),
    (lambda: Recurrence(program=1.0), ("program", 1.0)),
    (lambda: Recurrence(horizon=16), ("horizon", 16, 15)),
    (lambda: Bijection(vocab=1), ("vocab", 2)),
    (lambda: Bijection(pairs=9), (9, 8, "replacement=true")),
    (lambda: Coin(prior="beta:1"), ("beta:1", "beta:A,B", "list:P,P")),
    (lambda: Coin(prior="beta:1,nan"), ("beta:A,B",)),
    (lambda: Coin(prior="beta:1,inf"), ("beta:A,B",)),
    (lambda: Coin(prior="beta:1,0"), ("beta:A,B",)),
    (lambda: Coin(prior="list:0.5,nan"), ("beta:A,B",)),
    (lambda: Coin(prior="list:0.5,1.5"), ("beta:A,B",)),
    (lambda: Coin(prior="list:"), ("beta:A,B",)),
    (lambda: Coin(flips=0), ("coin:flips=0", 1)),
]


@pytest.mark.parametrize(("make", "named"), REFUSED)
def test_a_field_out_of_range_is_refused_with_what_was_expected(make, named):
    with refused(UserError, *named):
        make()


# ---- Markov chains ---------------------------------------------------------------------------------------------------


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
