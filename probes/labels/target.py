"""The target of a label probe: a column as a binary label, several classes or a number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

import numpy as np
from jaxtyping import Float, Shaped

from llmgeom.batch import Batch, row_numbers
from llmgeom.errors import UserError, unknown
from llmgeom.stats.label_scores import Kind

LEAST = 5  # least rows of a class
MOST_CLASSES = 30
Wanted = Literal["auto", "binary", "classes", "number"]


@dataclass(frozen=True)
class Target:
    """A label: its kind, its value for each prompt, and its classes in order of value (none for a number)."""

    name: str
    kind: Kind
    label: np.ndarray
    classes: tuple[str, ...]


def read_target(batch: Batch, name: str, kind: Wanted = "auto") -> Target:
    """A column as a label.

    With kind "auto", two values are a binary label, more numbers are a number, and more texts are classes. The positive
    value of a binary label is the second in sorted order; numbers are sorted as numbers. Raises UserError: no such
    column, bad cells, one value, a class of fewer than 5 rows, or too many classes.
    """
    if name not in batch.columns:
        raise _no_column(batch, name, kind)
    column = batch.column(name)
    values = sorted(set(column))
    if len(values) < 2:
        raise UserError(f"column {name!r} is {values[0]!r} in all {len(column)} rows: a label needs two values")
    numeric = not isinstance(column[0], str | bool)
    if kind == "auto":
        kind = "binary" if len(values) == 2 else "number" if numeric else "classes"
    if kind == "number":
        if not numeric:
            size = " of at most 64 bits" * str(values[0]).lstrip("+-").isdigit()  # a longer one is read as a name
            raise UserError(f"--kind number: column {name!r} holds {values[0]!r}, which is no number{size}")
        return Target(name, kind, np.array(column, dtype=np.float64), ())
    if kind == "binary" and len(values) > 2:
        raise UserError(f"--kind binary: column {name!r} has {len(values)} values; two are expected, or --kind classes")
    _check_classes(name, column)
    names = {value: str(value) for value in values}  # by value: 1 and 1.0 are one class
    return Target(name, kind, np.array([names[cell] for cell in column]), tuple(names.values()))


def _no_column(batch: Batch, name: str, kind: Wanted) -> UserError:
    """The error for a missing column; it names the columns that can be a label."""
    labels = []
    for column in batch.columns:
        with suppress(UserError):
            labels.append(read_target(batch, column, kind).name)
    if not labels:
        return UserError(
            f"--target {name}: there is no such column, and none that can be a label; add one with two values or more, "
            f"each in at least {LEAST} rows"
        )
    varied = [column for column, cells in batch.columns.items() if len(set(cells)) > 1]
    near = get_close_matches(name, varied, n=1)  # if the close column cannot be a label, the next error says why
    return unknown("column of --target", name, labels, ", the columns that can be a label", near)


def read_weights(batch: Batch, name: str) -> Float[np.ndarray, " row"]:
    """A column of weights. Raises UserError: no such column, bad cells, or cells that are not numbers above 0."""
    column = batch.column(name)
    if isinstance(column[0], str | bool):
        raise UserError(f"--weight {name}: the column holds {column[0]!r}, which is no number")
    if wrong := [i for i, cell in enumerate(column, 1) if not cell > 0]:
        raise UserError(
            f"--weight {name}: no number above 0 in {row_numbers(wrong)}: give each row a weight, or leave it out"
        )
    return np.array(column, dtype=np.float64)


def transferred(batch: Batch, target: Target, column: str) -> Shaped[np.ndarray, " row"]:
    """The cells of a transfer column: each of its values is predicted from the others.

    Raises UserError: fewer than 3 values, a value without 5 rows of every class, or a cluster with two values.
    """
    cells, clusters = np.array([str(cell) for cell in batch.column(column)]), np.asarray(batch.cluster)
    values = np.unique(cells)
    if len(values) < 3:
        raise UserError(
            f"--transfer {column}: it has {len(values)} values; at least 3 are needed, since the penalty is "
            "chosen by holding out a second one"
        )
    for value, rows in ((value, cells == value) for value in values):
        short = [name for name in target.classes if (target.label[rows] == name).sum() < LEAST]
        if short or rows.sum() < LEAST:
            raise UserError(f"--transfer {column}: {str(value)!r} has fewer than {LEAST} prompts of {short or 'any'}")
    if mixed := [name for name in set(clusters.tolist()) if len(set(cells[clusters == name])) > 1]:
        raise UserError(f"--transfer {column}: cluster {mixed[0]!r} has several of its values; clusters stay whole")
    return cells


def _check_classes(name: str, column: Sequence) -> None:
    count = Counter(column)
    if len(count) > MOST_CLASSES:
        raise UserError(
            f"column {name!r} has {len(count)} classes in {len(column)} rows; at most {MOST_CLASSES} can be read: "
            "join classes, or give --kind number if it counts something"
        )
    rare = {value for value, n in count.items() if n < LEAST}
    if rare:
        rows = [i for i, cell in enumerate(column, 1) if cell in rare]
        raise UserError(
            f"column {name!r} has fewer than {LEAST} rows of {', '.join(map(repr, sorted(rare)))} "
            f"({row_numbers(rows)}): add prompts of this class, or remove these rows"
        )
