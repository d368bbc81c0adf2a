"""Ctrl-C: the first ends a run after the current batch or step, ready to resume; the second ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_depth = 0  # nested `deferred` contexts
_pending = False  # a Ctrl-C came inside one of them
_parent_requested: Callable[[], bool] | None = None


@contextmanager
def handled(announce: Callable[[], None]) -> Iterator[None]:
    """In this context, a first Ctrl-C inside `deferred` calls `announce` and waits for the end of `deferred`.

    Nothing changes outside the main thread, or if SIGINT is already handled or ignored (nohup).
    """
    global _pending
    main_thread = threading.current_thread() is threading.main_thread()
    if not main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def on_signal(_number, _frame) -> None:
        global _pending
        if not _depth or _pending:
            raise KeyboardInterrupt
        _pending = True
        announce()

    signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _pending = False


@contextmanager
def deferred() -> Iterator[None]:
    """A context of work that is always finished: a batch, a training step, a snapshot.

    Raises KeyboardInterrupt: at the end of the outermost context, if a Ctrl-C came in between.
    """
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
    if not _depth and requested():
        raise KeyboardInterrupt


def requested() -> bool:
    """Whether the run should end after the current work."""
    return _pending or (_parent_requested is not None and _parent_requested())


def follow(parent_requested: Callable[[], bool]) -> None:
    """In a worker process: the parent decides when to end, and a Ctrl-C here is ignored."""
    global _parent_requested
    _parent_requested = parent_requested
    signal.signal(signal.SIGINT, signal.SIG_IGN)
