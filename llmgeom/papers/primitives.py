"""Which architectures accumulate, transport and bind, at equal size and data: `reproduce paper1 --only primitives`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from llmgeom import wind_tunnels
from llmgeom.answers import corrupt_predictive
from llmgeom.dynamics.sweep import at_posterior, finished, seeded, sweep
from llmgeom.errors import UserError
from llmgeom.papers.published_numbers import Check
from llmgeom.papers.tables import Options, Source
from llmgeom.papers.verdicts import over_seeds
from llmgeom.reports.text import grid
from llmgeom.result import Curve, Estimate, Figure, Measured, Result, curve, quantity
from llmgeom.stats.information import bits
from llmgeom.stats.resampling import Interval, mean_intervals
from llmgeom.stats.tests import equivalence_p
from llmgeom.wind_tunnels.training_config import Training

PRIMITIVES = {
    "accumulation": Training("bijection", steps=1000),
    "transport": Training("hmm", steps=2000),
    "binding": Training("recall", steps=2000),
}
ARCHITECTURES = ("gpt2", "mamba2", "lstm", "mlp", "meanpool", "flat")
PARAMETERS = 100_000
DOSES = (0.0, 0.25, 0.5, 1.0)
DOSED = Training("bijection", width=32, layers=1, steps=600, batch=256, lr="1e-2", snapshots=2)
GRADED = 1000  # sequences


def training(primitive: str, arch: str, quick: bool = False) -> Training:
    """The first seed of a cell; quick: a fifth of the steps."""
    cell = replace(PRIMITIVES[primitive], arch=arch, parameters=PARAMETERS, lr="auto", snapshots=2)
    return replace(cell, steps=cell.steps // 5) if quick else cell


@dataclass(frozen=True, kw_only=True)
class Profile(Result):
    """Distance of every architecture from the posterior of every primitive."""

    TITLE = "Primitives"

    kl: np.ndarray = quantity(
        "primitive architecture", "bits", "KL(exact || model), median over seeds", Figure("heatmap")
    )
    skill: np.ndarray = quantity("primitive architecture", "skill", "skill, median over seeds", Figure("heatmap"))
    mae_abs: np.ndarray = quantity("primitive architecture", "bits", "mae_abs, median over seeds")
    lr: np.ndarray = quantity("primitive architecture", "learning rate", "highest learning rate, chosen")
    kl_trivial: np.ndarray = quantity("primitive", "bits", "KL of the best trivial predictor")


@dataclass(frozen=True, kw_only=True)
class Dose(Result):
    """The answers of a model trained on labels of which a fraction was redrawn."""

    TITLE = "Dose of corrupted labels"

    kl_mixture: Curve = curve("dose", "bits", "KL(mixture || model)", interval="seeds")
    kl_clean: Curve = curve("dose", "bits", "KL(posterior || model)", interval="seeds", beside="kl_expected")
    kl_expected: np.ndarray = quantity("dose", "bits", "KL(posterior || mixture)")


@dataclass(frozen=True)
class Cell:
    """The grades of one architecture on one primitive, one per seed."""

    primitive: str
    arch: str
    grades: tuple[Mapping[str, Any], ...]

    def of(self, name: str) -> np.ndarray:
        """A number of the grades by seed."""
        return np.array([grade[name] for grade in self.grades])

    def median(self, name: str) -> float:
        return float(np.median(self.of(name)))

    @property
    def verdict(self) -> str:
        return "reached" if all(map(at_posterior, self.grades)) else "not reached at this budget"

    def estimate(self) -> Estimate:
        """The mean KL over seeds compared with that of the best trivial predictor, by Student's t."""
        trivial = self.median("kl_trivial")
        mean = over_seeds(
            self.of("kl"), "bits", null=(f"the best trivial predictor, {self.grades[0]['best_trivial']}", trivial)
        )
        p = equivalence_p(mean.value, Interval(mean.low, mean.high, 0.95, ""), -np.inf, trivial, mean.n)
        return replace(mean, name=f"{self.primitive}, {self.arch}: KL to the posterior", p=p, side="lower")

    def to_dict(self) -> dict[str, Any]:
        """Plain data: medians over seeds, and the interval of the mean KL."""
        mean, first = self.estimate(), self.grades[0]
        return {
            **{name: getattr(self, name) for name in ("primitive", "arch", "verdict")},
            **{name: self.median(name) for name in ("kl", "skill", "mae_abs", "kl_trivial")},
            **{"trivial": first["best_trivial"], "lr": first["lr"], "parameters": first["parameters"]},
            **{"seeds": len(self.grades), "mean": mean.value, "low": mean.low, "high": mean.high},
            "cpu_seconds": float(self.of("cpu_seconds").sum()),
        }


def planned(options: Options, tests: Sequence[Check]) -> list[str]:
    """The trainings that a run would make."""
    steps = {primitive: training(primitive, "gpt2", options.quick).steps for primitive in PRIMITIVES}
    return [
        f"{primitive}: {options.seeds} trainings of each of {', '.join(ARCHITECTURES)}, {PARAMETERS:,} parameters, "
        f"{n:,} steps"
        for primitive, n in steps.items()
    ] + [f"{DOSED.task}: {options.dose_seeds} trainings with each of {DOSES} of the labels drawn again"]


def sources(options: Options, tests: Sequence[Check], out: Path) -> Iterator[Primitives]:
    """Train and grade the cells that are not yet trained. Raises UserError if no cells remain to compare."""
    first = {f"{p}/{arch}": training(p, arch, options.quick) for p in PRIMITIVES for arch in ARCHITECTURES}
    grades = seeded(first, options.seeds, out, GRADED)
    dosed = replace(DOSED, steps=DOSED.steps // 5 if options.quick else DOSED.steps)
    names = {dose: [f"dose/{dose:g}/seed{seed}" for seed in range(options.dose_seeds)] for dose in DOSES}
    trainings = {
        name: replace(dosed, corrupt=dose, seed=seed) for dose in DOSES for seed, name in enumerate(names[dose])
    }
    grades |= sweep(trainings, out, GRADED, "doses")
    ended = {name: finished(grades, [f"{name}/seed{seed}" for seed in range(options.seeds)]) for name in first}
    several = {name: tuple(good) for name, good in ended.items() if len(good) > 1}  # an interval over seeds needs two
    cells = tuple(Cell(*name.partition("/")[::2], good) for name, good in several.items())
    refused = {name: grade["refused"] for name, grade in grades.items() if "refused" in grade}
    yield Primitives(cells, dose_curve({dose: finished(grades, names[dose]) for dose in DOSES}), refused)


@dataclass(frozen=True)
class Primitives(Source):
    """The table of primitives, and the dose curve."""

    cells: tuple[Cell, ...]
    dose: Dose
    refused: Mapping[str, str]
    label: str = "primitives"

    def sections(self) -> Mapping[str, Measured]:
        return {"primitives": self.profile.lowered(), "dose": self.dose.lowered()}

    def warnings(self) -> tuple[str, ...]:
        return tuple(f"{name}: not measured, {why}" for name, why in self.refused.items())

    def rows(self) -> list[dict[str, Any]]:
        return [{"table": "primitives", **row} for row in [cell.to_dict() for cell in self.cells] + self._doses()]

    def lines(self) -> list[str]:
        head = ("architecture", "KL bits", "95 %, seeds", "best trivial", "skill", "mae_abs", "lr", "CPU s", "")
        form = (
            *("{primitive}", "{arch}", "{kl:.4f}", "{low:.4f} to {high:.4f}", "{kl_trivial:.3f} {trivial}"),
            *("{skill:.3f}", "{mae_abs:.4f}", "{lr:g}", "{cpu_seconds:.0f}", "{verdict}"),
        )
        cells = [row | {"low": max(0.0, row["low"])} for row in (cell.to_dict() for cell in self.cells)]
        rows = [tuple(column.format(**row) for column in form) for row in cells]
        doses = [(f"{p:g}", f"{m:.4f}", f"{c:.4f}", f"{e:.4f}") for p, m, c, e in map(dict.values, self._doses())]
        return [
            "KL(exact || model), bits a query on held-out hypotheses, median over seeds",
            *grid("primitive", head, rows),
            "",
            f"a fraction of the labels of {DOSED.task} drawn again, bits a query, mean over seeds",
            *grid("dose", ("KL(mixture || model)", "KL(posterior || model)", "KL(posterior || mixture)"), doses),
            *self.warnings(),
        ]

    def _doses(self) -> list[dict[str, float]]:
        arrays = self.dose.arrays()
        columns = {name: arrays[name].tolist() for name in ("kl_mixture", "kl_clean", "kl_expected")}
        rows = zip(self.dose.ticks["dose"], *columns.values(), strict=True)
        return [dict(zip(("dose", *columns), row, strict=True)) for row in rows]

    @cached_property
    def profile(self) -> Profile:
        """The architectures with a cell on every primitive; other cells appear only among the verdicts.

        Raises UserError: no architecture has a cell on every primitive.
        """
        at = {(cell.primitive, cell.arch): cell for cell in self.cells}
        columns = tuple(arch for arch in ARCHITECTURES if all((p, arch) in at for p in PRIMITIVES))
        if not columns:
            raise UserError("no architecture could be trained on every primitive; nothing is left to compare")

        def medians(name: str) -> np.ndarray:
            return np.array([[at[p, arch].median(name) for arch in columns] for p in PRIMITIVES])

        return Profile(
            kl=medians("kl"),
            skill=medians("skill"),
            mae_abs=medians("mae_abs"),
            lr=medians("lr"),  # all seeds have the rate of the first
            kl_trivial=medians("kl_trivial")[:, 0],
            estimates=tuple(cell.estimate() for cell in self.cells),
            ticks={"primitive": tuple(PRIMITIVES), "architecture": columns},
        )


def dose_curve(grades: Mapping[float, Sequence[Mapping[str, Any]]]) -> Dose:
    """The dose curve from the grades of each dose's trainings; a dose with fewer than two has no interval and is left
    out.

    Raises:
        UserError: No dose has two trainings.
    """
    task = wind_tunnels.load_task(DOSED.task)
    predictive = task.sample(GRADED, 0, "held-out").exact.predictive
    enough = {dose: some for dose, some in grades.items() if len(some) > 1}
    if not enough:
        raise UserError(f"no dose of {DOSED.task} could be trained twice; nothing is left to compare")
    mixture = [np.array([grade.get("kl_mixture", grade["kl"]) for grade in some]) for some in enough.values()]
    clean = [np.array([grade["kl"] for grade in some]) for some in enough.values()]
    exact, *mixed = (task.answers.exact(corrupt_predictive(predictive, dose)) for dose in (0.0, *enough))
    return Dose(
        kl_mixture=Curve(np.array([v.mean() for v in mixture]), interval=mean_intervals(mixture)),
        kl_clean=Curve(np.array([v.mean() for v in clean]), interval=mean_intervals(clean)),
        kl_expected=np.array([bits(float(task.answers.kl(exact, one).mean())) for one in mixed]),
        ticks={"dose": tuple(enough)},
    )
