"""How often 95 % intervals hold what they are about: one model, measured on many fresh samples.

`python -m studies.coverage PROBE FOLDER REPLICATES` prints rows of the table in docs/claims.md.

What an interval is about is the mean of its statistic over samples of this size; the mean over all replicates stands
for it. A replicate runs the commands' own code on sequences that no other has. A scan is its preview, and other
commands draw one untrained control: no control enters an interval.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from llmgeom import claims, grading, probes
from llmgeom.model.model import Model
from llmgeom.plan import Plan
from llmgeom.probe import WHOLE
from llmgeom.probes.interventions import component_ablation, interchange
from llmgeom.record import Record
from llmgeom.run import Run
from llmgeom.world import World

SIZE = 60
Estimates = dict[str, tuple[float, float, float, bool]]  # value, low, high, whether it is a claim


def scan(subject: Model, task: World, names: Sequence[str], seed: int, at: int | None = None) -> Record:
    """The preview of `llmgeom scan` with these probes; `at` is the query at which all sequences end."""
    whole = task.sample(SIZE, seed, task.test_split)
    batch = task.truncated(SIZE, seed, task.test_split, at)
    return Run(Plan.of(subject, batch, probes.known(names), 1, seed, samples={WHOLE: whole}, whole=False)).preview()


def ablate(subject: Model, task: World, kind: str, seed: int) -> Record:
    """`llmgeom ablate --blocks` or `--heads`."""
    whole = task.sample(SIZE, seed, task.test_split)
    options = {"task": task, "positions": "all", "seed": seed, "nulls": 1}
    return Run(component_ablation.question(subject, whole, kind, **options)).record()


def grade(subject: Model, task: World, origin: grading.Origin, seed: int) -> Record:
    """`llmgeom grade`."""
    return Run(grading.question(subject, task, origin, n=SIZE, seed=seed, nulls=1)).record()


def runs(folder: Path) -> dict[str, Callable[[int], Record]]:
    """The measurements on a trained model by name, as a function of the seed."""
    subject, origin = Model.load(str(folder)), grading.Origin.of(str(folder))
    task = origin.load_world(None, str(folder))
    made: dict[str, Callable[[int], Record]] = {
        name: partial(scan, subject, task, [name], at=-1 if name == "value_manifold" else None)
        for name in probes.names()
    }
    return made | {
        "patch": lambda seed: Run(interchange.question(subject, task, n=SIZE, seed=seed, nulls=1)).record(),
        "blocks": partial(ablate, subject, task, "blocks"),
        "heads": partial(ablate, subject, task, "heads"),
        "grade": partial(grade, subject, task, origin),
    }


def replicates(run: Callable[[int], Record], seeds: Iterable[int]) -> Iterator[Estimates]:
    """Every estimate of each replicate."""
    claimed = {f"{probe}: {name}" for (probe, name), entry in claims.entries().items() if entry.claim}
    for seed in seeds:
        record = run(seed)
        yield {
            (name := f"{probe}: {h.name}"): (h.value, h.low, h.high, bool(h.claim) or name in claimed)
            for probe, measured in record.results.items()
            for h in measured.estimates
        }


def coverage(every: Sequence[Estimates]) -> dict[str, tuple[bool, int, float, float, float]]:
    """By metric: whether it is a claim, replicates, coverage, that of an interval half as wide again, the mean."""
    by_name = defaultdict(list)
    for estimates in every:
        for name, numbers in estimates.items():
            by_name[name].append(numbers)
    table = {}
    for name, rows in by_name.items():
        value, low, high, claim = np.array(rows).T
        truth = value.mean()
        held = (low <= truth) & (truth <= high)
        wide = (value - 1.5 * (value - low) <= truth) & (truth <= value + 1.5 * (high - value))
        table[name] = (bool(claim[0]), len(rows), float(held.mean()), float(wide.mean()), float(truth))
    return table


if __name__ == "__main__":
    chosen, model, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    measured = list(replicates(runs(model)[chosen], [5000 + i for i in range(count)]))
    for name, (claim, n, held, wide, mean) in coverage(measured).items():
        print(f"| {name}{' (claim)' * claim} | {n} | {held:.2f} | {wide:.2f} | {mean:.3g} |", flush=True)
