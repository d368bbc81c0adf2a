"""A full disk, a read-only one, a folder taken away: one sentence, exit 1, nothing half-written, and it can go on."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

WHY = (
    *("No space left on device", "File too large", "No such file or directory", "Not a directory", "File exists"),
    "the captures take about",  # told before anything runs
)


@pytest.fixture(scope="module")
def met(tmp_path_factory) -> list[dict]:
    """What train, scan and grade did; on disks of memory where this user may mount them."""
    own = ["unshare", "-rm"]
    mounts = shutil.which("unshare") and not subprocess.run([*own, "true"], capture_output=True).returncode
    command = [*(own if mounts else ()), sys.executable, "-m", "tests.small_disk", str(tmp_path_factory.mktemp("disk"))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_each_command_met_each_fault(met):
    kinds = Counter((one["command"], "disk" in one["fault"] or "beyond" in one["fault"]) for one in met)
    for command in ("train", "scan", "grade"):
        assert kinds[command, True] >= 3 and kinds[command, False] >= 2


def test_what_cannot_be_written_is_one_sentence_and_exit_1(met):
    for one in met:
        if one["code"] == 0:  # a scan or grade has written nothing yet, and makes its folder again
            assert one["fault"] == "deleted" and one["command"] != "train" and one["said"] == "", one
        else:
            # Before it, a scan may say that the weights had no room, which does not end it.
            *before, sentence = one["said"].splitlines()
            assert all("untrained controls are a second copy" in line for line in before), one
            assert one["code"] == 1 and sentence.startswith("llmgeom: "), one
            assert any(why in sentence for why in (*WHY, "Read-only file system")), one
            assert "free space" in sentence or "set LLMGEOM_CACHE" in sentence, one


def test_nothing_is_half_written_and_the_same_command_goes_on_to_the_same_bytes(met):
    for one in met:
        assert one["torn"] == [] and one["again"] == [0, ""] and one["same"], one
