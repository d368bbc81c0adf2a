"""The page with a slider: curves always there, each snapshot's figures in the same places, and nothing fetched."""

import base64
import gzip
import json
import re
from contextlib import contextmanager
from dataclasses import replace

import pytest
from click.testing import CliRunner

from llmgeom.cli import main
from llmgeom.dynamics.trajectories import over_training
from llmgeom.record import Record
from llmgeom.reports.figures import draw
from llmgeom.reports.steps import steps_page
from tests.pages import HOSTILE, Tree, shape, synthetic
from tests.test_page_browser import chromium, unfold, until, violations  # noqa: F401  (a fixture)

STEPS = (0, 4, 16, 64)
LACKS = 16  # the step at which one probe was not measured


def snapshots(steps=STEPS, hostile=(), **more) -> dict[int, Record]:
    """Records of one training: the same prompts, other numbers; at one step a probe is missing."""
    made = {step: synthetic(seed=i, hostile=hostile, name=f"step{step}", **more) for i, step in enumerate(steps)}
    if LACKS in made:
        kept = {name: m for name, m in made[LACKS].results.items() if name != "focus"}
        made[LACKS] = replace(made[LACKS], results=kept, unmeasured={"focus": "it had no heads", "sula": "none"})
    return made


def whole(made: dict[int, Record], name="a run") -> Record:
    first = next(iter(made.values()))
    curves = over_training(tuple(made), made)
    return replace(first, results=curves, unmeasured={}, prompts={}, subject=first.subject | {"name": name})


def unpacked(html: str) -> dict:
    return json.loads(gzip.decompress(base64.b64decode(Tree(html).scripts["steps"])))


def test_every_figure_of_every_snapshot_is_in_the_page():
    made = snapshots()
    html = steps_page(whole(made), made)
    steps, tree = unpacked(html), Tree(html)
    assert list(steps) == sorted(map(str, STEPS), key=int)
    ids = [a["id"] for tag, a in tree.elements if tag == "div" and a.get("class") == "plot"]
    assert len(set(ids)) == len(ids)
    for step, record in made.items():
        found = steps[str(step)]["figures"]
        declared = [(p, n) for p, m in sorted(record.results.items()) for n, q in m.quantities.items() if q.figure]
        assert len(found) == len(declared) and set(found) <= set(ids)
        captions = {d["caption"]: d for d in found.values()}
        for probe, name in declared:
            expected = draw(record.results[probe], name, "x", 0, record.prompts)
            held = captions[expected.caption]
            assert held["numbers"] == json.loads(json.dumps([expected.columns, *expected.rows]))
            assert held["layout"] == json.loads(json.dumps(expected.spec["layout"]))
    # One place has one quantity at all steps.
    assert len({steps[str(s)]["figures"][i]["caption"] for s in (0, 4, 64) for i in steps["0"]["figures"]}) == 4
    last = json.loads(tree.scripts["data"])
    assert {f["id"] for f in last["figures"]} >= set(steps["64"]["figures"])


def test_it_is_the_same_for_equal_records_and_reaches_for_nothing(tmp_path):
    hostile = [text.replace("\ud800", "") for text in HOSTILE]  # a file has no unpaired surrogates
    made = snapshots(hostile=hostile)
    html = steps_page(whole(made, HOSTILE[0]), made)
    read = {}
    for step, record in made.items():
        record.save(tmp_path / str(step))
        read[step] = Record.load(tmp_path / str(step))
    assert steps_page(whole(read, HOSTILE[0]), read) == html
    tame = snapshots(hostile=[re.sub(r"[^a-z ]", "x", text) for text in hostile])
    assert shape(html) == shape(steps_page(whole(tame, "x"), tame))
    assert not re.search(r"""(src|href)=["']?(https?:|//)""", html.split('id="plotly"')[0])
    tree = Tree(html)
    policy = next(a["content"] for tag, a in tree.elements if tag == "meta" and "http-equiv" in a)
    assert "default-src 'none'" in policy and "unsafe-eval" not in policy and "eval(" not in tree.scripts["script"]


def test_report_draws_a_course_with_its_snapshots(tmp_path):
    made = snapshots()
    whole(made).save(tmp_path / "run")
    for step, record in made.items():
        record.save(tmp_path / "run" / f"step{step}")
    for other in ("step-7", "step_by_2", "steps"):  # a person's own folders are no snapshots
        record.save(tmp_path / "run" / other)
    done = CliRunner().invoke(main, ["report", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    html = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert sorted(map(int, unpacked(html))) == list(STEPS) and 'type="range"' in html
    assert 'class="contents"' in html  # without it the page's parts stood in the column of the contents


# ---- in a browser ---------------------------------------------------------------------------------------------------


@contextmanager
def opened(chromium, path, made, at="", width=1280):  # noqa: F811
    path.write_text(steps_page(whole(made), made), encoding="utf-8")
    view = chromium.new_page(viewport={"width": width, "height": 900})
    view.seen = {"requests": [], "messages": []}
    view.on("request", lambda request: view.seen["requests"].append(request.url.partition("#")[0]))
    view.on("console", lambda message: view.seen["messages"].append(message.text))
    view.on("pageerror", lambda error: view.seen["messages"].append(str(error)))
    view.goto(path.as_uri() + at)
    view.wait_for_selector("html[data-steps=yes]", state="attached")
    unfold(view)
    yield view
    assert view.seen == {"requests": [path.as_uri()], "messages": []}
    view.close()


def first_of(view, step: int) -> bool:
    """Does the first scatter on the screen hold this step's places?"""
    drawn = view.evaluate("document.querySelector('.figures:not(.curves) figure.whole .plot').data[0].x")
    place = view.evaluate("document.querySelector('.figures:not(.curves) figure.whole .plot').id")
    return drawn == view.evaluate(f"snapshots[{step}].figures['{place}'].x")


@pytest.mark.browser
def test_the_slider_moves_by_key_and_the_step_stands_in_the_address(chromium, tmp_path):  # noqa: F811
    with opened(chromium, tmp_path / "page.html", snapshots(hostile=HOSTILE)) as view:
        view.locator("figure.whole").scroll_into_view_if_needed()
        assert first_of(view, 64) and view.locator("output.step").first.inner_text() == "step 64"
        view.locator("#step").focus()
        view.keyboard.press("ArrowLeft")
        view.wait_for_url("**#step=16")
        assert view.locator("#step").get_attribute("aria-valuetext") == "step 16"
        assert {each.inner_text() for each in view.locator("output.step").all()} == {"step 16"}
        until(view, "!stale.has(document.querySelector('figure.whole .plot').id)")
        assert first_of(view, 16)
        # What the step lacks is hidden and says why; its curves stay.
        assert view.locator("tbody[data-step='16']", has_text="it had no heads").is_visible()
        shown = view.evaluate("[...document.querySelectorAll('.figures:not(.curves) figure')].map(f => !f.hidden)")
        assert sorted(shown) == [False, False, True, True]
        assert view.evaluate("[...document.querySelectorAll('.curves figure')].every(f => !f.hidden)")
        view.keyboard.press("Home")
        view.wait_for_url("**#step=0")
        assert view.locator(".figures:not(.curves) figure:not([hidden])").count() == 4
        table = view.locator("figure.whole details table")
        assert table.locator("tbody tr").count() == 75
        first = "snapshots[0].figures[document.querySelector('figure.whole .plot').id].numbers[1]"
        assert table.locator("tbody tr").first.locator("td").all_text_contents() == view.evaluate(first)


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 1024, 400])
def test_it_is_never_wider_than_the_window_and_axe_finds_no_violation(chromium, tmp_path, width):  # noqa: F811
    with opened(chromium, tmp_path / "page.html", snapshots(), width=width) as view:
        assert view.evaluate("document.documentElement.scrollWidth") <= width
        assert "snapshot, step 0 to 64" in view.locator("label:has(#step)").inner_text()
        assert violations(view) == []
