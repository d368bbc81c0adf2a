"""A training that is killed, wherever, ends with the same bytes when the same command is given again.

`python -m tests.test_train_kills FOLDER RANDOM SEED` kills `llmgeom train` at named points and at RANDOM moments, and
prints a line for each kill. One process imports torch and forks one for each command, whose functions it patches.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from llmgeom.cli import main
from llmgeom.model import hub
from llmgeom.wind_tunnels import checkpoint, training as trainer
from llmgeom.wind_tunnels.models import architectures  # noqa: F401  (imported once, before the forks)

ASKED = "train bijection:vocab=4,pairs=3 --width 16 --layers 1 --heads 2 --steps 60 --batch 16 --lr 1e-2 --warmup 5 -q"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before(owner: object, name: str, here: Callable[..., bool], wreck: Callable[..., None] = lambda *_: None) -> None:
    """Kill this process where `owner.name` is called with arguments of which `here` is true, after `wreck` of them."""
    whole = getattr(owner, name)

    def patched(*arguments, **more):
        if here(*arguments):
            wreck(*arguments)
            die()
        return whole(*arguments, **more)

    setattr(owner, name, patched)


def _halve(path: Path, *_: object) -> None:
    os.truncate(path, os.stat(path).st_size // 2)


def _torn_snapshot() -> None:
    """Half the weights of the snapshot of step 20 are in its temporary folder, and nothing after them."""
    here = lambda path, _: path.name == hub.TUNNEL and path.parent.name.startswith(".step20.")  # noqa: E731
    before(checkpoint, "write_json", here, lambda path, _: _halve(path.with_name("model.safetensors")))


def _to(name: str, parent: str = "") -> Callable[..., bool]:
    return lambda _, target: Path(target).name == name and Path(target).parent.name.startswith(parent)


POINTS: dict[str, Callable[[], None]] = {
    "between two steps": lambda: before(trainer.Trainer, "step", lambda _, step: step == 37),
    "the first snapshot whole, not in its place": lambda: before(os, "replace", _to("step0")),
    "a snapshot half-written": _torn_snapshot,
    "a resume state half-written": lambda: before(os, "replace", _to(trainer.RESUME), _halve),
    "a resume state whole, not in its place": lambda: before(os, "replace", _to(trainer.RESUME)),
    "after the last step": lambda: before(trainer, "kl_to_exact", lambda *_: True),
    "the model without its weights": lambda: before(os, "replace", _to("model.safetensors", "cut")),
    "the model without training.json": lambda: before(os, "replace", _to(trainer.TRAINING, "cut")),
    "the resume state not yet removed": lambda: before(Path, "unlink", lambda path: path.name == trainer.RESUME),
}


def run(out: Path, arm: Callable[[], None] | None = None, seconds: float | None = None) -> int:
    """The command in a process of its own: its exit code, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            if arm:
                arm()
            main([*ASKED.split(), "--out", str(out)])
        except SystemExit as end:
            code = end.code
        finally:
            os._exit(code)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def files(folder: Path) -> dict[str, object]:
    """All that is in a folder, hidden files too, less what may vary between equal runs."""
    found: dict[str, object] = {str(p.relative_to(folder)): p.is_file() and p.read_bytes() for p in folder.rglob("*")}
    for name in [name for name in found if name.endswith(trainer.TRAINING)]:
        found[name] = {k: v for k, v in json.loads(found[name]).items() if k != "run"}
    return found


def differs(out: Path, whole: dict[str, object]) -> list[str]:
    """What a finished folder has otherwise than an undisturbed one, and what lies about beside it."""
    ours = files(out)
    beside = [p.name for p in out.parent.iterdir() if p != out and p.name != "whole"]
    return [name for name in sorted({*ours, *whole}) if ours.get(name, 0) != whole.get(name, 0)] + beside


def kill_all(folder: Path, moments: int, seed: int) -> None:
    trainer.CHECK_EVERY, trainer.SAVE_EVERY = 10, 0.0
    started = time.monotonic()
    assert run(folder / "whole") == 0
    took, whole = time.monotonic() - started, files(folder / "whole")
    lots = random.Random(seed)

    def after(how: str, *kills: tuple) -> None:
        """The same command after every kill, in a folder that holds nothing else."""
        out = folder / how.replace(" ", "-") / "cut"
        ends = [run(out, *kill) for kill in kills]
        last = run(out)
        print(json.dumps({"kill": how, "ends": [*ends, last], "differs": differs(out, whole)}), flush=True)

    for name, arm in POINTS.items():
        after(name, (arm,))
    for i in range(moments):
        # Two in a row half of the time: a run that goes on is killed as well.
        after(f"moment {i}", *[(None, lots.uniform(0, took)) for _ in range(lots.randint(1, 2))])


@pytest.mark.slow
def test_the_same_command_after_a_kill_ends_with_the_same_bytes(tmp_path, moments=1):
    seed = random.SystemRandom().randrange(2**32)
    command = [sys.executable, "-m", "tests.test_train_kills", str(tmp_path), str(moments), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(told) == len(POINTS) + moments
    for one in told[: len(POINTS)]:
        assert (one["ends"], one["differs"]) == ([-9, 0], []), one
    for one in told[len(POINTS) :]:  # a moment may come after the end
        assert {*one["ends"][:-1]} <= {-9, 0} and one["ends"][-1] == 0 and not one["differs"], (seed, one)


if __name__ == "__main__":
    kill_all(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
