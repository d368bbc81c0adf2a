"""Snapshots are followed one at a time: what is in memory, and what is read of models without attention."""

import gc
import shutil
import weakref
from dataclasses import replace
from pathlib import Path

import pytest

from llmgeom.commands.dynamics import RunConfig, perform
from llmgeom.dynamics import study
from llmgeom.dynamics.runs import Run
from llmgeom.dynamics.study import Inputs, follow
from llmgeom.errors import Unavailable
from llmgeom.model.model import Model
from llmgeom.wind_tunnels.training import train
from tests.test_dynamics import STEPS, TASK, TINY
from tests.test_dynamics_checkpoints import checkpoints  # noqa: F401  (a fixture)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[Run]:
    """Two seeds."""
    root = tmp_path_factory.mktemp("runs")
    return [Run.of(str(train(replace(TINY, seed=seed), root / f"run{seed}").out)) for seed in (0, 1)]


class Alive:
    """Counts what is alive of each snapshot whenever another one is loaded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.places: list[str] = []
        self.counts: list[dict[str, int]] = []
        self.references: dict[str, list[weakref.ref]] = {
            name: [] for name in ("states", "arrays", "captures", "models")
        }
        load, capture, state = Model.load.__func__, Model.capture, study.state

        def loaded(cls, place, *more, **options):
            gc.collect()  # a circle of references may wait for it
            self.places.append(Path(place).name)
            self.counts.append({name: sum(r() is not None for r in refs) for name, refs in self.references.items()})
            subject = load(cls, place, *more, **options)
            self.references["models"].append(weakref.ref(subject.model))
            return subject

        def captured(*given, **options):
            taken = capture(*given, **options)
            self.references["captures"].append(weakref.ref(taken))
            return taken

        def stated(*given):
            now = state(*given)
            self.references["states"].append(weakref.ref(now))
            self.references["arrays"] += [weakref.ref(array) for array in (*now.attention, *now.value)]
            return now

        monkeypatch.setattr(Model, "load", classmethod(loaded))
        monkeypatch.setattr(Model, "capture", captured)
        monkeypatch.setattr(study, "state", stated)


def test_no_snapshot_is_in_memory_when_the_next_is_loaded_but_the_last_of_its_run(runs, monkeypatch):
    """Attention and values of all snapshots were kept until the last was read: 20 GB for 154 of Pythia-410m."""
    alive = Alive(monkeypatch)
    trajectories, unmeasured = follow(runs, Inputs(TASK, n=12), {}, None)
    assert not unmeasured and alive.places == [
        name for seed in (0, 1) for name in (f"run{seed}", *(f"step{step}" for step in STEPS[:-1]))
    ]
    end = {"states": 1, "arrays": 2, "captures": 0, "models": 0}
    nothing = dict.fromkeys(end, 0)
    assert alive.counts == [nothing, *[end] * 4] * 2
    assert len(alive.references["states"]) == 10 and all(len(each.weights) == len(STEPS) for each in trajectories)


def test_a_scanned_snapshot_s_model_is_freed_before_the_next_is_loaded(runs, monkeypatch, tmp_path):
    alive = Alive(monkeypatch)
    folder = runs[0].places[-1][0]
    perform(RunConfig(runs=(folder,), probes=("value_manifold",), n=12, nulls=1, out=str(tmp_path / "out")))
    assert len(alive.counts) == 2 * len(STEPS) + 1 and not any(count["models"] for count in alive.counts)


def test_a_rising_loss_is_warned_of_without_attention(checkpoints, monkeypatch, tmp_path):  # noqa: F811
    """The loss was read with attention alone: where there is none, a revision with other weights went unnoticed."""
    for step, name in ((0, 0), (100, 1000), (1000, 100)):  # the trained and the half-trained have changed their names
        shutil.copytree(checkpoints / f"checkpoint-{name}", tmp_path / "swapped" / f"checkpoint-{step}")
    folder = str(tmp_path / "swapped")
    (with_attention,), _ = follow([Run.of(folder)], Inputs(n=10), {}, None)

    def refuse(*_):
        raise Unavailable("a model without them")

    monkeypatch.setattr(study, "state", refuse)
    (without,), unmeasured = follow([Run.of(folder)], Inputs(n=10), {}, None)
    assert set(unmeasured) == {"drift"}
    assert all("frame" not in one and "score_gradient" in one for one in without.snapshots)
    assert without.curve("loss").tolist() == with_attention.curve("loss").tolist() and len(without.snapshots) == 3
    monkeypatch.setattr(study, "signals", refuse)
    _, record = perform(RunConfig(runs=(folder,), probes=(), n=10, out=str(tmp_path / "out")))
    assert set(record.unmeasured) == {"drift", "gradients"} and "gradients" not in record.results
    assert any("rises" in warning and "step 100 to step 1000" in warning for warning in record.warnings)
