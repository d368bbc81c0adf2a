"""The plan is a pure function that keeps to its budget and loses nobody."""

from itertools import pairwise, product

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from llmgeom.errors import UserError
from llmgeom.model.batching import PASS, BatchRules, plan_batches
from tests.refusals import refused

# A loaded machine is no fault of the plan's.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
lengths = st.lists(st.integers(1, 60), max_size=40)


@patient
@given(
    st.lists(st.integers(1, 900), max_size=8),
    st.integers(1, 2000),
    st.sampled_from((1, 128, PASS)),
    st.sampled_from((1, 2, 3, None)),
)
def test_no_other_grouping_in_order_of_length_costs_less(lengths, budget, further, most):
    ordered = sorted(lengths, reverse=True)
    n = len(ordered)

    def cost(parts):
        return sum(further + len(part) * part[0] for part in parts)

    every = []
    for cuts in product((False, True), repeat=max(n - 1, 0)):
        ends = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), n]
        parts = [ordered[a:b] for a, b in pairwise(ends) if b > a]
        if all(len(part) == 1 or len(part) * part[0] <= budget for part in parts) and (
            most is None or all(len(part) <= most for part in parts)
        ):
            every.append(cost(parts))
    ours = [
        [lengths[i] for i in batch] for batch in plan_batches(lengths, budget, BatchRules((), further, prompts=most))
    ]
    assert [x for part in ours for x in part] == ordered, "every prompt runs once"
    assert all(len(part) == 1 or len(part) * part[0] <= budget for part in ours)
    assert cost(ours) == min(every)


@patient
@given(lengths, st.integers(1, 200), st.sets(st.integers(1, 60), max_size=2))
def test_no_batch_crosses_a_border_and_without_one_nothing_changes(lengths, budget, borders):
    for batch in plan_batches(lengths, budget, BatchRules(tuple(borders))):
        for border in borders:
            assert len({lengths[i] > border for i in batch}) == 1
    assert plan_batches(lengths, budget, BatchRules((60,))) == plan_batches(lengths, budget)


def test_a_budget_below_one_is_refused():
    with refused(UserError, "--batch-tokens 0", 1):
        plan_batches([3], 0)


@pytest.mark.parametrize(("vocabulary", "prompts"), [(50_304, 83), (128_256, 32), (512, 8192), (10**7, 1)])
def test_the_log_probabilities_of_a_batch_on_a_cpu_take_16_mib(vocabulary, prompts):
    """Or those of one prompt, which cannot be divided."""
    rules = BatchRules.of({"device": "cpu", "vocabulary": vocabulary}, None)
    assert rules.prompts == prompts and (prompts == 1 or 4 * prompts * vocabulary <= 16 * 2**20)
    assert BatchRules.of({"device": "cuda:0", "vocabulary": vocabulary}, None).prompts is None
    assert max(map(len, plan_batches([1] * 300, 4096, rules))) == min(prompts, 300)
