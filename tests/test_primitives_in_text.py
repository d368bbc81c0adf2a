"""The study of small models that learn one primitive: what their lists teach is the process's own exact answer."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from llmgeom.prompts.process import Draw
from llmgeom.prompts.processes import load_process
from studies.primitives_in_text import COURSES, PROCESS, Spec, areas, asked_pairs, drawn, tokenizer, train, written


@pytest.mark.parametrize("course", PROCESS)
def test_a_list_teaches_the_exact_answer_of_its_process(course):
    process, rng = load_process(PROCESS[course]), Random("test")
    for items in (list(range(10)), [0, 1, 0, 2, 1, 1, 3, 0, 2, 3]):
        seen, p = drawn(course, items, rng)
        prefixes = [Draw(tuple(seen[:k]), seen[k], tuple(items[: k + 1])) for k in range(10)]
        np.testing.assert_allclose(p, process.predictive(prefixes).exp().numpy(), atol=1e-12)


def test_marks_follow_their_process_or_nothing():
    def ones(course, items, chosen):
        rows = [drawn(course, items, Random(f"{course}/{i}"))[0] for i in range(800)]
        return np.mean([chosen(row) for row in rows])

    again = [0, 1, 0]
    assert ones("recall", again, lambda row: row[0] == row[2]) == 1
    assert ones("noise", again, lambda row: row[0] == row[2]) == pytest.approx(1 / 2, abs=0.06)
    # P(two marks of one Beta(1, 1) share are equal) = 2/3; after an equal mark Markov rows from Beta(1/2, 1/2) give 3/4
    assert ones("coin", again, lambda row: row[0] == row[2]) == pytest.approx(2 / 3, abs=0.06)
    runs = [drawn("markov", again, Random(f"m/{i}"))[0] for i in range(2000)]
    assert np.mean([a == c for a, b, c in runs if a == b]) == pytest.approx(3 / 4, abs=0.06)


@pytest.mark.parametrize("course", COURSES)
def test_a_list_asks_for_its_marks_and_not_about_pairs_of_the_examination(course):
    for i in range(20):
        ids, places, exact = written(course, Random(f"w/{i}"))
        marks = {tokenizer().decode(ids[place]).strip() for place in places}
        assert marks <= {word.strip(":,. ") for word in tokenizer().decode(ids).split(".")[0].split()}
        assert frozenset(marks) not in asked_pairs()
        np.testing.assert_allclose(exact.sum(1), 1, atol=1e-6)
        assert all(exact[j, ids[place]] > 0 for j, place in enumerate(places)) and ((exact > 0).sum(1) <= 2).all()


def test_an_area_is_one_for_a_measure_that_tells_and_a_half_for_one_that_is_equal():
    cells = {
        (course, seed): {process: {"tells": seed + (PROCESS.get(course) == process), "equal": 0.0}
                         for process in PROCESS.values()}
        for course in COURSES for seed in range(5)
    }  # fmt: skip
    found = areas(cells)
    assert {name: one.value for (_, name), one in found.items()} == {"tells": 1.0, "equal": 0.5}
    assert {(one.positives, one.negatives, one.pairs) for one in found.values()} == {(5, 15, 15)}


def test_training_lowers_the_loss_over_the_marks_and_repeats_itself():
    spec = Spec(steps=101, hidden=16, lists=2, texts=1)
    (_, one), (_, again) = (train("coin", 0, spec) for _ in range(2))
    assert one == again and one[1] < one[0]
