"""The page in a real browser: it fetches nothing, runs nothing it was not given, and draws what the record holds."""

import base64
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmgeom.reports import page
from llmgeom.reports.comparison import compare
from tests.pages import HOSTILE, estimate, synthetic

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
    claims = [estimate(name, "open", 0.31, 0.2, equivalence="within", hurdle=0.25, least=0.05, null="exact",
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


@pytest.mark.parametrize("prompt", range(4))
def test_hover_shows_the_prompt_as_it_was_written(view, prompt):
    figure = view.locator("figure:has(select)").first
    figure.scroll_into_view_if_needed()
    # At its left end: points of two records in one row lie close together, and the nearest has the label.
    figure.locator("path.point").nth(prompt).hover(force=True, position={"x": 2, "y": 5})
    label = view.locator(".hoverlayer .hovertext", has_text=f"prompt {prompt}")
    label.wait_for()
    assert HOSTILE[prompt] in label.text_content()


@pytest.mark.parametrize(("column", "traces"), [("domain", 3), ("template", 8), ("tokens", 1), ("entropy", 1)])
def test_the_scatter_can_be_coloured_by_another_column(view, column, traces):
    figure = view.locator("figure:has(select)").first
    figure.locator("select").select_option(column)
    assert figure.locator(".scatterlayer .trace").count() == traces
    assert figure.locator("path.point").count() == 75


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
        view.locator("#manifold .plot").first.scroll_into_view_if_needed()
        until(view, "document.querySelectorAll('#manifold .js-plotly-plot .main-svg').length > 0")
        assert view.locator("#focus .js-plotly-plot").count() == 0
        assert view.seen["messages"] == []


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
    found = compare(records)
    assert found.pairs[0].differences
    with opened(chromium, tmp_path / "page.html", records, 1024, scheme=scheme, comparison=found) as view:
        assert violations(view) == []
        assert view.evaluate("document.documentElement.scrollWidth") <= 1024
        # The differences are the first thing on the page, and their marks say what was found.
        assert view.evaluate("byId('compared').getBoundingClientRect().top + scrollY") < 300
        assert view.locator(".compared .chip").first.text_content() in {d.verdict for d in found.pairs[0].differences}
        assert view.seen["messages"] == []


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
