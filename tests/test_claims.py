"""A headline has to beat every null it is held against, and says which one was the hardest."""

from __future__ import annotations

import numpy as np
import pytest

from llmgeom.claims import Null, headline
from llmgeom.stats import Interval

EASY, HARD = np.linspace(0.0, 0.1, 20), np.linspace(0.3, 0.6, 20)


def made(value, low, high, nulls, side="upper", effect=0.1):
    found = [Null.of(name, value, draws, side) for name, draws in nulls.items()]
    interval = Interval(low, high, 0.95, "by hand")
    return headline("x", value, "fraction", interval, found, n=80, units=40, effect=effect, side=side)


@pytest.mark.parametrize("nulls", [{"easy": EASY, "hard": HARD}, {"hard": HARD, "easy": EASY}])
def test_beating_one_null_of_two_is_not_enough(nulls):
    h = made(0.45, 0.40, 0.50, nulls)
    assert h.verdict == "not above null"
    assert h.null.startswith("hard") and h.null_high == 0.6
    assert h.p == pytest.approx((1 + (HARD >= 0.45).sum()) / 21)
    assert made(0.45, 0.40, 0.50, {"easy": EASY}).verdict == "above null"


def test_a_value_above_both_is_above_with_the_larger_p():
    h = made(0.9, 0.8, 1.0, {"easy": EASY, "hard": HARD})
    assert h.verdict == "above null" and h.p == pytest.approx(1 / 21)


def test_p_alone_can_withhold_the_verdict():
    """A wide gap to the margin does not help where one null's p is large."""
    chance = Null("chance", 0.0, 0.1, 0.0, 0.3, 1000)
    interval = Interval(0.8, 1.0, 0.95, "by hand")
    h = headline("x", 0.9, "1", interval, [Null.of("easy", 0.9, EASY), chance], n=80, units=40, effect=0.1)
    assert h.verdict == "undecided" and h.p == 0.3


@pytest.mark.parametrize(
    ("low", "high", "verdict"), [(0.05, 0.20, "below null"), (0.25, 0.50, "not below null"), (0.10, 0.40, "undecided")]
)
def test_a_claim_below_its_null_turns_everything_but_the_numbers(low, high, verdict):
    h = made((low + high) / 2, low, high, {"high": HARD}, side="lower")
    assert h.verdict == verdict
    assert (h.low, h.high, h.null_low, h.null_high) == (low, high, 0.3, 0.6)
