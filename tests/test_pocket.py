"""Pocket models: the pipeline from grammar to stored folder, what it demands and what it refuses."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open

from llmgeom.errors import UserError
from studies import evaluate, pocket
from studies.evaluate import Demands, skill_by_count
from studies.label_sequences import Evidence
from studies.pocket import build
from tests.pocket_models import examined
from tests.refusals import refused

TINY = {
    **{"hidden": 32, "layers": 2, "heads": 2, "ffn": 64, "batch": 8, "steps": 12, "fillings": 1},
    "context": 192,  # a tokenizer learnt on so little cuts text finer, and every prompt has to fit
    "tokenizer_texts": 3000,
}
ANYTHING = Demands(of_unigram=9, of_trigram=9, span=0, skills={})


PAIRS = 24  # of labels in a card of a tiny model; 200 take most of its time and show nothing more


@pytest.fixture(autouse=True, scope="module")
def few_pairs():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "PAIRS", PAIRS)
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, few_pairs):
    """A tiny pocket model: its folder, its card, and the losses its progress reported."""
    seen: list[tuple[int, int, float]] = []
    folder = tmp_path_factory.mktemp("pocket") / "pythia"
    card = build("pythia", folder, demands=ANYTHING, progress=lambda *args: seen.append(args), **TINY)
    return folder, card, seen


# ---- the use of evidence --------------------------------------------------------------------------------------------


def test_an_oracle_has_skill_1_and_the_best_constant_of_each_k_has_0():
    batch = Evidence("is").sample(8 * 95, seed=0)
    exact, k = batch.posterior.predictive[:, 0].numpy(), np.array(batch.columns["k"])
    assert skill_by_count(exact, exact, k) == 1
    mean = np.stack([np.log(np.exp(exact[k == one]).mean(0)) for one in k])
    assert skill_by_count(exact, mean, k) == pytest.approx(0, abs=1e-12)
    rng = np.random.default_rng(0)
    for _ in range(20):  # no other constant does better, and the mean of ten with the answer does
        p = np.clip(np.exp(mean[:, 0]) + rng.normal(0, 0.05, 9)[k], 0.01, 0.99)
        assert skill_by_count(exact, np.log(np.stack([p, 1 - p], axis=1)), k) < 0
    assert 0 < skill_by_count(exact, np.log((np.exp(exact) + 9 * np.exp(mean)) / 10), k) < 1


@pytest.mark.slow
def test_answers_are_those_of_one_prompt_at_a_time(tiny):
    subject = evaluate.stored(tiny[0])
    batch = Evidence("colon").sample(40, seed=0)
    found, mass = evaluate.answers(subject, batch, at_once=7)
    for i in range(0, 40, 7):
        ids = torch.tensor([subject.tokenizer(batch.text[i])["input_ids"]])
        p = subject.model(ids).logits[0, -1].double().softmax(-1)
        two = p[[subject.tokenizer(f" {batch.columns[c][i]}")["input_ids"][0] for c in ("first", "second")]]
        np.testing.assert_allclose(np.exp(found[i]), (two / two.sum()).detach().numpy(), rtol=1e-5)
        assert np.exp(mass[i]) == pytest.approx(two.sum().item(), rel=1e-5)


# ---- the pipeline ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_build_gives_a_model_and_a_card_that_is_true_of_what_was_stored(tiny):
    folder, card, seen = tiny
    assert card == json.loads((folder / "card.json").read_text())
    assert [step for step, _, _ in seen] == list(range(1, 13))
    assert np.mean([loss for *_, loss in seen[-4:]]) < np.mean([loss for *_, loss in seen[:4]])
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.bfloat16}  # noqa: SIM118
    rows = examined(folder)
    again = evaluate.losses(evaluate.stored(folder), rows)
    for which in ("held-out", "seen"):
        assert again[which]["model"] == pytest.approx(card["losses"][which]["model"], abs=1e-6)
    assert {p.name for p in folder.parent.iterdir()} == {"pythia"}


def test_what_cannot_be_built_is_refused_before_anything_is_trained(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("mine")
    with refused(UserError, "pocket"):
        build("pythia", tmp_path)
    with refused(UserError, "pythia", "phi", "llama", "mistral", "llama-noicl"):
        build("pithia", tmp_path / "new")
    with refused(UserError, "--steps 0", 1):
        build("pythia", tmp_path / "new", steps=0)
    assert pocket.main(["pythia", "--out", str(tmp_path)]) == 1
    assert "not a pocket model" in capsys.readouterr().err
