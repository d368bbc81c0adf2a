"""Many trainings on all cores: resumed cell by cell, refused one by one, and ended with the run."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmgeom import wind_tunnels
from llmgeom.dynamics import processes
from llmgeom.model.model import Model
from llmgeom.probes.posterior.grading import grade
from llmgeom.progress import shown
from llmgeom.wind_tunnels.training_config import Training
from studies import trainings as sweep

TINY = {"width": 8, "layers": 1, "heads": 1, "steps": 4, "batch": 4, "snapshots": 2, "warmup": 1}


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
    cells = {f"a/seed{s}": Training("coin:steps=3", arch="mlp", **TINY, lr="1e-2", seed=s) for s in (0, 1)}
    told = []
    with shown(lambda *say: told.append(say)):
        found = sweep.sweep(cells, tmp_path, 20)
    assert told[0][1:3] == (0, 2) and told[-1][1:3] == (2, 2)
    monkeypatch.setattr(processes, "ProcessPoolExecutor", lambda *_, **__: pytest.fail("ran again"))
    assert sweep.sweep(cells, tmp_path, 20) == found
    subject, task = Model.load(str(tmp_path / "a/seed1")), wind_tunnels.load_world("coin:steps=3")
    made = grade(subject, task, 20, 1)
    assert found["a/seed1"]["kl"] == pytest.approx(made.kl) and found["a/seed1"]["skill"] == pytest.approx(made.skill)
    assert found["a/seed0"]["kl"] != found["a/seed1"]["kl"]


@pytest.mark.slow
def test_no_worker_outlives_a_run_that_was_killed(tmp_path):
    code = f"""
from llmgeom.dynamics.processes import spread
from llmgeom.wind_tunnels.training import train
from llmgeom.wind_tunnels.training_config import Training
if __name__ == "__main__":
    spread(train, {{"long": (Training("coin", steps=10**6), {str(tmp_path / "long")!r})}}, print)
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
