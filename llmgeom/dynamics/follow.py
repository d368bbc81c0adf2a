"""Reads every snapshot of several trainings: drifts and gradients of all runs, and the probes on the first run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmgeom.batch import Batch
from llmgeom.dynamics.attention_gradients import signals
from llmgeom.dynamics.drift import drifts, state
from llmgeom.dynamics.runs import RISE, Run, require_distinct, rises
from llmgeom.dynamics.trajectories import DRIFT, GRADIENTS, Trajectory
from llmgeom.errors import Unavailable, UserError
from llmgeom.files import digest
from llmgeom.model.loading import OFFLOADED
from llmgeom.probe import WHOLE
from llmgeom.probes.posterior.scores import evaluation_batch
from llmgeom.progress import Progress
from llmgeom.prompts.domains import Domain
from llmgeom.record import Record
from llmgeom.run import CONTROLS, run_probes
from llmgeom.wind_tunnels import load_task

SEQUENCES, PROMPTS = 200, 75


@dataclass(frozen=True)
class Inputs:
    """What every snapshot reads: held-out sequences of the runs' task, or prompts of a domain.

    Attributes:
        task: NAME or NAME:field=value,...; empty for language models.
        domain: the prompts of language models.
        n: sequences or prompts; None takes SEQUENCES or PROMPTS.
        seed: of the draw.
    """

    task: str = ""
    domain: str = "mixed"
    n: int | None = None
    seed: int = 0

    def batch(self, corrupt: float = 0.0) -> Batch:
        """All queries of sequences whose targets are random in a fraction `corrupt` of cases; or prompts."""
        if not self.task:
            return Domain(self.domain).sample(self.n or PROMPTS, self.seed)
        task = load_task(self.task)
        return evaluation_batch(task, self.n or SEQUENCES, self.seed, task.test_split, corrupt)

    def probed(self) -> tuple[Batch, dict[str, Batch]]:
        """What the probes of a scan read: sequences truncated at one query, and the whole ones; or prompts."""
        if not self.task:
            return self.batch(), {}
        task, n = load_task(self.task), self.n or SEQUENCES
        split = task.test_split
        return task.truncated(n, self.seed, split), {WHOLE: task.sample(n, self.seed, split)}


def follow(
    runs: Sequence[Run],
    inputs: Inputs,
    options: Mapping[str, Any],
    store: str | None = None,
    progress: Progress | None = None,
) -> tuple[list[Trajectory], dict[str, str]]:
    """Drifts, gradients and losses of every run.

    Args:
        runs: trainings of one recipe.
        inputs: what each snapshot reads.
        options: of `Subject.load`.
        store: folder of captures.
        progress: called as progress(stage, done, total, note).

    Returns:
        The trajectories; and for drifts or gradients that a model does not allow, the reason.

    Raises:
        UserError: two snapshots of a run hold the same weights.
    """
    task = load_task(inputs.task) if inputs.task else None
    trajectories: list[Trajectory] = []
    unmeasured: dict[str, str] = {}
    done, total = 0, sum(len(run.steps) for run in runs)
    for run in runs:
        batch = inputs.batch(run.corrupt)
        states, gradients = [], []
        weights: dict[str, str] = {}  # of one run: a random-target run starts from the weights of a run that learns
        for place, step in enumerate(run.steps):
            subject = run.load(place, **options)
            if subject.weight_hash != OFFLOADED:
                weights[run.called(place)] = subject.weight_hash
                require_distinct(weights)
            try:
                if DRIFT not in unmeasured:
                    states.append(state(subject, batch, task, store))
            except Unavailable as refusal:
                unmeasured[DRIFT] = str(refusal)
            try:
                if GRADIENTS not in unmeasured:
                    gradients.append(signals(subject, batch))
            except Unavailable as refusal:
                unmeasured[GRADIENTS] = str(refusal)
            done += 1
            if progress:
                progress("snapshots followed", done, total, f"{run.name}, step {step}")
        if len(unmeasured) == 2:
            return [], unmeasured
        curves = None if DRIFT in unmeasured else drifts(states)
        losses = tuple(snapshot.loss for snapshot in states if snapshot.loss is not None)
        trajectories.append(Trajectory(run, curves, () if GRADIENTS in unmeasured else tuple(gradients), losses))
    return trajectories, unmeasured


def scan_snapshots(
    run: Run,
    inputs: Inputs,
    probes: Mapping[str, Any],
    out: Path,
    spec: str,
    *,
    controls: int = CONTROLS,
    options: Mapping[str, Any] | None = None,
    store: str | None = None,
    progress: Progress | None = None,
    command: str = "",
) -> dict[int, Record]:
    """A scan of each snapshot of a run, in OUT/stepN; a scan that is already there is read.

    The controls have the same configuration and seeds at every snapshot, so their captures are stored once.

    Args:
        probes: name -> probe; without probes nothing is read.
        out: the run folder.
        spec: hash of everything that determines the records.
        controls: draws of each control.
        options: of `Subject.load`.
        command: the command that repeats this.

    Returns:
        Step -> record.

    Raises:
        UserError: a folder holds the scan of another run.
    """
    if not probes:
        return {}
    batch, samples = inputs.probed()
    records = {}
    for place, step in enumerate(run.steps):

        def report(stage: str, done: int, total: int, note: str = "", place: int = place, step: int = step) -> None:
            if progress:
                progress("snapshots scanned", place, len(run.steps), f"step {step}, {stage} {done} of {total}")

        folder, key = out / f"step{step}", digest({"of": spec, "step": step})
        if (folder / "record.json").exists():
            records[step] = Record.load_one(folder)
            if records[step].facts["spec"] != key:
                raise UserError(f"{folder} holds the scan of another run; give another --out, or remove the folder")
        else:
            records[step] = run_probes(
                run.load(place, **(options or {})),
                batch,
                probes,
                seed=inputs.seed,
                controls=controls,
                samples=samples,
                store=store,
                progress=report,
                facts={"spec": key, "step": step, "command": command},
            )
            records[step].save(folder)
        if progress:
            progress("snapshots scanned", place + 1, len(run.steps), f"step {step}")
    return records


def warnings(runs: Sequence[Run], trajectories: Sequence[Trajectory], probed: bool) -> Iterator[str]:
    """What could overturn a verdict about these runs; `probed` where probes read the first run."""
    for trajectory in trajectories:
        for first, second in rises(trajectory.run.steps, trajectory.losses) if trajectory.losses else ():
            yield (
                f"{trajectory.run.name}: the loss on the prompts rises by more than {RISE} nats a token from step "
                f"{first} to step {second}; one of the two may hold the weights of another step"
            )
    if any(run.training.get("schedule") == "cosine" for run in runs):
        yield (
            "cosine schedule: the learning rate falls to 0, and that stops every drift, whether or not anything was "
            "learnt; train with --schedule constant"
        )
    if not any(run.training for run in runs):
        yield "no random-target models of these trainings; their learning rate fell as their authors chose"
    elif not any(run.random for run in runs):
        yield "no random-target runs (--corrupt 1): how far weights drift with nothing to learn is not known"
    if probed and len(runs) > 1:
        yield f"the probes read the snapshots of {runs[0].name} only; drifts and gradients are of all runs"
