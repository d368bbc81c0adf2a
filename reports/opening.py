"""What a page opens with: curves over layers, prompts on the plane of their values, and prompts at the ends of a scale.

All is SVG and text that need no script.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from llmgeom.record import Record
from llmgeom.reports.drawing import blend, key
from llmgeom.reports.figures import Drawn
from llmgeom.reports.prompts import COLOURS, FINAL, complete, numeric
from llmgeom.reports.text import visible, written
from llmgeom.result import Result

LEADING = (  # figures above the fold: probe, quantity
    ("attention_focus", "normalised"), ("belief_readout", "missed"), ("process", "accuracy"), ("process", "exact"),
    ("sula_belief", "along"), ("ablation_pc1", "kl"), ("ablation_ridge", "kl"), ("ablation_control", "odds"),
    ("blocks_mean", "mlp"), ("blocks_mean", "block"), ("heads_mean", "kl"),
    ("text_patching", "mark"), ("text_patching", "last"),
)  # fmt: skip
LABEL, NUMBER = "label", ("label", "by_number_score")  # scores of a label of the user's come before all other curves
PLANE, SCORES, CONTROL = "value_manifold", "scores", "control_scores"
COLUMNS = {"entropy": "next-token entropy", FINAL: "final token", "tokens": "length in tokens"}
SIDE, EDGE = 300, 14  # pixels
# Of viridis, dark to light; each is read on white and on black.
SCALE = ("#440154", "#414487", "#2a788e", "#22a884", "#7ad151", "#c8d420")
NAMED = 5  # categories with a colour of their own
ENDS, WRONG, TAIL = 4, 6, 48  # prompts at each end, and of the wrong ones; how many last characters are shown
Ends = list[tuple[str, list[tuple[int, str, str]]]]  # title -> prompts: number, last words, what is said of each


def leading(sections: Sequence[Mapping[str, Any]], most: int) -> list[tuple[Drawn, str, Any, str]]:
    """The figures above the fold, (figure, title, key, anchor): the scores of a label, else those of LEADING that the
    run has, else the first one of each probe with a claim."""
    curves = [
        (name, drawn, section)
        for section in sections
        for row in section["drawn"]
        for drawn in row
        if ((name := (section["probe"], drawn.id.rpartition("--")[2])) in LEADING or drawn.spec.get("curve"))
        and drawn.static
    ]
    scores = [one for one in curves if one[0][0] == LABEL and ("shapes" in one[1].spec["layout"] or one[0] == NUMBER)]
    named = [one for name in LEADING for one in curves if one[0] == name]
    first = {section["probe"]: one for one in reversed(curves) if (section := one[2])["words"]}
    chosen = scores or (named or [*reversed(first.values())])[:most]
    titles = []
    for _, drawn, _ in chosen:
        axis, said = drawn.spec["layout"]["yaxis"]["title"]["text"], drawn.caption.partition(". ")[0]
        heat = f"{said}, " + drawn.columns[0].replace("\\", "by")
        titles.append(str(axis).replace("<br>", " ") if "curve" in drawn.spec else heat)
    return [
        (
            drawn,
            f"{drawn.spec.get('of', section['title'])}: {title}" if titles.count(title) > 1 else title,
            key(drawn.spec),
            section["id"],
        )
        for (_, drawn, section), title in zip(chosen, titles, strict=True)
    ]


def marked(drawn: Drawn, measured: Result) -> Drawn:
    """A label's score by layer, with the layers shaded where its interval lies above all controls, and the best one
    named; any other figure unchanged."""
    name = drawn.id.rpartition("--")[2]
    site, arrays = name.removesuffix("_score"), measured.arrays
    if f"{site}_band" not in arrays or site.endswith("_all_prompts"):
        return drawn
    score, interval, band = (np.asarray(arrays[f"{site}_{what}"]) for what in ("score", "interval", "band"))
    (site_of, layer), (position, *_) = measured.ticks["place"], measured.ticks["position"]
    x = np.array(measured.ticks.get("layer", range(len(score))), dtype=float)
    half = x.min() - drawn.spec["layout"]["xaxis"]["range"][0]
    above = np.concatenate([[0], (interval[:, 0] > band[:, 1]).astype(int), [0]])
    rect = {"type": "rect", "layer": "below", "fillcolor": COLOURS[0], "opacity": 0.15, "line": {"width": 0}}
    over = {"yref": "paper", "y0": 0, "y1": 1}
    runs = np.flatnonzero(np.diff(above)).reshape(-1, 2)
    more: dict[str, Any] = {
        "shapes": [
            rect | over | {"x0": x[i] - half, "x1": x[j - 1] + half, "name": "above all controls"} for i, j in runs
        ]
    }
    if site == (site_of if position == "last" else f"{site_of}_{position}") and layer in x:
        more["shapes"].append({"type": "line", "x0": layer, "x1": layer, "line": {"dash": "dot", "width": 1}} | over)
        best = f"best layer {layer:g}: {score[x == layer][0]:.2f}"
        where = {"x": layer, "y": 0.5, "yref": "paper", "xanchor": "right" if layer > x.mean() else "left"}
        more["annotations"] = [where | {"text": best, "showarrow": False}]
    said = " Shaded: layers whose interval lies above all controls." * bool(len(runs))
    return replace(drawn, caption=drawn.caption + said, spec=dict(drawn.spec) | {"layout": drawn.spec["layout"] | more})


def texts(record: Record) -> Ends:
    """Of a label probe the texts that it gets wrong and those at both ends of its score, of a number those with the
    largest residuals; empty of other records."""
    measured, text = record.results.get(LABEL), record.prompts.get("text", ())
    if measured is None or "probe_prediction" not in measured.arrays:
        return []
    prediction, residual = (np.asarray(measured.arrays[f"probe_{what}"]) for what in ("prediction", "residual"))
    label = record.prompts.get(str(record.facts.get("target")), ())
    if not len(label) == len(text) == len(prediction):
        return []
    worst = np.argsort(-np.abs(residual), kind="stable")
    if "probe_class" not in measured.arrays:
        shown = [(int(i), last_words(text[i]), f"{label[i]}, predicted {prediction[i]:.3g}") for i in worst[:WRONG]]
        return [(f"Farthest off, of {len(text)}", shown)]
    classes = measured.ticks.get("true_class", ())
    named = [classes[int(i)] for i in measured.arrays["probe_class"]]
    wrong = [i for i in worst if str(label[i]) != named[i]]
    shown = [(int(i), last_words(text[i]), f"is {label[i]}, read as {named[i]}") for i in wrong[:WRONG]]
    found = [(f"Wrong: {len(wrong)} of {len(text)}", shown)]
    order = np.argsort(prediction, kind="stable")
    for name, rows in zip(classes, (order[:ENDS], order[: -ENDS - 1 : -1]), strict=False) if len(classes) == 2 else ():
        shown = [(int(i), last_words(text[i]), f"{prediction[i]:.2f}, is {label[i]}") for i in rows]
        found.append((f"Most like {name}", shown))
    return found


def multiples(record: Record) -> list[dict[str, Any]]:
    """Values of the last layer along their first two components, by entropy, final token and length.

    Each plane has a title, a label for a screen reader, dots (x, y, colour, number of the prompt) and a key (colour,
    text). The last one is the same of an untrained control, where the record holds it. Empty without these scores.
    """
    measured = record.results.get(PLANE)
    if measured is None or SCORES not in measured.arrays:
        return []
    scores = np.asarray(measured.arrays[SCORES], dtype=float)
    if scores.ndim != 2 or scores.shape[1] < 2:
        return []

    def panel(title: str, points: np.ndarray, name: str, values: Sequence[Any]) -> dict[str, Any]:
        ends = points[:, :2] * (1, -1)  # down the page is down PC2
        spread = np.ptp(ends, axis=0)
        across = EDGE + (SIDE - 2 * EDGE) * (ends - ends.min(0)) / np.where(spread, spread, 1.0)
        if numeric(tuple(values)):
            low, high, unit = min(values), max(values), " bits" if name == "entropy" else ""
            colours = [blend((v - low) / ((high - low) or 1), SCALE) for v in values]
            key = [(SCALE[0], f"{low:.3g}{unit}"), (SCALE[-1], f"{high:.3g}{unit}")]
        else:
            words = [written(v) for v in values]
            ranked = sorted(set(words), key=lambda word: (-words.count(word), word))
            colour = dict(zip(ranked[:NAMED], COLOURS, strict=False))
            key = [(c, f"“{visible(word).strip() or 'space'}” {words.count(word)}") for word, c in colour.items()]
            rest = sum(word not in colour for word in words)
            key += [(COLOURS[-1], f"others {rest}")] if rest else []
            colours = [colour.get(word, COLOURS[-1]) for word in words]
        places = across.round(1).tolist()
        dots = [(x, y, fill, i) for i, ((x, y), fill) in enumerate(zip(places, colours, strict=True))]
        label = f"{len(dots)} prompts along PC1 and PC2 of the values, {title}"
        return {"title": title, "label": label, "dots": dots, "key": key}

    prompts = complete(record.prompts)
    shown = {name: prompts[name] for name in COLUMNS if len(prompts.get(name, ())) == len(scores)}
    panels = [panel(f"by {COLUMNS[name]}", scores, name, values) for name, values in shown.items()]
    if CONTROL in measured.arrays and "entropy" in shown:
        control = np.asarray(measured.arrays[CONTROL], dtype=float)
        panels.append(panel("untrained copy, by entropy", control, "entropy", shown["entropy"]))
    return panels


def extremes(record: Record) -> Ends:
    """The prompts at both ends of PC1 of the values, outermost first, with their entropy; empty without."""
    measured, text = record.results.get(PLANE), record.prompts.get("text", ())
    scores = np.asarray([] if measured is None else measured.arrays.get(SCORES, []), dtype=float)
    if scores.ndim != 2 or not len(scores) == len(text) >= 2 * ENDS:
        return []
    order = np.argsort(scores[:, 0], kind="stable").tolist()
    entropy = record.prompts["entropy"]
    ends = {"Lowest on PC1 (left)": order[:ENDS], "Highest on PC1 (right)": order[: -ENDS - 1 : -1]}
    return [
        (title, [(i, last_words(text[i]), f"{entropy[i]:.1f} bits") for i in prompts])
        for title, prompts in ends.items()
    ]


def last_words(text: str) -> str:
    """The end of a prompt, in which nothing is invisible."""
    shown = visible(text)
    return shown if len(shown) <= TAIL else f"…{shown[1 - TAIL :]}"
