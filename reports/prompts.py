"""The prompts of a record: the columns one can read, sort and colour by, and what a point says when pointed at."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from llmgeom.reports.text import compact, plotly_text, titled, visible, written

UNITS = {"entropy": "bits", "tokens": "count"}
# Colour-blind-safe; the eighth stands for all categories beyond seven.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#9a9a9a")
SHAPES = ("circle", "square", "diamond", "cross", "triangle-up", "x", "star", "circle-open")
SHOWN_CATEGORIES = len(COLOURS) - 1
PARTS = ("pieces", "next tokens", "attention")  # shown in the panel of a prompt, not in a table
FINAL = "final token"
# Of colours, next to a figure.
BAR = {"thickness": 12, "len": 0.6, "x": 1.02, "y": 1, "yanchor": "top", "outlinewidth": 0}


def complete(prompts: Mapping[str, tuple]) -> Mapping[str, tuple]:
    """The prompts with their final token as a column, where the record holds token pieces; names as they are shown."""
    prompts = {visible(name): column for name, column in prompts.items()}
    if "pieces" not in prompts or FINAL in prompts:
        return prompts
    return {**prompts, FINAL: tuple(row[-1] if row else "" for row in prompts["pieces"])}


def prompt_columns(prompts: Mapping[str, tuple]) -> dict[str, Any]:
    """Data that every scatter of a record shares: the hover text of each prompt, and the traces of each colour column,
    where `rows` stands for the x, y and hover text of those prompts."""
    columns: dict[str, list[dict[str, Any]]] = {}
    prompts = complete(prompts)
    for name in ordered(prompts):
        values, title = prompts[name], plotly_text(titled(name, UNITS.get(name, "")))
        if numeric(values):
            bar = BAR | {"title": {"text": title, "side": "top", "font": {"size": 14}}}
            trace = marks(color=compact(values), colorscale="Cividis", colorbar=bar)
            columns[name] = [trace | {"rows": list(range(len(values)))}]
        elif name != "text":
            words = [written(v) for v in values]
            counted = Counter(words)
            categories = sorted(counted, key=lambda w: (-counted[w], w))[:SHOWN_CATEGORIES]
            names = [plotly_text(word or "(none)", 30, 60) for word in sorted(categories)]
            others = [f"{len(counted) - len(categories)} others"] if len(counted) > len(categories) else []
            code = {word: i for i, word in enumerate(sorted(categories))}
            rows: list[list[int]] = [[] for _ in names + others]
            for i, word in enumerate(words):
                rows[code.get(word, len(categories))].append(i)
            columns[name] = [
                marks(color=COLOURS[c], symbol=SHAPES[c]) | {"name": shown, "showlegend": True, "rows": rows[c]}
                for c, shown in enumerate(names + others)
            ]
    hover = []
    for i, text in enumerate(prompts.get("text", ())):
        facts = [f"{titled(c, UNITS.get(c, ''))} {written(prompts[c][i])}" for c in ordered(prompts) if c != "text"]
        hover.append(f"prompt {i}<br>{plotly_text(written(text))}<br><i>{plotly_text('; '.join(facts))}</i>")
    return {"columns": columns, "hover": hover}


def cards(prompts: Mapping[str, tuple]) -> dict[str, Any]:
    """What stands beside the figures when a prompt is pointed at: its columns, token pieces and likeliest next tokens,
    as text in which nothing is invisible."""
    prompts = complete(prompts)
    columns = ordered(prompts)
    rows = zip(*(prompts[c] for c in columns), strict=True)
    return {
        "head": [titled(c, UNITS.get(c, "")) for c in columns],
        "domain": columns.index("domain") if "domain" in columns else -1,
        "rows": [[visible(written(v)) for v in row] for row in rows],
        "pieces": [[visible(piece) for piece in row] for row in prompts.get("pieces", ())],
        "next": [[[visible(piece), p] for piece, p in row] for row in prompts.get("next tokens", ())],
        "attention": [[visible(layer) for layer in row] for row in prompts.get("attention", ())],
    }


def marks(**marker: Any) -> dict[str, Any]:
    """A trace of a scatter, but for where its points lie and what they say."""
    outlined = {"size": 9, "line": {"width": 0.75, "color": "#1a1a1a"}}
    return {"mode": "markers", "hoverinfo": "text", "marker": outlined | marker}


def ordered(prompts: Mapping[str, tuple]) -> list[str]:
    """The columns of a prompt table in reading order."""
    first = [c for c in ("text", "entropy", FINAL, "template", "domain", "tokens", "tags") if c in prompts]
    return first + sorted(set(prompts) - {*first, *PARTS})


def numeric(values: tuple) -> bool:
    """Whether a prompt column holds finite numbers only."""
    return all(isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in values)
