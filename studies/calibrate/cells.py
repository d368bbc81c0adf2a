"""The models of the bench: small models whose training says what they can infer, and what else they may have learnt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from llmgeom.wind_tunnels.training_config import Training
from studies.trainings import REACHED_KL, REACHED_SKILL

Kind = Literal[
    "trained",
    "no inference",
    "untrained",
    "stopped",
    "position only",
    "bag of values",
    "last observation",
    "wrong prior",
]
KINDS: dict[Kind, str] = {
    "trained": f"to the posterior: held-out KL under {REACHED_KL} bits and skill over {REACHED_SKILL}",
    "no inference": "trained as long on targets of other sequences: nothing can be inferred",
    "untrained": "step 0",
    "stopped": "the snapshot of a trained model whose KL is nearest to that of the best trivial predictor",
    "position only": "trained on the exact answers to one fixed sequence: right where position alone decides",
    "bag of values": "trained to know which values were shown, and not when or under which key",
    "last observation": "trained on the exact answers to the last observation alone: the n-gram of the task",
    "wrong prior": "trained as long on another prior: Bayesian inference, about another world",
}
NEGATIVES: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind != "trained")
SEEDS = 3  # of each kind in each cell
CONTROLS = 6  # draws of each control of a reading
STOPPED = -1  # stands for the step of a stopped model, which its KL decides

IDLE: dict[Kind, dict[str, Any]] = {"no inference": {"evidence": "exchanged"}}
SHEET: dict[Kind, dict[str, Any]] = {"position only": {"evidence": "sheet"}}
LAST: dict[Kind, dict[str, Any]] = {"last observation": {"evidence": "memoryless"}}
UNBOUND: dict[Kind, dict[str, Any]] = {"bag of values": {"evidence": "unbound"}}
BAG: dict[Kind, dict[str, Any]] = {"bag of values": {"evidence": "bag"}}


def _prior(task: str) -> dict[Kind, dict[str, Any]]:
    return {"wrong prior": {"task": task}}


@dataclass(frozen=True)
class Cell:
    """A task and an architecture.

    Attributes:
        training: On the task itself.
        others: What changes in trainings of the other kinds. A kind that would be exact in this task is left out, e.g.
            a bag of values in the bijection without replacement.
    """

    training: Training
    others: Mapping[Kind, Mapping[str, Any]]


def _cell(task: str, arch: str, width: int, steps: int, lr: str, *others: Mapping[Kind, Mapping[str, Any]]) -> Cell:
    changes = {kind: change for some in (IDLE, *others) for kind, change in some.items()}
    training = Training(task, arch=arch, width=width, layers=2, steps=steps, lr=lr, batch=64)
    return Cell(training, changes)


BIJECTION, REPLACED = "bijection:vocab=6,pairs=5", "bijection:vocab=5,pairs=6,replacement=True"
RECALL = "recall:pairs=2,queries=2,keys=6,values=6"
MARKOV, BINARY = "markov:symbols=3,steps=12", "markov:symbols=2,steps=12"
COIN, BIASES = "coin:steps=12", "coin:steps=12,prior=list:0.2,0.8"
HMM, GIVEN = "hmm:symbols=5,steps=8,fixed=True,encoding=tokens", "hmm:states=2,symbols=2,steps=6"
MESS3, LINE = "edge_hmm:steps=8", "regression:dims=1,points=8,bins=6"
COIN_OTHERS = (SHEET, LAST, _prior("coin:steps=12,prior=beta:8,2"))
BIASES_OTHERS = (SHEET, LAST, _prior("coin:steps=12,prior=list:0.4,0.6"))
CHAIN = (SHEET, LAST, BAG)
# The same variance of the numbers, so that the bins are the same; but most of it is noise.
LINE_OTHERS = (SHEET, LAST, _prior(f"{LINE},scale=0.5,noise=1.0"))

# Small enough to be trained in a minute at most, and wide enough to reach the posterior. With rotary embeddings none of
# five trainings reached that of a Markov chain of unknown matrix. In this order, so that a bench that was stopped holds
# many tasks.
CELLS = {
    "coin neox": _cell(COIN, "neox", 24, 300, "1e-2", *COIN_OTHERS),
    "bijection llama": _cell(BIJECTION, "llama", 32, 500, "1e-2", SHEET),
    "hmm neox": _cell(HMM, "neox", 32, 500, "1e-2", *CHAIN),
    "biases llama": _cell(BIASES, "llama", 24, 300, "1e-2", *BIASES_OTHERS),
    "markov gpt2": _cell(f"{MARKOV},fixed=False", "gpt2", 32, 600, "1e-2", SHEET, BAG, _prior(f"{MARKOV},fixed=True")),
    "recall gpt2": _cell(RECALL, "gpt2", 32, 700, "5e-3", UNBOUND),
    "mess3 gpt2": _cell(MESS3, "gpt2", 32, 1500, "1e-2", SHEET, LAST, _prior(f"{MESS3},stay=0.6,emit=0.95")),
    "line llama": _cell(LINE, "llama", 48, 1500, "5e-3", *LINE_OTHERS),
    "binary gpt2": _cell(f"{BINARY},fixed=False", "gpt2", 32, 1200, "1e-2", SHEET, BAG, _prior(f"{BINARY},fixed=True")),
    "replacement neox": _cell(REPLACED, "neox", 64, 2500, "3e-3", UNBOUND),
    "given llama": _cell(GIVEN, "llama", 64, 3500, "3e-3", *CHAIN),
    "coin gqa": _cell(COIN, "gqa", 24, 400, "1e-2", *COIN_OTHERS),
    "hmm gqa": _cell(HMM, "gqa", 32, 500, "1e-2", *CHAIN),
    "bijection gpt2": _cell(BIJECTION, "gpt2", 32, 500, "1e-2", SHEET),
    "recall llama": _cell(RECALL, "llama", 32, 1400, "5e-3", UNBOUND),
}


@dataclass(frozen=True)
class Recipe:
    """One training and its readings.

    Attributes:
        task: Which every model of the cell is read on, whatever it was trained on.
        readings: (kind, step) of each.
    """

    cell: str
    task: str
    training: Training
    readings: tuple[tuple[Kind, int], ...]


def recipes() -> dict[str, Recipe]:
    """The trainings by name, cell by cell. Seeds of a kind are consecutive, so that half of them are even."""
    return {
        f"{name} {kind} {recipe.training.seed}".replace(" ", "-"): recipe
        for name, cell in CELLS.items()
        for kind, recipe in _of_cell(name, cell)
    }


def _of_cell(name: str, cell: Cell) -> Iterator[tuple[str, Recipe]]:
    kinds: dict[Kind, Mapping[str, Any]] = {"trained": {}, **cell.others}
    for place, (kind, change) in enumerate(kinds.items()):
        for seed in range(10 * place, 10 * place + SEEDS):
            training = replace(cell.training, **change, seed=seed)
            readings: list[tuple[Kind, int]] = [(kind, training.steps)]
            if kind == "trained":
                readings.append(("stopped", STOPPED))
            elif kind == "no inference":
                readings.append(("untrained", 0))
            yield kind, Recipe(name, cell.training.task, training, tuple(readings))
