"""A section for a model card: claims and measurements with n, intervals, controls and verdicts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from llmgeom.files import write_whole
from llmgeom.record import Record
from llmgeom.reports.text import sizes, visible, weights_of
from llmgeom.reports.verdicts import Row, draws_of, lines

HEAD = ("quantity", "value", "95 % interval", "95 % of the control", "p", "n", "verdict")
READ = (
    "A value counts only against its control: the same pipeline on untrained copies of the model, on shuffled "
    "prompts or without context (each attention output is its mean over other prompts). Each claim has one of five "
    "words: holds; small (there, but less than the declared effect); ruled out; opposite; open (neither shown nor "
    "excluded). Intervals are over clusters (templates, documents or sequences)."
)


def write(record: Record, _form: str, out: Path) -> list[str]:
    """One Markdown section, to be pasted into a README.md of the model hub."""
    write_whole(out, ("\n".join(section(record)) + "\n").encode())
    return [f"{sum(len(m.estimates) for m in record.results.values())} metrics"]


def section(record: Record) -> Iterator[str]:
    """The lines of the section."""
    rows, subject = lines([record]), record.subject
    claims = [row for row in rows if row.claim]
    measured = [row for row in rows if not row.claim and row.verdict != "not measured"]
    missing = [row for row in rows if row.verdict == "not measured"]
    revision = f" at `{subject['revision']}`" if subject.get("revision") else ""
    yield from ("## How it holds its uncertainty", "")
    source, name, dtype = (
        escaped(str(one))
        for one in (record.source.get("name", "its own prompts"), subject["name"], subject.get("dtype", ""))
    )
    weights = visible(weights_of(subject)).replace("`", "'") or "not hashed"
    version = f" {record.facts['llmgeom']}" if "llmgeom" in record.facts else ""
    yield f"Measured by llmgeom{version} on {_counted(record)}{source}."
    yield f"Model: {name}{revision}, weights `{weights}`, {dtype}."
    yield from (f"Controls: {text}." for text in draws_of([record]))
    yield from ("", READ)
    if claims:
        yield from ("", "### Claims", "", *_table(claims), "", *(_told(row) for row in claims))
    if measured:
        yield from ("", "### Measurements", "", *_table(measured))
    warnings = [*record.warnings, *(w for m in record.results.values() for w in m.warnings)]
    if warnings:
        yield from ("", "### Warnings", "", *(f"- {escaped(w)}" for w in dict.fromkeys(warnings)))
    if missing:
        yield from ("", "### Not measured", "", *(f"- {escaped(row.name)}: {escaped(row.why)}" for row in missing))
    if record.facts.get("command"):
        yield from ("", "To repeat it:", "", f"    {visible(str(record.facts['command']))}")


def _counted(record: Record) -> str:
    """How many prompts, before the name of their source; a record that keeps none, as of a training, says the name."""
    count, clusters = sizes(record.prompts)
    return f"{count} prompts ({clusters} clusters) of " if count else ""


def _table(rows: Sequence[Row]) -> Iterator[str]:
    yield f"| {' | '.join(HEAD)} |"
    yield f"|{'---|' * len(HEAD)}"
    for row in rows:
        cells = (row.name, row.value, row.interval, row.null, row.p, row.n, row.verdict)
        yield f"| {' | '.join(map(escaped, cells))} |"


def _told(row: Row) -> str:
    return f"- {escaped(row.name)}: {escaped(row.claim)}" + (f" {row.verdict}: {escaped(row.why)}." if row.why else "")


def escaped(text: str) -> str:
    """Escape text so that Markdown shows it literally, also in a table."""
    return re.sub(r"([\\`*_\[\]<>|~$&#])", r"\\\1", visible(text))
