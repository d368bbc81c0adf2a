"""Many trainings on all cores: each in a folder of its own, graded there, and never done twice."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from llmgeom import interrupt, wind_tunnels
from llmgeom.errors import UserError
from llmgeom.files import digest, write_whole
from llmgeom.model.subject import Subject
from llmgeom.probes.posterior.answers import grade
from llmgeom.probes.posterior.scores import CategoricalScores, PosteriorScores, Scores, mae_abs, mae_mean
from llmgeom.progress import Progress
from llmgeom.wind_tunnels.training import train
from llmgeom.wind_tunnels.training_config import Training

GRADE = "grade.json"


def sweep(
    cells: Mapping[str, Training],
    out: Path,
    n: int,
    progress: Progress | None = None,
    stage: str = "trainings",
    device: str = "cpu",
) -> dict[str, dict[str, Any]]:
    """Train every cell in `out/NAME` and grade it on n sequences; by name, `graded`'s numbers, or {"refused": why}.

    One process a core, each with one thread, or one after the other on a GPU; a cell that is finished is read, one that
    was interrupted goes on.
    """
    found: dict[str, dict[str, Any]] = {}
    left = {}
    for name, training in cells.items():
        held = _held(out / name, training, n)
        if held is None:
            left[name] = training
        else:
            found[name] = held
    if progress:
        progress(stage, len(found), len(cells))
    if device != "cpu":
        for name in left:
            found[name] = _cell(str(out / name), left[name], n, device)
            if progress:
                progress(stage, len(found), len(cells), name)
        return found
    # The longest first, so that the last one does not run alone.
    order = sorted(left, key=lambda name: -left[name].steps)
    jobs = {name: (str(out / name), left[name], n) for name in order}
    tell = (lambda done, name: progress(stage, len(cells) - len(left) + done, len(cells), name)) if progress else None
    return found | spread(_cell, jobs, tell)


def spread(
    work: Callable[..., Any], jobs: Mapping[str, tuple], tell: Callable[[int, str], None] | None = None
) -> dict[str, Any]:
    """By name what `work` makes of each job's arguments: one process a core, each with one thread, in this order.

    tell   called with how many are done, and the name of the last.
    """
    found: dict[str, Any] = {}
    workers = min(len(jobs), os.cpu_count() or 1)
    if not workers:
        return found
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_alone, initargs=(stop,))
    try:
        with _deaf():
            futures = {pool.submit(work, *given): name for name, given in jobs.items()}
        with interrupt.deferred():
            waiting = set(futures)
            while waiting and not interrupt.requested():
                done, waiting = wait(waiting, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in done:
                    found[futures[future]] = future.result()
                    if tell:
                        tell(len(found), futures[future])
            if waiting:  # interrupted: every training ends with its step, and its state is saved
                stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
    except BaseException:
        for child in multiprocessing.active_children():
            child.kill()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return found


def seeded(
    first: Mapping[str, Training],
    seeds: int,
    out: Path,
    n: int,
    progress: Progress | None = None,
    device: str = "cpu",
) -> dict[str, dict[str, Any]]:
    """`sweep` of every training with its first seed, then of the others at the learning rate that the first one's
    halving chose; the cells are called NAME/seed0, NAME/seed1 and so on."""
    found = sweep({f"{k}/seed0": t for k, t in first.items()}, out, n, progress, "first seed, learning rates", device)
    rest = {
        f"{name}/seed{seed}": replace(training, lr=f"{found[f'{name}/seed0']['lr']:g}", seed=seed)
        for name, training in first.items()
        if "refused" not in found[f"{name}/seed0"]
        for seed in range(1, seeds)
    }
    return found | sweep(rest, out, n, progress, "other seeds", device)


@contextmanager
def _deaf():
    """Processes started here do not hear Ctrl-C, which a terminal sends to all: this one tells them to stop."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _alone(stop: Any) -> None:
    """One thread; and no worker outlives a run that was killed, to write into the folder of the next."""
    interrupt.follow(stop.is_set)
    torch.set_num_threads(1)
    threading.Thread(target=_follow, daemon=True).start()


def _follow() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _spec(training: Training, n: int) -> str:
    return digest({**asdict(training), "graded on": n})


def _held(folder: Path, training: Training, n: int) -> dict[str, Any] | None:
    path = folder / GRADE
    if not path.exists():
        return None
    try:
        body = json.loads(path.read_text())
        return dict(body["numbers"]) if body["spec"] == _spec(training, n) else None
    except (ValueError, TypeError, KeyError):
        return None  # damaged: graded again


def _cell(folder: str, training: Training, n: int, device: str = "cpu") -> dict[str, Any]:
    began = time.process_time()
    try:
        done = train(training, folder, device=device)
        task = wind_tunnels.load_task(training.task)
        subject = Subject.load(folder, device=device)
        made = grade(subject, task, n, training.seed)
        numbers = graded(made) | {"lr": done.lr, "parameters": done.parameters}
        if training.corrupt:
            numbers["kl_mixture"] = grade(subject, task, n, training.seed, corrupt=training.corrupt).kl
    except UserError as refusal:
        return {"refused": str(refusal)}  # not kept: the next run tries again
    numbers["cpu_seconds"] = round(time.process_time() - began, 1)
    body = {"spec": _spec(training, n), "numbers": numbers}
    write_whole(Path(folder) / GRADE, (json.dumps(body, indent=1, sort_keys=True) + "\n").encode())
    return numbers


def graded(made: PosteriorScores) -> dict[str, Any]:
    """What a sweep keeps of a grade: divergences and errors in bits within the horizon, the best trivial predictor's as
    NAME_trivial, and where outcomes are tokens a uniform answer's as NAME_uniform and how often the likeliest is right.
    """
    found: dict[str, Any] = {"skill": made.skill, "skill_trivial": 0.0, "best_trivial": made.best}
    who = {"": made.own, "_trivial": made.trivial[made.best]}
    who |= {"_uniform": made.trivial["uniform"]} if "uniform" in made.trivial else {}
    return found | {f"{name}{end}": x for end, one in who.items() for name, x in _means(one, made.within).items()}


def _means(scores: Scores, within: slice) -> dict[str, float]:
    one = scores.at(within)
    found = {"kl": float(one.kl.mean()), "mae_abs": mae_abs(one.gap), "mae_mean": mae_mean(one.gap)}
    return found | ({"accuracy": float(one.right.mean())} if isinstance(one, CategoricalScores) else {})


def finished(found: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> list[Mapping[str, Any]]:
    """The numbers of the cells that ended well."""
    return [found[name] for name in names if "refused" not in found[name]]
