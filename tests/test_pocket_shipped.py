"""The shipped pocket models are what their cards say."""

import json
import re
from dataclasses import asdict
from itertools import islice
from random import Random

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmgeom.commands.evidence import RunConfig, perform_processes
from llmgeom.model import hub
from llmgeom.model.subject import Subject
from llmgeom.model.tokenizing import fitting
from llmgeom.probes.evidence.answers import RESOLUTION
from llmgeom.prompts import nonce
from llmgeom.prompts.domains import Domain
from llmgeom.prompts.nonce import Part
from llmgeom.prompts.processes import load_process, names
from studies import corpus, evaluate, label_sequences, pocket, pocket_evidence
from studies.evaluate import Demands, missed
from studies.lists import lesson, tokenizer
from studies.pocket import POCKETS
from studies.pocket_evidence import MEASURES, PARENT, TAUGHT
from studies.training_data import domains, sha256
from tests.pocket_models import examined


@pytest.fixture(scope="module", params=POCKETS)
def shipped(request):
    """A shipped folder and its card."""
    folder = hub.POCKET / request.param
    return folder, json.loads((folder / "card.json").read_text())


def test_what_is_shipped_can_be_rebuilt():
    assert set(hub.pockets()) == {*POCKETS, *pocket_evidence.TAUGHT}


def folder_and_card(name):
    folder = hub.POCKET / name
    return folder, json.loads((folder / "card.json").read_text())


# The weights of every card are compared by their hash; that a card says what they do, with one model and format each.
@pytest.mark.slow
def test_the_shipped_losses_are_those_of_its_card():
    folder, card = folder_and_card("pythia")
    rows = examined(folder)
    again = evaluate.losses(evaluate.stored(folder), rows)
    for which in ("held-out", "seen"):
        assert again[which]["model"] == pytest.approx(card["losses"][which]["model"], abs=1e-3)
        assert again[which]["tokens"] == card["losses"][which]["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "name"), [*zip(("llama", "phi"), sorted(nonce.FORMATS), strict=True)])
def test_the_shipped_skills_are_those_of_its_card(model, name, monkeypatch):
    folder, card = folder_and_card(model)
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
    subject = evaluate.stored(folder)
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


# ---- models taught on lists ------------------------------------------------------------------------------------------


def card_of(name):
    return json.loads((hub.POCKET / name / "card.json").read_text())


@pytest.mark.parametrize("name", TAUGHT)
def test_its_card_is_of_the_stored_weights_and_the_claims_hold(name):
    subject, folder, card = Subject.load(f"pocket:{name}"), hub.POCKET / name, card_of(name)
    assert card["weights"]["stored"] == subject.weight_hash and card["parameters"] == subject.facts["parameters"]
    assert card["weights"]["parent"] == Subject.load(f"pocket:{PARENT}").weight_hash
    assert all(card["evidence"][process][RESOLUTION]["word"] == "holds" for process in TAUGHT[name].holds)
    assert {*card["evidence"]} == {*names()}
    assert (folder / "model.safetensors").stat().st_size < 2.1e6
    # JSON has lists where a course has tuples.
    assert json.loads(json.dumps([asdict(course) for course in TAUGHT[name].courses])) == card["courses"]
    assert (folder / "tokenizer.json").read_bytes() == (hub.POCKET / PARENT / "tokenizer.json").read_bytes()
    assert (folder / "card.md").read_text() == pocket_evidence.page(card)


@pytest.mark.parametrize("name", TAUGHT)
def test_less_is_resolved_of_what_a_model_was_not_taught(name):
    """Some all the same: a model that counts follows a part of what a hidden chain says."""
    # The parent had seen two-point and uniform shares as label sequences (`studies.label_sequences.PRIORS`).
    taught = {process for course in TAUGHT[name].courses for process in course.processes} | {"two-point", "beta"}
    resolved = {process: of[RESOLUTION]["value"] for process, of in card_of(name)["evidence"].items()}
    untaught = max(value for process, value in resolved.items() if process not in taught)
    assert untaught < min(resolved[process] for process in TAUGHT[name].holds) - 0.2


def test_its_training_lists_have_none_of_the_nouns_of_a_prompt():
    rng, read = Random(0), tokenizer()
    for name in names():
        process = load_process(name)
        words = re.findall(r"\w+", " ".join(process.sample(20, 0, read).text))
        assert set(words) & set(nonce.carriers(Part.HELD_OUT))
        for _ in range(20):
            row = lesson(process, rng)
            assert set(re.findall(r"\w+", read.decode(row.ids))).isdisjoint(nonce.carriers(Part.HELD_OUT))


@pytest.mark.slow
@pytest.mark.parametrize("name", TAUGHT)
def test_its_answers_have_the_skill_and_its_texts_the_loss_of_the_card(name, tmp_path):
    asked = RunConfig(model=f"pocket:{name}", processes=("recall",), nulls=1, out=str(tmp_path / "run"))
    (record,) = perform_processes(asked)[1]
    estimates = {one.name: one for measured in record.results.values() for one in measured.estimates}
    card = card_of(name)
    for measure in MEASURES:
        again, stored = estimates[measure], card["evidence"]["recall"][measure]
        assert again.value == pytest.approx(stored["value"], abs=1e-3)
        assert (again.low, again.high) == pytest.approx((stored["low"], stored["high"]), abs=1e-3)
    losses = evaluate.losses(evaluate.stored(hub.POCKET / name), examined(hub.POCKET / PARENT))
    for which, of in card["losses"].items():
        assert losses[which]["model"] == pytest.approx(of["model"], abs=1e-3)
