"""Progress of a long run, one line for its current stage: on standard error, or under a notebook cell."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import Any, Protocol


class Progress(Protocol):
    """Called as progress(stage, done, total, note); the note is text that changes within a stage."""

    def __call__(self, stage: str, done: int, total: int, note: str = "", /) -> None: ...


def prefixed(progress: Progress | None, name: str) -> Progress | None:
    """The progress of one of several runs: its stages are called `NAME: STAGE`."""
    if progress is None:
        return None
    return lambda stage, done, total, note="", /: progress(f"{name}: {stage}", done, total, note)


@contextmanager
def bar(silent: bool = False) -> Iterator[Progress | None]:
    """`with bar() as progress: scan(subject, batch, known(), progress=progress)`; None if silent."""
    if silent:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Rich

    console = Console(stderr=True)
    if console.is_jupyter:
        yield _cell()
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    display = Rich(*columns, console=console, transient=True)
    tasks: dict[str, Any] = {}

    def progress(stage: str, done: int, total: int, note: str = "") -> None:
        display.start()  # only now: an error before the first stage stands on a line of its own
        if stage not in tasks:
            for task in tasks.values():
                display.update(task, visible=False)
            tasks[stage] = display.add_task(stage, total=total)
        description = f"{stage}: {note}" if note else stage
        display.update(tasks[stage], completed=done, total=total, description=description)

    try:
        yield progress
    finally:
        if tasks:
            display.stop()


def _cell() -> Progress:
    """One output that is replaced: rich's own bar needs ipywidgets here, and a saved notebook would not keep it."""
    from IPython.display import display

    shown = display({"text/plain": ""}, raw=True, display_id=True)

    def progress(stage: str, done: int, total: int, note: str = "") -> None:
        text = f"{stage}: {done} of {total}{f', {note}' if note else ''}"
        html = f'<progress value="{done}" max="{total}"></progress> {escape(text)}'
        shown.update({"text/plain": text, "text/html": html}, raw=True)

    return progress
