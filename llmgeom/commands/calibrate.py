"""The whole of `llmgeom calibrate`: which numbers tell models that infer from models trained as long?"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from llmgeom import __version__, claims, probes
from llmgeom.bench.known_truth import CELLS, KINDS, SIZE, Kind, readings, recipes, tasks
from llmgeom.commands.config import Config, check_folder, command, keep
from llmgeom.commands.output import Output, show_rows
from llmgeom.errors import UserError
from llmgeom.files import digest, write_whole
from llmgeom.flags import flag
from llmgeom.progress import Progress
from llmgeom.provenance import took, versions
from llmgeom.record import Record
from llmgeom.reports.text import grid, visible
from llmgeom.result import Estimate, Figure, Result, quantity
from llmgeom.stats.auc import Area, area, rank_correlation, rate, threshold, told_apart
from llmgeom.stats.rule import ALPHA
from llmgeom.validity import Calibration, Signature, null_units

NEGATIVES: tuple[Kind, ...] = ("no inference", "untrained", "position only", "bag of values", "stopped")
SMALLEST = 0.75  # an area under which a number is said not to tell kinds apart
LEAST_KL = 1e-6  # bits, below which float32 does not tell models apart
DULL = "does not tell models that infer from models trained as long that do not"
ELSEWHERE = {
    "sula": "reads labels in words; a tunnel has no tokenizer",
    "ablation_pc1": "edits values at the end of prompts",
    "ablation_ridge": "edits values at the end of prompts",
    "drift": "is of trainings, not of models",
}  # what no subject of the bench can be asked, by the probe that declares it


@dataclass(frozen=True)
class RunConfig(Config):
    """What `llmgeom calibrate` is asked for."""

    VERB: ClassVar[str] = "calibrate"

    quick: bool = flag(False, "Four cells of eleven and few seeds: about 10 minutes on two cores.")
    out: str | None = flag(
        None, "Run folder; a stopped run continues in it. [default: runs/calibrate-HASH]", group="Output"
    )


@dataclass(frozen=True)
class Told:
    """What a signature gave on the bench: a score and more for each subject that it could be had of.

    score   in units of its own null (`null_units`) where all subjects have one, else value less the null's middle, the
            way that is asked counted as above 0.
    found   is it there: a claim that holds or is small; another number beyond its control (p < .025)?
    """

    score: np.ndarray
    clusters: bool
    found: np.ndarray
    kind: np.ndarray
    cell: np.ndarray
    task: np.ndarray
    seed: np.ndarray
    kl: np.ndarray

    @classmethod
    def of(cls, probe: str, name: str, given: Sequence[Mapping[str, Any]]) -> Told | None:
        kept = [one for one in given if name in one["estimates"].get(probe, {})]
        if not kept:
            return None
        plain = [one["estimates"][probe][name] for one in kept]
        z = [null_units(_estimate(h)) for h in plain]
        clusters = None not in z
        scores = z if clusters else [_sign(h) * (h["value"] - (h["null_low"] + h["null_high"]) / 2) for h in plain]
        columns = (np.array([one[key] for one in kept]) for key in ("kind", "cell", "task", "seed", "kl"))
        return cls(np.array(scores, float), clusters, np.array([_found(h) for h in plain]), *columns)

    def __getitem__(self, kept: np.ndarray) -> Told:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return Told(**{key: value if key == "clusters" else value[kept] for key, value in fields.items()})

    @property
    def ends(self) -> tuple[float, float]:
        """The scores' 5 % and 95 % points."""
        low, high = np.quantile(self.score, (0.05, 0.95)).tolist()
        return low, high

    def against(self, kind: Kind) -> Area | None:
        """Models trained to the posterior against models of a kind, within cells, tasks as clusters."""
        these = self[np.isin(self.kind, ["trained", kind])]
        return area(these.score, these.kind == "trained", these.cell, these.task)


def _estimate(h: Mapping[str, Any]) -> Estimate:
    given = {key: value for key, value in h.items() if key not in ("claim", "verdict")}
    return Estimate(name="", method="", null="its control", **given)


def _sign(h: Mapping[str, Any]) -> int:
    return 1 if h["side"] == "upper" else -1


def _found(h: Mapping[str, Any]) -> bool:
    return h["verdict"] in ("holds", "small") if h["claim"] else h["p"] < ALPHA


def calibration(given: Sequence[Mapping[str, Any]]) -> Calibration:
    """The table from readings (`subjects.reading`), a signature for every metric of every probe."""
    whole = [one for one in given if one["n"] == SIZE]
    names = list(dict.fromkeys((probe, name) for one in given for probe, hs in one["estimates"].items() for name in hs))
    rows = [(probe, name, Told.of(probe, name, whole)) for probe, name in sorted(names)]
    areas = {(probe, name): made for probe, name, told in rows if told and (made := told.against("no inference"))}
    words = dict(zip(areas, told_apart([*areas.values()], SMALLEST), strict=True))
    signatures = [_signature(probe, name, told, words.get((probe, name)), given) for probe, name, told in rows if told]
    measured = {probe for probe, _ in names}
    for probe in (*probes.names(), *ELSEWHERE):
        if probe not in measured:
            said = Counter(one["unmeasured"][probe] for one in given if probe in one["unmeasured"]).most_common(1)
            why = ELSEWHERE.get(probe) or (said[0][0] if said else "no subject was asked")
            signatures.append(Signature(probe, "", f"not on the bench: {why}"))
    if not any(one.area is not None for one in signatures):
        raise UserError("no metric was measured on two tasks for both positives and negatives: nothing can be compared")
    return Calibration(tuple(signatures), _of_bench(given), *(
        (min(values), max(values))
        for values in (
            [one["facts"]["d_model"] for one in given],
            [one["facts"]["layers"] for one in given],
            [one["n"] for one in given],
        )
    ))  # fmt: skip


def _of_bench(given: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    whole = [one for one in given if one["n"] == SIZE]
    minutes = sum(sum(one["cpu_seconds"].values()) for one in given) / 60
    return {
        "subjects": {kind: sum(one["kind"] == kind for one in whole) for kind in KINDS},
        "readings": len(given),
        "tasks": list(tasks(whole)),
        "architectures": sorted({one["facts"]["model_type"] for one in whole}),
        "cells": sorted({one["cell"] for one in whole}),
        "cpu_minutes": round(minutes, 1),
        "llmgeom": __version__,
        "claims_hash": claims.digest(),
    }


def _signature(probe: str, name: str, told: Told, word: str | None, given: Sequence[Mapping[str, Any]]) -> Signature:
    trained, idle = told[told.kind == "trained"], told[told.kind == "no inference"]
    areas = {kind: found for kind in NEGATIVES if (found := told.against(kind))}
    numbers: dict[str, Any] = {
        "areas": {kind: asdict(found) for kind, found in areas.items()},
        "clusters": told.clusters,
    }
    numbers["verdict"] = {
        kind: asdict(rate(these.found, these.task)) for kind in KINDS if len((these := told[told.kind == kind]).found)
    }
    even, odd = idle[idle.seed % 2 == 0], idle[idle.seed % 2 == 1]
    try:
        mark = threshold(even.score)
    except ValueError as error:
        numbers["false_positives"] = {"why_not": str(error)}
    else:
        numbers["false_positives"] = {"threshold": mark}
        for kind, these in (("no inference", odd), ("trained", trained)):
            if len(these.score):
                numbers["false_positives"][kind] = asdict(rate(these.score > mark, these.task))
    numbers["power"] = {}
    for n in sorted({one["n"] for one in given}):
        reached = Told.of(probe, name, [one for one in given if one["n"] == n and one["kind"] == "trained"])
        if reached:
            numbers["power"][str(n)] = asdict(rate(reached.found, reached.task))
    learnt = told[np.isin(told.kind, ["trained", "stopped"])]
    follows = rank_correlation(learnt.score, -np.log(np.maximum(learnt.kl, LEAST_KL)), learnt.cell, learnt.task)
    numbers["nearness"] = asdict(follows) if follows else None
    main = areas.get("no inference")
    if main is None:
        kinds = {kind: int((told.kind == kind).sum()) for kind in ("trained", "no inference")}
        return Signature(probe, name, f"too few tasks where both kinds give it ({kinds})", numbers=numbers)
    spans = {"trained": trained.ends, "idle": idle.ends} if told.clusters else {}
    return Signature(probe, name, str(word), main.value, main.low, main.high, **spans, numbers=numbers)


# ---- what people see -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Bench(Result):
    """What every metric gave on models of known truth."""

    TITLE: ClassVar[str] = "Calibration"
    MEANING: ClassVar[str] = (
        "A metric is worth believing where it is higher in models that infer than in models of the same task, shape "
        "and training that could not infer. Where it is not, it says something of training or of the task, and not of "
        "inference."
    )
    COMPUTED: ClassVar[str] = (
        "AUC within task and architecture: the chance that a model trained to the posterior has the higher value, in "
        "units of its own null, than a model of the other kind. 95 % interval over tasks, on the logit. `yes` by Holm "
        f"over all metrics; `no` where an AUC of {SMALLEST} is excluded."
    )
    NULL: ClassVar[str] = "An AUC of one half: the metric does not know the kinds."
    FAILURE_MODES: ClassVar[str] = (
        "Small models on a few tasks: tasks are the clusters, and there are few. An area says nothing of prompts or of "
        "large models. Models trained to the posterior are one per recipe and seed, and recipes that fail are not here."
    )

    auc: np.ndarray = quantity(
        "metric against", "AUC", "trained to the posterior, against each kind", Figure("heatmap")
    )
    found: np.ndarray = quantity("metric kind", "fraction", "verdicts that say it is there", Figure("heatmap"))

    estimates: tuple[Estimate, ...]
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    ticks: Mapping[str, tuple] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """What `calibrate` prints."""

    table: Calibration

    def to_dict(self) -> dict[str, Any]:
        return self.table.to_dict()

    @property
    def dull(self) -> list[str]:
        """The signatures that do not tell trained from trained without inference."""
        return [_called(one) for one in self.table.signatures if one.word in ("no", "reversed")]

    def lines(self) -> list[str]:
        """What does not discriminate, then the table."""
        about = self.table.bench
        head = ("AUC", "95 %", "tells", "untrained", "position", "bag", "false +", "at most", "found +", "of trained",
                "nearness")  # fmt: skip
        rows = [_row(one) for one in self.table.signatures if one.area is not None]
        subjects = ", ".join(f"{n} {kind}" for kind, n in about["subjects"].items())
        return [
            f"{subjects}; {len(about['tasks'])} tasks; {about['cpu_minutes']} CPU minutes",
            *map(visible, [f"{DULL}:", *self.dull]),
            *map(visible, grid("metric", head, rows)),
            "",
            "AUC: trained to the posterior against trained without inference; untrained, position only, bag of values: "
            "AUC against those",
            "false +: odd-seed models without inference above the threshold of even seeds, and its upper 97.5 % bound",
            "found +: models without inference in which it is found (a claim that holds or is small, another number",
            "beyond its control); of trained: the same of trained ones",
            "nearness: rank correlation with -log KL to the posterior among trained and stopped models",
            *map(visible, _left_out(self.table)),
        ]


def _called(one: Signature) -> str:
    return f"{one.probe}: {one.name}" if one.name else one.probe


def _left_out(table: Calibration) -> tuple[str, ...]:
    return tuple(f"{_called(one)}: {one.word}" for one in table.signatures if one.area is None)


def _row(one: Signature) -> tuple[str, ...]:
    numbers = one.numbers

    def of(kind: str) -> str:
        return f"{numbers['areas'][kind]['value']:.2f}" if kind in numbers["areas"] else ""

    def share(found: Mapping[str, Any] | None) -> str:
        return f"{found['k']}/{found['n']}" if found else ""

    odd = numbers["false_positives"].get("no inference")
    near = numbers["nearness"]
    return (
        _called(one),
        f"{one.area:.2f}",
        f"{one.low:.2f} to {one.high:.2f}",
        one.word,
        of("untrained"),
        of("position only"),
        of("bag of values"),
        share(odd),
        f"{odd['high']:.2f}" if odd else "",
        share(numbers["verdict"].get("no inference")),
        share(numbers["verdict"].get("trained")),
        f"{near['value']:+.2f} [{near['low']:+.2f}, {near['high']:+.2f}]" if near else "",
    )


def measured(table: Calibration) -> Bench:
    """The table as a section of a page."""
    rows = [one for one in table.signatures if one.area is not None]
    kinds = [kind for kind in KINDS if all(kind in one.numbers["verdict"] for one in rows)]
    shares = [[one.numbers["verdict"][kind] for kind in kinds] for one in rows]
    against = [kind for kind in NEGATIVES if all(kind in one.numbers["areas"] for one in rows)]
    return Bench(
        auc=np.array([[one.numbers["areas"][kind]["value"] for kind in against] for one in rows]).reshape(
            len(rows), -1
        ),
        found=np.array([[one["k"] / one["n"] for one in row] for row in shares]).reshape(len(rows), -1),
        estimates=tuple(map(_as_headline, rows)),
        notes=(*map(_word, rows), *_left_out(table)),
        ticks={
            "metric": tuple(map(_called, rows)),
            "against": tuple(against),
            "kind": tuple(kinds),
        },
    )


def _word(one: Signature) -> str:
    why = {
        "yes": "above one half: on these tasks by a rank test and Holm, on others by the interval",
        "no": f"an area of {SMALLEST} is excluded: it does not tell them apart",
        "reversed": "below one half, on these tasks and by the interval: it is higher in models that do not infer",
        "undecided": f"neither one half nor {SMALLEST} is excluded; more tasks would tell",
    }[one.word]
    return f"{_called(one)}: {one.word}, {why}"


def _as_headline(one: Signature) -> Estimate:
    main = one.numbers["areas"]["no inference"]
    return Estimate(
        name=_called(one),
        value=main["value"],
        unit="AUC",
        low=main["low"],
        high=main["high"],
        method="Student's t over tasks, on the logit, 95 %",
        null_low=0.5,
        null_high=0.5,
        null="no difference between the kinds",
        p=main["p"],
        n=main["positives"] + main["negatives"],
        clusters=main["clusters"],
        centre=0.5,
        margin=0.5,
        effect=SMALLEST - 0.5,
        counts="models",
    )


@command(RunConfig, Output, examples=["llmgeom calibrate --quick"])
def main(asked: RunConfig, output: Output) -> int:
    """Measure which numbers tell models that infer from models, trained as long, that cannot.

    Every probe reads small models: trained to the posterior, untrained, trained where nothing can be inferred, right
    for the wrong reason, and stopped on the way. It takes about two hours of CPU. Its table ships with the code.
    """
    return show_rows(perform, asked, output)


def perform(asked: RunConfig, progress: Progress | None = None) -> tuple[Path, Found]:
    """The whole of `llmgeom calibrate`: train and read what is missing, make the table and its page; (folder, found).

    `calibration.json` in the folder is the table that ships as llmgeom/calibrated.json.
    """
    started = time.time()
    spec = digest({name: asdict(run) for name, run in recipes(asked.quick).items()})
    out = Path(asked.out) if asked.out else Path("runs") / f"calibrate-{spec[:8]}"
    check_folder(out, spec)
    found = Found(calibration(readings(out, asked.quick, progress)))
    text = json.dumps(found.to_dict(), indent=1, sort_keys=True, allow_nan=False) + "\n"
    write_whole(out / "calibration.json", text.encode())
    keep(record(found, started, spec), out)
    return out, found


def record(found: Found, started: float, spec: str) -> Record:
    """The table as a record; what does not discriminate is its first warning."""
    about = found.table.bench
    return Record(
        results={"calibration": measured(found.table).lowered()},
        unmeasured={},
        prompts={name: () for name in ("tags", "domain", "template", "text", "entropy", "tokens")},
        subject={"name": f"{sum(about['subjects'].values())} small models"},
        source={"kind": "bench", "name": f"{len(about['tasks'])} tasks", **about},
        facts={"spec": spec, "claims_hash": about["claims_hash"], "versions": versions(), "cells": len(CELLS)},
        warnings=(f"{DULL}: {'; '.join(found.dull)}",) if found.dull else (),
        run=took(started),
    )
