"""The study of models that learn one primitive: what their lists teach is the process's own exact answer."""

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product
from random import Random

import numpy as np
import pytest
import torch
import transformers
from sklearn.metrics import roc_auc_score

from llmgeom.model import hub
from llmgeom.prompts import nonce
from llmgeom.prompts.nonce import Part
from llmgeom.prompts.processes import load_process
from studies.lists import Course, _lists, _of_lists, _of_texts, lesson, made_up, prefixes, tokenizer, train
from studies.primitives_in_text import COURSES, SHIPPED, area, areas, words

EVERY = sorted(COURSES["nothing"].processes)


@pytest.mark.parametrize("name", EVERY)
def test_a_list_is_read_as_it_is_written_and_asks_at_its_marks(name):
    process, rng = load_process(name), Random(f"test/{name}")
    for _ in range(20):
        row = lesson(process, rng)
        text = tokenizer().decode(row.ids)
        assert tokenizer()(text)["input_ids"] == row.ids, "no token spans two parts that are encoded apart"
        assert set(row.marks) >= {row.ids[place + 1] for place in row.places} and len(row.places) > max(process.KS)
        np.testing.assert_allclose(row.exact.sum(1), 1, atol=1e-9)
        shown = [row.exact[i, row.marks.index(row.ids[place + 1])] for i, place in enumerate(row.places)]
        assert min(shown) > 0, "a mark that cannot follow was shown"


@pytest.mark.parametrize(("name", "labels"), [("recall", 4), ("bijection", 5)])
def test_items_that_come_again_have_their_mark_again(name, labels):
    process, seen_again = load_process(name), 0
    for i in range(60):
        draws = prefixes(process, Random(i))
        exact = process.predictive(draws).exp().numpy()
        stored: dict[int, int] = {}
        for draw, p in zip(draws, exact, strict=True):
            item = draw.items[-1]
            if item in stored:
                seen_again += 1
                expected = np.eye(labels)[stored[item]]
                assert draw.following == stored[item]
            else:
                left = [name == "recall" or mark not in stored.values() for mark in range(labels)]
                expected = np.array(left) / sum(left)
            np.testing.assert_allclose(p, expected, atol=1e-12)
            stored[item] = draw.following
    assert seen_again > 200


def test_lists_use_no_noun_of_the_examination_and_made_up_words_are_whole():
    asked, rng = set(nonce.carriers(Part.HELD_OUT)), Random(0)
    words = Counter(word for _ in range(200) for word in made_up(8, rng))
    assert not asked & words.keys() and not [word for word in words if word.startswith(nonce.LABELS)]
    process = load_process("recall")
    for i in range(40):
        text = tokenizer().decode(lesson(process, Random(i)).ids)
        assert not asked & set(text.replace(":", " ").replace(",", " ").replace(";", " ").replace(".", " ").split())


def test_marks_that_say_nothing_are_even_whatever_the_list_shows():
    process, rng, seen = load_process("recall"), Random(0), Counter()
    for _ in range(200):
        row = lesson(process, rng, says=False)
        np.testing.assert_array_equal(row.exact, np.full_like(row.exact, 1 / process.answers))
        seen.update(row.marks.index(row.ids[place + 1]) for place in row.places)
    counts = np.array([seen[mark] for mark in range(process.answers)])
    assert abs(counts / counts.sum() - 1 / process.answers).max() < 0.03  # 2,400 marks: an sd is .009


def test_training_changes_the_model_and_repeats_itself():
    course = replace(COURSES["bind"], steps=4, lists=4)
    (one, curve), (again, repeated) = (train("llama", "bind", course) for _ in range(2))
    assert curve == repeated and set(curve[-1]) <= set(course.processes)
    for a, b in zip(one.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    silent, _ = train("llama", "bind", replace(course, says=False))
    other, _ = train("llama-noicl", "bind", course)
    assert not torch.equal(one.lm_head.weight, silent.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)


def test_a_second_course_goes_on_where_the_first_ended_and_texts_come_as_often_as_said():
    first = Course(("beta", "recall"), steps=4, lists=2, at_once=2, texts=2)
    second = replace(first, processes=("beta",), steps=3, texts=0)
    (_, alone), (model, both) = train("llama", "x", first), train("llama", "x", first, second)
    assert both[:1] == alone and len(both) == 2 and "texts" in both[0] and set(both[1]) == {"beta"}
    untouched, _ = train("llama", "x", second)
    assert not torch.equal(model.lm_head.weight, untouched.lm_head.weight)
    lists = _lists(replace(first, lists=5, at_once=4), Random(0))
    lengths = [sorted(len(row.ids) for row in next(lists)) for _ in range(4)]
    lengths.sort()
    assert all(a[-1] <= b[0] for a, b in pairwise(lengths)), "lists of a step are of like length"


def test_the_loss_of_texts_is_that_of_transformers():
    model = transformers.AutoModelForCausalLM.from_pretrained(hub.POCKET / "llama", dtype=torch.float32)
    windows = torch.randint(1, 1024, (3, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(_of_texts(model, windows), model(windows, labels=windows).loss)


def test_the_loss_of_a_step_is_that_of_each_list_alone():
    """Cross-entropy with the exact probabilities, list by list and mark by mark, without padding."""
    model = transformers.AutoModelForCausalLM.from_pretrained(hub.POCKET / "llama", dtype=torch.float32)
    rows = [lesson(load_process(name), Random(i)) for i, name in enumerate(("beta", "recall", "hmm"))]
    losses, lost = [], {}
    with torch.no_grad():
        loss, by_process = _of_lists(model, rows)
        for row in rows:
            log_p = model(torch.tensor([row.ids])).logits[0].double().log_softmax(-1).numpy()
            each = [
                -(exact * log_p[place, row.marks]).sum() for place, exact in zip(row.places, row.exact, strict=True)
            ]
            own = [-sum(p * math.log(p) for p in exact if p > 0) for exact in row.exact]
            losses += each
            lost[row.process] = [np.subtract(each, own).mean() / math.log(2)]
    assert loss.item() == pytest.approx(np.mean(losses), abs=1e-5)
    assert by_process.keys() == lost.keys() and all(by_process[k] == pytest.approx(lost[k], abs=1e-4) for k in lost)


def test_areas_compare_models_of_one_parent_and_process_and_count_words():
    """Planted: in `hmm` the taught model of each parent has the best skill, but parents differ more than courses."""

    def result(parent: int, taught: bool) -> dict:
        skill = 10 * parent + taught
        one = {"low": 0.0, "high": 0.0, "word": "holds" if taught else "open"}
        measures = {
            "skill": {"value": skill, **one},
            "skill over the best constant": {"value": skill, **one},
            "KL(a || b)": {"value": -skill, **one},
            "rho": {"value": 0, **one},
        }
        claims = {claim: {"value": skill, **one} for claim in ("accumulates", "transports", "binds")}
        return {"read": dict.fromkeys(EVERY, measures) | {"profile": claims}}

    models = {
        f"{parent}/{name}": result(parent, name == "transport") for parent in range(5) for name in (*COURSES, SHIPPED)
    }
    found = areas(models)["transport"]
    assert found["skill"]["value"] == 1 and found["skill"]["p"] == pytest.approx(1 / 5**5)
    assert (found["rho"]["value"], found["rho"]["p"]) == (0.5, 1)
    assert found["KL(a || b)"]["value"] == 0, "nearer to 0 is better"
    assert areas(models)["bind"]["skill"]["value"] == pytest.approx(0.375), "below one of four, equal to three"
    assert words(models)["transports"] == {"taught": {"holds": 5}, "others": {"open": 20}}
    assert words(models)["uses: transport"] == {"taught": {"holds": 5}, "others": {"open": 20}}
    assert words(models)["uses: bind"]["taught"] == {"open": 10}, "two processes"
    assert words(models)["binds"] == {"taught": {"open": 5}, "others": {"open": 15, "holds": 5}}


def test_an_area_is_that_of_scikit_learn_and_its_p_that_of_every_relabelling():
    scores = np.random.default_rng(0).normal(size=(2, 3, 4)).round(1)
    found = area(scores, 2)
    expected = [roc_auc_score(np.arange(4) == 2, row) for row in scores.reshape(6, 4)]
    assert found["value"] == pytest.approx(np.mean(expected))

    def of(chosen: tuple[int, ...]) -> float:
        return np.mean([roc_auc_score(np.arange(4) == c, scores[k, i]) for k in range(2) for i, c in enumerate(chosen)])

    every = np.array([of(chosen) for chosen in product(range(4), repeat=3)])
    assert found["p"] == pytest.approx(np.mean(abs(every - 0.5) >= abs(found["value"] - 0.5) - 1e-9))
