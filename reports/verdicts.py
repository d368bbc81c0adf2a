"""The verdict table: every metric, and everything that was not measured, as rows of plain strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from llmgeom.record import Record
from llmgeom.reports.text import (
    control_of,
    counted,
    difference_of,
    number_of,
    numbers,
    short,
    unit,
    value_and_interval,
    visible,
    why_not,
)
from llmgeom.result import Estimate

# The word and the shape give the verdict; colour only repeats it.
ICONS = {"holds": "✔", "small": "◐", "ruled out": "✘", "opposite": "⇄", "open": "?", "not measured": "–", "": ""}
# Keys that every row of `numbered` has besides its texts; None for a number or text that is missing.
NUMBERED = (
    "value", "unit", "low", "high", "control", "control_low", "control_high", "difference_low", "difference_high",
    "draws", "controls", "p", "adjusted", "n", "counts", "clusters", "effect", "method",
)  # fmt: skip


class Row(NamedTuple):
    """One line of the table; an empty string where there is nothing to say. Safe to print to a terminal."""

    record: str
    name: str
    value: str
    interval: str
    null: str
    p: str
    n: str
    verdict: str
    why: str
    claim: str
    probe: str
    method: str


def labels(records: Sequence[Record]) -> list[str]:
    """What to call each record: what tells it from the others, its prompts, its model, both, or its precision or
    revision; its place is added where nothing does."""
    models = names_of(records)
    sources = [str(record.source.get("name", "prompts")) for record in records]
    if len(set(models)) == 1 < len(set(sources)):
        titles = sources
    elif len(set(sources)) == 1 < len(set(models)):
        titles = models
    else:
        titles = [
            record.title.replace(str(record.subject["name"]), name, 1)
            for record, name in zip(records, models, strict=True)
        ]
    for fact in ("dtype", "revision"):
        told = [str(record.subject.get(fact) or "") for record in records]
        if len(set(titles)) < len(titles) and len(set(told)) > 1:
            alone = len(set(titles)) == 1 and all(told)
            pairs = zip(titles, told, strict=True)
            titles = told if alone else [f"{title}, {value}" if value else title for title, value in pairs]
    return [
        visible(f"{title} (run {place})" if titles.count(title) > 1 else title) for place, title in enumerate(titles, 1)
    ]


def names_of(records: Sequence[Record]) -> list[str]:
    """The model's name of each record, of a path or a hub id its last part; whole where that is one part of several."""
    whole = [str(record.subject["name"]) for record in records]
    short = [name.rstrip("/").rpartition("/")[2] or name for name in whole]
    return short if len(set(short)) == len(set(whole)) else whole


def draws_of(records: Sequence[Record]) -> list[str]:
    """How many draws of each control the records have; empty if they differ, or without controls."""
    drawn = {record.facts["nulls"] for record in records if record.facts.get("nulls")}
    return [f"{number_of(drawn.pop(), 'draws')} of each control"] if len(drawn) == 1 else []


def controls(records: Sequence[Record]) -> list[dict[str, Any]]:
    """How many draws of each control every record has, for JSON; None without."""
    return [
        {"record": label, "draws": record.facts.get("nulls")}
        for label, record in zip(labels(records), records, strict=True)
    ]


def table(records: Sequence[Record]) -> list[dict[str, str]]:
    """The rows as plain dictionaries for a terminal; all have the same keys, `record` only where it differs and
    `claim` only where a metric is one."""
    rows = lines(records)
    hidden = {"method"} | ({"record"} if len(records) == 1 else set())
    hidden |= set() if any(row.claim for row in rows) else {"claim"}
    return [{key: text for key, text in row._asdict().items() if key not in hidden} for row in rows]


def lines(records: Sequence[Record]) -> list[Row]:
    """Claims first, then measurements; each by probe, metric and record, so that equal metrics of several records
    stand side by side."""
    return [
        Row(*map(visible, (label, at, "", "", "", "", "", "not measured", why, "", at, "")))
        if h is None
        else _row(label, at, h, record)
        for label, at, h, record, why in _each(records)
    ]


def numbered(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The rows of `lines` as numbers for JSON, None where there is none; `adjusted` is p after Holm over the claims.

    A control on the same prompts is one number: its two ends are equal, and the difference has an interval.
    """
    rows = []
    for label, at, h, _, why in _each(records):
        texts = {"record": label, "probe": at, "metric": at, "verdict": "not measured", "why": why, "claim": ""}
        cells: dict[str, Any] = dict.fromkeys(NUMBERED)
        if h is not None:
            texts |= {"metric": h.name, "verdict": h.verdict, "why": h.why, "claim": h.claim}
            texts |= {"unit": h.unit, "method": h.method, "counts": h.counts}
            cells |= {name: getattr(h, name) for name in ("value", "low", "high", "n", "clusters", "effect")}
            cells["adjusted"] = h.adjusted if h.claim and h.null else None
            if h.null:
                texts["control"], cells["draws"] = h.null, h.control_draws or None
                cells["controls"] = [one._asdict() for one in h.controls]
                cells |= dict(zip(("control_low", "control_high"), h.control_range, strict=True)) | {"p": h.p}
            if h.paired:
                cells |= {"difference_low": h.difference_low, "difference_high": h.difference_high}
        rows.append(cells | {key: visible(text) or None for key, text in texts.items()})
    return rows


def _each(records: Sequence[Record]) -> list[tuple[str, str, Estimate | None, Record, str]]:
    """Label, probe, estimate, record and why; no estimate where it was not measured, because of why."""
    rows: list[tuple[str, str, Estimate | None, Record, str]] = []
    every = list(zip(labels(records), records, strict=True))
    for probe in sorted({probe for record in records for probe in (*record.results, *record.unmeasured)}):
        found = [(label, h, r) for label, r in every if probe in r.results for h in r.results[probe].estimates]
        for name in dict.fromkeys(h.name for _, h, _ in found):
            rows += [(label, probe, h, record, "") for label, h, record in found if h.name == name]
        for label, record in every:
            if probe in record.unmeasured:
                rows.append((label, probe, None, record, why_not(record.unmeasured[probe])))
    return sorted(rows, key=lambda row: row[2] is None or not row[2].claim)


def _row(label: str, probe: str, h: Estimate, record: Record) -> Row:
    value, interval = value_and_interval(h)
    null, p = "none", ""
    if h.null:
        null = f"{' to '.join(dict.fromkeys(numbers(h.null_low, h.null_high)))}: {h.null}"
        if h.paired:
            null = f"{control_of(h)}: {h.null}; difference {difference_of(h)}"
        null += "".join(f"; also {short(c.centre)}: {c.name} (p = {c.p:.2g})" for c in h.controls[1:])
        p = f"{h.p:.2g}"
    cells = (value + unit(h), interval, null, p, counted(h, record.source, record.prompts))
    return Row(*map(visible, (label, h.name, *cells, h.verdict, h.why, h.claim, probe, h.method)))
