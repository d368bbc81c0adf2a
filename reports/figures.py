"""One declared quantity to one figure: what Plotly draws, a caption, and the same numbers as a table.

Curves of several records go into one chart, a colour each; other figures of several records into one row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from llmgeom.errors import UserError
from llmgeom.record import Record
from llmgeom.reports.drawing import svg
from llmgeom.reports.prompts import BAR, COLOURS, complete, marks, ordered, prompt_columns
from llmgeom.reports.text import (
    NO_INTERVAL,
    clusters_of,
    compact,
    counted,
    number_of,
    numbers,
    plotly_text,
    sizes,
    titled,
    value_and_interval,
    visible,
)
from llmgeom.result import FIGURE, Figure, Quantity, Result

if TYPE_CHECKING:
    from plotly.graph_objects import Figure as Plotly

LINE, NULL, INK, GRID = COLOURS[0], "#6b6b6b", "#1a1a1a", "#e4e4e4"
SIGNED = (COLOURS[0], "#ffffff", COLOURS[5])  # below 0, 0, above 0
DASHES = ("dash", "dot", "dashdot", "longdash", "longdashdot")
ORDER = ("scatter", "curve", "heatmap")
MOST = len(COLOURS) - 1  # records in one chart
FONT = {"family": "system-ui, sans-serif", "size": 14, "color": INK}
AXIS = {
    "automargin": True,
    "zeroline": False,
    "showline": True,
    "gridcolor": GRID,
    "linecolor": "#767676",
    "ticks": "outside",
    "exponentformat": "power",
    "title": {"standoff": 10, "font": {"size": 15}},
}
TEMPLATE = {
    "layout": {
        "height": 420,
        "margin": {"l": 70, "r": 24, "t": 16, "b": 60},
        "xaxis": AXIS,
        "yaxis": AXIS,
        "hovermode": "closest",
        "font": FONT,
        "paper_bgcolor": "#fff",
        "plot_bgcolor": "#fff",
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "hoverlabel": {"align": "left", "bgcolor": "#fff", "bordercolor": INK, "font": FONT},
    },
    "data": {"heatmap": [{"colorscale": "Cividis"}]},
}


@dataclass(frozen=True)
class Drawn:
    """A figure ready for the page; `label` is what a screen reader says, `choices` the columns to colour by; Plotly
    alone can draw what a probe of the user's drew with it, `own`."""

    id: str
    caption: str
    label: str
    spec: Mapping[str, Any]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    choices: tuple[str, ...] = ()
    chosen: str = ""
    own: bool = False

    @property
    def static(self) -> Markup:
        """The figure as SVG, for pages without a script; empty where only Plotly draws it."""
        return svg({} if self.own else self.spec, self.label)


def figures(record: Record) -> dict[str, dict[str, Plotly]]:
    """Every figure of the record's page as a Plotly figure, by probe and quantity, in the order of the page.

    A scatter has the colours that the page shows first. Raises ValueError as `draw` does.
    """
    from plotly.graph_objects import Figure as Plotly

    shared = prompt_columns(record.prompts)
    drawn: dict[str, dict[str, Plotly]] = {}
    for probe, measured in sorted(record.results.items()):
        drawn[probe] = {}
        for name in pictured(measured):
            spec = draw(measured, name, "", 0, record.prompts).spec
            layout = {"template": TEMPLATE, **spec["layout"]}
            drawn[probe][name] = Plotly(spec["data"] if "data" in spec else coloured(spec, **shared), layout)
        if FIGURE in measured.facts:
            drawn[probe][FIGURE] = Plotly(json.loads(measured.facts[FIGURE]))
    return drawn


def plot(record: Record, name: str) -> Plotly:
    """One figure of the page; see `Record.plot`."""
    found = {f"{probe}.{quantity}": one for probe, each in figures(record).items() for quantity, one in each.items()}
    if name not in found:
        raise UserError(f"no figure {name!r}; this record has {', '.join(found) or 'none'}")
    return found[name]


def coloured(spec: Mapping[str, Any], columns: Mapping[str, Any], hover: Sequence[str]) -> list[dict[str, Any]]:
    """The traces of a scatter of prompts; page.js does the same whenever another column is chosen."""
    per_point = {"x": spec["x"], "y": spec["y"], "hovertext": hover, "customdata": range(len(hover))}
    return [
        {key: value for key, value in trace.items() if key != "rows"}
        | {key: [values[i] for i in trace["rows"]] for key, values in per_point.items()}
        for trace in columns[spec["colour"]]
    ]


def pictured(measured: Result) -> dict[str, Figure]:
    """The quantities that have a figure, in the order in which they are shown: by kind, then as declared.

    One of a single point has none: it is among the single numbers.
    """
    declared = {
        name: quantity.figure
        for name, quantity in measured.quantities.items()
        if quantity.figure and measured.arrays[name].size != 1
    }
    return dict(sorted(declared.items(), key=lambda item: ORDER.index(item[1].kind)))


def draw(
    measured: Result, name: str, place: str, record: int, prompts: Mapping[str, tuple], source: Mapping[str, Any] = {}
) -> Drawn:
    """The figure of one quantity; the source of the prompts, if it is of prompts, says what n counts in its caption.

    Raises ValueError: its axes do not fit the kind of figure it declares.
    """
    declared, array = measured.quantities[name], _numbers(measured, name)
    figure = pictured(measured)[name]
    kind = figure.kind
    if array.ndim != (1 if kind == "curve" else 2) or not array.size:
        raise ValueError(f"{name} has axes {declared.axes} and shape {array.shape}: that is no {kind}")
    if kind == "curve":
        drawn = _curve(measured, name, declared, figure, array, place)
    elif kind == "heatmap":
        drawn = _heatmap(measured, declared, array, place)
    else:
        every = _numbers(measured, figure.layers) if figure.layers and "layer" not in measured.ticks else None
        drawn = _scatter(measured, declared, figure.colour, array, place, record, prompts, every)
    # The axis on which the page's layer is marked, by its place: a heat map has layers downwards.
    counted_layers = "layer" in declared.axes and "layer" not in measured.ticks
    where: dict[str, str | bool] = {"layer": "x" if kind == "curve" else "y"} if counted_layers else {}
    where |= {"curve": True} if kind == "curve" else {}
    spec = dict(drawn.spec) | where | {"name": visible(f"{measured.title}: {declared.meaning}")}
    said = _said(measured, declared, array, prompts, source)
    return replace(drawn, spec=spec, caption=f"{drawn.caption} {said}".strip())


def _numbers(measured: Result, name: str) -> np.ndarray:
    """An array in float64, in which 0 has no sign: a reader would wonder what -0 means."""
    return np.asarray(measured.arrays[name], dtype=np.float64) + 0.0


def _said(
    measured: Result, declared: Quantity, array: np.ndarray, prompts: Mapping[str, tuple], source: Mapping[str, Any]
) -> str:
    """The end of a caption: which metrics are read off this figure and where, by their value, else how many prompts it
    is of."""
    sentences, n = [], [counted(h, source, prompts) for h in measured.estimates]
    for h, size in zip(measured.estimates, n, strict=True):
        where = np.argwhere(np.isclose(array, h.value, rtol=1e-9, atol=0))
        # 0 and 1 are met by chance.
        if len(where) == 1 and h.unit == declared.unit and h.value not in (0, 1):
            ticks = [measured.ticks.get(a, range(n)) for a, n in zip(declared.axes, array.shape, strict=True)]
            at = ", ".join(f"{a} {t[i]}" for a, t, i in zip(declared.axes, ticks, where[0], strict=True))
            value, interval = value_and_interval(h)
            found = f"{value}, {'95 % interval ' * (interval != NO_INTERVAL)}{interval}, n = {size}"
            found += f": {h.verdict}." if h.verdict else "."
            sentences.append(f"At {at}, the metric “{h.name}”: {found}" + f" Claim: {h.claim}" * bool(h.claim))
    if sentences or not n:
        return " ".join(sentences)
    # Where all metrics count prompts and one counts those of the record, the others are of second samples, which have
    # no figure.
    count, clusters = sizes(prompts)
    noun = clusters_of(source, count, clusters)
    own = number_of(count, noun) if count == clusters else f"{count} prompts from {number_of(clusters, noun)}"
    if own in n and all(h.rule.counts == "prompts" for h in measured.estimates):
        n = [own]
    each = list(dict.fromkeys(n))
    return f"n{', by metric:' if len(each) > 1 else ' ='} {'; '.join(each)}."


# What a part of a curve's figure is: traces, columns of the table with their heads, and a sentence of the caption.
Layer = tuple[list[dict[str, Any]], list[tuple[str, np.ndarray]], str]


def _curve(measured: Result, name: str, declared: Quantity, figure: Figure, y: np.ndarray, place: str) -> Drawn:
    axis = declared.axes[0]
    ticks = measured.ticks.get(axis, tuple(range(len(y))))
    words = bool(worded(ticks))
    # Steps of training have names so that those that grow geometrically stand evenly; they are in order all the same.
    apart = words and not axis.startswith("step")
    x = np.arange(len(y)) if words else np.array(ticks)
    layers = [_band(measured, figure.band, x, apart)] if figure.band else []
    layers += [_beside(measured, figure.beside, x)] if figure.beside else []
    layers.append(_line(measured, name, figure.interval, x, y, ticks, apart))
    label = f"Curve over {len(y)} {axis}s, from {span(y)} {declared.unit}".strip()
    if figure.band:
        label = f"{label}; the control from {span(_numbers(measured, figure.band))}"
    margin = 0.5 * (1 if words or len(y) < 2 else float(np.diff(np.sort(x)).min()))
    layout = {
        "xaxis": indexed(axis, ticks) | {"range": [float(x.min()) - margin, float(x.max()) + margin]},
        "yaxis": {"title": {"text": plotly_text(titled(declared.meaning.split("; ")[0], declared.unit), 42)}},
        "showlegend": bool(figure.band or figure.beside),
        "margin": {"t": 48 if figure.band or figure.beside else 16},
    }
    traces = [trace for of_layer, _, _ in layers for trace in of_layer]
    # A narrow figure lists names one under the other: the axis keeps the room of its title.
    layout |= {"height": 340 + 20 * names} if (names := sum("name" in trace for trace in traces)) > 4 else {}
    heads, table = zip(
        (titled(name, declared.unit), y), *(column for _, columns, _ in layers for column in columns), strict=True
    )
    rows = tuple((str(i), *(f"{v:.4g}" for v in row)) for i, row in zip(ticks, zip(*table, strict=True), strict=True))
    caption = " ".join([sentence(declared), *(says for _, _, says in layers if says)])
    return Drawn(place, caption, label, {"data": traces, "layout": layout}, (axis, *heads), rows)


def _band(measured: Result, name: str, x: np.ndarray, apart: bool) -> Layer:
    """The control's band as a hatched area, a line where it is one number."""
    bounds, means = _numbers(measured, name), measured.quantities[name].meaning
    # One layer has no width to shade, so its band is drawn a little wide.
    across, ends = (x, bounds) if len(x) > 1 else (np.array([-0.2, 0.2]), np.repeat(bounds, 2, axis=0))
    number = bounds[:, 0] == bounds[:, 1]
    edge = {"x": compact(across), "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
    if number.any():  # a control of one number has nothing to hatch: it is a line, or one at each name
        stroke = {"width": 2, "color": NULL}
        dash = {"mode": "lines+markers", "marker": {"symbol": "line-ew", "size": 24, "line": stroke}}
        edge |= dash if apart else {"line": stroke}
    hatch = {"shape": "/", "size": 8, "solidity": 0.15, "fgcolor": NULL, "bgcolor": "rgba(0,0,0,.08)"}
    shade = {"fill": "tonexty", "fillpattern": hatch, "name": "control"}
    return (
        [edge | {"y": compact(ends[:, 0]), "showlegend": False}, edge | shade | {"y": compact(ends[:, 1])}],
        [("control low", bounds[:, 0]), ("control high", bounds[:, 1])],
        f"{'Thin line' if number.all() else 'Hatched'}: {means}.",
    )


def _beside(measured: Result, name: str, x: np.ndarray) -> Layer:
    """Another quantity along the same axis, dashed; a line each where it has an axis before."""
    lines, declared = np.atleast_2d(_numbers(measured, name)), measured.quantities[name]
    names: Sequence[Any] = (declared.meaning.split("; ")[0],)
    colours: Sequence[str] = (NULL,)
    heads = [titled(name, declared.unit)]
    if len(declared.axes) > 1:
        names = measured.ticks.get(declared.axes[0], tuple(range(len(lines))))
        heads, colours = list(map(str, names)), COLOURS[1:]  # the first one is the model's
    traces = []
    for i, (line, called) in enumerate(zip(lines, names, strict=True)):
        style = {"color": colours[i % len(colours)], "width": 2, "dash": DASHES[i % 5]}
        dashed = {"mode": "lines", "line": style, "hoverinfo": "skip"}
        traces.append(dashed | {"x": compact(x), "y": compact(line), "name": plotly_text(str(called))})
    return (traces, list(zip(heads, lines, strict=True)), f"Dashed: {declared.meaning}.")


def _line(measured: Result, name: str, interval: str, x: np.ndarray, y: np.ndarray, ticks: tuple, apart: bool) -> Layer:
    """The quantity itself, with whiskers where it has an interval; points alone where names have no order."""
    declared = measured.quantities[name]
    hover = [plotly_text(f"{declared.axes[0]} {i}: {v:.4g} {declared.unit}") for i, v in zip(ticks, y, strict=True)]
    line: dict[str, Any] = {
        "mode": "lines+markers",
        "line": {"color": LINE, "width": 2.5},
        "marker": {"size": 8},
        "hoverinfo": "text",
    }
    line |= {"mode": "markers"} if apart else {}
    line |= {"x": compact(x), "y": compact(y), "name": "this model", "hovertext": hover}
    if not interval:
        return [line], [], ""
    low, high = _numbers(measured, interval).T
    whiskers = {"array": compact(high - y), "arrayminus": compact(y - low)}
    line |= {"error_y": {"type": "data", "symmetric": False, "color": LINE, **whiskers}}
    return ([line], [("low", low), ("high", high)], f"Whiskers: {measured.quantities[interval].meaning}.")


def _heatmap(measured: Result, declared: Quantity, cells: np.ndarray, place: str) -> Drawn:
    down, across = declared.axes
    if across == "layer":
        down, across, cells = across, down, cells.T
    unit = declared.unit
    # Numbers of chosen layers are names here, since cells are counted.
    names = {axis: tuple(map(str, ticks)) if axis == "layer" else ticks for axis, ticks in measured.ticks.items()}
    rows_of, columns_of = (
        names.get(axis, tuple(range(n))) for axis, n in zip((down, across), cells.shape, strict=True)
    )
    trace: dict[str, Any] = {
        "type": "heatmap",
        "z": [compact(row) for row in cells],
        "colorbar": BAR | {"title": {"text": plotly_text(unit), "side": "top", "font": {"size": 14}}},
        "hoverinfo": "text",
        "hovertext": [
            [plotly_text(f"{down} {i}, {across} {j}: {v:.4g} {unit}") for j, v in zip(columns_of, row, strict=True)]
            for i, row in zip(rows_of, cells, strict=True)
        ],
    }
    signed = cells.min() < 0 < cells.max()
    trace |= {"colorscale": [[i / 2, colour] for i, colour in enumerate(SIGNED)], "zmid": 0} if signed else {}
    layout = {
        "xaxis": indexed(across, columns_of),
        "yaxis": indexed(down, rows_of, "" if worded(rows_of) else " (0 at the top)") | {"autorange": "reversed"},
    }
    rows = tuple((str(i), *(f"{v:.4g}" for v in row)) for i, row in zip(rows_of, cells, strict=True))
    return Drawn(
        place,
        sentence(declared),
        f"Heat map of {cells.shape[0]} {down}s by {cells.shape[1]} {across}s, from {span(cells)} {unit}".strip(),
        {"data": [trace], "layout": layout},
        (f"{down} \\ {across}", *map(str, columns_of)),
        rows,
    )


def _scatter(
    measured: Result,
    declared: Quantity,
    colour: str,
    points: np.ndarray,
    place: str,
    record: int,
    prompts: Mapping[str, tuple],
    every: np.ndarray | None,
) -> Drawn:
    x, y = points[:, 0], points[:, 1] if points.shape[1] > 1 else np.zeros(len(points))
    (row, component), unit = declared.axes, declared.unit
    names = measured.ticks.get(component, (f"{component} 1", f"{component} 2"))
    across = titled(names[0], unit)
    up = titled(names[1], unit) if points.shape[1] > 1 else "there is no second component"
    # Points that are not the record's prompts (positions, tokens) have no prompt to show, no column to colour by.
    of_prompts = len(prompts.get("text", ())) == len(points)
    choices = tuple(c for c in ordered(complete(prompts)) if c != "text") if of_prompts else ()
    chosen = colour if colour in choices else choices[0] if choices else ""
    # Margins that follow tick labels, which follow the scale, which follows the margins, need not settle.
    # A range that is stretched to keep the scales equal would show probabilities above 1: the plot narrows instead.
    axis = {"automargin": False, "constrain": "domain"}
    layout = {
        "xaxis": axis | {"title": {"text": plotly_text(across)}},
        "yaxis": axis | {"title": {"text": plotly_text(up)}, "scaleanchor": "x"},
        "margin": {"l": 84, "b": 64},
        "legend": {"x": 1.02, "y": 1, "yanchor": "top", "orientation": "v"},
    }
    where = {"x": compact(x), "y": compact(y)}
    if chosen:
        drawn = where | {"record": record, "colour": chosen}
        if every is not None and every.shape[1:] == points.shape and points.shape[1] > 1:
            drawn["layers"] = [{"x": compact(each[:, 0]), "y": compact(each[:, 1])} for each in every]
    else:
        drawn = {"data": [marks(color=LINE) | where | {"hovertext": [str(i) for i in range(len(x))]}]}
    return Drawn(
        place,
        f"{sentence(declared)} Each point is {'an' if row[:1] in 'aeiou' else 'a'} {row}; the same scale on both axes.",
        f"Scatter of {len(points)} {row}s: {across} from {span(x)}, {up} from {span(y)}",
        drawn | {"layout": layout},
        (row, across, up),
        tuple((str(i), f"{a:.4g}", f"{b:.4g}") for i, (a, b) in enumerate(zip(x, y, strict=True))),
        choices,
        chosen,
    )


def indexed(axis: str, ticks: Sequence[Any], note: str = "") -> dict[str, Any]:
    """A Plotly axis of names, or one that counts 0, 1, 2 ... and never shows half a layer."""
    title = {"title": {"text": plotly_text(axis.replace("_", " ") + note)}}
    if all(isinstance(tick, int) for tick in ticks):
        return title | {"tick0": 0, "dtick": max(1, -(-len(ticks) // 16))}
    return title | worded(ticks)


def worded(ticks: Sequence[Any]) -> dict[str, Any]:
    """The names along a Plotly axis, where they are names."""
    if not any(isinstance(tick, str) for tick in ticks):
        return {}
    named = {"tickvals": list(range(len(ticks))), "ticktext": [plotly_text(str(tick)) for tick in ticks]}
    return named | {"ticklabeloverflow": "allow"}  # else Plotly leaves out the last name where it ends beyond the plot


def sentence(declared: Quantity) -> str:
    return titled(declared.meaning[:1].upper() + declared.meaning[1:], declared.unit) + "."


def span(values: np.ndarray) -> str:
    return " to ".join(numbers(float(values.min()), float(values.max())))


# ---- several records -------------------------------------------------------------------------------------------------


def side_by_side(place: str, figures: Mapping[str, Sequence[Drawn]]) -> list[list[Drawn]]:
    """The figures of a probe in every record: a row for each quantity.

    Args:
        place: the anchor of the probe; a chart of several records is called PLACE--QUANTITY.
        figures: label of a record -> its figures, each called ...--QUANTITY.
    """
    of: dict[str, dict[str, Drawn]] = {}
    for label, drawn in figures.items():
        for figure in drawn:
            of.setdefault(figure.id.rpartition("--")[2], {})[label] = figure
    rows = []
    for name, by_label in of.items():
        every = list(by_label.values())
        if [*by_label] == [""]:
            rows.append(every)
        elif 1 < len(every) <= MOST and all(_along(figure) == _along(every[0]) for figure in every):
            rows.append([_overlaid(f"{place}--{name}", by_label)])
        else:
            rows.append(
                [
                    replace(figure, caption=f"{label}: {figure.caption}", spec=dict(figure.spec) | {"of": label})
                    for label, figure in by_label.items()
                ]
            )
    return rows


def _along(figure: Drawn) -> object:
    """The key that curves of one chart share; it differs for figures that do not fit in one chart."""
    if (
        not figure.spec.get("curve")
        or sum(trace.get("line", {}).get("dash") in DASHES for trace in figure.spec["data"]) > 1
    ):
        return object()
    axes = figure.spec["layout"]
    return axes["xaxis"].get("ticktext"), axes["xaxis"]["title"], axes["yaxis"]["title"]


def _overlaid(place: str, by_label: Mapping[str, Drawn]) -> Drawn:
    """The curves of several records in one chart, each in its colour, and their tables next to each other."""
    first = next(iter(by_label.values()))
    data = []
    for colour, (label, figure) in zip(COLOURS, by_label.items(), strict=False):
        for trace in figure.spec["data"]:  # in the record's colour: the line is called like it, its control is hatched
            changes: dict[str, Any] = {"line": trace["line"] | {"color": colour}}
            if trace["line"].get("dash") in DASHES:
                changes["showlegend"] = False  # the caption says what is dashed
            elif "fillpattern" in trace:
                changes |= {"fillpattern": trace["fillpattern"] | {"fgcolor": colour}}
                changes["name"] = f"{plotly_text(label)}, {trace['name']}"
            elif "name" in trace:
                changes["name"] = plotly_text(label)
            if "error_y" in trace:
                changes["error_y"] = trace["error_y"] | {"color": colour}
            data.append(dict(trace) | changes)
    ends = [figure.spec["layout"]["xaxis"]["range"] for figure in by_label.values()]
    across = {"range": [min(low for low, _ in ends), max(high for _, high in ends)]}
    layout = first.spec["layout"] | {
        "xaxis": first.spec["layout"]["xaxis"] | across,
        "showlegend": True,
        "legend": {"traceorder": "normal"},
        "margin": {"t": 48},
    }
    columns = [f"{label}: {column}" for label, figure in by_label.items() for column in figure.columns[1:]]
    # The sentences that all captions open with, then what each record's adds.
    said = {label: figure.caption.split(". ") for label, figure in by_label.items()}
    count = [*(len(set(same)) == 1 for same in zip(*said.values(), strict=False)), False].index(False)
    rests = {label: ". ".join(sentences[count:]) for label, sentences in said.items()}
    shared = ". ".join([*next(iter(said.values()))[:count], ""]).strip()
    caption = " ".join(filter(None, [shared, *(f"{label}: {rest}" for label, rest in rests.items() if rest)]))
    # A row for every tick of any table; a table without it has dashes there.
    ticks = dict.fromkeys(row[0] for figure in by_label.values() for row in figure.rows)
    tables = [({row[0]: row[1:] for row in f.rows}, ("–",) * (len(f.columns) - 1)) for f in by_label.values()]
    return replace(
        first,
        id=place,
        caption=caption,
        label="; ".join(f"{label}: {figure.label}" for label, figure in by_label.items()),
        spec=dict(first.spec) | {"data": data, "layout": layout},
        columns=(first.columns[0], *columns),
        rows=tuple((tick, *(cell for row, dashes in tables for cell in row.get(tick, dashes))) for tick in ticks),
    )
