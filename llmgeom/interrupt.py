"""Ctrl-C once ends a run after the batch or step in hand, where the same command goes on; twice ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_depth = 0  # how many `whole` contexts we are in
_told = False  # a Ctrl-C came in one of them
_asked_elsewhere: Callable[[], bool] | None = None


@contextmanager
def gently(say: Callable[[], None]) -> Iterator[None]:
    """In this context a first Ctrl-C inside `whole` waits for its end, and `say` is called to tell so.

    Nothing changes in another thread than the first, nor where SIGINT is already handled, or ignored (nohup).
    """
    global _told
    first = threading.current_thread() is threading.main_thread()
    if not first or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def heard(_number, _frame) -> None:
        global _told
        if not _depth or _told:
            raise KeyboardInterrupt
        _told = True
        say()

    signal.signal(signal.SIGINT, heard)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _told = False


@contextmanager
def whole() -> Iterator[None]:
    """What is done to its end once begun: a batch, a training step, a snapshot. Raises KeyboardInterrupt at the end of
    the outermost one where a Ctrl-C came in between."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
    if not _depth and asked():
        raise KeyboardInterrupt


def asked() -> bool:
    """Is the run to end after what is in hand?"""
    return _told or (_asked_elsewhere is not None and _asked_elsewhere())


def obey(elsewhere: Callable[[], bool]) -> None:
    """In a process that another one started: that one is asked, and a Ctrl-C here is its business alone."""
    global _asked_elsewhere
    _asked_elsewhere = elsewhere
    signal.signal(signal.SIGINT, signal.SIG_IGN)
