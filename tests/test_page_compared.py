"""Several records on one page and in one table: shared sections, differences, names without repetition."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmgeom import reports
from llmgeom.reports import page, rows
from llmgeom.reports.comparison import compare
from llmgeom.reports.figures import draw
from llmgeom.reports.page import OWN
from llmgeom.reports.prompts import COLOURS
from llmgeom.reports.text import numbers
from tests.pages import Tree, estimate, synthetic

OWN_ID = re.compile(r' id="([a-z-]+)"')


def test_table_holds_two_records_side_by_side():
    pairs = [(row.name, row.record) for row in rows([synthetic(), synthetic(source="math")])]
    assert pairs[:3] == [("PC1+PC2 share", "mixed"), ("PC1+PC2 share", "math"), ("mean focus", "mixed")]
    twice = {row.record for row in rows([synthetic(), synthetic()])}
    assert twice == {"pocket:pythia on mixed (run 1)", "pocket:pythia on mixed (run 2)"}


NAMED = "PC1 share, a name that is long and would be broken on any axis, < 1"


def test_differences_of_records_of_the_same_prompts_stand_above_their_sections():
    first, second = synthetic(), synthetic(seed=0, name="pocket:llama")
    made = []
    for record, value in ((first, 0.4), (second, 0.55)):
        measured = replace(record.results["manifold"], estimates=(estimate(NAMED, value=value, effect=0.1),))
        made.append(replace(record, results={"manifold": measured}))
    found = compare(made)
    html = page(made, found)
    (difference,) = found.pairs[0].differences
    part = html.split('class="compared"')[1].split("</section>")[0]
    assert difference.value == pytest.approx(0.15) and f"<td>{difference.shown}</td>" in part
    assert f'title="{difference.why}"' in part
    assert f'<span class="chip {difference.chip}">{difference.verdict}</span>' in part
    # From -1.5 to 2 effects of interest of 0.1: the dot at 1.5, its interval, and what is smaller than the effect.
    scale = 100 / (2.0 + 1.5)
    dot = re.search(r'<circle class="(.+?)" cx="(.+?)%"', part)
    assert dot[1] == difference.chip and float(dot[2]) == pytest.approx(3.0 * scale, abs=0.01)
    start, width = map(float, re.search(r'class="claimed" x="(.+?)%" width="(.+?)%"', part).groups())
    assert (start, start + width) == pytest.approx((0.5 * scale, 2.5 * scale), abs=0.02)
    assert html.index('class="compared"') < html.index('id="verdicts"')
    assert 'class="compared"' not in page(made)


def test_records_share_the_section_of_a_probe_and_the_chart_of_a_curve():
    records = [synthetic(seed=0), synthetic(seed=1, source="math")]
    tree = Tree(page(records))
    data = {figure["id"]: figure for figure in json.loads(tree.scripts["data"])["figures"]}
    sections = [attributes.get("id") for tag, attributes in tree.elements if tag == "section"]
    assert sections[:2] == ["focus", "manifold"]
    chart = data["manifold--share"]
    lines = {trace["name"]: trace for trace in chart["data"] if trace.get("hoverinfo") == "text"}
    assert list(lines) == ["mixed", "math"]
    for record, line, colour in zip(records, lines.values(), COLOURS, strict=False):
        assert line["y"] == pytest.approx(record.results["manifold"].arrays["share"], rel=1e-5)
        assert line["line"]["color"] == colour
    names = [trace["name"] for trace in chart["data"] if "fillpattern" in trace]
    assert names == ["mixed, control", "math, control"]
    # What is no curve stands in one row, a figure each.
    assert [name for name in data if name.endswith("--scores")] == ["mixed-manifold--scores", "math-manifold--scores"]


def test_names_that_differ_in_no_latin_letter_have_figures_of_their_own():
    """Their anchors were equal: the first figure was drawn with the numbers of the second record."""
    records = [synthetic(seed=0, source="数据"), synthetic(seed=1, source="文本")]
    tree = Tree(page(records))
    data = json.loads(tree.scripts["data"])["figures"]
    ids = [attributes["id"] for _, attributes in tree.elements if "id" in attributes]
    assert len(set(ids)) == len(ids) and {figure["id"] for figure in data} <= set(ids)
    scatters = [figure for figure in data if figure["id"].endswith("--scores")]
    assert [figure["record"] for figure in scatters] == [0, 1]
    for record, figure in zip(records, scatters, strict=True):
        assert figure["x"] == pytest.approx(record.results["manifold"].arrays["scores"][:, 0], rel=1e-5)


def test_probes_of_any_name_have_sections_of_their_own_and_leave_the_page_s_own_ids():
    measured = synthetic().results
    names = ("data", "标签", "目标", "a-b", "a b")
    record = replace(synthetic(), results={name: measured["focus"] for name in names})
    for tree in (Tree(page([record])), Tree(page([record, replace(record, source={"name": "math"})]))):
        ids = [attributes["id"] for _, attributes in tree.elements if "id" in attributes]
        assert len(set(ids)) == len(ids)
        links = {attributes["href"][1:] for tag, attributes in tree.elements if tag == "a"}
        assert len(links & {*ids}) == len(links) >= len(names)
    templates = Path(reports.__file__).parent.glob("*.html")
    written = {name for path in templates for name in OWN_ID.findall(path.read_text())}
    assert written == OWN


def test_a_layer_is_marked_in_figures_that_count_layers_alone():
    """Row 1 of chosen layers 0 and 5 is layer 5: the slider's layer 1 is not there."""
    measured = synthetic(layers=2).results["focus"]
    assert draw(measured, "entropy", "", 0, {}).spec["layer"] == "y"
    assert "layer" not in draw(replace(measured, ticks={"layer": (0, 5)}), "entropy", "", 0, {}).spec


def test_no_number_of_a_figure_is_a_negative_zero():
    measured = synthetic(layers=3).results["manifold"]
    arrays = dict(measured.arrays) | {"share": np.array([-0.0, 0.5, -0.25]), "share_null": -np.zeros((3, 2))}
    drawn = draw(replace(measured, arrays=arrays), "share", "", 0, {})
    assert drawn.rows[0] == ("0", "0", "0", "0") and drawn.spec["data"][-1]["hovertext"][0] == "layer 0: 0 fraction"
    assert numbers(-0.0, -1e-9, 1e-9)[0] == "0"
