"""Models taught on lists are what their cards say, and no list had a noun of `llmgeom evidence`."""

import json
import re
from dataclasses import asdict
from random import Random

import pytest

from llmgeom.commands.evidence import RunConfig, perform_processes
from llmgeom.model import hub
from llmgeom.model.subject import Subject
from llmgeom.prompts import nonce
from llmgeom.prompts.nonce import Part
from llmgeom.prompts.processes import load_process, names
from studies import evaluate as exam
from studies import pocket_evidence
from studies.lists import lesson, tokenizer
from studies.pocket_evidence import MEASURES, PARENT, PROFILE, TAUGHT
from tests.pocket_models import examined

KINDS = {"accumulates": "accumulate", "transports": "transport", "binds": "bind"}


def card_of(name):
    return json.loads((hub.POCKET / name / "card.json").read_text())


@pytest.mark.parametrize("name", TAUGHT)
def test_its_card_is_of_the_stored_weights_and_the_claims_hold(name):
    subject, folder, card = Subject.load(f"pocket:{name}"), hub.POCKET / name, card_of(name)
    assert card["weights"]["stored"] == subject.weight_hash and card["parameters"] == subject.facts["parameters"]
    assert card["weights"]["parent"] == Subject.load(f"pocket:{PARENT}").weight_hash
    assert all(card["evidence"][PROFILE][claim]["word"] == "holds" for claim in TAUGHT[name].holds)
    assert {*card["evidence"]} == {*names(), PROFILE}
    assert (folder / "model.safetensors").stat().st_size < 2.1e6
    # JSON has lists where a course has tuples.
    assert json.loads(json.dumps([asdict(course) for course in TAUGHT[name].courses])) == card["courses"]
    assert (folder / "tokenizer.json").read_bytes() == (hub.POCKET / PARENT / "tokenizer.json").read_bytes()
    assert (folder / "card.md").read_text() == pocket_evidence.page(card)


@pytest.mark.parametrize("name", TAUGHT)
def test_a_profile_has_no_claim_that_a_model_was_not_taught(name):
    processes = {process for course in TAUGHT[name].courses for process in course.processes}
    primitives = {load_process(process).PRIMITIVE for process in processes}
    claims = card_of(name)["evidence"][PROFILE]
    assert {*claims} == {*KINDS}
    assert {claim for claim, of in claims.items() if of["word"] == "holds"} == {*TAUGHT[name].holds}
    assert {KINDS[claim] for claim in TAUGHT[name].holds} <= primitives


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
    for measure in MEASURES.values():
        again, stored = estimates[measure], card["evidence"]["recall"][measure]
        assert again.value == pytest.approx(stored["value"], abs=1e-3)
        assert (again.low, again.high) == pytest.approx((stored["low"], stored["high"]), abs=1e-3)
    losses = exam.losses(exam.stored(hub.POCKET / name), examined(hub.POCKET / PARENT))
    for which, of in card["losses"].items():
        assert losses[which]["model"] == pytest.approx(of["model"], abs=1e-3)
