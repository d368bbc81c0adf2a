"""One plot of all claims: a row each on a common scale, where 0 is the control and 1 the claimed effect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llmgeom.reports.findings import Outcome, claims, control_of, heads, unit, value_of
from llmgeom.reports.text import visible

LEAST, MOST = -1.5, 2.5  # the ends of the scale; what lies beyond is an arrow


class Span(NamedTuple):
    """A part of the scale in per cent of its width."""

    start: float
    width: float


class Row(NamedTuple):
    """One test of a claim.

    Attributes:
        claim: its words; empty in the further rows of the same claim.
        metric: what was measured.
        rows: how many rows the claim has, 0 in the further ones.
        value: value and interval, control: the control's range, in the metric's own unit.
        place: of the value in per cent, None where it is off the scale.
        arrow: ◀ or ▶ there.
        interval, band, claimed: parts of the scale: the interval, the control's range, values as large as claimed.
        said: the row in words, for a screen reader.
    """

    key: str
    claim: str
    metric: str
    rows: int
    record: str
    probe: str
    word: str
    value: str
    control: str
    place: float | None
    arrow: str
    interval: Span | None
    band: Span
    claimed: Span
    said: str


ZERO, ONE = ((value - LEAST) / (MOST - LEAST) * 100 for value in (0.0, 1.0))


def forest(every: Sequence[Outcome]) -> list[Row]:
    """The rows, claim by claim.

    Raises:
        ValueError: a claim declares no effect, or its verdict is none of the five words.
    """
    groups = claims(every)
    names = heads(groups)
    return [_row(one, names[one.key], len(group) if i == 0 else 0) for group in groups for i, one in enumerate(group)]


def _row(outcome: Outcome, head: str, rows: int) -> Row:
    h, distance = outcome.estimate, outcome.distance
    off = "" if LEAST <= distance <= MOST else "◀" if distance < LEAST else "▶"
    value, control = value_of(h).removesuffix(unit(h)), control_of(h)
    claimed = span(-1.0, 1.0) if h.equivalence else span(1.0, MOST)
    if h.equivalence and h.margin - h.margin_low > 2.001 * h.effect:
        claimed = span(LEAST, 1.0)
    on = f" on {outcome.record}" if outcome.record else ""
    label = f"{head}{on}: {outcome.word}; {value}{unit(h)}, control {control}; {distance:.2g} of the claimed effect"
    ends = sorted((outcome.scaled(h.low), outcome.scaled(h.high)))
    texts = (f"{outcome.probe} {h.name}", head, h.name, outcome.record, outcome.probe, value + unit(h), control, label)
    key, claim, metric, record, probe, value, control, label = map(visible, texts)
    return Row(
        key=key,
        claim=claim if rows else "",
        metric=metric,
        rows=rows,
        record=record,
        probe=probe,
        word=outcome.word,
        value=value,
        control=control,
        place=None if off else place(distance),
        arrow=off,
        interval=span(*ends) if ends[1] > LEAST and ends[0] < MOST else None,
        band=span(*sorted((outcome.scaled(h.null_low), outcome.scaled(h.null_high)))),
        claimed=claimed,
        said=label,
    )


def place(value: float) -> float:
    """Where a value of the common scale lies, in per cent; beyond an end, at the end."""
    return round((min(max(value, LEAST), MOST) - LEAST) / (MOST - LEAST) * 100, 2)


def span(low: float, high: float) -> Span:
    """From one value to another in per cent."""
    return Span(place(low), round(place(high) - place(low), 2))
