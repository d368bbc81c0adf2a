"""The first picture of a label probe: its score over layers beside its controls, and texts by their score.

Drawn as HTML and SVG that need no script; a picture keeps its letters' size at any width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from llmgeom.record import Record
from llmgeom.reports.multiples import last_words
from llmgeom.reports.prompts import COLOURS
from llmgeom.reports.text import short
from llmgeom.result import Result

PROBE, SCORE = "label", "_score"
ENDS, WRONG = 4, 6  # texts at each end, and of the wrong ones


def readable(records: Sequence[Record]) -> list[dict[str, Any]]:
    """What the template draws of each record with a label probe: curves, and texts."""
    every = [(place, record, record.results.get(PROBE)) for place, record in enumerate(records)]
    return [
        {"place": place, "curves": [*_curves(measured)], "texts": _texts(record, measured)}
        for place, record, measured in every
        if measured is not None and "probe_prediction" in measured.arrays
    ]


def _curves(measured: Result) -> Iterator[dict[str, Any]]:
    """A picture of each site; then the score by the number of prompts."""
    arrays = measured.arrays
    sites = [name.removesuffix(SCORE) for name in arrays if f"{name.removesuffix(SCORE)}_band" in arrays]
    sites = [name for name in sites if not name.endswith("_all_prompts")]
    (site_of, layer), (position, *_) = measured.ticks["place"], measured.ticks["position"]
    chosen = site_of if position == "last" else f"{site_of}_{position}"
    for site in sites:
        score, interval, band = (np.asarray(arrays[f"{site}_{what}"]) for what in ("score", "interval", "band"))
        x = np.array(measured.ticks.get("layer", range(len(score))), dtype=float)
        lines = np.atleast_2d(arrays.get(f"{site}_controls", np.empty((0, len(x)))))
        names = measured.ticks.get("control", ())
        above = interval[:, 0] > band[:, 1]
        best = int(np.flatnonzero(x == layer)[0]) if site == chosen and layer in x else None
        title = f"{site.replace('_', ' ')}, held-out {measured.quantities[f'{site}_score'].unit} by layer"
        drawn = _drawn(title, x, score, interval, band, list(zip(names, lines, strict=False)), above, best)
        yield drawn | {"wide": len(sites) == 1}
    if "by_number_score" in arrays:
        x = np.array(measured.ticks["rows"], dtype=float)
        score, ends = np.asarray(arrays["by_number_score"]), np.asarray(arrays["by_number_range"])
        unit = measured.quantities["by_number_score"].unit
        yield _drawn(f"{unit} by number of prompts", x, score, ends, None, [], np.zeros(len(x), dtype=bool), None)


def _drawn(
    title: str, x: np.ndarray, score: np.ndarray, interval: np.ndarray, band: np.ndarray | None,
    lines: Sequence[tuple[str, np.ndarray]], above: np.ndarray, best: int | None,
) -> dict[str, Any]:  # fmt: skip
    """Paths in percent of the plot's area, and labels with their places."""
    every = np.concatenate(
        [score, interval.ravel(), *([band.ravel()] if band is not None else []), *(y for _, y in lines)]
    )
    low, high = float(every.min()), float(every.max())
    if low >= 0 and high <= 1:
        low, high = min(low, 0.4), 1.0
    pad = 0.04 * (high - low or 1)
    low, high = low - pad, high + pad
    half = 0.5 * (float(np.diff(x).min()) if len(x) > 1 else 1.0)
    left, right = float(x.min()) - half, float(x.max()) + half

    def across(value: float) -> float:
        return round(100 * (value - left) / (right - left), 2)

    def up(value: float) -> float:
        return round(100 - 100 * (value - low) / (high - low), 2)

    def path(y: Any, places: Any = x) -> str:
        return " ".join(f"{across(a)},{up(b)}" for a, b in zip(places, y, strict=True))

    def area(ends: np.ndarray) -> str:
        if len(x) == 1:
            return path([*ends[0], *ends[0][::-1]], [left, left, right, right])
        return path([*ends[:, 0], *ends[::-1, 1]], [*x, *x[::-1]])

    step = next(s for s in (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 50, 1e9) if (high - low) / s <= 7)
    ticks = np.arange(np.ceil(low / step), np.floor(high / step) + 1) * step
    shown = x[:: max(1, len(x) // 12)] if len(x) > 4 else x
    runs = np.flatnonzero(np.diff(np.concatenate([[0], above.astype(int), [0]]))).reshape(-1, 2)
    return {
        "title": title,
        "label": f"{title}: {short(score.min())} to {short(score.max())}",
        "score": path(score),
        "dots": [(across(a), up(b), f"{a:g}: {short(b)}") for a, b in zip(x, score, strict=True)],
        "interval": area(interval),
        "band": "" if band is None else area(band),
        "lines": [(name, COLOURS[(i + 1) % len(COLOURS)], path(y)) for i, (name, y) in enumerate(lines)],
        "above": [(across(x[i] - half), across(x[j - 1] + half) - across(x[i] - half)) for i, j in runs],
        "best": None if best is None else (across(x[best]), f"{x[best]:g}: {score[best]:.2f}", x[best] > x.mean()),
        "x": [(across(value), f"{value:g}") for value in shown],
        "y": [(up(value), short(value)) for value in ticks],
        "wide": False,
    }


def _texts(record: Record, measured: Result) -> list[tuple[str, list[tuple[int, str, str]]]]:
    """The wrong texts, and those at both ends of the score; of a number those with the largest residuals."""
    prediction, residual = (np.asarray(measured.arrays[f"probe_{what}"]) for what in ("prediction", "residual"))
    label, text = record.prompts.get(str(record.facts.get("target")), ()), record.prompts.get("text", ())
    if not len(label) == len(text) == len(prediction):
        return []
    order, classes = np.argsort(prediction, kind="stable"), measured.ticks.get("true_class", ())

    def listed(rows: Any, said: Sequence[str]) -> list[tuple[int, str, str]]:
        return [(int(i), last_words(text[i]), one) for i, one in zip(rows, said, strict=True)]

    if "probe_class" not in measured.arrays:
        worst = np.argsort(-np.abs(residual), kind="stable")[:WRONG]
        said = [f"{label[i]}, predicted {prediction[i]:.3g}" for i in worst]
        return [(f"Farthest off, of {len(text)}", listed(worst, said))]
    named = [classes[int(i)] for i in measured.arrays["probe_class"]]
    wrong = [i for i in range(len(text)) if str(label[i]) != named[i]]
    wrong.sort(key=lambda i: -abs(float(residual[i])))
    said = [f"is {label[i]}, read as {named[i]}" for i in wrong[:WRONG]]
    found = [(f"Wrong: {len(wrong)} of {len(text)}", listed(wrong[:WRONG], said))]
    if len(classes) == 2:
        for what, rows in ((classes[0], order[:ENDS]), (classes[1], order[: -ENDS - 1 : -1])):
            said = [f"{prediction[i]:.2f}, is {label[i]}" for i in rows]
            found.append((f"Most like {what}", listed(rows, said)))
    return found
