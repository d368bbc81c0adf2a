"""The exact answers, against every latent value written out, and an integral taken numerically."""

import math
from itertools import product

import numpy as np
import pytest
from scipy.integrate import quad

from llmgeom.stats.conjugate import beta_bernoulli, beta_majority, two_point, two_point_belief
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
