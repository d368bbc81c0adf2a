"""The sticky chain: its floor, gradients by autograd, the closed form by its bound, equal budgets."""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from studies import sticky_chain
from studies.sticky_chain import (
    FAST,
    PLAIN,
    SEEDS,
    SIZES,
    SLOW,
    TEN,
    TUNING,
    Cell,
    chain,
    closed_form,
    equal,
    fresh_weights,
    gradients,
    least,
    schedules,
    trained,
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


def test_weights_are_a_tenth_of_a_normal_and_as_many_as_published():
    weights = fresh_weights(42)
    assert tuple(w.numel() for w in weights) == SIZES and sum(SIZES) == 820
    assert float(torch.cat([w.flatten() for w in weights]).std()) == pytest.approx(0.1, rel=0.1)


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


def test_budgets_are_equal():
    published = (SLOW, SLOW, FAST, SLOW)
    assert equal("V") == published == equal("V", by_size=True)
    for part in ("O", "QK", "all"):
        assert sum(equal(part)) == pytest.approx(sum(published))
        weighed = [
            sum(n * rate for n, rate in zip(SIZES, rates, strict=True)) for rates in (equal(part, True), published)
        ]
        assert weighed[0] == pytest.approx(weighed[1])
    assert schedules()[f"QK, {TEN}"] == (FAST, FAST, SLOW, SLOW) and schedules()[PLAIN] == (SLOW,) * 4
    assert not set(SEEDS) & set(TUNING)


def test_ten_times_every_rate_is_a_tenth_of_the_steps():
    """Small steps follow the gradient flow, whatever their size: as published, 101 of 1,000."""
    slow = trained(Cell((SLOW,) * 4, 42, 300, 200))
    fast = trained(Cell((FAST,) * 4, 42, 300, 20))
    assert fast["losses"][-1] == pytest.approx(slow["losses"][-1], abs=2e-3)
    assert slow["losses"][0] == fast["losses"][0] and len(slow["losses"]) == 201
    assert slow["losses"][0] - slow["losses"][-1] > 0.01


def test_only_the_named_rates_move_their_matrices_and_a_run_stops_on_arrival(monkeypatch):
    moved = []
    monkeypatch.setattr(sticky_chain, "fresh_weights", lambda seed: moved.append(fresh_weights(seed)) or moved[-1])
    trained(Cell((0.0, 0.0, 0.1, 0.0), 1, 60, 3))
    for i, (now, before) in enumerate(zip(moved[0], fresh_weights(1), strict=True)):
        assert torch.equal(now, before) == (i != 2)
    found = trained(Cell((FAST,) * 4, 1, 60, 50, until=2.05))
    assert found["losses"][-1] <= 2.05 < found["losses"][-2] and len(found["losses"]) < 50
    moved.clear()
    trained(Cell((0.0,) * 4, 1, 60, 2, ridge=1e-2))
    assert [torch.equal(now, before) for now, before in zip(moved[0], fresh_weights(1), strict=True)] == [
        True,
        True,
        False,
        True,
    ]


def test_closed_form_and_descent_take_turns_and_each_leaves_the_other_s_matrices(monkeypatch):
    seen, own = [], sticky_chain.gradients

    def watched(x, y, weights, *args, **options):
        seen.append([each.clone() for each in weights])
        return own(x, y, weights, *args, **options)

    monkeypatch.setattr(sticky_chain, "gradients", watched)
    trained(Cell((0.01,) * 4, 1, 60, 5, ridge=1e-2))
    for turn, (before, after) in enumerate(pairwise(seen[:6])):
        moved = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
        assert moved == ([False, False, True, False] if turn % 2 == 0 else [True, True, False, True])


def test_a_training_that_diverges_is_said_and_arrives_never():
    found = trained(Cell((1e30,) * 4, 1, 60, 5))
    assert not found["finite"] and found["losses"] == []
    assert sticky_chain.arrival(found, 2.0, 5) == 6 and sticky_chain.fresh_loss(found) == math.inf
    assert sticky_chain.arrival({"losses": [2.1, 2.0, 1.9]}, 2.0, 5) == 1


def test_what_diverged_is_kept_as_it_is_and_no_ridge_is_chosen_by_it(monkeypatch, tmp_path):
    """Its loss on the fresh sequence is kept as 0.0, which would be the least of all."""
    ran = []

    def told(cell):
        ran.append(cell)
        bad = cell.ridge == sticky_chain.RIDGES[0] and cell.seed in sticky_chain.TUNING
        return {"losses": [] if bad else [2.0, 1.9], "fresh": 0.0 if bad else 2.0 - cell.ridge, "finite": not bad}

    monkeypatch.setattr(sticky_chain, "trained", told)
    *_, chosen = sticky_chain.compare_methods({"length": 60, "steps": 4}, tmp_path)
    assert chosen["ridge"] == sticky_chain.RIDGES[-1]
    ran.clear()
    sticky_chain.compare_methods({"length": 60, "steps": 4}, tmp_path)
    assert not ran


# ---- the verdict -----------------------------------------------------------------------------------------------------
