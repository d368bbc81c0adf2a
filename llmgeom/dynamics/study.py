"""One study of training: comparable runs, the measurements of every snapshot, and their record."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from llmgeom.cache.keys import of_files, of_program
from llmgeom.dynamics import SEEDS
from llmgeom.dynamics.drift import State, distances, loss_of, state
from llmgeom.dynamics.gradients import over_layers, signals
from llmgeom.dynamics.processes import spread
from llmgeom.dynamics.runs import RISE, Run, require_alike, require_distinct, rises
from llmgeom.dynamics.trajectories import DRIFT, GRADIENTS, Trajectory, over_training, sections
from llmgeom.files import digest, write_whole
from llmgeom.model.loading import OFFLOADED
from llmgeom.probe import WHOLE, Batch, Unavailable, UserError
from llmgeom.probes.posterior.scores import evaluation_batch
from llmgeom.progress import renamed, tell
from llmgeom.prompts.domains import Domain
from llmgeom.provenance import few_draws, provenance, took
from llmgeom.record import Record
from llmgeom.run import CONTROLS, run_probes
from llmgeom.wind_tunnels import load_world
from llmgeom.wind_tunnels.checkpoint import TRAINING
from llmgeom.wind_tunnels.training import train
from llmgeom.wind_tunnels.training_config import Training

SEQUENCES, PROMPTS = 200, 75
Read = TypeVar("Read")


@dataclass(frozen=True)
class Inputs:
    """The inputs of every snapshot: held-out sequences of the runs' task, or prompts of a domain.

    Attributes:
        task: NAME or NAME:field=value,...; empty for language models.
        domain: the prompts of language models.
        n: sequences or prompts; None takes SEQUENCES or PROMPTS.
    """

    task: str = ""
    domain: str = "mixed"
    n: int | None = None
    seed: int = 0

    def batch(self, corrupt: float = 0.0) -> Batch:
        """Sequences with all queries, a fraction `corrupt` of their targets random; or prompts."""
        if not self.task:
            return Domain(self.domain).sample(self.n or PROMPTS, self.seed)
        task = load_world(self.task)
        return evaluation_batch(task, self.n or SEQUENCES, self.seed, task.test_split, corrupt)

    def probed(self) -> tuple[Batch, dict[str, Batch]]:
        """The inputs of a scan's probes: sequences truncated at one query, and whole sequences; or prompts."""
        if not self.task:
            return self.batch(), {}
        task, n = load_world(self.task), self.n or SEQUENCES
        split = task.test_split
        return task.truncated(n, self.seed, split), {WHOLE: task.sample(n, self.seed, split)}


def follow(
    runs: Sequence[Run], inputs: Inputs, options: Mapping[str, Any], store: str | None
) -> tuple[list[Trajectory], dict[str, str]]:
    """Drifts, gradients, losses and weight hashes of every run, read snapshot by snapshot.

    The last snapshot of a run is read first, since the others are compared with it, and its arrays stay in memory until
    the run ends. Each other snapshot is reduced to its numbers and freed before the next is loaded: attention and
    values of 154 revisions of Pythia-410m would take 20 GB.

    Returns:
        The trajectories; and the reasons why drifts or gradients are not measured: the first snapshot that was asked
        for one has none, and no further one is asked.

    Raises:
        UserError: two snapshots of a run have the same weights, or the ends of two runs do; two architectures.
    """
    task, unmeasured = load_world(inputs.task) if inputs.task else None, dict[str, str]()
    shape: list[tuple[str, Mapping[str, Any]]] = []  # name and facts of the first snapshot that was read
    ends: dict[str, str] = {}  # over all runs: one training under two names is one draw and not two
    done, total = 0, sum(len(run.steps) for run in runs)

    def measured(what: str, read: Callable[[], Read]) -> Read | None:
        if what not in unmeasured:
            try:
                return read()
            except Unavailable as refusal:
                unmeasured[what] = str(refusal)
        return None

    def of_run(run: Run) -> Trajectory:
        last, batch = len(run.steps) - 1, inputs.batch(run.corrupt)
        snapshots: dict[int, dict[str, float | str]] = {}
        weights: dict[int, str] = {}
        end: State | None = None

        def read(place: int) -> State | None:
            nonlocal done
            subject, name = run.load(place, **options), run.called(place)
            weights[place] = subject.weight_hash
            shape[:] = shape or [(name, subject.facts)]
            require_alike(shape[0][1], subject.facts, (shape[0][0], name))
            # Within one run: a random-target run starts from the weights of a run that learns.
            hashed = {run.called(i): weights[i] for i in sorted(weights) if weights[i] != OFFLOADED}
            require_distinct(hashed)
            if place == last and name in hashed:
                ends[f"the end of {run.name}"] = hashed[name]
                require_distinct(ends)
            now = measured(DRIFT, lambda: state(subject, batch, task, store))
            found: dict[str, float | str] = {} if now is None else distances(now, now if end is None else end)
            if task is None:
                loss = now.loss if now else None  # a model without attention has a loss, too
                found["loss"] = loss_of(subject, batch, store) if loss is None else loss
            signal = measured(GRADIENTS, lambda: signals(subject, batch))
            found.update({} if signal is None else over_layers(signal))
            snapshots[place] = found
            done += 1
            tell("snapshots followed", done, total, f"{run.name}, step {run.steps[place]}")
            return now

        end = read(last)
        for place in range(last):
            read(place)
        places = range(len(run.steps))
        return Trajectory(run, [snapshots[place] for place in places], tuple(weights[place] for place in places))

    return [of_run(run) for run in runs], unmeasured


def scan_snapshots(
    run: Run,
    inputs: Inputs,
    probes: Mapping[str, Any],
    out: Path,
    facts: Mapping[str, Any],
    weights: Sequence[str],
    options: Mapping[str, Any],
    **read: Any,
) -> dict[int, Record]:
    """A scan of each snapshot of a run, in OUT/stepN, by step.

    An existing scan is read if the same program made it from the same weights. A branch of the hub can move between two
    starts, and numbers from two versions of a probe make no curve.

    The controls have the same configuration and seeds at every snapshot, so their captures are stored once.

    Args:
        facts: facts of the study: its spec, and the command that repeats it.
        weights: the hash of the weights of each snapshot.
        options: options of `Model.load`. read: options of `run_probes`.

    Raises:
        UserError: a folder contains the scan of another run.
    """
    if not probes:
        return {}
    batch, samples = inputs.probed()
    records = {}
    for place, step in enumerate(run.steps):
        folder, key = out / f"step{step}", digest({"of": facts["spec"], "step": step})
        try:
            record = Record.load_one(folder)
        except UserError:  # missing or damaged
            record = None
        if record and record.facts.get("spec") != key:
            raise UserError(f"{folder} holds the scan of another run; give another --out, or remove the folder")
        made_of = record and (record.run.get("program"), record.subject.get("weights"))
        if record and made_of == (of_program(), weights[place]):
            records[step] = record
        else:
            of_step = {**facts, "spec": key, "step": step}
            read |= {"seed": inputs.seed, "samples": samples}
            with renamed(partial(_of_snapshot, place, len(run.steps), step)):
                # The model has no name here: it is freed before the next is loaded.
                records[step] = run_probes(run.load(place, **options), batch, probes, facts=of_step, **read)
            records[step].save(folder)
        tell("snapshots scanned", place + 1, len(run.steps), f"step {step}")
    return records


def _of_snapshot(place: int, places: int, step: int, stage: str, done: int, total: int, _: str) -> Any:
    """The progress of the scan of one snapshot as that of all."""
    return "snapshots scanned", place, places, f"step {step}, {stage} {done} of {total}"


def warnings(runs: Sequence[Run], trajectories: Sequence[Trajectory], probed: bool) -> Iterator[str]:
    """Reasons to doubt a verdict about these runs; `probed` if probes read the first run."""
    for trajectory in trajectories:
        losses = [float(one["loss"]) for one in trajectory.snapshots if "loss" in one]
        for first, second in rises(trajectory.run.steps, losses) if losses else ():
            yield (
                f"{trajectory.run.name}: the loss on the prompts rises by more than {RISE} nats a token from step "
                f"{first} to step {second}; one of the two may hold the weights of another step"
            )
    if first := runs[0].steps[0]:
        yield (
            f"the first snapshot is of step {first}: 5 % and 50 % are of what was left there, and what settled before "
            "it is not seen; add the snapshot of step 0"
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


ALIKE = "only trainings of one recipe with other seeds, and the same with --corrupt 1, are followed together"
TRAINED = Training(
    "bijection", arch="gpt2", width=32, layers=1, steps=800, lr="5e-3", schedule="constant", snapshots=16
)


def comparable(runs: Sequence[Run]) -> list[Run]:
    """The runs with distinct names: first those that learn, then those on random targets.

    Raises UserError: no run learns; tasks, snapshots or recipes differ; two runs have the same seed.
    """
    runs = sorted(runs, key=lambda run: run.random)
    first = runs[0]
    if first.random:
        raise UserError(f"{first.name} and all others had random targets (--corrupt 1); give a run that learns, too")
    for other in runs[1:]:
        for what, ours, theirs in (("task", first.task, other.task), ("snapshots", first.steps, other.steps)):
            if ours != theirs:
                its, mine = (x or "none" if isinstance(x, str) else f"{len(x)} to step {x[-1]}" for x in (theirs, ours))
                another = f"{other.name} has another {what.rstrip('s')} than {first.name}"
                raise UserError(f"{another} ({its}, not {mine}); {ALIKE}")
        free = ("task", "seed", *["corrupt"] * other.random)  # the typed task may differ; its title is compared above
        for name, value in other.training.items():
            if name not in free and value != first.training.get(name):
                raise UserError(
                    f"{other.name} was trained with another {name} than {first.name} ({value}, not "
                    f"{first.training.get(name)}); {ALIKE}"
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


def recipe(task: str, quick: bool = False) -> Training:
    """A training of `task` at a constant learning rate; quick: a quarter of the steps."""
    training = replace(TRAINED, task=load_world(task).title)
    return replace(training, steps=training.steps // 4) if quick else training


def train_runs(training: Training, folder: Path, seeds: int = SEEDS) -> tuple[Run, ...]:
    """`seeds` trainings and as many on random targets; existing trainings in the folder are read.

    Raises UserError: a training failed.
    """
    jobs = {
        f"{kind}-seed{seed}": (str(folder / f"{kind}-seed{seed}"), replace(training, corrupt=corrupt, seed=seed))
        for kind, corrupt in (("run", 0.0), ("random", 1.0))
        for seed in range(seeds)
    }
    refused = {name: _trained(*job) for name, job in jobs.items() if Path(job[0], TRAINING).exists()}
    there, left = len(refused), {name: job for name, job in jobs.items() if name not in refused}
    tell("trainings", there, len(jobs))
    refused |= spread(_trained, left, lambda done, name: tell("trainings", there + done, len(jobs), name))
    for name, why in refused.items():
        if why:
            raise UserError(f"{name} could not be trained: {why}")
    return tuple(Run.of(where) for where, _ in jobs.values())


def _trained(folder: str, training: Training) -> str:
    """Train in a process of its own, or read what is finished there; why it could not, or nothing."""
    try:
        train(training, folder, device="cpu")
    except UserError as refusal:
        return str(refusal)
    return ""


def study_spec(runs: Sequence[Run], inputs: Inputs, probes: Sequence[str], *more: Any) -> str:
    """Hash of everything that determines a study: the files of a local model, the names of those of the hub."""
    files = [[of_files(place) if Path(place).is_dir() else [place, name] for place, name in run.places] for run in runs]
    trained = [[run.name, run.steps, dict(run.training), of] for run, of in zip(runs, files, strict=True)]
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
    notes: Sequence[str] = (),
    command: str = "",
) -> Record:
    """Follow every run, scan the snapshots of the first with the probes, and save the record and its page in `out`.

    Args:
        runs: from `comparable`. spec: from `study_spec`.
        out: the run folder, created by the caller.
        controls: draws of each control of the probes.
        options: options of `Model.load`.
        notes: further warnings of the record.
        command: the command that repeats this.
    """
    started, first, probes, options = time.time(), runs[0], probes or {}, options or {}
    trajectories, unmeasured = follow(runs, inputs, options, store)
    facts = {"spec": spec, "command": command}
    read = {"controls": controls, "store": store}
    scans = scan_snapshots(first, inputs, probes, out, facts, trajectories[0].weights, options, **read)
    last, batch = first.load(-1, **options), inputs.batch(first.corrupt)
    subject = {**last.facts_now, "name": first.name}
    if len(runs) > 1:  # of one recipe, so with the same facts but for the files; with the hash of each one's weights
        random = sum(run.random for run in runs)
        counts = ((len(runs) - random, "training"), (random, "control"))  # those on random targets are the control
        subject["name"] = " and ".join(f"{n} {noun}{'s' * (n != 1)}" for n, noun in counts if n)
        subject["weights"] = {trajectory.run.name: trajectory.weights[-1] for trajectory in trajectories}
        subject.pop("files", None)
    record = Record(
        results={**sections(trajectories), **over_training(first.steps, scans)},
        unmeasured=unmeasured,
        prompts={},
        subject=subject,
        source=dict(batch.source),
        facts={
            **provenance(batch, last.tokens(batch), inputs.seed, controls),
            **facts,
            "runs": [run.name for run in runs],
            "steps": list(first.steps),
        },
        warnings=(*warnings(runs, trajectories, bool(probes)), *notes, *(few_draws(controls) if probes else ())),
        run=took(started),
    )
    record.save(out)
    from llmgeom.reports.steps import steps_page

    write_whole(out / "report.html", steps_page(record, scans).encode())
    return record
