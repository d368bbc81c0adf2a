"""The site of `make docs` and the stored numbers of the pages: navigation, links, marks."""

import json
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


def test_links_out_of_docs_get_a_copy_and_others_are_left(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    import site_hook

    assert site_hook.outside(DOCS / "index.md", "../notebooks/scan.ipynb") == Path("notebooks/scan.ipynb")
    assert site_hook.outside(DOCS / "scan.md", "../README.md") == Path("README.md")
    assert site_hook.outside(DOCS / "scan.md", "claims.md") is None


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
    assert {path.stem for path in results.STORE.glob("*.json")} == results.COMMANDS.keys()
    for name, command in results.COMMANDS.items():
        assert results.stored(name)["command"] == command, f"{name}: make docs-numbers"


def test_every_table_of_a_study_stands_on_a_page_and_in_no_other_form(results):
    pages = "".join(path.read_text(encoding="utf-8") for path in results.pages())
    for name, made in results.TABLES.items():
        lines = made()
        assert pages.count(f"<!-- table {name} -->") == pages.count(lines[0]) == 1
        assert len({line.count("|") for line in lines if line.startswith("|")}) == 1


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


def test_marks_are_filled_from_the_store_and_from_nothing_else(results, tmp_path, monkeypatch):
    monkeypatch.setattr(results, "STORE", tmp_path)
    metric = {"value": 0.4267, "low": 0.39, "high": 0.466, "null_low": -0.0, "null_high": 0.43, "clusters": 142}
    (tmp_path / "a.json").write_text(json.dumps({"output": ["x < y", "z"], "metrics": {"|rho| of PC1": metric}}))
    page = (
        "is <!-- a: |rho| of PC1 | value | .2f -->9<!-- end --> (<!-- a: |rho| of PC1 | interval | .2f --><!-- end -->)"
    )
    filled = "is <!-- a: |rho| of PC1 | value | .2f -->0.43<!-- end --> (<!-- a: |rho| of PC1 | interval | .2f -->"
    assert results.updated(page) == filled + "0.39 to 0.47<!-- end -->)"
    block = results.updated("<!-- output a -->old<!-- end -->")
    assert block == "<!-- output a -->\n\n```\nx < y\nz\n```\n\n<!-- end -->" and results.updated(block) == block
    assert results.updated("no mark, 0.5") == "no mark, 0.5"
    assert results.shown("|rho| of PC1 | control | .1f", results.stored("a")) == "0.0 to 0.4"
    with pytest.raises(KeyError):
        results.updated("<!-- a: PC1 | value | .2f -->1<!-- end -->")


def test_the_metrics_of_a_run_are_read_from_its_folder(results, tmp_path):
    from tests.pages import synthetic

    record = synthetic()
    record.save(tmp_path / "run")
    read = results.metrics(tmp_path / "run")
    row = record.frame("metrics").iloc[0]
    assert read[row["name"]]["value"] == row["value"] and read[row["name"]]["null_high"] == row["null_high"]
