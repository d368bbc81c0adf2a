"""Does `llmgeom evidence` give back what an answerer was made with, and tell the kinds apart? `docs/evidence.md`.

    python -m studies.answerers

Each simulated answerer reads data sets of the default size (50 prompts for each k, 1 and more observations) and answers
with log odds of a known slope, bias and noise, or with a rule of its own: counting, forgetting, copying. Written to
studies/answerers.json: planted and measured numbers with the coverage of their intervals, and for each answerer how
many data sets are called what by `kind`, a reading of the printed numbers alone.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import log_softmax

from llmgeom.batch import Batch
from llmgeom.claims import judge
from llmgeom.probes.evidence.answers import measure_answers
from llmgeom.probes.evidence.predictions import LabelPredictions
from llmgeom.prompts import text
from llmgeom.result import Estimate, Result
from llmgeom.wind_tunnels import load_world

FILE = Path(__file__).with_suffix(".json")
PROCESSES, DATA_SETS = ("two-point", "coin", "dirichlet", "markov", "stated"), 5
NOISE = 0.5  # nats, sd of the log odds of every answerer
MASS = 0.9
Rule = Callable[[np.ndarray, Batch], np.ndarray]  # exact log odds [prompt label], prompts -> log odds [prompt label]


def seen(batch: Batch) -> list[list[int]]:
    """The outcomes shown in each prompt."""
    return [[int(one) for one in row] for row in batch.columns["seen"]]


def tallied(discount: float, batch: Batch, slope: float) -> np.ndarray:
    """slope times the counts of each label, an observation weighing discount^age."""
    z = np.zeros((len(batch), batch.exact.predictive.shape[-1]))
    for row, outcomes in zip(z, seen(batch), strict=True):
        for age, outcome in enumerate(reversed(outcomes)):
            row[outcome] += slope * discount**age
    return z


def copies(e: np.ndarray, batch: Batch) -> np.ndarray:
    """2 nats for the label shown last."""
    z = np.zeros_like(e)
    for row, outcomes in zip(z, seen(batch), strict=True):
        if outcomes:
            row[outcomes[-1]] = 2.0
    return z


def biased(e: np.ndarray, batch: Batch) -> np.ndarray:
    return e + 1.5 * np.eye(e.shape[1])[0]


ANSWERERS: dict[str, Rule] = {
    "Bayes": lambda e, batch: e,
    "over-confident": lambda e, batch: 2.5 * e,
    "under-confident": lambda e, batch: 0.4 * e,
    "biased": biased,
    "noisy": lambda e, batch: e,  # with three times the noise
    "forgets": lambda e, batch: tallied(0.5, batch, 1.0),
    "copies the last": copies,
    "counts": lambda e, batch: tallied(1.0, batch, 0.6),
    "even": lambda e, batch: 0 * e,
}


def says(z: np.ndarray, mass: float = MASS) -> LabelPredictions:
    """Predictions with these log odds."""
    return LabelPredictions(log_softmax(z, 1), np.full(len(z), mass))


def answered(name: str, batch: Batch, seed: int, noise: float = NOISE) -> LabelPredictions:
    """What an answerer says to a batch of a process."""
    log_p = batch.exact.predictive[:, -1].numpy()
    e = log_p - log_p.mean(1, keepdims=True)
    spread = noise * (3 if name == "noisy" else 1)
    return says(ANSWERERS[name](e, batch) + spread * np.random.default_rng([seed, 7]).standard_normal(e.shape))


def numbers(result: Result) -> dict[str, Estimate]:
    """The estimates, judged, by name."""
    return {h.name: h for h in judge({"process": result})["process"].estimates}


def kind(result: Result) -> str:
    """What the printed numbers say that the answerer does; the first of these that holds.

    ignores the evidence   resolution is not beyond its controls
    forgets                recency above .5 bits, its interval above 0
    counts                 the weight at the most observations is 1.5 times that at the fewest, or more
    too steep, too flat    weight beyond 1.25 or below .75 with its interval beyond 1
    biased                 |bias| above .5 bits, its interval beyond 0
    noisy                  less than .6 of the evidence's bits are left
    Bayes                  else
    """
    h, by_k = numbers(result), result["weight_by_k"]
    weight, bias, recency = h["weight of evidence"], h["bias"], h["recency"]
    if h["resolution"].verdict not in ("holds", "small"):
        return "ignores the evidence"
    if recency.value > 0.5 and recency.low > 0:
        return "forgets"
    if by_k[-1] > 1.5 * by_k[0] > 0:
        return "counts"
    if weight.value > 1.25 and weight.low > 1:
        return "too steep"
    if weight.value < 0.75 and weight.high < 1:
        return "too flat"
    if abs(bias.value) > 0.5 and bias.low * bias.high > 0:
        return "biased"
    return "noisy" if h["resolution"].value < 0.6 else "Bayes"


@dataclass(frozen=True)
class Planted:
    """An answerer of known slope, bias (nats for the first label) and noise (sd, nats)."""

    slope: float
    bias: float
    noise: float

    def answer(self, batch: Batch, seed: int) -> LabelPredictions:
        log_p = batch.exact.predictive[:, -1].numpy()
        e = log_p - log_p.mean(1, keepdims=True)
        z = self.slope * e + self.bias * np.eye(e.shape[1])[0]
        return says(z + self.noise * np.random.default_rng([seed, 8]).standard_normal(e.shape))


GRID = [Planted(s, b, n) for s in (0.5, 1.0, 2.5) for b in (0.0, 1.0) for n in (0.3, 1.0)]


def recovered(process: str, planted: Planted, seeds: Sequence[int]) -> dict[str, Any]:
    """Planted and mean measured numbers over data sets, and how often the 95 % interval holds the planted number."""
    weight, bias, loss, resolution, cover = [], [], [], [], Counter[str]()
    for seed in seeds:
        batch = _drawn(process, seed)
        h = numbers(measure_answers(batch, planted.answer(batch, seed), seed=seed))
        truth = {"weight of evidence": planted.slope, "bias": planted.bias / np.log(2)}
        cover.update(name for name, value in truth.items() if h[name].low <= value <= h[name].high)
        weight.append(h["weight of evidence"].value)
        bias.append(h["bias"].value)
        loss.append(h["calibration loss"].value)
        resolution.append(h["resolution"].value)
    return {
        "process": process,
        "planted": vars(planted),
        "weight": round(float(np.mean(weight)), 3),
        "bias": round(float(np.mean(bias)), 3),
        "resolution": round(float(np.mean(resolution)), 3),
        "calibration loss": round(float(np.mean(loss)), 3),
        "covered": {name: round(n / len(seeds), 2) for name, n in cover.items()},
    }


def _drawn(process: str, seed: int) -> Batch:
    return text.sample(load_world(process, text=True), 50, seed)


def main() -> None:
    """Write studies/answerers.json."""
    kinds = {}
    for name in ANSWERERS:
        kinds[name] = {
            process: dict(Counter(
                kind(measure_answers(batch := _drawn(process, seed), answered(name, batch, seed)))
                for seed in range(DATA_SETS)
            ).most_common())
            for process in PROCESSES
        }  # fmt: skip
        print(name, kinds[name], flush=True)
    rows = [recovered("two-point", planted, range(DATA_SETS)) for planted in GRID]
    for row in rows:
        print(row)
    made = {"data sets": DATA_SETS, "noise": NOISE, "kinds": kinds, "planted": rows}
    FILE.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
