"""Do 95 % intervals hold what they are about? Fresh samples of one model, through the commands' own code."""

from __future__ import annotations

import numpy as np
import pytest

from llmgeom.wind_tunnels.training import train
from llmgeom.wind_tunnels.training_config import Training
from studies.coverage import coverage, replicates, runs
from studies.simulated_coverage import covered, rows

REPLICATES = 200
LEAST = 0.92
# Intervals that hold fits or means fixed. Their docstrings give these numbers too.
LOWER = {
    "belief_readout: fall outside the largest step": 0.84,  # .91 was measured in 80 samples, sd .03
    "belief_readout: MLPs' share of the fall": 0.84,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A coin's model at the posterior, in which most metrics have room on both sides."""
    folder = tmp_path_factory.mktemp("coverage")
    train(Training("coin:flips=12", width=24, steps=300, lr="1e-2", batch=64), folder, device="cpu")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("run", ["attention_focus", "belief_readout", "value_manifold", "blocks", "grade"])
def test_intervals_of_claims_cover(run, trained):
    every = coverage(list(replicates(runs(trained)[run], range(7000, 7000 + REPLICATES))))
    claims = {name: numbers for name, numbers in every.items() if numbers[0]}
    assert claims
    low = {name: held for name, (_, n, held, _, _) in claims.items() if n > 50 and held < LOWER.get(name, LEAST)}
    assert not low


SIMULATED = {name: (draw, count) for name, draw, count in rows()}
MENDED = (
    "order along the curve, blob",
    "TwoNN ratio, 12 centres",
    "KL of 1,000 sequences, 10 in 10,000 off by 10 bits",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", SIMULATED)
def test_simulated_intervals_cover(name):
    draw, count = SIMULATED[name]
    rng = np.random.default_rng(11)
    new, old = covered([draw(rng) for _ in range(count)])
    assert new >= LEAST
    if name in MENDED:  # the interval before did not
        assert old < 0.9


def test_an_interval_of_points_around_centres_covers():
    """Around centres log mu is far from exponential, and the interval of exponential ratios is too narrow."""
    rng = np.random.default_rng(12)
    new, old = covered([SIMULATED["TwoNN ratio, 12 centres"][0](rng) for _ in range(60)])
    assert old < 0.92 <= new


def test_coverage_counts_intervals_that_hold_the_mean_of_the_statistic():
    rows = [{"p: x": (v, v - 1.0, v + 1.0, True)} for v in (-2.0, -0.5, 0.5, 2.0)]
    assert coverage(rows) == {"p: x": (True, 4, 0.5, 0.5, 0.0)}
    wider = [{"p: x": (v, v - 1.5, v + 1.5, False)} for v in (-2.0, -0.5, 0.5, 2.0)]
    assert coverage(wider)["p: x"] == (False, 4, 0.5, 1.0, 0.0)
