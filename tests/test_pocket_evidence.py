"""pocket:llama-evidence is what its card says, and its training had none of the nouns of `llmgeom evidence`."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from random import Random

import pytest

from llmgeom.commands.processes.request import RunConfig
from llmgeom.commands.processes.several import perform_processes
from llmgeom.model import hub
from llmgeom.model.subject import Subject
from llmgeom.prompts import nonce
from llmgeom.prompts.nonce import Part
from llmgeom.prompts.processes import load_process, names
from studies import evaluate as exam
from studies import pocket_evidence
from studies.lists import lesson, tokenizer
from studies.pocket_evidence import HOLDS, MEASURES, NAME, PARENT, PROFILE, SHARES
from tests.pocket_models import examined

FOLDER = hub.POCKET / NAME


@pytest.fixture(scope="module")
def card():
    return json.loads((FOLDER / "card.json").read_text())


def test_its_card_is_of_the_stored_weights_and_the_claims_hold(card):
    subject = Subject.load(f"pocket:{NAME}")
    assert card["weights"]["stored"] == subject.weight_hash and card["parameters"] == subject.facts["parameters"]
    assert card["weights"]["parent"] == Subject.load(f"pocket:{PARENT}").weight_hash
    assert all(card["evidence"][PROFILE][name]["word"] == "holds" for name in HOLDS)
    assert {*card["evidence"]} == {*names(), PROFILE} and {*SHARES} == {*names()} - {"hmm"}
    assert (FOLDER / "model.safetensors").stat().st_size < 2.1e6
    # JSON has lists where a course has tuples.
    assert json.loads(json.dumps([asdict(course) for course in pocket_evidence.courses()])) == card["courses"]
    assert (FOLDER / "tokenizer.json").read_bytes() == (hub.POCKET / PARENT / "tokenizer.json").read_bytes()
    assert (FOLDER / "card.md").read_text() == pocket_evidence.page(card)


def test_its_training_lists_have_none_of_the_nouns_of_a_prompt():
    rng, read = Random(0), tokenizer()
    for name in SHARES:
        process = load_process(name)
        words = re.findall(r"\w+", " ".join(process.sample(20, 0, read).text))
        assert set(words) & set(nonce.carriers(Part.HELD_OUT))
        for _ in range(20):
            row = lesson(process, rng)
            assert set(re.findall(r"\w+", read.decode(row.ids))).isdisjoint(nonce.carriers(Part.HELD_OUT))


@pytest.mark.slow
def test_its_answers_have_the_skill_and_its_texts_the_loss_of_the_card(card, tmp_path):
    asked = RunConfig(model=f"pocket:{NAME}", processes=("recall",), nulls=1, out=str(tmp_path / "run"))
    (record,) = perform_processes(asked)[1]
    estimates = {one.name: one for measured in record.results.values() for one in measured.estimates}
    for measure in MEASURES.values():
        again, stored = estimates[measure], card["evidence"]["recall"][measure]
        assert again.value == pytest.approx(stored["value"], abs=1e-3)
        assert (again.low, again.high) == pytest.approx((stored["low"], stored["high"]), abs=1e-3)
    losses = exam.losses(exam.stored(FOLDER), examined(hub.POCKET / PARENT))
    for which, of in card["losses"].items():
        assert losses[which]["model"] == pytest.approx(of["model"], abs=1e-3)
