"""`llmgeom report`: print and draw one finished run, or compare several."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmgeom.commands.config import Config, command
from llmgeom.commands.folders import safe
from llmgeom.commands.output import VerdictOutput, print_json, show
from llmgeom.errors import UserError
from llmgeom.files import digest, make_folder, write_whole
from llmgeom.flags import argument, flag

if TYPE_CHECKING:
    from llmgeom.record import Record
    from llmgeom.reports.comparison import Comparison

LONGEST = 50  # characters of a page's name that say which runs it compares


@dataclass(frozen=True)
class RunConfig(Config):
    """The options of `llmgeom report`."""

    runs: tuple[str, ...] = argument()
    out: str | None = flag(
        None, "The page. [default: report.html in the run folder; for several: compared-OTHERS.html in the first one]"
    )
    table: bool = flag(False, "Print every number; of several runs with its p-values, and what was not compared.")
    json: bool = flag(False, "Print one JSON object instead.")
    verbose: int = flag(0, "One run: print every reason and the self-check. Twice: tracebacks too.", short="-v")


@command(
    RunConfig, examples=["llmgeom report runs/410m-math", "llmgeom report runs/410m-math runs/1b-math --out both.html"]
)
def main(config: RunConfig) -> int:
    """Print the verdicts of a finished run and draw its page, or the differences of several. Loads no model.

    Differences need runs on the same prompts: scan the others with --prompts-from RUN. Other runs are drawn on one page
    without differences, together-OTHERS.html. Another comparison with the first run has a page of its own.
    """
    from llmgeom.record import Record
    from llmgeom.reports import page
    from llmgeom.reports.steps import steps_page

    loaded = {run: Record.load_all(run) for run in config.runs}
    records = [record for run in config.runs for record in loaded[run].values()]
    comparison, name, lines = _compared(config, loaded) if len(loaded) > 1 else (None, "report.html", [])
    first = next(iter(loaded))
    path = Path(config.out or Path(first) / name)
    # The snapshots of `llmgeom dynamics` lie inside its run folder.
    inside = [at.parent for at in Path(first).glob("step*/record.json")]
    steps = {int(at.name[4:]): at for at in inside if re.fullmatch(r"step\d{1,18}", at.name)}
    if len(records) == 1 and steps:
        html = steps_page(records[0], {step: Record.load_one(at) for step, at in sorted(steps.items())})
    else:
        html = page(records, comparison)
    make_folder(path.parent)
    write_whole(path, html.encode())
    if len(config.runs) == 1:
        output = VerdictOutput(json=config.json, table=config.table, verbose=config.verbose)
        return show(Path(config.runs[0]), records, output, page=path)
    if comparison and config.json:
        print_json(asdict(comparison) | {"report": str(path)})
    else:
        click.echo("\n".join([*lines, f"page: {path}"]))
    return 0


def _compared(
    config: RunConfig, loaded: Mapping[str, Mapping[str, Record]]
) -> tuple[Comparison | None, str, list[str]]:
    """The comparison of several runs, the name of its page, and the lines to print.

    There is no comparison of runs on different prompts: they are drawn together, and a line says why. With --json that
    is refused. The page's name says the runs after the first: other runs give another name, the same ones the same.
    """
    from llmgeom.reports.comparison import compare

    places = [(str(Path(run) / name), record) for run in config.runs for name, record in loaded[run].items()]
    folders = [folder for folder, _ in places]
    # Folders next to the first one are written as they are called. Where that could be two comparisons, or no file
    # name, a hash of where they are is added; it is of their places relative to the first, which may move together.
    first, *further = map(os.path.realpath, config.runs)
    away = [Path(os.path.relpath(run, first)).as_posix() for run in further]
    names = [Path(run).name for run in further]
    others = "+".join(map(safe, names))
    plain = [f"../{name}" for name in names] == away and "+".join(names) == others
    if not plain or len(others) > LONGEST:
        others = f"{others[:LONGEST]}-{digest(away)[:8]}"
    try:
        comparison = compare([record for _, record in places], folders)
    except UserError as refusal:
        # A folder of several scans never compares: they are of different prompts.
        several = [f"{run} holds {', '.join(of_run)}" for run, of_run in loaded.items() if len(of_run) > 1]
        why = "; ".join([*several, f"give one of each, e.g. {folders[0]}"]) if several else str(refusal)
        if config.json:
            raise UserError(why) from refusal
        # Under another name, so that no earlier page with differences is replaced by one without.
        return None, f"together-{others}.html", [f"drawn together, without differences: {why}"]
    lines = comparison.lines() if config.table else comparison.brief()
    return comparison, f"compared-{others}.html", lines
