"""Snapshots of one training as one page: curves over its steps, and a slider through the figures of each snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from markupsafe import Markup

from llmgeom.record import Record
from llmgeom.reports.figures import Drawn, draw, pictured
from llmgeom.reports.packing import packed_json
from llmgeom.reports.page import first_screen, listed, part_of, prompts_of, written_out
from llmgeom.reports.prompts import prompt_columns
from llmgeom.reports.table import labels, rows
from llmgeom.reports.text import plotly_text


def steps_page(record: Record, snapshots: Mapping[int, Record]) -> str:
    """One HTML page that opens from disk without the network; equal records give equal bytes.

    Args:
        record: of the training as a whole; its curves are always shown.
        snapshots: the record of each step, ascending, of the same prompts. The last one's figures are drawn; when the
            slider moves, a script draws another's in the same places. The verdicts of all are plain HTML.
    """
    (label,), every = labels([record]), rows([record])
    part = part_of(0, label, record, every)
    sections = part["sections"]
    for section in sections:
        measured = section["measured"]
        section["drawn"] = [
            _small(curve, measured.quantities[name].meaning, measured.quantities[name].unit)
            for name, curve in zip(pictured(measured), section["drawn"], strict=True)
        ]
    every_figure = {(p, name) for one in snapshots.values() for p, m in one.results.items() for name in pictured(m)}
    places = {of: f"snapshot-{i}" for i, of in enumerate(sorted(every_figure))}  # (probe, quantity) -> id
    shown = {
        step: {
            (probe, name): draw(measured, name, places[probe, name], 0, one.prompts, one.source)
            for probe, measured in sorted(one.results.items())
            for name in pictured(measured)
        }
        for step, one in snapshots.items()
    }
    last = [figure for figures in list(shown.values())[-1:] for figure in figures.values()]
    steps = {  # what the script draws at one step: the figures in their places, and the prompts
        step: {
            "figures": {
                d.id: {"id": d.id, **d.spec, "caption": d.caption, "label": d.label, "numbers": [d.columns, *d.rows]}
                for d in shown[step].values()
            },
            "records": [prompt_columns(one.prompts) | columns for columns in prompts_of([one])],
        }
        for step, one in snapshots.items()
    }
    probes = sorted({probe for snapshot in snapshots.values() for probe in snapshot.results})
    return written_out(
        "steps.html",
        list(snapshots.values())[-1:],
        [curve for section in sections for curve in section["drawn"]] + last,
        ("steps.js",) if snapshots else (),
        ("steps.css",),
        title=f"{record.title}, over training",
        parts=[part],
        **first_screen([label], [record], every),
        sections={(label, section["probe"]): section["id"] for section in sections},
        curves={section["probe"]: section for section in sections},
        contents=listed([(section["id"], section["measured"].title, section["words"]) for section in sections]),
        steps=list(snapshots),
        probes=[_probe(probe, snapshots, shown) for probe in probes],
        packed=Markup(packed_json(steps)),
    )


def _small(curve: Drawn, meaning: str, unit: str) -> Drawn:
    """The curve at a third of the width: its meaning above it, only the unit at its side."""
    layout = curve.spec["layout"]
    text = {"text": plotly_text(meaning, 44), "font": {"size": 14}, "showarrow": False, "align": "left"}
    where = {"x": 0, "y": 1, "xref": "paper", "yref": "paper", "xshift": -48, "yshift": 4}
    text |= where | {"xanchor": "left", "yanchor": "bottom"}
    over = {"annotations": [text], "height": 290, "showlegend": False}
    across = layout["xaxis"] | {"tickfont": {"size": 12}, "tickangle": -60}
    up = {"title": {"text": plotly_text(unit)}}
    margin = {"l": 64, "r": 12, "t": 48, "b": 48}
    return replace(
        curve, spec=dict(curve.spec) | {"layout": layout | over | {"xaxis": across, "yaxis": up, "margin": margin}}
    )


def _probe(probe: str, snapshots: Mapping[int, Record], shown: Mapping[int, Mapping]) -> dict[str, Any]:
    """The part of a section that the slider changes: the verdicts of each step, and a place for each figure."""
    measured = [snapshot.results[probe] for snapshot in snapshots.values() if probe in snapshot.results][-1]
    # The place of a figure is that of the last snapshot that has it; where the last of all has not, it is hidden.
    drawn = {name: d for figures in shown.values() for (of, name), d in figures.items() if of == probe}
    now = list(shown.values())[-1]
    order = sorted(drawn, key=lambda name: (not drawn[name].choices, name))
    return {
        "probe": probe,
        "measured": measured,
        "drawn": [(drawn[name], (probe, name) in now) for name in order],
        "rows": {s: [row for row in rows([snapshot]) if row.probe == probe] for s, snapshot in snapshots.items()},
    }
