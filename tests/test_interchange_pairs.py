"""Pairs of sequences that exchange evidence, and the frame that the pieces of evidence span."""

import numpy as np
import pytest
import torch

from llmgeom import wind_tunnels
from llmgeom.probes.interventions.interchange import Pairs, evidence_frame, random_subspaces
from llmgeom.task import seeded
from tests.brute_force import filtered, hmm_of_rows, hot

# ---- the pairs ------------------------------------------------------------------------------------------------------


def counterfactual(spec: str, n: int = 300):
    task = wind_tunnels.load_task(spec)
    inputs = task.draw_split(n, seeded("inputs", 0)).inputs
    other = task.counterfactual(inputs, seeded("other", 0))
    at = (other != inputs).reshape(n, task.length, -1).any(-1)
    assert other.dtype == inputs.dtype and other.shape == inputs.shape
    return task, inputs, other, at


@pytest.mark.parametrize(
    "spec", ["bijection", "bijection:replacement=true", "bijection:vocab=3,pairs=9,replacement=true"]
)
def test_another_bijection_shows_the_same_keys(spec):
    task, inputs, other, at = counterfactual(spec)
    assert (other[:, 0::2] == inputs[:, 0::2]).all() and at.any(1).all()
    for row in other.tolist():
        pairs = {*zip(row[0:-1:2], row[1::2], strict=True)}
        keys, values = zip(*pairs, strict=True)
        assert len({*keys}) == len(pairs) == len({*values}) and min(values) >= task.vocab, "one to one"
    if spec == "bijection":
        assert (at.sum(1) == 1).all() and at.any(0).tolist() == [False, True] * 6 + [False]


@pytest.mark.parametrize("spec", ["recall", "recall:layout=papers,filler=2,queries=2", "recall:filler=3"])
def test_two_stored_values_change_places_and_their_answers_with_them(spec):
    task, inputs, other, at = counterfactual(spec)
    stored = 4 * task.pairs if task.layout == "papers" else 2 * task.pairs
    assert (at[:, :stored].sum(1) == 2).all()
    step = 4 if task.layout == "papers" else 2
    for x, row in zip(inputs.tolist(), other.tolist(), strict=True):
        before, held = ({o[i - (2 if step == 4 else 1)]: o[i] for i in range(step - 1, stored, step)} for o in (x, row))
        assert before.keys() == held.keys() and {*before.values()} == {*held.values()} and before != held
        if step == 2:
            shown = [(row[q], row[q + 1]) for q in task.query[:-1]]
            assert all(held[key] == value for key, value in shown)


def test_another_observation_at_one_step_under_the_same_matrices():
    task, _, other, at = counterfactual("hmm:steps=5")
    assert (at.sum(1) == 1).all() and at.any(0).tolist() == [False] * 3 + [True] * 4 + [False]
    for row in other[:20].tolist():
        move, emit, shown = hmm_of_rows(row, 3, 3)
        exact = filtered([hot(one) for one in shown], move, emit)
        np.testing.assert_allclose(task.log_predictive(torch.tensor([row]))[0].exp(), exact, atol=1e-6)
    _, _, other, at = counterfactual("hmm:encoding=tokens,steps=4")
    assert (at.sum(1) == 1).all() and at[:, -7::2].sum() == len(at) and (other[:, -7::2] >= 100).all()
    assert counterfactual("hmm:fixed=true,steps=4")[3].sum(1).eq(1).all()


def test_the_key_of_a_step_stays():
    _, inputs, other, at = counterfactual("keyed_hmm")
    assert (at.sum(1) == 1).all() and not at[:, :3].any() and not at[:, -1].any() and at[:, 3:-1].any(0).all()
    assert (other[..., -2:] == inputs[..., -2:]).all() and (other[:, 3:, -5:-2].sum(-1) == 1).all()


@pytest.mark.parametrize(
    ("spec", "first", "many"), [("coin", 1, 2), ("markov:fixed=false", 0, 8), ("recurrence", 0, 17)]
)
def test_one_symbol_is_another(spec, first, many):
    task, _, other, at = counterfactual(spec)
    assert (at.sum(1) == 1).all() and at.any(0).tolist() == [False] * first + [True] * (task.length - first - 1) + [
        False
    ]
    assert {*other[:, first:].unique().tolist()} == {*range(many)}


def test_an_opaque_recurrence_keeps_its_names():
    task, _, other, at = counterfactual("recurrence:opaque=true")
    assert not at[:, : task.header].any() and (at.sum(1) == 1).all()
    assert other[:, task.header :].min() >= 17 and other[:, task.header :].max() < 34


def test_the_evidence_that_is_swapped_is_drawn_evenly():
    _, inputs, other, at = counterfactual("bijection", 6000)
    np.testing.assert_allclose(at.double().mean(0)[1::2], 1 / 6, atol=0.02)
    _, inputs, other, at = counterfactual("markov:fixed=false", 8000)
    step = (other - inputs)[at] % 8
    np.testing.assert_allclose(torch.bincount(step, minlength=8).double() / 8000, [0] + [1 / 7] * 7, atol=0.02)


def test_queries_count_that_come_later_and_have_another_answer():
    task = wind_tunnels.load_task("hmm:steps=6")
    pairs = Pairs.of(task, 50, 0, "held-out")
    for at, counted, x, other in zip(
        pairs.at, pairs.counted, pairs.x.inputs.values.tolist(), pairs.other.inputs.values.tolist(), strict=True
    ):
        exact = []
        for rows in (x, other):
            move, emit, shown = hmm_of_rows(rows, 3, 3)
            exact.append(np.array(filtered([hot(one) for one in shown], move, emit)))
        differ = abs(exact[0] - exact[1]).max(1) > 0.01
        differ[: int(at.nonzero()) - 3 + 1] = False
        assert counted.tolist() == differ.tolist() and counted.any()
    late = Pairs.of(wind_tunnels.load_task("hmm:steps=6,horizon=3"), 50, 0, "held-out")
    assert late.counted.any() and not late.counted[:, 3:].any()


def test_a_donor_shows_the_same_at_the_same_position():
    pairs = Pairs.of(wind_tunnels.load_task("recall"), 30, 0, "held-out")
    batch, position = pairs.donors(0, "held-out")
    rows = torch.arange(len(position))
    assert (batch.inputs.ids[rows, position] == pairs.evidence(pairs.x)).all()
    own = pairs.x.inputs.ids[pairs.at.nonzero()[:, 0]]
    assert (batch.inputs.ids != own).any(1).all() and len({*map(tuple, batch.inputs.ids.tolist())}) > 0.9 * len(rows)


# ---- the frame ------------------------------------------------------------------------------------------------------


def test_the_frame_is_the_span_of_the_means_of_the_pieces_of_evidence():
    rng = torch.Generator().manual_seed(0)
    means = torch.randn(4, 20, generator=rng, dtype=torch.float64)
    before, further = torch.randint(4, (400,), generator=rng), torch.randint(1, 4, (400,), generator=rng)
    after = (before + further) % 4
    noise = 1e-3 * torch.randn(400, 20, generator=rng, dtype=torch.float64)
    basis = evidence_frame(means[after] - means[before], before * 7, after * 7)
    torch.testing.assert_close(basis @ basis.T, torch.eye(3, dtype=torch.float64))
    spanned = means[1:] - means[0]
    torch.testing.assert_close(spanned @ basis.T @ basis, spanned)
    noisy = evidence_frame(means[after] - means[before] + noise, before, after)
    assert len(noisy) == 3
    torch.testing.assert_close(noisy.T @ noisy, basis.T @ basis, atol=1e-3, rtol=0)
    rows = torch.nn.functional.one_hot(torch.tensor([before.tolist(), after.tolist()]), 5).float()
    torch.testing.assert_close(
        evidence_frame(means[after] - means[before], *rows).abs(), basis.abs(), msg="rows of numbers are pieces, too"
    )


def test_random_subspaces_are_orthonormal_even_and_fixed_by_their_seed():
    some = random_subspaces(400, 3, 12, (0, 1))
    for one in some[:5]:
        torch.testing.assert_close(one @ one.T, torch.eye(3, dtype=torch.float64))
    mean = torch.stack([one.T @ one for one in some]).mean(0)
    torch.testing.assert_close(mean, torch.eye(12, dtype=torch.float64) / 4, atol=0.06, rtol=0)
    torch.manual_seed(3)
    np.random.seed(3)
    assert all(torch.equal(a, b) for a, b in zip(some, random_subspaces(400, 3, 12, (0, 1)), strict=True))
    assert not torch.allclose(some[0], random_subspaces(1, 3, 12, (0, 2))[0])
