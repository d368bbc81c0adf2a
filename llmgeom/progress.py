"""Progress of a long run: its current stage, at a terminal or under a notebook cell; in a file a line now and then."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from html import escape
from typing import Any

from llmgeom.errors import redact

FIRST, EVERY = 3.0, 15.0  # seconds before the first line in a file, and between lines
# Called as progress(stage, done, total, note); the note is text that changes within a stage.
Progress = Callable[[str, int, int, str], None]


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
    return shown(lambda stage, done, total, note: outer(*change(stage, done, total, note)))


def within(name: str) -> AbstractContextManager[None]:
    """In this context, stages are called `NAME: STAGE`: for one of several runs."""
    return renamed(lambda stage, *rest: (f"{name}: {stage}", *rest))


@contextmanager
def watched() -> Iterator[None]:
    """A `bar` where this context shows no progress yet: for a method that a script or a notebook cell calls."""
    with bar(quiet=not unseen()):
        yield


def unseen() -> bool:
    """Whether this context shows no progress."""
    return _shown.get() is silent


def first_word(text: str, quiet: bool = False) -> None:
    """Print at a terminal what a command is about to do, before loading takes seconds."""
    if not quiet and sys.stderr.isatty():
        print(f"llmgeom: {redact(text)}", file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    """Seconds as a person reads them: 0:34, 12:05, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextmanager
def bar(quiet: bool = False) -> Iterator[None]:
    """`with bar(): run_probes(subject, batch, known())` shows the progress of what runs; nothing if `quiet`.

    In a file or a pipe there is a line after FIRST seconds, then one every EVERY, and one at the end with the time that
    the run took.
    """
    if quiet:
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress as Rich, TextColumn, TimeRemainingColumn

    console, begun = Console(stderr=True), time.monotonic()
    if console.is_jupyter or not console.is_terminal:
        with _cell() if console.is_jupyter else _lines(begun):
            yield
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    display = Rich(*columns, console=console, transient=True)
    tasks: dict[str, Any] = {}

    def progress(stage: str, done: int, total: int, note: str) -> None:
        display.start()  # not earlier, so that an error before the first stage has its own line
        if stage not in tasks:
            tasks[stage] = display.add_task(stage, total=total)
        for name, task in tasks.items():
            display.update(task, visible=name == stage)
        display.update(tasks[stage], completed=done, total=total, description=f"{stage}: {note}" if note else stage)

    try:
        with shown(progress):
            yield
    finally:
        if tasks:
            display.stop()
    first_word(f"done in {clock(time.monotonic() - begun)}")


@contextmanager
def _lines(begun: float) -> Iterator[None]:
    """A line on standard error now and then, from a thread: loading a model tells nothing, and takes long."""
    told, ended, said = ["starting"], threading.Event(), []

    def progress(stage: str, done: int, total: int, note: str) -> None:
        told[:] = [f"{stage}{f': {note}' if note else ''} {done} of {total}"]

    def say(text: str) -> None:
        said.append(text)
        print(f"llmgeom: {redact(text)}", file=sys.stderr, flush=True)

    def beat() -> None:
        wait = FIRST
        while not ended.wait(wait):
            wait = EVERY
            say(f"{told[0]}, {clock(time.monotonic() - begun)}")

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        with shown(progress):
            yield
    finally:
        ended.set()
        thread.join()
    if said:
        say(f"done in {clock(time.monotonic() - begun)}")


def _cell() -> AbstractContextManager[None]:
    """One notebook output that is updated: rich's own bar needs ipywidgets, and a saved notebook would lose it."""
    from IPython.display import display

    output: Any = display({"text/plain": ""}, raw=True, display_id=True)

    def progress(stage: str, done: int, total: int, note: str = "") -> None:
        text = f"{stage}: {done} of {total}{f', {note}' if note else ''}"
        html = f'<progress value="{done}" max="{total}"></progress> {escape(text)}'
        output.update({"text/plain": text, "text/html": html}, raw=True)

    return shown(progress)
