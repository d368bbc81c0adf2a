"""The sweep over architectures: resumed cell by cell, and its table is arithmetic on what was graded."""

import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from llmgeom import wind_tunnels
from llmgeom.commands.reproduce import RunConfig, perform
from llmgeom.dynamics import sweep
from llmgeom.errors import UserError
from llmgeom.model.subject import Subject
from llmgeom.papers import primitives
from llmgeom.probes.posterior.answers import grade
from llmgeom.progress import shown
from llmgeom.record import Record
from llmgeom.wind_tunnels.training_config import Training
from tests.refusals import refused

TINY = {"width": 8, "layers": 1, "heads": 1, "steps": 4, "batch": 4, "snapshots": 2, "warmup": 1}


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """The whole command, on two architectures and a few steps, in this process."""
    patch = pytest.MonkeyPatch()
    patch.setattr(sweep, "ProcessPoolExecutor", InProcess)
    patch.setattr(primitives, "ARCHITECTURES", ("lstm", "mlp"))
    patch.setattr(primitives, "PARAMETERS", 6000)
    patch.setattr(primitives, "GRADED", 40)
    patch.setattr(
        primitives, "PRIMITIVES", {k: replace(t, steps=16, batch=4) for k, t in primitives.PRIMITIVES.items()}
    )
    patch.setattr(primitives, "DOSED", replace(primitives.DOSED, steps=3, batch=4))
    out = tmp_path_factory.mktemp("primitives")
    yield perform(two_seeds(out / "run"))
    patch.undo()


def two_seeds(out: Path) -> RunConfig:
    return RunConfig(paper="paper1", only="primitives", seeds=2, dose_seeds=2, out=str(out))


def rows(found, key: str) -> list[dict]:
    """Rows of the table of primitives ("primitive"), or of the dose curve ("dose")."""
    return [row for row in found.to_dict()["rows"] if key in row]


class InProcess:
    """A pool that computes at once: what crosses to a process is tested by `test_cells_run_in_processes`."""

    def __init__(self, *_, **__) -> None: ...

    def submit(self, function, *arguments):
        from concurrent.futures import Future

        future: Future = Future()
        future.set_result(function(*arguments))
        return future

    def shutdown(self, **_) -> None: ...


@pytest.mark.slow
def test_cells_run_in_processes_and_a_finished_one_is_not_run_again(tmp_path, monkeypatch):
    cells = {f"a/seed{s}": Training("coin:flips=3", arch="mlp", **TINY, lr="1e-2", seed=s) for s in (0, 1)}
    told = []
    with shown(lambda *say: told.append(say)):
        found = sweep.sweep(cells, tmp_path, 20)
    assert told[0][1:3] == (0, 2) and told[-1][1:3] == (2, 2)
    monkeypatch.setattr(sweep, "ProcessPoolExecutor", lambda *_, **__: pytest.fail("ran again"))
    assert sweep.sweep(cells, tmp_path, 20) == found
    subject, task = Subject.load(str(tmp_path / "a/seed1")), wind_tunnels.load_task("coin:flips=3")
    made = grade(subject, task, 20, 1)
    assert found["a/seed1"]["kl"] == pytest.approx(made.kl) and found["a/seed1"]["skill"] == pytest.approx(made.skill)
    assert found["a/seed0"]["kl"] != found["a/seed1"]["kl"]


def test_a_cell_that_is_refused_does_not_end_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "ProcessPoolExecutor", InProcess)
    cells = {
        "good": Training("coin:flips=3", arch="mlp", **TINY),
        "bad": Training("coin:flips=3", arch="gqa", **TINY | {"width": 9}),
    }
    found = sweep.sweep(cells, tmp_path, 20)
    assert "kl" in found["good"] and "width 9 does not go with 1 heads" in found["bad"]["refused"]

    again = sweep.sweep(cells | {"bad": cells["good"]}, tmp_path, 20)
    assert "kl" in again["bad"]  # a refusal does not stop the next run


@pytest.mark.slow
def test_no_worker_outlives_a_run_that_was_killed(tmp_path):
    code = f"""
from pathlib import Path
from llmgeom.dynamics.sweep import sweep
from llmgeom.wind_tunnels.training_config import Training
if __name__ == "__main__":
    sweep({{"long": Training("coin", steps=10**6)}}, Path({str(tmp_path)!r}), 20)
"""
    (tmp_path / "run.py").write_text(code)
    running = subprocess.Popen([sys.executable, str(tmp_path / "run.py")])
    kept = tmp_path / "long/snapshots/step1"
    assert until(kept.exists, 120)
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    workers = [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert workers
    running.kill()
    running.wait()
    assert until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() for pid in workers), 30)


def until(met, seconds: float) -> bool:
    deadline = time.time() + seconds
    while time.time() < deadline and not met():
        time.sleep(0.1)
    return met()


@pytest.mark.slow
def test_the_table_is_what_was_graded(here):
    out, found = here
    cells = rows(found, "primitive")
    assert len(cells) == 3 * 2 and not [line for line in found.lines() if "not measured" in line]
    for row in cells:
        grades = [
            json.loads((out / row["primitive"] / row["arch"] / f"seed{s}" / "grade.json").read_text())["data"]
            for s in (0, 1)
        ]
        kl = [grade["kl"] for grade in grades]
        assert row["kl"] == pytest.approx(sum(kl) / 2)  # the median of two
        low, high = stats.t.interval(0.95, 1, loc=np.mean(kl), scale=stats.sem(kl))
        assert (row["low"], row["high"]) == pytest.approx((low, high))
        assert grades[0]["lr"] == grades[1]["lr"] == row["lr"]
        asked = [
            json.loads((out / row["primitive"] / row["arch"] / f"seed{s}/training.json").read_text())["training"]["lr"]
            for s in (0, 1)
        ]
        assert asked == ["auto", f"{row['lr']:g}"]  # chosen with the first seed
        assert abs(grades[0]["parameters"] / 6000 - 1) < 0.02
        assert row["verdict"] == "not reached at this budget"
    assert any("not reached at this budget" in line for line in found.lines())


@pytest.mark.parametrize("kl", [(0.1, 0.11, 0.12), (1.9, 2.0, 2.1), (0.1, 1, 2)])
def test_p_is_students_t_against_the_best_trivial_predictor(kl):
    cell = {"mae_abs": 0.0, "skill": 0.5, "cpu_seconds": 1.0, "best_trivial": "uniform", "kl_trivial": 1.0}
    grades = tuple(cell | {"kl": k, "lr": 1e-3, "parameters": 10} for k in kl)
    h = primitives.Cell("binding", "lstm", grades).estimate()
    assert h.p == pytest.approx(stats.ttest_1samp(kl, 1.0, alternative="less").pvalue)


def test_reached_asks_it_of_every_seed():
    cell = {"kl": 0.001, "mae_abs": 0.0, "skill": 0.99, "cpu_seconds": 1.0, "best_trivial": "uniform"}
    cell |= {"kl_trivial": 1.0, "lr": 1e-3, "parameters": 10}
    for other, reached in ((cell, True), (cell | {"kl": 0.011}, False), (cell | {"skill": 0.94}, False)):
        assert (primitives.Cell("binding", "lstm", (cell, other)).verdict == "reached") == reached


def test_the_dose_curve_has_its_closed_form_beside_it(here):
    """The bijection's posterior is even over what is left, so its distance from the mixture is arithmetic: with m of V
    left, the mixture gives each of them (1 - p) / m + p / V."""
    _, found = here
    v, doses = 8, rows(found, "dose")
    for row in doses:
        p = row["dose"]
        each = [-math.log2((1 - p) + p * m / v) for m in range(v, v - 7, -1)]
        assert row["kl_expected"] == pytest.approx(sum(each) / 7, abs=1e-6)
    assert [row["dose"] for row in doses] == [0.0, 0.25, 0.5, 1.0]
    assert doses[0]["kl_mixture"] == doses[0]["kl_clean"] and doses[3]["kl_mixture"] < doses[3]["kl_clean"]


def test_the_record_is_the_table(here):
    out, found = here
    record = Record.load(out)
    kl = record.results["primitives"].arrays["kl"]
    assert kl.shape == (3, 2) and kl.reshape(-1).tolist() == pytest.approx(
        [row["kl"] for row in rows(found, "primitive")]
    )
    assert (out / "report.html").stat().st_size > 1000
    estimates = record.results["primitives"].estimates
    assert [h.value for h in estimates] == pytest.approx([row["mean"] for row in rows(found, "primitive")])
    for h, row in zip(estimates, rows(found, "primitive"), strict=True):
        assert h.name == f"{row['primitive']}, {row['arch']}: KL to the posterior"
        assert (h.low, h.high, h.null_low, h.clusters) == (row["low"], row["high"], row["kl_trivial"], 2)
    assert record.facts["command"] == "llmgeom reproduce paper1 --only primitives --seeds 2 --dose-seeds 2"


def test_an_architecture_that_lacks_a_cell_has_no_column(here):
    out, _ = here
    (source,) = primitives.sources(two_seeds(out).options, [], out)
    lacking = tuple(cell for cell in source.cells if (cell.primitive, cell.arch) != ("binding", "mlp"))
    profile = replace(source, cells=lacking).profile
    assert profile.ticks["architecture"] == ("lstm",) and profile.kl.shape == (3, 1)
    with pytest.raises(UserError):
        _ = replace(source, cells=tuple(cell for cell in lacking if cell.primitive == "binding")).profile


def test_quick_is_a_fifth_of_the_steps():
    for primitive in primitives.PRIMITIVES:
        whole, quick = (primitives.training(primitive, "lstm", quick=q) for q in (False, True))
        assert quick.steps == whole.steps // 5 and whole.lr == "auto"


def test_one_seed_gives_no_interval():
    with pytest.raises(UserError):
        RunConfig(paper="paper1", only="primitives", seeds=1)


def test_what_ended_well_once_has_no_interval_and_no_place(here, monkeypatch):
    out, _ = here
    lost = {"binding/lstm/seed1", "dose/0.5/seed1"}
    monkeypatch.setattr(primitives, "finished", lambda found, names: [found[n] for n in names if n not in lost])
    kept = (out / "record.json").read_text()
    (out / "record.json").write_text('{"facts": {"spec": "of another run"}}')
    with refused(UserError, "--out"):
        perform(two_seeds(out))
    assert "of another run" in (out / "record.json").read_text()
    (out / "record.json").write_text(kept)
    _, found = perform(two_seeds(out))
    assert [row["primitive"] for row in rows(found, "primitive") if row["arch"] == "lstm"] == [
        "accumulation",
        "transport",
    ]
    assert [row["dose"] for row in rows(found, "dose")] == [0.0, 0.25, 1.0]
    monkeypatch.setattr(primitives, "finished", lambda found, names: [found[n] for n in names][:1])
    with refused(UserError, "dose"):
        perform(two_seeds(out))
