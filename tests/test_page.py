"""The page and the table hold every number, every verdict and every prompt."""

import json
import re
import sys
from dataclasses import replace

import pytest

from llmgeom.record import Record
from llmgeom.reports import page, table
from llmgeom.reports.text import numbers, plotly_text, visible
from llmgeom.reports.verdicts import labels
from tests.pages import HOSTILE, Tree, estimate, odd_scatter, shape, synthetic
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
    rows = {row["name"]: row for row in table([synthetic()])}
    assert rows["PC1 share, last layer"] == {
        "name": "PC1 share, last layer",
        "value": "0.412",
        "interval": "0.392 to 0.432",
        "null": "0.110 to 0.190: untrained controls, 20 draws",
        "p": "0.048",
        "n": "75 prompts from 38 clusters",
        "verdict": "",
        "why": "",
        "claim": "",
        "probe": "manifold",
    }
    assert rows["focus of the sink"]["null"] == "none" and rows["focus of the sink"]["p"] == ""
    assert rows["sula"]["verdict"] == "not measured" and "digits" in rows["sula"]["why"]
    assert {tuple(row) for row in rows.values()} == {tuple(rows["sula"])}


def test_verdicts_are_plain_html_before_any_script():
    head = page([synthetic()]).split("<script")[0]
    for words in ('<span class="chip open">open</span>', "0.392 to 0.432"):
        assert words in head
    assert "not measured, because the model has no tokenizer for digits" in head
    assert "pocket:pythia @ step143000" in head and "logits 0, rows 2.4e-07" in re.sub(
        "layers seen once yes, ", "", head
    )


def test_each_claim_stands_above_its_own_verdicts():
    record = synthetic()
    measured = record.results["focus"]
    of = {
        probe: replace(measured, estimates=(estimate("KL of the edit", "ruled out", claim=f"Claim of {probe}."),))
        for probe in ("a", "b")
    }
    record = replace(record, results=of, unmeasured={})
    for records in ([record], [record, record]):
        table_of = page(records).split('<details id="verdicts"')[1].split("</details>")[0]
        rows = re.findall(
            r'<tr class="(claim)"><td colspan="8">(.*?)</td>|data-label="verdict"><span.*?>()(.*?)<', table_of
        )
        rows = [(kind or word, text) for kind, text, _, word in rows]
        verdicts = [("ruled out", "")] * len(records)
        assert rows == [("claim", "Claim of a."), *verdicts, ("claim", "Claim of b."), *verdicts]


def test_the_first_lines_of_a_section_give_n_interval_and_control():
    """They gave value, interval and n: a number without what it is to be compared with."""
    record = synthetic()
    made = estimate("plain", "", null="", control="", control_draws=0), estimate("drawn", "open", claim="So.")
    alone = replace(record, results={"a": replace(record.results["focus"], estimates=made)}, unmeasured={})
    first, second = re.findall("<li>(.*?)</li>", page([alone]).split('<ul class="found">')[1].split("</ul>")[0])
    rows = {row["name"]: row for row in table([alone])}
    assert first.endswith(f"drawn: {rows['drawn']['value']} ({rows['drawn']['interval']}), n = {rows['drawn']['n']}; "
                          f"control {rows['drawn']['null']}")  # fmt: skip
    assert second.endswith(f"n = {rows['plain']['n']}; no control") and ": untrained" in first


def test_a_page_says_of_a_metric_that_it_tells_nothing_only_where_it_has_the_metric():
    """A page of heads, or of evidence, spoke of the PC1+PC2 share."""
    record, said = synthetic(), "There the PC1+PC2 share does not tell"
    share, other = (
        page([replace(record, results={"a": replace(record.results["focus"], estimates=(estimate(name),))})])
        for name in ("PC1+PC2 share", "another")
    )
    assert said in share
    assert "docs/findings.md" in other and said not in other


def test_what_was_not_measured_is_said_once():
    """The reasons of single metrics start with these words: "not measured, because not measured: the entropy ..."."""
    why = "not measured: the entropy does not vary"
    html = page([replace(synthetic(), results={}, unmeasured={"values: |rho|": why})])
    assert "<b>values: |rho|</b>: the entropy does not vary" in html
    assert "not measured, because the entropy does not vary" in html


@pytest.mark.parametrize(("warned", "said"), [(("w",), "1 warning about"), (("w", "v"), "2 warnings about")])
def test_warnings_are_counted_as_what_they_are(warned, said):
    """All "could overturn a verdict", the note that a metric was left out too."""
    html = page([replace(synthetic(), results={}, warnings=warned)])
    assert f"<summary>⚠ {said} these numbers</summary>" in html and "overturn" not in html


def test_what_varies_between_equal_runs_stays_out():
    record = synthetic()
    html = page([record])
    assert "secret-host" not in html
    assert html == page([replace(record, run={})])


def test_same_record_same_bytes_also_after_a_round_trip(tmp_path):
    record = synthetic()
    record.save(tmp_path)
    html = page([record])
    assert html == page([Record.load(tmp_path)]) == page([synthetic()])


def test_a_thousand_prompts_stay_under_three_megabytes():
    assert len(page([synthetic(n=1000, layers=24, heads=16)]).encode()) < 3e6


def test_the_title_says_which_command_s_result_the_page_is():
    record = synthetic()

    def made_by(*commands):
        return page([replace(record, facts={**record.facts, "command": command}) for command in commands])

    def titles(html):
        return re.findall("<title>(.*?)</title>|<h1>(.*?)</h1>", html)

    (scan, _), (_, heading) = titles(made_by("llmgeom scan --domain math"))
    assert scan == f"llmgeom {heading}" and heading.startswith("scan: ") and record.subject["name"] in heading
    kinds = [titles(made_by(f"llmgeom {verb} --n 5"))[0] for verb in ("ablate", "patch", "probe", "grade", "evidence")]
    assert len(set(kinds)) == 5 and kinds[0][0].startswith("llmgeom ablate: ")
    two = made_by("llmgeom scan", "llmgeom scan", "llmgeom ablate")
    assert "<h1>scan and ablate: " in two
    assert f"<h1>{heading.removeprefix('scan: ')}</h1>" in made_by("")  # measured by Python


def test_records_without_results_figures_or_prompts():
    record = synthetic()
    empty = {name: () for name in record.prompts}
    for bare in (
        replace(record, results={}),
        replace(record, results={}, unmeasured={}, prompts=empty, warnings=()),
        replace(record, prompts=empty),
        replace(record, results={"a": replace(record.results["focus"], quantities={}, arrays={})}),
    ):
        assert "Methods and provenance" in page([bare])


def test_a_page_without_the_plane_opens_its_first_claimed_section_and_tells_equal_titles_apart():
    record = synthetic()
    once = Tree(page([record]))
    folds = [a for tag, a in once.elements if tag == "details" and a.get("class") == "fold"]
    assert sum("open" in a for a in folds) == 1 and len(folds) > 2
    at = next(i for i, (_, a) in enumerate(once.elements) if a.get("id") == "manifold")
    assert "open" in once.elements[at + 1][1]
    planes = replace(record, results={"value_manifold": record.results["manifold"], "focus": record.results["focus"]})
    for shown in (page([planes]), page([record, synthetic(source="math")])):
        assert not any("open" in a for tag, a in Tree(shown).elements if tag == "details" and a.get("class") == "fold")
    twice = {f"cut_{way}": replace(record.results["manifold"], title="The cut") for way in ("pc1", "ridge")}
    text = Tree(page([replace(record, results=twice)])).text
    assert "The cut (along PC1)" in text and "The cut (along the ridge direction)" in text


def test_label_sequences_are_named_and_counted_by_their_pairs():
    record = synthetic(source="SULA, colon")
    text = Tree(page([replace(record, source=record.source | {"kind": "sula"})])).text
    assert "pocket:pythia on label sequences (SULA, colon)" in text and "75 prompts from 38 pairs of labels" in text


def test_no_record_is_refused():
    with refused(ValueError, "record"):
        page([])


def test_a_page_of_more_than_ten_megabytes_says_so(monkeypatch):
    record = synthetic()
    size = len(page([record]).encode())
    assert "MB and may be slow" not in page([record])
    module = sys.modules["llmgeom.reports.page"]
    monkeypatch.setattr(module, "HEAVY", size)
    assert "MB and may be slow" not in page([record])
    monkeypatch.setattr(module, "HEAVY", size - 1)
    assert f"This page holds {size / 1e6:.0f} MB and may be slow to draw" in page([record]).split("<main>")[0]


def test_one_draw_of_each_control_is_singular():
    record = synthetic()
    for nulls, said in ((1, "· 1 draw of each control<"), (20, "· 20 draws of each control<")):
        assert said in page([replace(record, facts={**record.facts, "nulls": nulls})])


def test_a_flag_in_a_finding_is_not_broken_over_lines():
    opened = page([replace(synthetic(), unmeasured={"memory": "train with --hold-out states"})])
    assert 'train with <span class="flag">--hold-out</span> states' in opened


# ---- hostile records -------------------------------------------------------------------------------------------------


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


def test_a_page_is_titled_by_the_model_s_name_and_by_what_differs():
    """Headings were paths, and "run 1" and "run 2" for two precisions of one model."""
    record = synthetic()
    n = len(record.prompts["text"])

    def of(name, **facts):
        source = {"kind": "domain", "name": "math"}
        return replace(record, subject={**record.subject, "name": name, **facts}, source={**record.source, **source})

    both = [of("/models/SmolLM2-135M-Instruct", dtype=dtype) for dtype in ("float32", "bfloat16")]
    assert labels(both) == ["float32", "bfloat16"]
    assert f": SmolLM2-135M-Instruct in bfloat16 and float32, {n} math prompts" in page(both)
    assert f": SmolLM2-135M-Instruct, {n} math prompts" in page(both[:1])
    assert labels([of("a/one"), of("b/two")]) == ["one", "two"] and labels([of("a/one"), of("b/one")]) == [
        "a/one",
        "b/one",
    ]
    assert [label.rpartition(" (")[2] for label in labels([of("one"), of("one")])] == ["run 1)", "run 2)"]
