"""The prompts of a record: the columns one can read, sort and colour by, and what a point says when pointed at."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from llmgeom.reports.text import compact, plotly_text, titled, written

UNITS = {"entropy": "bits", "tokens": "count"}
SHOWN_CATEGORIES = 7  # as many as the colour-blind-safe palette of page.js has


def prompt_columns(prompts: Mapping[str, tuple]) -> dict[str, Any]:
    """What every scatter of a record shares: the hover text of each prompt and the columns to colour by."""
    columns: dict[str, Any] = {}
    for name in ordered(prompts):
        values, title = prompts[name], plotly_text(titled(name, UNITS.get(name, "")))
        if numeric(values):
            columns[name] = {"title": title, "values": compact(values)}
        elif name != "text":
            words = [written(v) for v in values]
            counted = Counter(words)
            kept = sorted(counted, key=lambda w: (-counted[w], w))[:SHOWN_CATEGORIES]
            names = [plotly_text(word or "(none)", 30, 60) for word in sorted(kept)]
            others = [f"{len(counted) - len(kept)} others"] if len(counted) > len(kept) else []
            code = {word: i for i, word in enumerate(sorted(kept))}
            columns[name] = {"title": title, "names": names + others, "values": [code.get(w, len(kept)) for w in words]}
    hover = []
    for i, text in enumerate(prompts.get("text", ())):
        facts = [f"{titled(c, UNITS.get(c, ''))} {written(prompts[c][i])}" for c in ordered(prompts) if c != "text"]
        hover.append(f"prompt {i}<br>{plotly_text(written(text))}<br><i>{plotly_text('; '.join(facts))}</i>")
    return {"columns": columns, "hover": hover}


def ordered(prompts: Mapping[str, tuple]) -> list[str]:
    """The columns of a prompt table in reading order."""
    first = [c for c in ("text", "entropy", "template", "domain", "tokens", "tags") if c in prompts]
    return first + sorted(set(prompts) - set(first))


def numeric(values: tuple) -> bool:
    """Whether a prompt column holds finite numbers only."""
    return all(isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in values)
