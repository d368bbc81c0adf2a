"""One study of training: runs that can be compared, what settles first in them, and their probes, as one record."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from llmgeom.bench.sweep import sweep
from llmgeom.dynamics import SEEDS
from llmgeom.dynamics.follow import SEQUENCES, Inputs, follow, scan_snapshots, warnings
from llmgeom.dynamics.over_training import over_training
from llmgeom.dynamics.runs import Run
from llmgeom.dynamics.trajectories import sections
from llmgeom.errors import UserError
from llmgeom.files import digest, write_whole
from llmgeom.progress import Progress
from llmgeom.provenance import provenance, took
from llmgeom.record import Record
from llmgeom.run import CONTROLS, few_draws
from llmgeom.wind_tunnels import load_task
from llmgeom.wind_tunnels.training_config import Training

TRAINED = Training(
    "bijection", arch="gpt2", width=32, layers=1, steps=800, lr="5e-3", schedule="constant", snapshots=16
)


def comparable(runs: Sequence[Run]) -> list[Run]:
    """The runs, those that learn before those on random targets, with distinct names.

    Raises:
        UserError: no run learns; tasks or snapshots differ; two runs have the same seed.
    """
    runs = sorted(runs, key=lambda run: run.random)
    first = runs[0]
    if first.random:
        raise UserError(f"{first.name} and all others had random targets (--corrupt 1); give a run that learns, too")
    for other in runs[1:]:
        for what, ours, theirs in (("task", first.task, other.task), ("snapshots", first.steps, other.steps)):
            if ours != theirs:
                raise UserError(
                    f"{other.name} has another {what.rstrip('s')} than {first.name} ({_short(theirs)}, not "
                    f"{_short(ours)}); only runs that differ in seed and --corrupt are followed together"
                )
    seeds = [(run.random, run.training["seed"]) for run in runs if run.training]
    if len(set(seeds)) < len(seeds):
        raise UserError(
            "two runs have the same seed, so they are one draw and not two: train each with a different --seed"
        )
    names = [run.name for run in runs]
    return [
        replace(run, name=f"{run.name} ({i})") if names.count(run.name) > 1 else run for i, run in enumerate(runs, 1)
    ]


def _short(value: Any) -> str:
    return value if isinstance(value, str) else f"{len(value)} to step {value[-1]}"


def recipe(task: str, quick: bool = False) -> Training:
    """A training of `task` at a constant learning rate; quick: a quarter of the steps."""
    training = replace(TRAINED, task=load_task(task).title)
    return replace(training, steps=training.steps // 4) if quick else training


def train_runs(
    training: Training, folder: Path, seeds: int = SEEDS, progress: Progress | None = None
) -> tuple[Run, ...]:
    """`seeds` trainings and as many on random targets; those that are in the folder already are read.

    Raises:
        UserError: a training failed.
    """
    cells = {
        f"{kind}-seed{seed}": replace(training, corrupt=corrupt, seed=seed)
        for kind, corrupt in (("run", 0.0), ("random", 1.0))
        for seed in range(seeds)
    }
    for name, grade in sweep(cells, folder, SEQUENCES, progress).items():
        if "refused" in grade:
            raise UserError(f"{name} could not be trained: {grade['refused']}")
    return tuple(Run.of(str(folder / name)) for name in cells)


def study_spec(runs: Sequence[Run], inputs: Inputs, probes: Sequence[str], *more: Any) -> str:
    """Hash of everything that determines a study."""
    trained = [[run.name, run.steps, dict(run.training)] for run in runs]
    return digest({"runs": trained, "inputs": asdict(inputs), "probes": list(probes), "more": more})


def study(
    runs: Sequence[Run],
    inputs: Inputs,
    out: Path,
    spec: str,
    *,
    probes: Mapping[str, Any] | None = None,
    controls: int = CONTROLS,
    options: Mapping[str, Any] | None = None,
    store: str | None = None,
    progress: Progress | None = None,
    notes: Sequence[str] = (),
    command: str = "",
) -> Record:
    """Follow every run, scan the snapshots of the first with the probes, and save the record and its page in `out`.

    The scan of a snapshot that is already in `out` is read.

    Args:
        runs: of `comparable`.
        inputs: what every snapshot reads.
        out: the run folder, made by the caller.
        spec: of `study_spec`: everything that determines the record.
        probes: name -> probe.
        controls: draws of each control of the probes.
        options: of `Subject.load`.
        store: folder of captures.
        notes: further warnings of the record.
        command: the command that repeats this.
    """
    started, first, probes, options = time.time(), runs[0], probes or {}, options or {}
    trajectories, unmeasured = follow(runs, inputs, options, store, progress)
    scans = scan_snapshots(
        first,
        inputs,
        probes,
        out,
        spec,
        controls=controls,
        options=options,
        store=store,
        progress=progress,
        command=command,
    )
    last, batch = first.load(-1, **options), inputs.batch(first.corrupt)
    record = Record(
        results={**(sections(trajectories) if trajectories else {}), **over_training(first.steps, scans)},
        unmeasured=unmeasured,
        prompts={},
        subject={
            **{k: v for k, v in last.facts.items() if v is not None},
            "name": first.name if len(runs) == 1 else f"{len(runs)} runs",
        },
        source=dict(batch.source),
        facts={
            **provenance(batch, last.tokens(batch), inputs.seed, controls),
            "spec": spec,
            "command": command,
            "runs": [run.name for run in runs],
            "steps": list(first.steps),
        },
        warnings=(
            *warnings(runs, trajectories, bool(probes)),
            *notes,
            *(few_draws(controls) if probes else ()),
        ),
        run=took(started),
    )
    record.save(out)
    from llmgeom.reports.steps import steps_page

    write_whole(out / "report.html", steps_page(record, scans).encode())
    return record
