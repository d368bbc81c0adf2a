"""Models of known truth: small models whose training says what they can infer, and every metric measured on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from llmgeom import claims, probes, wind_tunnels
from llmgeom.bench import grading
from llmgeom.bench.resume import computed
from llmgeom.bench.sweep import spread
from llmgeom.commands import patch
from llmgeom.errors import UserError
from llmgeom.model.subject import Subject
from llmgeom.papers import routing_law
from llmgeom.papers.primitives import REACHED_KL, REACHED_SKILL, at_posterior
from llmgeom.probe import WHOLE
from llmgeom.probes.interventions import component_probe
from llmgeom.progress import Progress
from llmgeom.record import Record
from llmgeom.result import Estimate
from llmgeom.run import CONTROLS, run_probes
from llmgeom.task import Task
from llmgeom.wind_tunnels.checkpoint import snapshot_steps
from llmgeom.wind_tunnels.training import train
from llmgeom.wind_tunnels.training_config import Evidence, Training

Kind = Literal["trained", "stopped", "untrained", "no inference", "position only", "bag of values"]
KINDS: dict[Kind, str] = {
    "trained": f"to the posterior: KL under {REACHED_KL} bits and skill over {REACHED_SKILL}",
    "stopped": "on the way there, or stayed short of it",
    "untrained": "step 0",
    "no inference": "trained as long on targets of other sequences: nothing can be inferred",
    "position only": "trained on the exact answers to one fixed sequence: right where position alone decides",
    "bag of values": "trained with another sequence's keys at the queries: what was shown counts, not the keys",
}
READING = 2  # raised when what is measured changes
SIZE, SMALLER = 100, 40  # sequences read; two trained models of each cell are read once more with fewer
DRAWN = 400  # sequences by which the query is chosen at which entropy is read
STOPPED = (0.08, 0.2, 0.45)  # fractions of the steps at which the first, second and third training of a cell is read

# Small enough to be trained in seconds, and wide enough to be right. Shapes differ on purpose.
CELLS = {
    "bijection gpt2": Training("bijection:vocab=6,pairs=5", arch="gpt2", width=32, layers=1, steps=500, lr="1e-2"),
    "bijection llama": Training("bijection:vocab=6,pairs=5", arch="llama", width=32, layers=2, steps=500, lr="1e-2"),
    "bijection lstm": Training("bijection:vocab=6,pairs=5", arch="lstm", width=48, layers=1, steps=500, lr="1e-2"),
    "replacement neox": Training(
        "bijection:vocab=6,pairs=8,replacement=True", arch="neox", width=48, layers=2, steps=1000, lr="5e-3"
    ),
    "recall gpt2": Training(
        "recall:pairs=2,queries=2,keys=6,values=6", arch="gpt2", width=32, layers=2, steps=600, lr="5e-3"
    ),
    "recall mamba2": Training(
        "recall:pairs=2,queries=2,keys=6,values=6", arch="mamba2", width=32, layers=2, steps=600, lr="1e-2"
    ),
    "coin neox": Training("coin:flips=12", arch="neox", width=24, layers=2, steps=300, lr="1e-2"),
    "coin window": Training("coin:flips=12", arch="window", width=24, layers=3, steps=300, lr="1e-2"),
    "markov gpt2": Training(
        "markov:symbols=3,steps=16,fixed=False", arch="gpt2", width=32, layers=2, steps=400, lr="1e-2"
    ),
    "hmm neox": Training(
        "hmm:symbols=5,steps=10,fixed=True,horizon=6,encoding=tokens", arch="neox", width=32, layers=2, steps=400,
        lr="1e-2",
    ),
    "hmm gqa": Training(
        "hmm:symbols=5,steps=10,fixed=True,horizon=6,encoding=tokens", arch="gqa", width=32, layers=2, steps=400,
        lr="1e-2",
    ),
}  # fmt: skip
KEYED = ("bijection gpt2", "bijection llama", "replacement neox", "recall gpt2", "recall mamba2")
SHEETS = ("bijection gpt2", "bijection llama", "coin neox", "coin window", "markov gpt2")
QUICK = ("bijection gpt2", "recall gpt2", "coin neox", "hmm neox")


@dataclass(frozen=True)
class Recipe:
    """One training, and its readings: (kind, step, sequences) of each."""

    cell: str
    training: Training
    readings: tuple[tuple[Kind, int, int], ...]


def recipes(quick: bool = False) -> dict[str, Recipe]:
    """The trainings by name. Seeds of a kind are consecutive, so that half of them are even."""
    seeds: dict[Evidence, range] = {
        "kept": range(2 if quick else 4),
        "exchanged": range(10, 12 if quick else 16),
        "unbound": range(20, 20 if quick else 22),
        "sheet": range(30, 30 if quick else 32),
    }
    found = {}
    for cell in QUICK if quick else CELLS:
        for evidence, some in seeds.items():
            if cell not in {"unbound": KEYED, "sheet": SHEETS}.get(evidence, CELLS):
                continue
            for place, seed in enumerate(some):
                training = replace(CELLS[cell], evidence=evidence, seed=seed)
                name = f"{cell} {evidence} {seed}".replace(" ", "-")
                found[name] = Recipe(cell, training, tuple(_readings_of(training, place, quick)))
    return found


def _readings_of(training: Training, place: int, quick: bool) -> Iterator[tuple[Kind, int, int]]:
    last = training.steps
    if training.evidence == "unbound":
        yield "bag of values", last, SIZE
    elif training.evidence == "sheet":
        yield "position only", last, SIZE
    elif training.evidence == "exchanged":
        yield "no inference", last, SIZE
        yield "untrained", 0, SIZE
    else:
        yield "trained", last, SIZE
        if place < 2 and not quick:
            yield "trained", last, SMALLER
        if place < len(STOPPED):
            wanted = STOPPED[place] * last
            steps = [step for step in snapshot_steps(last, training.snapshots) if 0 < step < last]
            yield "stopped", min(steps, key=lambda step: abs(step - wanted)), SIZE


def readings(out: Path, quick: bool = False, progress: Progress | None = None) -> list[dict[str, Any]]:
    """Train and read every model that is not yet in `out`, one process on each core; see `reading`.

    A training that stays short of the posterior counts as stopped, whatever its recipe intended.
    """
    every = recipes(quick)
    jobs = {name: (str(out / name), recipe) for name, recipe in every.items()}
    # Evenly over cells and kinds, so that a run which was stopped half-way holds some of each.
    order = dict(sorted(jobs.items(), key=lambda job: job[1][1].training.seed % 10))
    report = (lambda done, name: progress("models", done, len(jobs), name)) if progress else None
    results = spread(_read, order, report)
    return [reading for name in every for reading in results[name]]


def _read(folder: str, recipe: Recipe) -> list[dict[str, Any]]:
    return [_once(Path(folder), recipe, *what) for what in recipe.readings]


def _once(folder: Path, recipe: Recipe, kind: Kind, step: int, n: int) -> dict[str, Any]:
    """A reading from its file, or made and stored there."""
    spec = {**asdict(recipe.training), "n": n, "step": step, "reading": READING, "claims": claims.digest()}

    def make() -> dict[str, Any]:
        began = time.process_time()
        train(recipe.training, folder, device="cpu")
        trained = time.process_time()
        # Far from the seeds of the weights, so that no untrained control is one of the models.
        found = reading(folder / "snapshots" / f"step{step}", n, 1000 + 100 * recipe.training.seed)
        return found | {
            "kind": kind if kind != "trained" or at_posterior(found) else "stopped",
            "cell": recipe.cell,
            "task": recipe.training.task,
            "seed": recipe.training.seed,
            "step": step,
            "cpu_seconds": {"training": round(trained - began, 1), "reading": round(time.process_time() - trained, 1)},
        }

    return computed(folder / f"reading-step{step}-n{n}.json", spec, make)


def reading(folder: str | Path, n: int, seed: int) -> dict[str, Any]:
    """Every metric that can be measured of a tunnel's model on n sequences.

    That is `llmgeom scan` with all probes, those of entropy at one query (`scan_entropy`), the next step of descent,
    `patch`, `ablate --what heads` and `--what blocks`, `grade`.
    """
    subject = Subject.load(str(folder))
    origin = grading.Origin.of(str(folder))
    task = origin.load_task(None, str(folder))
    whole = task.sample(n, seed, task.test_split)
    draws: dict[str, Any] = {"seed": seed, "nulls": CONTROLS}
    every = {"task": task, "positions": "all", **draws}

    def scan() -> Record:
        every = {name: probe for name, probe in probes.known().items() if not probe.NEEDS.follows_entropy}
        every |= {routing_law.NAME: routing_law}
        batch = task.truncated(n, seed, task.test_split)
        return run_probes(subject, batch, every, samples={WHOLE: whole}, seed=seed, controls=CONTROLS)

    runs: dict[str, Callable[[], Record]] = {
        "scan": scan,
        "entropy": lambda: scan_entropy(subject, task, n, seed),
        "patch": lambda: patch.examine(subject, task, n=n, **draws),
        "heads": lambda: component_probe.question(subject, whole, "heads", **every).record(subject),
        "blocks": lambda: component_probe.question(subject, whole, "blocks", **every).record(subject),
        "grade": lambda: grading.question(subject, task, origin, n=n, **draws).record(subject),
    }
    estimates, unmeasured = {}, {}
    for name, run in runs.items():
        try:
            record = run()
        except UserError as refusal:
            unmeasured[name] = str(refusal)
            continue
        unmeasured |= record.unmeasured
        for probe, measured in record.results.items():
            estimates[probe] = {h.name: _plain(h) for h in measured.estimates}
    posterior = estimates[grading.POSTERIOR]
    return {
        "n": n,
        "facts": {key: subject.facts[key] for key in ("model_type", "layers", "d_model", "parameters")},
        "kl": posterior["KL to the posterior"]["value"],
        "skill": posterior["skill over the best trivial predictor"]["value"],
        "estimates": estimates,
        "unmeasured": unmeasured,
    }


def entropy_query(task: Task) -> int:
    """The number of the query at which the exact entropy varies most over sequences; it depends on the task alone."""
    entropy = task.sample(DRAWN, 0, task.test_split).exact.entropy
    return int(entropy.double().std(0).argmax())


def scan_entropy(subject: Subject, task: Task, n: int, seed: int) -> Record:
    """The metrics that follow entropy, on sequences that all end in one query.

    Their target is the exact entropy there, the same for every model: the own entropy of a model that infers nothing is
    nearly constant, and metrics without a scale would rank its rounding. Where the exact entropy does not vary, they
    are not measured, and no model is ranked.
    """
    batch = task.truncated(n, seed, task.test_split, at=entropy_query(task))
    entropic = {name: probe for name, probe in probes.known().items() if probe.NEEDS.follows_entropy}
    return run_probes(subject, batch, entropic, seed=seed, controls=CONTROLS)


STORED = (
    "value",
    "low",
    "high",
    "unit",
    "null_low",
    "null_high",
    "p",
    "side",
    "verdict",
    "equivalence",
    "n",
    "clusters",
)


def _plain(h: Estimate) -> dict[str, Any]:
    return {key: getattr(h, key) for key in STORED} | {"claim": bool(h.claim)}


def tasks(found: list[Mapping[str, Any]]) -> tuple[str, ...]:
    """The tasks of readings, without repetition."""
    return tuple(dict.fromkeys(wind_tunnels.load_task(reading["task"]).title for reading in found))
