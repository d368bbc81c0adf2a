"""The shipped pocket models are what their cards say."""

import json
from itertools import islice

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmgeom.model import hub
from llmgeom.model.subject import Subject
from llmgeom.model.tokenizing import fitting
from llmgeom.prompts import nonce
from llmgeom.prompts.domains import Domain
from studies import corpus, label_sequences, pocket, pocket_evidence
from studies import evaluate as exam
from studies.evaluate import Demands, missed
from studies.pocket import POCKETS
from studies.training_data import domains, sha256
from tests.pocket_models import examined


@pytest.fixture(scope="module", params=POCKETS)
def shipped(request):
    """A shipped folder and its card."""
    folder = hub.POCKET / request.param
    return folder, json.loads((folder / "card.json").read_text())


def test_what_is_shipped_can_be_rebuilt():
    assert set(hub.pockets()) == {*POCKETS, *pocket_evidence.TAUGHT}


@pytest.mark.slow
def test_the_shipped_losses_are_those_of_its_card(shipped):
    folder, card = shipped
    rows = examined(folder)
    again = exam.losses(exam.stored(folder), rows)
    for which in ("held-out", "seen"):
        assert again[which]["model"] == pytest.approx(card["losses"][which]["model"], abs=1e-3)
        assert again[which]["tokens"] == card["losses"][which]["tokens"]


@pytest.mark.slow
def test_the_shipped_skills_are_those_of_its_card(shipped, monkeypatch):
    folder, card = shipped
    # One format a model, to save seconds; each is examined in some.
    name = sorted(nonce.FORMATS)[sorted(POCKETS).index(folder.name) % 2]
    monkeypatch.setattr(nonce, "FORMATS", {name: nonce.FORMATS[name]})
    again = exam.evidence(exam.stored(folder), card["spec"]["fillings"], sets=("held-out",))[name]["held-out"]
    assert again["skill"] == pytest.approx(card["skills"][name]["held-out"]["skill"], abs=1e-3)
    assert again["label_mass"] == pytest.approx(card["skills"][name]["held-out"]["label_mass"], abs=1e-3)
    for form in card["skills"]:
        assert abs(card["skills_at_step_0"][form]["held-out"]["skill"]) < 0.25


def test_a_shipped_model_has_no_unsaid_miss(shipped):
    folder, card = shipped
    assert card["misses_of_the_usual_demands"] == missed(card, POCKETS[folder.name].demands)
    assert not missed(card, Demands(**card["demands"]))
    for miss in card["misses_of_the_usual_demands"]:
        assert miss in (folder / "card.md").read_text()


def test_a_shipped_model_is_small_and_loads_from_its_folder(shipped):
    folder, _ = shipped
    assert (folder / "model.safetensors").stat().st_size <= 2.1e6
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 2.5e6
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert model.config.vocab_size == len(tokenizer) == 1024
    assert tokenizer("a")["input_ids"] == tokenizer("a", add_special_tokens=False)["input_ids"]


def test_every_label_is_one_token_of_a_shipped_tokenizer_and_all_have_the_same(shipped):
    folder, _ = shipped
    tokenizer, first = (
        AutoTokenizer.from_pretrained(f, local_files_only=True) for f in (folder, hub.POCKET / "pythia")
    )
    assert {len(tokenizer(f" {label}")["input_ids"]) for label in nonce.LABELS} == {1}
    assert tokenizer.backend_tokenizer.to_str() == first.backend_tokenizer.to_str()


def test_a_sliding_window_hides_something_of_most_prompts_of_mixed(shipped):
    folder, _ = shipped
    subject = exam.stored(folder)
    pool = Domain("mixed").sample(600, 0)
    lengths = subject.tokens(fitting(subject, pool)).lengths
    assert len(lengths) >= 595
    if subject.facts["window"]:
        assert 0.3 < subject.facts["window"] / lengths.double().median() < 0.6


def test_a_shipped_model_has_the_settings_a_rebuild_would_use(shipped):
    folder, card = shipped
    assert pocket.Pocket(**card["spec"]) == POCKETS[folder.name]


def test_step_0_of_a_shipped_model_is_where_its_training_began(shipped):
    folder, card = shipped
    began = Subject.of(pocket.Pocket(**card["spec"]).start()).weight_hash
    assert began == card["weights"]["start"]
    assert Subject.load(f"pocket:{folder.name}@step0", device="cpu", offline=True).weight_hash == began


def test_the_streams_still_say_what_a_shipped_model_was_trained_on(shipped):
    _, card = shipped
    seed, told = card["spec"]["text_seed"], card["spec"]["informative"]
    streams = {"corpus": corpus.texts(domains(), seed), "evidence": label_sequences.sequences(seed, told)}
    for name, stream in streams.items():
        now = sha256(list(islice(stream, 1000)))
        assert now == card[name]["sha256_of_first_1000"], f"the {name} changed; rebuild: {card['command']}"
