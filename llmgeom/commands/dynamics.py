"""The whole of `llmgeom dynamics`: what settles first in training, and every probe's metric from step to step."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from llmgeom import probes
from llmgeom.batch import Batch
from llmgeom.cache.shards import captures_folder
from llmgeom.commands.config import Config, check_folder, command, safe
from llmgeom.commands.output import VerdictOutput, show_record
from llmgeom.dynamics.drift import SEEDS, drifts, state
from llmgeom.dynamics.runs import RISE, Run, require_distinct, rises
from llmgeom.dynamics.trajectories import DRIFT, GRADIENTS, Course, sections
from llmgeom.errors import Unavailable, UserError
from llmgeom.files import digest, write_whole
from llmgeom.flags import LARGEST_SEED, argument, flag
from llmgeom.model.attention_gradients import signals
from llmgeom.model.loading import OFFLOADED
from llmgeom.probe import WHOLE
from llmgeom.probes.posterior.scores import evaluation_batch
from llmgeom.progress import Progress
from llmgeom.provenance import provenance, took
from llmgeom.record import Record
from llmgeom.reports.text import grid
from llmgeom.result import Figure, Measured, Quantity
from llmgeom.run import few_draws, run_probes
from llmgeom.task import Task
from llmgeom.wind_tunnels import load_task
from llmgeom.wind_tunnels.training_config import Training

SEQUENCES, PROMPTS = 200, 75
TRAINED = Training(
    "bijection", arch="gpt2", width=32, layers=1, steps=800, lr="5e-3", schedule="constant", snapshots=16
)


@dataclass(frozen=True)
class RunConfig(Config):
    """What `llmgeom dynamics` is asked for."""

    VERB: ClassVar[str] = "dynamics"

    runs: tuple[str, ...] = argument(())
    task: str | None = flag(None, "Train on this task at a constant rate, and as often on random targets.")
    seeds: int = flag(SEEDS, "With --task: trainings of each kind.", least=1, most=1000)
    quick: bool = flag(False, "With --task: a quarter of the steps.")
    model: str | None = flag(None, "A hub id, instead of RUNS.")
    revisions: tuple[str, ...] = flag(
        (), "Of --model, or of each hub id in RUNS: step0,step512,main=143000 in ascending order.", listed=True
    )
    domain: str = flag("mixed", "Of language models: the prompts that every snapshot reads.")
    probes: tuple[str, ...] | None = flag(
        None, "Names with commas between, or all; '' for none. [default: as `llmgeom scan`]", listed=True
    )
    n: int | None = flag(None, "Sequences, or prompts. [default: 200, or 75 prompts]", least=10)
    nulls: int = flag(20, "Draws of each null of the probes.", least=1)
    seed: int = flag(0, "Fixes sequences, prompts and nulls.", least=0, most=LARGEST_SEED)
    dtype: Literal["float32", "bfloat16", "float16"] | None = flag(None, "Precision of the weights.")
    device: str | None = flag(None, "cpu, cuda, cuda:1 ... [default: a GPU if there is one]")
    offline: bool = flag(False, "Never use the network.")
    out: str | None = flag(
        None, "Run folder; a stopped run continues in it. [default: runs/dynamics-WHAT-HASH]", group="Output"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if sum(map(bool, (self.runs, self.model, self.task))) != 1:
            raise UserError("give folders of `llmgeom train`, or --model with --revisions, or --task; one of the three")
        if (self.model and not self.revisions) or (self.task and self.revisions):
            raise UserError(
                "--model and --revisions go together: --model EleutherAI/pythia-410m --revisions step0,step512"
            )

    @property
    def options(self) -> dict[str, Any]:
        """How every snapshot is loaded."""
        return {"dtype": self.dtype, "device": self.device, "offline": self.offline}


@command(
    RunConfig,
    VerdictOutput,
    examples=[
        "llmgeom dynamics runs/seed0 runs/seed1 runs/seed2 runs/seed3 runs/seed4",
        "llmgeom dynamics --task bijection --seeds 5",
        "llmgeom dynamics --model EleutherAI/pythia-70m --revisions step0,step512,step8000,step143000",
    ],
)
def main(asked: RunConfig, output: VerdictOutput) -> int:
    """Follow training: what settles first, attention, values or the answers? Scan every snapshot, too.

    RUNS: folders of `llmgeom train --schedule constant`, one for each seed, and of `--corrupt 1` as their null; or
    folders with checkpoint-N inside, as trainers write them; or, with --revisions, hub models trained with other seeds.
    """
    return show_record(perform, asked, output, table)


def perform(asked: RunConfig, progress: Progress | None = None) -> tuple[Path, Record]:
    """Train where asked, follow every run, scan the snapshots of the first; (folder, record).

    OUT/stepN holds the record of each snapshot; the same command goes on after the last one that is there.
    """
    started = time.time()
    probes.chosen(asked.probes)  # an unknown name is refused before anything is trained
    runs = _runs(asked, progress)
    modules = probes.known(probes.chosen(asked.probes, prompts=not runs[0].task))
    spec = digest(
        {
            "runs": [[run.name, run.steps, dict(run.training)] for run in runs],
            "probes": list(modules),
            "asked": [asked.domain, asked.n, asked.nulls, asked.seed, asked.dtype],
        }
    )
    out = _out(asked, spec)
    check_folder(out, spec)
    task = load_task(runs[0].task) if runs[0].task else None
    store = str(captures_folder())
    courses, unmeasured = _follow(runs, task, asked, store, progress)
    records = _scans(runs[0], task, modules, asked, out, spec, store, progress) if modules else {}
    steps = runs[0].steps
    results = sections(courses) if courses else {}
    results |= over_training(steps, records)
    last, batch = runs[0].load(-1, **asked.options), probe_batch(task, asked, runs[0].corrupt)
    called = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    record = Record(
        results=results,
        unmeasured=unmeasured,
        prompts={},
        subject={k: v for k, v in last.facts.items() if v is not None} | {"name": called},
        source=dict(batch.source),
        facts={
            **provenance(batch, last.tokens(batch), asked.seed, asked.nulls),
            "spec": spec,
            "command": asked.command(),
            "runs": [run.name for run in runs],
            "steps": list(steps),
        },
        warnings=tuple(_warnings(runs, courses, modules, asked)),
        run=took(started),
    )
    record.save(out)
    from llmgeom.reports.steps import steps_page

    write_whole(out / "report.html", steps_page(record, records).encode())
    return out, record


def table(record: Record) -> Iterator[str]:
    """When each curve of each run settles, as lines for a terminal."""
    for name, title in ((DRIFT, "step from which 5 % is left"), (GRADIENTS, "step from which 5 % of the most is left")):
        measured = record.results.get(name)
        if measured is None:
            continue
        columns = sorted(key for key in measured.quantities if key.endswith("_settled"))
        rows = [
            (
                str(run),
                *(
                    f"{measured.arrays[key][i]:.0f}{'+' * bool(measured.arrays[key.replace('_settled', '_pinned')][i])}"
                    for key in columns
                ),
            )
            for i, run in enumerate(measured.ticks["run"])
        ]
        yield from grid(title, [key.removesuffix("_settled").replace("_", " ") for key in columns], rows)
    yield "+ between the last two snapshots, or not at all: a longer run would say later"


# ---- what is followed ------------------------------------------------------------------------------------------------


def _runs(asked: RunConfig, progress: Progress | None) -> list[Run]:
    """The runs, those that learn first. Raises UserError where they cannot be followed together."""
    if asked.model:
        return [Run.at(asked.model, asked.revisions)]
    if asked.revisions:
        runs = [Run.at(model, asked.revisions) for model in asked.runs]
    else:
        runs = sorted(map(Run.of, _trained(asked, progress) if asked.task else asked.runs), key=lambda run: run.random)
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
    taken = [(run.random, run.training["seed"]) for run in runs if run.training]
    if len(set(taken)) < len(taken):
        raise UserError(
            "two runs have the same seed, so they are one draw and not two: train each with a different --seed"
        )
    return _named_apart(runs)


def _short(value: Any) -> str:
    return value if isinstance(value, str) else f"{len(value)} to step {value[-1]}"


def _named_apart(runs: list[Run]) -> list[Run]:
    names = [run.name for run in runs]
    return [
        replace(run, name=f"{run.name} ({i})") if names.count(run.name) > 1 else run for i, run in enumerate(runs, 1)
    ]


def _trained(asked: RunConfig, progress: Progress | None) -> list[str]:
    """Constant-rate runs of a task and as many on random targets, trained where they are not there yet."""
    from llmgeom.bench.sweep import sweep

    spec = replace(TRAINED, task=load_task(str(asked.task)).title)
    spec = replace(spec, steps=spec.steps // 4) if asked.quick else spec
    cells = {
        f"{kind}-seed{seed}": replace(spec, corrupt=corrupt, seed=seed)
        for kind, corrupt in (("run", 0.0), ("random", 1.0))
        for seed in range(asked.seeds)
    }
    folder = _out(asked, digest(dataclasses.asdict(spec))) / "runs"
    for name, numbers in sweep(cells, folder, SEQUENCES, progress).items():
        if "refused" in numbers:
            raise UserError(f"{name} could not be trained: {numbers['refused']}")
    return [str(folder / name) for name in cells]


def _out(asked: RunConfig, spec: str) -> Path:
    if asked.out:
        return Path(asked.out)
    what = asked.task or asked.model or Path(asked.runs[0]).resolve().name
    key = digest(dataclasses.asdict(asked) | {"out": None})[:8] if asked.task else spec[:8]
    return Path("runs") / f"dynamics-{safe(what)}-{key}"


def probe_batch(task: Task | None, asked: RunConfig, corrupt: float) -> Batch:
    """What every snapshot reads: held-out sequences with all their queries, or prompts of a domain."""
    if task is not None:
        return evaluation_batch(task, asked.n or SEQUENCES, asked.seed, task.test_split, corrupt)
    from llmgeom.prompts.domains import Domain

    return Domain(asked.domain).sample(asked.n or PROMPTS, asked.seed)


def _follow(
    runs: Sequence[Run], task: Task | None, asked: RunConfig, store: str, progress: Progress | None
) -> tuple[list[Course], dict[str, str]]:
    """Every run's drifts and gradients; and why one of the two, or both, could not be had."""
    courses: list[Course] = []
    unmeasured: dict[str, str] = {}
    done, total = 0, sum(len(run.steps) for run in runs)
    for run in runs:
        batch = probe_batch(task, asked, run.corrupt)
        states, pull = [], []
        weights: dict[str, str] = {}  # of this run: a run on random targets begins where one that learns does
        for place in range(len(run.steps)):
            subject = run.load(place, **asked.options)
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
                    pull.append(signals(subject, batch))
            except Unavailable as refusal:
                unmeasured[GRADIENTS] = str(refusal)
            done += 1
            if progress:
                progress("snapshots followed", done, total, f"{run.name}, step {run.steps[place]}")
        if len(unmeasured) == 2:
            return [], unmeasured
        courses.append(
            Course(
                run,
                None if DRIFT in unmeasured else drifts(states),
                () if GRADIENTS in unmeasured else tuple(pull),
                tuple(one.loss for one in states if one.loss is not None),
            )
        )
    return courses, unmeasured


def _scans(
    run: Run,
    task: Task | None,
    modules: Mapping[str, Any],
    asked: RunConfig,
    out: Path,
    spec: str,
    store: str,
    progress: Progress | None,
) -> dict[int, Record]:
    """The probes at every snapshot of a run, by step; what is in OUT/stepN already is read.

    The controls are those of the config and seed, the same for every snapshot: their captures are stored once.
    """
    samples: dict[str, Batch] = {}
    if task is None:
        batch = probe_batch(None, asked, 0.0)
    else:
        n, split = asked.n or SEQUENCES, task.test_split
        batch, samples = task.truncated(n, asked.seed, split), {WHOLE: task.sample(n, asked.seed, split)}
    records = {}
    for place, step in enumerate(run.steps):
        folder, own = out / f"step{step}", digest({"of": spec, "step": step})
        check_folder(folder, own)
        if (folder / "record.json").exists():
            records[step] = Record.load_one(folder)
        else:

            def tell(stage: str, done: int, total: int, note: str = "", place: int = place, step: int = step) -> None:
                if progress:
                    progress("snapshots scanned", place, len(run.steps), f"step {step}, {stage} {done} of {total}")

            records[step] = run_probes(
                run.load(place, **asked.options),
                batch,
                modules,
                seed=asked.seed,
                controls=asked.nulls,
                samples=samples,
                store=store,
                progress=tell,
                facts={"spec": own, "step": step, "command": asked.command()},
            )
            records[step].save(folder)
        if progress:
            progress("snapshots scanned", place + 1, len(run.steps), f"step {step}")
    return records


def _warnings(
    runs: Sequence[Run], courses: Sequence[Course], modules: Mapping[str, Any], asked: RunConfig
) -> Iterator[str]:
    for course in courses:
        for first, second in rises(course.run.steps, course.losses) if course.losses else ():
            yield (
                f"{course.run.name}: the loss on the prompts rises by more than {RISE} nats a token from step {first} "
                f"to step {second}; one of the two may hold the weights of another step"
            )
    rates = sorted({str(run.training.get("schedule")) for run in runs if run.training})
    if "cosine" in rates:
        yield (
            "cosine schedule: the learning rate falls to 0, and that stops every drift, whether or not anything was "
            "learnt; train with --schedule constant"
        )
    if not any(run.training for run in runs):
        yield "no random-target models of these trainings; their learning rate fell as their authors chose"
    elif not any(run.random for run in runs):
        yield "no random-target runs (--corrupt 1): how far weights drift with nothing to learn is not known"
    if modules and len(runs) > 1:
        yield f"the probes read the snapshots of {runs[0].name} alone; drifts and gradients are of all runs"
    if asked.quick:
        yield "quick: a quarter of the steps"
    yield from few_draws(asked.nulls) if modules else ()


def over_training(steps: Sequence[int], records: Mapping[int, Record]) -> dict[str, Measured]:
    """Every metric of every probe from snapshot to snapshot, with its interval and null band: a curve each."""
    found: dict[str, Measured] = {}
    for probe in sorted({probe for record in records.values() for probe in record.results}):
        held = {step: record.results[probe] for step, record in records.items() if probe in record.results}
        first = next(iter(held.values()))
        quantities, arrays, ticks, notes = {}, {}, {}, []
        names = dict.fromkeys(h.name for measured in held.values() for h in measured.estimates)
        for i, name in enumerate(names):
            each = {s: h for s, measured in held.items() for h in measured.estimates if h.name == name}
            missing = [step for step in steps if step not in each]
            axis = "step" if not missing else f"step (not measured at {', '.join(map(str, missing))})"
            ticks[axis] = tuple(map(str, each))
            some, key = next(iter(each.values())), f"headline_{i:02}"
            figure = Figure("curve", band=f"{key}_null", interval=f"{key}_interval")
            quantities[key] = Quantity((axis,), some.unit, name, figure)
            arrays[key] = np.array([h.value for h in each.values()])
            for part, ends in (("interval", ("low", "high")), ("null", ("null_low", "null_high"))):
                meaning = "95 % interval" if part == "interval" else "95 % band of the null that decides"
                quantities[f"{key}_{part}"] = Quantity((axis, "bound"), some.unit, meaning)
                arrays[f"{key}_{part}"] = np.array([[getattr(h, end) for end in ends] for h in each.values()])
        for step, record in records.items():
            if probe in record.unmeasured:
                notes.append(f"step {step}: not measured, {record.unmeasured[probe]}")
        if names:
            found[probe] = Measured(
                title=f"{first.title}, over training",
                meaning=first.meaning,
                computed=first.computed,
                null=first.null,
                failure_modes=first.failure_modes,
                estimates=(),
                quantities=quantities,
                arrays=arrays,
                notes=tuple(notes),
                ticks=ticks,
            )
    return found
