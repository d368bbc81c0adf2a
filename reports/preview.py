"""The page of a run; before its controls are read, a preview: values of the model's own pass, without a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llmgeom.files import write_whole
from llmgeom.record import Record
from llmgeom.reports.page import page


def write_page(path: Path, records: Sequence[Record]) -> None:
    """The page of these records, whole or not at all; where the last is a preview, with a mark at its end."""
    last = records[-1].facts
    write_whole(path, (page(records) + (_mark(last.get("spec", "")) if "preview" in last else "")).encode())


def unfinished(path: Path, spec: str) -> bool:
    """Whether a page is the preview of a run of this spec, which may write over it."""
    return path.read_bytes().endswith(_mark(spec).encode())


def _mark(spec: str) -> str:
    return f"<!-- preview of {spec} -->\n"
