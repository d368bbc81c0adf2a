"""The verdict table: every metric, and everything that was not measured, as rows of plain strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llmgeom.record import Record
from llmgeom.reports.text import numbers, visible
from llmgeom.result import Estimate
from llmgeom.validity import placed

# A verdict is told by its word and its shape; colour only repeats it.
ICONS = {
    "holds": "✔",
    "small": "◐",
    "ruled out": "✘",
    "opposite": "⇄",
    "open": "?",
    "not measured": "–",
    "": "",
}


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
    calibration: str


def labels(records: Sequence[Record]) -> list[str]:
    """What to call each record: what tells it from the others (its prompts, its model, or both), with its place added
    where that is not enough."""
    models = [str(record.subject["name"]) for record in records]
    sources = [str(record.source.get("name", "prompts")) for record in records]
    if len(set(models)) == 1 < len(set(sources)):
        titles = sources
    elif len(set(sources)) == 1 < len(set(models)):
        titles = models
    else:
        titles = [record.title for record in records]
    return [
        visible(f"{title} (run {place})" if titles.count(title) > 1 else title) for place, title in enumerate(titles, 1)
    ]


def table(records: Sequence[Record]) -> list[dict[str, str]]:
    """The rows as plain dictionaries for a terminal or JSON; all have the same keys, `record` only where it differs and
    `claim` only where a metric is one."""
    rows = lines(records)
    hidden = {"method"} | ({"record"} if len(records) == 1 else set())
    hidden |= set() if any(row.claim for row in rows) else {"claim"}
    return [{key: text for key, text in row._asdict().items() if key not in hidden} for row in rows]


def lines(records: Sequence[Record]) -> list[Row]:
    """Claims first, then measurements; each by probe, metric and record, so that equal metrics of several records
    stand side by side."""
    rows, named = [], list(zip(labels(records), records, strict=True))
    for probe in sorted({probe for record in records for probe in (*record.results, *record.unmeasured)}):
        found = [(label, h, r) for label, r in named if probe in r.results for h in r.results[probe].estimates]
        for name in dict.fromkeys(h.name for _, h, _ in found):
            rows += [_row(label, probe, h, record) for label, h, record in found if h.name == name]
        for label, record in named:
            if probe in record.unmeasured:
                cells = (label, probe, "", "", "", "", "", "not measured", record.unmeasured[probe], "", probe, "", "")
                rows.append(Row(*map(visible, cells)))
    return sorted(rows, key=lambda row: not row.claim)


def counted(h: Estimate) -> str:
    """How many prompts, or what it counts, and how many independent clusters a metric is of."""
    return f"{h.n} {h.counts}" + ("" if h.counts != "prompts" and h.n == h.clusters else f", {h.clusters} clusters")


def _row(label: str, probe: str, h: Estimate, record: Record) -> Row:
    value, low, high = numbers(h.value, h.low, h.high)
    null, p = "none", ""
    if h.null:
        null = "{} to {}: {}".format(*numbers(h.null_low, h.null_high), h.null)
        p = f"{h.p:.2g}"
    cells = (
        f"{value} {h.unit}".strip(),
        f"{low} to {high}",
        null,
        p,
        counted(h),
    )
    place = placed(h, probe, record)
    return Row(*map(visible, (label, h.name, *cells, h.verdict, h.why, h.claim, probe, h.method, place)))
