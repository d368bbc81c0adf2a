"""The whole of `llmgeom reproduce paper1|paper2|paper3`: every published number beside ours, with a verdict."""

from __future__ import annotations

import dataclasses
import importlib
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import click

from llmgeom.commands.config import DrawsConfig, LoadConfig, check_folder, command, keep
from llmgeom.commands.output import Output, show_rows
from llmgeom.errors import UserError
from llmgeom.files import digest
from llmgeom.flags import argument, flag, flags
from llmgeom.papers import verdicts as judging
from llmgeom.papers.published_numbers import Check, Entry, Size, table
from llmgeom.papers.verdicts import Bench, Judged
from llmgeom.progress import Progress
from llmgeom.provenance import took, versions
from llmgeom.record import Record
from llmgeom.reports.text import grid, numbers, visible
from llmgeom.result import Measured

SIZES: dict[str, Size] = {"small": "small", "paper": "full"}  # by --scale
WIDTH = 116
_READS = {"models", "dtype", "device", "device_map", "backend", "offline", "trust_remote_code"}
_READS |= {"n", "limit", "nulls", "controls", "seed"}
_ONE_MODEL = _READS | {"revision", "quantize"}
# (paper, --only) -> the flags that it takes.
TABLES: dict[tuple[str, str | None], set[str]] = {
    ("paper1", None): {"quick", "dry_run", "scale", "device"},
    ("paper1", "primitives"): {"quick", "seeds", "dose_seeds"},
    ("paper2", None): {"quick", "dry_run"},
    ("paper3", None): {"quick", "dry_run", "scale"} | _READS,
    ("paper3", "audit"): _ONE_MODEL,
    ("predictions", None): _ONE_MODEL,
}
# (paper, --only) -> a module with a RunConfig and a `perform` of its own.
ONE_TABLE: dict[tuple[str, str | None], str] = {
    ("paper1", "primitives"): "llmgeom.papers.primitives",
    ("paper3", "audit"): "llmgeom.papers.audit",
    ("predictions", None): "llmgeom.papers.predictions",
}


@dataclass(frozen=True)
class RunConfig(DrawsConfig, LoadConfig):
    """What `llmgeom reproduce` is asked for."""

    VERB: ClassVar[str] = "reproduce"

    paper: Literal["paper1", "paper2", "paper3", "predictions"] = argument(metavar="WHAT", kw_only=True)
    only: Literal["primitives", "audit"] | None = flag(
        None, "One table: primitives of paper1, audit of paper3. [default: every published number]"
    )
    scale: Literal["small", "paper"] = flag("small", "Papers: paper runs the published sizes, on one GPU.")
    quick: bool = flag(False, "Papers: a few minutes instead of up to an hour on two cores.")
    dry_run: bool = flag(False, "Papers: print what would be run and what not; run nothing.")
    models: tuple[str, ...] = flag(
        (), "pocket:NAME, a folder or a hub id. Repeat for several, with paper3.", name="--model", group="Model"
    )
    revision: str | None = flag(None, "One model: branch, tag or commit of a hub model.", group="Model")
    quantize: Literal["8bit", "4bit"] | None = flag(None, "One model: quantise with bitsandbytes.", group="Model")
    seeds: int = flag(3, "Primitives: trainings of each cell.", least=2, most=1000)
    dose_seeds: int = flag(5, "Primitives: trainings of each dose of corrupted labels.", least=2, most=1000)

    def __post_init__(self) -> None:
        super().__post_init__()
        what = (self.paper, self.only)
        if what not in TABLES:
            raise UserError(f"reproduce {self.paper} has no table --only {self.only}; leave --only out")
        for one in flags(RunConfig):
            takes = one.field in ("paper", "only", "out") or one.field in TABLES[what]
            if not takes and getattr(self, one.field) != one.default:
                words = f"{self.paper} --only {self.only}" if self.only else self.paper
                raise UserError(f"reproduce {words} has no {one.name}; leave it out")
        if self.quick and self.scale == "paper":
            raise UserError("--quick and --scale paper exclude each other; leave one out")
        if len(self.models) > 1 and "revision" in TABLES[what]:
            raise UserError(f"--model {self.models[1]}: this table is of one model; paper3 takes several")

    @property
    def options(self) -> dict[str, Any]:
        """How each model is read, where it is not by default."""
        taken = _READS - {"models", "device"}
        return {one.field: value for one in flags(RunConfig)
                if one.field in taken and (value := getattr(self, one.field)) != one.default}  # fmt: skip

    @property
    def size(self) -> Size:
        return SIZES[self.scale]

    @property
    def spec(self) -> str:
        """Hash of what decides the numbers."""
        return digest({k: v for k, v in dataclasses.asdict(self).items() if k not in ("out", "device")})

    @property
    def folder(self) -> Path:
        return Path(self.out or f"runs/{self.paper}-{self.spec[:8]}")


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
def main(asked: RunConfig, output: Output) -> int:
    """Measure every published number of a paper, and compare: PASS, FAIL, INCONCLUSIVE or NOT TESTED, and why.

    WHAT: paper1, paper2, paper3, or predictions, which tests what the papers predict on one model.
    """
    if asked.dry_run:
        click.echo("\n".join(planned(asked)))
        return 0
    if (asked.paper, asked.only) not in ONE_TABLE:
        return show_rows(perform, asked, output)
    module = importlib.import_module(ONE_TABLE[asked.paper, asked.only])
    names = {one.field for one in flags(module.RunConfig)} & {one.field for one in flags(RunConfig)}
    values = {name: getattr(asked, name) for name in names}
    if asked.models:
        values["model"] = asked.models[0]
    return show_rows(module.perform, module.RunConfig(**values), output)


@dataclass(frozen=True)
class Found:
    """The table: entries by subject, lines to stand above it, and its entries as JSON."""

    asked: RunConfig
    rows: Mapping[str, tuple[Judged, ...]]
    above: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        told = [f.name for f in dataclasses.fields(Entry) if f.name not in ("small", "full")]
        return {
            **{name: getattr(self.asked, name) for name in ("paper", "scale", "quick")},
            "rows": [
                {
                    **{name: getattr(one.entry, name) for name in told},
                    "subject": label,
                    "asked": judging.asked(one.test, label),
                    "verdict": one.verdict,
                    "why": one.why,
                    "metric": dataclasses.asdict(one.estimate) if one.estimate else None,
                }
                for label, rows in self.rows.items()
                for one in rows
            ],
        }

    def lines(self) -> list[str]:
        """What a terminal shows: the table, then entry by entry what was printed, and why the verdict."""
        found = [*self.above]
        for label, rows in self.rows.items():
            head = ("ours", "95 %", "asked", "null or trivial", "n", "verdict")
            found += [*grid(label, head, [_cells(one, label) for one in rows]), ""]
        for place, one in enumerate(next(iter(self.rows.values()), ()), 1):
            said = [f"{place} {one.entry.id}: printed {one.entry.published}"]
            alike: dict[str, list[str]] = {}
            for label, rows in self.rows.items():
                alike.setdefault(f"{rows[place - 1].verdict}: {rows[place - 1].why}", []).append(label)
            said += [f"{', '.join(of)}: {why}" if len(alike) > 1 else why for why, of in alike.items()]
            said += [f"It contradicts itself: {one.entry.contradiction}"] * bool(one.entry.contradiction)
            found += textwrap.wrap(visible(". ".join(s.rstrip(".") for s in said)) + ".", WIDTH, subsequent_indent="  ")
        return found

    def measured(self, label: str) -> Measured:
        """As a section of a page."""
        rows = self.rows[label]
        return Measured(
            title=f"Published numbers of {self.asked.paper}",
            meaning="Each number that was printed, measured here, and what a predictor that does not infer or a model "
            "that was not trained would have. PASS, FAIL and INCONCLUSIVE are of the range that the entry asks for.",
            computed="See the definition of each entry below. Verdicts: two one-sided tests on the interval, Holm over "
            "all entries measured; FAIL where the interval excludes what is asked, by the declared tolerance.",
            null="Beside each value; what is asked to lie above or below a bound must clear its null, too.",
            failure_modes="An entry that fails here fails at this size and budget: where one is scale-free its "
            "definition says why it compares, where none is it is not tested.",
            estimates=tuple(one.estimate for one in rows if one.estimate),
            quantities={},
            arrays={},
            notes=tuple(_note(one) for one in rows),
        )


def perform(asked: RunConfig, progress: Progress | None = None) -> tuple[Path, Found]:
    """Run the cells that are not yet there, judge every entry, write the record and the page; (folder, table)."""
    started, entries, out = time.time(), table(asked.paper), asked.folder
    check_folder(out, asked.spec)
    rows: dict[str, tuple[Judged, ...]] = {}
    results: dict[str, Measured] = {}
    unmeasured: dict[str, str] = {}
    above: list[str] = []
    warnings: list[str] = []
    for bench in _module(asked.paper).benches(asked, _tests(asked), out, progress):
        rows[bench.label] = tuple(judging.judged(list(_posed(asked, entries, bench, progress)), bench.label))
        above += bench.lines()
        warnings += bench.warnings()
        name = f"{asked.paper} {bench.label}" if bench.label != asked.paper else bench.label
        results |= {name: Found(asked, rows).measured(bench.label), **bench.sections()}
        unmeasured |= {f"{name}: {one.entry.id}": one.why for one in rows[bench.label] if one.estimate is None}
    found = Found(asked, rows, tuple(above))
    record = Record(
        results=results,
        unmeasured=unmeasured,
        prompts={},
        subject={"name": ", ".join(rows)},
        source={"name": f"the claims of {asked.paper}", "kind": "claims", "scale": asked.scale},
        facts={"spec": asked.spec, "command": asked.command(), "versions": versions()},
        warnings=(*["quick: a fraction of the budget, and fewer entries"] * asked.quick, *dict.fromkeys(warnings)),
        run=took(started),
    )
    keep(record, out)
    return out, found


def planned(asked: RunConfig) -> list[str]:
    """What a run would do, from the tables alone: its cells, and the entries that it would not test."""
    entries, tests = table(asked.paper), _tests(asked)
    skipped = {one.id: why for one in entries if (why := _skipped(asked, one))}
    return [
        f"{asked.command()}: {len(tests)} of {len(entries)} entries, in {asked.folder}",
        *_module(asked.paper).planned(asked, tests),
        *(f"NOT TESTED {name}: {why}" for name, why in skipped.items()),
    ]


def _module(paper: str) -> Any:
    return importlib.import_module(f"llmgeom.papers.{paper}")


def _tests(asked: RunConfig) -> list[Check]:
    """What is measured unless it cannot be."""
    return [t for one in table(asked.paper) if (t := one.test(asked.size)) and not _skipped(asked, one)]


def _skipped(asked: RunConfig, entry: Entry) -> str:
    """Why an entry is not tested whatever is found; empty where it is."""
    test = entry.test(asked.size)
    if test is None:
        return entry.not_tested
    return "--quick is too small a budget for it; leave --quick out" if asked.quick and not test.quick else ""


def _posed(
    asked: RunConfig, entries: Sequence[Entry], bench: Bench, progress: Progress | None = None
) -> Iterator[Judged]:
    for place, entry in enumerate(entries):
        if progress:
            progress(f"entries, {bench.label}", place, len(entries), entry.id)
        yield _put(asked, entry, bench)


def _put(asked: RunConfig, entry: Entry, bench: Bench) -> Judged:
    test, why = entry.test(asked.size), _skipped(asked, entry)
    if test is None or why:
        return Judged(entry, None, None, why)
    if test.compare == "within" and not test.printed(bench.label):
        return Judged(entry, None, None, f"printed for {', '.join(test.values)} alone: give one of them with --model")
    try:
        found = bench.measured(test)
        if test.compare == "claim" and not found.claim:
            raise UserError("one of the nulls that its claim is held against could not be had")
    except UserError as refusal:
        return Judged(entry, None, None, f"it could not be measured: {refusal}")
    return Judged(entry, test, found, "")


def _cells(one: Judged, label: str) -> tuple[str, ...]:
    h = one.estimate
    if h is None:
        return (f"{one.entry.id}", "", "", "", "", "", one.verdict)
    value, low, high = numbers(h.value, h.low, h.high)
    null = ""
    if h.null != judging.NONE:
        ends = list(dict.fromkeys(numbers(h.null_low, h.null_high)))
        null = f"{' to '.join(ends)} {h.null}"
    null = null if len(null) < 50 else null[:48] + " …"
    return (
        one.entry.id, f"{value} {h.unit}", f"{low} to {high}", judging.asked(one.test, label), null,
        f"{h.n} {h.counts}", h.verdict,
    )  # fmt: skip


def _note(one: Judged) -> str:
    entry = one.entry
    parts = [f"{entry.quantity}. Printed: {entry.published} ({entry.source})"]
    parts += [f"trivial: {entry.trivial}"] * bool(entry.trivial)
    parts += [f"measured: {entry.definition}"] * bool(entry.definition)
    parts += [f"it contradicts itself: {entry.contradiction}"] * bool(entry.contradiction)
    return "; ".join([*parts, f"{one.verdict}: {one.why}"])
