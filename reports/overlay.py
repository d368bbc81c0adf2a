"""Figures of several records: the curves of a quantity in one chart, a colour each; other figures in one row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmgeom.reports.figures import DASHES, Drawn
from llmgeom.reports.prompts import COLOURS
from llmgeom.reports.text import plotly_text

MOST = len(COLOURS) - 1  # records in one chart


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
    return [_together(f"{place}--{name}", found) for name, found in of.items()]


def _together(place: str, by_label: Mapping[str, Drawn]) -> list[Drawn]:
    if len(by_label) == 1 and "" in by_label:
        return list(by_label.values())
    if 1 < len(by_label) <= MOST and all(
        _along(figure) == _along(next(iter(by_label.values()))) for figure in by_label.values()
    ):
        return [_overlaid(place, by_label)]
    return [replace(figure, caption=f"{label}: {figure.caption}") for label, figure in by_label.items()]


def _along(figure: Drawn) -> object:
    """What curves of one chart have in common; unequal for figures that do not fit in one."""
    if not figure.spec.get("curve") or sum(map(_dashed, figure.spec["data"])) > 1:
        return object()
    axes = figure.spec["layout"]
    return axes["xaxis"].get("ticktext"), axes["xaxis"]["title"], axes["yaxis"]["title"]


def _dashed(trace: Mapping[str, Any]) -> bool:
    return trace.get("line", {}).get("dash") in DASHES


def _overlaid(place: str, by_label: Mapping[str, Drawn]) -> Drawn:
    first = next(iter(by_label.values()))
    data = [
        trace
        for i, (label, figure) in enumerate(by_label.items())
        for trace in _coloured(figure.spec["data"], COLOURS[i], label)
    ]
    ends = [figure.spec["layout"]["xaxis"]["range"] for figure in by_label.values()]
    across = {"range": [min(low for low, _ in ends), max(high for _, high in ends)]}
    layout = first.spec["layout"] | {
        "xaxis": first.spec["layout"]["xaxis"] | across,
        "showlegend": True,
        "legend": {"traceorder": "normal"},
        "margin": {"t": 48},
    }
    cells = {label: {row[0]: row[1:] for row in figure.rows} for label, figure in by_label.items()}
    ticks = dict.fromkeys(row[0] for figure in by_label.values() for row in figure.rows)
    width = {label: len(figure.columns) - 1 for label, figure in by_label.items()}
    rows = tuple(
        (tick, *(cell for label in by_label for cell in cells[label].get(tick, ("–",) * width[label])))
        for tick in ticks
    )
    columns = [f"{label}: {column}" for label, figure in by_label.items() for column in figure.columns[1:]]
    return replace(
        first,
        id=place,
        caption=_caption({label: figure.caption for label, figure in by_label.items()}),
        label="; ".join(f"{label}: {figure.label}" for label, figure in by_label.items()),
        spec=dict(first.spec) | {"data": data, "layout": layout},
        columns=(first.columns[0], *columns),
        rows=rows,
    )


def _caption(captions: Mapping[str, str]) -> str:
    """The sentences that all captions open with, then what each record's adds."""
    sentences = {label: caption.split(". ") for label, caption in captions.items()}
    alike = [len(set(same)) == 1 for same in zip(*sentences.values(), strict=False)]
    count = [*alike, False].index(False)
    shared = next(iter(sentences.values()))[:count]
    rests = {label: ". ".join(said[count:]) for label, said in sentences.items()}
    parts = [". ".join([*shared, ""]).strip(), *(f"{label}: {rest}" for label, rest in rests.items() if rest)]
    return " ".join(filter(None, parts))


def _coloured(traces: Sequence[Mapping[str, Any]], colour: str, label: str) -> Iterator[dict[str, Any]]:
    """A record's traces in its colour: the line is called like the record, its control is hatched."""
    for trace in traces:
        changes: dict[str, Any] = {"line": trace["line"] | {"color": colour}}
        if _dashed(trace):
            changes["showlegend"] = False  # the caption says what is dashed
        elif "fillpattern" in trace:
            changes |= {"fillpattern": trace["fillpattern"] | {"fgcolor": colour}}
            changes["name"] = f"{plotly_text(label)}, {trace['name']}"
        elif "name" in trace:
            changes["name"] = plotly_text(label)
        if "error_y" in trace:
            changes["error_y"] = trace["error_y"] | {"color": colour}
        yield dict(trace) | changes
