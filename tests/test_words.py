"""Plain English: words that a user does not meet in README, glossary, help, page and digest."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from llmgeom.cli import COMMANDS, main
from llmgeom.reports.digest import digest
from llmgeom.reports.findings import counting, findings, outcomes
from llmgeom.result import WORDS
from tests.test_findings import claim, record

ROOT = Path(__file__).parent.parent
FORBIDDEN = (
    "beside", "held against", "asked of", "is told of", "what is told", "where it is had", "is had", "a unit each",
    "own kind", "FAIL", "PASS", "INCONCLUSIVE", "above null", "headline",
)  # fmt: skip
# Helps that still hold some of them. Entries are only removed.
STILL: dict[str, set[str]] = {}


def found(text: str) -> set[str]:
    return {word for word in FORBIDDEN if re.search(rf"\b{re.escape(word)}\b", text)}


@pytest.mark.parametrize("page", ["README.md", "docs/glossary.md", "docs/page.md"])
def test_pages_are_plain(page):
    assert found((ROOT / page).read_text(encoding="utf-8")) == set()


@pytest.mark.parametrize("name", [name for group in COMMANDS.values() for name in group])
def test_helps_are_plain(name):
    shown = CliRunner().invoke(main, [name, "--help"], prog_name="llmgeom").stdout
    assert found(" ".join(shown.split())) == STILL.get(name, set())


@pytest.mark.parametrize("template", ["base", "first", "verdicts", "page", "section", "figure", "panel"])
def test_templates_of_the_page_are_plain(template):
    source = (ROOT / "reports" / f"{template}.html").read_text(encoding="utf-8")
    assert found(re.sub(r"{[%#].*?[%#]}|{{.*?}}|<[^>]*>", " ", source, flags=re.S)) == set()


@pytest.mark.parametrize("word", WORDS)
def test_sentences_of_a_run_are_plain(word):
    made = record(claim(verdict=word), unmeasured={"belief_clusters": "why"})
    every = outcomes([made], ["x"])
    lines = ["".join(text for _, text in line) for line in digest([made])]
    assert found(" ".join([counting([made], every), *findings(every, [made]), *lines])) == set()


def test_the_readme_is_short_and_its_output_is_what_the_terminal_prints():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.split()) < 900
    (shown,) = re.findall(r"It prints:\n\n```\n(.*?)```", readme, re.S)
    lines = shown.splitlines()
    assert len(lines) <= 20 and max(map(len, lines)) <= 100 and lines[-1] == "page: runs/demo/report.html"
    assert {word for word in WORDS if word in shown} and "docs/glossary.md" in readme
    first, second = readme.index("make demo"), readme.index("docs/reference.md")
    assert first < readme.index("docs/page.png") < second and "| command |" not in readme


def test_the_glossary_has_fifteen_words():
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", (ROOT / "docs/glossary.md").read_text(encoding="utf-8"), re.M)[1:]
    assert len(rows) == 15 and len(set(rows)) == 15 and set(WORDS) <= set(rows)
