"""Begins batches before their results are requested: on a CPU several at a time, on a GPU the one that follows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


@contextmanager
def ahead(run: Callable[[int], T], order: Sequence[int], at_once: int) -> Iterator[Callable[[int], T]]:
    """A function that returns run(i); it begins the next items of `order` in threads before they are requested.

    At most 2 x `at_once` results wait, so that a slow reader (a disk) does not fill the memory. An error of run(i) is
    raised where i is requested. With `at_once` below 2 everything runs in the calling thread, when it is requested.

    Args:
        run: Called in threads of its own, each with its part of the cores.
        order: The items in the order in which they will be requested. Others are run when they are.
        at_once: How many run at the same time.
    """
    if at_once < 2:
        yield run
        return
    threads = torch.get_num_threads()
    # The number of cores is a property of each thread; torch also notes it for threads that are made later.
    pool = ThreadPoolExecutor(at_once, "llmgeom-batch", torch.set_num_threads, (max(1, threads // at_once),))
    try:
        yield _requested(lambda item: pool.submit(run, item).result, order, 2 * at_once)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


@contextmanager
def queued(begin: Callable[[int], Callable[[], T]], order: Sequence[int]) -> Iterator[Callable[[int], T]]:
    """A function that returns begin(i)(), where begin(i) hands work to a device, and what it returns waits for it.

    The next item is begun before the last is waited for, so that the device works while the host copies and stores. All
    runs in the calling thread. An error of begin(i) is raised where i is requested.
    """

    def begun(item: int) -> Callable[[], T]:
        try:
            return begin(item)
        except Exception as error:
            failure = error

        def fail() -> T:
            raise failure

        return fail

    yield _requested(begun, order, 2)


def _requested(begin: Callable[[int], Callable[[], T]], order: Sequence[int], most: int) -> Callable[[int], T]:
    """A function that returns the result of an item; at most `most` are begun and not returned."""
    waiting, begun = deque(order), dict[int, Callable[[], T]]()

    def result(item: int) -> T:
        if item not in begun and item not in waiting:
            begun[item] = begin(item)
        while waiting and (item not in begun or len(begun) < most):
            following = waiting.popleft()
            begun[following] = begin(following)
        return begun.pop(item)()

    return result
