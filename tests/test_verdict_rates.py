"""The rates of the five words where the truth is known: the table of docs/claims.md at fewer trials."""

from itertools import product
from pathlib import Path

import pytest
from scipy.stats import binom

from studies.verdict_rates import EFFECTS, World, by_draws, head, larger, worlds


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
