"""The sticky chain: its floor, gradients by autograd, the closed form by its bound, equal budgets."""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from studies.sticky_chain import (
    chain,
    closed_form,
    fresh_weights,
    gradients,
    least,
)


def attended(x, y, weights):
    """The head written out: (loss, alpha)."""
    w_q, w_k, w_v, w_o = weights
    score = (x @ w_q) @ (x @ w_k).T / 10**0.5
    alpha = score.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -math.inf).softmax(-1)
    return F.cross_entropy(alpha @ x @ w_v @ w_o, y), alpha


def doubles(seed: int, length: int, sharper: float = 1.0):
    x, y = chain(seed, length)
    return x.double(), y, [sharper * w.double() for w in fresh_weights(seed)]


@pytest.mark.parametrize("block", [7, 40, 200])
def test_the_gradients_are_those_of_autograd(block):
    x, y, weights = doubles(3, 90, sharper=3.0)
    for w in weights:
        w.requires_grad_()
    loss, alpha = attended(x, y, weights)
    loss.backward()
    ours, found, mixed = gradients(x, y, [w.detach() for w in weights], block)
    assert ours == pytest.approx(loss.item(), rel=1e-12)
    for w, gradient in zip(weights, found, strict=True):
        torch.testing.assert_close(gradient, w.grad, rtol=1e-9, atol=1e-13)
    torch.testing.assert_close(mixed, alpha.detach() @ x)


def test_the_chain_is_the_published_one():
    x, y = chain(42, 20_000)
    symbols = torch.cat([y[:0], y])
    stays = (symbols[1:] == symbols[:-1]).double().mean()
    assert float(stays) == pytest.approx(0.3498, abs=0.01)
    assert least() == pytest.approx(1.829188, abs=1e-6)
    other, _ = chain(7, 20_000)
    means = [
        torch.stack([one[1:][t[:-1] == s].mean(0) for s in range(8)])
        for one, t in ((x, y), (other, chain(7, 20_000)[1]))
    ]
    torch.testing.assert_close(*means, atol=0.12, rtol=0)  # one embedding whatever the seed
    within = x[1:] - means[0][y[:-1]]  # the input at t shows the symbol that is left there
    assert float(within.std()) == pytest.approx(1, abs=0.01)
    assert not torch.equal(chain(42, 50)[1], chain(42, 50, "fresh")[1])
    torch.rand(1)
    torch.testing.assert_close(chain(42, 50)[0], chain(42, 50)[0], atol=0, rtol=0)


def test_the_closed_form_is_least_of_its_bound_and_lowers_the_loss_every_time():
    x, y, (w_q, w_k, w_v, w_o) = doubles(5, 120, sharper=4.0)
    ridge = 1e-3
    _, alpha = attended(x, y, (w_q, w_k, w_v, w_o))
    h = alpha @ x

    def penalised(v):
        return F.cross_entropy(h @ v @ w_o, y) + ridge / 2 * v.square().sum()

    values = [float(penalised(w_v))]
    for turn in range(30):
        _, found, mixed = gradients(x, y, (w_q, w_k, w_v, w_o))
        new = closed_form(mixed, found[2], w_v, w_o, ridge)
        if turn == 0:
            at = new.clone().requires_grad_()
            change = at - w_v
            curvature = w_o @ (torch.eye(8) - 1 / 8).double() @ w_o.T / 2
            bound = (
                values[0] - ridge / 2 * w_v.square().sum()
                + (found[2] * change).sum()
                + torch.trace(change.T @ (h.T @ h / 120) @ change @ curvature) / 2
                + ridge / 2 * at.square().sum()
            )  # fmt: skip
            bound.backward()
            assert at.grad.abs().max() < 1e-9 and float(penalised(new)) <= float(bound.detach()) + 1e-12
        w_v = new
        values.append(float(penalised(w_v)))
    assert all(later < earlier for earlier, later in pairwise(values))


def test_the_closed_form_arrives_where_the_penalised_loss_has_no_gradient():
    """Convex in W_V, and with a ridge of some size it is soon there."""
    x, y, (w_q, w_k, w_v, w_o) = doubles(5, 120, sharper=4.0)
    for _ in range(400):
        _, found, mixed = gradients(x, y, (w_q, w_k, w_v, w_o))
        w_v = closed_form(mixed, found[2], w_v, w_o, 0.1)
    assert (found[2] + 0.1 * w_v).abs().max() < 1e-8 < found[2].abs().max()


# ---- the verdict -----------------------------------------------------------------------------------------------------
