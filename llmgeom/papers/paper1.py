"""Paper I's measures: architectures trained on tasks of known posterior, then graded, scanned and ablated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from llmgeom import probes, wind_tunnels
from llmgeom.cache.shards import captures_folder
from llmgeom.dynamics.resume import computed, recorded
from llmgeom.dynamics.sweep import at_posterior, seeded
from llmgeom.files import digest
from llmgeom.model.loading import usable
from llmgeom.papers.primitives import PARAMETERS, PRIMITIVES
from llmgeom.papers.published_numbers import Check
from llmgeom.papers.tables import Options, Source, metric_of
from llmgeom.papers.verdicts import combined, over_draws, over_seeds
from llmgeom.probe import WHOLE, Capture, Site, Subject, UserError
from llmgeom.probes.interventions import component_probe
from llmgeom.probes.posterior.answers import grade
from llmgeom.record import Record
from llmgeom.result import Estimate
from llmgeom.run import CONTROLS, run_probes
from llmgeom.stats.information import bits, entropy
from llmgeom.stats.ridge_probe import decodability, folds
from llmgeom.task import Task
from llmgeom.wind_tunnels.training_config import Training

SEEDS, GRADED, SCANNED = 3, 1000, 200  # trainings of each cell; sequences graded, and scanned
TRIVIAL = ("uniform", "trivial")  # predictors whose number can divide a grade's number
PRIMITIVE = dict(zip(("bijection", "hmm", "recall"), PRIMITIVES, strict=True))  # primitive of each task


def _small(task: str, **changes: Any) -> Training:
    """The cell of `primitives`, or a variant."""
    return replace(PRIMITIVES[PRIMITIVE[task]], parameters=PARAMETERS, lr="auto", snapshots=2, **changes)


RECIPES = {
    "quick": {
        "bijection": Training("bijection:vocab=5,pairs=4", width=32, layers=1, steps=400, lr="1e-2", snapshots=2),
        "hmm": Training("hmm:states=2,symbols=2,steps=8", width=32, layers=2, steps=500, lr="5e-3", snapshots=2),
        "deep": Training("bijection:vocab=5,pairs=4", width=32, layers=4, steps=400, lr="3e-3", snapshots=2),
        "recall": Training(
            "recall:pairs=2,queries=2,keys=4,values=4", width=32, layers=2, steps=300, lr="5e-3", snapshots=2
        ),
    },
    "small": {**{task: _small(task) for task in PRIMITIVE}, "deep": _small("bijection", layers=4)},
    # As in the published code if text and code disagree; data are fresh at every step.
    "full": {
        "bijection": Training(
            "bijection:vocab=20,pairs=19", width=192, layers=6, heads=6, steps=50_000, batch=256, lr="3e-4",
            weight_decay=0.1, warmup=2000,
        ),
        "hmm": Training(
            "hmm:states=5,symbols=5,steps=20,encoding=tokens", width=256, layers=9, heads=8, steps=80_000, batch=64,
            lr="3e-4", warmup=1000, targets="soft",
        ),
        "recurrence": Training("recurrence", width=192, layers=6, heads=6, steps=150_000, batch=64, lr="3e-4"),
        "opaque": Training("recurrence:opaque=true", width=192, layers=6, heads=6, steps=150_000, batch=64, lr="3e-4"),
        "horizon": Training("recurrence:horizon=5", width=192, layers=6, heads=6, steps=150_000, batch=64, lr="3e-4"),
    },
}  # fmt: skip
SAME_SIZE = {"bijection": 2_680_000, "hmm": 7_400_000}  # parameters of the published MLPs, whose width is not printed


def training(recipe: str, task: str, arch: str) -> Training:
    """The first seed of a cell."""
    cell = replace(RECIPES[recipe][task], arch=arch)
    return replace(cell, parameters=SAME_SIZE[task]) if recipe == "full" and arch == "mlp" else cell


def cells(recipe: str, tests: Sequence[Check]) -> dict[str, Training]:
    """The first trainings that the tests need, by TASK/ARCHITECTURE."""
    found: dict[str, Training] = {}
    for of in (test.of for test in tests):
        tasks = PRIMITIVE if of.get("task") == "all" else (of["task"],)
        architectures = {of["arch"], of.get("over") or of["arch"]} - set(TRIVIAL)
        found |= {f"{task}/{arch}": training(recipe, task, arch) for task in tasks for arch in sorted(architectures)}
    return found


def planned(options: Options, tests: Sequence[Check]) -> list[str]:
    """The cells that a run would train."""
    return [
        f"{name}: {SEEDS} trainings on {cell.task}, {cell.layers} layers, "
        f"{f'{cell.parameters:,} parameters' if cell.parameters else f'width {cell.width}'}, {cell.steps:,} steps of "
        f"{cell.batch} sequences, learning rate {cell.lr}"
        for name, cell in cells(options.recipe, tests).items()
    ]


def sources(options: Options, tests: Sequence[Check], out: Path) -> Iterator[Tunnels]:
    """Train and grade the cells of the tests. Raises UserError at the papers' scale without a GPU."""
    full = options.recipe == "full"
    device = usable(options.device) if full else "cpu"
    if full and device == "cpu" and options.device is None:
        raise UserError("--scale paper trains models of millions of parameters: it needs a GPU; or give --device cpu")
    numbers = seeded(cells(options.recipe, tests), SEEDS, out / "cells", GRADED, device)
    yield Tunnels(options.recipe, out / "cells", numbers, tests)


@dataclass(frozen=True)
class Tunnels(Source):
    """The trained cells: their folders, and their grades by TASK/ARCHITECTURE/seedN."""

    recipe: str
    folder: Path
    numbers: Mapping[str, Mapping[str, Any]]
    tests: Sequence[Check]
    label: str = "paper1"

    def lines(self) -> list[str]:
        seconds = sum(grade.get("cpu_seconds", 0) for grade in self.numbers.values())
        return [f"{len(self.numbers)} trainings, {seconds / 60:.1f} CPU minutes; {SEEDS} seeds a cell"]

    def warnings(self) -> tuple[str, ...]:
        return tuple(f"{name}: {grade['refused']}" for name, grade in self.numbers.items() if "refused" in grade)

    def task(self, task: str, arch: str) -> Task:
        return wind_tunnels.load_task(training(self.recipe, task, arch).task)

    def seeds(self, task: str, *archs: str) -> list[str]:
        """The names of a cell's finished trainings; for several architectures, the names of the first, for the seeds
        that all of them finished. Raises UserError if there is none."""
        lacking = {"refused": "its first seed was refused"}  # the other seeds were then not tried
        by_seed = [[f"{task}/{arch}/seed{seed}" for arch in archs] for seed in range(SEEDS)]
        whys = [[self.numbers.get(name, lacking).get("refused", "") for name in names] for names in by_seed]
        good = [names[0] for names, why in zip(by_seed, whys, strict=True) if not any(why)]
        if not good:
            raise UserError(next(filter(None, whys[0])))
        return good

    def _spec(self, name: str, **spec: Any) -> dict[str, Any]:
        return {**spec, "of": dict(self.numbers[name])}

    def once(self, name: str, what: str, make: Callable[[Subject], Any], **spec: Any) -> Any:
        """Plain data computed once from a trained model, and read afterwards."""
        path, model = self.folder / name / f"{what}.json", str(self.folder / name)
        return computed(path, self._spec(name, **spec), lambda: make(Subject.load(model)))

    def record(self, name: str, what: str, make: Callable[[Subject], Record], **spec: Any) -> Record:
        """A record made once from a trained model, and read afterwards."""
        whole, model = self._spec(name, **spec), str(self.folder / name)
        return recorded(self.folder / name / f"{what}-{digest(whole)[:12]}", whole, lambda: make(Subject.load(model)))

    @cached_property
    def probed(self) -> dict[str, tuple[str, ...]]:
        """The probes of the tests for each TASK/ARCHITECTURE, which share the passes of one scan."""
        found: dict[str, set[str]] = {}
        for of in (test.of for test in self.tests if test.measure == "probe"):
            found.setdefault(f"{of['task']}/{of['arch']}", set()).add(of["probe"])
        return {name: tuple(sorted(names)) for name, names in found.items()}


# ---- measures --------------------------------------------------------------------------------------------------------


def graded(source: Tunnels, test: Check, task: str, arch: str, what: str, over: str = "") -> Estimate:
    """A number of a grade, if requested divided by that of a uniform answer, of the best trivial predictor, or of
    another architecture's training with the same seed."""
    rival = over not in ("", *TRIVIAL)
    names = source.seeds(task, arch, *[over] * rival)
    grades = [source.numbers[name] for name in names]
    under = [grade[f"{what}_{over}"] if over in TRIVIAL else 1.0 for grade in grades]
    null: tuple[str, float] | None = (
        grades[0]["best_trivial"],
        float(np.mean([grade[f"{what}_trivial"] / u for grade, u in zip(grades, under, strict=True)])),
    )
    if rival:
        under, null = [source.numbers[name.replace(f"/{arch}/", f"/{over}/")][what] for name in names], None
    values = [grade[what] / u for grade, u in zip(grades, under, strict=True)]
    # Even if every answer was right, one in the number of graded answers may be wrong.
    return over_seeds(values, test.unit, test.scale, null, least=1 / GRADED if what == "accuracy" else 0.0)


def reached(source: Tunnels, test: Check, task: str, arch: str) -> Estimate:
    """The number of primitives (accumulation, transport, binding) that a training reaches by Paper I's criteria."""
    by_task = [[source.numbers[name] for name in source.seeds(task, arch)] for task in PRIMITIVE]
    counts = [sum(map(at_posterior, grades)) for grades in zip(*by_task, strict=False)]
    h = over_seeds(counts, test.unit, test.scale, ("a model that infers nothing", 0.0))
    if len(set(counts)) > 1:
        return h
    # All equal: with 97.5 % confidence, another count has at most this probability (Clopper and Pearson).
    other = 1 - 0.025 ** (1 / len(counts))
    return replace(h, low=h.value - other, high=h.value + other, method="Clopper and Pearson, 95 %")


def horizon(source: Tunnels, test: Check, task: str, arch: str, what: str, times: float = 1.0) -> Estimate:
    """Errors on sequences `times` as long as the training sequences.

    "first", "later": mean KL of the first query past the horizon, or of all queries past it, over the mean within it.
    "mae": |H_model - H_exact|, mean over all queries.
    """
    trained: Any = source.task(task, arch)  # a hidden Markov model or a recurrence, whose number of steps is a field
    longer = replace(trained, steps=round(trained.steps * times))

    def by_query(subject: Subject) -> dict[str, list[float]]:
        # The published evaluation draws from the training distribution; so does this if programs are held out.
        scores = grade(subject, longer, GRADED, split="seen" if longer.title.startswith("recurrence") else None).own
        return {"kl": scores.kl.mean(0).tolist(), "mae": np.abs(scores.gap).mean(0).tolist()}

    horizon = trained.trained_queries
    past = {"first": slice(horizon, horizon + 1), "later": slice(horizon, None)}
    values = []
    for name in source.seeds(task, arch):
        curves = source.once(name, f"longer-{times:g}", by_query, task=longer.title, n=GRADED)
        within = np.mean(curves["kl"][:horizon])
        values.append(float(np.mean(curves["mae"]) if what == "mae" else np.mean(curves["kl"][past[what]]) / within))
    return over_seeds(values, test.unit, test.scale)


def probe(source: Tunnels, test: Check, task: str, arch: str, probe: str, metric: str) -> Estimate:
    """A metric of a scan, mean over trainings, compared with the hardest of their nulls."""
    of, names = source.task(task, arch), source.probed[f"{task}/{arch}"]

    def scanned(subject: Subject) -> Record:
        batch, whole = of.truncated(SCANNED, 0, of.test_split), {WHOLE: of.sample(SCANNED, 0, of.test_split)}
        return run_probes(subject, batch, probes.known(names), samples=whole, store=str(captures_folder()))

    records = [source.record(name, "scan", scanned, probes=names, task=of.title) for name in source.seeds(task, arch)]
    return _over_records(records, probe, metric, f"{probe} has no '{metric}' here")


def replaced(source: Tunnels, test: Check, task: str, arch: str, kind: component_probe.Kind, what: str) -> Estimate:
    """Heads or blocks set to 0, one at a time.

    "most", "least": the error of entropy without the most or least important component, over the model's own error;
    else a metric of the ablation.
    """
    of, names, section = source.task(task, arch), source.seeds(task, arch), f"{kind}_zero"

    def ablated(subject: Subject) -> Record:
        batch = of.sample(SCANNED, 0, of.test_split)
        question = component_probe.question(subject, batch, kind, task=of, positions="all")
        return question.record(subject, store=str(captures_folder()))

    records = [source.record(name, kind, ablated, task=of.title) for name in names]
    if what not in ("most", "least"):
        lacking = f"{training(source.recipe, task, arch).layers} layers have no '{what}'"
        return _over_records(records, section, what, lacking)
    if why := next((r.unmeasured[section] for r in records if section in r.unmeasured), ""):
        raise UserError(why)
    most = min(source.numbers[name]["mae_abs_uniform"] / source.numbers[name]["mae_abs"] for name in names)
    if most < test.bound:
        raise UserError(
            f"at this budget a uniform answer has {most:.1f} times the model's error: {test.bound:g} is no loss"
        )
    times = []
    for arrays in (record.results[section].arrays for record in records):
        each = arrays["error"] if kind == "blocks" else 1 + arrays["error"] / arrays["clean_error"]
        times.append(float(each.max() if what == "most" else each.min()))
    return over_seeds(times, test.unit, test.scale)


def _over_records(records: Sequence[Record], probe: str, metric: str, lacking: str) -> Estimate:
    """A metric combined over the records of trainings. Raises UserError if a probe refused or none has the metric."""
    found = [h for record in records if (h := metric_of(record, probe, metric))]
    if not found:
        raise UserError(lacking)
    return combined(found)


def final(source: Tunnels, test: Check, task: str, arch: str, what: str) -> Estimate:
    """A number of the final states, compared with untrained copies of the model.

    "pc1": the share of their first component (not standardised, as in the published code). "r2": the held-out R2 of the
    exact entropy, folds by sequence.
    """
    of = source.task(task, arch)
    batch = of.sample(SCANNED // 4, 0, of.test_split)

    def number(subject: Subject) -> float:
        capture = subject.capture(batch, {Site.FINAL})
        x = capture.final.double().numpy()
        if what == "pc1":
            spectrum = np.linalg.svd(x - x.mean(0), compute_uv=False) ** 2
            return float(spectrum[0] / spectrum.sum())
        return decodability(x, _exact_entropy(capture), folds(np.asarray(batch.cluster)[capture.prompt.numpy()], 0))

    def numbers(subject: Subject) -> list[float]:
        return [number(subject), *(number(subject.untrained(1 + i)) for i in range(CONTROLS))]

    by_seed = [
        source.once(name, f"final-{what}", numbers, task=of.title, n=len(batch)) for name in source.seeds(task, arch)
    ]
    h = over_seeds([own for own, *_ in by_seed], test.unit, test.scale)
    return over_draws(h, "untrained", by_seed[0][1:])


def _exact_entropy(capture: Capture) -> np.ndarray:
    """[row] bits: entropy of the exact answer; for the HMM, of the belief about the state."""
    return bits(entropy(capture.exact.predictive)).double().numpy()


Tunnels.MEASURES = {measure.__name__: measure for measure in (graded, reached, horizon, probe, replaced, final)}
