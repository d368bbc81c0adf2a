"""The plan is a pure function that keeps to its budget and loses nobody."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from llmgeom.errors import UserError
from llmgeom.model.batching import plan_batches
from tests.refusals import refused

lengths = st.lists(st.integers(1, 60), max_size=40)


@given(lengths, st.integers(1, 200))
def test_every_prompt_runs_exactly_once(lengths, budget):
    members = [i for batch in plan_batches(lengths, budget) for i in batch]
    assert sorted(members) == list(range(len(lengths)))


@given(lengths, st.integers(1, 200))
def test_a_batch_keeps_to_the_budget_unless_a_prompt_alone_exceeds_it(lengths, budget):
    for batch in plan_batches(lengths, budget):
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget


@given(lengths, st.integers(1, 200))
def test_no_two_neighbours_could_have_run_together(lengths, budget):
    batches = plan_batches(lengths, budget)
    for one, two in pairwise(batches):
        assert (len(one) + 1) * lengths[one[0]] > budget
        assert lengths[one[0]] >= lengths[two[0]]


def test_a_budget_below_one_is_refused():
    with refused(UserError, "--batch-tokens 0", 1):
        plan_batches([3], 0)
