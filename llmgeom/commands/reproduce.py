"""`llmgeom reproduce`: a paper's published numbers measured again, its audit, its primitives, or the predictions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import click

from llmgeom.commands.config import DrawsConfig, LoadConfig, check_folder, command, keep
from llmgeom.commands.output import Output, print_json, show_rows
from llmgeom.errors import UserError
from llmgeom.files import digest
from llmgeom.flags import argument, flag, model_flag
from llmgeom.papers import tables
from llmgeom.papers.published_numbers import Entry, Size, table
from llmgeom.papers.tables import TABLES, Options, Source, Table
from llmgeom.provenance import took, versions
from llmgeom.record import Record
from llmgeom.result import Measured

SIZES: dict[str, Size] = {"small": "small", "paper": "full"}  # by --scale
READS = {"models", "dtype", "device", "device_map", "backend", "offline", "trust_remote_code", "revision", "quantize"}
DRAWS = {"n", "limit", "nulls", "controls", "seed"}
# (paper, --only) -> the flags that it takes, besides --out.
TAKES: dict[tuple[str, str | None], set[str]] = {
    ("paper1", None): {"quick", "dry_run", "scale", "device"},
    ("paper1", "primitives"): {"quick", "dry_run", "seeds", "dose_seeds"},
    ("paper2", None): {"quick", "dry_run", "n", "nulls", "seed"} | READS,
    ("paper3", None): {"quick", "dry_run", "scale"} | READS | DRAWS,
    ("paper3", "audit"): {"quick", "dry_run", "scale"} | READS | DRAWS,
    ("predictions", None): {"quick", "dry_run"} | READS | DRAWS,
}


@dataclass(frozen=True)
class RunConfig(DrawsConfig, LoadConfig):
    """The options of `llmgeom reproduce`."""

    VERB: ClassVar[str] = "reproduce"

    paper: Literal["paper1", "paper2", "paper3", "predictions"] = argument(metavar="WHAT", kw_only=True)
    only: Literal["primitives", "audit"] | None = flag(
        None, "One table: primitives of paper1, audit of paper3. [default: the numbers, and the audit]"
    )
    scale: Literal["small", "paper"] = flag("small", "paper: the published sizes, on one GPU.")
    quick: bool = flag(False, "A few minutes instead of up to an hour on two cores.")
    dry_run: bool = flag(False, "Print the plan only: what would run, and what not.")
    models: tuple[str, ...] = model_flag((), "pocket:NAME, a folder or a hub id. Repeat for several.", name="--model")
    revision: str | None = model_flag(None, "Branch, tag or commit of a hub model.")
    quantize: Literal["8bit", "4bit"] | None = model_flag(None, "Quantise with bitsandbytes.")
    seeds: int = flag(3, "Primitives: trainings of each cell.", least=2, most=1000)
    dose_seeds: int = flag(5, "Primitives: trainings of each dose of corrupted labels.", least=2, most=1000)

    def __post_init__(self) -> None:
        super().__post_init__()
        what, words = (self.paper, self.only), self.paper + (f" --only {self.only}" if self.only else "")
        if what not in TAKES:
            raise UserError(f"reproduce {self.paper} has no table --only {self.only}; leave --only out")
        takes = {"paper", "only", "out"} | TAKES[what]
        if unused := [option.name for field, option in self.changed.items() if field not in takes]:
            raise UserError(f"reproduce {words} has no {unused[0]}; leave it out")
        if self.quick and self.scale == "paper":
            raise UserError("--quick and --scale paper exclude each other; leave one out")
        of_models = [option.name for field, option in self.changed.items() if field in READS | DRAWS]
        if self.paper == "paper2" and of_models and not self.models:
            raise UserError(f"reproduce paper2 takes {of_models[0]} with --model alone; leave it out, or name a model")

    @property
    def size(self) -> Size:
        """Which test of each entry is measured."""
        return SIZES[self.scale]

    @property
    def options(self) -> Options:
        """The options of the papers' modules."""
        return Options("quick" if self.quick else self.size, self.device, self.seeds, self.dose_seeds)

    @property
    def tables(self) -> tuple[type[Table], ...]:
        """The tables of rows that are made."""
        names = {"predictions": ("predictions",), "paper3": ("numbers", "audit")}.get(self.paper, ("numbers",))
        names = {"audit": ("audit",), "primitives": ()}.get(self.only or "", names)
        return tuple(TABLES[name] for name in names)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The rows of the TOML files that the tables are made of."""
        papers = ("paper3", "paper2", "paper1") if self.paper == "predictions" else (self.paper,)
        entries = tuple(entry for paper in papers for entry in table(paper))
        if self.paper == "paper2" and self.models:
            return tuple(entry for entry in entries if (test := entry.small) and test.measure == "law")
        return entries

    @property
    def spec(self) -> str:
        """Hash of everything that determines the numbers; more seeds of primitives continue in the same folder."""
        left_out = ("out", "device", "offline", "dry_run", "seeds", "dose_seeds")
        return digest({name: value for name, value in asdict(self).items() if name not in left_out})

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.out or f"runs/{self.only or self.paper}-{self.spec[:8]}")


@command(
    RunConfig,
    Output,
    examples=[
        "llmgeom reproduce paper1 --quick",
        "llmgeom reproduce paper1 --only primitives",
        "llmgeom reproduce paper3 --model EleutherAI/pythia-410m --model microsoft/phi-2",
        "llmgeom reproduce predictions --model EleutherAI/pythia-410m",
    ],
)
def main(settings: RunConfig, output: Output) -> int:
    """Measure every published number of a paper, and compare: a word for each that is tested, and why.

    WHAT: paper1, paper2, paper3, or predictions, which tests what the papers predict on one model.
    """
    if settings.dry_run:
        print_json({"plan": planned(settings)}) if output.json else click.echo(
            "\n".join(tables.wrapped(planned(settings)))
        )
        return 0
    return show_rows(perform, settings, output)


@dataclass(frozen=True)
class Found:
    """The tables of all subjects, with lines to stand above them and rows of other kinds."""

    settings: RunConfig
    tables: tuple[Table, ...]
    above: tuple[str, ...]
    more: tuple[dict[str, Any], ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        rows = [row for table in self.tables for row in table.to_dict()]
        return self.settings.values("paper", "only", "scale", "quick") | {"rows": [*rows, *self.more]}

    def lines(self) -> list[str]:
        """Lines for a terminal."""
        of = [[table for table in self.tables if type(table) is kind] for kind in self.settings.tables]
        return [*self.above, *(line for group in of for line in tables.lines(group))]


def perform(settings: RunConfig) -> tuple[Path, Found]:
    """Run what is not yet in the run folder, judge every row, write the record and the page.

    Returns:
        The run folder, and the tables.
    """
    started, out = time.time(), settings.folder
    check_folder(out, settings.spec)
    sources = list(_sources(settings, out))
    tables_of: list[Table] = []
    results: dict[str, Measured] = {}
    for source in sources:
        made = [kind(source.label, tuple(_rows(kind, settings, source))) for kind in settings.tables]
        results |= {_section(settings, table): table.section() for table in made} | dict(source.sections())
        tables_of += made
    warnings = dict.fromkeys(warning for source in sources for warning in source.warnings())
    record = Record(
        results=results,
        unmeasured={
            f"{_section(settings, table)}: {row.entry.id}": row.why
            for table in tables_of
            for row in table.contents
            if row.estimate is None
        },
        prompts={},
        subject={"name": ", ".join(source.label for source in sources)},
        source={"name": f"the claims of {settings.paper}", "kind": "claims", "scale": settings.scale},
        facts={"spec": settings.spec, "command": settings.command(), "versions": versions()},
        warnings=(*["quick: a fraction of the budget, and fewer entries"] * settings.quick, *warnings),
        run=took(started),
    )
    keep(record, out)
    above = tuple(line for source in sources for line in source.lines())
    more = tuple(row for source in sources for row in source.rows())
    return out, Found(settings, tuple(tables_of), above, more)


def planned(settings: RunConfig) -> list[str]:
    """The plan of a run, from the tables alone: its runs, and the entries that it would not test."""
    lines = [f"{replace(settings, dry_run=False).command()}: in {settings.folder}", *_plan(settings)]
    if Table not in settings.tables:
        return lines
    skipped = {
        entry.id: why for entry in settings.entries if (why := tables.not_tested(entry, settings.size, settings.quick))
    }
    lines[0] += f", tests {len(settings.entries) - len(skipped)} of {len(settings.entries)} printed numbers"
    return [*lines, *(f"NOT TESTED {name}: {why}" for name, why in skipped.items())]


def _module(settings: RunConfig) -> Any:
    """The module that trains the models of a table; None if the table is about models that are named."""
    from llmgeom.papers import paper1, paper2, primitives

    if settings.only == "primitives":
        return primitives
    return {"paper1": paper1, "paper2": paper2}.get("" if settings.models else settings.paper)


def _sources(settings: RunConfig, out: Path) -> Iterator[Source]:
    if module := _module(settings):
        return module.sources(settings.options, _tests(settings), out)
    from llmgeom.commands import paper_runs

    runs = paper_runs.next_steps if settings.paper == "paper2" else paper_runs.language_models
    return runs(settings, out)


def _plan(settings: RunConfig) -> list[str]:
    if module := _module(settings):
        return module.planned(settings.options, _tests(settings))
    from llmgeom.commands import paper_runs

    return paper_runs.planned(settings)


def _tests(settings: RunConfig) -> list:
    """The tests that are measured unless they cannot be."""
    tested = [entry for entry in settings.entries if not tables.not_tested(entry, settings.size, settings.quick)]
    return [test for entry in tested if (test := entry.test(settings.size))]


def _rows(kind: type[Table], settings: RunConfig, source: Source) -> Sequence[tables.Row]:
    if kind is Table:
        return tables.published(settings.entries, source, settings.size, settings.quick)
    return (tables.audit if kind is tables.Audit else tables.predictions)(settings.entries, source)


def _section(settings: RunConfig, table: Table) -> str:
    name = settings.paper if type(table) is Table else table.NAME
    return name if name == table.label else f"{name} {table.label}"
