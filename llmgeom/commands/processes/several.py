"""A record for each process, the profile of several, and one page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmgeom.commands import config
from llmgeom.commands.job import JobOutput, show_price
from llmgeom.commands.output import show
from llmgeom.commands.processes.request import RunConfig
from llmgeom.errors import UserError
from llmgeom.progress import Progress, bar, first_word, prefixed

if TYPE_CHECKING:
    from llmgeom.model import hub
    from llmgeom.model.subject import Subject
    from llmgeom.prompts.process import Process
    from llmgeom.record import Record
    from llmgeom.run import Question

OF_SULA = ("prior", "template", "protocol", "labels")  # flags that a process has no use for


def show_processes(settings: RunConfig, output: JobOutput) -> int:
    """Ask the model about every process, and print profile, words and page, or the price; the exit code."""
    if output.dry_run:
        from llmgeom.commands.dry_run.cost import price

        processes = chosen_processes(settings)
        place = Place.of(settings, processes)
        asks = [partial(_question, settings, process) for process in processes]
        return show_price(price(settings, place.located, asks, place.out), output)
    first_word(f"evidence of {settings.model}: drawing prompts, then the model", output.silent)
    with bar(output.silent) as progress:
        out, records = perform_processes(settings, progress)
    if len(records) > 1 and not output.json:
        click.echo("\n".join([*lines(records), ""]))
    return show(out, records, output)


def lines(records: Sequence[Record]) -> Iterator[str]:
    """The records of several processes as text: the profile where there is one, then every process by itself."""
    from llmgeom.probes.evidence import answers
    from llmgeom.probes.evidence.profile import PROFILE
    from llmgeom.reports.text import strips

    whole = [record for record in records if PROFILE in record.results]
    for record in whole:
        measured = record.results[PROFILE]
        yield f"{record.subject['name']}: skill over the best observer that does not infer (1 is exact)"
        yield from strips(measured, "shown", measured.ticks["part"], measured.arrays["skill"].tolist())
        yield ""
    yield "skill over the best constant, which knows only how much was shown"
    for record in records:
        if found := [h for m in record.results.values() for h in m.estimates if h.name == answers.SKILL]:
            h = found[0]
            yield f"{record.source['name']:26}{h.value:6.2f} [{h.low:.2f}, {h.high:.2f}] {h.verdict}"


def perform_processes(
    settings: RunConfig, progress: Progress | None = None, subject: Subject | None = None
) -> tuple[Path, list[Record]]:
    """Check, load, ask and save: a record for each process, the profile of several, and one page; (folder, records).

    Args:
        settings: the RunConfig of `llmgeom evidence`, with processes.
        progress: called as progress(stage, done, total).
        subject: the model; loaded unless given.

    Raises:
        UserError: an unknown process or one that cannot be; a flag of the SULA protocol; prompts that the model's
            tokenizer or longest input cannot take.
    """
    from llmgeom.cache.shards import captures_folder
    from llmgeom.files import digest
    from llmgeom.probes.evidence.profile import PROFILE, profile
    from llmgeom.reports.first_look import write_page

    def ask(subject: Subject, process: Process, facts: Mapping[str, Any]) -> Record:
        named = prefixed(progress, process.title)
        return _question(settings, process, subject).record(
            subject, store=str(captures_folder()), progress=named, facts=facts
        )

    processes = chosen_processes(settings)
    place = Place.of(settings, processes)
    records = place.records(settings, processes, "process", ask, subject)
    if len(records) > 1:
        whole = profile(records, {"spec": digest({"run": place.spec, "process": PROFILE})})
        if whole.results:
            whole.save(place.out / PROFILE)
            records.insert(0, whole)
    write_page(place.out / "report.html", records)
    return place.out, records


@dataclass(frozen=True)
class Place:
    """Where the model of a command is, the command's hash, and its run folder."""

    located: hub.Located
    spec: str
    out: Path

    @classmethod
    def of(cls, settings: RunConfig, processes: Sequence[Process], prefix: str = "") -> Place:
        """Locate the model; without `--out` the folder is named after the processes. Raises UserError."""
        from llmgeom.prompts.processes import names

        located = settings.locate()
        spec = settings.spec(located)
        titles = "+".join(process.title for process in processes)
        what = prefix + ("all-processes" if len(processes) == len(names()) else config.safe(titles))
        return cls(located, spec, Path(settings.out or config.run_folder(settings.model, located, what, spec)))

    def records(
        self,
        settings: RunConfig,
        processes: Sequence[Process],
        kind: str,
        make: Callable[[Subject, Process, Mapping[str, Any]], Record],
        subject: Subject | None = None,
    ) -> list[Record]:
        """A saved record of each process: in the run folder, or where there are several each in a folder of its own.

        Args:
            kind: What is made of a process; a folder holds one kind.
            make: Called as make(subject, process, facts).
            subject: The model; loaded unless given.

        Raises:
            UserError: A folder holds another run.
        """
        from llmgeom.files import digest

        specs = [digest({"run": self.spec, kind: process.title}) for process in processes]
        several = len(processes) > 1
        folders = [self.out / config.safe(process.title) if several else self.out for process in processes]
        for folder, spec in zip(folders, specs, strict=True):
            config.check_folder(folder, spec)
        subject = settings.subject(self.located, subject)
        records = []
        for process, folder, spec in zip(processes, folders, specs, strict=True):
            records.append(make(subject, process, {"spec": spec, "command": settings.command()}))
            records[-1].save(folder)
        return records


def chosen_processes(settings: RunConfig) -> list[Process]:
    """The processes of a configuration, `all` for every one. Raises UserError."""
    from llmgeom.prompts.processes import load_process, names

    defaults = {f.name: f.default for f in fields(settings)}
    for name in OF_SULA:
        if getattr(settings, name) != defaults[name]:
            raise UserError(
                f"--{name} belongs to the SULA protocol: with --process give the process's own fields, "
                "e.g. two-point:reliability=0.8"
            )
    specs = [spec for given in settings.processes for spec in (names() if given == "all" else (given,))]
    if settings.ks and max(settings.ks) == 0:
        raise UserError("--k 0: without an observation there is nothing to weigh; give a number above 0, too")
    processes = list({process.title: process for process in map(load_process, specs)}.values())
    for process in processes:
        process.check(settings.n, settings.ks, settings.surfaces)
    return processes


def _question(settings: RunConfig, process: Process, subject: Subject) -> Question:
    """What a process asks of a model. Raises UserError: prompts that it cannot read."""
    from llmgeom.probes.evidence import questions

    questions.check_tokenizer(subject)
    options = {"ks": settings.ks, "surfaces": settings.surfaces, "positions": subject.facts["positions"]}
    sample = partial(process.sample, settings.n, settings.seed, subject.tokenizer, **options)
    batch, samples = sample(), {name: sample(condition=name) for name in process.conditions}
    draws = {"seed": settings.seed, "nulls": settings.nulls, "batch_tokens": settings.batch_tokens}
    return questions.question_of_process(batch, samples, **draws)
