"""One plot of all claims: a row each on a common scale, where 0 is the control and 1 the claimed effect."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from llmgeom.reports.outcomes import Outcome, claims, heads
from llmgeom.reports.text import control_of, deciding, number_of, unit, value_of, visible

LEAST, MOST = -1.5, 2.5  # the ends of the scale, unless a value lies a little beyond
FARTHEST = -3.0, 4.0  # beyond these a value is an arrow
THIN = 1.6  # per cent of the scale; a control's range is drawn at least as wide, so that one number can be seen
FIGURE_SPACE, POINT_SPACE = "\u2007", "\u2008"  # as wide as a digit, and as a decimal point


class Span(NamedTuple):
    """A part of the scale in per cent of its width."""

    start: float
    width: float


class Scale(NamedTuple):
    """The common scale of a plot, from end to end in units of the claimed effect."""

    low: float
    high: float

    def place(self, value: float) -> float:
        """Where a value lies, in per cent; beyond an end, at the end."""
        return round((min(max(value, self.low), self.high) - self.low) / (self.high - self.low) * 100, 2)

    def span(self, low: float, high: float) -> Span:
        """From one value to another in per cent."""
        return Span(self.place(low), round(self.place(high) - self.place(low), 2))

    def band(self, low: float, high: float) -> Span | None:
        """From one value to another, wide enough to be seen; None where all of it is off the scale."""
        if high < self.low or low > self.high:
            return None
        start, width = self.span(low, high)
        return Span(start, width) if width >= THIN else Span(round(start + (width - THIN) / 2, 2), THIN)


class Row(NamedTuple):
    """One test of a claim, or several of the same numbers.

    Attributes:
        claim: its words; empty in the further rows of the same claim.
        rows: how many rows the claim has, 0 in the further ones.
        record: the runs that gave these numbers; first: the first of them.
        value: value and interval, control: the control's range, in the metric's own unit.
        by: the control that decides; drawn: the same with the number of its draws. n: what is independent, counted.
        cells: the value alone, its interval with the unit, and the control's range, such that numbers in a column
            have their decimal points under each other.
        place: of the value in per cent, None where it is off the scale.
        arrow: ◀ or ▶ there.
        interval, band, claimed: parts of the scale: the interval, the control's range, values as large as claimed. Of a
            control on the same prompts the interval is that of the difference, and there is no range.
        said: the row in words, for a screen reader.
    """

    key: str
    claim: str
    metric: str
    rows: int
    record: str
    first: str
    probe: str
    word: str
    value: str
    control: str
    by: str
    drawn: str
    n: str
    cells: tuple[str, str, str]
    place: float | None
    arrow: str
    interval: Span | None
    band: Span | None
    claimed: Span
    said: str


def scale_of(every: Iterable[Outcome]) -> Scale:
    """The scale on which all values lie but those that are far off."""
    near = [one.distance for one in every if FARTHEST[0] <= one.distance <= FARTHEST[1]]
    # A dot at the very end would be cut.
    low, high = math.floor(2 * min(near, default=0) - 0.25) / 2, math.ceil(2 * max(near, default=0) + 0.25) / 2
    return Scale(min(LEAST, low), max(MOST, high))


def forest(every: Sequence[Outcome]) -> list[Row]:
    """The rows, claim by claim; runs that gave the same numbers, as metrics of the weights do, share one.

    Raises ValueError: a claim declares no effect, or its verdict is none of the five words.
    """
    groups, scale = claims(every), scale_of(every)
    names = heads(groups)
    rows = []
    for group in groups:
        alike: dict[tuple, list[Outcome]] = {}
        for one in group:
            h = one.estimate
            alike.setdefault((one.word, h.value, h.low, h.high, h.null_low, h.null_high, h.null), []).append(one)
        for i, same in enumerate(alike.values()):
            rows.append(_row(same, names[same[0].key], len(alike) if i == 0 else 0, scale))
    values, controls = (aligned(column) for column in ([row.cells[i] for row in rows] for i in (0, 2)))
    return [row._replace(cells=(v, row.cells[1], c)) for row, v, c in zip(rows, values, controls, strict=True)]


def aligned(texts: Sequence[str]) -> list[str]:
    """Texts that end in a number, filled with spaces so that they end equally far behind the decimal point."""
    decimals = [len(text.rpartition(".")[2]) if "." in text.rpartition(" ")[2] else -1 for text in texts]
    most = max(decimals, default=-1)
    return [
        text + POINT_SPACE * (n < 0 <= most) + FIGURE_SPACE * (most - max(n, 0)) if text else ""
        for text, n in zip(texts, decimals, strict=True)
    ]


def _row(same: Sequence[Outcome], head: str, rows: int, scale: Scale) -> Row:
    outcome, record = same[0], ", ".join(one.record for one in same)
    h, distance = outcome.estimate, outcome.distance
    off = "" if scale.low <= distance <= scale.high else "◀" if distance < scale.low else "▶"
    value, control = value_of(h).removesuffix(unit(h)), control_of(h)
    claimed = scale.span(-1.0, 1.0) if h.equivalence else scale.span(1.0, scale.high)
    if h.equivalence and h.margin - h.margin_low > 2.001 * h.effect:
        claimed = scale.span(scale.low, 1.0)
    on = f" on {record}" if record else ""
    n = number_of(h.clusters, outcome.counts)
    by = f": {h.null}" * bool(h.null)
    label = f"{head}{on}: {outcome.word}; {value}{unit(h)}, control {control}{by}, n = {n}"
    label += f"; {distance:.2g} of the claimed effect"
    ends = sorted(map(outcome.scaled, h.deciding_interval))
    number, _, interval = value.partition(" ")
    texts = (f"{outcome.probe} {h.name}", head, h.name, record, outcome.record, outcome.probe, value + unit(h), control)
    key, claim, metric, record, first, probe, full, control = map(visible, texts)
    return Row(
        key=key,
        claim=claim if rows else "",
        metric=metric,
        rows=rows,
        record=record,
        first=first,
        probe=probe,
        word=outcome.word,
        value=full,
        control=control,
        by=deciding(h),
        drawn=visible(h.null),
        n=n,
        cells=(number, visible(interval + unit(h)), control),
        place=None if off else scale.place(distance),
        arrow=off,
        interval=scale.span(*ends) if ends[1] > scale.low and ends[0] < scale.high else None,
        band=None if h.paired else scale.band(*sorted((outcome.scaled(h.null_low), outcome.scaled(h.null_high)))),
        claimed=claimed,
        said=visible(label),
    )
