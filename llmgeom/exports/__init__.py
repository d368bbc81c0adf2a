"""Exports a run: tables, arrays, images, a label's direction, or a page with the model in it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmgeom.errors import UserError

# Format -> the module that writes it, and where it goes inside the run folder by default.
FORMATS = {
    "parquet": ("tables", "parquet"),
    "csv": ("tables", "csv"),
    "latex": ("latex", "verdicts.tex"),
    "safetensors": ("tables", "record.safetensors"),
    "activations": ("activations", "activations"),
    "direction": ("tables", "direction.safetensors"),
    "live": ("live", "live.html"),
    "png": ("images", "figures"),
    "svg": ("images", "figures"),
    "pdf": ("images", "figures"),
}


def export(run: str, form: str, out: str | None = None, sites: Sequence[str] | None = None) -> list[str]:
    """Write one run in one format and return the lines to print, the path first.

    Args:
        sites: of activations.

    Raises:
        UserError: a folder that holds no run; sites of another format; what a format cannot hold.
    """
    from llmgeom.files import make_folder
    from llmgeom.record import Record

    module, name = FORMATS[form]
    options: dict[str, Any] = {} if sites is None else {"sites": sites}
    if options and form != "activations":
        raise UserError(f"export {form} has no --sites; leave it out")
    record, path = Record.load_one(run), Path(out) if out else Path(run) / name
    make_folder(path.parent)
    return [str(path), *importlib.import_module(f"llmgeom.exports.{module}").write(record, form, path, **options)]
