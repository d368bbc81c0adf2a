"""What a command prints: flags of its output, the table of verdicts, or one JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from llmgeom.flags import flag
from llmgeom.progress import bar

if TYPE_CHECKING:
    from llmgeom.record import Record

COLUMNS = {
    "name": "metric",
    "value": "value",
    "interval": "95 % interval",
    "null": "95 % band of the null",
    "p": "p",
    "n": "n",
    "verdict": "verdict",
}


@dataclass(frozen=True)
class Output:
    """How a command prints its result."""

    json: bool = flag(False, "Print one JSON object instead of the table.", group="Output")
    quiet: bool = flag(False, "Show no progress.", short="-q", group="Output")

    @property
    def silent(self) -> bool:
        """Whether no progress is shown."""
        return self.quiet or self.json


@dataclass(frozen=True)
class VerdictOutput(Output):
    """How a command prints its verdicts, and which of them make it fail."""

    verbose: int = flag(0, "Print every reason and the self-check. Twice: tracebacks too.", short="-v", group="Output")
    fail_on: tuple[Literal["FAIL", "INCONCLUSIVE", "not above null", "undecided", "unmeasured"], ...] = flag(
        (), "Exit with 3 if a verdict is this. Repeat for several.", group="Output"
    )


def print_json(body: dict[str, Any]) -> None:
    """One JSON object on standard output."""
    click.echo(json.dumps(body, sort_keys=True, ensure_ascii=False))


def show_record(
    perform: Callable[..., tuple[Path, Record]],
    config: Any,
    output: VerdictOutput,
    table: Callable[[Record], Iterable[str]] | None = None,
) -> int:
    """Perform a run that makes one record, and print it, below a table of its own if it has one."""
    with bar(output.silent) as progress:
        out, record = perform(config, progress)
    if table and not output.json:
        click.echo("\n".join([*table(record), ""]))
    return show(out, [record], output)


def show_rows(perform: Callable[..., tuple[Path, Any]], config: Any, output: Output) -> int:
    """Perform a run whose result prints its own lines, and print them with the path of the page."""
    with bar(output.silent) as progress:
        out, result = perform(config, progress)
    if output.json:
        print_json({"schema_version": 1, "run_dir": str(out), "report": str(out / "report.html"), **result.to_dict()})
    else:
        click.echo("\n".join([*result.lines(), f"page: {out / 'report.html'}"]))
    return 0


def show(out: Path, records: Sequence[Record], output: VerdictOutput, more: dict[str, Any] | None = None) -> int:
    """Print the verdicts; returns the exit code, 3 if --fail-on names one of them."""
    from llmgeom.reports import table

    verdicts = {h.verdict for record in records for m in record.results.values() for h in m.estimates}
    verdicts |= {"unmeasured"} if any(record.unmeasured for record in records) else set()
    failed = sorted(verdicts & set(output.fail_on))
    if output.json:
        print_json(
            {
                "schema_version": 1,
                "status": "failed" if failed else "ok",
                "run_dir": str(out),
                "report": str(out / "report.html"),
                "verdicts": table(records),
                "warnings": [warning for record in records for warning in record.warnings],
                **(more or {}),
            }
        )
    else:
        _print_tables(records, output.verbose > 0)
        click.echo(f"page: {out / 'report.html'}")
    if failed:
        click.echo(f"llmgeom: --fail-on: these verdicts were found: {', '.join(failed)}", err=True)
    return 3 if failed else 0


def _print_tables(records: Sequence[Record], verbose: bool) -> None:
    """One table for each record; cells wrap on a narrow terminal, and do not wrap in a file."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from llmgeom.reports import table

    console = Console(width=None if sys.stdout.isatty() else 150)
    for record in records:
        grid = Table(
            box=None, header_style="bold", padding=(0, 2, 0, 0), title_justify="left", title=Text(record.title)
        )
        for title in COLUMNS.values():
            grid.add_column(title, overflow="fold")
        rows, group = table([record]), None
        for row in rows:
            if row["verdict"] == "not measured":
                continue
            if group != (group := "claims of the papers" if row.get("claim") else row["probe"]):
                grid.add_row(Text(group, style="bold"))
            grid.add_row(*(Text(row[key]) for key in COLUMNS))
        console.print(grid)
        for row in rows:
            if verbose or row["verdict"] in ("undecided", "INCONCLUSIVE", "not measured"):
                console.print(Text(f"{row['name']}: {row['verdict']}, {row['why']}"))
        for warning in record.warnings:
            console.print(Text(f"warning: {warning}"))
        console.print()
    if verbose:
        console.print(Text(f"self-check: {records[0].subject.get('self_check')}"))
