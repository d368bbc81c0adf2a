"""A scan that is killed, wherever that is, is ended by the same command with the same bytes."""

import json
import os
import random
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scan_kills import PLACES
from tests.test_distributed import record
from tests.test_store import contents

pytestmark = pytest.mark.slow

EVENTS = 170  # places that a whole scan passes, at least
NAMED = [
    "a forward:5",  # between two batches of the pool
    "a shard begun:9",  # of a capture that is half there
    "a file under its temporary name:6",
    "a file not yet on the disk:4",
    "an untrained control:2",  # between two captures
    "a capture's folder:3",
    "any:2",  # hashes.json under its temporary name
    "any:7",  # run.json under its temporary name
    "a probe:2",  # after the preview: all is captured, and the probe is measured for the record
    "a record:1",
    "a page:1",  # the prompts alone are read
    "a page:2",  # the record is there
]


def ended(root: Path, places: list[str], nulls: int = 6) -> list[dict]:
    env = os.environ | {"PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.scan_kills", str(root), str(nulls), *places]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def survived(root: Path, places: list[str], nulls: int = 6) -> dict[str, int]:
    """Kill at each place, go on, and hold what is there against a scan that nobody killed; how often it passed what."""
    whole, *killed = ended(root, ["none", *places], nulls)
    bytes_of = [(record(root / str(i) / "run"), contents(root / str(i) / "cache")) for i in range(1 + len(places))]
    for one, there in zip(killed, bytes_of[1:], strict=True):
        assert one["tries"] == [-signal.SIGKILL, 0], one
        assert there == bytes_of[0], one["place"]
        made = one["passed"].get("a shard begun", 0)
        assert made <= whole["passed"]["a shard begun"]
        if one["place"].startswith(("a probe", "a record", "a page:2")):
            assert made == 0, "what was there is not made again"
    return whole["passed"]


def test_killed_at_named_places_and_at_one_that_is_not_foreseen(tmp_path):
    n = 1 + secrets.randbelow(EVENTS)
    print(f"any:{n}")  # shown where it fails
    passed = survived(tmp_path, [*NAMED, f"any:{n}"])
    assert set(passed) == set(PLACES), "each place is passed"
    assert sum(passed.values()) >= EVENTS


@pytest.mark.soak
def test_killed_at_thirty_random_places(tmp_path):
    seed = secrets.randbelow(10**6)
    print(f"seed {seed}")
    draw = random.Random(seed)
    survived(tmp_path, [f"any:{draw.randint(1, EVENTS)}" for _ in range(30)])
