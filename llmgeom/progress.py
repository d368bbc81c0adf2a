"""How far a long run is, one line for its present stage: on standard error, or under the cell of a notebook."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import Any, Protocol


class Progress(Protocol):
    def __call__(self, stage: str, done: int, total: int, note: str = "", /) -> None:
        """note: what changes while the stage goes on."""


def prefixed(progress: Progress | None, name: str) -> Progress | None:
    """The same for one of several runs: its stages are called `NAME: STAGE`."""
    if progress is None:
        return None

    def told(stage: str, done: int, total: int, note: str = "", /) -> None:
        progress(f"{name}: {stage}", done, total, note)

    return told


@contextmanager
def bar(silent: bool = False) -> Iterator[Progress | None]:
    """`with bar() as progress: scan(subject, batch, known(), progress=progress)`; None where silent."""
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
    shown = Rich(*columns, console=console, transient=True)
    tasks: dict[str, Any] = {}

    def progress(stage: str, done: int, total: int, note: str = "") -> None:
        shown.start()  # not before there is something to show: a refusal stands on a line of its own
        if stage not in tasks:
            for task in tasks.values():
                shown.update(task, visible=False)
            tasks[stage] = shown.add_task(stage, total=total)
        described = f"{stage}: {note}" if note else stage
        shown.update(tasks[stage], completed=done, total=total, description=described)

    try:
        yield progress
    finally:
        if tasks:
            shown.stop()


def _cell() -> Progress:
    """One output that is replaced. Rich's own bar needs ipywidgets here, and a saved notebook would not keep it."""
    from IPython.display import display

    shown = display({"text/plain": ""}, raw=True, display_id=True)

    def progress(stage: str, done: int, total: int, note: str = "") -> None:
        text = f"{stage}: {done} of {total}{f', {note}' if note else ''}"
        html = f'<progress value="{done}" max="{total}"></progress> {escape(text)}'
        shown.update({"text/plain": text, "text/html": html}, raw=True)

    return progress
