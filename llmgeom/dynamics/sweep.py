"""Many trainings on all cores: each in its own folder, graded there, and never made twice."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from llmgeom import wind_tunnels
from llmgeom.cache import interrupt
from llmgeom.errors import UserError
from llmgeom.files import digest, write_json
from llmgeom.model.subject import Subject
from llmgeom.probes.posterior.answers import grade
from llmgeom.probes.posterior.scores import CategoricalScores, PosteriorScores, Scores, mae_abs, mae_mean
from llmgeom.progress import tell
from llmgeom.wind_tunnels.training import train
from llmgeom.wind_tunnels.training_config import Training

GRADE = "grade.json"


def sweep(
    cells: Mapping[str, Training], out: Path, n: int, stage: str = "trainings", device: str = "cpu"
) -> dict[str, dict[str, Any]]:
    """Train every cell in `out/NAME` and grade it.

    One process runs on each core, each with one thread; on a GPU cells run one after the other. A finished cell is read
    and an interrupted one continues.

    Args:
        n: Sequences graded.
        stage: What the progress calls the trainings.
        device: Where cells are trained and graded.

    Returns:
        By name the numbers of `graded` with learning rate, parameters and CPU seconds; or {"refused": why}.
    """
    grades = {name: data for name, cell in cells.items() if (data := stored(out / name / GRADE, _spec(cell, n)))}
    left = {name: cell for name, cell in cells.items() if name not in grades}
    tell(stage, len(grades), len(cells))
    if device != "cpu":
        for name, cell in left.items():
            grades[name] = _cell(str(out / name), cell, n, device)
            tell(stage, len(grades), len(cells), name)
        return grades
    # The longest first, so that the last one does not run alone.
    order = sorted(left, key=lambda name: -left[name].steps)
    jobs = {name: (str(out / name), left[name], n) for name in order}
    return grades | spread(_cell, jobs, lambda done, name: tell(stage, len(grades) + done, len(cells), name))


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
        with _deaf():
            futures = {pool.submit(work, *arguments): name for name, arguments in jobs.items()}
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


def stored(path: Path, spec: Mapping[str, Any]) -> Any:
    """The data of a file that `keep` wrote for this spec; None if there is none, or it is damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        body = json.loads(path.read_text(encoding="utf-8"))
        if body["spec"] == digest(spec):
            return body["data"]
    return None


def keep(path: Path, spec: Mapping[str, Any], data: Any) -> Any:
    """Write plain data for `stored` with everything that determines it, and return it as it will be read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"spec": digest(spec), "data": data})
    return stored(path, spec)


@contextmanager
def _deaf() -> Iterator[None]:
    """Processes started here ignore Ctrl-C, which a terminal sends to all: this process tells them to stop."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _begin(stop: Any) -> None:
    """One thread; and no worker outlives a killed run, to write into the folder of the next."""
    interrupt.follow(stop.is_set)
    torch.set_num_threads(1)
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _spec(training: Training, n: int) -> dict[str, Any]:
    return {**asdict(training), "graded on": n, **wind_tunnels.load_world(training.task).file_code}


def _cell(folder: str, training: Training, n: int, device: str = "cpu") -> dict[str, Any]:
    began = time.process_time()
    try:
        done = train(training, folder, device=device)
        task = wind_tunnels.load_world(training.task)
        subject = Subject.load(folder, device=device)
        numbers = graded(grade(subject, task, n, training.seed)) | {"lr": done.lr, "parameters": done.parameters}
        if training.corrupt:
            numbers["kl_mixture"] = grade(subject, task, n, training.seed, corrupt=training.corrupt).kl
    except UserError as refusal:
        return {"refused": str(refusal)}  # not stored: the next run tries again
    numbers["cpu_seconds"] = round(time.process_time() - began, 1)
    return keep(Path(folder) / GRADE, _spec(training, n), numbers)


def graded(scores: PosteriorScores) -> dict[str, Any]:
    """The numbers of a grade that a sweep stores: divergences and errors in bits within the horizon, and skill.

    Those of the best trivial predictor are called NAME_trivial. If outcomes are tokens, those of a uniform answer are
    NAME_uniform, and accuracy is the share of queries whose likeliest answer is right.
    """
    predictors = {"": scores.own, "_trivial": scores.trivial[scores.best]}
    predictors |= {"_uniform": scores.trivial["uniform"]} if "uniform" in scores.trivial else {}
    means = {f"{name}{end}": x for end, one in predictors.items() for name, x in _means(one, scores.within).items()}
    return {"skill": scores.skill, "skill_trivial": 0.0, "best_trivial": scores.best} | means


def _means(scores: Scores, within: slice) -> dict[str, float]:
    part = scores.at(within)
    means = {"kl": float(part.kl.mean()), "mae_abs": mae_abs(part.gap), "mae_mean": mae_mean(part.gap)}
    return means | ({"accuracy": float(part.right.mean())} if isinstance(part, CategoricalScores) else {})
