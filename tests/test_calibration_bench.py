"""The bench of the calibration: as large as it says, goes on where it stopped, and reads entropy where it varies."""

import json
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from llmgeom import wind_tunnels
from llmgeom.bench import cells, readings as bench, sweep
from llmgeom.bench.cells import CELLS, KINDS, NEGATIVES, SEEDS, recipes
from llmgeom.cli import main
from llmgeom.model.subject import Subject
from llmgeom.probes.posterior.answers import grade
from llmgeom.wind_tunnels import load_task
from llmgeom.wind_tunnels.checkpoint import snapshot_steps
from llmgeom.wind_tunnels.models.architectures import build
from llmgeom.wind_tunnels.training import train
from llmgeom.wind_tunnels.training_config import Training
from tests.calibrated import fabricated
from tests.test_primitives import InProcess


def test_the_bench_is_as_large_as_it_says():
    runs = recipes()
    assert len(CELLS) == 15 and len({cell.training.task for cell in CELLS.values()}) == 11
    kinds = Counter(kind for run in runs.values() for kind, _ in run.readings)
    assert set(kinds) == set(KINDS) and {*KINDS} == {"trained", *NEGATIVES}
    assert all(kinds[kind] == SEEDS * 15 for kind in ("trained", "no inference", "untrained", "stopped"))
    by_kind = {kind: {run.task for run in runs.values() if kind in dict(run.readings)} for kind in KINDS}
    assert all(len(tasks) >= 5 for tasks in by_kind.values())  # over fewer, intervals are too wide to decide
    assert len({(run.cell, str(run.training)) for run in runs.values()}) == len(runs)


@pytest.mark.parametrize("name", CELLS)
def test_no_negative_is_exact_and_none_can_be_told_by_its_shape(name):
    """A bag of values, or the last observation, is a negative only where the posterior asks for more."""
    cell = CELLS[name]
    task = wind_tunnels.load_task(cell.training.task)
    scores = grade(Subject.of(build(cell.training.arch, **shape(cell.training, task)), None, "x"), task, 300, 0)
    for kind, change in cell.others.items():
        predictor = {"last observation": "memoryless", "bag of values": "bag of values"}.get(kind)
        assert predictor not in scores.as_exact
        other = wind_tunnels.load_task(change.get("task", cell.training.task))
        assert (other.length, other.vocabulary, other.query) == (task.length, task.vocabulary, task.query)
        if kind == "wrong prior":
            inputs = task.sample(300, 0, task.test_split).tokens.data
            right, wrong = task.log_predictive(inputs), other.log_predictive(inputs)
            assert (right.exp() * (right - wrong)).sum(-1).mean() / math.log(2) > 0.02  # bits


def shape(training, task):
    heads = 4 if training.arch == "gqa" else 2
    return {
        "vocabulary": task.vocabulary,
        "length": task.length,
        "features": task.features,
        "width": 16,
        "layers": 1,
        "heads": heads,
    }


def test_no_untrained_control_is_a_model_of_the_bench():
    seeds = {run.training.seed for run in recipes().values()}
    untrained = {1000 + 100 * seed + 1 + i for seed in seeds for i in range(20)}
    assert not seeds & untrained


@pytest.fixture
def small(monkeypatch):
    """Two cells, hardly trained and hardly read."""
    monkeypatch.setattr(sweep, "ProcessPoolExecutor", InProcess)
    kept = {}
    for name in ("coin neox", "bijection llama"):
        training = replace(CELLS[name].training, width=8, layers=1, steps=8, batch=8, warmup=1)
        kept[name] = cells.Cell(training, cells.IDLE)
    monkeypatch.setattr(cells, "CELLS", kept)
    made = []

    def read(folder, task, seed):
        made.append((folder, task, seed))
        return fabricated("-trained-" in folder.parent.parent.name, made=len(made))

    monkeypatch.setattr(bench, "reading", read)
    return made


def test_a_bench_that_was_stopped_goes_on(small, tmp_path):
    found = bench.readings(tmp_path)
    assert len(found) == len(small) == SEEDS * 8
    assert Counter(one["kind"] for one in found) == dict.fromkeys(
        ("trained", "stopped", "no inference", "untrained"), 2 * SEEDS
    )
    assert bench.readings(tmp_path) == found == bench.finished(tmp_path)
    assert len(small) == len(found)  # nothing was read twice
    next(tmp_path.glob("coin*/untrained.json")).unlink()
    assert {one["cell"] for one in bench.finished(tmp_path)} == {"bijection llama"}
    bench.readings(tmp_path)
    assert len(small) == len(found) + 1


def test_a_training_that_stays_short_is_no_positive(small, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "reading", lambda folder, task, seed: fabricated(False))
    kinds = Counter(one["kind"] for one in bench.readings(tmp_path))
    assert kinds["trained"] == 0 and kinds["stopped"] == 4 * SEEDS


def test_a_stopped_model_has_the_loss_of_the_best_predictor_that_does_not_infer(tmp_path):
    """The oracle grades every snapshot on other sequences."""
    task = wind_tunnels.load_task("coin:flips=6")
    training = Training("coin:flips=6", arch="gpt2", width=16, layers=1, steps=60, lr="1e-2", batch=32)
    train(training, tmp_path, device="cpu")
    step = bench.equal_loss(tmp_path, cells.Recipe("c", "coin:flips=6", training, ()), task)
    steps = [s for s in snapshot_steps(60, training.snapshots) if 0 < s < 60]
    scores = {s: grade(Subject.load(str(tmp_path / "snapshots" / f"step{s}")), task, 1000, 3) for s in steps}
    away = {s: abs(math.log(one.kl / one.trivial[one.best].kl.mean())) for s, one in scores.items()}
    assert away[step] == pytest.approx(min(away.values()), abs=0.3)


def test_positives_are_decided_on_sequences_that_no_printed_metric_has_seen():
    assert bench.DECIDING_SEED not in {1000 + 100 * run.training.seed for run in recipes().values()}


def test_the_command_goes_on_and_prints(small, tmp_path):
    runner = CliRunner()
    first = runner.invoke(main, ["calibrate", "-q", "--out", str(tmp_path)])
    assert first.exit_code == 0, first.output
    assert "PC1 share" in first.output
    assert (tmp_path / "report.html").exists()
    found = json.loads(runner.invoke(main, ["calibrate", "--finished", "--json", "--out", str(tmp_path)]).output)
    assert found["bench"]["models"]["trained"] == 2 * SEEDS
    assert json.loads((tmp_path / "calibration.json").read_text())["bench"] == found["bench"]
    (tmp_path / "record.json").write_text('{"facts": {"spec": "of another run"}}')
    refused = runner.invoke(main, ["calibrate", "-q", "--out", str(tmp_path)])
    assert refused.exit_code and "of another run" in (tmp_path / "record.json").read_text()


def test_entropy_is_read_at_the_one_query_where_the_exact_entropy_varies_most():
    """The oracle counts heads: after t flips, h of them heads, the odds are (h + 1) : (t - h + 1)."""
    task = load_task("coin:flips=12")
    at = bench.entropy_query(task)
    batch = task.truncated(300, 5, task.test_split, at=at)
    assert set(batch.columns["asked_at"]) == {task.query[at]}

    def entropy(flips):
        p = (sum(flips) + 1) / (len(flips) + 2)
        return -(p * np.log2(p) + (1 - p) * np.log2(1 - p))

    found = [entropy(row[1:]) for row in batch.tokens.real]  # the first token only begins the sequence
    assert all(set(row[1:]) <= {0, 1} and len(row) == task.query[at] + 1 for row in batch.tokens.real)
    np.testing.assert_allclose(batch.columns["exact_entropy"], found, atol=1e-5)


def test_where_the_exact_entropy_does_not_vary_the_bench_ranks_no_model(monkeypatch):
    task = load_task("bijection:vocab=6,pairs=5")
    model = build("gpt2", vocabulary=task.vocabulary, length=task.length, features=0, width=16, layers=1, heads=4)
    monkeypatch.setattr(bench, "CONTROLS", 2)
    record = bench.scan_entropy(Subject.of(model, None, "gpt2"), task, 40, 0)
    names = {h.name for h in record.results["value_manifold"].estimates}
    assert not any("entropy" in name or "order along" in name for name in names)
    assert record.unmeasured["value_manifold: entropy decodability (held-out R2)"].startswith("not measured")
