"""The cache under LLMGEOM_CACHE: list its runs, verify shards, remove runs."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmgeom.cache.shards import (
    NAME,
    RUN,
    SPEC,
    captures_folder,
    files,
    flaw,
    folder_size,
    is_being_made,
    size_text,
)
from llmgeom.errors import UserError

OLDER = "(kept by an older version; not read any more)"


@dataclass(frozen=True)
class StoredCapture:
    """One capture in the cache.

    Attributes:
        of: The source of its prompts. prompts: Their number.
        shards: Number of stored shards. expected: Their number when complete.
        control: The seed of the captured untrained control; None for the model itself.
        size: Bytes. written: Time of the last write, seconds since the epoch.
    """

    folder: Path
    of: str
    prompts: int
    shards: int
    expected: int
    control: int | None
    sites: tuple[str, ...]
    size: int
    written: float

    @property
    def key(self) -> str:
        return self.folder.name

    def line(self, now: float) -> str:
        control = "" if self.control is None else f", untrained copy with seed {self.control}"
        shards = f"{self.shards} of {self.expected} shards"
        what = f"{shards}, {self.prompts} prompts of {self.of}{control}: {', '.join(self.sites)}"
        return f"{self.key[:12]}  {size_text(self.size):>9}  {_age(now - self.written):>10}  {what}"


@dataclass(frozen=True)
class Run:
    """The captures of one model with one dtype and device; examinations count as captures."""

    folder: Path
    model: str
    how: str
    captures: tuple[StoredCapture, ...]
    size: int
    written: float

    @property
    def key(self) -> str:
        return self.folder.name

    def line(self, now: float) -> str:
        # A run that was interrupted announced captures that it did not begin: these have no shard.
        begun = [capture for capture in self.captures if capture.shards]
        part = [capture for capture in begun if capture.shards < capture.expected]
        unfinished = f" ({len(part)} unfinished)" if part else ""
        count = len(begun)
        what = f"{count} capture{'s' * (count != 1)}{unfinished}" if count else "no captures"
        return (
            f"{self.key[:12]}  {size_text(self.size):>9}  {_age(now - self.written):>10}  "
            f"{self.model}, {self.how}: {what}"
        )


def runs() -> list[Run]:
    """Every run in the cache, the last written first."""
    root = captures_folder()
    folders = [folder for folder in sorted(root.iterdir()) if folder.is_dir()] if root.is_dir() else []
    return sorted(map(_run, folders), key=lambda run: -run.written)


def chosen(keys: Iterable[str]) -> list[Run]:
    """The runs whose keys begin with these texts. Raises UserError if none or several do."""
    known, matches = runs(), []
    for key in keys:
        if len(key) < 4:
            raise UserError(f"{key!r}: expected at least 4 characters of a run's key; `llmgeom cache ls` shows them")
        matching = [run for run in known if run.key.startswith(key)]
        if len(matching) != 1:
            why = f"{len(matching)} runs begin so" if matching else "no run begins so"
            raise UserError(f"{key!r}: {why} in {captures_folder()}; `llmgeom cache ls` shows which there are")
        matches += [run for run in matching if run not in matches]
    return matches


def verify(runs: Iterable[Run]) -> Iterator[tuple[Path, str]]:
    """Every shard with the reason why it cannot be read, empty if it can. All bytes are read."""
    for run in runs:
        for folder in sorted(path.parent for path in run.folder.glob(f"*/{SPEC}")):
            for path in sorted(folder.glob("*.safetensors")):
                yield path, flaw(path.name, path.read_bytes(), f"{run.key}/{folder.name}")


def remove(of: Iterable[Run]) -> int:
    """Delete runs and return the bytes freed.

    Raises:
        UserError: A process is writing a capture of one of them. Nothing is deleted then.
    """
    of = list(of)
    for run in of:
        if busy := next((capture for capture in run.captures if is_being_made(capture.folder)), None):
            raise UserError(f"{busy.folder} is being made by another process; wait for it, or end it, and try again")
    freed = 0
    for run in of:
        freed += run.size
        shutil.rmtree(run.folder)
    return freed


def _run(folder: Path) -> Run:
    body = _json(folder / RUN)
    about, spec = body.get("about", {}), body.get("spec", {})
    revision = f" at {about['revision'][:12]}" if about.get("revision") else ""
    device = "+".join(spec.get("device", ()))
    captures = tuple(_capture(path.parent) for path in sorted(folder.glob(f"*/{SPEC}")))
    stats = list(files(folder))
    return Run(
        folder,
        f"{about['name']}{revision}" if about else OLDER,
        f"{spec['dtype']} on {device}" if spec else "no matter how",
        captures,
        sum(file.st_size for file in stats),
        max((file.st_mtime for file in stats), default=folder.stat().st_mtime),
    )


def _capture(folder: Path) -> StoredCapture:
    body = _json(folder / SPEC)
    about, spec = body.get("about", {}), body.get("spec", {})
    return StoredCapture(
        folder,
        about.get("of", "?"),
        about.get("prompts", 0),
        len({known[1] for path in folder.iterdir() if (known := NAME.fullmatch(path.name))}),
        about.get("shards", 0),
        spec.get("untrained"),
        tuple(spec.get("sites", ())),
        folder_size(folder),
        max((file.st_mtime for file in files(folder)), default=0.0),
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}


def _age(seconds: float) -> str:
    """A duration in its largest whole unit: "3 minutes"."""
    for name, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            n = int(seconds // length)
            return f"{n} {name}{'s' * (n > 1)}"
    return "just now"


def table(of: Iterable[Run], captures: bool = False) -> Iterator[str]:
    """A line for each run, with `captures` a line for each of its captures too; last, the total size."""
    now, of = time.time(), list(of)
    for run in of:
        yield run.line(now)
        if captures:
            yield from (f"  {capture.line(now)}" for capture in run.captures)
    yield f"{len(of)} run{'s' * (len(of) != 1)}, {size_text(sum(run.size for run in of))} in {captures_folder()}"
