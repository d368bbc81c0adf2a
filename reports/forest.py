"""One plot of all claims: a row each on a common scale, where 0 is the control and 1 the claimed effect."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from llmgeom.reports.comparison import Comparison, Difference, Pair
from llmgeom.reports.figures import Drawn, draw
from llmgeom.reports.table import Row, claims, heads
from llmgeom.reports.text import control_of, deciding, unit, value_of, visible
from llmgeom.result import Result, line
from llmgeom.stats.verdict import NO_END

LEAST, MOST = -1.5, 2.5  # the ends of the scale, unless a value lies a little beyond
FARTHEST = -3.0, 4.0  # beyond these a value is an arrow
THIN = 1.6  # per cent of the scale; a control's range is drawn at least as wide, so that one number can be seen
FIGURE_SPACE, POINT_SPACE = "\u2007", "\u2008"  # as wide as a digit, and as a decimal point
Span = tuple[float, float]  # start and width of a part of the scale, in per cent


class Scale(NamedTuple):
    """The common scale of a plot, from end to end in units of the claimed effect."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float], least: float = LEAST, most: float = MOST) -> Scale:
        """The scale, at least from `least` to `most`, on which all values lie but those that are far off."""
        near = [value for value in values if FARTHEST[0] <= value <= FARTHEST[1]]
        # A dot at the very end would be cut.
        low, high = math.floor(2 * min(near, default=0) - 0.25) / 2, math.ceil(2 * max(near, default=0) + 0.25) / 2
        return cls(min(least, low), max(most, high))

    def place(self, value: float) -> float:
        """Where a value lies, in per cent; beyond an end, at the end."""
        return round((min(max(value, self.low), self.high) - self.low) / (self.high - self.low) * 100, 2)

    def span(self, ends: Iterable[float], thin: float = 0.0) -> Span | None:
        """From one value to another in per cent, at least as wide as `thin`; None where all of it is off the scale."""
        low, high = sorted(ends)
        if high < self.low or low > self.high:
            return None
        start, width = self.place(low), round(self.place(high) - self.place(low), 2)
        return (start, width) if width >= thin else (round(start + (width - thin) / 2, 2), thin)


class Mark(NamedTuple):
    """A line of the plot: one test of a claim, or several of the same numbers.

    Attributes:
        row: the test, of the first record that has these numbers. records: all that have them.
        claim: its words. rows: how many lines the claim has, 0 in the further ones.
        cells: the value alone, its interval with the unit, and the control's range, such that numbers in a column
            have their decimal points under each other. by: the control that decides.
        place: of the value in per cent, None where it is off the scale, where `arrow` is ◀ or ▶.
        interval, band, claimed: parts of the scale: the interval, the control's range, values as large as claimed. Of a
            control on the same prompts the interval is that of the difference, and there is no range.
        said: the line in words, for a screen reader.
    """

    row: Row
    records: str
    claim: str
    rows: int
    cells: tuple[str, str, str]
    by: str
    place: float | None
    arrow: str
    interval: Span | None
    band: Span | None
    claimed: Span | None
    said: str


def forest(every: Sequence[Row]) -> list[Mark]:
    """The lines, claim by claim; records that gave the same numbers, as metrics of the weights do, share one.

    Raises ValueError: a claim declares no effect, or its verdict is none of the five words.
    """
    groups = claims(every)
    names, scale = heads(groups), Scale.of(row.distance for group in groups for row in group)
    marks, several = [], len({row.record for row in every}) > 1
    for group in groups:
        alike: dict[tuple, list[Row]] = {}
        for row in group:
            h = row.estimate
            alike.setdefault((row.word, h.value, h.low, h.high, h.controls), []).append(row)
        for i, same in enumerate(alike.values()):
            row, h, distance = same[0], same[0].estimate, same[0].distance
            head, records = names[row.key], ", ".join(each.record for each in same)
            off = "" if scale.low <= distance <= scale.high else "◀" if distance < scale.low else "▶"
            claimed: Iterable[float] = (1.0, scale.high)
            if h.rule.equivalence:
                claimed = (scale.low if h.excess.least == NO_END else -1.0, 1.0)
            number, _, interval = value_of(h).removesuffix(unit(h)).partition(" ")
            by = f": {h.null}" * bool(h.null)
            on = f" on {records}" * several
            said = f"{head}{on}: {row.word}; {value_of(h)}, control {control_of(h)}{by}, n = {row.clusters}"
            marks.append(
                Mark(
                    row=row,
                    records=records,
                    claim=visible(head),
                    rows=len(alike) if i == 0 else 0,
                    cells=(number, visible(interval + unit(h)), visible(control_of(h))),
                    by=deciding(h),
                    place=None if off else scale.place(distance),
                    arrow=off,
                    interval=scale.span(map(row.scaled, h.deciding_interval)),
                    band=None if h.paired or not h.controls else scale.span(map(row.scaled, h.control_range), THIN),
                    claimed=scale.span(claimed),
                    said=visible(f"{said}; {distance:.2g} of the claimed effect"),
                )
            )

    def aligned(texts: Sequence[str]) -> list[str]:
        """Texts that end in a number, filled with spaces so that they end equally far behind the decimal point."""
        decimals = [len(text.rpartition(".")[2]) if "." in text.rpartition(" ")[2] else -1 for text in texts]
        most = max(decimals, default=-1)
        return [
            text + POINT_SPACE * (n < 0 <= most) + FIGURE_SPACE * (most - max(n, 0)) if text else ""
            for text, n in zip(texts, decimals, strict=True)
        ]

    values, ranges = (aligned([mark.cells[at] for mark in marks]) for at in (0, 2))
    return [mark._replace(cells=(v, mark.cells[1], c)) for mark, v, c in zip(marks, values, ranges, strict=True)]


def differences(c: Comparison) -> tuple[list[tuple[Pair, Difference, dict[str, Any]]], list[Drawn]]:
    """Each difference with its marks on one scale, in effects of interest; a figure of each curve."""
    every = [(pair, d) for pair in c.pairs for d in pair.differences]
    metrics = list(dict.fromkeys((d.probe, d.metric) for _, d in every))
    every.sort(key=lambda each: metrics.index((each[1].probe, each[1].metric)))
    scale, rows = Scale.of((d.value / d.effect for _, d in every), -1.5, 1.5), []
    for pair, d in every:
        at = d.value / d.effect
        off = "" if scale.low <= at <= scale.high else "◀" if at < scale.low else "▶"
        ends: Span | None = scale.span((d.low / d.effect, d.high / d.effect))
        mark = {"interval": ends, "claimed": scale.span((-1.0, 1.0)), "arrow": off, "zero": scale.place(0.0)}
        rows.append((pair, d, mark | {"place": None if off else scale.place(at)}))
    figures = []
    for i, pair in enumerate(c.pairs):
        for curve in pair.curves:
            value, low, high = (np.array(curve[key]) for key in ("value", "low", "high"))
            meaning = f"{curve['meaning']}, {pair.record} less {pair.reference}"
            around = ("clusters", np.stack([low, high], 1))
            drawn = line("difference", value, curve["axis"], curve["unit"], meaning, interval=around)
            measured = Result.of(meaning, drawn, ticks={curve["axis"]: curve["places"]})
            place = f"difference-{i}-{curve['probe']}-{curve['name']}"
            figures.append(draw(measured, "difference", place, 0, {}))
    return rows, figures
