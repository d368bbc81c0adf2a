"""Run folders: what they are called, which run one holds, and its record and page."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llmgeom.errors import UserError
from llmgeom.files import remove_unfinished, write_whole

if TYPE_CHECKING:
    from llmgeom.model import hub
    from llmgeom.record import Record

PREVIEW = "<!-- preview of {} -->\n"  # the end of a page that the run of this spec may write over


def run_folder(model: str, located: hub.Located, what: str, spec: str) -> Path:
    """The default folder of a run: runs/MODEL-WHAT-HASH."""
    # Of a packaged GGUF the folder is that of the converted weights, named by a hash.
    name = Path(model).resolve().name if located.kind == "local" and Path(model).exists() else model
    return Path("runs") / f"{safe(name)}-{what}-{spec[:8]}"


def safe(name: str) -> str:
    """A name that every file system takes."""
    return "".join(c if c.isalnum() or c in "._" else "-" for c in name)


def save(record: Record, out: Path) -> None:
    """Save the record. Raises UserError if the folder holds another run, which may have ended while this one ran."""
    if out.is_dir():
        check_folder(out, str(record.facts.get("spec")))
    record.save(out)


def write_page(out: Path, records: Sequence[Record]) -> None:
    """Draw the page of a run folder, whole or not at all; of a preview with a mark of its run at the end."""
    from llmgeom.reports.page import page

    last = records[-1].facts
    mark = PREVIEW.format(last.get("spec", "")) if "preview" in last else ""
    write_whole(out / "report.html", (page(records) + mark).encode())


def check_folder(folder: Path, spec: str) -> None:
    """Make the run folder. Raises UserError if it cannot be written or holds another run."""
    if file := next((place for place in (folder, *folder.parents) if place.is_file()), None):
        raise UserError(f"{file} is a file, and a run needs a folder; give another --out")
    existing, page = folder / "record.json", folder / "report.html"
    if existing.exists():
        try:
            other = json.loads(existing.read_text(encoding="utf-8")).get("facts", {}).get("spec")
        except (ValueError, OSError, AttributeError, RecursionError):
            other = "unreadable"
        if other != spec:
            raise UserError(f"{folder} holds another run; choose another --out, or remove it first")
    elif page.exists() and not page.read_bytes().endswith(PREVIEW.format(spec).encode()):
        raise UserError(f"{folder} holds a report.html that is not this run's; choose another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(folder)
        probe = folder / f".writable.{os.getpid()}.tmp"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}); choose another --out") from error
