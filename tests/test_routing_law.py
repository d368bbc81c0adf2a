"""The next step and the advantage, judged by plain loops and by steps that follow or do not."""

from dataclasses import replace

import numpy as np
import pytest

from llmgeom import wind_tunnels
from llmgeom.claims import judge
from llmgeom.errors import UserError
from llmgeom.model.model import Model
from llmgeom.probe import ProbeInput
from llmgeom.wind_tunnels.models.architectures import build
from studies import routing_law
from studies.gradients import routing, step
from studies.routing_law import BEYOND, NEXT, PART, PULLED, Reading
from tests.families import FAMILIES, ragged
from tests.words import beyond


def made(follows: float, seed: int = 0, clusters: int = 12, pulled: float | None = None, scan: bool = False) -> Reading:
    """A reading in which the step follows the advantage on this share of attention, by head and sequence."""
    rng = np.random.default_rng(seed)
    shape = (2, 3, clusters)
    mass, pull = rng.uniform(5, 9, shape), rng.uniform(5, 9, shape)
    noise = rng.normal(0, 0.02, shape)
    drawn = rng.normal(0.5, 0.01, (20, 2, 2, 3)) * np.stack([mass.sum(2), pull.sum(2)], 1)
    return Reading(
        error=np.full((4, 2), 1e-15),
        rival=np.ones(2),
        mass=mass,
        positive=mass / 2,
        agree=mass * (follows + noise),
        pull=pull,
        pulled=pull * ((follows if pulled is None else pulled) + noise),
        shuffled=drawn,
        relative=pull * (0.6 + noise) if scan else pull,
        whole=pull,
        stakes=np.ones((2, 3)),
        map=np.zeros((4, 4)),
        where=(0, 0),
        names=("score", "value", "query", "key"),
        clusters=np.array([f"t{i}" for i in range(clusters)]),
        queries=99,
        scan=scan,
        expected=1e-4,
        decrease=1e-4,
    )


def said(ours: Reading, *theirs: Reading):
    result = routing_law.measure(ProbeInput(capture=None, entropy=None, observations=ours, control_observations=theirs))
    judged = judge({"routing_law": result.lowered()})["routing_law"]
    return {h.name: h for h in judged.estimates}, result


def test_a_step_that_follows_is_above_chance_and_one_that_does_not_is_not():
    untrained = [made(0.5, seed) for seed in range(1, 21)]
    found, result = said(made(0.8), *untrained)
    assert [beyond(found[name]) for name in (NEXT, PULLED, BEYOND)] == ["yes"] * 3
    assert found[NEXT].value == pytest.approx(0.8, abs=0.02) and found[NEXT].n == 99 and found[NEXT].clusters == 12
    assert PART not in found and not result.warnings
    found, _ = said(made(0.5, pulled=0.8), *untrained)
    assert beyond(found[NEXT]) == beyond(found[BEYOND]) == "no" and beyond(found[PULLED]) == "yes"
    found, _ = said(made(0.8), *[made(0.8, seed) for seed in range(1, 21)])
    assert beyond(found[NEXT]) == "yes" and beyond(found[BEYOND]) == "no"


def test_where_the_formulas_are_not_the_gradients_nothing_is_measured():
    assert "1e-15 of the largest" in said(made(0.5))[1].notes[2]
    with pytest.raises(UserError):
        said(replace(made(0.5), error=np.full((4, 2), 1e-3)))


def test_reading_a_model_counts_what_its_gradients_say():
    """One head's numbers by plain loops over the pairs."""
    subject, batch = Model.of(FAMILIES["llama"].model()), ragged(lengths=(9, 5, 7, 8, 6, 4))
    batch = replace(batch, cluster=("a", "a", "b", "c", "d", "e"))
    found = routing_law.read(subject, batch)
    assert found.clusters.tolist() == ["a", "b", "c", "d", "e"]
    taken = step(subject, batch.take([0, 2, 3, 4, 5]))
    one, moved = taken.before.layers[1], taken.share[1]
    mass = agree = positive = pulled = 0.0
    for i in range(1, 6):  # sequence 1 has 7 tokens: queries 1 to 5 have two keys or more and a token after them
        for j in range(i + 1):
            a, d, w = (float(x[1, 3, i, j]) for x in (one.advantage, moved, one.weight))
            mass, positive, agree = mass + w, positive + w * (a > 0), agree + w * (a * d > 0)
            pulled += abs(float(one.law.score[1, 3, i, j])) * (a * d > 0)
    assert mass == pytest.approx(5)
    for name, value in (("mass", mass), ("positive", positive), ("agree", agree), ("pulled", pulled)):
        assert getattr(found, name)[1, 3, 1] == pytest.approx(value), name
    layer, head = found.where
    score = taken.before.layers[layer].law.score[0, head, :9, :9]
    np.testing.assert_allclose(found.map, -found.queries * score.numpy())
    rows = sum(n - 1 for n in (9, 7, 8, 6, 4))
    stakes = found.queries * taken.before.layers[1].law.score[:, 3].abs().sum() / rows
    assert found.stakes[1, 3] == pytest.approx(float(stakes)) and found.stakes.max() == found.stakes[layer, head]
    assert found.error.shape == (4, 2) and found.error.max() < 1e-12 and found.rival.min() > 0.01


def test_without_its_baseline_the_law_is_wrong_and_with_one_a_scan_s_is():
    task = wind_tunnels.load_world("bijection:vocab=4,pairs=3")
    for arch in ("gpt2", "mamba2"):
        subject = Model.of(build(arch, vocabulary=task.vocabulary, length=task.length, width=8))
        assert routing_law.read(subject, task.truncated(8, 0)).rival.min() > 0.05


def test_the_advantage_s_part_of_a_scan_is_that_of_its_squared_gradient():
    task = wind_tunnels.load_world("bijection:vocab=4,pairs=3")
    subject = Model.of(build("mamba2", vocabulary=task.vocabulary, length=task.length, width=8))
    found, one = routing_law.read(subject, task.truncated(6, 0)), routing(subject, task.truncated(6, 0)).layers[0]
    choice = one.seen & (one.seen.sum(-1, keepdim=True) > 1)
    whole, relative = one.law.score * choice, (one.share * one.advantage) * choice
    np.testing.assert_allclose(found.whole[0], whole.square().sum((2, 3)).T.numpy())
    np.testing.assert_allclose(found.relative[0], relative.square().sum((2, 3)).T.numpy())
