"""Writes every array of a record to one safetensors file, with units and axes in its metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from llmgeom.files import write_whole
from llmgeom.record import Record
from llmgeom.reports.prompts import numeric
from llmgeom.reports.table import plain, rows


def write(record: Record, _form: str, out: Path) -> list[str]:
    """Arrays PROBE.QUANTITY as measured, and prompts.COLUMN for every column of numbers.

    The metadata holds text: `record` (model, prompts, command, warnings, what was not measured), `metrics`, and
    `quantities` (axes, unit, meaning, and the names along an axis where it has any), each as JSON.
    """
    from safetensors.numpy import save

    columns = {f"prompts.{name}": np.array(column) for name, column in record.prompts.items() if numeric(column)}
    arrays = record.arrays | columns
    facts = {
        "record": about(record),
        "metrics": [row.numbers() for row in rows([record]) if row.h],
        "quantities": {
            f"{probe}.{name}": {
                "axes": q.axes,
                "unit": q.unit,
                "meaning": q.meaning,
                "ticks": {axis: m.ticks[axis] for axis in q.axes if axis in m.ticks},
            }
            for probe, m in record.results.items()
            for name, q in m.quantities.items()
        },
    }
    # safetensors writes its metadata in no fixed order: one entry, so that equal records give equal bytes.
    write_whole(out, save(arrays, {"llmgeom": plain(facts)}))
    return [f"{len(arrays)} arrays; the metadata entry `llmgeom` is JSON: {', '.join(facts)}"]


def about(record: Record) -> dict[str, Any]:
    """Provenance of a record as plain data, without what varies between equal runs."""
    return {
        "title": record.title,
        "subject": dict(record.subject),
        "source": dict(record.source),
        "facts": dict(record.facts),
        "warnings": list(record.warnings),
        "unmeasured": dict(record.unmeasured),
    }
