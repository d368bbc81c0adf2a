"""The shipped pocket models are what their cards say."""

import json
from dataclasses import asdict
from functools import cache
from itertools import islice

import pytest

from llmgeom.model import hub
from llmgeom.model.model import Model
from llmgeom.probes.evidence.answers import RESOLUTION
from llmgeom.prompts import nonce
from llmgeom.wind_tunnels import names
from studies import corpus, evaluate, label_sequences, pocket, pocket_evidence
from studies.evaluate import Demands, missed
from studies.pocket import POCKETS
from studies.pocket_evidence import PARENT, TAUGHT
from studies.training_data import domains, sha256
from tests.pocket_models import examined


@pytest.fixture(scope="module", params=POCKETS)
def shipped(request):
    """A shipped folder and its card."""
    return hub.POCKET / request.param, card_of(request.param)


def test_what_is_shipped_can_be_rebuilt():
    assert set(hub.pockets()) == {*POCKETS, *pocket_evidence.TAUGHT}


def card_of(name):
    return json.loads((hub.POCKET / name / "card.json").read_text())


# The weights of every card are compared by their hash; that a card says what they do, with one model and format each.
@pytest.mark.slow
def test_the_shipped_losses_are_those_of_its_card():
    folder, card = hub.POCKET / "pythia", card_of("pythia")
    rows = examined(folder)
    again = evaluate.losses(evaluate.stored(folder), rows)
    for which in ("held-out", "seen"):
        assert again[which]["model"] == pytest.approx(card["losses"][which]["model"], abs=1e-3)
        assert again[which]["tokens"] == card["losses"][which]["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "name"), [*zip(("llama", "phi"), sorted(nonce.FORMATS), strict=True)])
def test_the_shipped_skills_are_those_of_its_card(model, name, monkeypatch):
    folder, card = hub.POCKET / model, card_of(model)
    monkeypatch.setattr(nonce, "FORMATS", {name: nonce.FORMATS[name]})
    again = evaluate.evidence(evaluate.stored(folder), card["spec"]["fillings"], sets=("held-out",))[name]["held-out"]
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


def test_step_0_of_a_shipped_model_is_where_its_training_began(shipped):
    folder, card = shipped
    began = Model.of(pocket.Pocket(**card["spec"]).start()).weight_hash
    assert began == card["weights"]["start"]
    assert Model.load(f"pocket:{folder.name}@step0", device="cpu", offline=True).weight_hash == began


@cache
def beginnings(seed, told):
    streams = {"corpus": corpus.texts(domains(), seed), "evidence": label_sequences.sequences(seed, told)}
    return {name: sha256(list(islice(stream, 1000))) for name, stream in streams.items()}


def test_the_streams_still_say_what_a_shipped_model_was_trained_on(shipped):
    _, card = shipped
    seed, told = card["spec"]["text_seed"], card["spec"]["informative"]
    for name, now in beginnings(seed, told).items():
        assert now == card[name]["sha256_of_first_1000"], f"the {name} changed; rebuild: {card['command']}"


# ---- models taught on lists ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TAUGHT)
def test_its_card_is_of_the_stored_weights_and_the_claims_hold(name):
    subject, folder, card = Model.load(f"pocket:{name}"), hub.POCKET / name, card_of(name)
    assert card["weights"]["stored"] == subject.weight_hash and card["parameters"] == subject.facts["parameters"]
    assert card["weights"]["parent"] == Model.load(f"pocket:{PARENT}").weight_hash
    assert all(card["evidence"][process][RESOLUTION]["word"] == "holds" for process in TAUGHT[name].holds)
    assert {*card["evidence"]} <= {*names(text=True)}
    assert (folder / "model.safetensors").stat().st_size < 2.1e6
    # JSON has lists where a course has tuples.
    assert json.loads(json.dumps([asdict(course) for course in TAUGHT[name].courses])) == card["courses"]
    assert (folder / "tokenizer.json").read_bytes() == (hub.POCKET / PARENT / "tokenizer.json").read_bytes()
    assert (folder / "card.md").read_text() == pocket_evidence.page(card)
