"""Plain English: no dialect in README, docs, helps, errors, stages, the page's templates and the digest.

`dialect.tsv` lists what to avoid and what to write instead.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from llmgeom.cli import COMMANDS, main
from llmgeom.reports.digest import digest
from llmgeom.reports.findings import counting, findings
from llmgeom.reports.outcomes import outcomes
from llmgeom.result import WORDS
from tests.findings import claim, record

ROOT = Path(__file__).parent.parent
WINGS = ("llmgeom", "probes", "prompts", "wind_tunnels", "reports")
ROWS = (ROOT / "tests/dialect.tsv").read_text(encoding="utf-8").splitlines()[1:]
DIALECT = {
    pattern: (re.compile(rf"(?<![\w-])(?:{pattern})(?![\w])"), instead)
    for pattern, instead in (row.split("\t") for row in ROWS)
}
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += [*sorted((ROOT / "probes/texts").glob("*.md")), *sorted((ROOT / "llmgeom/papers/texts").glob("*.md"))]
PROMPTS = {"sula.py"}  # what models read: its words are the experiment's


def dialect(text: str) -> list[str]:
    """Each pattern that occurs, with its surroundings and what to write instead."""
    text = " ".join(text.split())
    return [
        f"…{text[max(0, hit.start() - 40) : hit.end() + 30]}…: instead of {hit[0]!r} write {instead!r}"
        for pattern, instead in DIALECT.values()
        for hit in pattern.finditer(text)
    ]


def sentence(node: ast.AST) -> str:
    """The text of a string or f-string, with … for what is put in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def spoken(source: str) -> Iterator[str]:
    """Every string of three words or more that is not a docstring: errors, help, meanings, stages, warnings."""
    nodes = list(ast.walk(ast.parse(source)))
    bodies = [node.body for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    silent = {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}
    silent |= {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    return (text for node in nodes if id(node) not in silent and len((text := sentence(node)).split()) > 2)


def test_the_list_catches_dialect_and_lets_english_pass():
    assert len(dialect("what is asked stands beside what is had: FAIL")) == 4
    assert dialect("an axis is held\nagainst it") and not dialect("She had lunch; besides, it failed a test.")
    source = (
        '"""Is held against."""\nraise UserError(f"{x} is held against " "it")\nflag(None, help="stands beside it")'
    )
    assert [text for text in spoken(source) if dialect(text)] == ["… is held against it", "stands beside it"]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_are_plain(path):
    assert dialect(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("wing", WINGS)
def test_strings_of_the_code_are_plain(wing):
    for path in sorted(path for path in (ROOT / wing).rglob("*.py") if path.name not in PROMPTS):
        for text in spoken(path.read_text(encoding="utf-8")):
            assert dialect(text) == [], path.relative_to(ROOT)


@pytest.mark.parametrize("name", [name for group in COMMANDS.values() for name in group])
def test_helps_are_plain(name):
    shown = CliRunner().invoke(main, [name, "--help"], prog_name="llmgeom").stdout
    assert dialect(shown) == []


@pytest.mark.parametrize("path", sorted((ROOT / "llmgeom/claims").glob("*.toml")), ids=lambda path: path.stem)
def test_claims_are_plain(path):
    assert dialect(re.sub(r"^#.*$", "", path.read_text(encoding="utf-8"), flags=re.M)) == []


@pytest.mark.parametrize("template", ["base", "first", "verdicts", "page", "section", "figure", "panel"])
def test_templates_of_the_page_are_plain(template):
    source = (ROOT / "reports" / f"{template}.html").read_text(encoding="utf-8")
    assert dialect(re.sub(r"{[%#].*?[%#]}|{{.*?}}|<[^>]*>", " ", source, flags=re.S)) == []


@pytest.mark.parametrize("word", WORDS)
def test_sentences_of_a_run_are_plain(word):
    made = record(claim(verdict=word), unmeasured={"belief_clusters": "why"})
    every = outcomes([made], ["x"])
    lines = ["".join(text for _, text in line) for line in digest([made])]
    assert dialect(" ".join([counting([made], every), *findings(every, [made]), *lines])) == []


def test_the_readme_is_short_and_its_output_is_what_the_terminal_prints():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.split()) < 900
    (shown,) = re.findall(r"It prints:\n\n<!-- output demo -->\n\n```\n(.*?)```", readme, re.S)
    lines = shown.splitlines()
    assert len(lines) <= 20 and max(map(len, lines)) <= 100 and lines[-1] == "page: runs/demo/report.html"
    assert {word for word in WORDS if word in shown} and "docs/glossary.md" in readme
    first, second = readme.index("make demo"), readme.index("docs/reference.md")
    assert first < readme.index("docs/page.png") < second and "| command |" not in readme


def test_the_glossary_has_fifteen_words():
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", (ROOT / "docs/glossary.md").read_text(encoding="utf-8"), re.M)[1:]
    assert len(rows) == 15 and len(set(rows)) == 15 and set(WORDS) <= set(rows)


def test_the_caption_of_a_band_names_its_control():
    named = re.compile(r"untrained|shuffled|random|control|permuted")
    found = {text for path in (ROOT / "probes").rglob("*.py") for text in bands(path.read_text(encoding="utf-8"))}
    assert len(found) > 8 and not {text for text in found if not named.search(text)}


def bands(source: str) -> Iterator[str]:
    """What the curves of a module, and the constants that they share, say that their band is of."""
    yield from re.findall(r'\b(?:null=|HARDEST_BAND = |GAIN = )"([^"]+)"', source)
