"""Every metric, measured on every model of the bench; each reading is stored and made once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from llmgeom import claims, grading, probes, wind_tunnels
from llmgeom.dynamics.processes import spread
from llmgeom.probe import WHOLE, Model, UserError
from llmgeom.probes.interventions import component_ablation, interchange
from llmgeom.probes.posterior.grading import grade
from llmgeom.progress import tell
from llmgeom.record import Record
from llmgeom.result import Estimate
from llmgeom.run import Run, run_probes
from llmgeom.wind_tunnels.checkpoint import snapshot_steps
from llmgeom.wind_tunnels.training import train
from llmgeom.world import World
from studies.calibrate.cells import CONTROLS, STOPPED, Kind, Recipe, recipes
from studies.trainings import at_posterior, computed, stored

ENTROPIC = "value_manifold"  # its target is the entropy at the query, which must then vary
READING = 3  # raised when what is measured changes
SIZE = 50  # sequences of a reading
# Of the KL that says which models are at the posterior. Its sequences are not those of a reading, so that no printed
# metric decides who is a positive.
DECIDING, DECIDING_SEED = 2000, 999
DRAWN = 400  # sequences by which the query is chosen at which entropy is read
# The rules of a reading: if they change, it is measured again, and the shipped table counts as stale.
PROBES = (
    *probes.names(),
    "interchange",
    *("blocks_zero", "blocks_mean"),
    *(grading.POSTERIOR, grading.CALIBRATION, grading.MEMORY, grading.HORIZON),
)


def readings(out: Path) -> list[dict[str, Any]]:
    """Train and read every model that is not yet in `out`, one process on each core, cell by cell; see `reading`."""
    every = recipes()
    jobs = {name: (str(out / name), recipe) for name, recipe in every.items()}
    results = spread(_read, jobs, lambda done, name: tell("models", done, len(jobs), name))
    return [reading for name in every for reading in results[name]]


def finished(out: Path) -> list[dict[str, Any]]:
    """The readings in `out` of those cells of which every model was read."""
    every: dict[str, list[Any]] = {}
    for name, recipe in recipes().items():
        for what in recipe.readings:
            every.setdefault(recipe.cell, []).append(stored(*_place(out / name, recipe, *what)))
    return [reading for found in every.values() if None not in found for reading in found]


def _read(folder: str, recipe: Recipe) -> list[dict[str, Any]]:
    return [_once(Path(folder), recipe, *what) for what in recipe.readings]


def _place(folder: Path, recipe: Recipe, kind: Kind, step: int) -> tuple[Path, dict[str, Any]]:
    """The file of a reading, and everything that determines it."""
    spec = {**asdict(recipe.training), "read on": recipe.task, "step": step, "kind": kind}
    return folder / f"{kind.replace(' ', '-')}.json", spec | {"reading": READING, "claims": claims.digest()}


def _once(folder: Path, recipe: Recipe, kind: Kind, step: int) -> dict[str, Any]:
    """A reading from its file, or made and stored there.

    A training that was meant to reach the posterior and stays short of it counts as stopped.
    """
    path, spec = _place(folder, recipe, kind, step)

    def make() -> dict[str, Any]:
        began = time.process_time()
        train(recipe.training, folder, device="cpu")
        trained = time.process_time()
        task = wind_tunnels.load_world(recipe.task)
        at = equal_loss(folder, recipe, task) if step == STOPPED else step
        # Far from the seeds of the weights, so that no untrained control is one of the models.
        found = reading(_snapshot(folder, at), task, 1000 + 100 * recipe.training.seed)
        short = kind == "trained" and not at_posterior(found)
        return found | {
            "kind": "stopped" if short else kind,
            "cell": recipe.cell,
            "task": recipe.task,
            "seed": recipe.training.seed,
            "step": at,
            "cpu_seconds": {"training": round(trained - began, 1), "reading": round(time.process_time() - trained, 1)},
        }

    return computed(path, spec, make)


def _snapshot(folder: Path, step: int) -> Path:
    return folder / "snapshots" / f"step{step}"


def equal_loss(folder: Path, recipe: Recipe, task: World) -> int:
    """The step of a training at which its KL is nearest, on a log scale, to that of the best trivial predictor.

    That predictor is what the negatives learn which know position, or the last observation, or the values shown. The
    two have the same loss for different reasons.
    """
    last = recipe.training.steps

    def apart(step: int) -> float:
        scores = grade(Model.load(str(_snapshot(folder, step))), task, SIZE * 5, DECIDING_SEED)
        trivial = scores.trivial[scores.best].kl[:, scores.within].mean()
        return abs(math.log(max(scores.kl, 1e-9) / trivial))

    return min((s for s in snapshot_steps(last, recipe.training.snapshots) if 0 < s < last), key=apart)


def reading(folder: str | Path, task: World, seed: int) -> dict[str, Any]:
    """Every metric that can be measured on a tunnel's model.

    That is `llmgeom scan` with all probes, those of entropy at one query (`scan_entropy`), `patch`, `ablate --blocks`
    and `grade`.
    """
    subject = Model.load(str(folder))
    origin = grading.Origin.of(str(folder))
    whole = task.sample(SIZE, seed, task.test_split)
    draws: dict[str, Any] = {"seed": seed, "nulls": CONTROLS}
    blocks = {"task": task, "positions": "all", **draws}

    def scan() -> Record:
        every = {name: probe for name, probe in probes.known().items() if name != ENTROPIC}
        batch = task.truncated(SIZE, seed, task.test_split)
        return run_probes(subject, batch, every, samples={WHOLE: whole}, seed=seed, controls=CONTROLS)

    runs: dict[str, Callable[[], Record]] = {
        "scan": scan,
        "entropy": lambda: scan_entropy(subject, task, SIZE, seed),
        "patch": lambda: Run(interchange.question(subject, task, n=SIZE, **draws)).record(),
        "blocks": lambda: Run(component_ablation.question(subject, whole, "blocks", **blocks)).record(),
        "grade": lambda: Run(grading.question(subject, task, origin, n=SIZE, **draws)).record(),
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
            estimates[probe] = {h.name: plain(h) for h in measured.estimates}
    deciding = grade(subject, task, DECIDING, DECIDING_SEED)
    return {
        "n": SIZE,
        "facts": {key: subject.facts[key] for key in ("model_type", "layers", "d_model", "parameters")},
        "kl": deciding.kl,
        "skill": deciding.skill,
        "estimates": estimates,
        "unmeasured": unmeasured,
    }


def entropy_query(task: World) -> int:
    """The number of the query at which the exact entropy varies most over sequences; it depends on the task alone."""
    entropy = task.sample(DRAWN, 0, task.test_split).exact.entropy
    return int(entropy.double().std(0).argmax())


def scan_entropy(subject: Model, task: World, n: int, seed: int) -> Record:
    """The metrics that follow entropy, on sequences that all end in one query.

    Their target is the exact entropy there, the same for every model: the own entropy of a model that infers nothing is
    nearly constant, and metrics without a scale would rank its rounding. Where the exact entropy does not vary, they
    are not measured, and no model is ranked.
    """
    batch = task.truncated(n, seed, task.test_split, at=entropy_query(task))
    return run_probes(subject, batch, probes.known([ENTROPIC]), seed=seed, controls=CONTROLS)


def plain(h: Estimate) -> dict[str, Any]:
    """What a reading stores of an estimate."""
    names = ("value", "low", "high", "unit", "p", "verdict", "n", "clusters")
    low, high = (h.controls[0].low, h.controls[0].high) if h.controls else (0.0, 0.0)
    rule = {"side": h.rule.side, "equivalence": bool(h.rule.equivalence), "claim": bool(h.claim)}
    return {key: getattr(h, key) for key in names} | {"null_low": low, "null_high": high} | rule
