"""The table of the bench, as printed, as a section of a page, and as a record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from llmgeom.bench.cells import CELLS, KINDS, NEGATIVES
from llmgeom.bench.table import SMALLEST
from llmgeom.provenance import took, versions
from llmgeom.record import Record
from llmgeom.reports.text import grid, visible
from llmgeom.result import Estimate, Figure, Result, quantity
from llmgeom.validity import Calibration, Signature

DULL = "does not tell models at the posterior from every kind of other model"
SHORT = {
    "no inference": "no inf.",
    "untrained": "untr.",
    "stopped": "stopped",
    "position only": "position",
    "bag of values": "bag",
    "last observation": "last",
    "wrong prior": "prior",
}


@dataclass(frozen=True, kw_only=True)
class Bench(Result):
    """Every metric on models of known truth."""

    TITLE: ClassVar[str] = "Calibration"
    MEANING: ClassVar[str] = (
        "A metric is worth believing where it is higher in models that infer than in models of the same task and shape "
        "that do something else: those that could not infer, those that are right for another reason, those that infer "
        "about another world, and those that were stopped. Where it is not higher than in all of them, it is about "
        "training or the task, not about inference."
    )
    COMPUTED: ClassVar[str] = (
        "AUC within task and architecture: the chance that a model at the posterior has the higher value, in units of "
        "its own null, than a model of the other kind. The value is that against the kind that is hardest to separate, "
        "for `no` and `reversed` against the kind that decides, with its 95 % interval over tasks, on the logit. `yes` "
        f"asks for every kind, by Holm over all metrics; `no` means that an AUC of {SMALLEST} is excluded against some "
        "kind. `circular`: a positive is a model whose answers are near the posterior, on other sequences. `of the "
        "output`: the answers alone decide the value."
    )
    NULL: ClassVar[str] = "An AUC of one half: the metric does not separate the kinds."
    FAILURE_MODES: ClassVar[str] = (
        "Small models on a few tasks: tasks are the clusters, and there are few. An area says nothing about prompts or "
        "large models. Models at the posterior are one for each recipe and seed; recipes that fail are not here."
    )

    auc: np.ndarray = quantity("metric against", "AUC", "at the posterior, against each kind", Figure("heatmap"))
    found: np.ndarray = quantity("metric kind", "fraction", "models in which the metric is found", Figure("heatmap"))


@dataclass(frozen=True)
class Printed:
    """What `calibrate` prints."""

    table: Calibration

    def to_dict(self) -> dict[str, Any]:
        return self.table.to_dict()

    @property
    def dull(self) -> list[str]:
        """The metrics that do not tell models at the posterior from some other kind."""
        return [_called(row) for row in self.table.signatures if row.word in ("no", "reversed")]

    def lines(self) -> list[str]:
        """How much of the bench there is, what does not discriminate, then the table."""
        about = self.table.bench
        head = ("AUC", "95 %", "against", "tells", *SHORT.values(), "found", "elsewhere", "nearness", "")
        rows = [_line(row) for row in self.table.signatures if row.area is not None]
        models = ", ".join(f"{n} {kind}" for kind, n in about["models"].items())
        return [
            *([self.table.partial] if self.table.partial else []),
            f"{models}; {len(about['tasks'])} tasks; {about['cpu_minutes']} CPU minutes",
            *map(visible, [f"{DULL}:", *self.dull]),
            *map(visible, grid("metric", head, rows)),
            "",
            "AUC: models at the posterior against the kind that is hardest to tell from them, or for no and reversed",
            "against the kind whose interval says so; then against each kind",
            "tells: yes asks for every kind; found: models at the posterior in which it is found (a claim that holds",
            "or is small, another number beyond its control); elsewhere: the same in all other kinds",
            "nearness: rank correlation with -log KL to the posterior, among models at it and stopped ones",
            *map(visible, _left_out(self.table)),
        ]


def _called(row: Signature) -> str:
    return f"{row.probe}: {row.name}" if row.name else row.probe


def _left_out(table: Calibration) -> tuple[str, ...]:
    return tuple(f"{_called(row)}: {row.word}" for row in table.signatures if row.area is None)


def _line(row: Signature) -> tuple[str, ...]:
    numbers = row.numbers
    areas, counts, near = numbers["areas"], numbers["found"], numbers["nearness"]
    decisive = areas[row.deciding]
    others = [counts[kind] for kind in NEGATIVES if kind in counts]
    return (
        _called(row),
        f"{decisive['value']:.2f}",
        f"{decisive['low']:.2f} to {decisive['high']:.2f}",
        row.deciding,
        row.word,
        *(f"{areas[kind]['value']:.2f}" if kind in areas else "" for kind in SHORT),
        f"{counts['trained']['k']}/{counts['trained']['n']}" if "trained" in counts else "",
        f"{sum(o['k'] for o in others)}/{sum(o['n'] for o in others)}",
        f"{near['value']:+.2f} [{near['low']:+.2f}, {near['high']:+.2f}]" if near else "",
        numbers["mark"],
    )


def measured(table: Calibration) -> Bench:
    """The table as a section of a page."""
    rows = [row for row in table.signatures if row.area is not None]
    kinds = [kind for kind in KINDS if all(kind in row.numbers["found"] for row in rows)]
    against = [kind for kind in NEGATIVES if all(kind in row.numbers["areas"] for row in rows)]
    shares = [[row.numbers["found"][kind] for kind in kinds] for row in rows]
    areas = [[row.numbers["areas"][kind]["value"] for kind in against] for row in rows]
    return Bench(
        auc=np.array(areas).reshape(len(rows), -1),
        found=np.array([[rate["k"] / rate["n"] for rate in line] for line in shares]).reshape(len(rows), -1),
        estimates=tuple(map(_as_estimate, rows)),
        warnings=(table.partial,) if table.partial else (),
        notes=(*map(_sentence, rows), *_left_out(table)),
        ticks={"metric": tuple(map(_called, rows)), "against": tuple(against), "kind": tuple(kinds)},
    )


def _sentence(row: Signature) -> str:
    lacking = ", ".join(row.numbers["lacking"])
    why = {
        "yes": "above one half against every kind: on these tasks by a rank test and Holm, on others by the interval",
        "no": f"an area of {SMALLEST} is excluded against some kind: it does not separate them",
        "reversed": "below one half, on these tasks and by the interval: it is higher in some kind that does not infer",
        "undecided": f"not compared with: {lacking}"
        if lacking
        else "not shown against every kind; more tasks may decide",
    }[row.word]
    mark = f" ({row.numbers['mark']})" if row.numbers["mark"] else ""
    return f"{_called(row)}{mark}: {row.word}, {why}"


def _as_estimate(row: Signature) -> Estimate:
    decisive = row.numbers["areas"][row.deciding]
    return Estimate(
        name=_called(row),
        value=decisive["value"],
        unit="AUC",
        low=decisive["low"],
        high=decisive["high"],
        method="Student's t over tasks, on the logit, 95 %",
        null_low=0.5,
        null_high=0.5,
        null=f"no difference from: {row.deciding}",
        p=decisive["p"],
        n=decisive["positives"] + decisive["negatives"],
        clusters=decisive["clusters"],
        centre=0.5,
        margin=0.5,
        effect=SMALLEST - 0.5,
        counts="models",
    )


def record(printed: Printed, started: float, spec: str) -> Record:
    """The table as a record; what does not discriminate is its first warning."""
    about = printed.table.bench
    return Record(
        results={"calibration": measured(printed.table).lowered()},
        unmeasured={},
        prompts={name: () for name in ("tags", "domain", "template", "text", "entropy", "tokens")},
        subject={"name": f"{sum(about['models'].values())} small models"},
        source={"kind": "bench", "name": f"{len(about['tasks'])} tasks", **about},
        facts={"spec": spec, "claims_hash": about["claims_hash"], "versions": versions(), "cells": len(CELLS)},
        warnings=(f"{DULL}: {'; '.join(printed.dull)}",) if printed.dull else (),
        run=took(started),
    )
