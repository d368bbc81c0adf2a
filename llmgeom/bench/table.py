"""Validity of every metric: how well it separates models at the posterior from each kind of other model."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from llmgeom import __version__, claims, probes, wind_tunnels
from llmgeom.bench.cells import CELLS, CONTROLS, KINDS, NEGATIVES, Kind
from llmgeom.errors import UserError
from llmgeom.result import Estimate
from llmgeom.stats.auc import Area, area, rank_correlation, rate, told_apart
from llmgeom.stats.verdict import ALPHA
from llmgeom.validity import Calibration, Signature, null_units

SMALLEST = 0.75  # an area below which a metric is said not to tell kinds apart
LEAST_KL = 1e-6  # bits, below which float32 does not tell models apart
# Metrics whose value follows from the answers alone, whatever is inside. The first are circular besides: positives are
# the models whose answers are near the posterior, on other sequences.
CIRCULAR = {("posterior", name) for name in ("KL to the posterior", "skill over the best trivial predictor")}
OF_OUTPUT = ("posterior", "posterior_calibration", "posterior_memory", "posterior_horizon", "length_generalisation")
ELSEWHERE = {
    "sula": "reads labels in words; a tunnel has no tokenizer",
    "ablation_pc1": "edits values at the end of prompts",
    "ablation_ridge": "edits values at the end of prompts",
    "drift": "is of trainings, not of models",
    "routing_law": "an identity of calculus, which holds in every model",
}  # what is measured on no model of the bench, by the probe that declares it


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
        z = [null_units(_estimate(h)) for h in stored]
        in_units = None not in z
        scores = z if in_units else [_sign(h) * (h["value"] - (h["null_low"] + h["null_high"]) / 2) for h in stored]
        columns = (np.array([reading[key] for reading in having]) for key in ("kind", "cell", "task", "kl"))
        return cls(np.array(scores, float), in_units, np.array([_found(h) for h in stored]), *columns)

    def __getitem__(self, rows: np.ndarray) -> Column:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return Column(**{key: value if key == "in_units" else value[rows] for key, value in fields.items()})

    @property
    def ends(self) -> tuple[float, float]:
        """The scores' 5 % and 95 % points."""
        low, high = np.quantile(self.score, (0.05, 0.95)).tolist()
        return low, high

    def against(self, kind: Kind) -> Area | None:
        """Models at the posterior against models of a kind, within cells, tasks as clusters."""
        these = self[np.isin(self.kind, ["trained", kind])]
        return area(these.score, these.kind == "trained", these.cell, these.task)


def _estimate(h: Mapping[str, Any]) -> Estimate:
    stored = {key: value for key, value in h.items() if key not in ("claim", "verdict")}
    return Estimate(name="", method="", null="its control", **stored)


def _sign(h: Mapping[str, Any]) -> int:
    return 1 if h["side"] == "upper" else -1


def _found(h: Mapping[str, Any]) -> bool:
    return h["verdict"] in ("holds", "small") if h["claim"] else h["p"] < ALPHA


def calibration(readings: Sequence[Mapping[str, Any]]) -> Calibration:
    """The table from readings (`bench.readings.reading`), a row for every metric of every probe.

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
    rows = [_row(*name, columns[name], areas[name], words[name]) for name in names]
    rows += _absent({probe for probe, _ in names}, readings)
    facts = [reading["facts"] for reading in readings]
    width, depth = ([fact[key] for fact in facts] for key in ("d_model", "layers"))
    sizes = [reading["n"] for reading in readings]
    ends = ((min(values), max(values)) for values in (width, depth, sizes))
    return Calibration(tuple(rows), _about(readings), *ends)


def _absent(measured: set[str], readings: Sequence[Mapping[str, Any]]) -> list[Signature]:
    """A row for every probe that was measured on no model, with the most frequent reason."""
    rows = []
    for probe in (*probes.names(), *ELSEWHERE):
        if probe not in measured:
            why = Counter(
                reading["unmeasured"][probe] for reading in readings if probe in reading["unmeasured"]
            ).most_common(1)
            reason = ELSEWHERE.get(probe) or (why[0][0] if why else "no model was asked")
            rows.append(Signature(probe, "", f"not on the bench: {reason}"))
    return rows


def _about(readings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    cells = sorted({reading["cell"] for reading in readings})
    return {
        "models": {kind: sum(reading["kind"] == kind for reading in readings) for kind in KINDS},
        "tasks": list(dict.fromkeys(wind_tunnels.load_task(reading["task"]).title for reading in readings)),
        "architectures": sorted({reading["facts"]["model_type"] for reading in readings}),
        "cells": cells,
        "cells_planned": len(CELLS),
        "controls": CONTROLS,
        "at_one_query": sorted(name for name, probe in probes.known().items() if probe.NEEDS.follows_entropy),
        "cpu_minutes": round(sum(sum(reading["cpu_seconds"].values()) for reading in readings) / 60, 1),
        "llmgeom": __version__,
        "claims_hash": claims.digest(),
    }


def _row(probe: str, name: str, column: Column, areas: Mapping[Kind, Area | None], word: str) -> Signature:
    known = {kind: found for kind, found in areas.items() if found}
    learnt = column[np.isin(column.kind, ["trained", "stopped"])]
    near = rank_correlation(learnt.score, -np.log(np.maximum(learnt.kl, LEAST_KL)), learnt.cell, learnt.task)
    of_kind = {kind: column[column.kind == kind] for kind in KINDS}
    numbers: dict[str, Any] = {
        "areas": {kind: asdict(found) for kind, found in known.items()},
        "found": {kind: asdict(rate(these.found, these.task)) for kind, these in of_kind.items() if len(these.found)},
        "nearness": asdict(near) if near else None,
        "mark": "circular" if (probe, name) in CIRCULAR else "of the output" if probe in OF_OUTPUT else "",
    }
    if not known:
        return Signature(probe, name, "too few tasks where models at the posterior and others give it", numbers=numbers)
    numbers["hardest"] = hardest = min(known, key=lambda kind: known[kind].value)
    numbers["lacking"] = [kind for kind in NEGATIVES if kind not in known]
    least, ours, idle = known[hardest], of_kind["trained"], of_kind["no inference"]
    spans = {"trained": ours.ends, "idle": idle.ends} if column.in_units and len(idle.score) else {}
    return Signature(probe, name, word, least.value, least.low, least.high, **spans, numbers=numbers)
