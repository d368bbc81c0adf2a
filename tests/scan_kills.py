"""Runs scans that kill themselves: one process that has imported everything forks a child for each.

    python -m tests.scan_kills FOLDER NULLS PLACE...

PLACE is `name:n`, to be killed (SIGKILL, nothing runs after it) at the n-th time that place is passed, `any:n` for the
n-th of any, or `none`. Each scan has its cache and run folder in FOLDER/I, and is run again after its kill. Prints
JSON: how the tries of each ended, and how often each place was passed in the try that ended well.
NULLS is the number of draws, 0 for as many as the claims need.
"""

import collections
import functools
import json
import os
import signal
import sys
from pathlib import Path

from llmgeom.cache.shards import Store
from llmgeom.captures import Run
from llmgeom.commands.scans.perform import perform
from llmgeom.commands.scans.plan import prepare
from llmgeom.commands.scans.request import RunConfig
from llmgeom.model import running
from llmgeom.probes import attention_focus
from llmgeom.record import Record
from llmgeom.reports import preview

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
    "a page": (preview, "write_page"),  # the preview, then the whole page
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
        ended.append(
            {"place": place, "tries": tries, "passed": json.loads((root / str(i) / "passed.json").read_text())}
        )
    print(json.dumps(ended))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
