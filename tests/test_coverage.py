"""Do 95 % intervals of claims hold what they are about? Simulated effects, and fresh samples of one model."""

import numpy as np
import pytest

from llmgeom.probes import value_manifold
from llmgeom.probes.shared import representation_geometry
from llmgeom.wind_tunnels.training import train
from llmgeom.wind_tunnels.training_config import Training
from studies.coverage import coverage, replicates, runs
from studies.simulated_claims import DRAWS, declared_only
from studies.simulated_coverage import covered, rows
from tests.simulated import shapes_checked

REPLICATES = 200
LEAST = 0.92
# Claims that cover less (their docstrings say so), and rows of `simulated_coverage`, by their start.
LESS = {
    "belief_readout: MLPs' share of the fall": 0.915,
    "belief_readout: fall outside the largest step": 0.93,
    "blocks_mean: MLPs' share of the effects": 0.90,
    "process: resolution": 0.91,
    "PC1 and a number": 0.88,
}
# What is run on a trained model; of value_manifold the metrics are simulated each by itself.
TRAINED = ("attention_focus", "belief_readout", "blocks")


def least(name: str, count: int = REPLICATES) -> float:
    """What must be covered in `count` samples: two standard errors less than what the docstring says, or `LEAST`."""
    if name not in LESS:
        return LEAST
    held = LESS[name]
    return held - 2 * (held * (1 - held) / count) ** 0.5


def low(every: dict) -> dict[str, float]:
    """Claims that cover less than they should."""
    assert any(numbers[0] for numbers in every.values())
    return {
        name: held
        for name, (claim, n, held, _, _) in every.items()
        if claim and n > REPLICATES / 4 and held < least(name)
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A coin's model at the posterior, in which most metrics have room on both sides."""
    folder = tmp_path_factory.mktemp("coverage")
    train(Training("coin:steps=12", width=24, steps=300, lr="1e-2", batch=64), folder, device="cpu")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("run", TRAINED)
def test_intervals_of_claims_cover_on_fresh_samples(run, trained, monkeypatch):
    for module, name in ((representation_geometry, "PERMUTATIONS"), (representation_geometry, "RIDGE_PERMUTATIONS")):
        monkeypatch.setattr(module, name, 100)  # no interval needs them
    monkeypatch.setattr(value_manifold, "GAUSSIANS", 5)
    assert not low(coverage(list(replicates(runs(trained)[run], shapes_checked(range(7000, 7000 + REPLICATES))))))


@pytest.mark.slow
@pytest.mark.parametrize("draw", DRAWS, ids=lambda draw: draw.__name__)
def test_intervals_of_claims_cover_in_simulated_samples(draw):
    rng = np.random.default_rng(7)
    assert not low(coverage([declared_only(draw(rng)) for _ in shapes_checked(range(REPLICATES))]))


SIMULATED = {name: (draw, count) for name, draw, count in rows()}
MENDED = (
    "TwoNN ratio, 12 centres",
    "KL of 1,000 sequences, 10 in 10,000 off by 10 bits",
    "KL over .14 bits, 10 in 10,000 off by 10 bits",
    "KL, held-out less seen states, 20 in 10,000 off by 10 bits",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", SIMULATED)
def test_simulated_intervals_cover(name):
    draw, count = SIMULATED[name]
    rng = np.random.default_rng(11)
    new, old = covered([draw(rng) for _ in shapes_checked(range(count))])
    assert new >= least(name.split(",")[0], count)
    if name in MENDED:  # the interval before did not
        assert old < 0.9


def test_coverage_counts_intervals_that_hold_the_mean_of_the_statistic():
    rows = [{"p: x": (v, v - 1.0, v + 1.0, True)} for v in (-2.0, -0.5, 0.5, 2.0)]
    assert coverage(rows) == {"p: x": (True, 4, 0.5, 0.5, 0.0)}
    wider = [{"p: x": (v, v - 1.5, v + 1.5, False)} for v in (-2.0, -0.5, 0.5, 2.0)]
    assert coverage(wider)["p: x"] == (False, 4, 0.5, 1.0, 0.0)
