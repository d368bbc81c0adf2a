"""Ctrl-C or SIGTERM: the first ends a run after the current batch or step, ready to resume; the second at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_depth = 0  # nested `deferred` contexts
_pending = False  # a signal came inside one of them
_last = signal.SIGINT  # the last one
_parent_requested: Callable[[], bool] | None = None


@contextmanager
def handled(announce: Callable[[], object]) -> Iterator[None]:
    """In this context, a first Ctrl-C or SIGTERM inside `deferred` calls `announce` and waits for its end.

    Outside of `deferred`, and the second time, it raises KeyboardInterrupt; `code` says which signal it was. Nothing
    changes outside the main thread, or for a signal that is already handled or ignored (nohup).
    """
    global _pending, _last
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    main_thread = threading.current_thread() is threading.main_thread()
    ours = {number: by for number, by in usual.items() if main_thread and signal.getsignal(number) is by}

    def on_signal(number, _frame) -> None:
        global _pending, _last
        _last = signal.Signals(number)
        if not _depth or _pending:
            raise KeyboardInterrupt
        _pending = True
        announce()

    _last = signal.SIGINT
    for number in ours:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, by in ours.items():
            signal.signal(number, by)
        _pending = False


@contextmanager
def deferred() -> Iterator[None]:
    """A context of work that is always finished: a batch, a training step, a snapshot.

    Raises KeyboardInterrupt: at the end of the outermost context, if a signal came in between.
    """
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
    if not _depth and requested():
        raise KeyboardInterrupt


def code() -> int:
    """The exit code of a run that was interrupted: 130 by Ctrl-C, 143 by SIGTERM."""
    return 128 + _last


def requested() -> bool:
    """Whether the run should end after the current work."""
    return _pending or (_parent_requested is not None and _parent_requested())


def follow(parent_requested: Callable[[], bool]) -> None:
    """In a worker process: the parent decides when to end, and a Ctrl-C here is ignored."""
    global _parent_requested
    _parent_requested = parent_requested
    signal.signal(signal.SIGINT, signal.SIG_IGN)
