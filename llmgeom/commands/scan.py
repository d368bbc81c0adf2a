"""`llmgeom scan`, and the same from Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmgeom.commands import config
from llmgeom.commands.job import show_price
from llmgeom.commands.output import VerdictOutput, show
from llmgeom.commands.scans.perform import perform, scanned, together
from llmgeom.commands.scans.plan import prepare
from llmgeom.commands.scans.request import RunConfig
from llmgeom.errors import UserError, brief, unknown
from llmgeom.flags import flags, output_flag, places_text, plain
from llmgeom.progress import bar, first_word
from llmgeom.record import Record, Records

if TYPE_CHECKING:
    from llmgeom.model.subject import Subject


LISTED = frozenset(option.field for option in flags(RunConfig) if option.several)  # one name may be given alone


@dataclass(frozen=True)
class ScanOutput(VerdictOutput):
    """What `llmgeom scan` prints."""

    dry_run: bool = output_flag(False, "Print the plan only: tokens, memory, minutes. Reads no weights.")
    preview: bool = output_flag(False, "Read no control: show the values of the model's own pass, without verdicts.")


@config.command(
    RunConfig,
    ScanOutput,
    examples=["llmgeom scan --model EleutherAI/pythia-410m --domain math --n 75 --out runs/410m-math"],
)
def main(settings: RunConfig, output: ScanOutput) -> int:
    """Measure how the geometry of a model's activations relates to its uncertainty, and draw a page."""
    if settings.probes == ():
        raise UserError("--probes names no probe; leave it out for all of them, or see `llmgeom list probes`")
    first_word(f"scan of {settings.model}: reading prompts, then the model", output.silent or output.dry_run)
    plan = prepare(settings, write=not output.dry_run)
    # Before the run, which may take hours; it repeats them as warnings of the record.
    for name in plan.pools if not output.silent else ():
        for doubt in plan.doubts(name):
            remedy = f"`llmgeom train {name}` makes a model that was trained on it"
            click.echo(f"llmgeom: warning: {settings.model} on {name}: {doubt}; {remedy}", err=True)
    if output.dry_run:
        from llmgeom.commands.dry_run import Weightless, cost
        from llmgeom.commands.scans.perform import question
        from llmgeom.commands.scans.samples import sampled

        who = Weightless.found(settings, plan.located)
        asked = (question(plan, sampled(plan, who, name)) for name in plan.pools)
        return show_price(cost(who, asked, settings.device, plan.out), output)
    if output.preview and all((plan.folder(name) / "record.json").exists() for name in plan.pools):
        raise UserError(
            f"--preview: {plan.out} holds the whole run, and a preview would replace its page; leave --preview out"
        )
    with bar(output.silent, plan.shares):
        records = [record for _, record in perform(plan, preview=output.preview)]
    if not records:  # another process of the launcher measures
        return 0
    return show(plan.out, records, output)


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
            disk, so that no command repeats the scan (`llmgeom.run.run_probes` measures it); or an edit has no spec.
    """
    from llmgeom.model.subject import Subject

    if not isinstance(subject, str | Subject):
        raise UserError(f"scan({brief(subject)}): expected a model that llmgeom.load returned, or its name")
    for domain in domains:
        if not isinstance(domain, str) or Path(domain).is_file():
            raise UserError(
                f"scan({brief(domain)}): expected the names of domains; prompts of your own are a file, "
                f"prompts_file={(domain if isinstance(domain, str) else 'mine.csv')!r}"
            )
    name, out = subject if isinstance(subject, str) else subject.name, str(out) if out else None
    options = {key: plain(value) for key, value in options.items()}
    _check_options(options)
    options |= {} if isinstance(subject, str) else _of_subject(subject, options)
    options |= {key: (options[key],) for key in LISTED if isinstance(options.get(key), str)}
    options |= {key: places_text(options[key]) for key in ("layers", "positions") if key in options}
    settings = RunConfig(model=name, domains=domains, out=out, **options)
    plan = prepare(settings, write=out is not None, subject=None if isinstance(subject, str) else subject)
    from llmgeom.commands.scans.samples import sampled

    with bar(quiet, plan.shares):
        read = None if isinstance(subject, str) else subject
        if out is not None:
            records = dict(zip(plan.pools, (record for _, record in perform(plan, read)), strict=True))
        else:
            read = plan.subject(read)
            drawn = {name: sampled(plan, read, name) for name in plan.pools}
            found = together([scanned(plan, read, name, drawn[name]) for name in plan.pools])
            records = dict(zip(plan.pools, found, strict=True))
    return next(iter(records.values())) if len(records) == 1 else Records(records)


def _check_options(options: Mapping[str, Any]) -> None:
    """Raises UserError for an unknown keyword of `scan`, and for prompts that are not a file."""
    called = {option.name.removeprefix("--").replace("-", "_"): option.field for option in flags(RunConfig)}
    placed = {"model", "domains"}
    known = sorted({"out", "quiet", *called.values()} - placed)
    for name in sorted(options):
        if called.get(name, name) in placed:
            raise UserError(f"scan has no option {name!r}: give the model first, then domains, scan(model, 'math')")
        if name not in known:
            raise unknown("option of scan", name, known, near=[called[name]] if name in called else ())
    prompts = options.get("prompts_file")
    if not isinstance(prompts, str | None):
        raise UserError(
            f"scan(prompts_file={brief(prompts)}): expected the name of one file; save prompts of your own in a file, "
            "e.g. mine.txt with one a line, and give prompts_file='mine.txt'"
        )


def _of_subject(subject: Subject, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a subject brings: how it was loaded, and whether it reads messages.

    Raises UserError if no record could say what the subject is, or an option says that it was loaded another way.
    """
    if not subject.as_read:
        raise UserError(
            f"{subject.name} is a model in memory, or was written to after it was loaded, and no command repeats its "
            "scan: use llmgeom.run.run_probes"
        )
    for edit in subject.edits:
        if not edit.spec:
            raise UserError(
                f"the edit at {edit.point} of layers {edit.layers} is a function that no record can name: "
                "give subject.edit(..., spec={...}), what it does as plain data"
            )
    loading = {option.field: option.default for option in flags(config.ModelConfig) if option.field != "model"}
    for name in loading.keys() & options.keys():
        if options[name] != (loaded := subject.options.get(name, loading[name])):
            raise UserError(
                f"scan({name}={options[name]!r}) of a subject that was loaded with {name}={loaded!r}: "
                f"load it with {name}={options[name]!r}"
            )
    return {**subject.options, **({"chat": True} if subject.facts.get("chat") else {})}
