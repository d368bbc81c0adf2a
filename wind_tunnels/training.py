"""Training of a model in a wind tunnel, with fresh sequences in every step; it can be interrupted and resumed."""

from __future__ import annotations

import math
import os
import shlex
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmgeom import wind_tunnels
from llmgeom.answers import Categorical
from llmgeom.cache import interrupt
from llmgeom.errors import UserError
from llmgeom.files import digest
from llmgeom.model.loading import usable
from llmgeom.progress import tell
from llmgeom.stats.information import bits
from llmgeom.wind_tunnels.checkpoint import (
    FINISHED,
    RESUME,
    TRAINING,
    finished_facts,
    load_state,
    read_facts,
    resume_facts,
    save_model,
    save_state,
    snapshot_steps,
)
from llmgeom.wind_tunnels.exactness import require_exact
from llmgeom.wind_tunnels.trainer import JUDGED_SEQUENCES, Trainer, kl_to_exact
from llmgeom.wind_tunnels.training_config import TRIVIAL, Training
from llmgeom.world import seeded

RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
SAVE_EVERY = 30.0  # seconds between resume states
CHECK_EVERY = 50  # steps between checks of the losses, since each check waits for the device


@dataclass(frozen=True)
class Trained:
    """A finished training.

    Attributes:
        lr: The highest learning rate.
        floor: The least possible mean loss, bits per query.
        curve: (step, mean loss over the last steps minus the floor, in bits).
        kl: KL(exact || model) in bits per query, on sequences not trained on.
    """

    out: Path
    lr: float
    floor: float
    curve: tuple[tuple[int, float], ...]
    parameters: int
    kl: float

    @classmethod
    def of(cls, out: Path, facts: Mapping[str, Any]) -> Trained:
        """From the facts in training.json."""
        curve = tuple((step, above) for step, above in facts["curve"])
        return cls(out, facts["lr"], facts["floor_bits"], curve, facts["parameters"], facts["kl_bits"])

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the units in the names."""
        scores = {"floor_bits": self.floor, "kl_bits": self.kl, "curve": [list(point) for point in self.curve]}
        return {"lr": self.lr, "parameters": self.parameters, **scores}

    def lines(self) -> list[str]:
        """Lines for a terminal."""
        step, above = self.curve[-1]
        return [
            f"{self.parameters:,} parameters, {step:,} steps, learning rate {self.lr:g}: loss {above:.4f} bits above "
            f"the floor of {self.floor:.3f}",
            f"KL(exact || model) {self.kl:.4f} bits a query, {JUDGED_SEQUENCES} sequences not trained on",
            f"model: {self.out}",
            f"next: llmgeom grade --model {shlex.quote(str(self.out))}",
        ]


def train(config: Training, out: str | os.PathLike, device: str | None = None) -> Trained:
    """Trains a model and writes to `out` a model folder that loads like any other, with snapshots in
    `out/snapshots/stepN`.

    The same call resumes an interrupted training; in eager float32 on one machine it ends with the same bytes.

    Args:
        config: Everything that determines the weights.
        device: E.g. "cpu" or "cuda:1"; by default a GPU if there is one.

    Raises:
        UserError: The folder contains something else, a loss is not finite, or the disk is full.
    """
    out = Path(out)
    task = wind_tunnels.load_world(config.task)
    _check_options(config, task)
    device = usable(device, float64=True)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("train runs in one process; start it without torchrun or accelerate, a process for each seed")
    if config.graph and not device.startswith("cuda"):
        raise UserError(f"--cuda-graph: there is no CUDA graph on {device}; leave it out")
    spec = digest(asdict(config) | {"task": task.title} | task.file_code)
    if (facts := finished_facts(out, spec)) is not None:
        return Trained.of(out, facts)
    require_exact(task)
    state = resume_facts(out, spec)
    if config.lr != "auto":
        lr, tried = float(config.lr), {}
    elif state:
        lr, tried = state["lr"], state["tried"]
    else:
        lr, tried = tune(config, device)
    trainer = Trainer(config, task, lr, device)
    began = time.process_time()
    curve = _run_steps(trainer, spec, tried, out)
    with interrupt.deferred():
        _snapshot(trainer, spec, config.steps, out)
        kl = kl_to_exact(trainer.module, task, config.corrupt, config.seed, "train/judged")
        if not math.isfinite(kl):
            raise UserError(f"KL(exact || model) is {kl} after {config.steps} steps: lower --lr or raise --warmup")
        run = {"cpu_seconds_of_the_last_part": round(time.process_time() - began, 1)}
        facts = {"curve": curve, "tried": tried, "kl_bits": kl, "run": run}
        save_model(trainer.module, out, {**trainer.facts(spec, config.steps), **facts})
        (out / RESUME).unlink(missing_ok=True)
    return Trained.of(out, read_facts(out / TRAINING, FINISHED))


def _check_options(config: Training, task: Any) -> None:
    """Raises UserError for options that need discrete outcomes or states, if the task has none."""
    if config.hold_out == "states" and task.sufficient(task.draw_split(1, seeded("states", 0)).inputs) is None:
        raise UserError(
            f"--hold-out states: {task.title} does not say what the states of its evidence are (`World.sufficient`); "
            "leave it out, and hypotheses are held out"
        )
    if config.hold_out == "states" and config.graph:
        raise UserError(
            "--hold-out states --cuda-graph: a CUDA graph cannot change which queries have a loss; leave one out"
        )
    if isinstance(task.answers, Categorical):
        wanted, there = TRIVIAL.get(config.evidence), task.trivial(task.draw_split(1, seeded("trivial", 0)).inputs)
        if wanted and wanted not in there:
            raise UserError(
                f"--evidence {config.evidence}: {task.title} has no predictor called {wanted!r}, but "
                f"{', '.join(map(repr, there)) or 'none'}; choose another kind of evidence"
            )
        return
    for flag, given in (
        (f"--corrupt {config.corrupt}", config.corrupt),
        (f"--evidence {config.evidence}", config.evidence in ("sheet", *TRIVIAL)),
    ):
        if given:
            raise UserError(f"{flag}: {task.title} asks for real numbers, not outcomes")


def _run_steps(trainer: Trainer, spec: str, tried: Mapping[str, Any], out: Path) -> list[tuple[int, float]]:
    """Run all remaining steps, with snapshots and resume states; returns the loss curve."""
    config = trainer.config
    module, optimizer, generator = trainer.module, trainer.optimizer, trainer.generator
    state = load_state(out, spec, module, optimizer, generator) or {"step": 0, "curve": [], "recent": []}
    curve = [tuple(point) for point in state["curve"]]
    recent = [torch.tensor(loss, device=trainer.device, dtype=torch.float64) for loss in state["recent"]]
    saved = time.monotonic()
    snapshots = snapshot_steps(config.steps, config.snapshots)

    def save(step: int, losses: list[float]) -> None:
        facts = {"spec": spec, "step": step, "curve": curve, "recent": losses, "lr": trainer.lr, "tried": tried}
        save_state(out, module, optimizer, generator, facts)

    for step in range(state["step"], config.steps):
        with interrupt.deferred():
            if step in snapshots:
                _finite_losses(recent, step, out)
                _snapshot(trainer, spec, step, out)
            recent.append(trainer.step(step))
            if (step + 1) % CHECK_EVERY == 0 or step + 1 == config.steps:
                losses = _finite_losses(recent, step + 1, out)
                curve.append((step + 1, bits(sum(losses) / len(losses)) - trainer.floor))
                recent = []
                note = f"{curve[-1][1]:.4f} bits above the Bayes floor"
                tell(f"{trainer.task.title}, {config.arch}", step + 1, config.steps, note)
                if time.monotonic() - saved > SAVE_EVERY:
                    save(step + 1, [])
                    saved = time.monotonic()
            if interrupt.requested():
                save(step + 1, _finite_losses(recent, step + 1, out))
    return curve


def _snapshot(trainer: Trainer, spec: str, step: int, out: Path) -> None:
    """Raises UserError if a weight is not finite, which the loss of this step does not yet show."""
    for name, parameter in trainer.module.named_parameters():
        if not torch.isfinite(parameter).all():
            raise _diverged(f"{name} is not finite after {step} steps", out)
    save_model(trainer.module, out / "snapshots" / f"step{step}", trainer.facts(spec, step))


def _finite_losses(losses: list[Tensor], step: int, out: Path) -> list[float]:
    """The losses as numbers. Raises UserError if one is not finite."""
    numbers = torch.stack(losses).tolist() if losses else []
    for i, loss in enumerate(numbers):
        if not math.isfinite(loss):
            raise _diverged(f"the loss is {loss} at step {step - len(numbers) + i}", out)
    return numbers


def _diverged(what: str, out: Path) -> UserError:
    state = resume_facts(out)
    last = f"the state of step {state['step']} is in {out}" if state else f"snapshots are in {out}/snapshots"
    return UserError(f"{what}; {last}: lower --lr or raise --warmup")


def tune(
    config: Training, device: str = "cpu", rates: tuple[float, ...] = RATES
) -> tuple[float, dict[str, dict[str, float]]]:
    """Chooses the learning rate by successive halving (Jamieson & Talwalkar 2016).

    Every rate trains for an eighth of the steps, the better half for a quarter, with the schedule of a run of that
    length; KL(exact || model) on the test split decides. Such short runs mislead if the loss stays high for long and
    then falls suddenly.

    Returns:
        The rate, and the KL in bits by rate, by round.

    Raises:
        UserError: No rate gives a finite loss.
    """
    task = wind_tunnels.load_world(config.task)
    candidates, rounds = list(rates), {}
    for number, divisor in enumerate((8, 4), 1):
        steps = max(1, config.steps // divisor)
        short = replace(config, steps=steps, warmup=min(config.warmup, config.steps // divisor))
        kl = {}
        for i, lr in enumerate(candidates):
            trainer = Trainer(short, task, lr, device)
            for step in range(steps):
                with interrupt.deferred():
                    trainer.step(step)
            kl[lr] = kl_to_exact(trainer.module, task, config.corrupt, config.seed)
            tell(f"learning rate, round {number}", i + 1, len(candidates))
        finite = [lr for lr in candidates if math.isfinite(kl[lr])]
        rounds[f"round {number}, steps {steps}"] = {f"{lr:g}": kl[lr] for lr in finite}
        if not finite:
            raise UserError(
                f"no learning rate of {', '.join(map(str, rates))} gives a finite loss; lower --clip or --lr"
            )
        candidates = sorted(finite, key=kl.__getitem__)[: (len(candidates) + 1) // 2]
    return candidates[0], rounds
