"""Results that are computed once: plain data and records in a run folder, each marked with what it was made from."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from llmgeom.files import digest, write_json, write_whole
from llmgeom.record import Record

FINISHED = "finished"  # next to a record: the hash of its inputs


def stored(path: Path, spec: Mapping[str, Any]) -> Any:
    """The data of a file that `computed` wrote for this spec; None if there is none, or it is damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        body = json.loads(path.read_text(encoding="utf-8"))
        if body["spec"] == digest(spec):
            return body["data"]
    return None


def computed(path: Path, spec: Mapping[str, Any], make: Callable[[], Any]) -> Any:
    """Plain data that is made once for a spec, and read after that.

    Args:
        path: The file; its folder is made.
        spec: Everything that determines the data.
        make: Returns the data: dicts, lists, strings and finite numbers.
    """
    data = stored(path, spec)
    return keep(path, spec, make()) if data is None else data


def keep(path: Path, spec: Mapping[str, Any], data: Any) -> Any:
    """Write plain data for `stored`, and return it as it will be read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"spec": digest(spec), "data": data})
    return stored(path, spec)


def recorded(folder: Path, spec: Mapping[str, Any] | str, make: Callable[[], Record]) -> Record:
    """A record that is made once for a spec, and read after that. `make` may save it in the folder itself."""
    mark, key = folder / FINISHED, spec if isinstance(spec, str) else digest(spec)
    if mark.exists() and mark.read_text() == key:
        return Record.load_one(folder)
    record = make()
    record.save(folder)  # over one of another spec
    write_whole(mark, key.encode())
    return record
