"""Figures as SVG: what a page shows before a script runs, or where none may, and the small ones of its first screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
from markupsafe import Markup

from llmgeom.reports.text import short, visible

WIDTH, HEIGHT = 400, 250  # of the whole, in the units of its letters' 13
LEFT, RIGHT, TOP, BOTTOM = 60, 12, 10, 40
DASHED = {"dash": "7 4", "dot": "2 4", "dashdot": "7 4 2 4", "longdash": "12 5", "longdashdot": "12 5 2 5"}
CIVIDIS = ("#00224e", "#35456c", "#666970", "#948e77", "#c8b866", "#fee838")  # Plotly's scale of heat maps
LEVELS = 64  # colours of a heat map
MOST = 1000  # cells or dots; a figure of more needs the script


def svg(spec: Mapping[str, Any], label: str) -> Markup:
    """The figure that Plotly draws of a curve, a heat map or dots, without a script; empty for others and panels.

    Args:
        spec: `Drawn.spec`.
        label: What a screen reader says.
    """
    traces = spec.get("data", ())
    if any(trace.get("xaxis", "x") != "x" for trace in traces):  # several plots in one figure
        return Markup("")
    kinds = {trace.get("type", "scatter") for trace in traces}
    count = sum(np.size(trace.get("z", trace.get("y", ()))) for trace in traces)
    if kinds not in ({"scatter"}, {"heatmap"}) or not count or count > MOST:
        return Markup("")
    layout = spec["layout"]
    across, up = ([*layout[name].get("range", ())] for name in ("xaxis", "yaxis"))
    if kinds == {"heatmap"}:
        rows, columns = np.shape(traces[0]["z"])
        across, up = [-0.5, columns - 0.5], [-0.5, rows - 0.5]
        up = up[::-1] if layout["yaxis"].get("autorange") == "reversed" else up
    lines = [(np.asarray(t["x"], float), np.asarray(t["y"], float), t) for t in traces if "z" not in t]
    across = across or _ends([x for x, _, _ in lines], 0.04)
    reach = [
        y + sign * np.asarray(t["error_y"][key])
        for _, y, t in lines
        if "error_y" in t
        for key, sign in (("array", 1), ("arrayminus", -1))
    ]
    up = up or _ends([*(y for _, y, _ in lines), *reach], 0.06)

    def place(x: Any, y: Any) -> np.ndarray:
        right = (np.asarray(x, float) - across[0]) / (across[1] - across[0]) * (WIDTH - LEFT - RIGHT)
        above = (np.asarray(y, float) - up[0]) / (up[1] - up[0]) * (HEIGHT - TOP - BOTTOM)
        return np.stack([LEFT + right, HEIGHT - BOTTOM - above], -1)

    parts = _heat(traces[0], place) if kinds == {"heatmap"} else _lines(lines, place)
    paper = [each for each in layout.get("shapes", ()) if each.get("yref") == "paper"]
    for shape in paper:  # from the bottom of the plot to its top
        (left, bottom), (right, top) = place([shape["x0"], shape["x1"]], up)
        frame = f'd="M{left:.1f} {bottom:.1f}V{top:.1f}H{right:.1f}V{bottom:.1f}"'
        if shape["type"] == "rect":
            parts.insert(0, f'<path {frame} fill="{shape["fillcolor"]}" fill-opacity="{shape["opacity"]}"/>')
        else:
            parts.append(f'<path {frame} fill="none" stroke="currentColor" stroke-dasharray="2 4"/>')
    for one in layout.get("annotations", ()):
        if one.get("xref", "x") == "x" and one.get("yref") == "paper":
            (x, y), side = place(one["x"], up[0] + one["y"] * (up[1] - up[0])), one.get("xanchor") == "right"
            anchor = f'x="{x + (-6 if side else 6):.1f}" y="{y:.1f}" text-anchor="{"end" if side else "start"}"'
            parts.append(f"<text {anchor}>{escape(visible(one['text']))}</text>")
    return Markup(  # numbers, and text that is escaped
        f'<svg class="drawn" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="xMinYMid" role="img" '
        f'aria-label="{escape(visible(label))}">' + "".join([*parts, *_axes(layout, across, up, place)]) + "</svg>"
    )


def key(spec: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(kind of mark, colour, name) of what a curve's figure names, without the words of its axis; of a heat map its
    least and its largest number."""
    if "z" in (first := spec["data"][0]):
        unit, cells = str(first["colorbar"]["title"]["text"]), np.asarray(first["z"], float)
        scale = [colour for _, colour in first.get("colorscale", ())] or CIVIDIS
        return [
            ("line", scale[end], f"{cells.flat[place]:.2g} {unit}")
            for end, place in ((0, cells.argmin()), (-1, cells.argmax()))
        ]
    title = str(spec["layout"]["yaxis"]["title"]["text"]).replace("<br>", " ").partition(" [")[0]
    found = []
    for trace in spec.get("data", ()):
        if trace.get("name") and trace.get("showlegend", True):
            line = trace.get("line", {})
            kind = "band" if "fillpattern" in trace else "dashed" if line.get("dash") else "line"
            colour = trace.get("fillpattern", line).get("fgcolor", line.get("color", "#6b6b6b"))
            found.append((kind, str(colour), str(trace["name"]).replace("<br>", " ").removeprefix(f"{title}, ")))
    shaded = {shape["name"]: shape["fillcolor"] for shape in spec["layout"].get("shapes", ()) if "name" in shape}
    return [*found, *(("band", colour, name) for name, colour in shaded.items())]


def _ends(values: Sequence[np.ndarray], margin: float) -> list[float]:
    low, high = min(float(v.min()) for v in values), max(float(v.max()) for v in values)
    more = margin * ((high - low) or abs(high) or 1.0)
    return [low - more, high + more]


def _path(points: np.ndarray) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _lines(lines: Sequence[tuple[np.ndarray, np.ndarray, Mapping[str, Any]]], place: Any) -> list[str]:
    """Bands between two edges, lines, whiskers and dots, in the order of the traces."""
    parts: list[str] = []
    for i, (x, y, trace) in enumerate(lines):
        line, points = trace.get("line", {}), place(x, y)
        colour = escape(str(line.get("color", "#0072b2")), quote=True)
        if "fillpattern" in trace:
            fill = escape(str(trace["fillpattern"]["fgcolor"]), quote=True)
            other = place(*lines[i - 1][:2])[::-1]
            parts.append(f'<path d="{_path(np.concatenate([points, other]))}Z" fill="{fill}" fill-opacity=".3"/>')
        if trace.get("fill") == "toself":
            parts.append(f'<path d="{_path(points)}Z" fill="{colour}" fill-opacity="{trace.get("opacity", 0.3)}"/>')
            continue
        if line.get("width", 2) and "lines" in trace.get("mode", "lines"):
            dash = f' stroke-dasharray="{DASHED[line["dash"]]}"' if line.get("dash") in DASHED else ""
            stroke = f'fill="none" stroke="{colour}" stroke-width="{line.get("width", 2)}"'
            parts.append(f'<path d="{_path(points)}" {stroke}{dash}/>')
        if whiskers := trace.get("error_y"):
            ends = place(x, y + np.asarray(whiskers["array"])), place(x, y - np.asarray(whiskers["arrayminus"]))
            parts += [
                f'<path d="{_path(np.stack(two))}" stroke="{colour}" stroke-width="1.5"/>'
                for two in zip(*ends, strict=True)
            ]
        if "markers" in trace.get("mode", "") and trace.get("marker", {}).get("symbol") != "line-ew":
            radius = 2.5 if len(points) > 12 else 4
            parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="{radius}" fill="{colour}"/>' for a, b in points]
    return parts


def _heat(trace: Mapping[str, Any], place: Any) -> list[str]:
    cells = np.asarray(trace["z"], float)
    scale = [colour for _, colour in trace.get("colorscale", ())] or CIVIDIS
    most = float(np.abs(cells).max()) or 1.0
    low, high = (-most, most) if "zmid" in trace else (float(cells.min()), float(cells.max()))
    low, high = trace.get("zmin", low), trace.get("zmax", high)
    shares = np.rint(np.clip((cells - low) / ((high - low) or 1.0), 0, 1) * LEVELS).astype(int)
    (x, y), (right, below) = place(-0.5, -0.5), place(0.5, 0.5)
    where = f"translate({x:.2f} {y:.2f}) scale({right - x:.3f} {below - y:.3f})"
    parts = [f'<g transform="{where}" shape-rendering="crispEdges">']
    for share in np.unique(shares):  # the cells of one colour are one path: a fifth of the bytes
        cells_of = "".join(f"M{j} {i}h1v1h-1z" for i, j in np.argwhere(shares == share))
        parts.append(f'<path fill="{blend(share / LEVELS, scale)}" d="{cells_of}"/>')
    return [*parts, "</g>"]


def blend(share: float, scale: Sequence[str]) -> str:
    """The colour of a share between 0 and 1, between the colours of a scale."""
    at = min(max(share, 0.0), 1.0) * (len(scale) - 1)
    low = min(int(at), len(scale) - 2)
    first, second = (np.array([int(stop[i : i + 2], 16) for i in (1, 3, 5)]) for stop in scale[low : low + 2])
    return "#" + "".join(f"{round(v):02x}" for v in first + (second - first) * (at - low))


def _axes(layout: Mapping[str, Any], across: Sequence[float], up: Sequence[float], place: Any) -> list[str]:
    """The frame, ticks, and the titles of both axes."""
    (left, bottom), (right, top) = place(across[0], up[0]), place(across[1], up[1])
    parts = [f'<path d="M{left:.1f} {top:.1f}V{bottom:.1f}H{right:.1f}" fill="none" stroke="currentColor"/>']
    for name, ends in (("xaxis", across), ("yaxis", up)):
        axis = layout[name]
        values = axis.get("tickvals") or ()
        ticks = list(zip(values, axis.get("ticktext") or values, strict=True))
        if not ticks:  # three to six round numbers
            low, high = min(ends), max(ends)
            step = 10 ** np.floor(np.log10((high - low) / 3))
            step = next(step * k for k in (5, 2, 1) if (high - low) / (step * k) >= 3 or k == 1)
            step = max(step, 1.0) if axis.get("dtick") else step
            round_ones = np.arange(np.ceil(low / step) * step, high + step * 1e-9, step)
            ticks = [(float(value), short(value)) for value in round_ones]
        for value, text in ticks[:: -(-len(ticks) // 8)]:
            x, y = place(value, ends[0])[0] if name == "xaxis" else left - 6, place(across[0], value)[1] + 4
            where = (
                f'x="{x:.1f}" y="{bottom + 15:.1f}" text-anchor="middle"'
                if name == "xaxis"
                else (f'x="{x:.1f}" y="{y:.1f}" text-anchor="end"')
            )
            parts.append(f"<text {where}>{escape(str(text).replace('<br>', ' ')[:14])}</text>")
    title = str((layout["xaxis"].get("title") or {}).get("text", "")).replace("<br>", " ")
    return [*parts, f'<text x="{(left + right) / 2:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{title}</text>']
