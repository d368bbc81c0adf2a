"""Many trainings at once: a process on each core, none of which outlives the run."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from typing import Any

import torch

from llmgeom.cache import interrupt


def spread(work: Callable[..., Any], jobs: Mapping[str, tuple], report: Callable[[int, str], None]) -> dict[str, Any]:
    """The results of `work` on each job's arguments: one process on each core, each with one thread, in this order.

    Args:
        work: A function of a module.
        jobs: Its arguments by name.
        report: Called with the number of jobs that are done, and the name of the last.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed; every job ended after its step.
    """
    results: dict[str, Any] = {}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(len(jobs), cores)  # those that this process may use: `taskset -c 0` makes one worker
    if not workers:
        return results
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(stop,))
    try:
        # A terminal sends Ctrl-C to all processes. Those started here ignore it: this one tells them to stop.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            futures = {pool.submit(work, *arguments): name for name, arguments in jobs.items()}
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        with interrupt.deferred():
            waiting = set(futures)
            while waiting and not interrupt.requested():
                done, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in done:
                    results[futures[future]] = future.result()
                    report(len(results), futures[future])
            if waiting:  # interrupted: every training ends with its step, and its state is saved
                stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
    except BaseException:
        for child in multiprocessing.active_children():
            child.kill()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return results


def _begin(stop: Any) -> None:
    """One thread; and no worker outlives a killed run, to write into the folder of the next."""

    def die_with_parent() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            multiprocessing.connection.wait([parent.sentinel])
            os._exit(1)

    interrupt.follow(stop.is_set)
    torch.set_num_threads(1)
    threading.Thread(target=die_with_parent, daemon=True).start()
