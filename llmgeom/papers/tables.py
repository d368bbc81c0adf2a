"""The tables of `llmgeom reproduce`: published numbers, the audit, the predictions, from rows of papers/*.toml."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from llmgeom.errors import UserError
from llmgeom.papers.published_numbers import Check, Entry, Place, Size
from llmgeom.papers.verdicts import NO_NULL, Row, judged, judged_by_claims
from llmgeom.record import Record, known
from llmgeom.reports.text import control_of, difference_of, grid, number_of, unit, value_of, visible
from llmgeom.result import Estimate, Measured, read_prose

WIDTH = 100  # of a line, as of a digest
LONGEST_UNIT = 8  # a longer one stands below the table


@dataclass(frozen=True)
class Options:
    """Options of a paper's module.

    Attributes:
        recipe: "quick", "small" or "full": decides the models to train.
        device: Device for the trainings of "full"; None chooses.
        seeds: Trainings of each cell of the primitives; dose_seeds: of each dose of corrupted labels.
    """

    recipe: str = "small"
    device: str | None = None
    seeds: int = 3
    dose_seeds: int = 5

    @property
    def quick(self) -> bool:
        return self.recipe == "quick"


class Source:
    """The measurements of one subject by a paper's module, and its output besides the rows of the TOML file.

    `label` names the subject in tables: a model if numbers were printed only for some models. MEASURES has measures by
    name; each takes the source, the check and the check's `of`.
    """

    label: str
    MEASURES: ClassVar[Mapping[str, Callable[..., Estimate]]] = {}

    def measured(self, entry: Entry, test: Check) -> Estimate:
        """The metric of a test. Raises UserError if it cannot be measured."""
        return self.MEASURES[test.measure](self, test, **test.of)

    def find(self, place: Place) -> tuple[Estimate | None, str]:
        """The metric at a place of the runs; None, and why it was not measured."""
        return None, f"{self.label} is no language model: it has no run {place[0]}"

    def sections(self) -> Mapping[str, Measured]:
        """More sections of the page."""
        return {}

    def lines(self) -> list[str]:
        """Lines above the tables in a terminal."""
        return []

    def rows(self) -> list[dict[str, Any]]:
        """More rows of the JSON."""
        return []

    def warnings(self) -> tuple[str, ...]:
        """Warnings for the page."""
        return ()


def metric_of(record: Record, probe: str, name: str) -> Estimate | None:
    """A metric of a record; None if its probe has none. Raises UserError if the probe could not be measured."""
    if probe in record.unmeasured:
        raise UserError(record.unmeasured[probe])
    estimates = record.results[probe].estimates if probe in record.results else ()
    return next((h for h in estimates if h.name == name), None)


# ---- rows ------------------------------------------------------------------------------------------------------------


def not_tested(entry: Entry, size: Size, quick: bool) -> str:
    """Why an entry is not tested, independent of the measurement; empty if it is tested."""
    test = entry.test(size)
    if test is None:
        return entry.not_tested
    return "--quick is too small a budget for it; leave --quick out" if quick and not test.quick else ""


def published(entries: Sequence[Entry], source: Source, size: Size, quick: bool) -> list[Row]:
    """Every entry, measured by its definition and judged by Holm over all that could be measured."""
    return judged([_measured(entry, source, size, quick) for entry in entries], source.label)


def _measured(entry: Entry, source: Source, size: Size, quick: bool) -> Row:
    test, why = entry.test(size), not_tested(entry, size, quick)
    if test is None or why:
        return Row(entry, None, why)
    if test.compare == "within" and not test.printed(source.label):
        return Row(entry, None, f"printed for {', '.join(test.values)} alone: give one of them with --model")
    try:
        estimate = source.measured(entry, test)
        if test.compare == "claim" and not estimate.claim:
            raise UserError("one of the nulls of its claim could not be measured")
    except UserError as refusal:
        return Row(entry, None, f"it could not be measured: {refusal}")
    return Row(entry, estimate, "", test)


def audit(entries: Sequence[Entry], source: Source) -> list[Row]:
    """Entries that have both forms: the metric by the published definition, and the sound one."""
    rows = []
    for entry in entries:
        if entry.as_published and any(entry.sound):
            found = [source.find(place) for place in entry.as_published]
            first, lacking = next((pair for pair in found if pair[0]), found[-1])
            sound, missing = source.find(entry.sound)
            why = "; ".join(filter(None, (lacking, missing))) or (sound.why if sound else "")
            rows.append(Row(entry, sound, why, as_published=first))
    return rows


def predictions(entries: Sequence[Entry], source: Source) -> list[Row]:
    """Entries with a prediction for any language model; claims are judged by Holm over those of this table."""
    rows = []
    for entry in sorted((entry for entry in entries if entry.prediction), key=lambda entry: bool(entry.needs)):
        found, why = (None, f"needs {entry.needs}") if entry.needs else source.find(entry.sound)
        rows.append(Row(entry, found, why))
    return judged_by_claims(rows)


# ---- what people see -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """One table of one subject. A subclass defines its columns and its section of the page."""

    NAME: ClassVar[str] = "numbers"
    HEAD: ClassVar[tuple[str, ...]] = ("ours [95 %]", "would agree", "control", "n", "verdict")
    TITLE: ClassVar[str] = "Published numbers"

    label: str
    contents: tuple[Row, ...]

    def name_of(self, row: Row) -> str:
        """The first cell of a row."""
        return row.entry.id

    def cells(self, row: Row) -> list[tuple[str, ...]]:
        """The other cells of a row, of each of its lines."""
        if row.estimate is None:
            return [("", "", "", "", row.verdict)]
        value, control, n = _plain_cells(row.estimate)
        return [(value, row.test.text(self.label) if row.test else "", control, n, row.estimate.verdict)]

    def why(self, row: Row) -> str:
        """The reason of a row's verdict, and its control by name."""
        reason = f"{row.verdict}: {row.why}" if row.verdict else row.why or NO_CLAIM
        return ". ".join(filter(None, (_compared(row.estimate), reason)))

    def about(self, entry: Entry) -> list[str]:
        """Sentences on an entry that hold for every subject."""
        more = [f"It contradicts itself: {entry.contradiction}"] if entry.contradiction else []
        return [f"printed {entry.published}", *more]

    def estimates(self) -> tuple[Estimate, ...]:
        """The metrics of the section."""
        return tuple(row.estimate for row in self.contents if row.estimate)

    def note(self, row: Row) -> str:
        """The section's note on a row."""
        entry = row.entry
        parts = [f"{entry.quantity}. Printed: {entry.published} ({entry.source})"]
        parts += [f"trivial: {entry.trivial}"] * bool(entry.trivial)
        parts += [f"measured: {entry.definition}"] * bool(entry.definition)
        parts += [f"it contradicts itself: {entry.contradiction}"] * bool(entry.contradiction)
        return "; ".join([*parts, f"{row.verdict}: {row.why}"])

    def section(self) -> Measured:
        """The table as a section of a page."""
        prose = read_prose(Path(__file__).with_name("texts") / "tables.md")[self.TITLE]
        notes = tuple(map(self.note, self.contents))
        return Measured(self.TITLE, **prose, estimates=self.estimates(), quantities={}, arrays={}, notes=notes)

    def to_dict(self) -> list[dict[str, Any]]:
        """Its rows as plain data."""
        names = [f.name for f in fields(Entry) if f.name not in ("small", "full")]
        return [
            {
                **{name: getattr(row.entry, name) for name in names},
                "table": self.NAME,
                "subject": self.label,
                "asked": row.test.text(self.label) if row.test else "",
                "verdict": row.verdict,
                "why": row.why,
                "metric": known(row.estimate) if row.estimate else None,
                "metric_as_published": known(row.as_published) if row.as_published else None,
            }
            for row in self.contents
        ]


@dataclass(frozen=True)
class Audit(Table):
    """Paper III by its definitions and by sound ones, in pairs."""

    NAME = "audit"
    HEAD = ("definition", "value [95 %]", "control", "n", "verdict")
    TITLE = "Audit of Paper III"

    def cells(self, row: Row) -> list[tuple[str, ...]]:
        verdict = row.estimate.verdict if row.estimate else ""
        return [("published", *_plain_cells(row.as_published), ""), ("sound", *_plain_cells(row.estimate), verdict)]

    def why(self, row: Row) -> str:
        published, sound = (
            f"{form}: {h.name}, {_compared(h) or 'no control'}" if h else ""
            for form, h in (("published", row.as_published), ("sound", row.estimate))
        )
        reason = f"{row.verdict}: {row.why}" if row.verdict else row.why or NO_CLAIM
        return ". ".join(filter(None, (published, sound, reason)))

    def about(self, entry: Entry) -> list[str]:
        return [f"printed {entry.published}", entry.why]

    def estimates(self) -> tuple[Estimate, ...]:
        # Without claims and verdicts, so that a page keeps the rows in pairs; the notes give the verdicts.
        plain: dict[str, Any] = {"claim": "", "verdict": "", "why": ""}
        pairs = [
            (row.as_published and replace(row.as_published, name=f"{row.entry.id}: as published", **plain),
             row.estimate and replace(row.estimate, name=f"{row.entry.id}: {row.estimate.name}", **plain))
            for row in self.contents
        ]  # fmt: skip
        return tuple(h for pair in pairs for h in pair if h)

    def note(self, row: Row) -> str:
        verdict = f" {row.verdict}: {row.why}." if row.verdict else ""
        return f"{row.entry.quantity}, printed: {row.entry.published}. {row.entry.why}.{verdict}"


@dataclass(frozen=True)
class Predictions(Table):
    """The papers' predictions for a trained language model, tested on one."""

    NAME = "predictions"
    HEAD = ("value [95 %]", "control", "n", "verdict")
    TITLE = "The papers' predictions"

    def name_of(self, row: Row) -> str:
        return row.entry.prediction

    def cells(self, row: Row) -> list[tuple[str, ...]]:
        if row.estimate is None:
            return [("", "", "", "not measured")]
        return [(*_plain_cells(row.estimate), row.estimate.verdict)]

    def why(self, row: Row) -> str:
        return f"{row.estimate.name}, {super().why(row)}" if row.estimate else super().why(row)

    def about(self, entry: Entry) -> list[str]:
        return []

    def estimates(self) -> tuple[Estimate, ...]:
        return tuple(replace(h, name=f"{r.entry.prediction}: {h.name}") for r in self.contents if (h := r.estimate))

    def note(self, row: Row) -> str:
        return f"{row.entry.prediction}: {(row.why or NO_CLAIM) if row.estimate else f'not measured: {row.why}'}"


NO_CLAIM = "measured, and no claim"
TABLES: dict[str, type[Table]] = {table.NAME: table for table in (Table, Audit, Predictions)}


def lines(tables: Sequence[Table]) -> list[str]:
    """Tables of one name for a terminal: a grid for each subject, then a paragraph for each row."""
    text_lines: list[str] = []
    for table in tables:
        rows = [
            (table.name_of(row) * (place == 0), *cells)
            for row in table.contents
            for place, cells in enumerate(table.cells(row))
        ]
        text_lines += [*map(visible, grid(table.label, table.HEAD, rows, WIDTH)), ""]
    for place, row in enumerate(tables[0].contents if tables else ()):
        alike: dict[str, list[str]] = {}
        for table in tables:
            alike.setdefault(table.why(table.contents[place]), []).append(table.label)
        reasons = [f"{', '.join(labels)}: {why}" if len(alike) > 1 else why for why, labels in alike.items()]
        printed, *more = tables[0].about(row.entry) or [""]
        sentences = [f"{place + 1} {tables[0].name_of(row)}{': ' * bool(printed)}{printed}", *reasons, *more]
        text = visible(". ".join(sentence.rstrip(".") for sentence in sentences)) + "."
        text_lines += wrapped([text])
    return text_lines


def wrapped(sentences: Sequence[str]) -> list[str]:
    """Sentences in lines of a terminal, in which a path stays whole."""
    options: dict[str, Any] = {"subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}
    return [line for text in sentences for line in textwrap.wrap(text, WIDTH, **options)]


def _plain_cells(h: Estimate | None) -> tuple[str, str, str]:
    """Value with its interval, control, number of clusters; a control on the same prompts is one number."""
    if h is None:
        return "not measured", "", ""
    value = value_of(h) if len(unit(h)) <= LONGEST_UNIT else value_of(h).removesuffix(unit(h))
    of = h.counts if h.n == h.clusters else "clusters"
    return value, "" if h.null == NO_NULL else control_of(h), number_of(h.clusters, of)


def _compared(h: Estimate | None) -> str:
    """A unit that is too long for the table, and the control by name, with the interval of a difference from it."""
    if h is None:
        return ""
    said = [f"unit:{unit(h)}"] * (len(unit(h)) > LONGEST_UNIT)
    if h.null not in ("", NO_NULL):
        said.append(f"control: {h.null}" + f", difference {difference_of(h)}" * h.paired)
    return ", ".join(said)
