"""The page's linked views in a browser: one prompt in every figure, layer, domains, the address, the keyboard."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llmgeom.result import Figure, Quantity
from tests.pages import HOSTILE, synthetic
from tests.test_page_browser import chromium, opened, until  # noqa: F401  (a fixture)

pytestmark = pytest.mark.browser


def models():
    """The same prompts through two models; the second has fewer layers, and a scatter of another kind."""
    first, second = synthetic(hostile=HOSTILE), synthetic(seed=0, layers=4, hostile=HOSTILE, name="pocket:llama")
    measured = second.results["manifold"]
    figure = Figure("scatter", colour="domain")
    unrolled = Quantity(("prompt", "component"), "steps", "order along a curve", figure)
    quantities = {**measured.quantities, "unrolled": unrolled}
    arrays = dict(measured.arrays) | {"unrolled": measured.arrays["scores"][:, :2] ** 2}
    results = dict(second.results) | {"manifold": replace(measured, quantities=quantities, arrays=arrays)}
    same = {c: first.prompts[c] for c in ("text", "domain", "pieces")}
    return first, replace(second, results=results, prompts=dict(second.prompts) | same)


FIRST, SECOND = models()
SCORES = FIRST.results["manifold"].arrays["scores"]
EVERY = FIRST.results["manifold"].arrays["every"]


@pytest.fixture(scope="module")
def whole(chromium, tmp_path_factory):  # noqa: F811
    path = tmp_path_factory.mktemp("linked") / "report.html"
    with opened(chromium, path, [FIRST, SECOND]) as view:
        view.address = path.as_uri()
        yield view
        assert view.seen == {"requests": [view.address], "messages": []}


@pytest.fixture
def view(whole):
    """The page as it is when it is opened, scrolled to the first scatter."""
    again(whole, "")
    whole.locator("figure:has(select)").first.scroll_into_view_if_needed()
    whole.mouse.move(2, 450)
    return whole


def again(view, hash):
    """Another address in the same window: the page follows it without loading."""
    view.evaluate(f"location.hash = {json.dumps(hash)}; dispatchEvent(new Event('hashchange'))")


def ids(view):
    return view.evaluate("scatters()")


def ring(view, figure):
    """Where a figure marks a prompt: (x, y), once it has been drawn."""
    view.evaluate(f"refresh('{figure}')")
    found = view.evaluate(f"byId('{figure}').layout.shapes.filter(s => s.type === 'circle')")
    assert len(found) in (0, 2)  # a ring, and white under it
    return (found[0]["xanchor"], found[0]["yanchor"]) if found else None


def hash_of(view):
    return view.evaluate("location.hash.slice(1)")


def point(view, prompt):
    figure = view.locator("figure:has(select)").first
    order = view.evaluate(f"byId('{ids(view)[0]}').data.flatMap(t => t.customdata)")
    return figure.locator("path.point").nth(order.index(prompt))


def test_pointing_at_a_prompt_marks_it_in_every_figure_of_both_models(view):
    view.evaluate("[...stale].forEach(refresh)")  # all are drawn, as after scrolling through the page
    point(view, 3).hover(force=True)
    until(view, "state.prompt >= 0")
    prompt = view.evaluate("state.prompt")  # points lie over each other
    assert hash_of(view) == "" and not view.evaluate("state.pinned")
    places = {figure: ring(view, figure) for figure in ids(view)}
    assert len(places) == 3
    second = SECOND.results["manifold"].arrays
    for (x, y), expected in zip(places.values(), (SCORES, second["scores"], second["unrolled"]), strict=True):
        assert (x, y) == pytest.approx(tuple(expected[prompt, :2]), rel=1e-5)
    rows = view.evaluate("[...document.querySelectorAll('tr[aria-current]')].map(r => +r.cells[0].textContent)")
    assert rows == [prompt, prompt]


def test_the_panel_tells_pieces_entropy_next_tokens_and_neighbours(view):
    again(view, "prompt=0.8")
    panel = view.locator("#panel")
    assert view.locator("#said").inner_text() == "prompt 8, pinned"
    pieces = panel.locator(".pieces span")
    assert pieces.all_text_contents() == list(FIRST.prompts["pieces"][8])
    assert pieces.first.get_attribute("class") == "special" and pieces.first.text_content() == "<s>"
    assert f"pocket:pythia: entropy {FIRST.prompts['entropy'][8]:.3g} bits" in panel.inner_text()
    assert f"pocket:llama: entropy {SECOND.prompts['entropy'][8]:.3g} bits" in panel.inner_text()
    table = panel.locator("table.next").first.locator("tbody tr")
    told = [(r.locator("th").text_content(), r.locator("td").nth(1).text_content()) for r in table.all()]
    assert told == [(f"·{piece[1:]}", f"{100 * p:.1f} %") for piece, p in FIRST.prompts["next tokens"][8]]
    widths = [float(r.evaluate("r => r.querySelector('.bar').style.width.slice(0, -1)")) for r in table.all()]
    assert widths == pytest.approx([100 * p for _, p in FIRST.prompts["next tokens"][8]], abs=0.06)
    near = np.argsort(np.linalg.norm(SCORES[:, :2] - SCORES[8, :2], axis=1), kind="stable")[1:6]
    assert panel.locator("ol.nearest button").all_text_contents() == [str(i) for i in near]
    assert panel.locator(".where").inner_text().endswith("last layer, principal components”")
    again(view, "prompt=0.8&layer=1")
    near = np.argsort(np.linalg.norm(EVERY[1][:, :2] - EVERY[1][8, :2], axis=1), kind="stable")[1:6]
    assert panel.locator("ol.nearest button").all_text_contents() == [str(i) for i in near]
    assert panel.locator(".where").inner_text().endswith("but at layer 1")
    panel.locator("ol.nearest button").nth(1).click()
    assert hash_of(view) == f"layer=1&prompt=0.{near[1]}"
    again(view, "hide=fact&prompt=0.8")  # what is hidden is nobody's neighbour
    near = np.argsort(np.linalg.norm(SCORES[:, :2] - SCORES[8, :2], axis=1), kind="stable")[1:]
    shown = [str(i) for i in near if FIRST.prompts["domain"][i] != "fact"]
    assert panel.locator("ol.nearest button").all_text_contents() == shown[:5]
    facts = dict(zip(*(panel.locator(f"dl {tag}").all_text_contents() for tag in ("dt", "dd")), strict=True))
    assert facts["tags"] == "long, rare" and facts["template"] == "template 8" and len(facts) == 6


def test_hostile_pieces_are_text(view):
    again(view, "prompt=0.1")
    assert view.locator("#panel .pieces").text_content() == "<s>" + HOSTILE[1]
    assert view.locator("#panel img").count() == 0


def test_a_click_pins_and_another_or_escape_lets_go(view):
    point(view, 20).click(force=True)
    until(view, "state.pinned")
    pinned = view.evaluate("state.prompt")
    assert hash_of(view) == f"prompt=0.{pinned}"
    assert view.locator("#panel button", has_text="unpin").count() == 1
    far = int(np.argmax(np.abs(SCORES[:, 0] - SCORES[pinned, 0])))
    point(view, far).hover(force=True)
    view.wait_for_timeout(300)
    assert view.evaluate("state.prompt") == pinned  # a pinned one stays
    point(view, pinned).click(force=True)
    until(view, "!state.pinned")
    point(view, pinned).click(force=True)
    until(view, "state.pinned")
    view.locator("#panel button", has_text="unpin").click()
    assert hash_of(view) == "" and not view.evaluate("state.pinned")
    view.keyboard.press("Escape")
    assert view.evaluate("state.prompt") == -1 and [ring(view, f) for f in ids(view)] == [None] * 3
    assert view.locator("#panel .pieces").count() == 0


def test_the_keyboard_reaches_a_figure_and_goes_through_its_prompts(view):
    view.locator("figure:has(select) select").first.focus()
    stops = []
    for _ in range(5):
        view.keyboard.press("Tab")
        stops.append(view.evaluate("document.activeElement.dataset.save || document.activeElement.id"))
    assert stops == ["svg", "png", "csv", "json", ids(view)[0]]
    seen = []
    for key in ["ArrowRight"] * 4 + ["ArrowLeft"]:
        view.keyboard.press(key)
        seen.append(view.evaluate("state.prompt"))
    rank = np.argsort(SCORES[:, 0], kind="stable").tolist()
    assert seen == [*rank[:4], rank[2]]
    assert view.locator("#said").inner_text() == f"prompt {rank[2]}" and hash_of(view) == ""
    view.keyboard.press("Enter")
    assert hash_of(view) == f"prompt=0.{rank[2]}"
    view.keyboard.press("ArrowUp")
    up = np.argsort(SCORES[:, 1], kind="stable").tolist()
    assert hash_of(view) == f"prompt=0.{up[up.index(rank[2]) + 1]}"
    view.keyboard.press("Escape")
    assert hash_of(view) == "" and view.evaluate("state.prompt") == -1
    for key in ("ArrowLeft", "ArrowRight", "ArrowRight"):  # from nowhere to the last, and no further
        view.keyboard.press(key)
        assert view.evaluate("state.prompt") == rank[-1]
    above = view.evaluate("scrollY")
    for key, pinned in (("Enter", True), ("Enter", False), (" ", True)):
        view.keyboard.press(key)
        assert view.evaluate("[state.prompt, state.pinned]") == [rank[-1], pinned]
    view.wait_for_timeout(300)
    assert view.evaluate("scrollY") == above  # these keys are not the window's here
    view.keyboard.press("Escape")
    # The table of prompts is one more stop.
    view.locator("#record-1-prompts tbody tr").first.focus()
    view.keyboard.press("ArrowDown")
    view.keyboard.press("ArrowDown")
    view.keyboard.press("Enter")
    assert hash_of(view) == "prompt=1.2"
    assert view.locator("#record-1-prompts tbody tr[tabindex='0']").count() == 1


def test_the_layer_slider_moves_points_lines_rows_and_numbers(view):
    again(view, "prompt=0.8")
    view.locator("#layer").focus()
    view.keyboard.press("ArrowLeft")
    view.keyboard.press("ArrowLeft")
    until(view, "location.hash.includes('layer=3')")
    assert hash_of(view) == "layer=3&prompt=0.8" and view.locator("#layer").get_attribute("aria-valuetext") == "layer 3"
    scatter = ids(view)[0]
    view.evaluate("[...stale].forEach(refresh)")
    assert view.evaluate(f"byId('{scatter}').data[0].x") == pytest.approx(EVERY[3][:, 0], rel=1e-5)
    assert ring(view, scatter) == pytest.approx(tuple(EVERY[3][8, :2]), rel=1e-5)
    figure = view.locator("figure:has(select)").first
    assert "layer 3; metrics are of the last" in figure.locator(".shown").text_content()
    cells = figure.locator("details tbody tr").nth(8).locator("td").all_text_contents()
    assert [float(c) for c in cells] == pytest.approx([8, *EVERY[3][8, :2]], rel=1e-3)
    marks = "content.figures.filter(f => f.layer === '{0}').map(f => byId(f.id).layout.shapes.map(s => s.{0}0))"
    assert view.evaluate(marks.format("x")) == [[3]]  # the curves of both models are one chart
    assert view.evaluate(marks.format("y")) == [[2.5]] * 4
    view.keyboard.press("End")
    until(view, "!location.hash.includes('layer')")
    assert view.locator("#layer").get_attribute("aria-valuetext") == "last layer"
    assert view.locator("#layer-said").inner_text() == "last"
    view.evaluate("[...stale].forEach(refresh)")
    assert view.evaluate(f"byId('{scatter}').data[0].x") == pytest.approx(SCORES[:, 0], rel=1e-5)
    assert view.evaluate("content.figures.filter(f => f.layer).every(f => !byId(f.id).layout.shapes.length)")
    cells = figure.locator("details tbody tr").nth(8).locator("td").all_text_contents()
    assert [float(c) for c in cells] == pytest.approx([8, *SCORES[8, :2]], rel=1e-3)
    assert figure.locator(".shown").text_content() == "Shown: layer 5, the last."


def test_a_domain_can_be_hidden_from_figures_tables_and_keys(view):
    visited = view.evaluate("history.length")
    view.locator("input[data-domain=fact]").uncheck()
    assert hash_of(view) == "hide=fact" and view.evaluate("history.length") == visited
    assert view.locator("figure:has(select)").first.locator("path.point").count() == 50
    assert view.locator("#record-0 output[id$=count]").inner_text() == "50 of 75 prompts"
    kept = [i for i in range(75) if i % 3]
    colours = view.evaluate(f"byId('{ids(view)[0]}').data[0].marker")
    entropy = np.array(FIRST.prompts["entropy"])
    assert colours["color"] == pytest.approx(entropy[kept], rel=1e-5)
    assert (colours["cmin"], colours["cmax"]) == pytest.approx((entropy.min(), entropy.max()), rel=1e-5)
    view.locator(f"#{ids(view)[0]}").focus()
    view.keyboard.press("ArrowRight")
    assert view.evaluate("state.prompt") == min(kept, key=lambda i: SCORES[i, 0])
    again(view, "hide=fact&prompt=0.3")  # hidden: told, and marked nowhere
    assert [ring(view, figure) for figure in ids(view)] == [None] * 3
    view.locator("input[data-domain=fact]").check()
    assert hash_of(view) == "prompt=0.3" and ring(view, ids(view)[0]) is not None
    view.evaluate("state.hide.add('a,b&c'); write()")
    assert hash_of(view) == "hide=a%2Cb%26c&prompt=0.3"


def test_the_address_opens_the_page_as_it_was_left(chromium, tmp_path):  # noqa: F811
    at = "#s=manifold&layer=2&hide=story,fact&colour=domain&prompt=0.7&step=3&other=1"
    with opened(chromium, tmp_path / "page.html", [FIRST, SECOND], at=at) as view:
        view.wait_for_timeout(100)
        assert view.locator("#layer").input_value() == "2" and view.locator("#layer-said").inner_text() == "2"
        checked = view.locator("input[data-domain]:checked").evaluate_all("e => e.map(i => i.dataset.domain)")
        assert checked == ["arithmetic"]
        assert view.locator("figure select").first.input_value() == "domain"
        assert view.locator("#said").inner_text() == "prompt 7, pinned"
        assert ring(view, ids(view)[0]) == pytest.approx(tuple(EVERY[2][7, :2]), rel=1e-5)
        assert view.locator("figure:has(select)").first.locator("path.point").count() == 25
        assert view.evaluate("scrollY") > 300
        # A link inside the page adds where one is and forgets nothing.
        view.locator("a[href='#focus']").first.evaluate("a => a.click()")
        assert hash_of(view) == "s=focus&layer=2&hide=fact,story&colour=domain&prompt=0.7&step=3"
        there = "Math.abs(byId('focus').getBoundingClientRect().top) < 200"
        assert view.evaluate(there)
        view.evaluate("scrollTo(0, 0)")
        again(view, "s=focus")
        assert view.evaluate(there)
        for wrong in (
            "layer=99&prompt=0.999&hide=nothing&colour=__proto__",
            "prompt=7.1&%E0%A4%A",
            "layer=5",  # the last, which is what stands without it
            "s=data",
            "prompt=x",
        ):
            again(view, wrong)
            state = view.evaluate("({...state, hide: [...state.hide]})")
            shown = [state[name] for name in ("layer", "hide", "colour", "prompt", "s")]
            assert shown == [None, [], "", -1, ""]
        assert view.seen["messages"] == []


def saved(view, kind, figure="figure:has(select)"):
    with view.expect_download() as download:
        view.locator(f"{figure} button[data-save={kind}]").first.click()
    return download.value.suggested_filename, Path(download.value.path()).read_bytes()


def test_a_figure_can_be_saved_in_four_ways(view):
    name = ids(view)[0]
    called, svg = saved(view, "svg")
    assert called == f"{name}.svg" and svg.startswith(b"<svg")
    assert svg.count(b'class="point ') + svg.count(b'class="point"') >= 75
    called, png = saved(view, "png")
    width = view.locator(f"#{name}").bounding_box()["width"]
    assert called == f"{name}.png" and png.startswith(b"\x89PNG")
    assert int.from_bytes(png[16:20], "big") == pytest.approx(2 * width, abs=2)
    called, text = saved(view, "csv")
    rows = list(csv.reader(io.StringIO(text.decode())))
    assert called == f"{name}.csv" and len(rows) == 76
    assert rows[0][:4] == ["prompt", "component 1 [standard units]", "component 2 [standard units]", "text"]
    assert [float(v) for v in rows[9][:3]] == pytest.approx([8, *SCORES[8, :2]], rel=1e-3)
    assert rows[2][3] == HOSTILE[1] and rows[9][rows[0].index("domain")] == FIRST.prompts["domain"][8]
    called, text = saved(view, "json")
    found = json.loads(text)
    assert called == f"{name}.json" and found["rows"][8] == rows[9] and "n = 75 prompts" in found["caption"]
    assert found["data"][0]["x"] == pytest.approx(SCORES[:, 0], rel=1e-5)
    curve = "figure:not(:has(select))"
    head, *rows = csv.reader(io.StringIO(saved(view, "csv", curve)[1].decode()))
    assert len(rows) == 6 and len(head) == 5


def test_a_cell_that_would_be_a_formula_is_saved_as_text(view):
    told = view.evaluate("['=1+1', '@x', '-cmd', '+1', '-2.5e-3', 'a\"b', 'a,b'].map(quoted)")
    assert told == ['"\'=1+1"', '"\'@x"', '"\'-cmd"', '"+1"', '"-2.5e-3"', '"a""b"', '"a,b"']
