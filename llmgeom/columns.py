"""Columns of a user's table: the columns to keep, and the values of their cells."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from llmgeom.batch import row_numbers
from llmgeom.errors import UserError, brief

# Names of a record's own columns: if a table has them (a saved run's prompts), they are not read.
COMPUTED = frozenset({
    "entropy", "tokens", "pieces", "next tokens", "attention", "held-out prediction", "likeliest answer",
    "p of the right answer",
})  # fmt: skip

CHOICES, MESSAGES = LISTS = ("choices", "messages")  # columns whose lists are kept, as JSON

MISSING = ("NAType", "NaTType")  # a missing cell of pandas, which need not be installed
MOSTLY = 0.9  # least share of numbers in a column of numbers with a few other cells


def kept(rows: Sequence[Mapping[str, Any]], known: frozenset[str]) -> tuple[dict[str, tuple], list[str]]:
    """The additional columns of a table, and those that cannot be kept.

    A cell is a number, a truth value or text; a missing cell is None. Lists and objects are no cells, but for those
    of LISTS. A whole number of more than 64 bits is text: it is a name, and no table of
    numbers can contain it.

    Args:
        rows: The table, row by row.
        known: Columns with a fixed meaning.

    Returns:
        Name -> one cell per row; and a phrase for each column with lists or objects, or that is a record's own.
    """
    names = dict.fromkeys(name for row in rows for name in row if name not in known)
    columns, left_out = {}, []
    for name in names:
        if name in COMPUTED:
            left_out.append(f"{name!r} is a column that llmgeom computes")
            continue
        cells = [_cell(row.get(name)) for row in rows]
        if name in LISTS:
            cells = [json.dumps(cell, ensure_ascii=False) if isinstance(cell, list) else cell for cell in cells]
        nested = [i for i, cell in enumerate(cells, 1) if not isinstance(cell, int | float | str | None)]
        if nested:
            left_out.append(f"{name!r} holds a {type(cells[nested[0] - 1]).__name__} in {row_numbers(nested)}")
        else:
            columns[name] = tuple(cells)
    return columns, left_out


def spoken(messages: Any, where: str) -> str:
    """A chat as text, a paragraph a turn. Raises UserError: no list of objects with a `role` and a `content`."""
    if isinstance(messages, str):
        with suppress(ValueError):
            messages = json.loads(messages)
    turns = list(messages) if isinstance(messages, list | tuple) else []
    if not turns or not all(isinstance(turn, Mapping) and isinstance(turn.get("content"), str) for turn in turns):
        raise UserError(
            f'{where}: {MESSAGES} is {brief(messages)}, expected [{{"role": "user", "content": "..."}}, ...]'
        )
    return "\n\n".join(f"{turn.get('role', 'user')}: {turn['content']}" for turn in turns)


def parsed(column: Sequence[str]) -> list[Any]:
    """The cells of a CSV column: whole numbers or numbers if every nonempty cell is one; else text.

    An empty cell is missing. If at least nine cells in ten are numbers, only the others are text: the column then mixes
    kinds, and `Batch.column` names the rows.
    """
    filled = [cell for cell in column if cell.strip()]
    whole = [_number(cell, int) for cell in filled]
    numbers = whole if None not in whole else [_number(cell, float) for cell in filled]
    if filled and sum(number is not None for number in numbers) >= MOSTLY * len(filled):
        known = {cell: cell if number is None else number for cell, number in zip(filled, numbers, strict=True)}
        return [known.get(cell) for cell in column]
    return [cell if cell.strip() else None for cell in column]


def _number(cell: str, kind: type) -> Any:
    try:
        return None if "_" in cell else kind(cell)  # Python reads 1_000 as a number
    except ValueError:
        return None


def _cell(value: Any) -> Any:
    if type(value).__name__ in MISSING:
        return None
    if hasattr(value, "item") and not isinstance(value, str):  # a number of numpy
        value = value.item()
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return str(value)
    return None if isinstance(value, float) and math.isnan(value) else value
