"""Pocket models: the pipeline from grammar to stored folder, what it demands and what it refuses."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open

from llmgeom.errors import UserError
from llmgeom.model.subject import Subject
from llmgeom.prompts import nonce
from studies import evaluate, pocket
from studies.evaluate import DEMANDS, INDIFFERENT, Demands, missed, skill_by_count
from studies.label_sequences import Evidence
from studies.pocket import POCKETS, build
from tests.pocket_models import examined, shared
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


def test_a_label_of_several_tokens_is_refused(monkeypatch):
    read = shared(8, 128, 512, seed=0, at_once=200)
    subject = Subject.of(pocket.Pocket("any", "llama", hidden=32, vocabulary=512).start(), read.tokenizer)
    batch = Evidence().sample(2, seed=0)
    monkeypatch.setattr(nonce, "LABELS", (*nonce.LABELS, "incomprehensible"))
    with refused(UserError, "incomprehensible"):
        evaluate.answers(subject, batch)


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


@pytest.mark.slow
def test_the_card_tells_the_skills_of_what_was_stored_and_of_its_first_step(tiny):
    folder, card, _ = tiny
    subject = evaluate.stored(folder)
    again = (
        evaluate.evidence(subject, 1, sets=("held-out",)),
        evaluate.evidence(subject.initial(0), 1, sets=("held-out",)),
    )
    page = (folder / "card.md").read_text()
    for name in nonce.FORMATS:
        for found, key in zip(again, ("skills", "skills_at_step_0"), strict=True):
            told = card[key][name]["held-out"]
            again_by_k = found[name]["held-out"].pop("by_k")
            assert found[name]["held-out"] == pytest.approx({key: told[key] for key in told if key != "by_k"})
            assert told["n"] == PAIRS * 8 and told["pairs"] == PAIRS
            assert {one["n"] for one in told["by_k"].values()} == {PAIRS}
            for k, one in again_by_k.items():
                assert one == pytest.approx(told["by_k"][k])
            assert f"{told['skill']:.3f} ({told['low']:.3f} to {told['high']:.3f})" in page
    assert card["sequences"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", POCKETS)
def test_every_architecture_learns_and_is_what_its_name_says(name, tiny):
    spec = replace(POCKETS[name], **TINY | {"hidden": 64, "heads": 4, "steps": 4})
    read = shared(32, 192, 1024, seed=0, at_once=3000, share=0.5, informative=spec.informative)
    model = spec.start()
    curve = pocket.train(model, read, spec)
    assert read.tokenizer.get_vocab() == evaluate.stored(tiny[0]).tokenizer.get_vocab()
    subject = Subject.of(model, read.tokenizer)
    assert subject.facts["model_type"] == spec.architecture and curve[-1]["loss"] < 7
    assert Subject.of(spec.start()).weight_hash == subject.initial(0).weight_hash != subject.weight_hash
    assert subject.facts["kv_heads"] == (2 if spec.architecture in ("llama", "mistral") else 4)


@pytest.mark.parametrize("name", POCKETS)
def test_every_pocket_model_has_about_a_million_parameters(name):
    assert 1.0e6 < sum(p.numel() for p in POCKETS[name].start().parameters()) < 1.05e6


@pytest.mark.slow
def test_loss_is_that_of_transformers(tiny):
    folder, _, _ = tiny
    subject = evaluate.stored(folder)
    texts = ["The owl is grey.", "Ada has 3 apples and 4 pears in a box."]
    for text, found in zip(texts, evaluate.nats(subject, texts), strict=True):
        ids = torch.tensor([[*subject.tokenizer(text)["input_ids"], 0]])
        assert found.mean() == pytest.approx(subject.model(ids, labels=ids).loss.item(), rel=1e-5)
        assert len(found) == ids.shape[1] - 1


@pytest.mark.slow
def test_step_0_is_the_twin_of_the_card_s_seed(tiny):
    folder, card, _ = tiny
    torch.manual_seed(99)
    assert evaluate.stored(folder).initial(card["seed"]).weight_hash == card["weights"]["start"]
    assert evaluate.stored(folder).weight_hash == card["weights"]["stored"] != card["weights"]["start"]


@pytest.mark.slow
def test_the_same_build_gives_the_same_weights(tiny, tmp_path):
    torch.manual_seed(7)
    np.random.seed(7)
    again = build("pythia", tmp_path / "again", demands=ANYTHING, **TINY)
    assert again["weights"] == tiny[1]["weights"]


@pytest.mark.slow
def test_a_model_that_misses_the_demands_is_not_shipped(tmp_path, capsys):
    with refused(UserError, 0.6, "unigram", "trigram"):
        build("pythia", tmp_path / "pythia", **TINY | {"steps": 2})
    (kept,) = tmp_path.iterdir()
    assert kept.name == "pythia.refused" and json.loads((kept / "card.json").read_text())["misses_of_the_usual_demands"]


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("model", 3.7, "unigram"),
        ("trigram", 3.1, "trigram"),
        ("trigram_few", 3.1, "trigram_few"),
        ("span", 2.9, "mixed"),
        ("colon", 0.79, "colon"),
        ("is", 0.49, "is"),
    ],
)
def test_each_demand_is_named_when_it_is_missed(name, value, what):
    good = {"model": 3.0, "unigram": 6.0, "trigram": 5.0, "trigram_few": 4.0}
    spans = {"math": {"span": 4.0}, "mixed": {"span": value if name == "span" else 4.0}}
    skills = {form: {"held-out": {"skill": value if name == form else 0.9}} for form in nonce.FORMATS}
    measured = {"losses": {"held-out": good | {name: value}}, "entropy_bits": spans, "skills": skills}
    fine = {form: {"held-out": {"skill": 0.81}} for form in nonce.FORMATS}
    assert not missed({"losses": {"held-out": good}, "entropy_bits": {"math": {"span": 3.0}}, "skills": fine}, DEMANDS)
    (miss,) = missed(measured, DEMANDS)
    assert what in re.findall(r"\w+", miss) and "asked" in miss


def test_a_model_that_was_told_nothing_must_know_nothing():
    good = {"model": 3.0, "unigram": 6.0, "trigram": 5.0, "trigram_few": 4.0}
    for colon, count in ((0.09, 0), (0.3, 1), (-0.11, 1)):
        skills = {"colon": {"held-out": {"skill": colon}}, "is": {"held-out": {"skill": 0.0}}}
        measured = {"losses": {"held-out": good}, "entropy_bits": {}, "skills": skills}
        assert len(missed(measured, INDIFFERENT)) == count


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
