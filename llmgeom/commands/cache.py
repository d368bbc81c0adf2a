"""`llmgeom cache`: list, verify and remove cached activations."""

from __future__ import annotations

from dataclasses import dataclass

import click

from llmgeom.commands.config import Config, command
from llmgeom.errors import UserError
from llmgeom.flags import argument, flag


@dataclass(frozen=True)
class Runs(Config):
    """Cached runs, named by the beginnings of their keys."""

    runs: tuple[str, ...] = argument(())


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
    from llmgeom.cache import manage

    click.echo("\n".join(manage.table(manage.chosen(config.runs) if config.runs else manage.runs())))


@command(Runs, examples=["llmgeom cache verify"])
def verify(config: Runs) -> int:
    """Compare files with their hashes.

    Of all runs, or of RUNS (keys): every shard. Exit code 1: some differ.
    """
    from llmgeom.cache import manage

    checked = list(manage.verify(manage.chosen(config.runs) if config.runs else manage.runs()))
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
    from llmgeom.cache import manage
    from llmgeom.cache.shards import size_text

    if bool(config.runs) == config.all:
        raise UserError("give the keys of runs (`llmgeom cache ls` prints them), or --all")
    runs = manage.runs() if config.all else manage.chosen(config.runs)
    freed = manage.remove(runs)
    click.echo(f"removed {len(runs)} run{'s' * (len(runs) != 1)}: {size_text(freed)} freed")


for verb in (ls, verify, rm):
    main.add_command(verb)
