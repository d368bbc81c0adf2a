"""Held-out hypotheses and states, and the table that remembers states of the evidence."""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from llmgeom.errors import UserError
from llmgeom.probes.posterior import results
from llmgeom.probes.posterior.grading import StateTable
from llmgeom.probes.posterior.scores import Evaluation
from llmgeom.stats.information import bits
from llmgeom.wind_tunnels import load_world, names
from llmgeom.wind_tunnels.training import Trainer, entropy_floor, train
from llmgeom.wind_tunnels.training_config import Training
from llmgeom.wind_tunnels.worlds.bijection import Bijection
from llmgeom.wind_tunnels.worlds.recall import Recall
from llmgeom.world import World, held_out, seeded
from tests.refusals import refused

WITH_STATES = (
    "bijection",
    "bijection:vocab=4,pairs=6,replacement=true",
    "coin:steps=8",
    "coin:steps=8,prior=list:.2,.7",
    "markov:steps=6",
    "markov:symbols=3,steps=8,fixed=false",
    "recall:keys=4,values=4,pairs=2,queries=2",
    "recall:keys=3,values=3,pairs=3,queries=2,layout=papers,filler=2",
)


@pytest.mark.parametrize("spec", WITH_STATES)
def test_prefixes_of_equal_state_have_equal_exact_answers(spec):
    of = load_world(spec)
    inputs = of.draw_split(1000, seeded("test", 1)).inputs
    exact, states = of.log_predictive(inputs).exp(), of.sufficient(inputs)
    answers = defaultdict(list)
    for sequence in range(len(inputs)):
        for query in range(exact.shape[1]):
            answers[(query, *states[sequence, query].tolist())].append(exact[sequence, query])
    repeated = [torch.stack(rows) for rows in answers.values() if len(rows) > 1]
    assert len(repeated) > 3
    assert max(float((rows - rows[0]).abs().max()) for rows in repeated) < 1e-12


@pytest.mark.parametrize("spec", WITH_STATES)
def test_a_state_knows_nothing_of_what_comes_after_its_query(spec):
    of = load_world(spec)
    inputs = of.draw_split(50, seeded("test", 2)).inputs
    query = (len(of.query) - 1) // 2
    after = inputs.clone()
    after[:, of.query[query] + 1 :] = inputs[:, of.query[query] + 1 :].roll(1, 0)
    assert not torch.equal(after, inputs)
    assert torch.equal(of.sufficient(inputs)[:, : query + 1], of.sufficient(after)[:, : query + 1])


@pytest.mark.parametrize("spec", ["coin:steps=5", "markov:symbols=3,steps=5,fixed=false", "bijection:vocab=4,pairs=3"])
def test_a_table_answers_with_the_counts_of_its_training_sequences(spec):
    of = load_world(spec)
    table = StateTable.filled(of, 4, 3)
    drawn = of.draw_split(4, seeded("grade/table", 3), of.training_split)
    counts = defaultdict(Counter)
    for states, targets in zip(of.sufficient(drawn.inputs).tolist(), drawn.target.tolist(), strict=True):
        for query, (state, target) in enumerate(zip(states, targets, strict=True)):
            counts[(query, *state)][target] += 1
    inputs = of.draw_split(200, seeded("test", 4)).inputs
    form, met = table.answers(inputs), []
    outcomes = len(of.answers.tokens)
    for sequence, states in enumerate(of.sufficient(inputs).tolist()):
        for query, state in enumerate(states):
            seen = counts.get((query, *state), Counter())
            met.append(bool(seen))
            expected = [(seen[k] + 0.5) / (seen.total() + outcomes / 2) for k in range(outcomes)]
            assert form[sequence, query, :outcomes].exp().tolist() == pytest.approx(expected, abs=1e-12)
    assert any(met) and not all(met)


def evaluation(of, n):
    return Evaluation(of, n, 0, "held-out", len(of.query))


def test_a_table_of_corrupted_targets_answers_with_their_mixture():
    """Filled with true targets it was .69 bits from the mixture, so that no model of corrupted ones was memorisable."""
    of = load_world("bijection")
    held_out = Evaluation(of, 500, 0, "held-out", len(of.query), corrupt=0.3)
    scores = held_out.posterior_scores(held_out.exact)
    for corrupt, near in ((0.3, True), (0.0, False)):
        table = StateTable.filled(of, 100_000, 0, corrupt)
        kl = bits(of.answers.kl(held_out.exact, table.answers(held_out.batch.tokens.data))).numpy()
        assert (kl.mean() < 0.003) == near and bool(results.useful(table, kl, scores)) == near


@pytest.mark.parametrize("spec, sequences", [("recall", 20_000), ("bijection", 50)])
def test_a_table_of_too_few_sequences_or_too_many_states_does_not(spec, sequences):
    of = load_world(spec)
    held_out, table = evaluation(of, 500), StateTable.filled(of, sequences, 0)
    kl = bits(of.answers.kl(held_out.exact, table.answers(held_out.batch.tokens.data))).numpy()
    assert kl.mean() > 0.1
    assert not results.useful(table, kl, held_out.posterior_scores(held_out.exact))


def test_tasks_of_real_numbers_or_of_new_matrices_or_no_training_fill_no_table():
    assert StateTable.filled(load_world("bijection"), 0, 0) is None  # step 0: it was one of 200,000 sequences
    assert StateTable.filled(load_world("regression"), 10, 0) is None
    assert StateTable.filled(load_world("hmm"), 10, 0) is None


@pytest.mark.parametrize("spec", ["bijection", "coin", "markov:fixed=false"])
def test_a_tenth_of_the_states_is_held_out_where_a_query_has_many(spec):
    of = load_world(spec)
    inputs = of.draw_split(2000, seeded("test", 5)).inputs
    out, states = of.held_out_states(inputs), of.sufficient(inputs)
    kinds = {}
    for query in range(states.shape[1]):
        for state, is_out in zip(states[:, query].tolist(), out[:, query].tolist(), strict=True):
            assert kinds.setdefault((query, *state), is_out) == is_out  # a state is held out everywhere or nowhere
    few = [query for query in range(states.shape[1]) if len({key for key in kinds if key[0] == query}) < 10]
    assert few[0] == 0 and not any(is_out for (query, *_), is_out in kinds.items() if query in few)
    many = [is_out for (query, *_), is_out in kinds.items() if query not in few]
    assert np.mean(many) == pytest.approx(0.1, abs=3 * (0.09 / len(many)) ** 0.5)


def test_training_has_no_loss_in_held_out_states(tmp_path):
    config = Training(task="bijection", width=16, layers=1, steps=1, batch=256, hold_out="states")
    of = load_world(config.task)
    trainer = Trainer(config, of, 1e-3, "cpu")
    inputs, target = trainer._batch()
    trainer._batch = lambda: (inputs, target)
    trainer.loss().backward()
    reference = Trainer(config, of, 1e-3, "cpu").module
    logits = reference(input_ids=inputs).logits[:, list(of.query)].float()
    kept = ~of.held_out_states(inputs)
    assert 0.02 < 1 - kept.double().mean() < 0.2
    log_p = logits.log_softmax(-1).gather(-1, trainer.tokens[target][..., None])[..., 0]
    (-log_p[kept].mean()).backward()
    for own, other in zip(trainer.module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-7)


def test_the_floor_is_the_entropy_of_the_queries_that_have_a_loss():
    of = load_world("bijection")
    inputs = of.draw_split(2048, seeded("floor", 0), of.training_split, training=True).inputs
    entropy = bits(of.answers.entropy(of.answers.exact(of.log_predictive(inputs))))
    kept = ~of.held_out_states(inputs)
    assert entropy_floor(of, 0.0, 0, "states") == pytest.approx(float(entropy[kept].mean()), abs=1e-12)
    assert entropy_floor(of, 0.0, 0, "states") != entropy_floor(of, 0.0, 0)


@pytest.mark.parametrize("flags, value", [({"task": "hmm"}, "sufficient"), ({"task": "coin", "graph": True}, "graph")])
def test_states_that_cannot_be_held_out_are_refused(tmp_path, flags, value):
    with pytest.raises(UserError, match=value):
        train(Training(steps=1, hold_out="states", **flags), tmp_path / "out", "cpu")


def test_a_table_without_the_held_out_states_fails_in_them_and_the_exact_answer_does_not():
    of = load_world("bijection")
    held_out = evaluation(of, 1500)
    batch = held_out.batch
    out = of.held_out_states(batch.tokens.data)
    exact = of.answers.exact(batch.exact.predictive)
    uniform = of.answers.exact(torch.full_like(batch.exact.predictive, -math.log(8)))
    remembers = torch.where(out[..., None], uniform, exact)
    for form, low in ((exact, -1e-9), (remembers, 0.05)):
        [found] = results.measure_states(held_out.posterior_scores(form), out.numpy()).estimates
        assert (found.value > 0.05) == (low > 0) and found.value >= low
        kl = bits(of.answers.kl(exact, form)).numpy()
        assert found.value == pytest.approx(less_seen(kl, out.numpy()), abs=1e-12)


def less_seen(kl, out):
    """Mean over sequences with a held-out state, of KL there less the mean KL of seen states at the same query."""
    some = [q for q in range(kl.shape[1]) if out[:, q].any() and not out[:, q].all()]
    seen = {q: kl[~out[:, q], q].mean() for q in some}
    rows = [[row[q] - seen[q] for q in some if here[q]] for row, here in zip(kl, out, strict=True)]
    return np.mean([np.mean(row) for row in rows if row])


def test_nothing_is_said_of_the_memory_of_a_model_that_does_not_infer():
    of = load_world("recall")
    held_out = evaluation(of, 200)
    scores = held_out.posterior_scores(held_out.exact)
    with pytest.raises(UserError, match=r"skill over bag of values is -1\.6"):
        results.require_skill(np.full((200, 4), 3.0), scores)  # uniform: 3 bits; the bag of values: 1.146
    results.require_skill(scores.own.kl, scores)


def of_states(rng, n):
    """An exact model, graded on sequences of five queries; a tenth of the states is held out."""
    own, trivial = (SimpleNamespace(kl=np.full((n, 5), kl)) for kl in (0.0, 1.0))
    scores = SimpleNamespace(own=own, within=slice(None), best="one", trivial={"one": trivial})
    return results.measure_states(scores, rng.random((n, 5)) < 0.1).estimates[0]


def test_an_exact_model_needs_as_many_sequences_with_a_held_out_state_as_the_posterior_needs_sequences():
    rng = np.random.default_rng(4)
    h = of_states(rng, 4000)
    assert h.needed == pytest.approx(4566 / (1 - 0.9**5), rel=0.05) and h.p > 0.0125
    assert of_states(rng, round(1.06 * h.needed)).p < 0.0125 < of_states(rng, round(0.94 * h.needed)).p


# ---- hypotheses and states that are held out ------------------------------------------------------------------------


def splitmix(columns):
    """The same hash in Python's own integers: Steele, Lea & Flood 2014."""
    state, whole = 0, (1 << 64) - 1
    for column in columns:
        state = (state + column + 0x9E3779B97F4A7C15) & whole
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & whole
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & whole
        state ^= state >> 31
    return state


def test_the_hash_is_splitmix_and_holds_out_a_tenth_of_what_is_alike():
    assert splitmix([0]) == 0xE220A8397B1DCDAF  # the generator's first number from seed 0, as published
    cells = torch.cartesian_prod(torch.arange(-50, 50), torch.arange(200))
    expected = [(splitmix(cell) >> 1) % 10 == 0 for cell in cells.tolist()]
    assert held_out(cells).tolist() == expected
    found = held_out(cells).reshape(100, 200).double()
    assert found.mean().item() == pytest.approx(0.1, abs=0.01)
    assert found.mean(0).max() < 0.3 and found.mean(1).max() < 0.2  # no row or column is favoured


@pytest.mark.parametrize("name", names())
def test_splits_share_no_hypothesis(name):
    world = load_world(name)
    if world.memorisable:
        with refused(UserError, name, world.memorisable):
            world.draw_split(2, seeded("here", 0), "seen")
        return
    for split in ("seen", "held-out"):
        found = world._hypotheses(3000, seeded("here", 0), split)
        assert len(found) == 3000
        assert (held_out(world.split_key(found)) == (split == "held-out")).all()
        assert len(found.flatten(1).unique(dim=0)) > 100


def test_the_order_in_which_pairs_are_stored_does_not_make_a_new_hypothesis():
    for world, size in ((Recall(3, 3, 0, 5, 4), 10 * 24), (Recall(3, 3, 0, 5, 2, distinct=False), 10 * 8)):
        hypotheses = world.hypothesis(6000, seeded("here", 0))
        maps = {tuple(sorted(zip(*rows, strict=True))) for rows in hypotheses.tolist()}
        cells = {tuple(cell) for cell in world.split_key(hypotheses).tolist()}
        assert len(maps) == len(cells) == round(2**world.log2_hypotheses) == size


@dataclass(frozen=True)
class Scarce(Bijection):
    """Holds out one in forty, and is believed to hold out a half."""

    _held_out_share = 0.5


def test_where_hypotheses_are_few_they_come_twice_and_none_is_of_the_other_split():
    found = Scarce(8, 3)._hypotheses(500, seeded("here", 0), "held-out")
    assert len(found) == 500 and held_out(found).all() and len(found.unique(dim=0)) < 300
    with refused(UserError, "0.00%"):
        Bijection(2, 2).draw_split(3, seeded("here", 0), "held-out")


def test_real_hypotheses_are_hashed_by_cells_a_quarter_wide():
    cells = World.split_key(Bijection(), torch.tensor([[-0.26, 0.24], [0.0, 1.0]]))
    assert cells.tolist() == [[-2, 0], [0, 4]]
