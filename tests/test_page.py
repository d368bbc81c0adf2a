"""The page and the table hold every number, every verdict and every prompt."""

import json
import re
from dataclasses import replace

import pytest

from llmgeom.record import Record
from llmgeom.reports import page, rows
from llmgeom.reports.text import numbers, plotly_text, visible
from tests.pages import HOSTILE, Tree, odd_scatter, shape, synthetic
from tests.refusals import refused


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((0.4123, 0.39, 0.43), ["0.412", "0.390", "0.430"]),
        ((-0.0001, -0.5, 0.5), ["0.0", "-0.5", "0.5"]),
        ((2.0, 2.0, 2.0), ["2.00", "2.00", "2.00"]),
        ((0.0, 0.0), ["0.0", "0.0"]),
        ((12.34, 10.1, 14.7), ["12.3", "10.1", "14.7"]),
        ((1234.0, 900.0, 1600.0), ["1234", "900", "1600"]),
        ((3e-9, 1e-9, 5e-9), ["3e-09", "1e-09", "5e-09"]),
        ((2.5e7, 2e7, 3e7), ["2.5e+07", "2e+07", "3e+07"]),
    ],
)
def test_numbers_show_two_digits_of_their_range(values, expected):
    assert numbers(*values) == expected


def test_table_says_each_headline_and_each_gap():
    found = {row.name: row for row in rows([synthetic()])}
    row = found["PC1 share, last layer"]
    assert (row.value, row.interval, row.p) == ("0.412", "0.392 to 0.432", "0.048")
    assert row.n == "75 prompts from 38 clusters"
    assert row.null == "0.110 to 0.190: untrained controls (20 draws)" and (row.probe, row.verdict) == ("manifold", "")
    numbers = row.numbers()
    assert (numbers["value"], numbers["control_low"], numbers["draws"], numbers["claim"]) == (0.412, 0.11, 20, None)
    assert found["focus of the sink"].null == "none" and found["focus of the sink"].p == ""
    assert found["sula"].verdict == "not measured" and "digits" in found["sula"].why
    assert {tuple(row.numbers()) for row in found.values()} == {tuple(numbers)}


def test_verdicts_are_plain_html_before_any_script():
    head = page([synthetic()]).split("<script")[0]
    gap = "not measured, because the model has no tokenizer for digits"
    for words in ('<span class="chip open">open</span>', "0.392 to 0.432", gap, "pocket:pythia @ step143000"):
        assert words in head


def test_same_record_same_bytes_also_after_a_round_trip_and_whatever_varies_between_equal_runs(tmp_path):
    record = synthetic()
    record.save(tmp_path)
    html = page([record])
    assert html == page([Record.load(tmp_path)]) == page([replace(record, run={})]) and "secret-host" not in html


def test_a_thousand_prompts_stay_under_three_megabytes():
    assert len(page([synthetic(n=1000, layers=24, heads=16)]).encode()) < 3e6


def test_records_without_results_figures_or_prompts():
    record = synthetic()
    empty = {name: () for name in record.prompts}
    nothing = {"results": {}, "unmeasured": {}, "prompts": empty, "warnings": ()}
    number = replace(record.results["focus"], quantities={}, arrays={})
    for less in ({"results": {}}, nothing, {"prompts": empty}, {"results": {"a": number}}):
        assert "Methods and provenance" in page([replace(record, **less)])


def test_no_record_is_refused():
    with refused(ValueError, "record"):
        page([])


# ---- hostile records -------------------------------------------------------------------------------------------------


NAME = HOSTILE[0] + HOSTILE[4]


@pytest.fixture(scope="module")
def hostile():
    """The page of a hostile record."""
    return page([synthetic(hostile=HOSTILE, name=NAME)])


def test_hostile_strings_leave_no_element_and_no_attribute_and_can_be_read_as_they_were_written(hostile):
    tame = [re.sub(r"[^a-z ]", "x", text) for text in HOSTILE]
    assert shape(hostile) == shape(page([synthetic(hostile=tame, name="x")]))
    text = Tree(hostile).text
    for prompt in HOSTILE:
        assert visible(prompt) in text


def test_nothing_invisible_reaches_the_page(hostile):
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff]", hostile)
    hostile.encode()


def test_data_block_holds_no_markup(hostile):
    block = Tree(hostile).scripts["data"]
    assert not set("<>&") & set(block) and block.isascii()
    hover = json.loads(block)["records"][0]["hover"]
    assert hover[0].startswith("prompt 0<br>&lt;/script&gt;&lt;script&gt;alert(1)")
    assert set(re.findall("<[^>]*>", "".join(hover))) == {"<br>", "<i>", "</i>"}


def test_visible_spells_out_what_cannot_be_seen():
    shown = "a\\x00\\x1b\\n\\x7f\\u202e\\u200b\\ud800\\U000e0041é 漢"
    assert visible("a\x00\x1b\n\x7f\u202e\u200b\ud800\U000e0041é 漢") == shown
    assert visible(visible("\u202e")) == visible("\u202e")


def test_plotly_text_cuts_before_it_escapes():
    assert plotly_text("&" * 10, width=60, longest=3) == "&amp;&amp;&amp; …"
    assert plotly_text("<b> x", width=3) == "&lt;b&gt;<br>x"


def test_table_is_safe_to_print_to_a_terminal():
    table = rows([synthetic(hostile=HOSTILE, name=NAME)] * 2)
    text = "".join(f"{row.null}{row.why}{row.numbers()}" for row in table)
    assert not re.search(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e]", text)


def test_page_reaches_for_nothing_outside_itself(hostile):
    assert not re.search(r"(?i)https?://|//cdn|@import|(?<!toData)url\(", hostile)
    tree = Tree(hostile)
    assert not [tag for tag, a in tree.elements if tag in ("link", "iframe", "img", "object", "form", "base")]
    assert all(a.get("href", "#").startswith("#") and "src" not in a for _, a in tree.elements)
    policy = next(a["content"] for tag, a in tree.elements if a.get("http-equiv"))
    assert "default-src 'none'" in policy and "unsafe-inline' script" not in policy and "unsafe-eval" not in policy
    assert policy.split("script-src ")[1].split(";")[0].count("'sha256-") == 2


def test_declared_names_are_escaped_for_plotly_too():
    drawn = json.loads(Tree(page([odd_scatter()])).scripts["data"])["figures"][0]
    assert drawn["layout"]["xaxis"]["title"]["text"] == "&lt;i&gt; 1 [&lt;u&gt;]"
    assert drawn["layout"]["yaxis"]["title"]["text"] == "there is no second component"
    assert "record" not in drawn and len(drawn["data"][0]["x"]) == 10


def test_no_blob_may_be_loaded_and_nothing_is_drawn_by_webgl():
    html = page([synthetic()])
    scripts = Tree(html).scripts
    assert "blob:" not in html.split('id="plotly"')[0] and "createObjectURL" not in scripts["script"]
    kinds = {t.get("type", "scatter") for f in json.loads(scripts["data"])["figures"] for t in f.get("data", ())}
    assert kinds == {"scatter", "heatmap"}
