"""The one table of rows: every number of some records, and everything that was not measured.

Terminal, page, JSON, notebooks, LaTeX and exported tables read these rows. A claim has one of five words: holds, small
(the controls are beaten, and an effect of the claimed size is excluded), ruled out, opposite, open. On the common scale
of claims 0 is the centre of the control, and 1 lies the claimed effect beyond it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from llmgeom.errors import UserError
from llmgeom.record import Record
from llmgeom.reports.text import (
    control_of,
    counted,
    difference_of,
    independent,
    number_of,
    numbers,
    pretty,
    short,
    told_apart,
    unit,
    value_and_interval,
    visible,
    why_not,
)
from llmgeom.result import WORDS, Estimate
from llmgeom.stats.verdict import NO_END

CHECKS = ("ablation_control",)  # probes whose claim is that the instrument works: no finding about the model
NOT_MEASURED = "not measured"
# What tells two edits of one axis apart -> how a sentence says it.
ALONG = {"pc1": "along PC1", "ridge": "along the ridge direction"}
COLUMNS = {
    "name": "metric", "value": "value", "interval": "95 % interval", "null": "control (middle 95 %)", "p": "p",
    "n": "n", "verdict": "verdict",
}  # fmt: skip
Columns = Mapping[str, list]
# Of `Row.numbers`, besides its texts.
NUMBERS = (
    "value", "low", "high", "control_low", "control_high", "control_centre", "difference_low", "difference_high",
    "draws", "controls", "hurdle", "p", "adjusted", "n", "clusters", "effect", "needed",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One metric of one record, or what was not measured there. Its texts are safe to print to a terminal.

    Attributes:
        record, probe: the record's label, and the probe.
        h: the numbers; None where they were not measured.
        why: the reason of the verdict, or why it was not measured.
        n: how many prompts, or what the metric counts, and from how many clusters.
        counts: what `h.clusters` counts.
    """

    record: str
    probe: str
    h: Estimate | None
    why: str
    n: str = ""
    counts: str = "prompts"

    @property
    def estimate(self) -> Estimate:
        """The numbers of a row that was measured."""
        if self.h is None:
            raise ValueError(f"{self.probe} was not measured: {self.why}")
        return self.h

    @property
    def name(self) -> str:
        return visible(self.h.name if self.h else self.probe)

    @property
    def key(self) -> tuple[str, str]:
        """The key that tests of one claim in several records share."""
        return self.probe, self.name

    @property
    def verdict(self) -> str:
        return self.h.verdict if self.h else NOT_MEASURED

    @property
    def claim(self) -> str:
        return visible(self.h.claim) if self.h else ""

    @property
    def method(self) -> str:
        return visible(self.h.method) if self.h else ""

    @property
    def value(self) -> str:
        return visible(value_and_interval(self.h)[0] + unit(self.h)) if self.h else ""

    @property
    def interval(self) -> str:
        return value_and_interval(self.h)[1] if self.h else ""

    @property
    def clusters(self) -> str:
        """The number of what is independent, e.g. 38 templates."""
        return number_of(self.h.clusters, self.counts) if self.h else ""

    @property
    def p(self) -> str:
        return f"{self.h.p:.2g}" if self.h and self.h.controls else ""

    @property
    def null(self) -> str:
        """Every control: the one that decides with its range, then the others with their p."""
        h = self.h
        if h is None or not h.controls:
            return "none" if h else ""
        if h.paired:
            first = f"{control_of(h)}: {h.null}; difference {difference_of(h)}"
        else:
            first = f"{' to '.join(dict.fromkeys(numbers(*h.control_range)))}: {h.null}"
        others = (f"; also {short(one.centre)}: {one.name} (p = {one.p:.2g})" for one in h.controls[1:])
        return visible(first + "".join(others))

    # ---- of a claim

    @property
    def word(self) -> str:
        """The verdict. Raises ValueError for one that is none of WORDS."""
        if self.verdict not in WORDS:
            expected = ", ".join(WORDS)
            raise ValueError(f"the claim {self.name!r} has the verdict {self.verdict!r}; expected one of {expected}")
        return self.verdict

    @property
    def head(self) -> str:
        """The claim in a few words: its sentence up to the colon."""
        return pretty(self.claim.partition(":")[0].rstrip("."))

    @property
    def paper(self) -> str:
        """The paper that the claim is from, e.g. "Paper III"; empty for one that no paper makes."""
        found = re.match(r"Paper [IVX]+", self.estimate.rule.source)
        return found[0] if found else ""

    def scaled(self, value: float) -> float:
        """A value on the common scale: 0 is the control's centre, 1 the claimed effect beyond it.

        For a claim of no effect 0 is the control, and the claim says that the value lies between -1 and 1. Raises
        ValueError where the claim declares no effect.
        """
        h, rule = self.estimate, self.estimate.rule
        if not rule.effect > 0:
            raise ValueError(f"the claim {h.name!r} declares an effect of {rule.effect}; expected a number above 0")
        if not rule.equivalence:
            return (value - h.centre) / (rule.sign * rule.effect)
        least, most = h.excess.least, h.excess.hurdle
        centre = most - rule.effect if least == NO_END else (least + most) / 2
        return (value - centre) / rule.effect

    @property
    def distance(self) -> float:
        """Where the value lies on the common scale."""
        return self.scaled(self.estimate.value)

    def numbers(self) -> dict[str, Any]:
        """The row as plain data for JSON and tables of columns; None for a number or text that it does not have.

        A control on the same prompts is one number: its two ends are equal, and the difference has an interval.
        `adjusted` is p after Holm over the claims.
        """
        texts = {"record": self.record, "probe": self.probe, "metric": self.name, "verdict": self.verdict}
        texts |= {"why": self.why, "claim": self.claim, "method": self.method, "unit": "", "counts": "", "control": ""}
        cells: dict[str, Any] = dict.fromkeys(NUMBERS)
        if (h := self.h) is not None:
            texts |= {"unit": h.unit, "counts": h.rule.counts, "control": h.null}
            cells |= {name: getattr(h, name) for name in ("value", "low", "high", "n", "clusters")}
            cells["effect"] = h.rule.effect
            if h.controls:
                cells |= dict(zip(("control_low", "control_high"), h.control_range, strict=True))
                cells |= {"control_centre": h.centre, "draws": h.controls[0].draws or None, "p": h.p}
                cells |= {"controls": [one._asdict() for one in h.controls], "hurdle": h.excess.hurdle}
                cells |= {"adjusted": h.adjusted[0], "needed": h.needed or None} if h.claim else {}
            if h.paired:
                cells |= dict(zip(("difference_low", "difference_high"), h.difference, strict=True))
        return {key: visible(text) or None for key, text in texts.items()} | cells


def rows(records: Sequence[Record]) -> list[Row]:
    """Claims first, then measurements; each by probe, metric and record, so that equal metrics of several records
    stand side by side. Checks of the instrument come after other claims."""
    found: list[Row] = []
    every = list(zip(labels(records), records, strict=True))
    for probe in in_order({probe for record in records for probe in (*record.results, *record.unmeasured)}):
        measured = [(label, h, r) for label, r in every if probe in r.results for h in r.results[probe].estimates]
        for name in dict.fromkeys(h.name for _, h, _ in measured):
            for label, h, record in (one for one in measured if one[1].name == name):
                n, counts = (of(h, record.source, record.prompts) for of in (counted, independent))
                found.append(Row(label, visible(probe), h, visible(h.why), visible(n), counts))
        for label, record in every:
            if probe in record.unmeasured:
                found.append(Row(label, visible(probe), None, visible(why_not(record.unmeasured[probe]))))
    return sorted(found, key=lambda row: not row.claim)


def claims(every: Iterable[Row]) -> list[list[Row]]:
    """The tests of claims among these rows, claim by claim."""
    return [list(group) for _, group in groupby((row for row in every if row.claim), key=lambda row: row.key)]


def distinct(every: Iterable[Row]) -> list[Row]:
    """The tests of claims, each once: one of the weights alone gives the same number on every set of prompts."""
    first: dict[tuple, Row] = {}
    for row in (row for row in every if row.claim):
        h = row.estimate
        first.setdefault((*row.key, h.value, h.low, h.high, h.p, h.n), row)
    return list(first.values())


def heads(groups: Sequence[Sequence[Row]]) -> dict[tuple[str, str], str]:
    """The name of each claim; claims with the same words also name their probe or metric."""
    alone = {group[0].key: group[0].head for group in groups}
    titles = {}
    for (probe, name), head in alone.items():
        alike = [key for key, other in alone.items() if other == head]
        apart = told_apart([key[0] for key in alike])
        more = apart[probe] if len(apart) == len(alike) else pretty(name)
        named = f"{head} ({ALONG[more]})" if more in ALONG else f"{more}: {head}"
        titles[probe, name] = named if len(alike) > 1 else head
    return titles


def in_order(probes: Iterable[str], first: Sequence[str] = ()) -> list[str]:
    """Probes in the order in which they are shown: `first`, then by name, checks of the instrument last."""
    return sorted(probes, key=lambda probe: (probe not in first, probe in CHECKS, probe))


# ---- what records are called -----------------------------------------------------------------------------------------


def labels(records: Sequence[Record]) -> list[str]:
    """What to call each record: what tells it from the others, its prompts, its model, both, or its precision or
    revision; its place is added where nothing does."""
    models = models_of(records)
    sources = [str(record.source.get("name", "prompts")) for record in records]
    if len(set(models)) == 1 < len(set(sources)):
        titles = sources
    elif len(set(sources)) == 1 < len(set(models)):
        titles = models
    else:
        pairs = zip(records, models, strict=True)
        titles = [record.title.replace(str(record.subject["name"]), name, 1) for record, name in pairs]
    for fact in ("dtype", "revision"):
        told = [str(record.subject.get(fact) or "") for record in records]
        if len(set(titles)) < len(titles) and len(set(told)) > 1:
            alone = len(set(titles)) == 1 and all(told)
            both = zip(titles, told, strict=True)
            titles = told if alone else [f"{title}, {value}" if value else title for title, value in both]
    return [
        visible(f"{title} (run {place})" if titles.count(title) > 1 else title) for place, title in enumerate(titles, 1)
    ]


def models_of(records: Sequence[Record]) -> list[str]:
    """The model's name of each record, of a path or a hub id its last part; whole where that is one part of several."""
    whole = [str(record.subject["name"]) for record in records]
    last = [name.rstrip("/").rpartition("/")[2] or name for name in whole]
    return last if len(set(last)) == len(set(whole)) else whole


def draws_of(records: Sequence[Record]) -> list[str]:
    """How many draws of each control the records have; empty if they differ, or without controls."""
    drawn = {record.facts["nulls"] for record in records if record.facts.get("nulls")}
    return [f"{number_of(drawn.pop(), 'draws')} of each control"] if len(drawn) == 1 else []


def lacking(records: Sequence[Record]) -> list[tuple[str, str]]:
    """What could not be measured, and why, without repetition; numbers of one probe with one reason are counted."""
    every = {name: why_not(why) for r in records for name, why in sorted(r.unmeasured.items())}
    of: dict[tuple[str, str], int] = {}
    for name, why in every.items():
        probe, of_probe, _ = name.partition(": ")
        of[probe, why] = of.get((probe, why), 0) + bool(of_probe)
    count = {key: f" ({number_of(n, 'numbers')})" if n else "" for key, n in of.items()}
    return [(f"{probe.replace('_', ' ')}{count[probe, why]}", why) for probe, why in of]


def warnings_of(records: Sequence[Record]) -> list[str]:
    """All warnings, without repetition: of the runs, then of their probes."""
    of_probes = [text for r in records for probe in in_order(r.results) for text in r.results[probe].warnings]
    return list(dict.fromkeys([*(text for record in records for text in record.warnings), *of_probes]))


# ---- tables of columns -----------------------------------------------------------------------------------------------


def tables(record: Record) -> dict[str, Columns]:
    """The numbers of a record as three long tables.

    Returns:
        prompts: a row a prompt: its columns, and every quantity measured of each prompt, PROBE.QUANTITY.PLACE
            (measured.PROBE.QUANTITY.PLACE if the prompts have a column of this name).
        layers: a row a number of a layer: probe, quantity, unit, layer, the axis and the place along it of a second
            axis (head 3, bound low; empty where there is none), value.
        metrics: `Row.numbers` of every metric.
    """
    prompts = {name: _alike(column) for name, column in record.prompts.items()}
    count = len(next(iter(prompts.values()), ()))
    layers: dict[str, list] = {name: [] for name in ("probe", "quantity", "unit", "layer", "axis", "at", "value")}
    metrics: dict[str, list] = {}
    for probe, measured in sorted(record.results.items()):
        for name, quantity in measured.quantities.items():
            array, axes = np.asarray(measured.arrays[name]), [*quantity.axes]
            if axes[:1] == ["prompt"] and len(axes) < 3 and len(array) == count:
                flat = array.reshape(count, -1)
                places = _ticks(measured.ticks, axes[1], flat.shape[1]) if axes[1:] else [""]
                for place, column in zip(places, flat.T, strict=True):
                    title = f"{probe}.{name}.{place}" if axes[1:] else f"{probe}.{name}"
                    prompts[f"measured.{title}" if title in record.prompts else title] = column.tolist()
            if "layer" in axes and len(axes) < 3:
                at = _ticks(measured.ticks, "layer", array.shape[axes.index("layer")])
                axis = next((other for other in axes if other != "layer"), "")
                for layer, values in zip(at, np.moveaxis(array, axes.index("layer"), 0), strict=True):
                    places = _ticks(measured.ticks, axis, len(values)) if axis else [""]
                    for place, value in zip(places, values.reshape(-1).tolist(), strict=True):
                        cells = (probe, name, quantity.unit, int(layer), axis, place, float(value))
                        for cell, kept in zip(cells, layers.values(), strict=True):
                            kept.append(cell)
    for row in (row for row in rows([record]) if row.h):
        for field, cell in row.numbers().items():
            if field in NUMBERS:
                cell = plain(cell) if field == "controls" else cell
                metrics.setdefault(field, []).append(cell)
            elif field != "record":
                metrics.setdefault(field, []).append(cell or "")
    return {"prompts": prompts, "layers": layers, "metrics": metrics}


def frame(record: Record, kind: str) -> Any:
    """A table of pandas; see `Record.frame`."""
    kinds = ("prompts", "layers", "metrics")
    if kind not in kinds:
        raise UserError(f"frame {kind!r}: expected {', '.join(kinds)}")
    try:
        import pandas
    except ImportError as error:
        raise UserError(f"Record.frame needs the package pandas ({error}); pip install pandas") from error
    return pandas.DataFrame({name: floats(column) for name, column in tables(record)[kind].items()})


def floats(column: list) -> Any:
    """A column, as an array with NaN if numbers are absent: it is of numbers also where all are."""
    numeric = all(cell is None or isinstance(cell, int | float) for cell in column)
    return np.array(column, dtype=float) if None in column and numeric else column


def _ticks(ticks: Mapping[str, tuple], axis: str, length: int) -> list[str]:
    """The labels along an axis: its names, low and high along a bound, else 0, 1, 2 ..."""
    default = ("low", "high") if axis == "bound" and length == 2 else range(length)
    return [str(tick) for tick in ticks.get(axis, default)]


def _alike(column: tuple) -> list[Any]:
    """A column of one type: what mixes kinds, or holds lists, as text."""
    kinds = {type(cell) for cell in column}
    if len(kinds) > 1 and kinds <= {int, float}:
        return [float(cell) for cell in column]
    simple = len(kinds) <= 1 and kinds <= {int, float, str, bool}
    return list(column) if simple else [cell if isinstance(cell, str) else plain(cell) for cell in column]


def plain(data: Any) -> str:
    """JSON of plain data, equal for equal data."""
    return json.dumps(data, sort_keys=True, ensure_ascii=False, allow_nan=False)
