"""Nothing in a record can become part of the page, and the page reaches for nothing outside itself."""

import json
import re

import pytest

from llmgeom.reports import page, table
from llmgeom.reports.text import plotly_text, visible
from tests.pages import HOSTILE, Tree, odd_scatter, shape, synthetic


@pytest.fixture(scope="module")
def hostile():
    return synthetic(hostile=HOSTILE, name=HOSTILE[0] + HOSTILE[4])


def test_hostile_strings_leave_no_element_and_no_attribute(hostile):
    tame = [re.sub(r"[^a-z ]", "x", text) for text in HOSTILE]
    assert shape(page([hostile])) == shape(page([synthetic(hostile=tame, name="x")]))


def test_hostile_strings_can_be_read_as_they_were_written(hostile):
    text = Tree(page([hostile])).text
    for prompt in HOSTILE:
        assert visible(prompt) in text


def test_nothing_invisible_reaches_the_page(hostile):
    html = page([hostile])
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff]", html)
    html.encode()


def test_data_block_holds_no_markup(hostile):
    block = Tree(page([hostile])).scripts["data"]
    assert not set("<>&") & set(block) and block.isascii()
    hover = json.loads(block)["records"][0]["hover"]
    assert hover[0].startswith("prompt 0<br>&lt;/script&gt;&lt;script&gt;alert(1)")
    assert set(re.findall("<[^>]*>", "".join(hover))) == {"<br>", "<i>", "</i>"}


def test_visible_spells_out_what_cannot_be_seen():
    assert (
        visible("a\x00\x1b\n\x7f\u202e\u200b\ud800\U000e0041é 漢")
        == "a\\x00\\x1b\\n\\x7f\\u202e\\u200b\\ud800\\U000e0041é 漢"
    )
    assert visible(visible("\u202e")) == visible("\u202e")


def test_plotly_text_cuts_before_it_escapes():
    assert plotly_text("&" * 10, width=60, longest=3) == "&amp;&amp;&amp; …"
    assert plotly_text("<b> x", width=3) == "&lt;b&gt;<br>x"


def test_table_is_safe_to_print_to_a_terminal(hostile):
    assert not re.search(
        r"[\x00-\x1f\x7f-\x9f\u202a-\u202e]", "".join(c for r in table([hostile] * 2) for c in r.values())
    )


def test_page_reaches_for_nothing_outside_itself(hostile):
    html = page([hostile])
    assert not re.search(r"(?i)https?://|//cdn|@import|(?<!toData)url\(", html)
    tree = Tree(html)
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
    record = synthetic()
    html = page([record])
    assert "blob:" not in html.split('id="plotly"')[0] and "createObjectURL" not in Tree(html).scripts["script"]
    kinds = {
        t.get("type", "scatter") for f in json.loads(Tree(html).scripts["data"])["figures"] for t in f.get("data", ())
    }
    assert kinds == {"scatter", "heatmap"}
