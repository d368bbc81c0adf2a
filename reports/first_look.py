"""The page of a run that is still going: values as soon as they are measured, words only when all controls are read."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llmgeom.files import write_whole
from llmgeom.record import Record
from llmgeom.reports.page import page

PATIENCE = 30.0  # seconds that a person waits for a page
QUICK = 3.0  # seconds; a page that takes c times as long is made again after c times as long a wait: a tenth of a run


@dataclass
class FirstLook:
    """Writes a page when there is something new to see; what `run_probes` takes as `look`.

    Attributes:
        path: The file; the run overwrites it at its end.
        before: Finished records of this run; the page shows them with their verdicts.
        only: End the run with the first page, before any control is read.
        say: Called with one sentence after each page, for the terminal.
        clock: A clock in seconds.
    """

    path: Path
    before: Sequence[Record] = ()
    only: bool = False
    say: Callable[[str], None] = lambda text: None
    clock: Callable[[], float] = time.monotonic
    _due: float = field(init=False)

    def __post_init__(self) -> None:
        self._due = self.clock() + PATIENCE

    def __call__(self, drawn: int, record: Callable[[], Record]) -> bool:
        """Write the page of what is measured after `drawn` controls, unless it is not due yet.

        Returns:
            Whether the run is to end here; whoever made it then writes the page.
        """
        if self.due and not self.only:
            started = self.clock()
            self.show(record(), started)
        return self.only

    @property
    def due(self) -> bool:
        """Whether a person has waited long enough for a page; always where the run ends with it."""
        return self.only or self.clock() >= self._due

    def show(self, seen: Record, started: float) -> None:
        """Write the page of the finished records and of this one, whose measuring `started` then, and say so."""
        write_page(self.path, [*self.before, seen])
        now = self.clock()
        self._due = now + PATIENCE * max(1.0, (now - started) / QUICK)
        self.say(f"first look, {seen.facts['first_look']}: {self.path}")


def write_page(path: Path, records: Sequence[Record]) -> None:
    """The page of these records, whole or not at all; where the last is a first look, with a mark at its end."""
    last = records[-1].facts
    write_whole(path, (page(records) + (_mark(last.get("spec", "")) if "first_look" in last else "")).encode())


def unfinished(path: Path, spec: str) -> bool:
    """Whether a page is the first look of a run of this spec, which may write over it."""
    return path.read_bytes().endswith(_mark(spec).encode())


def _mark(spec: str) -> str:
    return f"<!-- first look of {spec} -->\n"
