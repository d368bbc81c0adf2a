"""Paper I's tunnels: several architectures on several tasks in three seeds, graded, scanned, cut and asked for more."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmgeom import probes, wind_tunnels
from llmgeom.bench.sweep import seeded
from llmgeom.cache.shards import captures_folder
from llmgeom.claims import Null
from llmgeom.errors import UserError
from llmgeom.files import digest, write_whole
from llmgeom.model.capture import Capture, Site
from llmgeom.model.loading import usable
from llmgeom.model.subject import Subject
from llmgeom.papers.primitives import PARAMETERS, PRIMITIVES, at_posterior
from llmgeom.papers.published_numbers import Check
from llmgeom.papers.verdicts import Bench, combined, over_seeds
from llmgeom.probe import WHOLE
from llmgeom.probes.interventions.component_ablation import Kind
from llmgeom.probes.interventions.component_run import examine_components
from llmgeom.probes.posterior.answers import grade
from llmgeom.progress import Progress
from llmgeom.record import Record
from llmgeom.result import Estimate
from llmgeom.run import CONTROLS, run_probes
from llmgeom.stats.information import bits, entropy
from llmgeom.stats.ridge_probe import decodability, folds
from llmgeom.wind_tunnels.tasks.hmm import HMM
from llmgeom.wind_tunnels.tasks.recurrence import Recurrence
from llmgeom.wind_tunnels.training_config import Training

if TYPE_CHECKING:
    from llmgeom.commands.reproduce import RunConfig

SEEDS, GRADED, SCANNED = 3, 1000, 200  # trainings a cell; sequences graded, and scanned
RELATIVE = ("uniform", "trivial")  # to which a grade's numbers can be set beside another architecture's
TOLD = dict(zip(("bijection", "hmm", "recall"), PRIMITIVES, strict=True))


def _matched(task: str, **given: Any) -> Training:
    whole = replace(PRIMITIVES[TOLD[task]], parameters=PARAMETERS, lr="auto", snapshots=2)
    return replace(whole, **given)


RECIPES = {
    "quick": {
        "bijection": Training("bijection:vocab=5,pairs=4", width=32, layers=1, steps=400, lr="1e-2", snapshots=2),
        "hmm": Training("hmm:states=2,symbols=2,steps=8", width=32, layers=2, steps=500, lr="5e-3", snapshots=2),
        "deep": Training("bijection:vocab=5,pairs=4", width=32, layers=4, steps=400, lr="3e-3", snapshots=2),
        "recall": Training(
            "recall:pairs=2,queries=2,keys=4,values=4", width=32, layers=2, steps=300, lr="5e-3", snapshots=2
        ),
    },
    "small": {
        **{task: _matched(task) for task in TOLD},
        "deep": _matched("bijection", layers=4),
    },
    # As the published code trains them, where text and code disagree; data are fresh at every step.
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
SAME_SIZE = {"bijection": 2_680_000, "hmm": 7_400_000}  # of the published MLPs, which have no width of their own


def training(recipe: str, task: str, arch: str) -> Training:
    """The first seed of a cell."""
    made = replace(RECIPES[recipe][task], arch=arch)
    return replace(made, parameters=SAME_SIZE[task]) if recipe == "full" and arch == "mlp" else made


def recipe(asked: RunConfig) -> str:
    return "quick" if asked.quick else asked.size


def cells(name: str, tests: Sequence[Check]) -> dict[str, Training]:
    """The first trainings that tests need, by TASK/ARCHITECTURE."""
    found: dict[str, Training] = {}
    for of in (test.of for test in tests):
        tasks = TOLD if of.get("task") == "all" else (of["task"],)
        architectures = {of["arch"], of.get("over") or of["arch"]} - set(RELATIVE)
        found |= {f"{task}/{arch}": training(name, task, arch) for task in tasks for arch in sorted(architectures)}
    return found


def planned(asked: RunConfig, tests: Sequence[Check]) -> list[str]:
    """The cells that a run would train."""
    return [
        f"{name}: {SEEDS} trainings on {one.task}, {one.layers} layers, "
        f"{f'{one.parameters:,} parameters' if one.parameters else f'width {one.width}'}, {one.steps:,} steps of "
        f"{one.batch} sequences, learning rate {one.lr}"
        for name, one in cells(recipe(asked), tests).items()
    ]


def benches(asked: RunConfig, tests: Sequence[Check], out: Path, progress: Progress | None = None) -> Iterator[Tunnels]:
    """Train and grade what the tests need; one bench. Raises UserError at the papers' scale where there is no GPU."""
    device = usable(asked.device) if asked.size == "full" else "cpu"
    if asked.size == "full" and device == "cpu" and asked.device is None:
        raise UserError("--scale paper trains models of millions of parameters: it needs a GPU; or give --device cpu")
    numbers = seeded(cells(recipe(asked), tests), SEEDS, out / "cells", GRADED, progress, device)
    yield Tunnels(recipe(asked), out / "cells", numbers, tests)


@dataclass(frozen=True)
class Tunnels(Bench):
    """The trained cells: folders, and their numbers by TASK/ARCHITECTURE/seedN."""

    recipe: str
    folder: Path
    numbers: Mapping[str, Mapping[str, Any]]
    tests: Sequence[Check]
    label: str = "paper1"

    def lines(self) -> list[str]:
        seconds = sum(one.get("cpu_seconds", 0) for one in self.numbers.values())
        return [f"{len(self.numbers)} trainings, {seconds / 60:.1f} CPU minutes; {SEEDS} seeds a cell"]

    def warnings(self) -> tuple[str, ...]:
        return tuple(f"{name}: {one['refused']}" for name, one in self.numbers.items() if "refused" in one)

    def seeds(self, task: str, *archs: str) -> list[str]:
        """The names of a cell's trainings that ended well; of several architectures those of the first where the same
        seed of the others did."""
        lacking = {"refused": "its first seed was refused"}  # and then the others were not tried
        every = [[f"{task}/{arch}/seed{seed}" for arch in archs] for seed in range(SEEDS)]
        whys = [[self.numbers.get(name, lacking).get("refused", "") for name in names] for names in every]
        good = [names[0] for names, why in zip(every, whys, strict=True) if not any(why)]
        if not good:
            raise UserError(next(filter(None, whys[0])))
        return good

    def kept(self, name: str, what: str, spec: Mapping[str, Any], make: Callable[[Subject], Any]) -> Any:
        """Plain data made from a trained model once, and read after that."""
        path = self._path(name, what, spec).with_suffix(".json")
        if not path.exists():
            write_whole(path, json.dumps(make(Subject.load(str(self.folder / name)))).encode())
        return json.loads(path.read_text())

    def record(self, name: str, what: str, spec: Mapping[str, Any], make: Callable[[Subject], Record]) -> Record:
        """The same of a record."""
        folder = self._path(name, what, spec)
        if not (folder / "record.json").exists():
            make(Subject.load(str(self.folder / name))).save(folder)
        return Record.load(folder)

    def _path(self, name: str, what: str, spec: Mapping[str, Any]) -> Path:
        return self.folder / name / f"{what}-{digest({**spec, 'of': dict(self.numbers[name])})[:12]}"

    @cached_property
    def probed(self) -> dict[str, tuple[str, ...]]:
        """By TASK/ARCHITECTURE the probes that the tests ask of it: they share the passes of one scan."""
        found: dict[str, set[str]] = {}
        for of in (test.of for test in self.tests if test.measure == "probe"):
            found.setdefault(f"{of['task']}/{of['arch']}", set()).add(of["probe"])
        return {name: tuple(sorted(names)) for name, names in found.items()}


# ---- measures --------------------------------------------------------------------------------------------------------


def graded(bench: Tunnels, test: Check, task: str, arch: str, what: str, over: str = "") -> Estimate:
    """A number of a grade; over that of a uniform answer, of the best trivial predictor, or of another architecture's
    training of the same seed."""
    rival = over not in ("", *RELATIVE)
    names = bench.seeds(task, arch, *[over] * rival)
    own = [bench.numbers[name] for name in names]
    under = [one[f"{what}_{over}"] if over in RELATIVE else 1.0 for one in own]
    null: tuple[str, float] | None = (
        own[0]["best_trivial"],
        float(np.mean([one[f"{what}_trivial"] / u for one, u in zip(own, under, strict=True)])),
    )
    if rival:
        under, null = [bench.numbers[name.replace(f"/{arch}/", f"/{over}/")][what] for name in names], None
    values = [one[what] / u for one, u in zip(own, under, strict=True)]
    # Where all answer every query rightly, one in as many as were graded may yet be wrong.
    return over_seeds(values, test.unit, test.scale, null, least=1 / GRADED if what == "accuracy" else 0.0)


def reached(bench: Tunnels, test: Check, task: str, arch: str) -> Estimate:
    """Of accumulation, transport and binding, how many a training reaches: KL and skill by Paper I's standard."""
    each = [[bench.numbers[name] for name in bench.seeds(one, arch)] for one in TOLD]
    many = [sum(map(at_posterior, cells)) for cells in zip(*each, strict=False)]
    made = over_seeds(many, test.unit, test.scale, ("a model that infers nothing", 0.0))
    if len(set(many)) > 1:
        return made
    # All alike: with 97.5 % confidence another count comes with a probability of at most this (Clopper and Pearson).
    other = 1 - 0.025 ** (1 / len(many))
    return replace(made, low=made.value - other, high=made.value + other, method="Clopper and Pearson, 95 %")


def horizon(bench: Tunnels, test: Check, task: str, arch: str, what: str, times: float = 1.0) -> Estimate:
    """On sequences `times` as long as those trained on.

    first, later: mean KL of the first query past the horizon, or of all past it, over those within; mae: |H_model -
    H_exact|, mean over all queries.
    """
    trained = wind_tunnels.load_task(training(bench.recipe, task, arch).task)
    assert isinstance(trained, HMM | Recurrence), trained.title  # what the entries ask it of
    longer = replace(trained, steps=round(trained.steps * times))

    def asked(subject: Subject) -> dict[str, list[float]]:
        # The published evaluation draws from what was trained on; so does this where programs are what is held out.
        made = grade(subject, longer, GRADED, split="seen" if longer.title.startswith("recurrence") else None)
        return {"kl": made.own.kl.mean(0).tolist(), "mae": np.abs(made.own.gap).mean(0).tolist()}

    within = slice(trained.trained)
    past = {"first": slice(trained.trained, trained.trained + 1), "later": slice(trained.trained, None)}
    values = []
    for name in bench.seeds(task, arch):
        found = bench.kept(name, "longer", {"task": longer.title, "n": GRADED}, asked)
        if what == "mae":
            values.append(float(np.mean(found["mae"])))
        else:
            values.append(float(np.mean(found["kl"][past[what]]) / np.mean(found["kl"][within])))
    return over_seeds(values, test.unit, test.scale)


def probe(bench: Tunnels, test: Check, task: str, arch: str, probe: str, metric: str) -> Estimate:
    """A metric of a scan, mean over trainings, against the hardest of their nulls."""
    of = wind_tunnels.load_task(training(bench.recipe, task, arch).task)
    names = bench.probed[f"{task}/{arch}"]

    def scanned(subject: Subject) -> Record:
        whole = {WHOLE: of.sample(SCANNED, 0, of.test_split)}
        store = str(captures_folder())
        return run_probes(
            subject, of.truncated(SCANNED, 0, of.test_split), probes.known(names), samples=whole, store=store
        )

    found = []
    for name in bench.seeds(task, arch):
        record = bench.record(name, "scan", {"probes": names, "task": of.title}, scanned)
        if probe in record.unmeasured:
            raise UserError(record.unmeasured[probe])
        found += [h for h in record.results[probe].estimates if h.name == metric]
    if not found:
        raise UserError(f"{probe} has no '{metric}' here")
    return combined(found)


def replaced(bench: Tunnels, test: Check, task: str, arch: str, kind: Kind, what: str) -> Estimate:
    """Heads or blocks set to 0 one at a time. most, least: the error of entropy without the one that matters most, or
    least, over that of the model as it is; else a metric."""
    of = wind_tunnels.load_task(training(bench.recipe, task, arch).task)

    def cut(subject: Subject) -> Record:
        batch = of.sample(SCANNED, 0, of.test_split)
        return examine_components(subject, batch, kind, task=of, positions="all", nulls=CONTROLS)

    records = [bench.record(name, kind, {"task": of.title}, cut) for name in bench.seeds(task, arch)]
    section = f"{kind}_zero"
    if why := next((r.unmeasured[section] for r in records if section in r.unmeasured), ""):
        raise UserError(why)
    if what not in ("most", "least"):
        found = [h for r in records for h in r.results[section].estimates if h.name == what]
        if not found:
            raise UserError(f"{training(bench.recipe, task, arch).layers} layers have no '{what}'")
        return combined(found)
    numbers = [bench.numbers[name] for name in bench.seeds(task, arch)]
    most = min(one["mae_abs_uniform"] / one["mae_abs"] for one in numbers)
    if most < test.bound:
        raise UserError(
            f"at this budget a uniform answer has {most:.1f} times the model's error: {test.bound:g} is no loss"
        )
    times = []
    for record in records:
        arrays = record.results[section].arrays
        each = arrays["error"] if kind == "blocks" else 1 + arrays["error"] / arrays["clean_error"]
        times.append(float(each.max() if what == "most" else each.min()))
    return over_seeds(times, test.unit, test.scale)


def final(bench: Tunnels, test: Check, task: str, arch: str, what: str) -> Estimate:
    """Of the final states: the share of their first component (not standardised, as in the published code), or the
    held-out R2 of the exact entropy, folds by sequence; against the same model re-initialised."""
    of = wind_tunnels.load_task(training(bench.recipe, task, arch).task)
    batch = of.sample(SCANNED // 4, 0, of.test_split)

    def number(who: Subject) -> float:
        seen = who.capture(batch, {Site.FINAL})
        x = seen.final.double().numpy()
        if what == "pc1":
            spectrum = np.linalg.svd(x - x.mean(0), compute_uv=False) ** 2
            return float(spectrum[0] / spectrum.sum())
        return decodability(x, _exact(seen), folds(np.asarray(batch.cluster)[seen.prompt.numpy()], 0))

    def numbers(subject: Subject) -> list[float]:
        return [number(subject), *(number(subject.untrained(1 + i)) for i in range(CONTROLS))]

    each = [
        bench.kept(name, f"final-{what}", {"task": of.title, "n": len(batch)}, numbers)
        for name in bench.seeds(task, arch)
    ]
    made = over_seeds([one[0] for one in each], test.unit, test.scale)
    null = Null.of("re-initialised", made.value, np.array(each[0][1:]))
    made = replace(made, null_low=null.low, null_high=null.high, null=f"{null.name} ({null.draws} draws)")
    return replace(made, margin=null.margin, p=null.p, verdict="undecided")


def _exact(seen: Capture) -> np.ndarray:
    """[row] bits: entropy of the exact answer, which in the HMM is the belief about the state."""
    return bits(entropy(seen.exact.predictive)).double().numpy()


Tunnels.MEASURES = {one.__name__: one for one in (graded, reached, horizon, probe, replaced, final)}
