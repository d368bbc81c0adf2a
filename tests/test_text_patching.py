"""Interchange of evidence in text: identities that hold in every causal model, and a patch made by hand with hooks."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import GPT2Config, GPT2LMHeadModel

from llmgeom.batch import Batch, Tokens
from llmgeom.cli import main
from llmgeom.commands.patch import question_of_text
from llmgeom.errors import UserError
from llmgeom.model.model import Model
from llmgeom.probes.interventions import text_patching
from llmgeom.probes.interventions.axis import SIZE, VARIANCE, Axis
from llmgeom.probes.interventions.text_pairs import BEFORE, ROLES, TextPairs
from llmgeom.probes.interventions.text_patching import EDGE, FOLLOWS, PROBE, TOTAL, Exchange, effects, measure_patching
from llmgeom.wind_tunnels.worlds.two_point import TwoPoint
from tests.families import hooked
from tests.refusals import refused

LAYERS = (0, 2)
UNTRAINED = [{"total": np.zeros(4), "exact": np.ones(4)}]


@pytest.fixture(scope="module")
def pairs(pythia):
    return question_of_text(pythia, TwoPoint(), n=24, ks=(2, 4)).probes[PROBE].pairs


@pytest.fixture(scope="module")
def found(pythia, pairs):
    return effects(Exchange(pythia, pairs, 4096), layers=LAYERS, draws=1, seed=0)


def test_two_prompts_differ_in_one_mark_and_the_shift_is_bayes_rule(pythia, pairs):
    """The counterfactual as words, its exact answer from the counts of the words."""
    for i in range(len(pairs.x)):
        x, other = (pythia.tokenizer.decode(batch.tokens.real[i]) for batch in (pairs.x, pairs.other))
        words = [text.replace(",", " ,").replace(";", " ;").replace(".", " .").split() for text in (x, other)]
        ((old, new),) = [(a, b) for a, b in zip(*words, strict=True) if a != b]
        marks = pairs.x.columns["marks"][i].split()
        k = pairs.x.columns["k"][i]

        def odds(shown: list[str], new: str = new, old: str = old, k: int = k) -> float:
            n = [[word for word in shown if word in (new, old)][-k:].count(mark) for mark in (new, old)]
            belief = 1 / (1 + 9.0 ** (n[1] - n[0]))
            p = 0.9 * belief + 0.1 * (1 - belief)
            return math.log2(p / (1 - p))

        assert {old, new} == set(marks)
        assert pairs.exact[i] == pytest.approx(odds(words[1]) - odds(words[0]), abs=1e-9)


def test_the_roles_of_tokens_are_read_off_the_prompt(pythia, pairs):
    for i in range(len(pairs.x)):
        ids, role = pairs.x.tokens.real[i], pairs.role[i]
        marks = set(pairs.marks[i].tolist())
        names = [ROLES[r] if r != BEFORE else "" for r in role.tolist()]
        assert names.index("changed mark") == int(pairs.at[i]) == next(j for j, name in enumerate(names) if name)
        assert names[len(ids) - 1] == "last token" and set(names[len(ids) :]) <= {""}
        assert all(ids[j] in marks for j, name in enumerate(names) if name in ("changed mark", "later marks"))
        after = [j for j, name in enumerate(names) if name in ("other tokens between", "question", "last token")]
        assert not any(ids[j] in marks for j in after)
        assert names.count("later marks") == sum(ids[j] in marks for j in range(int(pairs.at[i]) + 1, len(ids)))


def test_at_the_embedding_all_of_it_is_at_the_mark_and_equal_evidence_is_nothing(found):
    cells, total = found["cells"], found["total"]
    assert np.abs(total).mean() > 0.3  # pocket:pythia follows two-point evidence
    np.testing.assert_allclose(cells[0, 0], total, atol=1e-3)
    assert (cells[0, 1:] == 0).all() and (found["equal"][0] == 0).all()


def entering(module, change):
    """A hook: what enters a module is changed; where `change` gives nothing it stays."""

    def hook(_, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        changed = change(hidden.clone())
        changed = hidden if changed is None else changed
        return ((changed, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": changed})

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def log_odds(model, pairs: TextPairs, i: int, ids: list[int], *hooks) -> float:
    """Bits for the new mark of a pair against the old one, by the model's own pass under some hooks."""
    with torch.no_grad(), hooked(*hooks):
        old, new = model(torch.tensor([ids])).logits[0, -1].double()[pairs.marks[i]].tolist()
    return (new - old) / math.log(2)


@pytest.mark.parametrize("role", ["changed mark", "last token"])
def test_a_cell_is_what_a_hook_that_replaces_the_residual_does(pythia, pairs, found, role):
    layer, kept = pythia.model.gpt_neox.layers[LAYERS[1]], []
    for i in (0, 3):
        ids, other = pairs.x.tokens.real[i], pairs.other.tokens.real[i]
        at = (pairs.role[i, : len(ids)] == ROLES.index(role))[None, :, None]
        clean = log_odds(pythia.model, pairs, i, ids)
        log_odds(pythia.model, pairs, i, other, entering(layer, kept.append))
        patched = entering(layer, lambda x, at=at: torch.where(at, kept[-1], x))
        shift = log_odds(pythia.model, pairs, i, ids, patched) - clean
        assert found["cells"][1, ROLES.index(role), i] == pytest.approx(pairs.sign[i] * shift, abs=2e-3)


def test_the_share_is_the_mean_effect_towards_the_exact_answer_over_the_mean_exact_shift(pairs, found):
    result = measure_patching(found, UNTRAINED * 6, pairs, LAYERS)
    values = {h.name: h.value for h in result.estimates}
    towards = found["total"]
    assert values[TOTAL] == pytest.approx(np.mean(towards))
    assert values[FOLLOWS] == pytest.approx(np.mean(towards) / np.mean(np.abs(pairs.exact)))
    np.testing.assert_allclose(result["cells"][0, 0], np.mean(towards), atol=1e-3)


def test_a_process_with_two_sources_or_a_layer_that_is_not_there_is_refused(pythia):
    with refused(UserError, "--layers 9"):
        question_of_text(pythia, TwoPoint(), layers=(9,))
    done = CliRunner().invoke(main, ["patch", "--process", "two-point", "--task", "hmm"])
    assert done.exit_code == 1 and "--task hmm" in done.stderr and done.stderr.count("\n") == 1
    done = CliRunner().invoke(main, ["patch", "--model", "pocket:llama", "--k", "2"])
    assert done.exit_code == 1 and "--process" in done.stderr


def test_every_position_is_patched_and_controls_at_some_layers_between_which_they_lie_straight(
    pythia, pairs, monkeypatch
):
    every = tuple(range(len(pythia.blocks)))
    whole = effects(Exchange(pythia, pairs, 4096), layers=every, draws=2, seed=0)
    monkeypatch.setattr(text_patching, "CONTROLLED", 2)
    part = effects(Exchange(pythia, pairs, 4096), layers=every, draws=2, seed=0, exact=False)
    np.testing.assert_allclose(part["cells"], whole["cells"], atol=1e-4)
    for name in (SIZE, "equal"):
        first, last = whole[name][0], whole[name][-1]
        for i, layer in enumerate(every):
            between = first + (last - first) * layer / every[-1]
            np.testing.assert_allclose(part[name][i], between, atol=1e-4)


# ---- edges ----------------------------------------------------------------------------------------------------------

D, LENGTH, AT = 64, 8, 2  # width, tokens of a prompt, place of the mark


def one_path(relay: bool) -> Model:
    """Two layers of attention with weights set by hand; what can be read at the last token came along one path.

    With `relay`: layer 0 moves a mark to the token after it, and layer 1 moves it on to the last token. Without:
    layer 1 reads the mark itself. Blocks of the stream: position, token, token that was moved, answer (16 each).
    """
    sizes = {"vocab_size": 16, "n_positions": 16, "n_embd": D, "n_layer": 2, "n_head": 1}
    config = GPT2Config(**sizes, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None)
    model = GPT2LMHeadModel(config).eval()
    position, token, moved, answer = (slice(16 * i, 16 * i + 16) for i in range(4))
    eye = torch.eye(16)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.zero_() if "ln" not in name else weight.fill_(float(name.endswith("weight")))
        model.transformer.wpe.weight[:, position] = 8 * eye
        model.transformer.wte.weight[:, token] = 4 * eye
        query, key, value = slice(0, D), slice(D, 2 * D), slice(2 * D, 3 * D)
        for layer, block in enumerate(model.transformer.h):
            qkv, out = block.attn.c_attn.weight, block.attn.c_proj.weight
            if layer == 0:  # each position looks at the one before it
                qkv[position, query.start : query.start + 16] = 20 * eye.roll(-1, 1)
                qkv[position, key.start : key.start + 16] = 20 * eye
                if relay:
                    qkv[token, value.start : value.start + 16] = eye
                    out[:16, moved] = eye
            else:  # the last position looks at the mark, or at the token after it
                seen = AT + relay
                qkv[LENGTH - 1, query.start + seen] = 20
                qkv[position, key.start : key.start + 16] = 20 * eye
                qkv[moved if relay else token, value.start : value.start + 16] = eye
                out[:16, answer] = eye
        model.lm_head.weight[:, answer] = eye
    return Model.of(model, name="by hand")


def by_hand(n: int = 12) -> TextPairs:
    """Prompts 10 11 M 12 13 14 15 9, and the same with another mark."""
    marks = torch.tensor([[1 + i % 4, 5 + i % 3] for i in range(n)])
    ids = torch.tensor([10, 11, 0, 12, 13, 14, 15, 9]).repeat(n, 1)
    ids[:, AT] = marks[:, 0]
    other = ids.clone()
    other[:, AT] = marks[:, 1]
    lengths, query = torch.full((n,), LENGTH), torch.arange(LENGTH).expand(n, -1) == LENGTH - 1
    cluster = tuple(f"set {i % 6}" for i in range(n))
    x, y = (Batch(Tokens(rows, lengths), cluster, {"name": "by hand"}, query=query) for rows in (ids, other))
    role = torch.tensor([BEFORE, BEFORE, 0, 1, 3, 4, 4, 5]).repeat(n, 1)
    return TextPairs(x, y, torch.full((n,), AT), torch.full((n,), -1), role, marks, np.ones(n))


@pytest.mark.parametrize(
    ("relay", "path"),
    [
        (True, ["0: changed mark -> token after it", "1: token after it -> last token"]),
        (False, ["1: changed mark -> last token"]),
    ],
)
def test_in_a_model_with_one_path_its_edges_carry_all_and_no_other_carries_any(relay, path):
    subject, pairs = one_path(relay), by_hand()
    found = effects(Exchange(subject, pairs, 4096), layers=(0, 1), draws=3, seed=0)
    result = measure_patching(found, UNTRAINED * 6, pairs, (0, 1))
    assert found["total"].mean() > 0.5
    assert list(result.ticks["edge"]) == path
    np.testing.assert_allclose(result["edge"], 1, atol=1e-3)
    np.testing.assert_allclose(result["edge_interval"], 1, atol=1e-3)
    assert (result["edge_equal"] == 0).all() and result["edge_null"].max() < 0.5
    assert all(f"{name} 1.00 [1.00, 1.00]" in result.notes[-1] for name in path)


def test_an_edge_is_what_a_hook_that_replaces_one_write_does(pythia, pairs, found):
    """Layer 0 of pocket:pythia, mark to last token: keys and values of x' at the mark, as the last token sees them."""
    exchange, layer = Exchange(pythia, pairs, 4096), pythia.model.gpt_neox.layers[0]
    last = exchange.role == ROLES.index("last token")
    write = exchange.writes(0, [exchange.patch(("residual", 0), 0, lambda: exchange.step(0, 0))])[0]
    edge = exchange.patch(("attn_out", 0), ROLES.index("last token"), lambda: write[last])
    shift = exchange.runner.measure([edge])["shift"][0]
    for i in (0, 3):
        ids, other = pairs.x.tokens.real[i], torch.tensor([pairs.other.tokens.real[i]])
        at, stored = int(pairs.at[i]), []

        def mixed(x, at=at, other=other):
            x[:, at] = layer.input_layernorm(pythia.model.gpt_neox.embed_in(other))[:, at]
            return x

        def replace_last(_module, _args, output, stored=stored):
            changed = output[0].clone()
            changed[:, -1] = stored[0][:, -1]
            return (changed, *output[1:])

        clean = log_odds(pythia.model, pairs, i, ids)
        keep = layer.attention.register_forward_hook(lambda *seen, stored=stored: stored.append(seen[2][0].clone()))
        log_odds(pythia.model, pairs, i, ids, entering(layer.attention, mixed), keep)
        replaced = layer.attention.register_forward_hook(replace_last)
        expected = log_odds(pythia.model, pairs, i, ids, replaced) - clean
        assert shift[i] == pytest.approx(pairs.sign[i] * expected, abs=2e-3)


def test_answers_that_do_not_follow_the_evidence_have_no_edges(pairs, found):
    nothing = {name: 0 * values for name, values in found.items() if not name.startswith("edge")}
    result = measure_patching(nothing, UNTRAINED * 6, pairs, LAYERS)
    assert "do not follow" in result.unmeasured[EDGE] and "edge" not in result.arrays


# ---- along a direction -----------------------------------------------------------------------------------------------


def test_controls_of_the_same_variance_exchange_as_much_as_the_direction_does():
    """Exchanged for their mean, rows lose what an edit exchanges: its variance, and none of it along the direction."""
    rng = np.random.default_rng(0)
    x, u = rng.standard_normal((40, 9)) * np.logspace(-0.5, 0.5, 9), rng.standard_normal(9)
    u /= np.linalg.norm(u)
    axis = Axis.exchanged(x, np.tile(x.mean(0), (40, 1)), u)
    rows, at = torch.arange(40), torch.from_numpy(x)
    own = axis.edit("project-out")(at, rows).numpy()
    np.testing.assert_allclose(own, np.outer((x.mean(0) - x) @ u, u), atol=1e-9)
    draws = axis.controls("project-out", 30, (0,))
    assert set(draws) == {SIZE, VARIANCE}
    steps = {kind: [draw(at, rows).numpy() for draw in some] for kind, some in draws.items()}
    for step in (*steps[SIZE], *steps[VARIANCE]):
        np.testing.assert_allclose(step @ u, 0, atol=1e-9)
    for step in steps[SIZE]:
        np.testing.assert_allclose(np.linalg.norm(step, axis=1), np.abs((x - x.mean(0)) @ u))
    for step in steps[VARIANCE]:
        assert np.square(step).sum(1).mean() == pytest.approx(np.var(x @ u))
    assert max(np.abs(one - steps[VARIANCE][0]).max() for one in steps[VARIANCE]) > 0.1  # the draws differ


def test_a_direction_has_both_kinds_of_control_and_their_effects_are_those_of_a_hook(pythia, pairs, found):
    """Layer 2, last token: each control's step, added to the residual by a hook, shifts the log odds as reported."""
    rng, last = np.random.default_rng(1), ROLES.index("last token")
    u = rng.standard_normal(pythia.model.config.hidden_size)
    u /= np.linalg.norm(u)
    exchange = Exchange(pythia, pairs, 4096, u)
    effect = effects(exchange, layers=LAYERS, draws=2, seed=3)
    assert effect[SIZE].shape == effect[VARIANCE].shape == (len(LAYERS), 2, 2, len(pairs.x))
    assert (effect[VARIANCE][0, 1] == 0).all()  # at the embedding the last token is that of both prompts
    drawn, layer = exchange.controls(LAYERS[1], last, 2, 3), pythia.model.gpt_neox.layers[LAYERS[1]]
    for kind, draw, i in product((SIZE, VARIANCE), range(2), (0, 3)):
        ids, step = pairs.x.tokens.real[i], torch.zeros(len(pairs.x.tokens.real[i]), len(u))
        step[-1] = drawn[kind][draw][i]
        moved = entering(layer, lambda x, step=step: x + step.to(x))
        shift = log_odds(pythia.model, pairs, i, ids, moved) - log_odds(pythia.model, pairs, i, ids)
        assert effect[kind][1, 1, draw, i] == pytest.approx(pairs.sign[i] * shift, abs=2e-3)
    result = measure_patching(effect, UNTRAINED * 6, pairs, LAYERS, along=True)
    highest = max(float(effect[kind][1, 1].mean(1).max()) for kind in (SIZE, VARIANCE))
    assert result["last_null"][1, 1] == pytest.approx(highest)  # of 2 draws the band is the whole range
    (note,) = (note for note in result.notes if note.startswith("along the direction alone, layer 2, last token"))
    assert VARIANCE in note and not result.warnings
    del effect[VARIANCE]
    assert "same variance" in measure_patching(effect, UNTRAINED * 6, pairs, LAYERS, True).warnings[0]
