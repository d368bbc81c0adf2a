"""A full disk, a folder taken away: one sentence, exit 1, nothing half-written, and the same command can go on.

`python -m tests.test_small_disk FOLDER` runs train, scan and grade so and says what came of it: no file may grow beyond
a size, which fails in the same calls as a full disk. One process imports torch and forks one for each command.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.test_train_kills import files

pytestmark = pytest.mark.slow
COMMANDS = {
    "train": "train bijection:vocab=4,pairs=3 --width 16 --layers 1 --heads 2 --steps 30 --batch 16 --lr 1e-2 "
    "--snapshots 4 -q",
    "scan": "scan --model {}/train/out --probes value_manifold,attention_focus --n 40 --control-models 2 -q",
    "grade": "grade --model {}/train/out --n 40 --control-models 2 -q",
}
WHY = ("No space left on device", "File too large", "No such file or directory", "Not a directory", "File exists",
       "the captures take about")  # fmt: skip


def content(folder: Path) -> dict[str, object]:
    """All files, less what may vary between equal runs."""
    found = files(folder)
    for name in [name for name in found if name.endswith("record.json")]:
        found[name] = {k: v for k, v in json.loads(found[name]).items() if k != "run"}
    return found


def torn(folder: Path) -> list[str]:
    """What is half-written: temporary files, and records or models that say they are whole and are not."""
    from llmgeom.model import hub
    from llmgeom.record import Record
    from llmgeom.wind_tunnels.training import TRAINING

    found = [str(path) for path in folder.rglob("*.tmp")]
    for path in folder.rglob("*.json"):
        try:
            json.loads(path.read_text())
            if path.name in ("record.json", TRAINING):
                (Record.load if path.name == "record.json" else hub.locate)(str(path.parent))
        except Exception as error:
            found.append(f"{path}: {error}")
    return found


def run(words: list[str], log: Path, limit: int = resource.RLIM_INFINITY, arm: Callable[[], object] = int) -> tuple:
    """The command in a process of its own: exit code and standard error."""
    from llmgeom.cli import main

    child = os.fork()
    if child == 0:
        code = 99
        try:
            for number, path in ((1, os.devnull), (2, log)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            arm()
            main(words)
        except SystemExit as end:
            code = end.code
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), log.read_text()


def meet_all(root: Path) -> None:
    """Each command undisturbed once; then with each fault, and once more without."""
    from llmgeom.run import Run
    from llmgeom.wind_tunnels import training
    from llmgeom.wind_tunnels.models import architectures  # noqa: F401  (imported once, before the forks)

    training.CHECK_EVERY, training.SAVE_EVERY = 10, 0.0
    for name, spelt in COMMANDS.items():
        out, cache, log = root / name / "out", root / name / "cache", root / f"{name}.log"
        out.parent.mkdir()
        os.environ["LLMGEOM_CACHE"] = str(cache)
        words = [*spelt.format(root).split(), "--out", str(out)]
        code, said = run(words, log)
        assert code == 0, said
        whole = content(out)
        sizes = sorted({path.stat().st_size - 1 for path in out.parent.rglob("*") if path.is_file()})
        sizes = [size for size in sizes if size > 2000]  # what a command says goes into a file, too
        owner, method = (training.Trainer, "step") if name == "train" else (Run, "control")

        def midst(do: Callable[[], object], owner=owner, method=method) -> Callable[[], object]:
            """Arms the fault, for the first control or a step of the training."""
            plain = getattr(owner, method)
            return lambda: setattr(owner, method, lambda *a, **k: (do(), plain(*a, **k))[1])

        def gone(out=out) -> None:
            shutil.rmtree(out, ignore_errors=True)

        def replaced(out=out) -> None:
            if not out.is_file():
                gone()
                out.touch()

        faults = {f"no file beyond {size} bytes": {"limit": size} for size in sizes[:: -(-len(sizes) // 3)]}
        faults |= {"deleted": {"arm": midst(gone)}, "a file in its place": {"arm": midst(replaced)}}
        for what, how in faults.items():
            for path in (out, cache):
                shutil.rmtree(path, ignore_errors=True)
            code, said = run(words, log, **how)
            bad = torn(out.parent)
            if out.is_file():
                out.unlink()
            again = run(words, log)
            told = {"command": name, "fault": what, "code": code, "said": said, "torn": bad, "again": again}
            print(json.dumps({**told, "same": content(out) == whole}), flush=True)


def test_what_cannot_be_written_is_one_sentence_and_the_same_command_goes_on_to_the_same_bytes(tmp_path):
    command = [sys.executable, "-m", "tests.test_small_disk", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stderr
    met = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(met) >= 4 * len(COMMANDS)
    for one in met:
        if one["code"] == 0:  # a scan or grade has written nothing yet, and makes its folder again
            assert one["fault"] == "deleted" and one["command"] != "train" and one["said"] == "", one
        else:
            # Before it, a scan may say that the weights had no room, which does not end it.
            *before, sentence = one["said"].splitlines()
            assert all("untrained controls are a second copy" in line for line in before), one
            assert one["code"] == 1 and sentence.startswith("llmgeom: ") and any(why in sentence for why in WHY), one
            assert "free space" in sentence or "set LLMGEOM_CACHE" in sentence, one
        assert one["torn"] == [] and one["again"] == [0, ""] and one["same"], one


if __name__ == "__main__":
    meet_all(Path(sys.argv[1]))
