"""The page in a real browser: it fetches nothing, runs nothing it was not given, and draws what the record holds."""

import base64
import re
import shutil
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from llmgeom.reports import page
from llmgeom.reports.compared import MARKS
from llmgeom.reports.comparison import compare
from llmgeom.reports.figures import coloured, draw
from llmgeom.reports.prompts import prompt_columns
from llmgeom.reports.text import visible
from llmgeom.result import Figure, Quantity
from tests.pages import HOSTILE, estimate, odd_scatter, synthetic

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.browser
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import sync_playwright

    assert CHROMIUM, "these tests need Chromium: apt-get install chromium"
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


def until(view, met: str) -> None:
    """Playwright's own waiting evaluates strings, which the page forbids."""
    for _ in range(200):
        if view.evaluate(met):
            return
        view.wait_for_timeout(50)
    raise AssertionError(f"never: {met}")


@contextmanager
def opened(chromium, path, records, width=1280, at="", folded=False, scheme="light", comparison=None):
    """The drawn page and, under `.seen`, whatever it asked for or complained about; its sections open but `folded`."""
    path.write_text(page(records, comparison), encoding="utf-8")
    view = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    view.seen = {"requests": [], "messages": []}
    view.on("request", lambda request: view.seen["requests"].append(request.url))
    view.on("console", lambda message: view.seen["messages"].append(message.text))
    view.on("pageerror", lambda error: view.seen["messages"].append(str(error)))
    view.on("dialog", lambda dialog: (view.seen["messages"].append(dialog.message), dialog.dismiss()))
    view.goto(path.as_uri() + at)
    view.wait_for_selector("html[data-ready=yes]", state="attached")
    if not folded:
        unfold(view)
    yield view
    view.close()


def unfold(view) -> None:
    """Open every section and draw every figure, as after reading the whole page."""
    view.evaluate("() => { for (const fold of all('details.fold')) fold.open = true; }")
    view.evaluate("() => library()")
    until(view, "window.Plotly !== undefined")
    view.evaluate("() => Promise.all([...stale].map((id) => (stale.delete(id), plot(figures[id]))))")
    view.evaluate("state.s && arrive(state.s)")


def violations(view) -> list:
    """What axe-core finds, with the elements; it has to have looked at something."""
    import axe_playwright_python

    source = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
    view.evaluate(f"{source}; undefined")
    report = view.evaluate("axe.run(document)")
    assert len(report["passes"]) > 30
    return [(one["id"], [node["target"] for node in one["nodes"]]) for one in report["violations"]]


def unplanned(**other):
    """A record with claims of no effect, and without a scatter of its prompts."""
    record = synthetic(**other)
    claims = [estimate(name, "open", 0.31, 0.2, equivalence=True, margin=0.25, margin_low=0.05, null="exact",
                       why="n >= 120", claim=f"{name}: the same.") for name in ("one", "two")]  # fmt: skip
    manifold = replace(record.results["manifold"], estimates=tuple(claims))
    kept = {name: q for name, q in manifold.quantities.items() if name not in ("scores", "every")}
    return replace(record, results={**record.results, "manifold": replace(manifold, quantities=kept)})


@pytest.fixture(scope="module")
def view(chromium, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    with opened(chromium, path, [synthetic(hostile=HOSTILE), synthetic(source="math", layers=5)]) as view:
        view.address = path.as_uri()
        yield view
        # Last, so that it also covers what the tests above clicked.
        assert view.seen == {"requests": [view.address], "messages": []}


def test_every_declared_figure_is_drawn(view):
    declared = [q for r in (synthetic(), synthetic()) for m in r.results.values() for q in m.quantities.values()]
    expected = sum(q.figure is not None for q in declared)
    assert expected == 8
    shown = view.locator(".js-plotly-plot:has(svg.main-svg)").count()
    assert shown == view.locator(".plot").count() == expected - 1  # two curves are one chart


def test_it_asks_for_nothing_and_complains_of_nothing(view):
    assert view.seen == {"requests": [view.address], "messages": []}
    assert view.locator("img, iframe, link, .modebar").count() == 0


@pytest.mark.parametrize("prompt", range(4))
def test_hover_shows_the_prompt_as_it_was_written(view, prompt):
    figure = view.locator("figure:has(select)").first
    figure.scroll_into_view_if_needed()
    # At its left end: points of two records in one row lie close together, and the nearest has the label.
    figure.locator("path.point").nth(prompt).hover(force=True, position={"x": 2, "y": 5})
    label = view.locator(".hoverlayer .hovertext", has_text=f"prompt {prompt}")
    label.wait_for()
    assert HOSTILE[prompt] in label.text_content()


def test_invisible_characters_can_be_seen_in_the_hover_text(view):
    hover = view.evaluate("content.records[0].hover[4]").replace("<br>", "")
    assert visible(HOSTILE[4]) in hover


@pytest.mark.parametrize(("column", "traces"), [("domain", 3), ("template", 8), ("tokens", 1), ("entropy", 1)])
def test_the_scatter_can_be_coloured_by_another_column(view, column, traces):
    figure = view.locator("figure:has(select)").first
    figure.locator("select").select_option(column)
    assert figure.locator(".scatterlayer .trace").count() == traces
    assert figure.locator("path.point").count() == 75


def test_a_column_with_a_blank_or_a_sign_that_cannot_be_seen_in_its_name_colours_too(chromium, tmp_path):
    """The head of a CSV with `text, score` has a column of the name " score"."""
    record = synthetic()
    odd = {" score": tuple(range(75)), "over\u202e": ("a", "b", "c") * 25}
    with opened(chromium, tmp_path / "report.html", [replace(record, prompts={**record.prompts, **odd})]) as view:
        figure = view.locator("figure:has(select)").first
        figure.locator(".plot").scroll_into_view_if_needed()
        for option, traces in ((" score", 1), ("over\\u202e", 3)):
            figure.locator("select").select_option(option)
            until(view, "!stale.has(document.querySelector('figure:has(select) .plot').id)")
            drawn = view.evaluate("document.querySelector('figure:has(select) .js-plotly-plot').data")
            assert view.evaluate("state.colour") == option and len(drawn) == traces
            assert traces > 1 or "score" in drawn[0]["marker"]["colorbar"]["title"]["text"]


@pytest.mark.parametrize("column", ["domain", "template", "tokens", "entropy"])
def test_points_are_coloured_as_in_a_notebook(view, column):
    record = synthetic(hostile=HOSTILE)
    figure = view.locator("figure:has(select)").first
    figure.locator(".plot").scroll_into_view_if_needed()
    figure.locator("select").select_option(column)
    until(view, "!stale.has(document.querySelector('figure:has(select) .plot').id)")
    spec = draw(record.results["manifold"], "scores", "", 0, record.prompts).spec | {"colour": column}
    drawn = view.evaluate("document.querySelector('figure:has(select) .js-plotly-plot').data")
    assert drawn == coloured(spec, **prompt_columns(record.prompts))


def test_search_keeps_the_rows_that_match(view):
    rows = view.locator("#record-0-prompts tbody tr")
    view.locator("#record-0 input[type=search]").fill("CAPITAL of france")
    shown = [i for i in range(75) if i % 4 == 0 and i >= len(HOSTILE)]
    assert [i for i in range(75) if rows.nth(i).is_visible()] == shown
    assert view.locator("#record-0-prompts-count").inner_text() == f"{len(shown)} of 75 prompts"
    view.locator("#record-0 input[type=search]").fill("")
    assert view.locator("#record-0-prompts-count").inner_text() == "75 of 75 prompts"


def test_a_column_sorts_up_then_down_by_its_numbers(view):
    head = view.locator("#record-1-prompts th", has_text="tokens")
    index = head.evaluate("th => th.cellIndex")
    cells = f"[...document.querySelectorAll('#record-1-prompts tbody tr')].map(r => +r.cells[{index}].textContent)"
    tokens = sorted(synthetic(source="math", layers=5).prompts["tokens"])
    head.locator("button").press("Enter")
    assert view.evaluate(cells) == tokens and head.get_attribute("aria-sort") == "ascending"
    head.locator("button").press("Enter")
    assert view.evaluate(cells) == tokens[::-1] and head.get_attribute("aria-sort") == "descending"


def test_a_figure_can_be_saved(view):
    with view.expect_download() as download:
        view.locator("button[data-save=svg]").first.click()
    assert download.value.suggested_filename == "mixed-focus--entropy.svg"


def test_printing_opens_every_table_and_closes_it_again(view):
    view.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert view.locator("details:not([open])").count() == 0
    view.evaluate("dispatchEvent(new Event('afterprint'))")
    assert view.locator("details[open]:not(.fold)").count() == 0


@pytest.mark.parametrize("width", [1280, 1024, 700, 400])
def test_the_page_is_never_wider_than_the_window(chromium, tmp_path, width):
    long = synthetic(layers=1, heads=1, name="organisation/" + "a-name-without-spaces" * 6)
    other, scale = synthetic(layers=32, heads=32), "the wider of rho's and Fisher's scale"
    method = f"jackknife over 20 groups of clusters, {scale}"
    wordy = estimate("rho", "open", method=method, why="it is open " * 9, claim="rho: high.")
    results = {name: replace(m, estimates=(*m.estimates, wordy)) for name, m in other.results.items()}
    with opened(chromium, tmp_path / "page.html", [long, replace(other, results=results)], width) as view:
        assert view.evaluate("document.documentElement.scrollWidth") <= width
        # How an interval was made wraps, and so leaves room for the reasons.
        rooms = view.evaluate("all('.verdicts td[data-label=verdict]').map((cell) => cell.clientWidth)")
        assert min(rooms) > (200 if width > 1200 else 120)
        assert view.seen["messages"] == []


def test_the_title_of_an_axis_is_whole_under_a_long_legend(chromium, tmp_path):
    """As in a label probe, whose curve stands beside five controls and has a band."""
    record = synthetic(layers=4)
    measured = record.results["manifold"]
    names = tuple(f"control {i}, median of 5" for i in range(5))
    curve = replace(measured.quantities["share"], meaning="value: held-out score, confounds removed, by layers")
    curve = replace(curve, figure=Figure("curve", band="share_null", beside="controls"))
    measured = replace(
        measured,
        quantities={**measured.quantities, "share": curve, "controls": Quantity(("control", "layer"), "", "controls")},
        arrays={**measured.arrays, "controls": np.full((5, 4), 0.2)},
        ticks={"control": names},
    )
    with opened(chromium, tmp_path / "page.html", [replace(record, results={"manifold": measured})], 400) as view:
        box = "(s) => [document.querySelector(s).getBoundingClientRect()].map((b) => [b.top, b.bottom])[0]"
        plot = next(one for one in view.evaluate("Object.keys(figures)") if one.endswith("--share"))
        (top, bottom), (first, last) = (
            view.evaluate(f"({box})('#{plot} {part}')") for part in (".ytitle", ".main-svg")
        )
        assert first <= top and bottom <= last
        assert view.locator(f"#{plot} .legendtext").count() == len(names) + 2


def test_points_that_are_no_prompts_are_drawn_without_them(chromium, tmp_path):
    with opened(chromium, tmp_path / "page.html", [odd_scatter()]) as view:
        assert view.locator("path.point").count() == 10 and view.locator("select").count() == 0
        assert view.seen["messages"] == []


def test_a_script_that_found_its_way_in_would_not_run(chromium, tmp_path):
    with opened(chromium, tmp_path / "page.html", [synthetic()]) as view:
        view.evaluate(
            """() => {
            const script = document.createElement("script");
            script.textContent = "window.intruder = 1";
            document.body.append(script);
            document.body.insertAdjacentHTML("beforeend", "<b onclick='window.intruder = 2' id=way-in>x</b>");
            document.getElementById("way-in").click();
        }"""
        )
        assert view.evaluate("window.intruder") is None
        assert "Content Security Policy" in view.seen["messages"][0]


def test_sections_are_folded_and_drawn_when_they_are_opened(chromium, tmp_path):
    with opened(chromium, tmp_path / "page.html", [synthetic(), synthetic(source="math")], 1440, folded=True) as view:
        tall, words, stops, forest = view.evaluate(
            """() => [document.documentElement.scrollHeight, document.body.innerText.split(/\\s+/).length,
            all("a[href], button, input, select, summary, [tabindex='0']").filter((e) => e.checkVisibility()).length,
            document.querySelector(".forest").getBoundingClientRect().top]"""
        )
        assert tall < 12_000 and words < 6_000 and stops <= 120 and forest < 900
        assert view.locator(".js-plotly-plot").count() == 0 and view.locator(".plot").count() == 7
        view.locator("#manifold summary").first.click()
        until(view, "document.querySelectorAll('#manifold .js-plotly-plot .main-svg').length > 0")
        assert view.locator("#focus .js-plotly-plot").count() == 0
        assert view.seen["messages"] == []


def test_a_link_opens_its_section_and_back_returns(chromium, tmp_path):
    with opened(chromium, tmp_path / "page.html", [synthetic(), synthetic(source="math")], folded=True) as view:
        view.locator("#claims th a[href='#manifold']").click()
        assert view.evaluate("location.hash") == "#s=manifold"
        assert view.evaluate("document.querySelector('#manifold > details').open")
        view.locator(".contents a[href='#focus']").evaluate("a => a.click()")
        assert view.evaluate("location.hash") == "#s=focus"
        view.go_back()
        until(view, "location.hash === '#s=manifold' && state.s === 'manifold'")
        view.go_back()
        until(view, "location.hash === '' && state.s === ''")


def test_a_copied_link_opens_at_its_figure_with_its_prompt_pinned(chromium, tmp_path):
    at = "#s=manifold--scores&prompt=0.5"
    with opened(chromium, tmp_path / "page.html", [synthetic()], at=at, folded=True) as view:
        until(view, "document.querySelector('#manifold--scores .main-svg') !== null")
        assert view.locator("#said").inner_text() == "prompt 5, pinned"
        assert view.evaluate("Math.abs(byId('manifold--scores').getBoundingClientRect().top) < 200")
        figures = view.evaluate("byId('manifold--scores').layout.shapes.length")
        assert figures == 2  # the ring
        view.evaluate("() => choose(0, 6, true, 'manifold--scores')")
        view.evaluate("state.s = ''; byId('copy').click()")
        assert view.evaluate("location.hash") == "#s=manifold--scores&prompt=0.6"


def test_the_dots_of_the_first_screen_are_prompts(chromium, tmp_path):
    record = synthetic()
    record = replace(record, results={"value_manifold": record.results["manifold"]})
    with opened(chromium, tmp_path / "page.html", [record], folded=True) as view:
        panels = view.locator(".panels .one")
        assert panels.count() == 3 and panels.first.locator("svg[viewBox] circle").count() == 75
        panels.first.locator("circle[data-prompt='9']").dispatch_event("click")
        assert view.locator("#said").inner_text() == "prompt 9, pinned"
        assert view.locator("circle.chosen").count() == 3
        assert view.evaluate("location.hash") == "#prompt=0.9"


def test_a_dark_page_has_no_white_figure(chromium, tmp_path):
    with opened(chromium, tmp_path / "page.html", [synthetic()], folded=True) as view:
        path = tmp_path / "page.html"
        night = chromium.new_page(color_scheme="dark")
        night.goto(path.as_uri())
        night.wait_for_selector("html[data-ready=yes]", state="attached")
        unfold(night)
        ground = "getComputedStyle(document.querySelector('.main-svg')).backgroundColor"
        assert night.evaluate(ground) == night.evaluate("getComputedStyle(document.body).backgroundColor")
        night.close()
        assert view.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_the_darkest_dot_is_seen_on_a_dark_page(chromium, tmp_path):
    """Its fill is nearly the page's own colour, so its outline has the contrast of 3 that WCAG asks of graphics."""
    record = synthetic()
    results = {"value_manifold": record.results["manifold"]}
    with opened(chromium, tmp_path / "page.html", [replace(record, results=results)], scheme="dark") as view:
        until(view, "document.querySelector('path.point')")
        style = "(s) => getComputedStyle(document.querySelector(s))"
        paper = view.evaluate(f"({style})('body').backgroundColor")
        for dot in (".panels circle", ".key circle", "path.point"):
            light = [luminance(colour) + 0.05 for colour in (view.evaluate(f"({style})('{dot}').stroke"), paper)]
            assert light[0] / light[1] > 3, dot


def luminance(colour: str) -> float:
    """Relative luminance of `rgb(r, g, b)`, as WCAG 2 defines it."""
    shares = [int(part) / 255 for part in re.findall(r"\d+", colour)]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return sum(weight * share for weight, share in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 400])
def test_axe_finds_no_violation(chromium, tmp_path, scheme, width):
    """axe-core, over the page with every section open and a prompt pinned: not even a minor violation."""
    named = {"value_manifold": synthetic().results["manifold"], **synthetic().results}
    records = [replace(synthetic(), results=named), synthetic(source="math", layers=5)]
    with opened(chromium, tmp_path / "page.html", records, width, scheme=scheme) as view:
        view.evaluate("choose(0, 3, true, '')")
        assert violations(view) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_violation_on_a_page_of_differences(chromium, tmp_path, scheme):
    records = [unplanned(), unplanned(name="pocket:llama")]
    found = compare(records).to_dict()
    assert found["pairs"][0]["differences"]
    with opened(chromium, tmp_path / "page.html", records, 1024, scheme=scheme, comparison=found) as view:
        assert violations(view) == []
        assert view.evaluate("document.documentElement.scrollWidth") <= 1024
        # The differences are the first thing on the page, and their marks say what was found.
        assert view.evaluate("byId('compared').getBoundingClientRect().top + scrollY") < 300
        assert {one.get("name") for one in view.evaluate("figures['difference-0'].data")} & set(MARKS)
        assert view.seen["messages"] == []


def test_the_names_of_differences_and_the_differences_are_whole_on_a_phone(chromium, tmp_path):
    names = [f"attention write: |rho| of PC1 and entropy, given length and final token {i}" for i in range(9)]
    records = [synthetic(), synthetic(name="pocket:llama")]
    for record in records:
        measured = replace(record.results["manifold"], estimates=tuple(map(estimate, names)))
        record.results.update(manifold=measured)
    found = compare(records).to_dict()
    with opened(chromium, tmp_path / "page.html", records, 400, comparison=found) as view:
        boxes = """(s) => all(`#difference-0 ${s}`).map((e) => e.getBoundingClientRect())
            .map((b) => [b.left, b.right, b.top, b.bottom])"""
        labels, dots = sorted(view.evaluate(f"({boxes})('.ytick text')"), key=lambda b: b[2]), "path.point"
        assert len(labels) == len(view.evaluate(f"({boxes})('{dots}')")) > len(names)
        assert min(b[0] for b in labels) >= 0 and max(b[1] for b in view.evaluate(f"({boxes})('{dots}')")) <= 400
        assert all(one[3] <= after[2] for one, after in pairwise(labels))


@pytest.mark.parametrize("width", [1440, 1024])
def test_axe_finds_no_violation_where_no_figure_is_of_prompts_and_no_empty_box_stands(chromium, tmp_path, width):
    """As on a page of evidence or of a grading: claims of no effect, warnings, prompts that no figure shows."""
    with opened(chromium, tmp_path / "page.html", [unplanned()], width) as view:
        assert not view.locator("#panel").is_visible()
        assert violations(view) == []
        view.evaluate("choose(0, 3, true, '')")
        assert view.locator("#panel").is_visible() and violations(view) == []
        assert view.evaluate("document.documentElement.scrollWidth") <= width
        parts, window = view.locator(".parts").bounding_box(), view.evaluate("innerWidth")
        assert parts["x"] + parts["width"] > 0.97 * window - 24, "no column is kept free for the panel"
        assert view.locator(".forest thead svg text").all_text_contents() == ["control", "allowed"]


def test_the_hint_of_the_panel_is_there_once_a_figure_of_prompts_is_in_view(chromium, tmp_path):
    with opened(chromium, tmp_path / "page.html", [synthetic(), synthetic(source="math")], 1440, folded=True) as view:
        assert not view.locator("#panel").is_visible()
        view.locator(".contents a[href='#manifold']").click()
        view.locator("figure:has(select)").first.scroll_into_view_if_needed()
        until(view, "byId('panel').checkVisibility({ visibilityProperty: true })")
        assert "Point at a prompt" in view.locator("#panel").inner_text()


def test_a_link_to_a_figure_leaves_its_buttons_below_the_bar(chromium, tmp_path):
    with opened(chromium, tmp_path / "page.html", [synthetic()], at="#s=manifold--scores", folded=True) as view:
        until(view, "document.querySelector('#manifold--scores .main-svg') !== null")
        edge = "document.querySelector('.tools').getBoundingClientRect().bottom"
        tops = "byId('manifold--scores').closest('figure').querySelector('button').getBoundingClientRect().top"
        assert view.evaluate(f"{tops} - {edge}") >= 0


def test_the_panel_shows_the_attention_of_a_layer_and_a_head(chromium, tmp_path):
    record, rng = synthetic(), np.random.default_rng(0)
    rows = [rng.integers(0, 256, (3, 2, len(pieces)), dtype=np.uint8) for pieces in record.prompts["pieces"]]
    column = tuple(tuple(base64.b64encode(layer.tobytes()).decode() for layer in prompt) for prompt in rows)
    column = ((), *column[1:])
    record = replace(record, prompts={**record.prompts, "attention": column})
    shares = "all('.attended span').map((piece) => parseInt(piece.style.getPropertyValue('--weight')))"
    with opened(chromium, tmp_path / "page.html", [record], at="#prompt=0.7&attend=1.0") as view:
        seventh = rows[7].astype(float)
        cases = (("1", "0", seventh[1, 0]), ("2", "mean", seventh[2].mean(0)), ("0", "1", seventh[0, 1]))
        for layer, head, weights in cases:
            view.locator("#card select").nth(0).select_option(layer)
            view.locator("#card select").nth(1).select_option(head)
            assert np.abs(np.array(view.evaluate(shares)) - 100 * weights / 255).max() <= 0.5 + 1e-9
            assert view.evaluate("location.hash") == f"#prompt=0.7&attend={layer}.{head}"
            # The token with most weight has the full colour.
            most = view.evaluate("+document.querySelector('.attended').style.getPropertyValue('--most')")
            assert most == pytest.approx(weights.max() / 255)
            assert f"(token {weights.argmax()})" in view.locator("#card .where").first.inner_text()
        view.evaluate("choose(0, 0, true, '')")
        assert view.locator(".attended").count() == 0  # this one has none
        assert view.seen["messages"] == []


def test_the_ends_of_pc1_are_buttons_and_the_keys_go_along_it(chromium, tmp_path):
    record = synthetic()
    scores = record.results["manifold"].arrays["scores"]
    record = replace(record, results={"value_manifold": record.results["manifold"]})
    with opened(chromium, tmp_path / "page.html", [record], folded=True) as view:
        ends = view.locator(".ends button")
        order = scores[:, 0].argsort()
        assert [int(one.get_attribute("data-prompt")) for one in ends.all()] == [*order[:4], *order[::-1][:4]]
        ends.nth(4).click()
        assert view.locator("#said").inner_text() == f"prompt {order[-1]}, pinned"
        assert view.locator("#panel").bounding_box()["y"] < 900, "the panel is in view"
        view.locator(".panels svg[tabindex]").first.press("ArrowLeft")
        assert view.locator("#said").inner_text() == f"prompt {order[-2]}, pinned"
