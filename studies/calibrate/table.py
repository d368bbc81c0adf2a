"""How well each metric separates models at the posterior from each kind of other model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmgeom import wind_tunnels
from llmgeom.errors import UserError
from llmgeom.stats.verdict import ALPHA
from studies.calibrate.auc import Area, area, rate, told_apart
from studies.calibrate.cells import CONTROLS, KINDS, NEGATIVES, Kind

SMALLEST = 0.75  # an area below which a metric is said not to tell kinds apart
# Metrics whose value follows from the answers alone, whatever is inside. The first are circular besides: positives are
# the models whose answers are near the posterior, on other sequences.
CIRCULAR = {("posterior", name) for name in ("KL to the posterior", "skill over the best trivial predictor")}
OF_OUTPUT = ("posterior", "posterior_calibration", "posterior_memory", "posterior_horizon", "length_generalisation")


@dataclass(frozen=True)
class Column:
    """One metric over the models of the bench that give it.

    Attributes:
        score: In units of its own null (`null_units`) if all models have one, else value less the null's middle; what
            the claim says counts as above 0.
        in_units: Whether it is in these units.
        found: Is it there: a claim that holds or is small; another number beyond its control (p < .025)?
        kind, cell, task: Of each model.
        kl: Which says who is at the posterior, bits.
    """

    score: np.ndarray
    in_units: bool
    found: np.ndarray
    kind: np.ndarray
    cell: np.ndarray
    task: np.ndarray
    kl: np.ndarray

    @classmethod
    def of(cls, probe: str, name: str, readings: Sequence[Mapping[str, Any]]) -> Column:
        """From the readings; at least one has the metric."""
        having = [reading for reading in readings if name in reading["estimates"].get(probe, {})]
        stored = [reading["estimates"][probe][name] for reading in having]
        z = [null_units(h) for h in stored]
        in_units = None not in z
        scores = z if in_units else [_sign(h) * (h["value"] - (h["null_low"] + h["null_high"]) / 2) for h in stored]
        columns = (np.array([reading[key] for reading in having]) for key in ("kind", "cell", "task", "kl"))
        return cls(np.array(scores, float), in_units, np.array([_found(h) for h in stored]), *columns)

    def __getitem__(self, rows: np.ndarray) -> Column:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return Column(**{key: value if key == "in_units" else value[rows] for key, value in fields.items()})

    def against(self, kind: Kind) -> Area | None:
        """Models at the posterior against models of a kind, within cells, tasks as clusters."""
        these = self[np.isin(self.kind, ["trained", kind])]
        return area(these.score, these.kind == "trained", these.cell, these.task)


def _sign(h: Mapping[str, Any]) -> int:
    return 1 if h["side"] == "upper" else -1


def _found(h: Mapping[str, Any]) -> bool:
    return h["verdict"] in ("holds", "small") if h["claim"] else h["p"] < ALPHA


def null_units(h: Mapping[str, Any]) -> float | None:
    """Distance of a value from the middle of its null's 95 % band, positive in the direction of the claim:

        z = s (value - (low + high) / 2) / ((high - low) / 2 / 1.96),   s = 1, or -1 if the claim expects low values;

    a normal null has a band of z from -1.96 to 1.96. None if the band has no width. Derived here.
    """
    half = (h["null_high"] - h["null_low"]) / 2
    if half <= 0:
        return None
    return _sign(h) * (h["value"] - (h["null_high"] + h["null_low"]) / 2) / half * 1.959964


def calibration(readings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The table from readings (`studies.calibrate.readings.reading`): the bench, and a row for every metric.

    A row has the AUC against each kind with its 95 % interval over tasks, how often the metric was found in each kind,
    and a word: "yes" if it is above one half against every kind; "no" if an AUC of .75 is excluded against some kind;
    "reversed" if it is below one half against some kind; else "undecided".

    Raises UserError: no metric was measured on two tasks in models at the posterior and in others.
    """
    names = sorted({(probe, name) for reading in readings for probe, hs in reading["estimates"].items() for name in hs})
    columns = {name: Column.of(*name, readings) for name in names}
    areas = {name: {kind: column.against(kind) for kind in NEGATIVES} for name, column in columns.items()}
    if not any(found for by_kind in areas.values() for found in by_kind.values()):
        raise UserError(
            "no metric was measured on two tasks in models at the posterior and in others: there is nothing to "
            "compare; let more cells finish"
        )
    words = dict(zip(names, told_apart([*areas.values()], SMALLEST), strict=True))
    bench = {
        "models": {kind: sum(reading["kind"] == kind for reading in readings) for kind in KINDS},
        "tasks": list(dict.fromkeys(wind_tunnels.load_world(reading["task"]).title for reading in readings)),
        "cells": sorted({reading["cell"] for reading in readings}),
        "controls": CONTROLS,
        "cpu_minutes": round(sum(sum(reading["cpu_seconds"].values()) for reading in readings) / 60, 1),
    }
    return {"bench": bench, "rows": [_row(*name, columns[name], areas[name], words[name]) for name in names]}


def _row(probe: str, name: str, column: Column, areas: Mapping[Kind, Area | None], word: str) -> dict[str, Any]:
    known = {kind: [round(x, 3) for x in (one.value, one.low, one.high)] for kind, one in areas.items() if one}
    if not known:
        return {
            "probe": probe,
            "metric": name,
            "word": "too few tasks where models at the posterior and others give it",
        }
    of_kind = {kind: column[column.kind == kind] for kind in KINDS}
    rates = {kind: rate(these.found, these.task) for kind, these in of_kind.items() if len(these.found)}
    return {
        "probe": probe,
        "metric": name,
        "word": word,
        "mark": "circular" if (probe, name) in CIRCULAR else "of the output" if probe in OF_OUTPUT else "",
        "areas": known,
        "found": {kind: [one.k, one.n] for kind, one in rates.items()},
    }


def deciding(row: Mapping[str, Any]) -> str:
    """The kind whose AUC decides the word: the lowest upper end for "no" and "reversed", else the lowest lower end."""
    end = 2 if row["word"] in ("no", "reversed") else 1
    return min(row["areas"], key=lambda kind: row["areas"][kind][end])


def lines(table: Mapping[str, Any]) -> Iterator[str]:
    """The table for a terminal: the word, the AUC against the deciding kind with its interval, and the metric."""
    models = table["bench"]["models"]
    yield f"{sum(models.values())} models of {len(table['bench']['tasks'])} tasks; AUC against the deciding kind"
    for row in sorted(table["rows"], key=lambda row: row["word"]):
        title = f"{row['probe']}: {row['metric']}"
        if "areas" not in row:
            yield f"{title}: {row['word']}"
            continue
        kind = deciding(row)
        value, low, high = row["areas"][kind]
        yield f"{row['word']:9} {value:.2f} [{low:.2f}, {high:.2f}] {kind:16} {title}"
