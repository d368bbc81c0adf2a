"""What any rearrangement, renaming or expectation must leave of an exact answer."""

import pytest
import torch

from llmgeom.task import seeded
from llmgeom.wind_tunnels.tasks.bijection import Bijection
from llmgeom.wind_tunnels.tasks.coin import Coin
from llmgeom.wind_tunnels.tasks.recall import Recall
from llmgeom.wind_tunnels.tasks.recurrence import Recurrence


@pytest.mark.parametrize(
    "task", [Bijection(5, 4), Bijection(5, 7, True), Recall(3, 3, 1, 5, 6), Recall(3, 2, 2, 5, 6, "papers")]
)
def test_other_names_for_keys_and_values_rename_the_answer(task):
    inputs, first = task.draw_split(50, seeded("here", 0)).inputs, task.answers.tokens[0]
    keys = task.keys if isinstance(task, Recall) else task.vocab
    name = torch.arange(task.vocabulary)
    for start, count in ((first - keys, keys), (first, len(task.answers.tokens))):
        name[start : start + count] = start + torch.randperm(count, generator=seeded("names", start))
    renamed = task.log_predictive(name[inputs])
    values = name[first : first + len(task.answers.tokens)] - first
    assert torch.equal(renamed[..., values], task.log_predictive(inputs))
    for label, answer in task.trivial(name[inputs]).items():
        assert torch.equal(answer[..., values], task.trivial(inputs)[label])


def test_an_affine_change_of_all_numbers_changes_what_a_recurrence_says_alike():
    task = Recurrence(modulus=7, steps=6)
    inputs = task.draw_split(200, seeded("here", 0)).inputs
    name = (3 * torch.arange(7) + 2) % 7
    for answer in (task.log_predictive, lambda inputs: task.trivial(inputs)["memoryless"]):
        torch.testing.assert_close(answer(name[inputs])[..., name], answer(inputs))
    torch.testing.assert_close(task.log_belief(name[inputs]), task.log_belief(inputs))


def test_names_of_numbers_do_not_matter_to_an_opaque_recurrence():
    plain, opaque = Recurrence(modulus=7, steps=6), Recurrence(modulus=7, steps=6, opaque=True)
    drawn = opaque.draw_split(100, seeded("here", 0))
    name = drawn.inputs[:, 1:8]
    assert torch.equal(name.sort(1).values, torch.arange(7, 14).expand(100, 7))
    assert drawn.inputs[:, [0, 8]].tolist() == [[14, 15]] * 100
    numbers = (name[:, None] == drawn.inputs[:, 9:, None]).long().argmax(-1)
    torch.testing.assert_close(opaque.log_belief(drawn.inputs), plain.log_belief(numbers))
    by_name = opaque.log_predictive(drawn.inputs).gather(2, (name - 7)[:, None].expand(-1, 5, -1))
    torch.testing.assert_close(by_name, plain.log_predictive(numbers))


def test_the_order_of_flips_does_not_matter():
    inputs = torch.tensor([[2, 0, 0, 1, 1, 0], [2, 1, 0, 1, 0, 0]])
    for prior in ("beta:2,3", "list:0.3,0.6"):
        found = Coin(flips=6, prior=prior).log_predictive(inputs)
        torch.testing.assert_close(found[0, -1], found[1, -1])
        assert not torch.allclose(found[0, 2], found[1, 2])


@pytest.mark.parametrize("task", [Bijection(6, 4), Bijection(5, 8, True)])
def test_the_order_of_pairs_does_not_matter(task):
    inputs = task.draw_split(100, seeded("here", 0)).inputs
    pairs = inputs[:, :-1].reshape(100, -1, 2)[:, torch.randperm(task.pairs - 1, generator=seeded("order", 0))]
    shuffled = torch.cat([pairs.flatten(1), inputs[:, -1:]], 1)
    assert not torch.equal(shuffled, inputs)
    assert torch.equal(task.log_predictive(shuffled)[:, -1], task.log_predictive(inputs)[:, -1])


@pytest.mark.parametrize("task", [Coin(flips=8, prior="list:0.1,0.5,0.8"), Recurrence(modulus=5, steps=6)])
def test_the_belief_expected_after_the_next_outcome_is_the_belief_now(task):
    inputs = task.draw_split(100, seeded("here", 0)).inputs
    now, chance = task.log_belief(inputs).exp(), task.log_predictive(inputs).exp()
    for t in range(task.length - 1):
        then = torch.zeros_like(now[:, t])
        for k, token in enumerate(task.answers.tokens):
            after = inputs.clone()
            after[:, t + 1] = token
            then += chance[:, t, k, None] * task.log_belief(after)[:, t + 1].exp()
        torch.testing.assert_close(then, now[:, t])


@pytest.mark.parametrize("task", [Bijection(5, 4), Bijection(4, 5, True)])
def test_what_is_expected_of_a_fixed_key_s_value_stays_what_it_was(task):
    inputs = task.draw_split(100, seeded("here", 0)).inputs
    fixed = 2
    for t in range(task.pairs - 1):
        if not task.replacement:
            inputs = inputs[(inputs[:, : 2 * t + 2 : 2] != fixed).all(1)]  # it cannot be asked twice
        ask = inputs.clone()
        ask[:, 2 * t] = fixed
        now, chance = task.log_predictive(ask)[:, t].exp(), task.log_predictive(inputs)[:, t].exp()
        then = torch.zeros_like(now)
        for k, token in enumerate(task.answers.tokens):
            after = inputs.clone()
            after[:, 2 * t + 1], after[:, 2 * t + 2] = token, fixed
            weight = chance[:, k, None]
            then += torch.where(weight > 0, weight * task.log_predictive(after)[:, t + 1].exp(), 0)
        torch.testing.assert_close(then, now)
