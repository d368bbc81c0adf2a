"""What one command asks of one model, before anything runs; then its record, or its price."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmgeom.cache.shards import captures_folder
from llmgeom.commands import config
from llmgeom.commands.output import VerdictOutput, print_json, show_record
from llmgeom.flags import flag
from llmgeom.model import hub

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llmgeom.batch import Batch
    from llmgeom.model.subject import Subject
    from llmgeom.probe import Probe
    from llmgeom.progress import Progress
    from llmgeom.record import Record


@dataclass(frozen=True)
class Question:
    """Inputs, probes and controls: the arguments of `run_probes`; of its samples controls read every input."""

    batch: Batch
    probes: Mapping[str, Probe]
    controls: int
    seed: int
    batch_tokens: int
    samples: Mapping[str, Batch] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    columns: Callable[[Mapping[str, Any]], Mapping[str, tuple]] | None = None

    def record(self, subject: Subject, **options: Any) -> Record:
        """The answer; options of `run_probes`, e.g. store and progress."""
        from llmgeom.run import run_probes

        return run_probes(
            subject,
            self.batch,
            self.probes,
            samples=self.samples,
            controls=self.controls,
            seed=self.seed,
            batch_tokens=self.batch_tokens,
            notes=self.notes,
            columns=self.columns,
            whole=True,
            **{**options, "facts": {**self.facts, **options.get("facts", {})}},
        )


@dataclass(frozen=True)
class JobOutput(VerdictOutput):
    """What a command prints that asks one question of one model."""

    dry_run: bool = flag(False, "Print the plan only: tokens, memory, minutes. Reads no weights.", group="Output")


@dataclass(frozen=True)
class Job:
    """A command's question, where its model is, and where its record goes.

    Attributes:
        what: of the run folder's name.
        spec: hash of everything that determines the record.
        ask: makes the question for a model; called as ask(subject, progress).
    """

    asked: config.ModelConfig
    located: hub.Located
    what: str
    spec: str
    ask: Callable[..., Question]

    @property
    def folder(self) -> Path:
        """The run folder."""
        out: str | None = getattr(self.asked, "out")  # noqa: B009 (every command that asks a question has it)
        return Path(out) if out else config.run_folder(self.asked.model, self.located, self.what, self.spec)

    def perform(self, progress: Progress | None = None, subject: Subject | None = None) -> tuple[Path, Record]:
        """Load the model unless given, ask, save the record and its page. (folder, record)."""
        config.check_folder(self.folder, self.spec)
        subject = subject or self.asked.load(self.located)
        record = self.ask(subject, progress).record(
            subject,
            store=str(captures_folder()),
            progress=progress,
            facts={"spec": self.spec, "command": self.asked.command()},
        )
        config.keep(record, self.folder)
        return self.folder, record

    def show(self, output: JobOutput, table: Callable[[Record], Iterator[str]] | None = None) -> int:
        """Carry the job out and print its verdicts, or print its price; the exit code."""
        if output.dry_run:
            from llmgeom.commands.dry_run import lines, price

            cost = price(self)
            print_json(cost) if output.json else click.echo("\n".join(lines(cost)))
            return 0
        return show_record(lambda _, progress: self.perform(progress), self.asked, output, table)
