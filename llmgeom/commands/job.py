"""What one command asks of one model, before anything runs; then its record, or its price."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmgeom.commands import config, folders
from llmgeom.commands.output import VerdictOutput, print_json, show_record
from llmgeom.flags import output_flag
from llmgeom.model import hub

if TYPE_CHECKING:
    from llmgeom.model.model import Model
    from llmgeom.plan import Plan
    from llmgeom.record import Record
    from llmgeom.run import Run


Ask = Callable[["Model"], "Plan"]  # makes the plan for a loaded model


@dataclass(frozen=True)
class JobOutput(VerdictOutput):
    """The output flags of a command that asks something of one model."""

    dry_run: bool = output_flag(False, "Print the plan only: tokens, memory, minutes. Reads no weights.")


@dataclass(frozen=True)
class Job:
    """A command's plan, where its model is, and where its record goes.

    Attributes:
        what: of the run folder's name.
        content: what determines the record besides the flags and the model, e.g. the prompts of a file.
        save: writes what the run folder holds besides the record and its page; called as save(record, folder).
    """

    settings: config.ModelConfig
    located: hub.Located
    what: str
    ask: Ask
    content: Mapping[str, Any] = field(default_factory=dict)
    save: Callable[[Record, Path], None] | None = None

    @property
    def spec(self) -> str:
        """Hash of everything that determines the record."""
        return self.settings.spec(self.located, **self.content)

    @property
    def folder(self) -> Path:
        """The run folder."""
        out: str | None = getattr(self.settings, "out")  # noqa: B009 (every command with a job has it)
        return Path(out) if out else folders.run_folder(self.settings.model, self.located, self.what, self.spec)

    def perform(self, subject: Model | None = None) -> tuple[Path, Record]:
        """Load the model unless given, ask, save the record and its page. (folder, record)."""
        return self.folder, self.finish(self.begin(self.settings.subject(self.located, subject)))

    def begin(self, subject: Model) -> Run:
        """The run of its plan, of which nothing is read yet. Raises UserError where its folder holds another run."""
        from llmgeom.cache.shards import captures_folder
        from llmgeom.run import Run

        folders.check_folder(self.folder, self.spec)
        return Run(self.ask(subject), str(captures_folder()))

    def finish(self, run: Run) -> Record:
        """Read what is not read yet, measure, and save the record and its page."""
        record = run.record({"spec": self.spec, "command": self.settings.command()})
        if self.save:
            self.save(record, self.folder)
        folders.save(record, self.folder)
        folders.write_page(self.folder, [record])
        return record

    def show(self, output: JobOutput, table: Callable[[Record], Iterator[str]] | None = None) -> int:
        """Carry the job out and print its verdicts, or print its price; the exit code."""
        if output.dry_run:
            return show_price(self.settings, self.located, [self.ask], self.folder, output)
        return show_record(lambda _: self.perform(), self.settings, output, table)


def show_price(
    settings: config.ModelConfig, located: hub.Located, asks: Iterable[Ask], out: Path, output: VerdictOutput
) -> int:
    """Print what the plans of a command will read; the exit code."""
    from llmgeom.commands.dry_run import lines, price

    cost = price(settings, located, asks, out)
    print_json(cost) if output.json else click.echo("\n".join(lines(cost)))
    return 0
