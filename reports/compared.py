"""Records of the same prompts less the first: one forest plot, one sortable table, and a figure for each curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from llmgeom.reports.figures import LINE, NULL, Drawn, draw
from llmgeom.reports.text import names_of, number_of, numbers, plotly_text, pretty
from llmgeom.result import Figure, Measured, Quantity, with_parts

EFFECTS = "effects of interest"
# The mark of each verdict; its shape says what its colour says.
MARKS = {
    "differs": {"color": "#D55E00", "symbol": "diamond"},
    "differs, less than the effect": {"color": "#D55E00", "symbol": "diamond-open"},
    "equivalent": {"color": LINE, "symbol": "circle"},
    "undecided": {"color": NULL, "symbol": "circle-open"},
}


def differences(comparison: Mapping[str, Any]) -> dict[str, Any]:
    """The template's data of a comparison (`Comparison.to_dict()`); empty without a comparison."""
    pairs = comparison["pairs"]
    rows = [(pair["record"], d) for pair in pairs for d in pair["differences"]]
    metrics = list(dict.fromkeys((d["probe"], d["metric"]) for _, d in rows))
    rows.sort(key=lambda row: metrics.index((row[1]["probe"], row[1]["metric"])))
    names = [pair["record"] for pair in pairs]
    several = len(pairs) > 1
    words = [d["verdict"] for _, d in rows]
    forest = [_lying(draw(_forest(rows, several), "difference", "difference-0", 0, {}), words)] if rows else []
    curves = [
        draw(_curve(curve, pair["record"], pair["reference"]), "difference", f"difference-{i}-{name}", 0, {})
        for i, pair in enumerate(pairs)
        for name, curve in ((f"{c['probe']}-{c['name']}", c) for c in pair["curves"])
    ]
    return {
        "reference": pairs[0]["reference"],
        "title": f"{names[0] if not several else f'{len(names)} runs'} less {pairs[0]['reference']}",
        "counted": [pair["counted"] for pair in pairs],
        "found": [text for pair in pairs for text in pair["findings"]],
        "rows": [_row(record, d) for record, d in rows],
        "drawn": [*forest, *curves],
        "notes": [f"{pair['record']}: {note}" for pair in pairs for note in pair["notes"]] + list(comparison["notes"]),
        "left_out": [f"{pair['record']}: {sentence}" for pair in pairs for sentence in pair["left_out"]],
    }


def _row(record: str, d: Mapping[str, Any]) -> tuple[str, ...]:
    value, low, high = numbers(d["value"], d["low"], d["high"])
    both = numbers(d["ours"], d["theirs"])
    method = f"{d['method']}, {number_of(d['clusters'], d['counts'])}"
    span = (f"{value} {d['unit']}", f"{low} to {high}", method, f"{d['p']:.2g}", f"{d['p_within']:.2g}")
    return (_name(d), record, *both, *span, f"{d['verdict']}: {d['why']}")


def _name(d: Mapping[str, Any]) -> str:
    return f"{pretty(d['metric'])} ({d['probe'].replace('_', ' ')})"


def _lying(curve: Drawn, verdicts: Sequence[str]) -> Drawn:
    """The curve with its names, which are long, one under the other, and a colour for each verdict."""
    swap = {"x": "y", "y": "x", "error_y": "error_x"}
    traces = [{swap.get(key, key): value for key, value in trace.items()} for trace in curve.spec["data"]]
    *_, shade, line = traces
    shade |= {"fill": "tonextx", "name": "smaller than the effect of interest"}
    traces[-1:] = [_of_word(line, word, verdicts) for word in MARKS if word in verdicts]
    layout = dict(curve.spec["layout"])
    across, down = layout.pop("yaxis"), layout.pop("xaxis")
    words = [plotly_text(row[0], 40) for row in curve.rows]  # two lines at most, so that a phone shows both
    names = {"title": None, "range": down["range"][::-1], "ticktext": words, "tickfont": {"size": 12}}
    # Rows may be many: what the axis says stands above them.
    across |= {"side": "top", "title": {"text": f"difference, in<br>{EFFECTS}"}}
    legend = {"legend": {"yref": "container", "y": 1, "yanchor": "top"}, "margin": {"t": 120, "b": 16}}
    layout |= {"xaxis": across, "yaxis": down | names, "height": 136 + 34 * len(line["y"]), **legend}
    return replace(curve, spec=dict(curve.spec) | {"data": traces, "layout": layout})


def _of_word(line: Mapping[str, Any], word: str, verdicts: Sequence[str]) -> dict[str, Any]:
    """The differences that have this verdict."""
    kept = [i for i, other in enumerate(verdicts) if other == word]
    picked = {key: [line[key][i] for i in kept] for key in ("x", "y", "hovertext")}
    ends = {key: [line["error_x"][key][i] for i in kept] for key in ("array", "arrayminus")}
    error = line["error_x"] | ends | {"color": MARKS[word]["color"]}
    return dict(line) | picked | {"name": word, "error_x": error, "marker": line["marker"] | MARKS[word]}


def _forest(rows: list[tuple[str, Mapping[str, Any]]], several: bool) -> Measured:
    """All differences on one axis: each divided by the effect of interest that its metric declares."""
    value, low, high = (np.array([d[key] / d["effect"] for _, d in rows]) for key in ("value", "low", "high"))
    metrics = list(dict.fromkeys((d["probe"], d["metric"]) for _, d in rows))
    called = dict(zip(metrics, names_of(metrics), strict=True))
    names = tuple(called[d["probe"], d["metric"]] + f" · {record}" * several for record, d in rows)
    band = np.tile([-1.0, 1.0], (len(rows), 1))
    return _measured("differences", "metric", EFFECTS, names, value, low, high, band)


def _curve(curve: Mapping[str, Any], record: str, reference: str) -> Measured:
    """One curve of a record less that of the reference."""
    ends = (np.array(curve[key]) for key in ("value", "low", "high"))
    places = tuple(curve["places"])
    title = f"{curve['meaning']}, {record} less {reference}"
    return _measured(title, curve["axis"], curve["unit"], places, *ends)


def _measured(
    title: str,
    axis: str,
    unit: str,
    places: tuple,
    value: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    band: np.ndarray | None = None,
) -> Measured:
    """Differences along an axis as a result for `draw`; `band` is the range too small to matter."""
    around, meaning = {"interval": "95 % interval"}, title
    arrays = {"difference": value, "difference_interval": np.stack([low, high], 1)}
    if band is not None:
        around, meaning = around | {"null": "smaller than the effect of interest"}, "difference"
        arrays["difference_null"] = band
    quantities = with_parts("difference", Quantity((axis,), unit, meaning, Figure("curve")), around)
    return Measured(
        title=title, meaning="", computed="", null="", failure_modes="", estimates=(),
        quantities=quantities, arrays=arrays, ticks={axis: places},
    )  # fmt: skip
