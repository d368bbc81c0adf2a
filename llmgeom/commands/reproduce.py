"""The whole of `llmgeom reproduce paper1|paper2|paper3`: every published number beside ours, with a verdict."""

from __future__ import annotations

import dataclasses
import importlib
import shlex
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmgeom.commands.config import check_folder, keep
from llmgeom.errors import UserError
from llmgeom.files import digest
from llmgeom.papers import verdicts as judging
from llmgeom.papers.published_numbers import PAPERS, Check, Entry, Size, table
from llmgeom.papers.verdicts import Bench, Judged
from llmgeom.progress import Progress
from llmgeom.record import Record
from llmgeom.reports.text import grid, numbers, visible
from llmgeom.result import Measured
from llmgeom.scan import took, versions

SIZES: dict[str, Size] = {"small": "small", "paper": "full"}  # by --scale
WIDTH = 116


@dataclass(frozen=True)
class Request:
    """What is asked of `llmgeom reproduce`; its fields are its flags.

    scale     small: two cores, an hour; paper: the published sizes, on one GPU.
    models    of paper3; options: what it is asked beside, as `llmgeom audit` (n, nulls, controls ...).
    """

    paper: str
    scale: str = "small"
    quick: bool = False
    models: tuple[str, ...] = ()
    device: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    out: str | None = None

    def __post_init__(self) -> None:
        if self.paper not in PAPERS or self.scale not in SIZES:
            raise UserError(
                f"reproduce {self.paper} --scale {self.scale}: expected {' or '.join(PAPERS)}, small or paper"
            )
        if self.quick and self.scale == "paper":
            raise UserError("--quick with --scale paper: one is small, the other is not; leave one out")

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

    def command(self) -> str:
        """The command that repeats this, less where the output goes and what it runs on."""
        words = ["llmgeom", "reproduce", self.paper, *(["--scale", self.scale] if self.scale != "small" else [])]
        words += ["--quick"] * self.quick + [w for model in self.models for w in ("--model", model)]
        for name, value in self.options.items():
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        return shlex.join(words)


@dataclass(frozen=True)
class Found:
    """The table: entries by subject, lines to stand above it, and its entries as JSON."""

    asked: Request
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


def perform(asked: Request, progress: Progress | None = None) -> tuple[Path, Found]:
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


def planned(asked: Request) -> list[str]:
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


def _tests(asked: Request) -> list[Check]:
    """What is measured unless it cannot be."""
    return [t for one in table(asked.paper) if (t := one.test(asked.size)) and not _skipped(asked, one)]


def _skipped(asked: Request, entry: Entry) -> str:
    """Why an entry is not tested whatever is found; empty where it is."""
    test = entry.test(asked.size)
    if test is None:
        return entry.not_tested
    return "--quick is too small a budget for it; leave --quick out" if asked.quick and not test.quick else ""


def _posed(
    asked: Request, entries: Sequence[Entry], bench: Bench, progress: Progress | None = None
) -> Iterator[Judged]:
    for place, entry in enumerate(entries):
        if progress:
            progress(f"entries, {bench.label}", place, len(entries), entry.id)
        yield _put(asked, entry, bench)


def _put(asked: Request, entry: Entry, bench: Bench) -> Judged:
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
