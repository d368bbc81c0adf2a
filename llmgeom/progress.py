"""Progress of a long run: its current stage, at a terminal or under a notebook cell; in a file a line now and then."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from html import escape
from typing import Any, Protocol

from llmgeom.errors import redact

FIRST, EVERY = 3.0, 15.0  # seconds before the first line in a file, and between lines


class Progress(Protocol):
    """Called as progress(stage, done, total, note); the note is text that changes within a stage."""

    def __call__(self, stage: str, done: int, total: int, note: str = "", /) -> None: ...


def silent(stage: str, done: int, total: int, note: str = "", /) -> None:
    """The progress that nobody sees."""


# What `tell` calls. It is no parameter of the functions that run: it changes no number, and dozens would pass it on.
_shown: ContextVar[Progress] = ContextVar("shown", default=silent)


def tell(stage: str, done: int, total: int, note: str = "") -> None:
    """Report how far a stage is to the progress of this context (`shown`, `bar`); without one nothing happens."""
    _shown.get()(stage, done, total, note)


@contextmanager
def shown(progress: Progress) -> Iterator[None]:
    """In this context, `tell` calls `progress`."""
    token = _shown.set(progress)
    try:
        yield
    finally:
        _shown.reset(token)


def renamed(change: Callable[[str, int, int, str], tuple[str, int, int, str]]) -> AbstractContextManager[None]:
    """In this context, `tell` reports what `change` returns for its arguments."""
    outer = _shown.get()
    if outer is silent:
        return shown(silent)
    return shown(lambda stage, done, total, note="", /: outer(*change(stage, done, total, note)))


def within(name: str) -> AbstractContextManager[None]:
    """In this context, stages are called `NAME: STAGE`: for one of several runs."""
    return renamed(lambda stage, *rest: (f"{name}: {stage}", *rest))


def unseen() -> bool:
    """Whether this context shows no progress."""
    return _shown.get() is silent


def first_word(text: str, quiet: bool = False) -> None:
    """Print at a terminal what a command is about to do, before loading takes seconds."""
    if not quiet and sys.stderr.isatty():
        print(f"llmgeom: {redact(text)}", file=sys.stderr, flush=True)


class Clock:
    """The state of a run: the number of its stage, the time since its start, and the time left.

    Args:
        shares: beginning of each stage's name -> its share of the run, in order; empty if the stages are unknown.
        now: a clock in seconds.
    """

    def __init__(self, shares: Mapping[str, float], now: Callable[[], float] = time.monotonic) -> None:
        self._shares, self._now = dict(shares), now
        self._begun = now()
        self._stages: list[str] = []
        self._done = 0.0

    def number(self, stage: str) -> str:
        """The place of a stage, "3/10", or "3" if the number of stages is unknown."""
        kind = self._kind(stage)
        if kind is None:
            if stage not in self._stages:
                self._stages.append(stage)
            return f"{self._stages.index(stage) + 1}" if not self._shares else ""
        return f"{[*self._shares].index(kind) + 1}/{len(self._shares)}"

    def fraction(self, stage: str, done: int, total: int) -> float:
        """The completed fraction of the run, by the stages' shares; it never falls. 0 if the stages are unknown."""
        kind = self._kind(stage)
        if kind is not None:
            before = [*self._shares].index(kind)
            shares = [*self._shares.values()]
            now = sum(shares[:before]) + shares[before] * (done / total if total else 1.0)
            self._done = max(self._done, now / sum(shares))
        return self._done

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return self._now() - self._begun

    def text(self, stage: str, done: int, total: int) -> str:
        """Time since the start and, once 3 % are done, the approximate time left."""
        fraction = self.fraction(stage, done, total)
        left = f", about {clock(self.seconds / fraction - self.seconds)} left" if fraction > 0.03 else ""
        return f"{clock(self.seconds)}{left}"

    def description(self, stage: str, note: str = "") -> str:
        """A stage with its number and note."""
        number = self.number(stage)
        return f"[{number}] " * bool(number) + (f"{stage}: {note}" if note else stage)

    def _kind(self, stage: str) -> str | None:
        return next((start for start in self._shares if stage.startswith(start)), None)


def clock(seconds: float) -> str:
    """Seconds as a person reads them: 0:34, 12:05, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextmanager
def bar(quiet: bool = False, shares: Mapping[str, float] | None = None) -> Iterator[None]:
    """`with bar(): run_probes(subject, batch, known())` shows the progress of what runs; nothing if `quiet`.

    In a file or a pipe there is a line after FIRST seconds, then one every EVERY, and one at the end. With `shares`
    (beginning of a stage's name -> its share of the run) the stages are numbered, and one estimate gives the time left
    for all of them. The last line says how long the run took.
    """
    if quiet:
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress as Rich, TextColumn

    console, watch = Console(stderr=True), Clock(shares or {})
    if console.is_jupyter or not console.is_terminal:
        with _cell() if console.is_jupyter else _lines(watch):
            yield
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[clock]}")
    display = Rich(*columns, console=console, transient=True)
    tasks: dict[str, Any] = {}

    def progress(stage: str, done: int, total: int, note: str = "") -> None:
        display.start()  # not earlier, so that an error before the first stage has its own line
        if stage not in tasks:
            tasks[stage] = display.add_task(stage, total=total, clock="")
        for name, task in tasks.items():
            display.update(task, visible=name == stage)
        text = watch.text(stage, done, total)
        display.update(
            tasks[stage], completed=done, total=total, description=watch.description(stage, note), clock=text
        )

    try:
        with shown(progress):
            yield
    finally:
        if tasks:
            display.stop()
    first_word(f"done in {clock(watch.seconds)}")


@contextmanager
def _lines(watch: Clock) -> Iterator[None]:
    """A line on standard error now and then, from a thread: loading a model tells nothing, and takes long."""
    told: list[tuple[str, int, int, str]] = []
    ended, said = threading.Event(), []

    def progress(stage: str, done: int, total: int, note: str = "") -> None:
        told[:] = [(stage, done, total, note)]

    def now() -> str:
        if not told:
            return f"starting, {clock(watch.seconds)}"
        stage, done, total, note = told[0]
        return f"{watch.description(stage, note)} {done} of {total}, {watch.text(stage, done, total)}"

    def say(text: str) -> None:
        said.append(text)
        print(f"llmgeom: {redact(text)}", file=sys.stderr, flush=True)

    def beat() -> None:
        wait = FIRST
        while not ended.wait(wait):
            wait = EVERY
            say(now())

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        with shown(progress):
            yield
    finally:
        ended.set()
        thread.join()
    if said:
        say(f"done in {clock(watch.seconds)}")


def _cell() -> AbstractContextManager[None]:
    """One notebook output that is updated: rich's own bar needs ipywidgets, and a saved notebook would lose it."""
    from IPython.display import display

    output = display({"text/plain": ""}, raw=True, display_id=True)

    def progress(stage: str, done: int, total: int, note: str = "") -> None:
        text = f"{stage}: {done} of {total}{f', {note}' if note else ''}"
        html = f'<progress value="{done}" max="{total}"></progress> {escape(text)}'
        output.update({"text/plain": text, "text/html": html}, raw=True)

    return shown(progress)
