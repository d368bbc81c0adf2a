"""A scan that is killed, wherever that is, is ended by the same command with the same bytes.

    python -m tests.test_scan_kills FOLDER NULLS PLACE...

runs scans that kill themselves: one process that has imported everything forks a child for each. PLACE is `name:n`, to
be killed (SIGKILL, nothing runs after it) at the n-th time that place is passed, `any:n` for the n-th of any, or
`none`. Each scan has its cache and run folder in FOLDER/I, and is run again after its kill. Prints JSON: how the tries
of each ended, and how often each place was passed in the try that ended well.
"""

import collections
import functools
import json
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llmgeom.cache.shards import Store
from llmgeom.commands import folders
from llmgeom.commands.scan import RunConfig, perform, prepare
from llmgeom.model import running
from llmgeom.probes import attention_focus
from llmgeom.record import Record
from llmgeom.run import Run
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
    command = [sys.executable, "-m", "tests.test_scan_kills", str(root), str(nulls), *places]
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


# ---- scans that kill themselves -------------------------------------------------------------------------------------

# Where a scan can be killed: before the call, so that of two neighbours the work between them is lost or kept.
PLACES = {
    "a forward": (running, "one_pass"),
    "a shard begun": (Store, "write"),
    "a file under its temporary name": (os, "replace"),
    "a file not yet on the disk": (os, "fsync"),
    "an untrained control": (Run, "control"),
    "a capture's folder": (Store, "__init__"),
    "a probe": (attention_focus, "measure"),
    "a record": (Record, "save"),
    "a page": (folders, "write_page"),  # the preview, then the whole page
}


def scan(folder: Path, place: str, nulls: int) -> None:
    passed: collections.Counter[str] = collections.Counter()
    name, _, n = place.partition(":")

    def watch(what: str, owner, attribute: str) -> None:
        whole = getattr(owner, attribute)

        @functools.wraps(whole)  # a probe's function keeps its name and module, which the key of its result holds
        def through(*args, **kwargs):
            passed[what] += 1
            if n and (passed.total() if name == "any" else passed[what] if name == what else 0) == int(n):
                os.kill(os.getpid(), signal.SIGKILL)
            return whole(*args, **kwargs)

        setattr(owner, attribute, through)

    for what, (owner, attribute) in PLACES.items():
        watch(what, owner, attribute)
    os.environ["LLMGEOM_CACHE"] = str(folder / "cache")
    asked = RunConfig(
        model="pocket:pythia",
        domains=("math",),
        n=10,
        limit=40,
        nulls=nulls,
        probes=("attention_focus",),
        batch_tokens=128,
        device="cpu",
        out=str(folder / "run"),
    )
    list(perform(prepare(asked)))
    (folder / "passed.json").write_text(json.dumps(passed))


def main(root: Path, nulls: int, places: list[str]) -> None:
    ended = []
    for i, place in enumerate(places):
        tries = []
        for attempt in (place, "none"):
            (root / str(i)).mkdir(parents=True, exist_ok=True)
            child = os.fork()
            if child == 0:
                try:
                    scan(root / str(i), attempt, nulls)
                    os._exit(0)
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                    os._exit(1)
            tries.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            if attempt == "none":
                break
        passed = json.loads((root / str(i) / "passed.json").read_text())
        ended.append({"place": place, "tries": tries, "passed": passed})
    print(json.dumps(ended))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
