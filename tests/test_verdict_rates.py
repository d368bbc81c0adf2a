"""The rates of the five words where the truth is known: the table of docs/claims.md at fewer trials."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom

from studies.verdict_rates import EFFECTS, World, by_draws, head, larger, line, worlds

TRIALS = 320
WORLDS = [
    World(40, 20, 1),
    World(640, 20, 1, spread=0.6),
    World(160, 20, 1, start="centre"),
]


def most(rate: float) -> float:
    """A share that a true rate exceeds in one of a thousand simulations."""
    return binom.ppf(0.999, TRIALS, rate) / TRIALS


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_wrong_words_are_as_rare_as_they_are_said_to_be(world):
    rates = {name: world.rates(effect, TRIALS // world.claims) for name, effect in EFFECTS.items()}
    assert all(sum(found.values()) == pytest.approx(1) for found in rates.values())
    assert rates["none"]["holds"] + rates["none"]["small"] <= most(0.025)
    assert rates["none"]["opposite"] <= most(0.025)
    assert rates["exact"]["ruled out"] <= most(0.025) and rates["twice"]["small"] <= most(0.025)
    assert rates["twice"]["ruled out"] <= most(0.001) and rates["exact"]["opposite"] <= most(0.001)


def test_the_words_are_given_where_they_are_due():
    precise = World(2500, 100, 1, spread=0.02, noise=1.0, start="centre")
    due = {"none": "ruled out", "half": "small", "exact": "holds", "twice": "holds"}
    for name, word in due.items():
        assert precise.rates(EFFECTS[name], 100)[word] > 0.9
    assert precise.rates(-1.0, 100)["opposite"] > 0.9
    assert replace(precise, spread=1.0).rates(0.0, 100)["open"] > 0.8  # more data will not help


def test_in_few_records_without_any_effect_does_any_claim_hold():
    world, rng = World(40, 20, 8), np.random.default_rng(1)
    records = [set(world.words(0.0, rng)) for _ in range(100)]
    for words in ({"holds", "small"}, {"opposite"}):
        assert sum(bool(found & words) for found in records) <= binom.ppf(0.999, 100, 0.025)


def test_two_controls_are_both_beaten_or_the_claim_does_not_hold():
    """The value lies the exact effect above one control and at the centre of the other."""
    rng, count = np.random.default_rng(2), 0
    for _ in range(300):
        count += World(40, 20, 1).words(1.0, rng, nearer=1.0)[0] in ("holds", "small")
    assert count <= binom.ppf(0.999, 300, 0.025)


def test_the_stored_rates_are_of_these_worlds_and_keep_their_promises():
    """docs/claims.md shows them (tests/test_site.py). Of two simulations of one row the larger counts."""
    stored = (Path(__file__).parents[1] / "studies/verdict_rates.txt").read_text(encoding="utf-8").splitlines()
    assert stored[:2] == head().splitlines()
    rows = [line.strip("| ").split(" | ") for line in stored[2:]]
    every = [(world, 4000, effect) for world, effect in product(worlds(), EFFECTS)]
    every += [(world, trials, "none") for world, trials in larger()]
    assert [row[:7] for row in rows] == [
        [str(cell) for cell in (w.clusters, w.draws, w.claims, w.spread, w.start, trials, effect)]
        for w, trials, effect in every
    ]
    cells = {(*row[:5], row[6]): row for row in rows}  # the last, and so the larger, of each
    for *_, simulated, effect, holds, small, ruled, opposite, opened in cells.values():
        rates = [float(rate) for rate in (holds, small, ruled, opposite, opened)]
        assert sum(rates) == pytest.approx(100, abs=0.3)
        promised = 100 * binom.ppf(0.999, int(simulated), 0.025) / int(simulated)
        assert effect != "none" or (rates[0] + rates[1] <= promised and rates[3] <= promised)
        assert effect != "exact" or rates[2] <= 5
        assert effect != "twice" or rates[1] <= 5


@pytest.mark.slow
def test_a_stored_row_is_what_the_rule_gives_today():
    stored = (Path(__file__).parents[1] / "studies/verdict_rates.txt").read_text(encoding="utf-8")
    assert line(World(40, 20, 8), "none", 4000) in stored.splitlines()


def test_eight_draws_keep_the_promise_and_find_a_doubled_effect():
    """docs/claims.md shows these rows. With eight draws at most 1 % of claims without an effect hold or are small."""
    text = (Path(__file__).parents[1] / "studies/draws.txt").read_text(encoding="utf-8")
    cells = [row.strip("| ").split(" | ") for row in text.splitlines()[2:]]
    stored = {
        (int(n), int(draws), float(spread), effect): [*map(float, rest)] for n, draws, spread, effect, *rest in cells
    }
    assert stored.keys() == {
        (w.clusters, w.draws, w.spread, effect) for w in by_draws() for effect in ("none", "exact", "twice")
    }
    for (_, draws, spread, effect), (holds, small, _) in stored.items():
        assert effect != "none" or draws != 8 or holds + small <= 1
        assert effect != "twice" or spread > 0.2 or holds == 100
    holds = World(75, 8, 8).rates(1.0, 60)["holds"] * 480
    rate = stored[75, 8, 0.2, "exact"][0] / 100
    assert binom.ppf(1e-4, 480, rate) <= holds <= binom.ppf(1 - 1e-4, 480, rate), "as stored"
