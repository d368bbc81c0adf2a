"""A reading: what an everyday verb returns, labelled arrays and their picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from llmgeom.errors import unknown

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure

BLUE, GREY, ORANGE, GREEN, INK = "#0072b2", "#8a8a8a", "#d55e00", "#009e73", "#1a1a1a"
BLUES = ("#f7fbff", "#c8dcf0", "#73b3d8", "#2879b9", "#08306b")  # 0 to the largest
SIGNED = ("#67001f", "#f4a582", "#f7f7f7", "#92c5de", "#053061")  # below 0, 0, above
DASHES = ("dash", "dot", "dashdot", "longdash")
LEGEND = {"orientation": "h", "x": 0, "y": -0.2, "yanchor": "top"}
BAR = {"orientation": "h", "thickness": 10, "len": 0.5, "x": 0, "xanchor": "left", "y": -0.08, "yanchor": "top"}


@dataclass(frozen=True, eq=False)
class Reading:
    """Arrays over the same named dimensions, with their picture. `reading["rank"]` is one of them.

    Attributes:
        title: Whose numbers these are, in words.
        coords: Dimension -> its coordinates, in the order of the axes, e.g. layer, position.
        values: Name -> array over all dimensions. The first is the one that `plot` draws.
        units: Name -> unit, where a number has one.
        ticks: Dimension -> what stands at each coordinate in the picture, e.g. tokens.
        text: Array that is drawn -> the array that is written into its cells.
        lines: Curve that is drawn -> what is drawn dashed beside it: name -> an array, or one number for all places.
        log: Whether the places of a curve are drawn on a logarithmic scale.
        bands: Of one dimension: what a shaded band is -> the arrays that are its lower and its upper end; {} in their
            names is the array that is drawn.
        attrs: Single numbers and facts: what was run, n, baselines.
    """

    title: str
    coords: Mapping[str, tuple]
    values: Mapping[str, np.ndarray]
    units: Mapping[str, str] = field(default_factory=dict)
    ticks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    text: Mapping[str, str] = field(default_factory=dict)
    bands: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    lines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    log: bool = False
    attrs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = tuple(map(len, self.coords.values()))
        if wrong := [name for name, array in self.values.items() if array.shape != shape]:
            raise ValueError(f"{self.title}: {wrong[0]} has shape {self.values[wrong[0]].shape} over {shape}")

    def __getitem__(self, name: str) -> np.ndarray:
        """An array by its name. Raises UserError, with the names, where there is none."""
        if name not in self.values:
            raise unknown("number", name, self.values)
        return self.values[name]

    def frame(self) -> DataFrame:
        """A pandas table: a row for each place, a column for each dimension (and its tokens) and array."""
        import pandas

        places = [
            axis.ravel() for axis in np.meshgrid(*(np.arange(len(c)) for c in self.coords.values()), indexing="ij")
        ]
        columns: dict[str, Any] = {}
        for (name, labels), place in zip(self.coords.items(), places, strict=True):
            columns[name] = [labels[i] for i in place]
            if name in self.ticks:
                columns[f"{name} token"] = [self.ticks[name][i] for i in place]
        return pandas.DataFrame(columns | {name: array.ravel() for name, array in self.values.items()})

    def plot(self, name: str = "") -> Figure:
        """The picture, by Plotly: a heat map over two dimensions, else a curve.

        Args:
            name: Which array; by default the first.
        """
        name = name or next(iter(self.values))
        return (self._heatmap if len(self.coords) == 2 else self._curve)(name, self[name])

    def _heatmap(self, name: str, array: np.ndarray) -> Figure:
        from plotly.graph_objects import Figure, Heatmap

        (down, rows), (across, columns) = self.coords.items()
        signed = bool((array < 0).any())
        scale = SIGNED if signed else BLUES
        most = float(np.abs(array).max())
        hover = [f"{down} {row}, {across} {column}" for row in rows for column in columns]
        for other, numbers in self.values.items():
            cells = (
                written(v) if isinstance(v, str) else f"{v:.3g} {self.units.get(other, '')}" for v in numbers.ravel()
            )
            hover = [f"{line}<br>{other}: {cell}" for line, cell in zip(hover, cells, strict=True)]
        heat = Heatmap(
            z=array,
            x=list(range(len(columns))),
            y=list(rows),
            hovertext=np.array(hover).reshape(array.shape),
            hoverinfo="text",
            colorscale=[[i / (len(scale) - 1), colour] for i, colour in enumerate(scale)],
            colorbar={"title": {"text": f"{name} {self.units.get(name, '')}", "side": "top"}, **BAR},
            **({"zmin": -most, "zmax": most} if signed else {"zmin": 0}),
            **({"text": [[written(t) for t in row] for row in self.values[self.text[name]]]} if self.text else {}),
            texttemplate="%{text}" if self.text else None,
            textfont={"size": 11} if self.text and len(columns) <= 8 else None,  # else Plotly shrinks it to the cell
        )
        ticks = self.ticks.get(across)
        beside = self.ticks.get(down)
        figure = Figure(heat)
        figure.update_xaxes(
            title=across, tickvals=list(range(len(columns))), ticktext=[*map(written, ticks or map(str, columns))]
        )
        figure.update_yaxes(title=down, automargin=True)
        if beside:
            figure.update_yaxes(tickvals=list(rows), ticktext=[*map(written, beside)], autorange="reversed")
        height = 22 * len(rows) + 150 if self.text or beside else max(420, 14 * len(rows) + 130)
        return self._dressed(figure, height)

    def _curve(self, name: str, array: np.ndarray) -> Figure:
        from plotly.graph_objects import Figure, Scatter

        ((along, places),) = self.coords.items()
        figure = Figure()
        for (band, ends), colour in zip(self.bands.items(), (BLUE, GREY, ORANGE), strict=False):
            low, high = (end.format(name) for end in ends)
            if low not in self.values:  # a control that this array has not
                continue
            x, y = [*places, *places[::-1]], [*self.values[high], *self.values[low][::-1]]
            if along in self.ticks:  # places without an order
                bars = {"symmetric": False, "array": self.values[high] - array, "arrayminus": array - self.values[low]}
                dot = {"size": 11, "color": BLUE}
                figure.add_trace(Scatter(x=list(places), y=array, mode="markers", marker=dot, error_y=bars, name=band))
                continue
            edge = {"width": 1, "color": colour}
            figure.add_trace(Scatter(x=x, y=y, fill="toself", opacity=0.3, line=edge, fillcolor=colour, name=band))
        figure.update_xaxes(title=along)
        if along in self.ticks:
            figure.update_xaxes(tickvals=list(places), ticktext=[*map(written, self.ticks[along])])
        else:
            curve = {"color": BLUE, "width": 3}
            figure.add_trace(Scatter(x=list(places), y=array, name=name, line=curve, mode="lines+markers"))
        for i, (other, numbers) in enumerate(self.lines.get(name, {}).items()):
            line = {"color": (GREEN, ORANGE, GREY, INK)[i % 4], "dash": DASHES[i % 4], "width": 2}
            y = np.broadcast_to(numbers, len(places)).tolist()
            figure.add_trace(Scatter(x=list(places), y=y, name=other, line=line, mode="lines"))
        if self.log:
            figure.update_xaxes(type="log", tickvals=list(places))
        figure.update_yaxes(title=f"{name}, {self.units[name]}" if name in self.units else name)
        return self._dressed(figure, 420)

    def _dressed(self, figure: Figure, height: int) -> Figure:
        title = {"text": escape(self.title), "font": {"size": 15}}
        return figure.update_layout(
            title=title,
            height=height,
            template="plotly_white",
            font={"color": INK},
            margin={"l": 45, "r": 15, "b": 90},
            legend=LEGEND,
        )

    def __repr__(self) -> str:
        axes = " x ".join(f"{name} {len(labels)}" for name, labels in self.coords.items())
        return f"<{self.title}: {', '.join(self.values)} over {axes}>"

    def _repr_html_(self) -> str:
        return self.plot().to_html(full_html=False, include_plotlyjs="cdn")


def called(subject: Any) -> str:
    """A model's name for a title: of a path or a hub id its last part."""
    return str(subject.name).rstrip("/").rpartition("/")[2]


def written(token: str) -> str:
    """A token for a picture: the space before it and line ends can be seen, and nothing is markup."""
    visible = token.replace("\n", "↵").replace("\t", "⇥")
    space = len(visible) - len(visible.lstrip(" "))
    return escape("·" * space + visible[space:])
