"""What an answer is and how far two are apart: against scipy's distributions and integrals taken numerically."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.integrate import quad

from llmgeom.answers import Categorical, Gaussian

# (mean, variance) of two normal variables: alike, apart, one inside the other, far apart, nearly equal.
PAIRS = [
    ((0, 1), (0, 1)),
    ((0, 1), (1.5, 1)),
    ((0, 1), (0, 4)),
    ((0.3, 0.25), (-1, 2)),
    ((2, 9), (0, 0.01)),
    ((0, 1e-6), (0.5, 1)),
    ((-40, 1), (40, 2)),
    ((0, 1), (1e-3, 1 + 1e-9)),
]


def form(pair):
    return torch.tensor([pair[0], math.log(pair[1])], dtype=torch.float64)


def integral(function, p, q):
    """Over both densities, cut where one of them peaks or ends."""
    at = sorted({m + k * math.sqrt(v) for m, v in (p, q) for k in (-40, -12, -6, -2, 0, 2, 6, 12, 40)})
    return sum(quad(function, low, high, limit=200, epsabs=1e-13)[0] for low, high in pairwise(at))


def density(pair):
    return stats.norm(pair[0], math.sqrt(pair[1]))


@pytest.mark.parametrize(("p", "q"), PAIRS)
def test_divergences_of_two_normal_variables_by_integration(p, q):
    one, other, answers = density(p), density(q), Gaussian()
    tv = integral(lambda x: abs(one.pdf(x) - other.pdf(x)) / 2, p, q)
    kl = integral(lambda x: one.pdf(x) * (one.logpdf(x) - other.logpdf(x)), p, q)
    assert answers.tv(form(p), form(q)).item() == pytest.approx(tv, abs=1e-8)
    assert answers.tv(form(q), form(p)).item() == pytest.approx(tv, abs=1e-8)
    assert answers.kl(form(p), form(q)).item() == pytest.approx(kl, rel=1e-6, abs=1e-9)
    cross = integral(lambda x: -one.pdf(x) * other.logpdf(x), p, q)
    assert answers.cross_entropy(form(p), form(q)).item() == pytest.approx(cross, rel=1e-6)


def test_total_variation_never_leaves_zero_to_one():
    """Down to variances that a grid of points would step over."""
    means, logs = torch.tensor([0.0, 1e-9, 3.0, 1e4]), torch.tensor([-60.0, -1.0, 0.0, 1e-7, 60.0])
    forms = torch.cartesian_prod(means, logs).double()
    found = Gaussian().tv(forms[:, None], forms[None])
    assert found.isfinite().all() and found.min() >= 0 and found.max() <= 1
    torch.testing.assert_close(found, found.T)
    assert (found.diagonal() == 0).all()
    assert found[0, 4].item() == pytest.approx(1)


@pytest.mark.parametrize("p", [p for p, _ in PAIRS])
def test_loss_and_entropy_of_a_normal_variable_are_scipy_s(p):
    assert Gaussian().entropy(form(p)).item() == pytest.approx(density(p).entropy())
    for y in (-1.0, 0.0, 2.5):
        assert Gaussian().loss(form(p), torch.tensor(y)).item() == pytest.approx(-density(p).logpdf(y))


def test_the_mean_of_normal_answers_has_the_moments_of_the_mixture():
    forms = torch.stack([form(p) for pair in PAIRS[2:5] for p in pair]).reshape(2, 3, 2)
    found = Gaussian().mean(forms, (0, 1))
    assert found.shape == (1, 1, 2)
    m, v = forms[..., 0].numpy(), forms[..., 1].exp().numpy()
    first, second = m.mean(), (v + m**2).mean()
    np.testing.assert_allclose(found[0, 0], [first, math.log(second - first**2)])
    by_row = Gaussian().mean(forms, (1,))
    assert by_row.shape == (2, 1, 2)
    np.testing.assert_allclose(by_row[:, 0, 0], m.mean(1))


# ---- tokens ---------------------------------------------------------------------------------------------------------

ANSWERS = Categorical((4, 1, 2))
LOGITS = torch.tensor([[0.3, -1.0, 2.0, 0.7, -0.2], [5.0, 0.0, 0.0, 0.0, 0.0]])


def test_mass_on_tokens_that_are_no_answer_is_kept_beside_the_answers():
    p = np.exp(LOGITS.double().numpy())
    p /= p.sum(1, keepdims=True)
    expected = np.stack([p[:, 4], p[:, 1], p[:, 2], p[:, 0] + p[:, 3]], 1)
    np.testing.assert_allclose(ANSWERS.read(LOGITS).exp(), expected, rtol=1e-6)
    np.testing.assert_allclose(ANSWERS.read(LOGITS.bfloat16()).exp().sum(-1), 1, rtol=1e-6)
    assert ANSWERS.read(LOGITS.bfloat16()).dtype == torch.float32


def test_leaked_mass_counts_against_an_answer():
    exact = ANSWERS.exact(torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64).log())
    q = torch.tensor([[0.4, 0.3, 0.1, 0.2]], dtype=torch.float64)
    assert exact.exp().tolist() == [[0.5, 0.5, 0.0, 0.0]]
    assert ANSWERS.kl(exact, q.log()).item() == pytest.approx(stats.entropy([0.5, 0.5], [0.4, 0.3]) + math.log(1 / 0.7))
    assert ANSWERS.tv(exact, q.log()).item() == pytest.approx(0.3)
    assert ANSWERS.entropy(q.log()).item() == pytest.approx(stats.entropy(q[0]))
    cross = ANSWERS.cross_entropy(exact, q.log()).item()
    assert cross == pytest.approx(-(math.log(0.4) + math.log(0.3)) / 2)
    assert cross == pytest.approx((ANSWERS.kl(exact, q.log()) + ANSWERS.entropy(exact)).item())
    assert ANSWERS.cross_entropy(exact, exact).item() == pytest.approx(math.log(2))
    assert ANSWERS.cross_entropy(exact, ANSWERS.exact(torch.tensor([[0.0, 0.5, 0.5]]).log())).isinf().all()


def test_the_loss_is_the_surprise_of_the_token_that_was_drawn():
    form = ANSWERS.read(LOGITS)
    expected = -LOGITS.log_softmax(-1)[[0, 1], [2, 4]]  # outcome 2 is token 2, outcome 0 token 4
    torch.testing.assert_close(ANSWERS.loss(form, torch.tensor([2, 0])), expected)


def test_the_mean_of_answers_is_their_mixture():
    p = torch.tensor([[[0.2, 0.8, 0.0], [1.0, 0.0, 0.0]], [[0.0, 0.5, 0.5], [0.6, 0.4, 0.0]]], dtype=torch.float64)
    for dims in ((0,), (0, 1), (1,)):
        torch.testing.assert_close(ANSWERS.mean(p.log(), dims).exp(), p.mean(dims, keepdim=True))


def test_reading_for_a_grade_first_does_not_spoil_a_later_training_step():
    answers = Categorical((3, 0, 5))
    with torch.inference_mode():
        answers.read(torch.zeros(2, 7))
    logits = torch.zeros(2, 7, requires_grad=True)
    answers.loss(answers.read(logits), torch.tensor([0, 1])).sum().backward()
    expected = torch.full((2, 7), 1 / 7)
    expected[0, 3] -= 1
    expected[1, 0] -= 1
    torch.testing.assert_close(logits.grad, expected)
