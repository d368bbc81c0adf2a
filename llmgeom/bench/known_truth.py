"""The bench: small models of which it is known what they learnt, and what every probe and experiment reads of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from llmgeom import claims, probes, wind_tunnels
from llmgeom.bench.sweep import spread
from llmgeom.commands import grade as grading
from llmgeom.commands import patch
from llmgeom.errors import UserError
from llmgeom.files import digest, write_whole
from llmgeom.model.subject import Subject
from llmgeom.papers import routing_law
from llmgeom.papers.primitives import REACHED_KL, REACHED_SKILL, at_posterior
from llmgeom.probe import WHOLE
from llmgeom.probes.interventions.component_run import examine_components
from llmgeom.progress import Progress
from llmgeom.record import Record
from llmgeom.result import Estimate
from llmgeom.run import CONTROLS, run_probes
from llmgeom.wind_tunnels.checkpoint import snapshot_steps
from llmgeom.wind_tunnels.training import train
from llmgeom.wind_tunnels.training_config import Training

Kind = Literal["trained", "stopped", "untrained", "no inference", "position only", "bag of values"]
KINDS: dict[Kind, str] = {
    "trained": f"to the posterior: KL under {REACHED_KL} bits and skill over {REACHED_SKILL}",
    "stopped": "on the way there, or stayed short of it",
    "untrained": "step 0",
    "no inference": "trained as long on targets of other sequences: nothing can be inferred",
    "position only": "trained on the exact answers to one fixed sequence: right where position alone decides",
    "bag of values": "trained with another sequence's keys at the queries: what was shown counts, not the keys",
}
READING = 1  # raised when what is read changes
SIZE, SMALLER = 100, 40  # sequences read; of two models of a cell trained to the posterior once more with fewer
STOPPED = (0.08, 0.2, 0.45)  # of the steps, of the first, second and third training of a cell

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
class Run:
    """One training of the bench, and its readings: (kind, step, sequences) each."""

    cell: str
    training: Training
    readings: tuple[tuple[Kind, int, int], ...]


def bench(quick: bool = False) -> dict[str, Run]:
    """The trainings by name. Seeds of a kind are consecutive, so that half of them are even."""
    seeds: dict[str, range] = {
        "kept": range(2 if quick else 4),
        "exchanged": range(10, 12 if quick else 16),
        "unbound": range(20, 20 if quick else 22),
        "sheet": range(30, 30 if quick else 32),
    }
    runs = {}
    for cell in QUICK if quick else CELLS:
        for evidence, some in seeds.items():
            if cell not in {"unbound": KEYED, "sheet": SHEETS}.get(evidence, CELLS):
                continue
            for place, seed in enumerate(some):
                asked = replace(CELLS[cell], evidence=evidence, seed=seed)
                name = f"{cell} {evidence} {seed}".replace(" ", "-")
                runs[name] = Run(cell, asked, tuple(_read(asked, place, quick)))
    return runs


def _read(asked: Training, place: int, quick: bool) -> Iterator[tuple[Kind, int, int]]:
    last = asked.steps
    if asked.evidence == "unbound":
        yield "bag of values", last, SIZE
    elif asked.evidence == "sheet":
        yield "position only", last, SIZE
    elif asked.evidence == "exchanged":
        yield "no inference", last, SIZE
        yield "untrained", 0, SIZE
    else:
        yield "trained", last, SIZE
        if place < 2 and not quick:
            yield "trained", last, SMALLER
        if place < len(STOPPED):
            wanted = STOPPED[place] * last
            steps = [step for step in snapshot_steps(last, asked.snapshots) if 0 < step < last]
            yield "stopped", min(steps, key=lambda step: abs(step - wanted)), SIZE


def readings(out: Path, quick: bool = False, progress: Progress | None = None) -> list[dict[str, Any]]:
    """Train and read every subject that is not yet in `out`; see `reading`. One process a core.

    A training that stays short of the posterior counts as stopped, whatever it was meant to be.
    """
    runs = bench(quick)
    jobs = {name: (str(out / name), run) for name, run in runs.items()}
    # Evenly over cells and kinds, so that a bench which was stopped half-way holds some of each.
    order = dict(sorted(jobs.items(), key=lambda job: job[1][1].training.seed % 10))
    tell = (lambda done, name: progress("subjects", done, len(jobs), name)) if progress else None
    found = spread(_perform, order, tell)
    return [one for name in runs for one in found[name]]


def _perform(folder: str, run: Run) -> list[dict[str, Any]]:
    return [_held(Path(folder), run, *one) for one in run.readings]


def _held(folder: Path, run: Run, kind: Kind, step: int, n: int) -> dict[str, Any]:
    """A reading from its file, or made and kept there."""
    path = folder / f"reading-step{step}-n{n}.json"
    spec = digest({**asdict(run.training), "n": n, "step": step, "reading": READING, "claims": claims.digest()})
    if path.exists() and (body := json.loads(path.read_text()))["spec"] == spec:
        return body["reading"]
    began = time.process_time()
    train(run.training, folder, device="cpu")
    trained_in, began = time.process_time() - began, time.process_time()
    seed = (
        1000 + 100 * run.training.seed
    )  # far from the seeds of the weights, so that no untrained control is a subject
    found = reading(folder / "snapshots" / f"step{step}", n, seed)
    found |= {
        "kind": kind if kind != "trained" or at_posterior(found) else "stopped",
        "cell": run.cell,
        "task": run.training.task,
        "seed": run.training.seed,
        "step": step,
        "cpu_seconds": {"training": round(trained_in, 1), "reading": round(time.process_time() - began, 1)},
    }
    write_whole(path, (json.dumps({"spec": spec, "reading": found}, indent=1, sort_keys=True) + "\n").encode())
    return found


def reading(folder: str | Path, n: int, seed: int) -> dict[str, Any]:
    """What a model in a tunnel's folder is, and every metric of what can be measured of it on n sequences:
    `llmgeom scan` with all probes, `patch`, `ablate --heads` and `--blocks`, and `grade`."""
    subject = Subject.load(str(folder))
    told = grading.Told.of(str(folder))
    task = told.asked(None, str(folder))
    split = task.test_split
    whole = task.sample(n, seed, split)
    common: dict[str, Any] = {"seed": seed, "nulls": CONTROLS}
    every_probe = {**probes.known(probes.names()), routing_law.NAME: routing_law}
    every: dict[str, Callable[[], Record]] = {
        "scan": lambda: run_probes(
            subject, task.truncated(n, seed, split), every_probe, samples={WHOLE: whole}, **common
        ),
        "patch": lambda: patch.examine(subject, task, n=n, **common),
        "heads": lambda: examine_components(subject, whole, "heads", task=task, positions="all", **common),
        "blocks": lambda: examine_components(subject, whole, "blocks", task=task, positions="all", **common),
        "grade": lambda: grading.examine(subject, task, told, n=n, **common),
    }
    estimates, unmeasured = {}, {}
    for name, make in every.items():
        try:
            made = make()
        except UserError as refusal:
            unmeasured[name] = str(refusal)
            continue
        unmeasured |= made.unmeasured
        for probe, measured in made.results.items():
            estimates[probe] = {h.name: _plain(h) for h in measured.estimates}
    posterior = estimates[grading.POSTERIOR]
    facts = {key: subject.facts[key] for key in ("model_type", "layers", "d_model", "parameters")}
    return {
        "n": n,
        "facts": facts,
        "kl": posterior["KL to the posterior"]["value"],
        "skill": posterior["skill over the best trivial predictor"]["value"],
        "estimates": estimates,
        "unmeasured": unmeasured,
    }


KEPT = (
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
    return {key: getattr(h, key) for key in KEPT} | {"claim": bool(h.claim)}


def tasks(found: list[Mapping[str, Any]]) -> tuple[str, ...]:
    """The tasks of readings, each once."""
    return tuple(dict.fromkeys(wind_tunnels.load_task(one["task"]).title for one in found))
