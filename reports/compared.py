"""Records of the same prompts held against the first: differences with intervals, as a table and a figure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from llmgeom.reports.figures import Drawn, draw
from llmgeom.reports.text import numbers, plotly_text
from llmgeom.result import Figure, Measured, Quantity

TESTS = (
    "p of none: of no difference. p beyond: of a difference as large as the effect of interest, or larger, so that a "
    "small one says equivalent. Both are corrected over all rows."
)
EFFECTS = "effects of interest"


def pairs(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the template says of each pair of a comparison (`Comparison.to_dict()`)."""
    return [
        {
            "reference": pair["reference"],
            "record": pair["record"],
            "tests": TESTS,
            "rows": [_row(d) for d in pair["differences"]],
            "left_out": pair["left_out"],
            "drawn": _lying(draw(_measured(pair), "difference", f"difference-{i}", 0, {}))
            if pair["differences"]
            else None,
        }
        for i, pair in enumerate(found["pairs"])
    ]


def _row(d: Mapping[str, Any]) -> tuple[str, ...]:
    value, low, high = numbers(d["value"], d["low"], d["high"])
    both = numbers(d["ours"], d["theirs"])
    said = f"{d['verdict']}: {d['why']}" + f"; {d['note']}" * bool(d["note"])
    name = f"{d['probe']}: {d['metric']}"
    method = f"{d['method']}, {d['clusters']} units"
    return (
        name, *both, f"{value} {d['unit']}", f"{low} to {high}", method, f"{d['p']:.2g}", f"{d['p_within']:.2g}", said
    )  # fmt: skip


def _lying(curve: Drawn) -> Drawn:
    """The curve with its names, which are long, one under the other."""
    swap = {"x": "y", "y": "x", "error_y": "error_x"}
    traces = [{swap.get(key, key): value for key, value in trace.items()} for trace in curve.spec["data"]]
    *_, shade, line = traces
    shade |= {"fill": "tonextx", "name": "smaller than the effect of interest"}
    line |= {"name": "difference"}
    layout = dict(curve.spec["layout"])
    across, down = layout.pop("yaxis"), layout.pop("xaxis")
    words = [plotly_text(row[0], 200) for row in curve.rows]
    names = {"title": None, "range": down["range"][::-1], "ticktext": words}
    layout |= {"xaxis": across, "yaxis": down | names, "height": 150 + 26 * len(line["y"])}
    return replace(curve, spec=dict(curve.spec) | {"data": traces, "layout": layout})


def _measured(pair: Mapping[str, Any]) -> Measured:
    """All differences on one axis: each divided by the effect of interest that its metric declares."""
    rows = pair["differences"]
    value, low, high = (np.array([d[key] / d["effect"] for d in rows]) for key in ("value", "low", "high"))
    figure = Figure("curve", band="equivalent", interval="interval")
    return Measured(
        title=f"{pair['record']} less {pair['reference']}",
        meaning="", computed="", null="", failure_modes="", estimates=(),
        quantities={
            "difference": Quantity(("metric",), EFFECTS, "difference", figure),
            "interval": Quantity(("metric", "bound"), EFFECTS, "95 % interval"),
            "equivalent": Quantity(("metric", "bound"), EFFECTS, "smaller than the effect of interest"),
        },
        arrays={
            "difference": value,
            "interval": np.stack([low, high], 1),
            "equivalent": np.tile([-1.0, 1.0], (len(rows), 1)),
        },
        ticks={"metric": tuple(f"{d['probe']}: {d['metric']}" for d in rows)},
    )  # fmt: skip
