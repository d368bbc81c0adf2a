"""README's first screen and docs/cookbook.md run as they stand, on SmolLM2, and print what they say."""

import math
import re
from pathlib import Path

import pytest
import torch

import llmgeom
from llmgeom.model.model import Model
from tests.smollm2 import smollm2

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow
NUMBER = re.compile(r"-?\d+\.?\d*")


@pytest.fixture
def load(monkeypatch):
    """`llmgeom.load("smollm2", dtype=...)` without a second reading of the file."""
    real = llmgeom.load

    def loaded(name, *args, **options):
        if name != "smollm2":
            return real(name, *args, **options)
        return Model.of(*smollm2(getattr(torch, options.get("dtype", "bfloat16"))), name="SmolLM2-135M-Instruct")

    monkeypatch.setattr(llmgeom, "load", loaded, raising=False)


def blocks(name):
    """heading -> its blocks of Python."""
    sections = re.split(r"^## ", (ROOT / name).read_text(encoding="utf-8"), flags=re.M)
    return {part.partition("\n")[0]: re.findall(r"```python\n(.*?)```", part, re.S) for part in sections}


def same(printed, stated):
    """Equal words, and numbers that round alike: a stated number is right to its last digit but one."""
    if NUMBER.sub("#", printed).split() != NUMBER.sub("#", stated).split():
        return False
    pairs = zip(NUMBER.findall(printed), NUMBER.findall(stated), strict=True)
    places = [(float(one), float(other), len(other.partition(".")[2])) for one, other in pairs]
    return all(math.isclose(one, other, abs_tol=2 * 10.0**-digits if digits else 0) for one, other, digits in places)


def run(code, scope, capsys):
    """Each statement that prints, with the comment that says what."""
    for line in code.split("\n"):
        assert len(line) <= 120
    exec(code, scope)
    printed = capsys.readouterr().out.splitlines()
    stated = [
        line.rpartition("  # ")[2] if "  # " in line else None
        for line in code.splitlines()
        if line.startswith("print(")
    ]
    assert len(printed) == len(stated)
    for one, other in zip(printed, stated, strict=True):
        assert other is None or same(one, other), f"prints {one!r}, and the page says {other!r}"


def test_the_cookbook_prints_what_it_says(load, capsys):
    scope: dict = {}
    every = blocks("docs/cookbook.md")
    assert len(every) >= 11
    for heading, codes in every.items():
        for code in codes:
            lines = [line for line in code.splitlines() if line.strip() and not line.startswith(("import", "from"))]
            assert len(lines) <= 10, f"{heading}: {len(lines)} lines"
            run(code, scope, capsys)


def test_the_first_screen_of_readme_runs(load, capsys):
    first = next(code for codes in blocks("README.md").values() for code in codes)
    run(first, {}, capsys)
