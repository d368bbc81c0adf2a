"""`llmgeom cache`: list, verify and remove cached activations, under LLMGEOM_CACHE."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from llmgeom.cache.shards import NAME, RUN, SPEC, captures_folder, files, flaw, is_being_made, size_text
from llmgeom.commands.config import Config, command
from llmgeom.errors import UserError
from llmgeom.flags import argument, flag

OLDER = "(kept by an older version; not read any more)"


@dataclass(frozen=True)
class Run:
    """The captures of one model with one dtype and device; examinations count as captures.

    Attributes:
        captures: the folders of those that have begun: an interrupted run announced others. unfinished: how many of
            them lack shards.
        size: bytes. written: time of the last write, seconds since the epoch.
    """

    folder: Path
    model: str
    how: str
    captures: tuple[Path, ...]
    unfinished: int
    size: int
    written: float

    @property
    def key(self) -> str:
        return self.folder.name

    def line(self, now: float) -> str:
        """The run as a line of `llmgeom cache ls`."""
        part, count = f" ({self.unfinished} unfinished)" * bool(self.unfinished), len(self.captures)
        what = f"{count} capture{'s' * (count != 1)}{part}" if count else "no captures"
        seconds, age = now - self.written, "just now"
        for name, length in (("minute", 60), ("hour", 3600), ("day", 86400)):
            if seconds >= length:
                n = int(seconds // length)
                age = f"{n} {name}{'s' * (n > 1)}"
        return f"{self.key[:12]}  {size_text(self.size):>9}  {age:>10}  {self.model}, {self.how}: {what}"


def runs() -> list[Run]:
    """Every run in the cache, the last written first."""
    root, found = captures_folder(), []
    for folder in (place for place in root.iterdir() if place.is_dir()) if root.is_dir() else ():
        body = _json(folder / RUN)
        about, spec = body.get("about", {}), body.get("spec", {})
        revision = f" at {about['revision'][:12]}" if about.get("revision") else ""
        begun = {}
        for capture in sorted(path.parent for path in folder.glob(f"*/{SPEC}")):
            if stored := {known[1] for path in capture.iterdir() if (known := NAME.fullmatch(path.name))}:
                begun[capture] = len(stored)
        stats = list(files(folder))
        run = Run(
            folder,
            model=f"{about['name']}{revision}" if about else OLDER,
            how=f"{spec['dtype']} on {'+'.join(spec.get('device', ()))}" if spec else "no matter how",
            captures=tuple(begun),
            unfinished=sum(n < _json(one / SPEC).get("about", {}).get("shards", 0) for one, n in begun.items()),
            size=sum(file.st_size for file in stats),
            written=max((file.st_mtime for file in stats), default=folder.stat().st_mtime),
        )
        found.append(run)
    return sorted(found, key=lambda run: (-run.written, run.key))


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}


@dataclass(frozen=True)
class Runs(Config):
    """Cached runs, named by the beginnings of their keys."""

    runs: tuple[str, ...] = argument(())

    def chosen(self) -> list[Run]:
        """The runs whose keys begin with these texts, or all without any. UserError if none or several begin so."""
        known, matches = runs(), []
        for key in self.runs:
            if len(key) < 4:
                raise UserError(
                    f"{key!r}: expected at least 4 characters of a run's key; `llmgeom cache ls` shows them"
                )
            matching = [run for run in known if run.key.startswith(key)]
            if len(matching) != 1:
                why = f"{len(matching)} runs begin so" if matching else "no run begins so"
                raise UserError(f"{key!r}: {why} in {captures_folder()}; `llmgeom cache ls` shows which there are")
            matches += [run for run in matching if run not in matches]
        return matches if self.runs else known


@dataclass(frozen=True)
class Removal(Runs):
    """Which cached runs are removed."""

    all: bool = flag(False, "Remove all runs.")


@click.group(epilog="Example:  llmgeom cache ls")
def main() -> None:
    """Manage the activation cache (folder LLMGEOM_CACHE)."""


@command(Runs, examples=["llmgeom cache ls"])
def ls(config: Runs) -> None:
    """List cached runs, or RUNS (keys) of them: key, size, age, model."""
    now, of = time.time(), config.chosen()
    size = size_text(sum(run.size for run in of))
    total = f"{len(of)} run{'s' * (len(of) != 1)}, {size} in {captures_folder()}"
    click.echo("\n".join([*(run.line(now) for run in of), total]))


@command(Runs, examples=["llmgeom cache verify"])
def verify(config: Runs) -> int:
    """Compare files with their hashes.

    Of all runs, or of RUNS (keys): every shard. Exit code 1: some differ.
    """
    checked = []  # every shard, with the reason why it cannot be read; empty if it can
    for run in config.chosen():
        for folder in sorted(path.parent for path in run.folder.glob(f"*/{SPEC}")):
            of = f"{run.key}/{folder.name}"
            checked += [(path, flaw(path.name, path.read_bytes(), of)) for path in sorted(folder.glob("*.safetensors"))]
    damaged = [f"{path}: {why}" for path, why in checked if why]
    if damaged:
        click.echo("\n".join(damaged))
        click.echo(f"{len(damaged)} of {len(checked)} files are damaged; the next run that needs them makes them again")
    else:
        click.echo(f"all {len(checked)} files are whole")
    return int(bool(damaged))


@command(Removal, examples=["llmgeom cache rm 3fa90c12"])
def rm(config: Removal) -> None:
    """Remove RUNS (keys), or all runs. The space that was freed is printed."""
    if bool(config.runs) == config.all:
        raise UserError("give the keys of runs (`llmgeom cache ls` prints them), or --all")
    of = config.chosen()
    for run in of:
        if busy := next((folder for folder in run.captures if is_being_made(folder)), None):
            raise UserError(f"{busy} is being made by another process; wait for it, or end it, and try again")
    for run in of:
        shutil.rmtree(run.folder)
    freed = size_text(sum(run.size for run in of))
    click.echo(f"removed {len(of)} run{'s' * (len(of) != 1)}: {freed} freed")


for verb in (ls, verify, rm):
    main.add_command(verb)
