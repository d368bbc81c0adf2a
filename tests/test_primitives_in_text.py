"""The study of models that learn one primitive: what their lists teach is the process's own exact answer."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from llmgeom.prompts import nonce
from llmgeom.prompts.nonce import Part
from llmgeom.prompts.processes import load_process
from studies.lists import lesson, made_up, prefixes, tokenizer, train
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
