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
    """One of the four forms, at `out`."""
    return {"csv": _csv, "parquet": _parquet, "safetensors": _arrays, "direction": _direction}[form](record, out)


def _csv(record: Record, out: Path) -> list[str]:
    """The tables prompts, layers and estimates in the folder `out`; every digit; an empty cell where there is none."""
    out.mkdir(parents=True, exist_ok=True)
    lines = []
    for name, columns in tables(record).items():
        rows = list(zip(*columns.values(), strict=True))
        writer = csv.writer(text := io.StringIO(), lineterminator="\n")
        writer.writerows([columns, *rows])
        write_whole(out / f"{name}.csv", text.getvalue().encode())
        lines.append(f"{name}.csv: {len(rows)} rows, {len(columns)} columns")
    return lines


def _parquet(record: Record, out: Path) -> list[str]:
    imported("pyarrow")
    import pyarrow
    from pyarrow import parquet

    out.mkdir(parents=True, exist_ok=True)
    lines = []
    for name, columns in tables(record).items():
        cells = {title: pyarrow.array(floats(column), from_pandas=True) for title, column in columns.items()}
        table = pyarrow.table(cells).replace_schema_metadata({"llmgeom": plain(about(record))})
        sink = pyarrow.BufferOutputStream()
        parquet.write_table(table, sink)
        write_whole(out / f"{name}.parquet", sink.getvalue().to_pybytes())
        lines.append(f"{name}.parquet: {table.num_rows} rows, {table.num_columns} columns")
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


def of_label(record: Record) -> SavedDirection:
    """The direction of the record's label. Raises UserError: it has none."""
    saved = SavedDirection.of(record, "label")
    if saved is None:
        raise UserError(
            f"{record.title} holds no direction of a label: run llmgeom probe with a binary label or a number"
        )
    return saved


def _direction(record: Record, out: Path) -> list[str]:
    """A safetensors file: `direction` [coordinate] of length 1; site, layer, scale and hashes as metadata."""
    saved = of_label(record)
    saved.save(out)
    return [f"{saved.target} at {saved.site.value} {saved.layer}, {saved.position} position; spread {saved.scale:.4g}"]
