"""The whole of `llmgeom primitives`: which architectures accumulate, transport and bind, at equal size and data."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from llmgeom import wind_tunnels
from llmgeom.answers import corrupt_predictive
from llmgeom.bench.sweep import finished, seeded, sweep
from llmgeom.commands.config import Config, check_folder, keep
from llmgeom.errors import UserError
from llmgeom.files import digest
from llmgeom.flags import flag
from llmgeom.progress import Progress
from llmgeom.provenance import took, versions
from llmgeom.record import Record
from llmgeom.reports.text import grid
from llmgeom.result import Estimate, Figure, Result, quantity
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
REACHED_KL, REACHED_SKILL = 0.01, 0.95  # Paper I's standard as a divergence; see claims/grade.toml
GRADED = 1000  # sequences


def at_posterior(numbers: Mapping[str, Any]) -> bool:
    """Is a grade's model at the posterior, by that standard?"""
    return numbers["kl"] < REACHED_KL and numbers["skill"] > REACHED_SKILL


@dataclass(frozen=True)
class RunConfig(Config):
    """What `llmgeom reproduce paper1 --only primitives` is asked for."""

    VERB: ClassVar[str] = "reproduce paper1 --only primitives"

    quick: bool = flag(False, "A fifth of the steps: about 10 minutes on two cores instead of 60.")
    seeds: int = flag(3, "Trainings of each cell.", least=2, most=1000)
    dose_seeds: int = flag(5, "Trainings of each dose of corrupted labels.", least=2, most=1000)
    out: str | None = flag(
        None, "Run folder; a stopped run continues in it. [default: runs/primitives-HASH]", group="Output"
    )

    def training(self, primitive: str, arch: str) -> Training:
        asked = replace(PRIMITIVES[primitive], arch=arch, parameters=PARAMETERS, lr="auto", snapshots=2)
        return replace(asked, steps=asked.steps // 5) if self.quick else asked

    def dosed(self, dose: float, seed: int) -> Training:
        return replace(DOSED, corrupt=dose, seed=seed, steps=DOSED.steps // 5 if self.quick else DOSED.steps)


@dataclass(frozen=True, kw_only=True)
class Profile(Result):
    """How near every architecture comes to the posterior of every primitive."""

    TITLE: ClassVar[str] = "Primitives"
    MEANING: ClassVar[str] = (
        "Accumulation rules out hypotheses one observation at a time, transport moves a belief through dynamics that "
        "the sequence itself states, binding finds again what was paired with what. A cell says how many bits a query "
        "the architecture stays from the exact answer after equally many sequences."
    )
    COMPUTED: ClassVar[str] = (
        "Every architecture has as many parameters, within 2 %, and reads as many sequences. The learning rate of each "
        "cell is chosen by successive halving on held-out hypotheses, with the first seed. KL(exact || model) in bits "
        "and skill = 1 - KL(model) / KL(best trivial predictor), on held-out hypotheses; median over seeds, and "
        "Student's 95 % interval over seeds. `Reached`: every seed has KL under "
        f"{REACHED_KL} bits and skill over {REACHED_SKILL}."
    )
    NULL: ClassVar[str] = "The best trivial predictor of each task that is not itself exact."
    FAILURE_MODES: ClassVar[str] = (
        "What is not reached at this budget may be reached at another: a longer run, another depth or schedule. "
        "Without replacement the bijection asks for no binding, and a bag of values is exact. Recall of four pairs "
        "fits into any recurrent state. Few seeds give wide intervals."
    )

    kl: np.ndarray = quantity(
        "primitive architecture", "bits", "KL(exact || model), median over seeds", Figure("heatmap")
    )
    skill: np.ndarray = quantity("primitive architecture", "skill", "skill, median over seeds", Figure("heatmap"))
    mae_abs: np.ndarray = quantity("primitive architecture", "bits", "mae_abs, median over seeds")
    lr: np.ndarray = quantity("primitive architecture", "learning rate", "highest learning rate, chosen")
    kl_trivial: np.ndarray = quantity("primitive", "bits", "KL of the best trivial predictor")

    estimates: tuple[Estimate, ...]
    warnings: tuple[str, ...] = ()
    ticks: Mapping[str, tuple] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Dose(Result):
    """What a model says whose labels were drawn again, by the fraction that was."""

    TITLE: ClassVar[str] = "Dose of corrupted labels"
    MEANING: ClassVar[str] = (
        "With a fraction p of the labels drawn again, evenly, Bayes' rule says (1 - p) of the posterior and p of an "
        "even answer. A model that infers follows that mixture at every dose, and so leaves the posterior by exactly "
        "as much."
    )
    COMPUTED: ClassVar[str] = (
        "KL in bits a query on held-out hypotheses, mean over seeds, with Student's 95 % interval: of the mixture from "
        "the model, which ought to be 0, and of the clean posterior from the model, beside that from the mixture."
    )
    NULL: ClassVar[str] = "A model that is the mixture: 0, and the dashed line."
    FAILURE_MODES: ClassVar[str] = (
        "At a dose of 1 nothing can be inferred, and an even answer is right. Noisy labels slow training down: a KL "
        "from the mixture that grows with the dose may be a matter of steps."
    )

    kl_mixture: np.ndarray = quantity(
        "dose", "bits", "KL(mixture || model)", Figure("curve", interval="kl_mixture_interval")
    )
    kl_mixture_interval: np.ndarray = quantity("dose bound", "bits", "95 % interval over seeds")
    kl_clean: np.ndarray = quantity(
        "dose", "bits", "KL(posterior || model)", Figure("curve", interval="kl_clean_interval", beside="kl_expected")
    )
    kl_clean_interval: np.ndarray = quantity("dose bound", "bits", "95 % interval over seeds")
    kl_expected: np.ndarray = quantity("dose", "bits", "KL(posterior || mixture)")

    estimates: tuple[Estimate, ...] = ()
    warnings: tuple[str, ...] = ()
    ticks: Mapping[str, tuple] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One architecture at one primitive."""

    primitive: str
    arch: str
    seeds: int
    kl: float
    mean: float
    low_end: float
    high: float
    mae_abs: float
    skill: float
    trivial: str
    kl_trivial: float
    lr: float
    parameters: int
    cpu_seconds: float
    reached: bool

    @property
    def low(self) -> float:
        """The interval's lower end where it is one of a divergence: at least 0."""
        return max(0.0, self.low_end)

    @property
    def verdict(self) -> str:
        return "reached" if self.reached else "not reached at this budget"


@dataclass(frozen=True)
class Found:
    """The whole table."""

    rows: tuple[Row, ...]
    refused: Mapping[str, str]
    dose: Mapping[str, list[float]]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "rows": [{**dataclasses.asdict(row), "verdict": row.verdict} for row in self.rows],
            "refused": dict(self.refused),
            "dose": dict(self.dose),
        }

    def lines(self) -> list[str]:
        """What a terminal shows."""
        head = ("architecture", "KL bits", "95 %, seeds", "best trivial", "skill", "mae_abs", "lr", "CPU s", "")
        cells = [
            (
                row.primitive,
                row.arch,
                f"{row.kl:.4f}",
                f"{row.low:.4f} to {row.high:.4f}",
                f"{row.kl_trivial:.3f} {row.trivial}",
                f"{row.skill:.3f}",
                f"{row.mae_abs:.4f}",
                f"{row.lr:g}",
                f"{row.cpu_seconds:.0f}",
                row.verdict,
            )
            for row in self.rows
        ]
        doses = list(zip(*self.dose.values(), strict=True))
        dose = [(f"{p:g}", f"{m:.4f}", f"{c:.4f}", f"{e:.4f}") for p, m, c, e in doses]
        return [
            "KL(exact || model), bits a query on held-out hypotheses, median over seeds",
            *grid("primitive", head, cells),
            "",
            f"labels of {DOSED.task} drawn again, bits a query, mean over seeds",
            *grid("dose", ("KL(mixture || model)", "KL(posterior || model)", "KL(posterior || mixture)"), dose),
            *(f"{name}: not measured, {why}" for name, why in self.refused.items()),
        ]


def perform(asked: RunConfig, progress: Progress | None = None) -> tuple[Path, Found]:
    """Train what is not yet trained, grade it, and write the record and the page."""
    started = time.time()
    out = Path(asked.out or f"runs/primitives-{digest(dataclasses.asdict(asked))[:8]}")
    spec = digest({"primitives": asked.quick})  # more seeds go on with what is there
    check_folder(out, spec)
    first = {f"{p}/{arch}": asked.training(p, arch) for p in PRIMITIVES for arch in ARCHITECTURES}
    found = seeded(first, asked.seeds, out, GRADED, progress)
    doses = {f"dose/{dose:g}/seed{seed}": asked.dosed(dose, seed) for dose in DOSES for seed in range(asked.dose_seeds)}
    found |= sweep(doses, out, GRADED, progress, "doses")
    ended = {name: finished(found, [f"{name}/seed{s}" for s in range(asked.seeds)]) for name in first}
    rows = tuple(
        _row(primitive, arch, cells)
        for primitive in PRIMITIVES
        for arch in ARCHITECTURES
        if len(cells := ended[f"{primitive}/{arch}"]) > 1  # an interval over seeds needs two
    )
    refused = {name: numbers["refused"] for name, numbers in found.items() if "refused" in numbers}
    dose = _dose({p: finished(found, [f"dose/{p:g}/seed{s}" for s in range(asked.dose_seeds)]) for p in DOSES})
    told = {name: getattr(dose, name).tolist() for name in ("kl_mixture", "kl_clean", "kl_expected")}
    made = Found(rows, refused, {"dose": list(dose.ticks["dose"]), **told})
    settings = {name: value for name, value in dataclasses.asdict(asked).items() if name != "out"}
    record = Record(
        results={"primitives": _profile(rows).lowered(), "dose": dose.lowered()},
        unmeasured=refused,
        prompts={},
        subject={"name": f"{len(ARCHITECTURES)} architectures of {PARAMETERS:,} parameters"},
        source={"name": f"{len(PRIMITIVES)} primitives", "kind": "tasks", "graded on": GRADED},
        facts={"spec": spec, "command": asked.command(), "versions": versions(), **settings},
        warnings=("quick: a fifth of the steps",) if asked.quick else (),
        run=took(started),
    )
    keep(record, out)
    return out, made


def _row(primitive: str, arch: str, cells: list[Mapping[str, Any]]) -> Row:
    column = {key: np.array([cell[key] for cell in cells]) for key in ("kl", "mae_abs", "skill", "cpu_seconds")}
    ((low, high),) = mean_intervals([column["kl"]]).tolist()
    return Row(
        primitive=primitive,
        arch=arch,
        seeds=len(cells),
        kl=float(np.median(column["kl"])),
        mean=float(column["kl"].mean()),
        low_end=low,
        high=high,
        mae_abs=float(np.median(column["mae_abs"])),
        skill=float(np.median(column["skill"])),
        trivial=cells[0]["best_trivial"],
        kl_trivial=float(np.median([cell["kl_trivial"] for cell in cells])),
        lr=cells[0]["lr"],
        parameters=cells[0]["parameters"],
        cpu_seconds=float(column["cpu_seconds"].sum()),
        reached=all(map(at_posterior, cells)),
    )


def _estimate(row: Row) -> Estimate:
    """The mean KL over seeds against that of the best trivial predictor, by Student's t."""
    span = Interval(row.low_end, row.high, 0.95, "")
    p = equivalence_p(row.mean, span, -np.inf, row.kl_trivial, row.seeds)
    below, above = row.high < row.kl_trivial and p < 0.05, row.low_end > row.kl_trivial
    return Estimate(
        name=f"{row.primitive}, {row.arch}: KL to the posterior",
        value=row.mean,
        unit="bits",
        low=row.low_end,
        high=row.high,
        method="Student's t over seeds, 95 %",
        null_low=row.kl_trivial,
        null_high=row.kl_trivial,
        null=f"the best trivial predictor, {row.trivial}",
        p=p,
        n=row.seeds,
        clusters=row.seeds,
        verdict="below null" if below else "not below null" if above else "undecided",
        why=f"{row.verdict}: median {row.kl:.4f} bits, skill {row.skill:.3f}",
        side="lower",
        margin=row.kl_trivial,
        counts="seeds",
    )


def _profile(rows: tuple[Row, ...]) -> Profile:
    at = {(row.primitive, row.arch): row for row in rows}
    # An architecture that could not be had for one of the tasks has no column; its other cells are among the verdicts.
    columns = tuple(arch for arch in ARCHITECTURES if all((p, arch) in at for p in PRIMITIVES))
    if not columns:
        raise UserError("no architecture could be trained on every primitive; nothing is left to compare")

    def table(name: str) -> np.ndarray:
        return np.array([[getattr(at[p, arch], name) for arch in columns] for p in PRIMITIVES])

    trivial = np.array([next(row.kl_trivial for row in rows if row.primitive == p) for p in PRIMITIVES])
    return Profile(
        kl=table("kl"),
        skill=table("skill"),
        mae_abs=table("mae_abs"),
        lr=table("lr"),
        kl_trivial=trivial,
        estimates=tuple(map(_estimate, rows)),
        ticks={"primitive": tuple(PRIMITIVES), "architecture": columns},
    )


def _dose(cells: Mapping[float, Sequence[Mapping[str, Any]]]) -> Dose:
    """From the grades of each dose's trainings; a dose of fewer than two has no interval, and no place."""
    task = wind_tunnels.load_task(DOSED.task)
    predictive = task.sample(GRADED, 0, "held-out").exact.predictive
    kept = {dose: some for dose, some in cells.items() if len(some) > 1}
    if not kept:
        raise UserError(f"no dose of {DOSED.task} could be trained twice; nothing is left to compare")
    mixture = [np.array([cell.get("kl_mixture", cell["kl"]) for cell in some]) for some in kept.values()]
    clean = [np.array([cell["kl"] for cell in some]) for some in kept.values()]
    exact, *mixed = (task.answers.exact(corrupt_predictive(predictive, dose)) for dose in (0.0, *kept))
    return Dose(
        kl_mixture=np.array([v.mean() for v in mixture]),
        kl_mixture_interval=mean_intervals(mixture),
        kl_clean=np.array([v.mean() for v in clean]),
        kl_clean_interval=mean_intervals(clean),
        kl_expected=np.array([bits(float(task.answers.kl(exact, one).mean())) for one in mixed]),
        ticks={"dose": tuple(kept)},
    )
