"""What studies of several trainings share: each in its own folder, graded there, and never made twice."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from llmgeom import wind_tunnels
from llmgeom.dynamics.processes import spread
from llmgeom.errors import UserError
from llmgeom.files import digest, write_json
from llmgeom.model.model import Model
from llmgeom.probes.posterior.grading import grade
from llmgeom.probes.posterior.scores import CategoricalScores, PosteriorScores, Scores
from llmgeom.progress import tell
from llmgeom.wind_tunnels.training import train
from llmgeom.wind_tunnels.training_config import Training

REACHED_KL, REACHED_SKILL = 0.01, 0.95  # Paper I's standard as a divergence; see claims/grade.toml
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


def computed(path: Path, spec: Mapping[str, Any], make: Callable[[], Any]) -> Any:
    """Plain data that is made once for a spec, and read after that.

    Args:
        path: The file; its folder is made.
        spec: Everything that determines the data.
        make: Returns the data: dicts, lists, strings and finite numbers.
    """
    data = stored(path, spec)
    return keep(path, spec, make()) if data is None else data


def _spec(training: Training, n: int) -> dict[str, Any]:
    return {**asdict(training), "graded on": n, **wind_tunnels.load_world(training.task).file_code}


def _cell(folder: str, training: Training, n: int, device: str = "cpu") -> dict[str, Any]:
    began = time.process_time()
    try:
        done = train(training, folder, device=device)
        task = wind_tunnels.load_world(training.task)
        subject = Model.load(folder, device=device)
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
    means = {"kl": float(part.kl.mean()), "mae_abs": part.mae_abs, "mae_mean": part.mae_mean}
    return means | ({"accuracy": float(part.right.mean())} if isinstance(part, CategoricalScores) else {})


def seeded(
    first: Mapping[str, Training], seeds: int, out: Path, n: int, device: str = "cpu"
) -> dict[str, dict[str, Any]]:
    """`sweep` of every training with its first seed, then of the other seeds at the first one's learning rate.

    The cells are called NAME/seed0, NAME/seed1 and so on.
    """
    grades = sweep({f"{k}/seed0": t for k, t in first.items()}, out, n, "first seed, learning rates", device)
    rest = {
        f"{name}/seed{seed}": replace(training, lr=f"{grades[f'{name}/seed0']['lr']:g}", seed=seed)
        for name, training in first.items()
        if "refused" not in grades[f"{name}/seed0"]
        for seed in range(1, seeds)
    }
    return grades | sweep(rest, out, n, "other seeds", device)


def finished(grades: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> list[Mapping[str, Any]]:
    """The grades of those cells that were not refused."""
    return [grades[name] for name in names if "refused" not in grades[name]]


def at_posterior(grade: Mapping[str, Any]) -> bool:
    """Whether a graded model is at the posterior, by Paper I's standard."""
    return grade["kl"] < REACHED_KL and grade["skill"] > REACHED_SKILL
