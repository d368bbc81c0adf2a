"""What a command prints: flags of its output, the table of verdicts, or one JSON object."""

from __future__ import annotations

import io
import json
import logging
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmgeom.errors import UserError
from llmgeom.flags import output_flag
from llmgeom.progress import bar, first_word
from llmgeom.result import WORDS

if TYPE_CHECKING:
    from llmgeom.record import Record

FAILING = (*WORDS, "unmeasured")
DIGEST_WIDTH, FILE_WIDTH = 100, 150  # columns
# A claim's word is a chip; the colour repeats the outcome, never the sign.
STYLES = {
    "holds": "bold white on blue",
    "small": "blue",
    "ruled out": "white on grey37",
    "opposite": "bold white on dark_orange3",
    "open": "black on khaki1",
}
# What the self-check compares, and in which unit.
CHECKED = {
    "logits": "nats in log-probabilities",
    "rows": "of the output in attention",
    "residual": "of the stream after a layer",
}


@dataclass(frozen=True)
class Output:
    """How a command prints its result."""

    json: bool = output_flag(False, "Print one JSON object instead of the table.")
    quiet: bool = output_flag(False, "Show no progress.", short="-q")

    @property
    def silent(self) -> bool:
        """Whether no progress is shown."""
        return self.quiet or self.json


@dataclass(frozen=True)
class VerdictOutput(Output):
    """How a command prints its verdicts, and which of them make it fail."""

    verbose: int = output_flag(0, "Print every reason and the self-check. Twice: tracebacks too.", short="-v")
    table: bool = output_flag(False, "Print every number with its interval and its control.")
    fail_on: tuple[str, ...] = output_flag(
        (), f"Exit with 3 if a verdict is one of: {', '.join(FAILING)}. Repeat, or put commas between."
    )

    def __post_init__(self) -> None:
        words = tuple(word.strip() for text in self.fail_on for word in text.split(","))
        for word in words:
            if word not in FAILING:
                raise UserError(f"--fail-on {word}: expected one of {', '.join(FAILING)}")
        object.__setattr__(self, "fail_on", words)


def print_json(body: dict[str, Any]) -> None:
    """One JSON object on standard output, with its schema and, unless the body says another, the status "ok"."""
    click.echo(json.dumps({"schema_version": 1, "status": "ok", **body}, sort_keys=True, ensure_ascii=False))


@contextmanager
def _logged(verbose: int) -> Iterator[None]:
    """With -v, what the run says of itself is printed at its end: where edited passes were whole ones, say."""
    log, text = logging.getLogger("llmgeom"), io.StringIO()
    handler, level = logging.StreamHandler(text), log.level
    if verbose:
        log.addHandler(handler)
        log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        for line in dict.fromkeys(text.getvalue().splitlines()):
            click.echo(f"llmgeom: {line}", err=True)


def show_record(
    perform: Callable[..., tuple[Path, Record]],
    config: Any,
    output: VerdictOutput,
    table: Callable[[Record], Iterable[str]] | None = None,
) -> int:
    """Perform a run that makes one record, and print it, below a table of its own if it has one."""
    first_word(f"{config.VERB}{f' of {config.model}' if hasattr(config, 'model') else ''}: loading", output.silent)
    with _logged(output.verbose), bar(output.silent):
        out, record = perform(config)
    if table and not output.json:
        click.echo("\n".join([*table(record), ""]))
    return show(out, [record], output)


def show(
    out: Path, records: Sequence[Record], output: VerdictOutput, page: Path | None = None, between: Sequence[str] = ()
) -> int:
    """Print the verdicts; returns the exit code, 3 if --fail-on names one of them.

    Args:
        between: Lines between what is the case and the claims.
        page: The page, unless it is the report.html of the run folder.
    """
    from llmgeom.reports.table import labels, rows, warnings_of

    page = page or out / "report.html"
    verdicts: set[str] = {h.verdict for record in records for m in record.results.values() for h in m.estimates}
    verdicts |= {"unmeasured"} if any(record.unmeasured for record in records) else set()
    failed = sorted(verdicts & set(output.fail_on))
    if output.json:
        named = zip(labels(records), records, strict=True)
        body: dict[str, Any] = {"status": "failed" if failed else "ok", "run_dir": str(out), "report": str(page)}
        body |= {"controls": [{"record": label, "draws": record.facts.get("nulls")} for label, record in named]}
        print_json(body | {"verdicts": [row.numbers() for row in rows(records)], "warnings": warnings_of(records)})
    else:
        _print(records, output, between)
        click.echo(f"page: {page}")
    if failed:
        click.echo(f"llmgeom: --fail-on: these verdicts were found: {', '.join(failed)}", err=True)
    return 3 if failed else 0


def _print(records: Sequence[Record], output: VerdictOutput, between: Sequence[str]) -> None:
    """The digest of the run; with --table every number, with -v every reason."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from llmgeom.reports.digest import digest, reasons
    from llmgeom.reports.table import COLUMNS, rows

    terminal = sys.stdout.isatty()
    console = Console(width=None if terminal else FILE_WIDTH, highlight=False)
    for record in records if output.table else ():  # cells wrap on a narrow terminal, and do not wrap in a file
        grid = Table(
            box=None, header_style="bold", padding=(0, 2, 0, 0), title_justify="left", title=Text(record.title)
        )
        for title in COLUMNS.values():
            grid.add_column(title, overflow="fold")
        group = None
        for row in (row for row in rows([record]) if row.h):
            if group != (group := "claims" if row.claim else row.probe):
                grid.add_row(Text(group, style="bold"))
            grid.add_row(*(Text(getattr(row, key)) for key in COLUMNS))
        console.print(grid)
        console.print()
    width = min(DIGEST_WIDTH, console.width) if terminal else DIGEST_WIDTH
    for line in digest(records, width, not output.verbose, between):  # -v prints each warning below
        styled = Text()
        for word, text in line:
            styled.append(text, STYLES.get(word, ""))
        styled.rstrip()
        console.print(styled, soft_wrap=True)
    if output.verbose:
        check: Any = records[0].subject.get("self_check")  # what the check at load found (`llmgeom.model.self_check`)
        said = check or "this run loaded no model, so there is none"
        if isinstance(check, dict):
            parts = [f"{check[key]:.2g} {words}" for key, words in CHECKED.items() if key in check]
            listed = " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))
            writes = f"; writes to the residual stream are {check['writes']}" if check.get("writes") else ""
            said = f"on two random sequences, captures differ from the model itself by at most {listed}{writes}"
        for text in [*reasons(records), f"self-check: {said}"]:
            folded = textwrap.fill(text, width, subsequent_indent="  ", break_on_hyphens=False)
            console.print(Text(folded), soft_wrap=True)
