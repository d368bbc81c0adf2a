"""The snapshots of a training: from `llmgeom train`, a trainer's output folder, or revisions of a hub model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llmgeom.errors import UserError
from llmgeom.model import hub
from llmgeom.model.model import Model
from llmgeom.wind_tunnels.checkpoint import TRAINING, read_facts

FEWEST = 3
# Suites in which some branches are known to have the weights of another step.
UPSTREAM = "EleutherAI/pythia issues 195, 198, 203, 205 and 206; allenai/OLMo issue 915"
SHAPE = ("model_type", "layers", "heads", "d_model", "vocabulary", "parameters")
RISE = 0.5  # nats per token; fine-tuning on other texts may raise the loss on the prompts more slowly


@dataclass(frozen=True)
class Run:
    """The snapshots of one training, in order.

    Attributes:
        name: its name on the page.
        steps: ascending; the last snapshot is the reference.
        places: for each snapshot the model and revision for `Model.load`.
        task: task of a wind tunnel; empty for a language model.
        training: the flags of `llmgeom train`, with the learning rate that was used; empty without them.
    """

    name: str
    steps: tuple[int, ...]
    places: tuple[tuple[str, str | None], ...]
    task: str = ""
    training: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: str) -> Run:
        """A folder that `llmgeom train` finished, or one with checkpoint-N folders as trainers write them.

        Raises UserError: any other folder; fewer than 3 snapshots.
        """
        path = Path(folder)
        if (path / TRAINING).exists():
            facts = read_facts(path / TRAINING, ("training", "step", "task", "lr"))
            # The rate as it was: --lr auto chooses another one for each seed, and for random targets.
            training = {**facts["training"], "lr": facts["lr"]}
            last, task = facts["step"], hub.trusted(facts["task"], folder)
            found = _folders(path / "snapshots", "step", TRAINING)
            snapshots = {step: place for step, place in found.items() if step < last} | {last: str(path)}
            remedy = "llmgeom train --snapshots 12"
        else:
            training, task, remedy = {}, "", "save more checkpoints (save_strategy, save_steps)"
            snapshots = _folders(path, "checkpoint-", "config.json")
            if not snapshots:
                raise UserError(
                    f"{folder} is no finished run of `llmgeom train` (it has no {TRAINING}) and holds no checkpoint-N "
                    "folders of a trainer; give one of the two, or hub models with --revisions"
                )
        _require_enough(folder, tuple(snapshots), remedy)
        places = tuple((place, None) for place in snapshots.values())
        return cls(path.resolve().name, tuple(snapshots), places, task, training)

    @classmethod
    def at(cls, model: str, revisions: Sequence[str]) -> Run:
        """Revisions of a hub model in ascending order of their steps; the last is the reference.

        Args:
            revisions: names that hold their step (`revision_step`), or NAME=STEP.
        """
        pairs = [revision_step(revision) for revision in revisions]
        steps = tuple(step for _, step in pairs)
        if list(steps) != sorted(set(steps)):
            raise UserError(f"--revisions {','.join(revisions)}: expected ascending steps; the last is the reference")
        _require_enough(model, steps, "name more of them")
        return cls(model, steps, tuple((model, name) for name, _ in pairs))

    @property
    def corrupt(self) -> float:
        """The fraction of targets that were drawn at random."""
        return float(self.training.get("corrupt", 0.0))

    @property
    def random(self) -> bool:
        """Whether all targets were random, so that there was nothing to learn."""
        return self.corrupt == 1.0

    def load(self, place: int, **options: Any) -> Model:
        """The snapshot at a place of `steps`."""
        model, revision = self.places[place]
        return Model.load(model, revision=revision, **options)

    def called(self, place: int) -> str:
        """A snapshot as a person names it."""
        model, revision = self.places[place]
        return f"{model} at {revision}" if revision else model


def revision_step(revision: str) -> tuple[str, int]:
    """Name and training step of a revision.

    `step512`, `checkpoint-500`, `stage1-step1000-tokens5B` and `iter_2000` contain their step: the number after "step",
    "checkpoint" or "iter", or the only number. Any other name takes it after "=": `main=143000`. Raises UserError: the
    name contains no step.
    """
    name, given, step = revision.rpartition("=")
    if given and name and re.fullmatch(r"\d{1,18}", step):
        return name, int(step)
    numbers = re.findall(r"(?:step|checkpoint|iter)[-_]?(\d{1,18})", revision) or re.findall(r"\d{1,18}", revision)
    if len(numbers) != 1:
        raise UserError(f"--revisions {revision}: its step cannot be read from its name; give {revision}=STEP")
    return revision, int(numbers[0])


def require_distinct(weights: Mapping[str, str]) -> None:
    """Raise UserError if two snapshots have the same weights under two names.

    A curve over training would then show a step that did not exist.

    Args:
        weights: name of each snapshot -> sha256 of its weights.
    """
    first: dict[str, str] = {}
    for name, digest in weights.items():
        if digest in first:
            raise UserError(
                f"{first[digest]} and {name} hold the same weights (sha256 {digest[:12]}): one of the two names is "
                f"wrong; leave it out. Suites where this is known: {UPSTREAM}"
            )
        first[digest] = name


def require_alike(first: Mapping[str, Any], other: Mapping[str, Any], names: tuple[str, str]) -> None:
    """Raise UserError if two snapshots have different architectures: they are not of one recipe.

    Args:
        first, other: the facts of both models.
        names: the names of both snapshots in the message.
    """
    for name in SHAPE:
        if first[name] != other[name]:
            unlike = f"its {name.replace('_', ' ')} ({other[name]}, not {first[name]})"
            raise UserError(
                f"{names[1]} differs from {names[0]} in {unlike}; "
                "the steps of one training, and trainings that count as replicates, have one architecture: leave it out"
            )


def rises(steps: Sequence[int], losses: Sequence[float]) -> list[tuple[int, int]]:
    """Pairs of successive steps between which the loss rises by more than RISE nats per token.

    The loss on fixed prompts falls in training, apart from noise. After a branch with the weights of a much later step
    the loss rises; before a branch with the weights of an earlier step it rises, too. Derived here.
    """
    pairs = zip(steps[:-1], steps[1:], np.diff(losses), strict=True)
    return [(first, second) for first, second, rise in pairs if rise > RISE]


def _folders(path: Path, name: str, holds: str) -> dict[int, str]:
    """The folders NAME + step that hold such a file, by step, ascending."""
    steps = {
        int(place.name.removeprefix(name)): str(place)
        for place in path.glob(f"{name}*")
        if re.fullmatch(rf"{name}\d{{1,18}}", place.name) and (place / holds).exists()
    }
    return dict(sorted(steps.items()))


def _require_enough(what: str, steps: Sequence[int], remedy: str) -> None:
    count = len(steps)
    if count < FEWEST:
        words = {1: "no snapshot but its end", 2: "two snapshots"}.get(count, "no snapshots")
        raise UserError(f"{what} has {words}; what happens between takes at least {FEWEST}: {remedy}")
