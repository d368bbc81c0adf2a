"""A training that is killed, wherever, ends with the same bytes when the same command is given again."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

NAMED = 9


def killed(folder: Path, moments: int) -> list[dict]:
    seed = random.SystemRandom().randrange(2**32)
    command = [sys.executable, "-m", "tests.train_kills", str(folder), str(moments), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"
    return [{**json.loads(line), "seed": seed} for line in done.stdout.splitlines()]


@pytest.mark.parametrize("moments", [1, pytest.param(30, marks=pytest.mark.soak)])
def test_the_same_command_after_a_kill_ends_with_the_same_bytes(tmp_path, moments):
    told = killed(tmp_path, moments)
    assert len(told) == NAMED + moments
    for one in told[:NAMED]:
        assert (one["ends"], one["differs"]) == ([-9, 0], []), one
    for one in told[NAMED:]:  # a moment may come after the end
        assert {*one["ends"][:-1]} <= {-9, 0} and one["ends"][-1] == 0 and not one["differs"], one
    print(sum(end == -9 for one in told for end in one["ends"]), "kills survived")
