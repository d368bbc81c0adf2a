"""The exact answers, against every latent value written out, an integral taken numerically, and invariances."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from scipy.integrate import quad

from llmgeom.stats.conjugate import beta_bernoulli, beta_majority, two_point, two_point_belief
from llmgeom.task import seeded
from llmgeom.wind_tunnels.tasks.bijection import Bijection
from llmgeom.wind_tunnels.tasks.coin import Coin
from llmgeom.wind_tunnels.tasks.recall import Recall
from llmgeom.wind_tunnels.tasks.recurrence import Recurrence
from tests.refusals import refused

COUNTS = [(0, 0), (1, 0), (0, 1), (3, 2), (2, 7), (12, 0), (40, 38)]


def chance(labels, share):
    """Probability of a sequence of labels, 0 the first, drawn independently with this share of firsts."""
    return math.prod(share if label == 0 else 1 - share for label in labels)


@pytest.mark.parametrize("reliability", [0.9, 0.6, 0.25])
def test_two_point_by_enumeration_of_the_latent_label(reliability):
    for labels in (labels for k in range(7) for labels in product((0, 1), repeat=k)):
        joint = [chance(labels, reliability) / 2, chance(labels, 1 - reliability) / 2]
        following = [chance((*labels, 0), share) / 2 for share in (reliability, 1 - reliability)]
        counts = labels.count(0), labels.count(1)
        assert math.exp(two_point_belief(*counts, reliability)[0]) == pytest.approx(joint[0] / sum(joint))
        assert math.exp(two_point(*counts, reliability)[0]) == pytest.approx(sum(following) / sum(joint))


@pytest.mark.parametrize(("a", "b"), [(1, 1), (0.5, 2), (30, 10)])
def test_beta_bernoulli_by_integration_over_the_share(a, b):
    def moment(n1, n2):
        return quad(lambda share: share ** (a + n1 - 1) * (1 - share) ** (b + n2 - 1), 0, 1)[0]

    for n1, n2 in COUNTS[:-1]:
        assert math.exp(beta_bernoulli(n1, n2, a, b)[0]) == pytest.approx(moment(n1 + 1, n2) / moment(n1, n2), rel=1e-6)


@pytest.mark.parametrize("answer", [two_point_belief, two_point, beta_bernoulli])
def test_every_answer_takes_arrays_sums_to_one_and_does_not_know_which_label_is_first(answer):
    n1, n2 = np.array(COUNTS).T
    found = answer(n1, n2)
    assert found.shape == (len(COUNTS), 2)
    np.testing.assert_allclose(np.exp(found).sum(1), 1)
    np.testing.assert_allclose(found, answer(n2, n1)[:, ::-1])
    np.testing.assert_array_equal(found, [answer(*counts) for counts in COUNTS])
    assert np.exp(found[0, 0]) == pytest.approx(0.5)


def test_a_long_sequence_leaves_no_doubt_of_the_rule_and_one_in_ten_of_the_label():
    assert two_point_belief(5000, 0)[0] == 0 and np.isfinite(two_point_belief(5000, 0)).all()
    np.testing.assert_allclose(np.exp(two_point(5000, 0)), [0.9, 0.1])


@pytest.mark.parametrize("reliability", [0, 1, -0.1])
def test_a_reliability_without_odds_is_named(reliability):
    with refused(ValueError, reliability):
        two_point(1, 0, reliability)


def test_a_prior_without_mass_is_named():
    with refused(ValueError, "Beta(0, 1)"):
        beta_bernoulli(1, 0, 0, 1)


@pytest.mark.parametrize(("a", "b"), [(1, 1), (0.5, 2), (30, 10)])
def test_the_commoner_label_by_integration_over_the_share(a, b):
    for n1, n2 in COUNTS[:-1]:
        weight = [
            quad(lambda share, n1=n1, n2=n2: share ** (a + n1 - 1) * (1 - share) ** (b + n2 - 1), *ends)[0]
            for ends in ((0.5, 1), (0, 0.5))
        ]
        found = np.exp(beta_majority(n1, n2, a, b))
        assert found == pytest.approx(np.array(weight) / sum(weight), rel=1e-4)
    assert np.exp(beta_majority(np.array([3, 0]), np.array([3, 1]))) == pytest.approx(
        np.array([[0.5, 0.5], [0.25, 0.75]])
    )


@pytest.mark.parametrize(("a", "b"), [(0, 1), (1, -2)])
def test_a_share_of_no_prior_is_refused(a, b):
    with refused(ValueError, "positive"):
        beta_majority(1, 1, a, b)


# ---- invariance ------------------------------------------------------------------------------------------------------


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
