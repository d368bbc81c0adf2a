"""How sequences of the exact tasks are drawn and held out, and fields that are out of range."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from llmgeom.errors import UserError
from llmgeom.task import seeded
from llmgeom.wind_tunnels.tasks.bijection import Bijection
from llmgeom.wind_tunnels.tasks.coin import Coin
from llmgeom.wind_tunnels.tasks.recall import Recall
from llmgeom.wind_tunnels.tasks.recurrence import Recurrence
from llmgeom.wind_tunnels.tasks.regression import Regression
from tests.refusals import refused


def test_sticky_keys_come_again_as_often_as_said_and_in_training_alone():
    task = Bijection(vocab=50, pairs=6, replacement=True, sticky=0.6)

    def again(training):
        keys = task.draw_split(4000, seeded("here", 0), training=training).inputs[:, 0::2]
        return (keys[:, :, None] == keys[:, None, :]).tril(-1).any(2).double().mean(0)

    assert again(False)[1].item() == pytest.approx(1 / 50, abs=0.01)
    assert again(True)[1].item() == pytest.approx(0.6 + 0.4 / 50, abs=0.03)
    assert again(True)[0] == 0


def test_a_sticky_key_is_any_earlier_one_alike():
    """With probability `sticky` a key is one of the distinct keys before it, each alike; else one that is new."""
    always = Bijection(200, 5, True, sticky=1.0)._sticky_keys(6000, seeded("here", 0))
    assert (always == always[:, :1]).all()
    never = Bijection(5, 7, True, sticky=0.0)._sticky_keys(6000, seeded("here", 0))
    assert (never[:, :5].sort(1).values == torch.arange(5)).all()
    assert ((never[:, 5:, None] == never[:, None, :5]).sum(2) == 1).all()  # nothing is new any more
    half = Bijection(200, 4, True, sticky=0.5)._sticky_keys(40_000, seeded("here", 0))
    first, second, third, fourth = half.unbind(1)
    assert torch.bincount(first, minlength=200).double().std() < 3 * 200**0.5
    assert (second == first).double().mean().item() == pytest.approx(0.5, abs=0.01)
    both = (second == first) & (third == first)
    assert (fourth[both] == first[both]).double().mean().item() == pytest.approx(0.5, abs=0.02)
    # first, first, other: the two distinct keys are alike though one came twice.
    twice = (second == first) & (third != first)
    for key in (first, third):
        assert (fourth[twice] == key[twice]).double().mean().item() == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize(("a", "b"), [(2, 5), (0.5, 0.5)])
def test_the_bias_of_a_coin_has_its_prior(a, b):
    found = Coin(prior=f"beta:{a},{b}").hypothesis(5000, seeded("here", 0))[:, 0]
    assert stats.kstest(found.numpy(), stats.beta(a, b).cdf).pvalue > 1e-4


def test_a_horizon_puts_a_loss_on_the_first_numbers_alone():
    assert Recurrence(horizon=5).trained_queries == 5 and Recurrence().trained_queries == 15
    assert Bijection().trained_queries == 7


def test_a_held_out_beginning_is_in_no_training_sequence_of_either_kind():
    task = Recurrence(modulus=7, steps=8)
    seen = task.draw_split(4000, seeded("here", 0), "seen").inputs[:, :3]
    kept = task.draw_split(4000, seeded("here", 1), "held-out").inputs[:, :3]
    seen, kept = set(map(tuple, seen.tolist())), set(map(tuple, kept.tolist()))
    assert not seen & kept and len(seen) + len(kept) > 330 and len(kept) > 15


def test_the_order_in_which_pairs_are_stored_does_not_make_a_new_hypothesis():
    task = Recall(keys=5, values=4, pairs=3, queries=3)
    hypotheses = task.hypothesis(6000, seeded("here", 0))
    maps = {tuple(sorted(zip(*rows, strict=True))) for rows in hypotheses.tolist()}
    cells = {tuple(cell) for cell in task.split_key(hypotheses).tolist()}
    assert len(maps) == len(cells) == round(2**task.log2_hypotheses) == 10 * 24


@pytest.mark.parametrize("layout", ["compact", "papers"])
def test_any_stored_pair_is_asked_first_as_often(layout):
    drawn = Recall(4, 2, 1, layout=layout).draw_split(4000, seeded("here", 0)).inputs
    step, query = (4, 4 * 4 + 1 + 1) if layout == "papers" else (2, 2 * 4 + 1)
    place = (drawn[:, step // 2 - 1 : 4 * step : step] == drawn[:, query, None]).double()
    assert place.sum(1).eq(1).all()
    np.testing.assert_allclose(place.mean(0), 0.25, atol=0.03)


def test_a_filler_takes_a_token_where_there_is_one():
    assert Recall(keys=8, values=8).vocabulary == 16
    task = Recall(keys=8, values=6, pairs=4, queries=1, filler=2)
    assert task.vocabulary == 15
    assert (task.draw_split(9, seeded("here", 0)).inputs == 14).sum(1).tolist() == [2] * 9


REFUSED = [
    (lambda: Recall(layout="long"), ("recall:layout=long", "compact", "papers")),
    (lambda: Recall(pairs=9), ("recall:pairs=9", "queries")),
    (lambda: Recall(queries=5), ("queries",)),
    (lambda: Recall(filler=-1), ("filler",)),
    (lambda: Regression(layout="x"), ("layout", "x", "paired", "separate")),
    (lambda: Regression(noise=0.0), ("noise",)),
    (lambda: Regression(scale=math.inf), ("scale",)),
    (lambda: Regression(noise=math.nan), ("noise",)),
    (lambda: Regression(bins=1), ("bins", 1, 2)),
    (lambda: Recurrence(modulus=9), ("modulus", 9, "prime")),
    (lambda: Recurrence(modulus=1), ("modulus", 1, "prime")),
    (lambda: Recurrence(steps=3), ("steps", 3, 4)),
    (lambda: Recurrence(program=1.0), ("program", 1.0)),
    (lambda: Recurrence(horizon=16), ("horizon", 16, 15)),
    (lambda: Bijection(vocab=1), ("vocab", 2)),
    (lambda: Bijection(pairs=9), (9, 8, "replacement=true")),
    (lambda: Coin(prior="beta:1"), ("beta:1", "beta:A,B", "list:P,P")),
    (lambda: Coin(prior="beta:1,nan"), ("beta:A,B",)),
    (lambda: Coin(prior="beta:1,inf"), ("beta:A,B",)),
    (lambda: Coin(prior="beta:1,0"), ("beta:A,B",)),
    (lambda: Coin(prior="list:0.5,nan"), ("beta:A,B",)),
    (lambda: Coin(prior="list:0.5,1.5"), ("beta:A,B",)),
    (lambda: Coin(prior="list:"), ("beta:A,B",)),
    (lambda: Coin(flips=0), ("coin:flips=0", 1)),
]


@pytest.mark.parametrize(("make", "named"), REFUSED)
def test_a_field_out_of_range_is_refused_with_what_was_expected(make, named):
    with refused(UserError, *named):
        make()
