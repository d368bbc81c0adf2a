"""A record as three tables, Parquet or CSV: its prompts, its numbers layer by layer, and its metrics."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from llmgeom.exports.arrays import about
from llmgeom.files import write_whole
from llmgeom.optional import imported
from llmgeom.record import Record
from llmgeom.reports.table import floats, plain, tables


def write(record: Record, form: str, out: Path) -> list[str]:
    """The tables prompts, layers and estimates in the folder `out`."""
    return _csv(record, out) if form == "csv" else _parquet(record, out)


def _csv(record: Record, out: Path) -> list[str]:
    """UTF-8 with commas, every digit of a number, and an empty cell for what is absent."""
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
