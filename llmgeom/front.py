"""The front door for Python: load a model, and scan it as the command does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmgeom.errors import UserError
from llmgeom.model.subject import Subject
from llmgeom.progress import Progress, bar
from llmgeom.record import Record, Records


def load(model: str, revision: str | None = None, **options: Any) -> Subject:
    """A model, checked and described: `llmgeom.load("pocket:pythia")`.

    Args:
        model: `pocket:NAME`, a folder or a hub id.
        revision: A branch, tag or commit of a hub model.
        options: Of `Subject.load`: dtype, device, quantize, device_map, offline, trust_remote_code, backend.

    Raises:
        UserError: With the remedy.
    """
    return Subject.load(model, revision, **options)


def scan(
    subject: Subject | str, *domains: str, out: str | Path | None = None, quiet: bool = True, **options: Any
) -> Record | Records:
    """The scan of `llmgeom scan`: the same record, byte for byte, but for the time that it took.

    Args:
        subject: A model that `load` returned, or its name.
        domains: Prompt domains; mixed and math where none is given.
        out: A folder for the run: records and page, as the command writes them. Nothing is written without it.
        quiet: Show no progress.
        options: Fields of the command's configuration: n, probes, nulls, seed, tasks, prompts_file, batch_tokens ...

    Returns:
        The record; of several sets of prompts all of them, by place or name.

    Raises:
        UserError: A flag's value is refused, with the remedy; or the model was made in memory and has no place on the
            disk, so that no command repeats the scan: `llmgeom.run.run_probes` measures it.
    """
    from llmgeom.commands import scan as command

    name = subject if isinstance(subject, str) else subject.name
    known = {field.field for field in command.config.flags(command.RunConfig)}
    if unknown := sorted(set(options) - known):
        raise UserError(f"scan has no option {unknown[0]!r}; it has {', '.join(sorted(known))}")
    for key in ("probes", "tasks"):
        if isinstance(options.get(key), str):
            options[key] = (options[key],)
    asked = command.RunConfig(model=name, domains=domains, out=None if out is None else str(out), **options)
    try:
        plan = command.prepare(asked, write=out is not None)
    except UserError as refusal:
        if isinstance(subject, str) or "files" in subject.facts:
            raise
        raise UserError(f"{name} is a model in memory: measure it with llmgeom.run.run_probes ({refusal})") from refusal
    with bar(quiet, plan.shares) as progress:
        records = _records(command, plan, None if isinstance(subject, str) else subject, out is not None, progress)
    return next(iter(records.values())) if len(records) == 1 else Records(records)


def _records(
    command: Any, plan: Any, subject: Subject | None, write: bool, progress: Progress | None
) -> dict[str, Record]:
    if write:
        made = [record for _, record in command.perform(plan, progress, subject)]
        return dict(zip(plan.pools, made, strict=True))
    subject = subject or plan.request.load(plan.located)
    found = {}
    for name in plan.pools:
        drawn = command.sampled(plan, subject, name, progress)
        found[name] = command.scanned(plan, subject, name, drawn, progress)
    return found
