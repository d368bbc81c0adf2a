"""Ctrl-C once finishes what is in hand and names the command that goes on; twice stops at once."""

import os
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

from llmgeom.cache import interrupt
from llmgeom.cli import main
from llmgeom.files import remove_unfinished, write_whole
from llmgeom.model import running
from llmgeom.model.model import Model
from llmgeom.wind_tunnels import training as trainer
from tests.test_train_kills import files


@pytest.fixture(autouse=True)
def hears():
    """A suite that was started in the background inherits an ignored SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def ctrl_c(times: int) -> None:
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)


def call(*args: str):
    return CliRunner().invoke(main, list(args), prog_name="llmgeom")


# ---- the rule -------------------------------------------------------------------------------------------------------


def test_the_first_waits_for_the_end_of_what_is_in_hand_and_the_second_does_not():
    for times, reached in ((1, ["inner", "outer"]), (2, [])):
        told, seen = [], []
        with pytest.raises(KeyboardInterrupt), interrupt.handled(lambda told=told: told.append("stopping")):
            with interrupt.deferred():
                with interrupt.deferred():
                    ctrl_c(times)
                    seen.append("inner")
                assert interrupt.requested()
                seen.append("outer")
            seen.append("after")
        assert (seen, told) == (reached, ["stopping"])
        assert not interrupt.requested() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with interrupt.deferred():  # nothing is left of it
            pass


def test_outside_of_what_is_in_hand_the_first_stops_at_once():
    with pytest.raises(KeyboardInterrupt), interrupt.handled(lambda: pytest.fail("waited")):
        ctrl_c(1)
        pytest.fail("went on")


def test_an_interrupted_write_leaves_no_file(tmp_path, monkeypatch):
    def ctrl_c(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "a", b"x")
    assert list(tmp_path.iterdir()) == []


def test_sigterm_is_heard_like_ctrl_c_and_gives_its_own_code():
    with pytest.raises(KeyboardInterrupt), interrupt.handled(lambda: None), interrupt.deferred():
        signal.raise_signal(signal.SIGTERM)
        assert interrupt.requested()
    assert interrupt.code() == 143 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with pytest.raises(KeyboardInterrupt), interrupt.handled(lambda: None):
        ctrl_c(1)
    assert interrupt.code() == 130


# ---- commands -------------------------------------------------------------------------------------------------------

SCAN = ("--domain", "math", "--n", "20", "--limit", "60", "--control-models", "2", "--probes", "attention_focus", "-q")
TINY = ("bijection:vocab=4,pairs=3", "--width", "16", "--layers", "1", "--heads", "2", "--batch", "16", "--lr", "1e-2")


@pytest.mark.slow
def test_a_scan_ends_with_its_batch_and_goes_on_to_the_same_bytes(tmp_path, monkeypatch):
    plain, passes = running.one_pass, []

    def counted(interrupted: int, run, times: int = 0) -> int:
        def one(*arguments):
            passes.append(1)
            ctrl_c(times if len(passes) == interrupted else 0)
            return plain(*arguments)

        passes.clear()
        monkeypatch.setattr(running, "one_pass", one)
        run()
        return len(passes)

    def scan(interrupted: int, cache: str, code: int, times: int = 0) -> int:
        monkeypatch.setenv("LLMGEOM_CACHE", str(tmp_path / cache))
        asked = ("scan", *SCAN, "--out", str(tmp_path / cache / "run"))
        done = []
        n = counted(interrupted, lambda: done.append(call(*asked)), times)
        assert done[0].exit_code == code, done[0].output
        assert code == 0 or f"Continue with: llmgeom {' '.join(asked)}\n" in done[0].stderr
        return n

    checks = counted(0, lambda: Model.load("pocket:pythia"))
    every = scan(0, "whole", 0)
    # The batches in hand at the first Ctrl-C are kept; at the second the two that run at the same time are lost.
    assert scan(checks + 3, "cut", 130, times=1) == checks + 3
    assert scan(checks + 2, "cut", 130, times=2) == checks + 2
    assert not list(tmp_path.rglob("*.tmp")) and not (tmp_path / "cut/run/record.json").exists()
    assert scan(0, "cut", 0) == every - 3
    for name in ("arrays.safetensors", "prompts.jsonl", "report.html"):
        assert (tmp_path / "whole/run" / name).read_bytes() == (tmp_path / "cut/run" / name).read_bytes()


@pytest.mark.parametrize(
    ("number", "times", "state", "code"),
    [(signal.SIGINT, 1, 18, 130), (signal.SIGINT, 2, None, 130), (signal.SIGTERM, 1, 18, 143)],
)
def test_a_training_ends_with_its_step_and_goes_on_to_the_same_bytes(tmp_path, monkeypatch, number, times, state, code):
    monkeypatch.setattr(trainer, "CHECK_EVERY", 10)
    assert call("train", *TINY, "--steps", "40", "--out", str(tmp_path / "a")).exit_code == 0
    plain = trainer.Trainer.step
    send = lambda i: [signal.raise_signal(number) for _ in range(times * (i == 17))]  # noqa: E731
    monkeypatch.setattr(trainer.Trainer, "step", lambda run, i: [send(i), plain(run, i)][1])
    asked = ("train", *TINY, "--steps", "40", "--out", str(tmp_path / "b"))
    done = call(*asked)
    assert done.exit_code == code and f"Continue with: llmgeom {' '.join(asked)}\n" in done.stderr
    facts = trainer.resume_facts(tmp_path / "b")
    assert (facts and facts["step"]) == state and not list(tmp_path.rglob("*.tmp"))
    steps = []
    monkeypatch.setattr(trainer.Trainer, "step", lambda run, i: steps.append(i) or plain(run, i))
    assert call(*asked).exit_code == 0
    assert steps == list(range(state or 0, 40))  # nothing that was finished is done again
    assert files(tmp_path / "a") == files(tmp_path / "b")


@pytest.mark.slow
def test_a_sweep_tells_its_processes_to_end_with_their_step(tmp_path):
    """A terminal sends Ctrl-C to the whole group: the first process alone heeds it, and the others end in order."""
    script = tmp_path / "script.py"
    script.write_text(f"""
from llmgeom.cli import main
from llmgeom.dynamics import study
from llmgeom.wind_tunnels.training_config import Training
if __name__ == "__main__":
    study.recipe = lambda task, quick: Training(task, arch="lstm", steps=10**7, batch=4, width=8, layers=1, snapshots=2)
    main(["dynamics", "--task", "bijection", "--seeds", "2", "--out", {str(tmp_path / "out")!r}, "-q"])
""")
    running = subprocess.Popen([sys.executable, script], stderr=subprocess.PIPE, text=True, start_new_session=True)
    begun = [tmp_path / f"out/runs/run-seed{seed}" for seed in (0, 1)]
    deadline = time.time() + 120
    while not all((one / "snapshots/step0").exists() for one in begun) and time.time() < deadline:
        time.sleep(0.05)
    os.killpg(running.pid, signal.SIGINT)
    _, stderr = running.communicate(timeout=60)
    assert running.returncode == 130, stderr
    first, last = (line for line in stderr.splitlines() if line)
    assert "stopping after" in first and "Continue with: llmgeom dynamics --task bijection" in last
    for one in begun:
        assert trainer.resume_facts(one)["step"] > 0 and not list(one.rglob("*.tmp"))


def test_what_a_process_that_still_runs_is_writing_stays(tmp_path):
    """Process 1 runs always."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    gone = ended.pid
    names = [f".a.{os.getpid()}.tmp", ".a.1.tmp", f".a.{gone}.tmp", f".b.{gone}.tmp", ".a.tmp", "a", ".a.x.tmp"]
    for name in names:
        (tmp_path / name).touch()
    (tmp_path / f".c.{gone}.tmp").mkdir()
    (tmp_path / f".c.{gone}.tmp/x").touch()
    remove_unfinished(tmp_path, "b")
    assert {p.name for p in tmp_path.iterdir()} == {*names, f".c.{gone}.tmp"} - {f".b.{gone}.tmp"}
    remove_unfinished(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {*names} - {f".a.{gone}.tmp", f".b.{gone}.tmp"}
