"""A record as tables (Parquet or CSV), as one safetensors file of every array, or the direction of its label."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np

from llmgeom.errors import UserError
from llmgeom.files import write_whole
from llmgeom.optional import imported
from llmgeom.probes.labels.directions import SavedDirection
from llmgeom.record import Record
from llmgeom.reports.prompts import numeric
from llmgeom.reports.table import floats, plain, rows, tables


def write(record: Record, form: str, out: Path) -> list[str]:
    """Write one of the four forms.

    csv, parquet: the tables prompts, layers and estimates in the folder `out`; every digit; an empty cell where there
    is none. safetensors: see `_arrays`. direction: a safetensors file with `direction` [coordinate] of length 1; site,
    layer, scale and hashes as metadata.

    Raises UserError: the record has no direction of a label.
    """
    if form == "safetensors":
        return _arrays(record, out)
    if form == "direction":
        saved = SavedDirection.of(record, "label")
        if saved is None:
            raise UserError(
                f"{record.title} holds no direction of a label: run llmgeom probe with a binary label or a number"
            )
        saved.save(out)
        where = f"{saved.site.value} {saved.layer}, {saved.position} position"
        return [f"{saved.target} at {where}; spread {saved.scale:.4g}"]
    arrow = imported("pyarrow") if form == "parquet" else None
    out.mkdir(parents=True, exist_ok=True)
    lines = []
    for name, columns in tables(record).items():
        cells = list(zip(*columns.values(), strict=True))
        if arrow is None:
            csv.writer(text := io.StringIO(), lineterminator="\n").writerows([columns, *cells])
            data = text.getvalue().encode()
        else:
            from pyarrow import parquet

            table = arrow.table(
                {title: arrow.array(floats(column), from_pandas=True) for title, column in columns.items()}
            )
            sink = arrow.BufferOutputStream()
            parquet.write_table(table.replace_schema_metadata({"llmgeom": plain(about(record))}), sink)
            data = sink.getvalue().to_pybytes()
        write_whole(out / f"{name}.{form}", data)
        lines.append(f"{name}.{form}: {len(cells)} rows, {len(columns)} columns")
    return lines


def _arrays(record: Record, out: Path) -> list[str]:
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
