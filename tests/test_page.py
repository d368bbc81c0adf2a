"""The page holds every number and every prompt, and nothing in a record can become part of the page."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from llmgeom.record import Record
from llmgeom.reports import page, table
from llmgeom.reports.compared import MARKS
from llmgeom.reports.figures import draw, pictured
from llmgeom.reports.page import listed
from llmgeom.reports.prompts import COLOURS, SHAPES
from llmgeom.reports.text import numbers, plotly_text, visible
from llmgeom.result import Estimate, Figure, Measured, Quantity
from tests.refusals import refused

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(2)>",
    "{{7*7}} {% raw %} ${7*7} %{x}",
    '" \' onmouseover="alert(3)" <b>bold</b> &lt;i&gt; &amp;',
    "line\u2028para\u2029over\u202ereversed\u2066nul\x00esc\x1b[31m\ud800 two  spaces\nnew line",
    "<!-- --> ]]> <style>*{display:none}</style>",
)


def estimate(name, verdict="", value=0.412, spread=0.02, **other):
    """A plausible metric."""
    given = dict(
        unit="fraction", low=value - spread, high=value + spread, method="jackknife over templates", null_low=0.11,
        null_high=0.19, null="untrained controls, 20 draws", p=0.0476, n=75, clusters=38, verdict=verdict,
        centre=0.15, effect=0.1,
    )  # fmt: skip
    return Estimate(name=name, value=value, **(given | other))


def synthetic(seed=0, layers=6, heads=4, n=75, hostile=(), name="pocket:pythia", source="mixed"):
    """A record like a scan's: two probes with the three kinds of figure, one gap, prompts of three domains."""
    rng = np.random.default_rng(seed)
    entropy = np.sort(rng.gamma(3.0, 1.2, n))
    subjects = ("The capital of France", "Seven plus five", "A glass of water", "My oldest friend")
    text = [f"{subjects[i % 4]} is, as example {i} of {n} shows without much doubt," for i in range(n)]
    text[: len(hostile)] = hostile[:n]
    share = 0.15 + 0.3 * np.arange(layers) / max(layers - 1, 1) + rng.normal(0, 0.01, layers)
    null = 0.15 + np.stack([-0.04 * np.ones(layers), 0.04 + rng.random(layers) * 0.02], 1)
    scores = np.stack([entropy - entropy.mean(), 0.5 * np.sin(entropy) + rng.normal(0, 0.2, n), rng.random(n)], 1)
    every = scores + rng.normal(0, 0.3, (layers, n, 3)) * np.arange(layers)[::-1, None, None]  # the last: as they are
    geometry = Measured(
        title="Value manifold",
        meaning="Values at the last position lie near a curve when one number orders them. The number may be entropy.",
        computed="PCA of standardised values over prompts; share of the first component.",
        null="Untrained copies of the model, 20 times.",
        failure_modes="One outlier token can carry the whole first component.",
        estimates=(
            estimate("PC1 share, last layer"),
            estimate("PC1+PC2 share", "open", 0.31, 0.2, why="n >= 120", claim="Values lie near a plane."),
        ),
        quantities={
            "share": Quantity(("layer",), "fraction", "share of variance of PC1", Figure("curve", band="share_null")),
            "share_null": Quantity(("layer", "bound"), "fraction", "95 % of 20 untrained controls"),
            "scores": Quantity(
                ("prompt", "component"),
                "standard units",
                "last layer, principal components",
                Figure("scatter", layers="every"),
            ),
            "every": Quantity(("layer", "prompt", "component"), "standard units", "the same at every layer"),
            "dropped": Quantity((), "count", "constant coordinates that were dropped"),
        },
        arrays={"share": share, "share_null": null, "scores": scores, "every": every, "dropped": np.asarray(3)},
        warnings=("the token 'is' has an outlier norm (9.1 times the median)", *hostile[:1]),
    )
    focus = Measured(
        title="Attention focus",
        meaning="Low entropy means that a head looks at few tokens.",
        computed="Entropy of the final query's attention row.",
        null="Uniform attention over the prompt.",
        failure_modes="The first token is a sink.",
        estimates=(
            estimate("mean focus", "", -1.25, 0.1, unit="bits", p=0.001),
            estimate("focus change with depth", "", 0.003, 0.004, unit="bits", p=0.41),
            estimate("focus of the sink", "", 2.0, 0.0, unit="bits", p=1.0, null=""),
        ),
        quantities={
            "entropy": Quantity(("layer", "head"), "bits", "attention entropy", Figure("heatmap")),
            "change": Quantity(("head", "layer"), "bits", "minus uniform", Figure("heatmap")),
        },
        arrays={"entropy": rng.gamma(2.0, 1.0, (layers, heads)), "change": rng.normal(0, 1, (heads, layers))},
    )
    return Record(
        results={"manifold": geometry, "focus": focus},
        unmeasured={"sula": "the model has no tokenizer for digits", **({"odd": hostile[1]} if hostile else {})},
        prompts={
            "text": tuple(text),
            "template": tuple(f"template {i % 38}" for i in range(n)),
            "domain": tuple(("fact", "arithmetic", "story")[i % 3] for i in range(n)),
            "tags": tuple(("short",) if i % 2 else ("long", "rare") for i in range(n)),
            "entropy": tuple(float(v) for v in entropy),
            "tokens": tuple(int(v) for v in rng.integers(5, 30, n)),
            "pieces": tuple(("<s>", *re.findall(" ?[^ ]+| +", each)) for each in text),
            "next tokens": tuple(
                tuple((f" {word}", p / (i + 2)) for word, p in (("a", 0.5), ("the", 0.25), ("<b>", 0.1), ("is", 0.05)))
                for i in range(n)
            ),
        },
        subject={
            "name": name, "revision": "step143000", "weights": "sha256:9f2c41d07be1", "dtype": "float32",
            "attention": "llmgeom_sdpa", "device": "cpu", "family": "gpt_neox", "layers": layers, "heads": heads,
            "self_check": {"rows": 2.4e-7, "logits": 0.0, "layers seen once": True},
        },
        source={"name": source, "seed": 0, "domains": ("fact", "arithmetic", "story")},
        facts={
            "command": f"llmgeom scan --model {name} --domain {source} --seed 0", "claims": "sha256:11aa",
            "versions": {"llmgeom": "0.1.0", "torch": "2.11.0"}, "bos_added": True,
        },
        warnings=("a pocket model checks the instrument; it is no evidence about architectures", *hostile),
        run={"host": "secret-host", "seconds": 12.5},
    )  # fmt: skip


class Tree(HTMLParser):
    """Every element with its attributes, and the text outside scripts and styles."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.text, self.scripts, self._inside = [], "", {}, ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._inside = tag if tag in ("script", "style") else ""

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside:
            key = dict(self.elements[-1][1]).get("id", self._inside)
            self.scripts[key] = self.scripts.get(key, "") + data
        else:
            self.text += data

    def handle_comment(self, data):
        raise AssertionError(f"a comment came out of the record: {data!r}")


def shape(html):
    return [(tag, sorted(a), a.get("href"), a.get("src")) for tag, a in Tree(html).elements]


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
        "value": "0.412 fraction",
        "interval": "0.392 to 0.432",
        "null": "0.110 to 0.190: untrained controls, 20 draws",
        "p": "0.048",
        "n": "75 prompts, 38 clusters",
        "verdict": "",
        "why": "",
        "claim": "",
        "probe": "manifold",
        "calibration": "+12.8 null units; not calibrated",  # (.412 - .15) / .04 * 1.96
    }
    assert rows["focus of the sink"]["null"] == "none" and rows["focus of the sink"]["p"] == ""
    assert rows["sula"]["verdict"] == "not measured" and "digits" in rows["sula"]["why"]
    assert {tuple(row) for row in rows.values()} == {tuple(rows["sula"])}


def test_table_is_safe_to_print_to_a_terminal(hostile):
    assert not re.search(
        r"[\x00-\x1f\x7f-\x9f\u202a-\u202e]", "".join(c for r in table([hostile] * 2) for c in r.values())
    )


def test_table_holds_two_records_side_by_side():
    rows = table([synthetic(), synthetic(source="math")])
    pairs = [(row["name"], row["record"]) for row in rows]
    assert pairs[:3] == [("PC1+PC2 share", "mixed"), ("PC1+PC2 share", "math"), ("mean focus", "mixed")]
    assert {row["record"] for row in table([synthetic(), synthetic()])} == {
        "pocket:pythia on mixed (run 1)",
        "pocket:pythia on mixed (run 2)",
    }


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


def test_page_reaches_for_nothing_outside_itself(hostile):
    html = page([hostile])
    assert not re.search(r"(?i)https?://|//cdn|@import|(?<!toData)url\(", html)
    tree = Tree(html)
    assert not [tag for tag, a in tree.elements if tag in ("link", "iframe", "img", "object", "form", "base")]
    assert all(a.get("href", "#").startswith("#") and "src" not in a for _, a in tree.elements)
    policy = next(a["content"] for tag, a in tree.elements if a.get("http-equiv"))
    assert "default-src 'none'" in policy and "unsafe-inline' script" not in policy and "unsafe-eval" not in policy
    assert policy.split("script-src ")[1].split(";")[0].count("'sha256-") == 2


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


def test_label_sequences_are_named_and_counted_without_templates():
    record = synthetic(source="SULA, colon")
    text = Tree(page([replace(record, source=record.source | {"kind": "sula"})])).text
    assert "pocket:pythia on label sequences (SULA, colon)" in text and "75 prompts" in text and "from 38" not in text


def test_no_record_is_refused():
    with refused(ValueError, "record"):
        page([])


def odd_scatter():
    """A scatter that is not of the record's prompts, has one component, and names that look like markup."""
    quantities = {"odd": Quantity(("<b>token", "<i>"), "<u>", "<img src=x>", Figure("scatter", colour="<b>"))}
    arrays = {"odd": np.arange(10.0)[:, None]}
    record = synthetic()
    return replace(record, results={"a": replace(record.results["focus"], quantities=quantities, arrays=arrays)})


def test_declared_names_are_escaped_for_plotly_too():
    drawn = json.loads(Tree(page([odd_scatter()])).scripts["data"])["figures"][0]
    assert drawn["layout"]["xaxis"]["title"]["text"] == "&lt;i&gt; 1 [&lt;u&gt;]"
    assert drawn["layout"]["yaxis"]["title"]["text"] == "there is no second component"
    assert "record" not in drawn and len(drawn["data"][0]["x"]) == 10


def test_a_quantity_that_does_not_fit_its_figure_is_named():
    record = synthetic()
    wrong = replace(record.results["focus"], arrays=dict(record.results["focus"].arrays, entropy=np.zeros(3)))
    with refused(ValueError, "entropy", "layer", "head", "(3,)"):
        page([replace(record, results={"focus": wrong})])


def test_an_axis_with_names_an_interval_and_a_curve_beside_are_drawn_and_told():
    bits = Quantity(("k",), "bits", "entropy of the labels", Figure("curve", beside="exact", interval="ends"))
    measured = replace(
        next(iter(synthetic().results.values())),
        quantities={
            "said": bits,
            "exact": Quantity(("k",), "bits", "exact entropy"),
            "ends": Quantity(("k", "bound"), "bits", "95 % interval"),
        },
        arrays={
            "said": np.array([1.0, 0.7, 0.5]),
            "exact": np.array([1.0, 0.6, 0.4]),
            "ends": np.array([[0.9, 1.2], [0.6, 0.8], [0.4, 0.6]]),
        },
        ticks={"k": (0, 2, 8)},
    )
    numbered = draw(measured, "said", "f", 0, {})
    dashed, line = numbered.spec["data"]
    assert line["x"] == [0, 2, 8] and dashed["y"] == [1.0, 0.6, 0.4] and dashed["name"] == "exact entropy"
    assert np.allclose(line["error_y"]["array"], [0.2, 0.1, 0.1])
    assert np.allclose(line["error_y"]["arrayminus"], [0.1, 0.1, 0.1])
    assert numbered.rows[2] == ("8", "0.5", "0.4", "0.4", "0.6") and len(numbered.columns) == 5
    assert "Dashed: exact entropy." in numbered.caption and "Whiskers: 95 % interval." in numbered.caption
    named = draw(replace(measured, ticks={"k": ("exact", "majority", "copy-last")}), "said", "f", 0, {})
    assert named.spec["layout"]["xaxis"]["ticktext"] == ["exact", "majority", "copy-last"]
    assert named.spec["data"][-1]["mode"] == "markers" and named.rows[1][0] == "majority"


def test_a_page_needs_no_torch():
    code = "import sys, llmgeom.reports; print([m for m in ('torch', 'transformers', 'scipy') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


# ---- captions, weight, colour ---------------------------------------------------------------------------------------


def test_a_caption_says_the_claim_the_interval_and_the_n_of_the_headline_that_its_figure_holds():
    measured = synthetic().results["manifold"]
    value = float(measured.arrays["share"][3])
    found = estimate("PC1 share, layer 3", "holds", value, claim="Values lie near a line.")
    others = estimate("of another unit", value=value, unit="bits"), estimate("of another value", value=value * 1.00001)
    measured = replace(measured, estimates=(found, *others))
    held = draw(measured, "share", "f", 0, {}).caption
    said = (
        "At layer 3, the metric “PC1 share, layer 3”: {}, 95 % interval {} to {}, n = 75 prompts, 38 clusters: holds."
    )
    assert said.format(*numbers(value, found.low, found.high)) in held and "another" not in held
    assert held.endswith("Claim: Values lie near a line.")
    # A figure from which no metric can be read says how many prompts it is of.
    assert draw(measured, "scores", "f", 0, {}).caption.endswith("n = 75 prompts, 38 clusters.")


def test_every_figure_has_a_caption_with_n_a_label_and_its_numbers():
    html = page([synthetic(), synthetic(source="math")])
    first, *captions = re.findall("<figcaption>(.*?)</figcaption>", html)
    assert "0 is the control, 1 the claimed effect" in first
    assert len(captions) == html.count("<figure") - 1 == 7 and all("n = 75 prompts" in each for each in captions)
    plots = [a for _, a in Tree(html).elements if a.get("class") == "plot"]
    assert all(a["role"] == "img" and len(a["aria-label"]) > 20 for a in plots)
    bodies = re.findall(r"The numbers of this figure.*?<tbody>(.*?)</tbody>", html, re.S)
    shapes = {"heatmap": 6, "curve": 6, "scatter": 75}
    kinds = [
        m.quantities[n].figure.kind
        for m in (synthetic().results[p] for p in ("focus", "manifold"))
        for n in pictured(m)
    ]
    # A curve is one chart of both records.
    both = [kind for kind in kinds for _ in range(1 if kind == "curve" else 2)]
    assert [body.count("<tr>") for body in bodies] == [shapes[kind] for kind in both]


def test_a_page_of_more_than_ten_megabytes_says_so(monkeypatch):
    record = synthetic()
    size = len(page([record]).encode())
    assert "MB and may be slow" not in page([record])
    module = sys.modules["llmgeom.reports.page"]
    monkeypatch.setattr(module, "HEAVY", size)
    assert "MB and may be slow" not in page([record])
    monkeypatch.setattr(module, "HEAVY", size - 1)
    assert f"This page holds {size / 1e6:.0f} MB and may be slow to draw" in page([record]).split("<main>")[0]


def test_no_blob_may_be_loaded_and_nothing_is_drawn_by_webgl():
    record = synthetic()
    html = page([record])
    assert "blob:" not in html.split('id="plotly"')[0] and "createObjectURL" not in Tree(html).scripts["script"]
    kinds = {
        t.get("type", "scatter") for f in json.loads(Tree(html).scripts["data"])["figures"] for t in f.get("data", ())
    }
    assert kinds == {"scatter", "heatmap"}


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


# ---- differences of several records ---------------------------------------------------------------------------------


NAMED = "PC1 share, a name that is long and would be broken on any other axis, < 1"


def test_an_end_in_brackets_that_several_titles_share_is_not_repeated_in_the_contents():
    def listed_as(*titles):
        ((_, entries),) = listed([(title, title, []) for title in titles])
        return [name for _, name, _ in entries]

    assert listed_as("Evidence (SULA)", "Controls (SULA)", "Focus") == ["Evidence", "Controls", "Focus"]
    assert listed_as("Cut (PC1)", "Cut (ridge)") == ["Cut (PC1)", "Cut (ridge)"]
    assert listed_as("Cut (SULA)", "Cut", "Read (SULA)") == ["Cut (SULA)", "Cut", "Read"]


def test_differences_of_records_of_the_same_prompts_stand_above_their_sections():
    first, second = synthetic(), synthetic(seed=0, name="pocket:llama")
    made = []
    for record, value in ((first, 0.4), (second, 0.55)):
        measured = replace(record.results["manifold"], estimates=(estimate(NAMED, value=value, effect=0.1),))
        made.append(replace(record, results={"manifold": measured}))
    from llmgeom.reports.comparison import compare

    found = compare(made).to_dict()
    html = page(made, found)
    (difference,) = found["pairs"][0]["differences"]
    part = html.split('class="compared"')[1].split("</section>")[0]
    value, low, high = numbers(difference["value"], difference["low"], difference["high"])
    assert difference["value"] == pytest.approx(0.15) and f"<td>{value} fraction</td><td>{low} to {high}</td>" in part
    assert difference["why"] in part and f"{difference['verdict']}: " in part
    drawn = next(f for f in json.loads(Tree(html).scripts["data"])["figures"] if f["id"] == "difference-0")
    assert drawn["data"][-1]["x"] == [1.5]  # 0.15 in effects of interest of 0.1
    assert drawn["layout"]["yaxis"]["ticktext"] == [f"{NAMED} (manifold)".replace("<", "&lt;")]
    # The axis says what it is where one sees it first, and a mark has the colour and the shape of its verdict.
    across = drawn["layout"]["xaxis"]
    assert across["side"] == "top" and "effects of interest" in across["title"]["text"]
    assert drawn["data"][-1]["name"] == difference["verdict"] in MARKS
    assert drawn["data"][-1]["marker"].items() >= MARKS[difference["verdict"]].items()
    assert html.index('class="compared"') < html.index('id="verdicts"')
    assert [d["x"] for d in drawn["data"][:2]] == [[-1, -1], [1, 1]]
    ends = [(difference[key] - difference["value"]) / 0.1 for key in ("low", "high")]
    whiskers = drawn["data"][-1]["error_x"]
    assert [-whiskers["arrayminus"][0], whiskers["array"][0]] == pytest.approx(ends, rel=1e-4)
    assert 'class="compared"' not in page(made)


def test_dose_curves_carry_bits_a_control_band_and_an_interval():
    from llmgeom.probes.interventions.axis_results import AxisAblation

    kl = AxisAblation.quantities()["kl"]
    assert (kl.unit, kl.figure.band, kl.figure.interval) == ("bits", "kl_null", "kl_interval")
    doses = (-2.0, -1.0, 1.0, 2.0)
    arrays = {
        "kl": np.array([0.4, 0.1, 0.1, 0.5]),
        "kl_null": np.array([[0.1, 0.2], [0.0, 0.1], [0.0, 0.1], [0.1, 0.3]]),
        "kl_interval": np.array([[0.3, 0.5], [0.0, 0.2], [0.0, 0.2], [0.4, 0.6]]),
    }
    quantities = {name: q for name, q in AxisAblation.quantities().items() if name in arrays}
    measured = replace(synthetic().results["focus"], quantities=quantities, arrays=arrays, ticks={"dose": doses})
    drawn = draw(measured, "kl", "f", 0, {})
    low, high, line = drawn.spec["data"]
    assert line["x"] == [-2, -1, 1, 2] and line["y"] == [0.4, 0.1, 0.1, 0.5]
    assert (low["y"], high["y"], high["name"]) == ([0.1, 0, 0, 0.1], [0.2, 0.1, 0.1, 0.3], "control")
    assert line["error_y"]["array"] == pytest.approx([0.1] * 4) and "[bits]" in drawn.caption
    assert "[bits]" in drawn.spec["layout"]["yaxis"]["title"]["text"]


def test_answers_stand_against_the_exact_posterior_and_their_curve_beside_the_exact_entropy():
    from llmgeom.probes.evidence.skill import Evidence

    answers, h_label = (Evidence.quantities()[name] for name in ("answers", "h_label"))
    assert (h_label.unit, h_label.figure.beside, h_label.figure.band) == ("bits", "h_exact", "h_label_null")
    record = synthetic()
    quantities = {"answers": answers}
    exact = np.linspace(0.1, 0.9, 75)
    measured = replace(
        record.results["focus"],
        quantities=quantities,
        arrays={"answers": np.stack([exact, exact**2], 1)},
        ticks={"answer": ("exact P(first)", "the model's P(first)")},
    )
    drawn = draw(measured, "answers", "f", 0, dict(record.prompts) | {"k": tuple(map(str, range(75)))})
    assert drawn.columns == ("prompt", "exact P(first) [probability]", "the model's P(first) [probability]")
    assert drawn.chosen == "k" and drawn.spec["y"] == pytest.approx(exact**2, rel=1e-5)


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
    assert [name for name in data if name.endswith("--scores")] == [
        "mixed-manifold--scores",
        "math-manifold--scores",
    ]


def test_curves_of_different_depth_fit_in_one_chart_and_lack_rows():
    data = Tree(page([synthetic(layers=6), synthetic(layers=4, name="other")]))
    (figure,) = [f for f in json.loads(data.scripts["data"])["figures"] if f["id"] == "manifold--share"]
    assert figure["layout"]["xaxis"]["range"] == [-0.5, 5.5]
    assert [len(trace["x"]) for trace in figure["data"]] == [6, 6, 6, 4, 4, 4]
