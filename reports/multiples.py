"""Small multiples: one plane of prompts, drawn once for each column that it can be coloured by, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from llmgeom.record import Record
from llmgeom.reports.drawing import blend
from llmgeom.reports.prompts import COLOURS, FINAL, complete, numeric
from llmgeom.reports.text import visible, written

PROBE, SCORES, CONTROL = "value_manifold", "scores", "control_scores"
COLUMNS = {"entropy": "next-token entropy", FINAL: "final token", "tokens": "length in tokens"}
SIDE, EDGE = 300, 14  # pixels
# Of viridis, dark to light; each is read on white and on black.
SCALE = ("#440154", "#414487", "#2a788e", "#22a884", "#7ad151", "#c8d420")
NAMED = 5  # categories with a colour of their own
ENDS, TAIL = 4, 48  # prompts at each end of PC1, and how many of their last characters are shown


class Dot(NamedTuple):
    """A prompt: where it lies, its colour, its number."""

    x: float
    y: float
    fill: str
    prompt: int


class Panel(NamedTuple):
    """One plane: what it shows, its dots, and its key as (colour, text)."""

    title: str
    label: str
    dots: tuple[Dot, ...]
    key: tuple[tuple[str, str], ...]


def multiples(record: Record) -> list[Panel]:
    """Values of the last layer along their first two components, by entropy, final token and length.

    The last panel is the same of an untrained control, where the record holds it. Empty without these scores.
    """
    measured = record.results.get(PROBE)
    if measured is None or SCORES not in measured.arrays:
        return []
    scores = np.asarray(measured.arrays[SCORES], dtype=float)
    prompts = complete(record.prompts)
    shown = {name: prompts[name] for name in COLUMNS if len(prompts.get(name, ())) == len(scores)}
    if scores.ndim != 2 or scores.shape[1] < 2:
        return []
    panels = [_panel(f"by {COLUMNS[name]}", scores, name, values) for name, values in shown.items()]
    if CONTROL in measured.arrays and "entropy" in shown:
        control = np.asarray(measured.arrays[CONTROL], dtype=float)
        panels.append(_panel("untrained copy, by entropy", control, "entropy", shown["entropy"]))
    return panels


def extremes(record: Record) -> list[tuple[str, list[tuple[int, str, str]]]]:
    """The prompts at both ends of PC1 of the values, outermost first: number, last words, entropy; empty without."""
    measured, text = record.results.get(PROBE), record.prompts.get("text", ())
    scores = np.asarray([] if measured is None else measured.arrays.get(SCORES, []), dtype=float)
    if scores.ndim != 2 or not len(scores) == len(text) >= 2 * ENDS:
        return []
    order = np.argsort(scores[:, 0], kind="stable").tolist()
    entropy = record.prompts["entropy"]
    ends = {"Lowest on PC1 (left)": order[:ENDS], "Highest on PC1 (right)": order[: -ENDS - 1 : -1]}
    return [
        (title, [(i, last_words(text[i]), f"{entropy[i]:.1f} bits") for i in prompts])
        for title, prompts in ends.items()
    ]


def last_words(text: str) -> str:
    """The end of a prompt, in which nothing is invisible."""
    shown = visible(text)
    return shown if len(shown) <= TAIL else f"…{shown[1 - TAIL :]}"


def _panel(title: str, scores: np.ndarray, name: str, values: Sequence[Any]) -> Panel:
    x, y = _within(scores[:, 0]), _within(-scores[:, 1])  # down the page is down PC2
    colours, key = _gradient(values, name) if numeric(tuple(values)) else _categories(values)
    dots = tuple(Dot(a, b, colour, i) for i, (a, b, colour) in enumerate(zip(x, y, colours, strict=True)))
    return Panel(title, f"{len(dots)} prompts along PC1 and PC2 of the values, {title}", dots, key)


def _within(values: np.ndarray) -> list[float]:
    width = float(values.max() - values.min()) or 1.0
    return [round(EDGE + (SIDE - 2 * EDGE) * float(v - values.min()) / width, 1) for v in values]


def _gradient(values: Sequence[float], name: str) -> tuple[list[str], tuple[tuple[str, str], ...]]:
    low, high = min(values), max(values)
    shares = [(v - low) / ((high - low) or 1) for v in values]
    unit = " bits" if name == "entropy" else ""
    return [blend(share, SCALE) for share in shares], ((SCALE[0], f"{low:.3g}{unit}"), (SCALE[-1], f"{high:.3g}{unit}"))


def _categories(values: Sequence[Any]) -> tuple[list[str], tuple[tuple[str, str], ...]]:
    words = [written(v) for v in values]
    ranked = sorted(set(words), key=lambda word: (-words.count(word), word))
    colour = dict(zip(ranked[:NAMED], COLOURS, strict=False))
    key = [(colour[word], f"“{visible(word).strip() or 'space'}” {words.count(word)}") for word in ranked[:NAMED]]
    rest = len(words) - sum(words.count(word) for word in ranked[:NAMED])
    key += [(COLOURS[-1], f"others {rest}")] if rest else []
    return [colour.get(word, COLOURS[-1]) for word in words], tuple(key)
