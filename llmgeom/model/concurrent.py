"""Runs several batches at the same time on a CPU, each in a thread with its part of the cores."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


@contextmanager
def ahead(run: Callable[[int], T], order: Sequence[int], at_once: int) -> Iterator[Callable[[int], T]]:
    """A function that returns run(i); it begins the next items of `order` before they are requested.

    At most 2 x `at_once` results wait, so that a slow reader (a disk) does not fill the memory. An error of run(i) is
    raised where i is requested. With `at_once` below 2 everything runs in the calling thread.

    Args:
        run: Called in threads of its own.
        order: The items in the order in which they will be requested. Others are run when they are.
        at_once: How many run at the same time.
    """
    if at_once < 2:
        yield run
        return
    threads = torch.get_num_threads()
    waiting, begun = deque(order), dict[int, Future[T]]()
    # The number of cores is a property of each thread; torch also notes it for threads that are made later.
    pool = ThreadPoolExecutor(at_once, "llmgeom-batch", torch.set_num_threads, (max(1, threads // at_once),))

    def result(item: int) -> T:
        if item not in begun and item not in waiting:
            begun[item] = pool.submit(run, item)
        while waiting and (item not in begun or len(begun) < 2 * at_once):
            following = waiting.popleft()
            begun[following] = pool.submit(run, following)
        return begun.pop(item).result()

    try:
        yield result
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
