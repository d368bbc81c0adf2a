"""Interchange of evidence in text: identities that hold in every causal model, and a patch made by hand with hooks."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from llmgeom.cli import main
from llmgeom.commands.patch import question_of_text
from llmgeom.errors import UserError
from llmgeom.model.subject import Subject
from llmgeom.probes.interventions.text_pairs import BEFORE, ROLES
from llmgeom.probes.interventions.text_patching import FOLLOWS, PROBE, TOTAL, effects, measure_patching
from llmgeom.prompts.counterfactual import changes
from llmgeom.prompts.processes import load_process
from llmgeom.prompts.processes.two_point import TwoPoint
from tests.refusals import refused

LAYERS = (0, 2)


@pytest.fixture(scope="module")
def pythia():
    return Subject.load("pocket:pythia", device="cpu")


@pytest.fixture(scope="module")
def pairs(pythia):
    return question_of_text(pythia, TwoPoint(), n=24, ks=(2, 4)).probes[PROBE].pairs


@pytest.fixture(scope="module")
def found(pythia, pairs):
    return effects(pythia, pairs, layers=LAYERS, draws=1, seed=0, batch_tokens=4096)


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
    assert (cells[0, 1 : len(ROLES)] == 0).all() and (found["equal"][0] == 0).all()


def test_all_positions_together_are_the_total_effect_in_every_layer(found):
    for layer in range(len(LAYERS)):
        np.testing.assert_allclose(found["cells"][layer, -1], found["total"], atol=1e-3)


@pytest.mark.parametrize("role", ["changed mark", "last token"])
def test_a_cell_is_what_a_hook_that_replaces_the_residual_does(pythia, pairs, found, role):
    layers = pythia.model.gpt_neox.layers
    kept: dict[str, torch.Tensor] = {}

    def log_odds(ids: list[int], i: int, patch: torch.Tensor | None, at: torch.Tensor) -> float:
        def hook(module, args, kwargs):
            hidden = args[0] if args else kwargs["hidden_states"]
            kept["x"] = hidden.clone()
            if patch is None:
                return None
            hidden = torch.where(at[None, :, None], patch, hidden)
            return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

        handle = layers[LAYERS[1]].register_forward_pre_hook(hook, with_kwargs=True)
        with torch.no_grad():
            logits = pythia.model(torch.tensor([ids])).logits[0, -1].double()
        handle.remove()
        old, new = logits[pairs.marks[i]].tolist()
        return (new - old) / math.log(2)

    for i in (0, 3):
        ids, other = pairs.x.tokens.real[i], pairs.other.tokens.real[i]
        at = pairs.role[i, : len(ids)] == ROLES.index(role)
        clean = log_odds(ids, i, None, at)
        log_odds(other, i, None, at)
        shift = log_odds(ids, i, kept["x"], at) - clean
        assert found["cells"][1, ROLES.index(role), i] == pytest.approx(shift, abs=2e-3)


def test_the_share_is_the_mean_effect_towards_the_exact_answer_over_the_mean_exact_shift(pairs, found):
    result = measure_patching(found, [np.zeros(len(pairs.x))] * 6, pairs, LAYERS)
    values = {h.name: h.value for h in result.estimates}
    towards = [t if e > 0 else -t for t, e in zip(found["total"], pairs.exact, strict=True)]
    assert values[TOTAL] == pytest.approx(np.mean(towards))
    assert values[FOLLOWS] == pytest.approx(np.mean(towards) / np.mean(np.abs(pairs.exact)))
    np.testing.assert_allclose(result.cells[0, 0], np.mean(towards), atol=1e-3)


def test_a_changed_bijection_is_one_to_one_and_a_recall_has_no_finite_shift():
    process = load_process("bijection")
    batch = process.sample(20, 0, ks=(2, 3))
    made = changes(process, batch, 0)
    assert len(made) > 10
    for change in made:
        seen = [int(mark) for mark in batch.columns["seen"][change.prompt]]
        assert change.mark not in seen
    recall = load_process("recall:stored=1")
    batch = recall.sample(20, 0)
    for change in changes(recall, batch, 0):
        items = batch.columns["items"][change.prompt].split()
        assert items[change.place] == items[-1] and change.shift == math.inf  # no other item bears on the answer


def test_a_process_with_two_sources_or_a_layer_that_is_not_there_is_refused(pythia):
    with refused(UserError, "--layers 9"):
        question_of_text(pythia, TwoPoint(), layers=(9,))
    done = CliRunner().invoke(main, ["patch", "--process", "two-point", "--task", "hmm"])
    assert done.exit_code == 1 and "--task hmm" in done.stderr and done.stderr.count("\n") == 1
    done = CliRunner().invoke(main, ["patch", "--model", "pocket:llama", "--k", "2"])
    assert done.exit_code == 1 and "--process" in done.stderr


def test_a_dry_run_prices_the_patches_of_text():
    words = ["patch", "--model", "pocket:pythia", "--process", "two-point", "--n", "40", "--dry-run", "--json"]
    done = CliRunner().invoke(main, words, catch_exceptions=False)
    (row,) = json.loads(done.stdout)["sources"].values()
    assert done.exit_code == 0 and row["passes"] > 4 * len(ROLES) and row["tokens"] > 1000
