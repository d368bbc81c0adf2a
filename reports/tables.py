"""A record as tables of columns: its prompts, its numbers layer by layer, and its metrics (numpy only)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from llmgeom.errors import UserError
from llmgeom.record import Record, known

Columns = Mapping[str, list]
KINDS = {"prompts": "prompts", "layers": "layers", "metrics": "estimates"}  # of `Record.frame` -> of `tables`


def tables(record: Record) -> dict[str, Columns]:
    """The numbers of a record as three long tables.

    Returns:
        prompts: a row a prompt: its columns, and every quantity measured of each prompt, PROBE.QUANTITY.PLACE
            (measured.PROBE.QUANTITY.PLACE if the prompts have a column of this name).
        layers: a row a number of a layer: probe, quantity, unit, layer, the axis and the place along it of a second
            axis (head 3, bound low; empty where there is none), value.
        metrics: a row a metric, with all its fields; None for a number that it does not have.
    """
    prompts = {name: _alike(column) for name, column in record.prompts.items()}
    count = len(next(iter(prompts.values()), ()))
    layers: dict[str, list] = {name: [] for name in ("probe", "quantity", "unit", "layer", "axis", "at", "value")}
    estimates: dict[str, list] = {}
    for probe, measured in sorted(record.results.items()):
        for name, quantity in measured.quantities.items():
            array, axes = np.asarray(measured.arrays[name]), quantity.axes
            if axes[:1] == ("prompt",) and len(axes) < 3 and len(array) == count:
                flat = array.reshape(count, -1)
                places = _ticks(measured.ticks, axes[1], flat.shape[1]) if axes[1:] else [""]
                for place, column in zip(places, flat.T, strict=True):
                    title = f"{probe}.{name}.{place}" if axes[1:] else f"{probe}.{name}"
                    prompts[f"measured.{title}" if title in record.prompts else title] = column.tolist()
            if "layer" in axes and len(axes) < 3:
                numbers = _ticks(measured.ticks, "layer", array.shape[axes.index("layer")])
                axis = next((other for other in axes if other != "layer"), "")
                for layer, row in zip(numbers, np.moveaxis(array, axes.index("layer"), 0), strict=True):
                    places = _ticks(measured.ticks, axis, len(row)) if axis else [""]
                    for place, value in zip(places, row.reshape(-1).tolist(), strict=True):
                        cells = (probe, name, quantity.unit, int(layer), axis, place, float(value))
                        for cell, kept in zip(cells, layers.values(), strict=True):
                            kept.append(cell)
        for estimate in measured.estimates:
            for field, cell in {"probe": probe, **known(estimate)}.items():
                estimates.setdefault(field, []).append(plain(cell) if isinstance(cell, list | tuple) else cell)
    return {"prompts": prompts, "layers": layers, "estimates": estimates}


def frame(record: Record, kind: str) -> Any:
    """A table of pandas; see `Record.frame`."""
    if kind not in KINDS:
        raise UserError(f"frame {kind!r}: expected {', '.join(KINDS)}")
    try:
        import pandas
    except ImportError as error:
        raise UserError(f"Record.frame needs the package pandas ({error}); pip install pandas") from error
    return pandas.DataFrame({name: floats(column) for name, column in tables(record)[KINDS[kind]].items()})


def floats(column: list) -> Any:
    """A column, as an array with NaN if numbers are absent: it is of numbers also where all are."""
    return np.array(column, dtype=float) if None in column else column


def _ticks(ticks: Mapping[str, tuple], axis: str, length: int) -> list[str]:
    """The labels along an axis: its names, low and high along a bound, else 0, 1, 2 ..."""
    plain = ("low", "high") if axis == "bound" and length == 2 else range(length)
    return [str(tick) for tick in ticks.get(axis, plain)]


def _alike(column: tuple) -> list[Any]:
    """A column of one type: what mixes kinds, or holds lists, as text."""
    kinds = {type(cell) for cell in column}
    if len(kinds) > 1 and kinds <= {int, float}:
        return [float(cell) for cell in column]
    simple = len(kinds) <= 1 and kinds <= {int, float, str, bool}
    return list(column) if simple else [cell if isinstance(cell, str) else plain(cell) for cell in column]


def plain(data: Any) -> str:
    """JSON of plain data, equal for equal data."""
    return json.dumps(data, sort_keys=True, ensure_ascii=False, allow_nan=False)
