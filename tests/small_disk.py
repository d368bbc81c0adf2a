"""Runs train, scan and grade on disks that fill up and in folders that are taken away, and says what came of it.

`python -m tests.small_disk FOLDER`, in a mount namespace of its own where there is one (`unshare -rm`): disks are then
of memory and really full, or really read-only. Elsewhere no file may grow beyond a size, which any user can ask for,
and which fails in the same calls. One process imports torch and forks one for each command.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from llmgeom.captures import Run
from llmgeom.cli import main
from llmgeom.model import hub
from llmgeom.record import Record
from llmgeom.wind_tunnels import training as trainer
from llmgeom.wind_tunnels.models import architectures  # noqa: F401  (imported once, before the forks)
from tests.train_kills import files

TUNNEL = "bijection:vocab=4,pairs=3"
COMMANDS = {
    "train": f"train {TUNNEL} --width 16 --layers 1 --heads 2 --steps 30 --batch 16 --lr 1e-2 --snapshots 4 -q",
    "scan": "scan --model MODEL --probes value_manifold,attention_focus --n 40 --nulls 2 -q",
    "grade": "grade --model MODEL --n 40 --nulls 2 -q",
}


class Disk:
    """A folder on a disk of so many bytes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.limit = folder, resource.RLIM_INFINITY
        folder.mkdir()
        self.mounted = self.mount("rw,size=1g")

    def mount(self, options: str) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.folder)]
        return shutil.which("mount") is not None and not subprocess.run(command, capture_output=True).returncode

    def resize(self, size: int | None) -> None:
        if self.mounted:
            assert self.mount(f"remount,rw,size={size or 2**30}")
        else:
            self.limit = size or resource.RLIM_INFINITY

    def run(self, words: list[str], arm: Callable[[], None] | None = None) -> tuple[int, str]:
        """The command in a process of its own: exit code and standard error."""
        log = self.folder.with_name("log")
        child = os.fork()
        if child == 0:
            code = 99
            try:
                for number, path in ((1, os.devnull), (2, log)):
                    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
                resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, resource.RLIM_INFINITY))
                if arm:
                    arm()
                main(words)
            except SystemExit as end:
                code = end.code
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return code, log.read_text()


def at(owner: object, name: str, call: int, do: Callable[[], object]) -> None:
    """Do something in the CALLth call of `owner.name`."""
    whole, calls = getattr(owner, name), []

    def patched(*arguments, **more):
        calls.append(1)
        if len(calls) == call:
            do()
        return whole(*arguments, **more)

    setattr(owner, name, patched)


# Before the first control is drawn: a disk on which a file is open, as the weights then are, is not made read-only.
MIDST = {"train": (trainer.Trainer, "step", 13), "scan": (Run, "control", 1), "grade": (Run, "control", 1)}


def content(folder: Path) -> dict[str, object]:
    """All files, less what may vary between equal runs."""
    found = files(folder)
    for name in [name for name in found if name.endswith("record.json")]:
        found[name] = {k: v for k, v in json.loads(found[name]).items() if k != "run"}
    return found


def torn(folder: Path) -> list[str]:
    """What is half-written: temporary files, and records or models that say they are whole and are not."""
    found = [str(path) for path in folder.rglob("*.tmp")]
    for path in folder.rglob("*.json"):
        try:
            json.loads(path.read_text())
            if path.name == "record.json":
                Record.load(path.parent)
            if path.name == trainer.TRAINING:
                hub.locate(str(path.parent))
        except Exception as error:
            found.append(f"{path}: {error}")
    return found


class Fault:
    """One command, undisturbed once; then with a fault, and once more without."""

    def __init__(self, root: Path, name: str, words: list[str]) -> None:
        self.name, self.disk = name, Disk(root / name)
        self.out, self.cache = self.disk.folder / "out", self.disk.folder / "cache"
        os.environ["LLMGEOM_CACHE"] = str(self.cache)
        self.words = [*words, "--out", str(self.out)]
        code, said = self.disk.run(self.words)
        assert code == 0, said
        self.whole = content(self.out)

    def sizes(self, count: int) -> list[int]:
        """Of disks on which one file after another is the first that does not fit."""
        written = sorted((p for p in self.disk.folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_mtime_ns)
        held, found = 0, []
        for size in (path.stat().st_size for path in written):
            found.append(max(4096, held) if self.disk.mounted else size - 1)
            held += -(-size // 4096) * 4096
        found = sorted(set(found))
        return [found[i * len(found) // count] for i in range(min(count, len(found)))]

    def meet(self, what: str, size: int | None = None, arm: Callable[[], None] | None = None) -> None:
        for path in (self.out, self.cache):
            shutil.rmtree(path, ignore_errors=True)
        self.disk.resize(size)
        code, said = self.disk.run(self.words, arm)
        self.disk.resize(None)
        bad = torn(self.disk.folder)
        if self.out.is_file():
            self.out.unlink()
        again = self.disk.run(self.words)
        told = {"command": self.name, "fault": what, "code": code, "said": said, "torn": bad, "again": again}
        print(json.dumps({**told, "same": content(self.out) == self.whole}), flush=True)

    def meet_all(self, count: int) -> None:
        full = self.sizes(count)
        for size in full:
            self.meet(f"a disk of {size} bytes" if self.disk.mounted else f"no file beyond {size} bytes", size)
        gone = lambda: shutil.rmtree(self.out)  # noqa: E731
        faults = {"deleted": gone, "a file in its place": lambda: (gone(), self.out.touch())}
        if self.disk.mounted:
            faults["read-only"] = lambda: self.disk.mount("remount,ro")
        for what, do in faults.items():
            self.meet(what, arm=lambda do=do: at(*MIDST[self.name], do))


if __name__ == "__main__":
    trainer.CHECK_EVERY, trainer.SAVE_EVERY = 10, 0.0
    root = Path(sys.argv[1])
    Fault(root, "train", COMMANDS["train"].split()).meet_all(5)
    for name in ("scan", "grade"):
        model = str(root / "train/out")
        Fault(root, name, [model if word == "MODEL" else word for word in COMMANDS[name].split()]).meet_all(3)
