"""What nobody foresaw ends in one sentence and exit 1 as well; -vv shows the traceback, of a refusal too."""

import errno
import subprocess
import sys

import pytest
from click.testing import CliRunner

from llmgeom.cli import main
from llmgeom.errors import UserError
from llmgeom.model.model import Model
from tests.hostile import ended

SCAN = ("scan", "--domain", "math", "--limit", "20", "-q")


@pytest.fixture
def fails(monkeypatch, tmp_path):
    """Loading fails with this."""
    monkeypatch.chdir(tmp_path)

    def arm(error: BaseException) -> None:
        def raises(*_, **__):
            raise error

        monkeypatch.setattr(Model, "load", raises)

    return arm


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), "/x/y: No space left on device; free space"),
        (OSError(errno.EROFS, "Read-only file system"), "a file: Read-only file system; free space"),
        (MemoryError(), "not enough memory (no message); use fewer"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"), "not enough memory"),
        (RuntimeError("CUDA out of memory. Tried to"), "not enough memory (CUDA out of memory. Tried to)"),
    ],
)
def test_the_machine_s_faults_are_told_as_such(fails, error, sentence):
    fails(error)
    done = ended(*SCAN)
    assert done.exit_code == 1 and done.stderr.startswith(f"llmgeom: {sentence}")


@pytest.mark.parametrize("error", [ZeroDivisionError("a\nb"), RecursionError("deep")])
def test_a_bug_is_one_sentence_and_a_traceback_where_asked(fails, error):
    fails(error)
    done = CliRunner().invoke(main, SCAN)
    (sentence,) = done.stderr.strip().splitlines()
    assert done.exit_code == 1 and f"this should not have happened ({type(error).__name__}: " in sentence
    assert "-vv" in sentence and done.stdout == ""
    for words in (("-vv",), ("-v", "-v"), ("--verbose", "-v"), ("-qvv",)):
        loud = CliRunner().invoke(main, [*SCAN[:-1], *words])
        assert loud.exit_code == 1 and "Traceback (most recent call last)" in loud.stderr
        assert loud.stderr.strip().splitlines()[-1] == sentence
    quiet = CliRunner().invoke(main, [*SCAN, "-v"])
    assert quiet.exit_code == 1 and "Traceback" not in quiet.stderr


def test_a_refusal_has_a_traceback_where_asked_and_its_cause(fails):
    refusal = UserError("it cannot be: do that")
    refusal.__cause__ = ValueError("because")
    fails(refusal)
    assert ended(*SCAN).stderr == "llmgeom: it cannot be: do that\n"
    loud = CliRunner().invoke(main, [*SCAN, "-vv"])
    assert "ValueError: because" in loud.stderr and loud.stderr.endswith("llmgeom: it cannot be: do that\n")


def test_a_sentence_shows_no_control_character_and_not_all_of_a_long_value():
    done = ended("scan", "--domain", "\x1b[2J\n" + "y" * 50_000)
    assert "\\x1b[2J\\n" in done.stderr and "…" in done.stderr and len(done.stderr) < 1200


def test_a_reader_that_leaves_early_is_no_fault():
    command = f"{sys.executable} -m llmgeom list claims | head -c 1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "" and len(done.stdout) == 1
