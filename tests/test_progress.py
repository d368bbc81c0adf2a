"""The line of progress: numbered stages, one estimate of what is left, judged by a clock that the test moves."""

import re
import subprocess
import sys

import pytest

from llmgeom.progress import Clock, bar, first_word, shown, tell, unseen, within

SHARES = {"a: read": 1.0, "a: measure": 3.0, "b: read": 1.0, "b: measure": 3.0}


class Hand:
    now = 100.0

    def __call__(self):
        return self.now


def test_stages_are_numbered_and_the_rest_is_what_the_shares_say():
    hand = Hand()
    watch = Clock(SHARES, hand)
    hand.now += 10
    assert watch.text("a: read", 1, 2) == "0:10, about 2:30 left"  # 1 / 16 of the run took 10 s
    assert watch.number("a: measure of one") == "2/4"
    hand.now += 30
    assert watch.fraction("a: measure of one", 3, 3) == 0.5
    assert watch.text("a: measure of one", 3, 3) == "0:40, about 0:40 left"
    assert watch.fraction("a: read", 0, 1) == 0.5  # it never falls


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
with progress.bar(False, {"read": 1.0, "measure": 3.0}):
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
    assert "llmgeom: [1/2] read 1 of 4, T, about T left" in kinds
    assert "llmgeom: [2/2] measure: a note 1 of 2, T, about T left" in kinds
