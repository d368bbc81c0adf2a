"""The line of progress, at a terminal, in a file and in a run within a run."""

import re
import subprocess
import sys

import pytest

from llmgeom.progress import bar, first_word, shown, tell, unseen, within


def test_progress_goes_to_the_innermost_block_and_back():
    """A run within a run has its name in front of its stages. Outside of every block nothing is reported."""
    told = []
    with shown(lambda *stage: told.append(stage)):
        with within("math"), within("layer 3"):
            tell("controls", 1, 2, "note")
        with pytest.raises(KeyError), shown(lambda *stage: told.append("inner")):
            raise KeyError
        tell("end", 2, 2)
        assert not unseen()
    assert told == [("math: layer 3: controls", 1, 2, "note"), ("end", 2, 2, "")]
    with within("math"):
        assert unseen()
        tell("controls", 1, 2)
    assert len(told) == 2


def test_elapsed_time_stands_at_the_end_for_a_person_and_nothing_in_a_file(capsys, monkeypatch):
    with bar():  # shorter than progress.FIRST
        tell("stage", 1, 2)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with bar(quiet=True):
        first_word("hello", True)
    assert capsys.readouterr() == ("", "")
    first_word("reading https://me:secret@h/x")
    assert capsys.readouterr().err == "llmgeom: reading https://…@h/x\n"


PIPED = """
import time
from llmgeom import progress
progress.FIRST, progress.EVERY = 0.1, 0.1
with progress.bar():
    time.sleep(0.3)
    progress.tell("read", 1, 4)
    time.sleep(0.5)
    progress.tell("measure", 1, 2, "a note")
    time.sleep(0.5)
print("the result")
"""


def test_a_file_gets_a_line_now_and_then_even_where_nothing_is_told():
    done = subprocess.run([sys.executable, "-c", PIPED], capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    assert done.stdout == "the result\n" and len(lines) >= 4  # of a busy machine; 8 of an idle one
    assert lines[0].startswith("llmgeom: starting, 0:0") and lines[-1].startswith("llmgeom: done in 0:0")
    kinds = [re.sub(r"0:\d\d", "T", line) for line in dict.fromkeys(lines[1:-1])]
    assert "llmgeom: read 1 of 4, T" in kinds
    assert "llmgeom: measure: a note 1 of 2, T" in kinds
