"""How strings and numbers are written where people read them: nothing invisible, no digit that means nothing."""

from __future__ import annotations

import html
import math
import textwrap
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

TEMPLATED = ("domain", "file")  # kinds of prompts whose clusters are templates
SIGNS = (("|rho|", "|ρ|"), ("rho ", "ρ "), ("R2", "R²"), ("bits^2", "bits²"))


def visible(text: str) -> str:
    """The text with every control, bidirectional, zero-width and unpaired character spelt out: \\n and \\u202e."""
    if text.isprintable():  # nearly always; no such character is printable
        return text
    # Not the control pictures of Unicode (␊, ␛): many systems have no font for them.
    unseen = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return "".join(repr(c)[1:-1] if unicodedata.category(c) in unseen else c for c in text)


def plotly_text(text: str, width: int = 60, longest: int = 300) -> str:
    """The text for Plotly, which reads a few HTML tags in titles and hover labels: cut, wrapped, then escaped."""
    text = visible(text)
    if len(text) > longest:
        text = text[:longest] + " …"
    lines = textwrap.wrap(text, width, replace_whitespace=False)
    return "<br>".join(html.escape(line, quote=False) for line in lines)


def numbers(*values: float) -> list[str]:
    """Numbers that are read together, as `aligned` writes them."""
    return aligned(values, values)


def aligned(values: Sequence[float], like: Sequence[float]) -> list[str]:
    """Numbers with the decimals that give the range of others, which stand in the same row, two significant digits.

    The largest number has at most four: an interval of 0.00006 around 0.99425 is no news to a reader.
    """
    largest = max(abs(v) for v in (*values, *like))
    spread = (max(like) - min(like)) or max(map(abs, like)) / 10 or 1.0
    decimals = 1 - math.floor(math.log10(spread))
    decimals = min(decimals, 3 - math.floor(math.log10(largest or 1.0)))
    if largest >= 1e6 or decimals > 6:
        return [f"{v:.6g}" for v in values]
    return [f"{round(v, max(decimals, 0)) + 0.0:.{max(decimals, 0)}f}" for v in values]


def written(value: Any) -> str:
    """Any value of a record's subject, source, facts or prompts in one line, whatever order its keys came in."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {written(value[key])}" for key in sorted(value))
    if isinstance(value, list | tuple):
        return ", ".join(map(written, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def compact(values: Any) -> list[float]:
    """Numbers at six significant digits: what a picture can show, at half the bytes."""
    rounded = (float(f"{v:.6g}") + 0.0 for v in values)
    return [int(v) if v.is_integer() else v for v in rounded]


def titled(meaning: str, cluster: str) -> str:
    return f"{meaning} [{cluster}]" if cluster else meaning


def grid(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows under a title and column heads, columns two spaces apart; nothing where there are no rows."""
    if rows:
        cells = [(title, *head), *(tuple(map(visible, row)) for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        yield ""
        yield from ("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


def columns(rows: Sequence[Sequence[str]], at: int, width: int) -> list[str]:
    """Rows in columns; the column `at` is cut so that a row has at most `width` characters."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rest = sum(widths) - widths[at] + 2 * (len(widths) - 1)
    widths[at] = max(min(widths[at], width - rest), 16)
    cut = [[shortened(cell, size) for cell, size in zip(row, widths, strict=True)] for row in rows]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cut]


def shortened(text: str, width: int) -> str:
    """The text in one line of at most `width` characters."""
    text = visible(text)
    return text if len(text) <= width else text[: width - 2].rstrip() + " …"


def pretty(text: str) -> str:
    """Metric names as they are printed: ρ, R², bits²."""
    for plain, sign in SIGNS:
        text = text.replace(plain, sign)
    return text
