"""Figures of the page: captions with n and label, axes, curves, and colours that every eye tells apart."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmgeom.reports import page
from llmgeom.reports.drawing import blend, key, svg
from llmgeom.reports.figures import draw, pictured
from llmgeom.reports.forest import LEAST, MOST, Scale, forest
from llmgeom.reports.opening import SCALE, multiples
from llmgeom.reports.prompts import COLOURS, SHAPES, complete
from llmgeom.reports.table import rows
from llmgeom.reports.text import counted, numbers
from llmgeom.result import Figure, Quantity, Result
from tests.findings import claim, record
from tests.pages import Tree, estimate, synthetic
from tests.refusals import refused


def test_a_quantity_that_does_not_fit_its_figure_is_named():
    record = synthetic()
    wrong = replace(record.results["focus"], arrays=dict(record.results["focus"].arrays, entropy=np.zeros(3)))
    with refused(ValueError, "entropy", "layer", "head", "(3,)"):
        page([replace(record, results={"focus": wrong})])


def test_an_axis_with_names_an_interval_and_a_curve_beside_are_drawn_and_told():
    bits = Quantity(("k",), "bits", "entropy of the labels", Figure("curve", beside="exact", interval="ends"))
    exact, ends = Quantity(("k",), "bits", "exact entropy"), Quantity(("k", "bound"), "bits", "95 % interval")
    arrays = {"said": [1.0, 0.7, 0.5], "exact": [1.0, 0.6, 0.4], "ends": [[0.9, 1.2], [0.6, 0.8], [0.4, 0.6]]}
    measured = replace(
        synthetic().results["manifold"],
        quantities={"said": bits, "exact": exact, "ends": ends},
        arrays={name: np.array(x) for name, x in arrays.items()},
        ticks={"k": (0, 2, 8)},
    )
    numbered = draw(measured, "said", "f", 0, {})
    dashed, line = numbered.spec["data"]
    assert line["x"] == [0, 2, 8] and dashed["y"] == [1.0, 0.6, 0.4] and dashed["name"] == "exact entropy"
    assert np.allclose(line["error_y"]["array"], [0.2, 0.1, 0.1])
    assert np.allclose(line["error_y"]["arrayminus"], [0.1, 0.1, 0.1])
    assert numbered.rows[2] == ("8", "0.5", "0.4", "0.4", "0.6") and len(numbered.columns) == 5
    assert [text for _, _, text in key(numbered.spec)] == ["exact entropy", "this model"]
    named = draw(replace(measured, ticks={"k": ("exact", "majority", "copy-last")}), "said", "f", 0, {})
    assert named.spec["layout"]["xaxis"]["ticktext"] == ["exact", "majority", "copy-last"]
    assert named.spec["data"][-1]["mode"] == "markers" and named.rows[1][0] == "majority"


def test_the_svg_of_a_curve_has_its_numbers_on_one_scale_with_its_ticks():
    x, y, half = np.arange(20), np.sin(np.arange(20.0)), np.full(20, 0.25)
    whiskers = {"array": half, "arrayminus": half}
    line = {"x": x, "y": y, "mode": "lines+markers", "error_y": whiskers, "line": {"color": "#0072B2"}}
    edges = [{"x": x, "y": y + by, "mode": "lines", "line": {"width": 0}} for by in (-1, 1)]
    edges[1] |= {"fillpattern": {"fgcolor": "#6b6b6b"}}
    layout = {"xaxis": {"range": [-0.5, 19.5], "title": {"text": "layer"}}, "yaxis": {}}
    text = svg({"data": [*edges, line], "layout": layout}, 'a "curve"')

    def numbers_of(path):
        return np.array(re.findall(r"(-?[\d.]+) (-?[\d.]+)", path), dtype=float)

    band, drawn, *bars = (numbers_of(path) for path in re.findall(r'<path d="(M[^"]+)"', text)[:-1])
    right, up = np.polyfit(x, drawn[:, 0], 1), np.polyfit(y, drawn[:, 1], 1)
    assert right[0] > 0 > up[0], "upwards on the page is a smaller number"
    np.testing.assert_allclose(drawn, np.stack([np.polyval(right, x), np.polyval(up, y)], 1), atol=0.1)
    np.testing.assert_allclose(band[:20, 1], np.polyval(up, y + 1), atol=0.1)
    np.testing.assert_allclose(band[20:, 1], np.polyval(up, y - 1)[::-1], atol=0.1)
    for bar, value in zip(bars, y, strict=True):
        np.testing.assert_allclose(bar[:, 1], np.polyval(up, [value + 0.25, value - 0.25]), atol=0.1)
    for at, value in re.findall(r'y="([\d.]+)" text-anchor="end">([^<]+)<', text):
        assert float(at) - 4 == pytest.approx(np.polyval(up, float(value)), abs=0.2)
    assert "a &quot;curve&quot;" in text


def test_the_svg_of_a_heat_map_has_a_cell_for_each_number_from_the_top():
    cells = np.array([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])
    layout = {"xaxis": {"title": {"text": "head"}}, "yaxis": {"title": {"text": "layer"}, "autorange": "reversed"}}
    text = svg({"data": [{"type": "heatmap", "z": cells}], "layout": layout}, "cells")
    found = re.findall(r'<path fill="(#\w+)" d="M(\d) (\d)h1v1h-1z"', text)
    assert [(int(j), int(i)) for _, j, i in found] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    assert found[0][0] == "#00224e" and found[-1][0] == "#fee838"
    assert re.search(r"scale\(\d+[.]\d+ \d", text), "rows count from the top"


def test_a_curve_of_one_point_is_a_number():
    record, declared = synthetic(), {"once": Quantity(("k",), "bits", "of one k", Figure("curve"))}
    parts = {"quantities": declared, "arrays": {"once": np.array([0.25])}, "ticks": {"k": (8,)}, "estimates": ()}
    one = replace(record.results["focus"], **parts)
    assert pictured(one) == {} and "<td>once</td><td>0.25 bits</td>" in page([replace(record, results={"one": one})])


def test_a_caption_says_the_claim_the_interval_and_the_n_of_the_headline_that_its_figure_holds():
    measured = synthetic().results["manifold"]
    value = float(measured.arrays["share"][3])
    found = estimate("PC1 share, layer 3", "holds", value, claim="Values lie near a line.")
    others = estimate("of another unit", value=value, unit="bits"), estimate("of another value", value=value * 1.00001)
    measured = replace(measured, estimates=(found, *others))
    held = draw(measured, "share", "f", 0, {}).caption
    said = "At layer 3, the metric “PC1 share, layer 3”: {}, 95 % interval {} to {}, n = 75 prompts from 38 clusters:"
    assert said.format(*numbers(value, found.low, found.high)) in held and "another" not in held
    assert held.endswith("Claim: Values lie near a line.")
    # A figure from which no metric can be read says how many prompts it is of.
    assert draw(measured, "scores", "f", 0, {}).caption.endswith("n = 75 prompts from 38 clusters.")


def test_every_figure_has_a_caption_with_n_a_label_and_its_numbers():
    html = page([synthetic(), synthetic(source="math")])
    _, *captions = re.findall("<figcaption>(.*?)</figcaption>", html)
    assert len(captions) == html.count("<figure") - 1 == 7 and all("n = 75 prompts" in each for each in captions)
    plots = [a for _, a in Tree(html).elements if a.get("class") == "plot"]
    assert all(a["role"] == "img" and len(a["aria-label"]) > 20 for a in plots)
    bodies = re.findall(r"The numbers of this figure.*?<tbody>(.*?)</tbody>", html, re.S)
    # Two heat maps and a scatter of each record, and one chart of both for the curve.
    assert sorted(body.count("<tr>") for body in bodies) == [6, 6, 6, 6, 6, 75, 75]


def test_positions_are_not_counted_as_prompts():
    """Three positions of each of 75 prompts were "225 prompts from 38 templates", and of a file "from 75 templates"."""
    h = estimate("a", n=225, clusters=38)
    prompts = {"text": tuple(map(str, range(75))), "template": tuple(f"t{i // 2}" for i in range(75))}
    assert counted(h, {"kind": "domain"}, prompts) == "225 positions from 38 templates"
    alone = replace(h, clusters=75)
    assert counted(alone, {"kind": "file"}, prompts) == "225 positions from 75 prompts"
    assert counted(replace(h, n=75), {"kind": "domain"}, prompts) == "75 prompts from 38 templates"


# Machado, Oliveira and Fernandes 2009, table 1, severity 1.
BLINDNESS = {
    "normal": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def linear(colour):
    srgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ np.clip(rgb, 0, 1)
    t = xyz / [0.9505, 1.0, 1.089]
    f = np.where(t > 0.008856, np.cbrt(t), 7.787 * t + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("eye", BLINDNESS)
def test_categories_differ_in_colour_for_every_eye_and_in_shape_for_all(eye):
    seen = [lab(np.array(BLINDNESS[eye]) @ linear(colour)) for colour in COLOURS[:-1]]
    assert min(np.linalg.norm(a - b) for i, a in enumerate(seen) for b in seen[:i]) > 9
    assert len(set(SHAPES)) == len(SHAPES) == len(COLOURS)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_what_is_behind_them(scheme):
    css = (Path(sys.modules["llmgeom.reports.page"].__file__).parent / "page.css").read_text()
    light, dark = (dict(re.findall(r"--(\w+): (#\w+)", line)) for line in css.splitlines() if "--ink: #" in line)
    assert set(light) == set(dark) and len(light) == 18
    found = light if scheme == "light" else light | dark
    full = {name: c if len(c) == 7 else "#" + "".join(2 * d for d in c[1:]) for name, c in found.items()}
    bright = {name: linear(c) @ [0.2126, 0.7152, 0.0722] for name, c in full.items()}

    def contrast(first, second):
        low, high = sorted((bright[first], bright[second]))
        return (high + 0.05) / (low + 0.05)

    behind = ("paper", "pale", "cool", "warm", "mark", "last")
    assert min(contrast(word, under) for word in ("ink", "link") for under in behind) > 4.5
    assert contrast("ink", "heat") > 4.5  # of attention, at its darkest
    # The words of outcomes and the grey of remarks stand on the page's own ground; two chips are filled with theirs.
    assert min(contrast(word, "paper") for word in ("grey", "amber", "holds", "against", "opposite", "open")) > 4.5
    # No colour of a word is written down but once.
    assert re.findall(r"[^-]color: (#\w+)", css) == []


def test_a_scatter_takes_its_axes_from_the_ticks_and_its_colour_from_a_column():
    answers = Quantity(("prompt", "answer"), "probability", "P(first)", Figure("scatter", colour="k"))
    record, exact = synthetic(), np.linspace(0.1, 0.9, 75)
    arrays, ticks = {"answers": np.stack([exact, exact**2], 1)}, ("exact P(first)", "the model's P(first)")
    parts = {"quantities": {"answers": answers}, "arrays": arrays, "ticks": {"answer": ticks}}
    measured = replace(record.results["focus"], **parts)
    drawn = draw(measured, "answers", "f", 0, dict(record.prompts) | {"k": tuple(map(str, range(75)))})
    assert drawn.columns == ("prompt", "exact P(first) [probability]", "the model's P(first) [probability]")
    assert drawn.chosen == "k" and drawn.spec["y"] == pytest.approx(exact**2, rel=1e-5)


# ---- all claims, and small multiples ---------------------------------------------------------------------------------


def row(**other):
    (one,) = forest(rows([record(claim(**other))]))
    return one


def per_cent(value):
    return (value - LEAST) / (MOST - LEAST) * 100


ZERO, ONE = per_cent(0.0), per_cent(1.0)


def test_a_row_lies_where_its_numbers_are_in_units_of_the_claimed_effect():
    one = row(value=0.35, half=0.15)  # centre 0.2, effect 0.3: 0.5 [0, 1]; the control -0.5 to 0
    assert one.place == pytest.approx(per_cent(0.5), abs=0.01) and one.arrow == ""
    assert one.interval == pytest.approx((ZERO, ONE - ZERO), abs=0.02)
    assert one.band == pytest.approx((per_cent(-0.5), ZERO - per_cent(-0.5)), abs=0.02)
    assert one.claimed == pytest.approx((ONE, 100 - ONE), abs=0.02)
    assert one.cells == ("0.35", "[0.20, 0.50]", "0.05 to 0.20") and one.by == "untrained"


def test_the_line_is_the_interval_of_the_difference_where_value_and_control_share_prompts():
    one = row(value=0.35, half=0.4, difference=(0.09, 0.21))  # .15 [.09, .21] of .3
    assert one.place == pytest.approx(per_cent(0.5), abs=0.01) and one.band is None
    assert one.interval == pytest.approx((per_cent(0.3), per_cent(0.7) - per_cent(0.3)), abs=0.02)
    assert one.cells == ("0.35", "[-0.05, 0.75]", "0.20")


def test_a_claim_that_the_value_is_low_is_turned_so_that_the_claimed_effect_lies_to_the_right():
    assert row(value=-0.1, side="lower").place == pytest.approx(ONE, abs=0.01)


@pytest.mark.parametrize(("value", "arrow"), [(-9.0, "◀"), (9.0, "▶")])
def test_what_is_off_the_scale_is_an_arrow(value, arrow):
    one = row(value=value)
    assert (one.place, one.interval, one.arrow) == (None, None, arrow) and "of the claimed effect" in one.said


def test_the_scale_reaches_a_value_that_lies_a_little_beyond_and_no_further():
    def ends(*values):
        made = record(*(claim(str(i), value=v) for i, v in enumerate(values)))
        return Scale.of(row.distance for row in rows([made]))

    assert ends(0.2) == (LEAST, MOST) == ends(-9.0)  # centre 0.2, effect 0.3
    low, high = ends(0.2 - 0.3 * 2.2, 9.0)
    assert high == MOST and low == -2.5
    (one,) = forest(rows([record(claim(value=0.2 - 0.3 * 2.2))]))
    assert one.arrow == "" and 0 < one.place < 15 and one.band[0] > 0


def test_a_claim_of_no_effect_shades_the_middle():
    start, width = row(equivalence="within", hurdle=0.5, least=-0.1).claimed
    assert (start, start + width) == pytest.approx((per_cent(-1), per_cent(1)), abs=0.02)
    assert row(equivalence="at most", hurdle=0.5, least=-1e9).claimed[0] == 0


def test_the_final_token_is_a_column_and_a_panel():
    scores = np.array([[0.0, 0.0], [1.0, 2.0], [3.0, 1.0]])
    plane = Quantity(("prompt", "component"), "standard units", "plane")
    measured = Result("Value manifold", (), {"scores": plane}, {"scores": scores})
    made = record()
    prompts = {"text": ("a.", "b.", "c,"), "pieces": (("a", "."), ("b", "."), ("c", ",")), "entropy": (1.0, 2.0, 3.0),
               "tokens": (2, 2, 2)}  # fmt: skip
    assert complete(prompts)["final token"] == (".", ".", ",") and complete({"text": ("a",)}) == {"text": ("a",)}

    panels = multiples(replace(made, results={"value_manifold": measured}, prompts=prompts))
    assert [one["title"] for one in panels] == ["by next-token entropy", "by final token", "by length in tokens"]
    (_, _, colours, prompts_of), (xs, ys, of_tokens, _), _ = (zip(*one["dots"], strict=True) for one in panels)
    assert prompts_of == (0, 1, 2) and (colours[0], colours[2]) == (blend(0, SCALE), blend(1, SCALE))
    assert of_tokens[0] == of_tokens[1] != of_tokens[2]
    assert [text for _, text in panels[1]["key"]] == ["“.” 2", "“,” 1"]
    assert xs[0] < xs[1] < xs[2] and (xs[1] - xs[0]) * 2 == pytest.approx(xs[2] - xs[1], abs=0.3)
    assert ys[1] < ys[2] < ys[0]  # PC2 grows upwards
    # An untrained copy's own plane is the last panel, in the model's colours.
    twin = replace(measured, quantities=measured.quantities | {"control_scores": plane},
                   arrays={"scores": scores, "control_scores": scores[::-1]})  # fmt: skip
    *_, control = multiples(replace(made, results={"value_manifold": twin}, prompts=prompts))
    assert control["title"] == "untrained copy, by entropy"
    assert tuple(fill for _, _, fill, _ in control["dots"]) == colours
    assert [x for x, *_ in control["dots"]] == [*xs[::-1]]
