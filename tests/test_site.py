"""The site of `make docs` and the stored numbers of the pages: navigation, links, marks."""

import re
import shutil
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


@pytest.fixture
def results(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    import results

    return results


def nav(entries) -> list[str]:
    """Every page of the navigation."""
    if isinstance(entries, str):
        return [entries]
    return [page for entry in (entries.values() if isinstance(entries, dict) else entries) for page in nav(entry)]


def test_every_page_is_in_the_navigation_once():
    config = re.sub(r"!!python/name:\S+", "''", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = nav(yaml.safe_load(config)["nav"])
    assert sorted(listed) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_a_name_of_the_api_page_exists():
    import pydoc

    named = re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.M)
    assert len(named) > 10 and [name for name in named if pydoc.locate(name) is None] == []


def test_a_broken_link_of_a_built_site_is_named(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    from links import broken

    (tmp_path / "a.html").write_text('<h1 id="top">a</h1><a href="b.html#here">b</a><a href="https://x.org/y">x</a>')
    (tmp_path / "b.html").write_text(
        '<p id="here"><img src="c.png"></p><a href="a.html#gone">a</a><a href="#here">h</a>'
    )
    assert broken(tmp_path) == ["b.html: c.png", "b.html: a.html#gone"]


# ---- numbers --------------------------------------------------------------------------------------------------------


def test_numbers_and_outputs_of_pages_are_the_stored_ones(results):
    marks = 0
    for path in results.pages():
        text = path.read_text(encoding="utf-8")
        marks += len(results.MARK.findall(text))
        assert results.updated(text) == text, f"{path.relative_to(ROOT)}: run python docs/results.py"
    assert marks >= 15


def test_every_stored_result_is_that_of_its_command(results):
    for path in results.STORE.glob("*.json"):
        if path.stem == "beliefs":  # of studies.beliefs, a command for each of its runs
            continue
        assert results.stored(path.stem)["command"] == results.COMMANDS[path.stem], f"{path.stem}: make docs-numbers"


@pytest.mark.slow
def test_a_stored_output_is_what_the_command_prints_today(results, tmp_path, monkeypatch):
    """One scan stands for all: where it differs, the pages need `make docs-numbers`.

    What pages show is compared: on another kind of processor two prompts of nearly equal entropy change places, which
    moves a rank correlation of few prompts by .007.
    """
    shutil.copytree(results.STORE, tmp_path / "store")
    monkeypatch.setattr(results, "COMMANDS", {"second": results.COMMANDS["second"]})
    monkeypatch.setattr(results, "STORE", tmp_path / "store")
    (tmp_path / "store" / "second.json").unlink()
    results.measure(str(tmp_path), ["second"])
    for path in results.pages():
        text = path.read_text(encoding="utf-8")
        assert results.updated(text) == text, path.name
