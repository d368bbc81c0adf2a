"""Estimates as lines of text: value, interval and control drawn on one scale from -1 to 1."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from llmgeom.result import Measured

WIDTH = 41  # characters from -1 to 1; odd, so that 0 has a place
LEGEND = "● value   ─ 95 % interval   ░ control   │ 0   (cut at -1)"


def strips(measured: Measured, name: str, parts: Sequence[str], values: Sequence[float]) -> Iterator[str]:
    """A line for each part of a quantity with interval and band, each within -1 to 1.

    Args:
        measured: holds the arrays `name`, `name`_interval and `name`_control.
        parts: names along the axis; "WHOLE: PART" is indented. values: the numbers that are printed.
    """
    words = {h.name: f" {h.verdict}" for h in measured.estimates}
    shown, interval, control = (measured.arrays[key] for key in (name, f"{name}_interval", f"{name}_control"))
    yield f"{'':26}-1{'0':^{WIDTH - 3}}1"
    for i, (part, value) in enumerate(zip(parts, values, strict=True)):
        label = f"  {part.partition(': ')[2]}" if ": " in part else part
        yield f"{label:26}{_strip(shown[i], interval[i], control[i])} {value:6.2f}{words.get(part, '')}"
    yield f"{'':26}{LEGEND}"


def _strip(value: float, interval: np.ndarray, control: np.ndarray) -> str:
    def place(x: float) -> int:
        return round((float(np.clip(x, -1, 1)) + 1) / 2 * (WIDTH - 1))

    cells = [" "] * WIDTH
    marks = [(control, "░"), (interval, "─")]
    for (low, high), mark in reversed(marks) if control[0] == control[1] else marks:  # one number lies over the line
        cells[place(low) : place(high) + 1] = [mark] * (place(high) - place(low) + 1)
    cells[WIDTH // 2] = "│"
    cells[place(value)] = "●"
    return "".join(cells)
