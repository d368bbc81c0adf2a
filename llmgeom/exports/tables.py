"""A record as three Parquet tables: its prompts, its numbers layer by layer, and its metrics."""

from __future__ import annotations

from pathlib import Path

from llmgeom.exports.arrays import about
from llmgeom.files import write_whole
from llmgeom.optional import imported
from llmgeom.record import Record
from llmgeom.reports.tables import floats, plain, tables


def write(record: Record, _form: str, out: Path) -> list[str]:
    """prompts.parquet, layers.parquet and estimates.parquet in the folder `out`."""
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
