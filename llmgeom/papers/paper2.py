"""Paper II's measures: schedules on the sticky chain, the next step and the advantage, and settling steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmgeom.batch import Batch
from llmgeom.dynamics.resume import recorded
from llmgeom.dynamics.study import Inputs, comparable, recipe, study, study_spec, train_runs
from llmgeom.dynamics.sweep import sweep
from llmgeom.errors import UserError
from llmgeom.model.subject import Subject
from llmgeom.papers import paper1, routing_law, sticky_chain
from llmgeom.papers.published_numbers import Check
from llmgeom.papers.sticky_chain import SEEDS, SHAPES, SIZES, TUNING, Method, least, schedules
from llmgeom.papers.tables import Options, Source, metric_of
from llmgeom.papers.verdicts import over_seeds
from llmgeom.record import Record
from llmgeom.result import Estimate, Measured
from llmgeom.run import run_probes
from llmgeom.stats.information import bits

WHOLE_STEPS = 12**-0.5  # standard deviation added by counting whole steps


def planned(options: Options, tests: Sequence[Check]) -> list[str]:
    """The cells that a run would train."""
    shape = SHAPES[options.quick]
    return [
        f"sticky chain: one head of {sum(SIZES)} numbers, {shape['length']} symbols, {shape['steps']} steps, "
        f"{len(SEEDS)} seeds of {len(schedules()) + 8} methods, and tuning on {len(TUNING)} others",
        *(f"{test.measure}: {', '.join(test.of.values())}" for test in tests if test.measure in ("law", "settles")),
    ]


def sources(options: Options, tests: Sequence[Check], out: Path) -> Iterator[Chain]:
    """Train the methods of the chain that are not yet trained."""
    methods, ran, chosen = sticky_chain.compare_methods(SHAPES[options.quick], out / "cells")
    section = sticky_chain.schedules_section(methods, ran, chosen).lowered()
    yield Chain(methods, section, options.quick, out)


@dataclass(frozen=True)
class Chain(Source):
    """The methods on the sticky chain, and the folder in which small models are trained."""

    methods: tuple[Method, ...]
    schedules: Measured
    quick: bool
    out: Path
    label: str = "paper2"

    def sections(self) -> Mapping[str, Measured]:
        return {"schedules": self.schedules}

    def lines(self) -> list[str]:
        return sticky_chain.lines(self.methods)

    def method(self, name: str) -> Method:
        return next(method for method in self.methods if method.name == name)


@dataclass(frozen=True)
class NextStep(Source):
    """The metrics of one model's next step, from its gradients."""

    label: str
    record: Record

    def sections(self) -> Mapping[str, Measured]:
        return {f"next step of {self.label}": measured for measured in self.record.results.values()}

    def warnings(self) -> tuple[str, ...]:
        return tuple(f"{self.label}: {warning}" for warning in self.record.warnings)


# ---- measures --------------------------------------------------------------------------------------------------------


def speed(source: Chain, test: Check, method: str, controls: Sequence[str]) -> Estimate:
    """Speed-up over each control, paired by seed; the smallest speed-up decides."""
    under, ratios = source.method(method).steps, []
    for name in controls:
        over = source.method(name).steps
        error = WHOLE_STEPS / min(*under, *over)
        ratios.append(over_seeds(np.divide(over, under), test.unit, "log", (f"no difference from {name}", 1.0), error))
    return min(ratios, key=lambda h: h.low)


def steps(source: Chain, test: Check, method: str) -> Estimate:
    """Steps to plain descent's final loss."""
    return over_seeds(source.method(method).steps, test.unit, least=WHOLE_STEPS)


def fall(source: Chain, test: Check, method: str) -> Estimate:
    """Fall of the loss on a fresh sequence, as a fraction of the distance from a uniform answer to H_min."""
    return over_seeds([(3 - x) / (3 - bits(least())) for x in source.method(method).fresh], test.unit)


def law(source: Chain, test: Check, arch: str, metric: str) -> Estimate:
    """A metric of the next step in a small trained tunnel."""
    spec = paper1.training("quick", "bijection", arch)
    grades = sweep({f"law/{arch}": spec}, source.out / "tunnels", 200, "tunnels of the law")
    if why := grades[f"law/{arch}"].get("refused"):
        raise UserError(why)
    folder = source.out / "tunnels/law" / arch
    batch = inputs(spec.task)

    def read() -> Record:
        return next_step(Subject.load(str(folder)), batch)

    made_from = {"task": batch.source["name"], "n": len(batch)}
    return _metric(recorded(folder / "scan", made_from, read), routing_law.NAME, metric)


def inputs(task: str, n: int | None = None, seed: int = 0) -> Batch:
    """Held-out sequences of a task, 200 by default, each truncated at one query; without a task 75 mixed prompts."""
    return Inputs(task, n=n, seed=seed).probed()[0]


def next_step(subject: Subject, batch: Batch, **options: Any) -> Record:
    """The result of `llmgeom.papers.routing_law` for a model, as a record."""
    return run_probes(subject, batch, {routing_law.NAME: routing_law}, **options)


def settles(source: Chain, test: Check, section: str, metric: str) -> Estimate:
    """A metric of `llmgeom dynamics` on the bijection: five trainings, and five on random targets."""
    folder, inputs = source.out / "dynamics", Inputs("bijection")
    spec = {"quick": source.quick}

    def follow() -> Record:
        runs = comparable(train_runs(recipe("bijection", source.quick), folder / "runs"))
        return study(runs, inputs, folder, study_spec(runs, inputs, ()))

    return _metric(recorded(folder, spec, follow), section, metric)


def _metric(record: Record, section: str, name: str) -> Estimate:
    if (h := metric_of(record, section, name)) is None:
        measured = record.results[section]
        raise UserError(f"it has no '{name}': {'; '.join((*measured.notes, *measured.warnings))}")
    return h


NextStep.MEASURES = {"law": lambda source, test, arch, metric: _metric(source.record, routing_law.NAME, metric)}
Chain.MEASURES = {measure.__name__: measure for measure in (speed, steps, fall, law, settles)}
