"""What studies of several trainings share: seeds at one learning rate, grades, and results that are made once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmgeom.dynamics.sweep import keep, stored, sweep
from llmgeom.wind_tunnels.training_config import Training

REACHED_KL, REACHED_SKILL = 0.01, 0.95  # Paper I's standard as a divergence; see claims/grade.toml


def computed(path: Path, spec: Mapping[str, Any], make: Callable[[], Any]) -> Any:
    """Plain data that is made once for a spec, and read after that.

    Args:
        path: The file; its folder is made.
        spec: Everything that determines the data.
        make: Returns the data: dicts, lists, strings and finite numbers.
    """
    data = stored(path, spec)
    return keep(path, spec, make()) if data is None else data


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
