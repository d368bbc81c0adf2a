"""Every metric of every probe from snapshot to snapshot, as curves with intervals and control bands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from llmgeom.record import Record
from llmgeom.result import Estimate, Figure, Measured, Quantity

BANDS = {
    "interval": ("95 % interval", ("low", "high")),
    "null": ("95 % band of the control that decides", ("null_low", "null_high")),
}


def over_training(steps: Sequence[int], records: Mapping[int, Record]) -> dict[str, Measured]:
    """A section for each probe, with one curve for each of its metrics.

    Args:
        steps: of all snapshots, ascending.
        records: step -> scan of that snapshot; a metric may be missing at some steps.

    Returns:
        Probe -> Measured without estimates: a curve over training is no claim.
    """
    sections = {}
    for probe in sorted({probe for record in records.values() for probe in record.results}):
        measured = {step: record.results[probe] for step, record in records.items() if probe in record.results}
        by_metric: dict[str, dict[int, Estimate]] = {}
        for step, result in measured.items():
            for metric in result.estimates:
                by_metric.setdefault(metric.name, {})[step] = metric
        refusals = {step: record.unmeasured.get(probe) for step, record in records.items()}
        notes = tuple(f"step {step}: not measured, {why}" for step, why in refusals.items() if why)
        if by_metric:
            first = next(iter(measured.values()))
            sections[probe] = _section(first, steps, by_metric, notes)
    return sections


def _section(
    first: Measured, steps: Sequence[int], by_metric: Mapping[str, Mapping[int, Estimate]], notes: tuple[str, ...]
) -> Measured:
    quantities, arrays, ticks = {}, {}, {}
    for i, (name, metrics) in enumerate(by_metric.items()):
        missing = [str(step) for step in steps if step not in metrics]
        axis = f"step (not measured at {', '.join(missing)})" if missing else "step"
        ticks[axis] = tuple(map(str, metrics))
        key, unit = f"metric_{i:02}", next(iter(metrics.values())).unit
        figure = Figure("curve", band=f"{key}_null", interval=f"{key}_interval")
        quantities[key] = Quantity((axis,), unit, name, figure)
        arrays[key] = np.array([metric.value for metric in metrics.values()])
        for band, (meaning, ends) in BANDS.items():
            quantities[f"{key}_{band}"] = Quantity((axis, "bound"), unit, meaning)
            arrays[f"{key}_{band}"] = np.array([[getattr(metric, end) for end in ends] for metric in metrics.values()])
    return replace(
        first,
        title=f"{first.title}, over training",
        estimates=(),
        quantities=quantities,
        arrays=arrays,
        warnings=(),
        notes=notes,
        ticks=ticks,
        unmeasured={},
    )
