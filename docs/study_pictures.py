"""Pictures of stored studies as SVG, by Chromium: `python docs/study_pictures.py`.

Each ends in a comment with the digest of its study, so that a test finds a picture of old numbers.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Any

from pictures import OUT, svg
from plotly.graph_objects import Figure
from tables import ROOT, stored

from llmgeom.reports.figures import GRID, INK, LINE, NULL, TEMPLATE
from llmgeom.reports.prompts import COLOURS

CARD = "benchmarks/gpu.json"
RATES = "studies/verdict_rates.txt"
MECHANISM, LABELS, LAW = (f"studies/{name}.json" for name in ("mechanism", "labels_along", "gradient_law"))
# Of each word, as the page has them.
WORDS = {"holds": "#0062a3", "small": "#9cc6e4", "open": "#e8c56a", "ruled out": "#5c5c5c", "opposite": "#e08a4f"}
FLAT = {"tickangle": 0, "tickfont": {"size": 12}}
SYMBOLS = ("circle", "diamond", "square")


def whiskers(values: Iterable[Sequence[float]]) -> dict[str, Any]:
    """Plotly's error bars, from (value, lower end, upper end) of each point."""
    rows = list(values)
    above, below = [high - at for at, _, high in rows], [at - low for at, low, _ in rows]
    return {"symmetric": False, "array": above, "arrayminus": below, "width": 0}


def title(figure: Figure, text: str, x: float, y: float) -> None:
    """What stands over a panel, centred at x, its foot at y, in fractions of the picture."""
    place = {"x": x, "y": y, "xref": "paper", "yref": "paper", "xanchor": "center", "yanchor": "bottom"}
    figure.add_annotation(text=text, showarrow=False, **place)


def word_rates() -> dict[tuple[str, ...], dict[str, float]]:
    """(n, claims, effect) -> per cent of each word, with 20 draws of the control that spread by .2. Where a row was
    simulated twice, the larger simulation counts.
    """
    text = (ROOT / RATES).read_text(encoding="utf-8")
    head, _, *body = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in text.splitlines()]
    rates: dict[tuple[str, ...], tuple[int, dict[str, float]]] = {}
    for n, draws, claims, spread, start, simulated, effect, *cells in body:
        if (draws, spread, start) == ("20", "0.2", "draw"):
            key, row = (n, claims, effect), dict(zip(head[7:], map(float, cells), strict=True))
            rates[key] = max(rates.get(key, (0, {})), (int(simulated), row), key=lambda of: of[0])
    return {key: row for key, (_, row) in rates.items()}


def words() -> Figure:
    """Per cent of simulated claims that get each word, by the true effect, n and number of claims."""
    rates = word_rates()
    figure = Figure(layout={"template": TEMPLATE, "barmode": "stack"})
    panels = list(dict.fromkeys(key[:2] for key in rates))
    for word, colour in WORDS.items():
        for i, (n, claims) in enumerate(panels, 1):
            of = {key[2]: row[word] for key, row in rates.items() if key[:2] == (n, claims)}
            figure.add_bar(
                x=list(of),
                y=list(of.values()),
                name=word,
                marker={"color": colour, "line": {"width": 1, "color": "#fff"}},
                text=[f"{value:.0f}" if value >= 7 else "" for value in of.values()],
                textposition="inside",
                textangle=0,
                insidetextfont={"color": "#fff" if word in ("holds", "ruled out") else INK},
                showlegend=i == 1,
                xaxis=f"x{i}",
                yaxis="y",
            )
    for i, (n, claims) in enumerate(panels, 1):
        ends = [(i - 1) / 4 + 0.01, i / 4 - 0.01]
        figure.update_layout(
            {f"xaxis{i}": {"domain": ends, "title": {"text": "true effect"}, "showgrid": False} | FLAT}
        )
        title(figure, f"n = {n}, {claims} claim{'s' * (claims != '1')}", sum(ends) / 2, 1.0)
    return figure.update_layout(
        yaxis={"title": {"text": "% of simulated claims"}, "range": [0, 100]}, legend={"y": 1.1}, margin={"t": 64}
    )


def mechanism() -> Figure:
    """Five trainings of each tunnel (column), by sentence (row): a dot for each training, coloured by its word; below
    the dots the median, the least and the largest value.
    """
    head, _, *body = [line.strip("| ").split(" | ") for line in stored(MECHANISM)["table"]]
    figure = Figure(layout={"template": TEMPLATE})
    dots: dict[str, list[tuple[float, float]]] = {word: [] for word in (*WORDS, "no word")}
    for row, cells in enumerate(body):
        for column, cell in enumerate(cells[1:]):
            if cell == "–":
                continue
            values, _, words = cell.partition(": ")
            counts = [part.rpartition(" ") for part in words.split(", ")] if words else [("no word", "", "5")]
            every = [word for word, _, count in counts for _ in range(int(count))]
            for i, word in enumerate(every):
                dots[word].append((column + (i - (len(every) - 1) / 2) * 0.16, row - 0.28))
            median, _, ends = values.partition(" (")
            text = f"{median}<br>{ends.rstrip(')')}"
            figure.add_annotation(text=text, x=column, y=row + 0.2, showarrow=False, font={"size": 12})
    for word, places in dots.items():
        if places:
            x, y = zip(*places, strict=True)
            colour = WORDS.get(word, "#ffffff")
            marker = {"size": 11, "color": colour, "line": {"width": 1, "color": INK if word == "no word" else colour}}
            figure.add_scatter(x=x, y=y, mode="markers", name=word, marker=marker)
    for row in range(len(body) - 1):
        figure.add_hline(y=row + 0.5, line={"color": GRID, "width": 1})
    sentences = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", cells[0]) for cells in body]
    sentences = [re.sub(r" ([<>]) ", " \\1\N{NO-BREAK SPACE}", sentence) for sentence in sentences]
    shown = ["<br>".join(textwrap.wrap(sentence.replace("<", "&lt;"), 30)) for sentence in sentences]
    across = {"tickvals": list(range(len(head) - 1)), "ticktext": head[1:], "side": "top", "showgrid": False}
    down = {"tickvals": list(range(len(body))), "ticktext": shown, "tickfont": {"size": 12}, "showgrid": False}
    return figure.update_layout(
        xaxis=across | {"range": [-0.5, len(head) - 1.5], "ticks": ""},
        yaxis=down | {"range": [len(body) - 0.5, -0.5], "ticks": ""},
        legend={"y": -0.02, "yanchor": "top"},
        margin={"t": 30, "b": 36, "r": 8},
    )


def labels() -> Figure:
    """R2 of the log odds along the labels after each layer, with 95 % intervals. Grey: untrained models."""
    figure = Figure(layout={"template": TEMPLATE})
    models = stored(LABELS)["models"]
    learnt = [name for name in models if not name.endswith("@step0")]
    for name in (name for name in models if name not in learnt):
        r2 = models[name]["R2"]
        line = {"color": NULL, "width": 1}
        figure.add_scatter(x=list(range(1, len(r2) + 1)), y=r2, mode="lines", line=line, showlegend=False)
    figure.add_scatter(x=[None], y=[None], mode="lines", line={"color": NULL, "width": 1}, name="untrained")
    for i, name in enumerate(learnt):
        r2, interval = models[name]["R2"], models[name]["interval"]
        figure.add_scatter(
            x=[layer + 1 + (i - 2) * 0.05 for layer in range(len(r2))],
            y=r2,
            error_y=whiskers([(at, *ends) for at, ends in zip(r2, interval, strict=True)]),
            mode="lines+markers",
            line={"width": 1.5, "color": COLOURS[i % len(COLOURS)]},
            marker={"size": 7},
            name=f"{name}: {models[name]['word']}",
        )
    return figure.update_layout(
        xaxis={"title": {"text": "after layer"}, "tickvals": [1, 2, 3, 4], "showgrid": False},
        yaxis={"title": {"text": "R2 on new label pairs"}, "range": [-0.15, 1]},
        legend={"orientation": "v", "x": 1.02, "y": 1, "yanchor": "top"},
    )


def law() -> Figure:
    """How often a step follows the advantage: in each training, with its interval if it is the only one; controls."""
    figure = Figure(layout={"template": TEMPLATE})
    models = stored(LAW)
    own, beyond = "next step follows the advantage", "next step follows the advantage, beyond untrained"
    for row, trainings in enumerate(models.values()):
        for i, name in enumerate((own, beyond)):
            ends = [one[name]["controls"] for one in trainings]
            low, high = min(low for low, _ in ends), max(high for _, high in ends)
            line = {"width": 9, "color": (GRID, "#b9b9b9")[i]}
            at = row + (-0.16, 0.16)[i]
            label = ("advantages in random order", "untrained copies")[i]
            figure.add_scatter(x=[low, high], y=[at, at], mode="lines", line=line, name=label, showlegend=row == 0)
        values = [one[own]["value"] for one in trainings]
        error = whiskers([(values[0], *trainings[0][own]["interval"])]) if len(values) == 1 else None
        marker = {"size": 8, "color": LINE, "line": {"width": 1, "color": "#fff"}}
        figure.add_scatter(
            x=values,
            y=[row] * len(values),
            error_x=error,
            mode="markers",
            marker=marker,
            name="models",
            showlegend=row == 0,
        )
    return figure.update_layout(
        xaxis={"title": {"text": "share of attention whose next step follows the advantage"}},
        yaxis={
            "tickvals": list(range(len(models))),
            "ticktext": list(models),
            "range": [len(models) - 0.5, -0.5],
            "showgrid": False,
        },
        margin={"t": 40},
    )


def card() -> Figure:
    """Seconds of a whole scan and of an evidence run of true shapes on one card."""
    figure, found = Figure(layout={"template": TEMPLATE}), stored(CARD)
    rows = {shape: row for shape, row in found["rows"].items() if row.get("scan, s", 0) > 0}
    for i, name in enumerate(("scan", "evidence")):
        seconds = [value if (value := row.get(f"{name}, s", 0)) > 0 else None for row in rows.values()]
        texts = ["not run" if value is None else f"{value:.0f}" for value in seconds]
        shown = {"text": texts, "textposition": "outside", "cliponaxis": False}
        figure.add_bar(x=[value or 0 for value in seconds], y=list(rows), orientation="h", name=name, **shown)
        figure.data[-1].marker.color = COLOURS[i]
    return figure.update_layout(
        xaxis={"title": {"text": f"seconds on {found['card']}, an empty cache"}},
        yaxis={"autorange": "reversed", "showgrid": False},
        legend={"orientation": "h", "traceorder": "normal", "y": 1.02, "yanchor": "bottom", "x": 0, "xanchor": "left"},
        margin={"t": 60},
    )


PICTURES = {
    "card": (card, CARD, 760, 330),
    "words": (words, RATES, 760, 400),
    "mechanism": (mechanism, MECHANISM, 760, 900),
    "labels": (labels, LABELS, 760, 380),
    "law": (law, LAW, 760, 420),
}


def digest(study: str) -> str:
    """Of the files whose names `study` holds."""
    content = b"".join((ROOT / name).read_bytes() for name in study.split())
    return f"<!-- of {study}, {sha256(content).hexdigest()[:16]} -->"


if __name__ == "__main__":
    for name, (draw, study, width, height) in PICTURES.items():
        (OUT / f"{name}.svg").write_text(svg(draw(), width, height) + digest(study) + "\n", encoding="utf-8")
