"""The words that fill the slots of templates, by name: a person, a place, a country with its capital."""

from __future__ import annotations

import functools
import re
from pathlib import Path

DATA = Path(__file__).parent / "data"
_LEXICON = re.compile(r"([a-z_]+)(?: \(([\w, ]+)\))?:(.*)", re.DOTALL)


@functools.cache
def lexicon() -> dict[str, tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]]:
    """name -> (columns, entries), from words.lexicon: `name (column, ...): entry; entry / second column; ...`."""
    source = (DATA / "words.lexicon").read_text(encoding="utf-8")
    kept = "\n".join(line for line in source.split("\n") if not line.startswith("#"))
    tables = {}
    for block in re.split(r"\n(?=\S)", kept.strip()):
        match = _LEXICON.fullmatch(block)
        if match is None:
            raise ValueError(f"words.lexicon: expected 'name: entry; entry', got {block!r}")
        columns = tuple(name.strip() for name in (match[2] or "name").split(","))
        rows = [tuple(" ".join(cell.split()) for cell in row.split("/")) for row in match[3].split(";") if row.strip()]
        wrong = [row for row in rows if len(row) != len(columns) or not all(row)]
        if wrong or len(set(rows)) < len(rows):
            raise ValueError(f"words.lexicon: {match[1]} has a repeated entry, or one without {columns}: {wrong}")
        tables[match[1]] = (columns, tuple(rows))
    return tables
