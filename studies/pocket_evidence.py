"""Trains pocket:llama further on every process, among texts of our grammars: pocket:llama-evidence."""

from __future__ import annotations

from llmgeom.prompts.marks import mark_sets
from llmgeom.prompts.processes import load_process
from studies.lists import Course, tokenizer

NAME, PARENT = "llama-evidence", "llama"
# How often each process is drawn: the harder, the oftener.
SHARES = {"beta": 2, "two-point": 1, "dirichlet": 3, "markov": 3, "stated": 2, "hmm": 3, "recall": 4, "bijection": 5}


def course() -> Course:
    """What it is taught.

    No two marks of a set of `llmgeom evidence` stand in a list together, so its prompts are as new to this model as to
    the others.
    """
    sizes = sorted({load_process(name).answers for name in SHARES})
    return Course(
        tuple(name for name, count in SHARES.items() for _ in range(count)),
        steps=18_000,
        lists=16,
        rate=1e-3,
        at_once=6,
        texts=10,
        apart=tuple(marks for size in sizes for marks in mark_sets(tokenizer(), size)),
    )
