"""The sticky chain: its floor, gradients by autograd, the closed form by its bound, verdicts that can go either way."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner

from llmgeom.claims import judge
from llmgeom.cli import main
from llmgeom.experiments import paper2
from llmgeom.experiments.paper2 import (
    EQUAL,
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
    hardest,
    least,
    paired,
    schedules,
    trained,
)
from llmgeom.record import Record

CLAIM = "value step against every control, equal sum of rates"


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
    assert schedules(1)[f"QK, {TEN}"] == (FAST, FAST, SLOW, SLOW) and schedules(1)[PLAIN] == (SLOW,) * 4
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
    monkeypatch.setattr(paper2, "fresh_weights", lambda seed: moved.append(fresh_weights(seed)) or moved[-1])
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
    seen, own = [], paper2.gradients

    def watched(x, y, weights, *args, **options):
        seen.append([each.clone() for each in weights])
        return own(x, y, weights, *args, **options)

    monkeypatch.setattr(paper2, "gradients", watched)
    trained(Cell((0.01,) * 4, 1, 60, 5, ridge=1e-2))
    for turn, (before, after) in enumerate(pairwise(seen[:6])):
        moved = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
        assert moved == ([False, False, True, False] if turn % 2 == 0 else [True, True, False, True])


def test_a_training_that_diverges_is_said_and_arrives_never():
    found = trained(Cell((1e30,) * 4, 1, 60, 5))
    assert not found["finite"] and found["losses"] == []
    assert paper2._reached(found, 2.0, 5) == 6
    assert paper2._reached({"losses": [2.1, 2.0, 1.9]}, 2.0, 5) == 1


# ---- the verdict -----------------------------------------------------------------------------------------------------


def verdict(value, controls):
    steps = {"V": value, **controls}
    h = hardest(CLAIM, steps, "V", list(controls))
    result = paper2.Schedules(
        **dict.fromkeys(("train", "fresh", "least", "steps"), np.zeros(1)),
        **dict.fromkeys(("train_interval", "fresh_interval", "steps_interval"), np.zeros((1, 2))),
        steps_seed=np.zeros((1, 5)),
        loss=np.zeros((1, 3)),
        headlines=(h,),
    )
    return judge({"paper2": result.lowered()})["paper2"].headlines[0]


def test_the_verdict_can_go_either_way_and_the_hardest_control_decides():
    value = (100, 110, 90, 105, 95)
    slower, faster, alike = ([int(v * f) for v in value] for f in (2.0, 0.6, 1.0))
    assert verdict(value, {"O": slower, "QK": slower}).verdict == "PASS"
    h = verdict(value, {"O": slower, "QK": faster})
    assert h.verdict == "FAIL" and h.value == pytest.approx(0.6, abs=0.01) and "QK" in h.null
    assert verdict(value, {"O": slower, "QK": (50, 220, 60, 230, 95)}).verdict == "INCONCLUSIVE"
    assert verdict(value, {"O": alike}).verdict == "FAIL"


def test_a_ratio_is_student_s_over_paired_seeds_on_the_log_scale():
    from scipy.stats import ttest_rel

    over, under = (430.0, 410, 450, 420, 400), (200.0, 210, 190, 230, 205)
    h = paired(CLAIM, over, under)
    test = ttest_rel(np.log(over), np.log(under), alternative="greater")
    both = ttest_rel(np.log(over), np.log(under)).confidence_interval(0.95)
    assert h.p == pytest.approx(max(test.pvalue, 1e-6))
    assert (h.low, h.high) == pytest.approx((math.exp(both.low), math.exp(both.high)))
    assert (h.n, h.units, h.margin) == (5, 5, 1.0)


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(paper2.Request, "length", property(lambda self: 60))
    monkeypatch.setattr(paper2.Request, "steps", property(lambda self: 60))


def test_the_command_writes_a_record_and_a_page_and_trains_nothing_twice(tiny, tmp_path, monkeypatch):
    asked = ["reproduce", "paper2", "--quick", "--json", "--out", str(tmp_path)]
    result = CliRunner().invoke(main, asked)
    assert result.exit_code == 0, result.output
    body = json.loads(result.stdout)
    rows = {row["name"]: row for row in body["rows"]}
    assert rows[PLAIN]["steps"] == [60] * 5 and set(rows[f"all, {TEN}"]["steps"]) <= {6, 7}
    assert rows[f"QK, {EQUAL}"]["rates"] == pytest.approx([0.055, 0.055, 0.01, 0.01])
    record = Record.load(tmp_path)
    measured = record.results["paper2"]
    claim = next(h for h in measured.headlines if h.claim)
    assert claim.name == CLAIM and claim.verdict in ("PASS", "FAIL", "INCONCLUSIVE") and claim.units == 5
    assert measured.ticks["schedule"] == tuple(rows) and measured.arrays["least"][0] == pytest.approx(2.6390, abs=1e-4)
    place = measured.ticks["method"].index(f"V, {TEN}")
    assert measured.arrays["train"][place] == pytest.approx(np.mean(rows[f"V, {TEN}"]["train"]))
    cell = trained(Cell((SLOW, SLOW, FAST, SLOW), SEEDS[0], 60, 60))
    assert rows[f"V, {TEN}"]["train"][0] == pytest.approx(cell["losses"][-1] / math.log(2))
    assert rows[f"V, {TEN}"]["fresh"][0] == pytest.approx(cell["fresh"] / math.log(2))
    assert "sticky chain" in (tmp_path / "report.html").read_text()

    def never(cell):
        raise AssertionError("trained again")

    monkeypatch.setattr(paper2, "trained", never)
    again = CliRunner().invoke(main, [*asked[:3], "-q", *asked[4:]])
    assert again.exit_code == 0 and "H_min 2.6390 bits" in again.output


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (["paper2", "--model", "pocket:phi"], "reproduce paper2 has no --model"),
        (["paper2", "--seed", "1"], "reproduce paper2 has no --seed"),
        (["predictions", "--quick"], "reproduce predictions has no --quick"),
    ],
)
def test_what_an_experiment_does_not_take_is_refused(asked, says):
    result = CliRunner().invoke(main, ["reproduce", *asked])
    assert result.exit_code == 1 and says in result.output
