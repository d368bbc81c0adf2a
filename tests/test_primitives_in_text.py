"""The study of models that learn one primitive: what their lists teach is the process's own exact answer."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest
import torch

from llmgeom.prompts import nonce
from llmgeom.prompts.nonce import Part
from llmgeom.prompts.processes import load_process
from studies.primitives_in_text import COURSES, Spec, lesson, made_up, prefixes, table, tokenizer, train

EVERY = sorted({name for names in COURSES.values() for name in names})


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


def test_training_changes_the_model_and_repeats_itself():
    spec = Spec(steps=4, lists=4)
    (one, curve), (again, repeated) = (train("bind", 0, spec) for _ in range(2))
    assert curve == repeated and set(curve[-1]) <= set(COURSES["bind"])
    for a, b in zip(one.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    other, _ = train("bind", 1, spec)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)


def test_a_row_has_each_claim_with_its_interval_and_word():
    claim = {"value": 0.5, "low": 0.4, "high": 0.6, "word": "holds"}
    assert table({"m": {"binds": claim}}) == ["| m | 0.50 [0.40, 0.60], holds |"]
