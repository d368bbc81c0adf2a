"""README and docs: every command parses, every scan can be planned, links lead somewhere, lists are the code's."""

import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from llmgeom.cli import main
from llmgeom.model import hub
from llmgeom.model.model import Model
from llmgeom.probes import names
from tests.pages import synthetic

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
# A line that starts a command, whatever is set or launched before it.
STARTS = (
    r"(?:\$ )?(?:export )?(?:[A-Z_]+=\S+ )*(?:(?:accelerate launch|torchrun)(?: --\w+(?: \d+)?)* -m )?llmgeom (?=[a-z])"
)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def shown(text: str) -> Iterator[list[str]]:
    """The words after `llmgeom` of every command that stands in a line of its own."""
    for line in text.splitlines():
        if found := re.match(rf"\s*{STARTS}(.*)", line):
            rest = re.sub(r"\$\{?\w+\}?(?=/\d)", "0", found[1])
            yield shlex.split(re.sub(r"\$\w+", "0", rest), comments=True)


def mentioned(text: str) -> Iterator[list[str]]:
    """The same of what stands in a sentence or a table, `llmgeom verb ...`."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for said in re.findall(r"`llmgeom ([a-z][^`<>{}]*)`", prose):
        yield [word for word in shlex.split(said) if word not in ("...", "[RUN", "...]")]


def parse(words: list[str]) -> None:
    """As the door would, less the call. Raises click's UsageError."""
    command: click.Command = main
    parent = None
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name, words = words[0], words[1:]
        parent = click.Context(command, parent=parent, info_name=name)
        command = command.get_command(parent, name)
        if command is None:
            raise click.UsageError(f"no such command {name!r}")
    if words:
        command.make_context(command.name, list(words), parent=parent, resilient_parsing=False)


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A place in which the folders and files that docs name are there, so that what is refused is a wrong flag."""
    monkeypatch.chdir(tmp_path)
    for name in ("node0/cache", "node1/cache", "0/cache-0", "0/cache-1", "0/cache-2", "0/cache-3", "0/cache-*"):
        Path(name).mkdir(parents=True)
    for name in ("FOLDER", "RUNS"):
        Path(name).mkdir()
    return tmp_path


# ---- commands -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_every_command_parses(path, folders):
    text = path.read_text(encoding="utf-8")
    for words in [*shown(text), *mentioned(text)]:
        try:
            parse(words)
        except (click.UsageError, click.exceptions.Exit) as wrong:
            if not isinstance(wrong, click.exceptions.Exit) or wrong.exit_code:
                pytest.fail(f"{named(path)}: llmgeom {shlex.join(words)}: {wrong}")


def scans() -> list[tuple[str, ...]]:
    """Every different scan that is shown, less where it writes."""
    found: dict[tuple[str, ...], None] = {}
    for path in PAGES:
        for words in shown(path.read_text(encoding="utf-8")):
            # The stubs have no chat template, and no data set is here.
            if words[0] == "scan" and "--chat" not in words and not any(word.startswith("hf:") for word in words):
                out = words.index("--out") if "--out" in words else len(words)
                found[(*words[:out], *words[out + 2 :])] = None
    return list(found)


@pytest.fixture(scope="module")
def stubs(tmp_path_factory) -> Path:
    """Models without weights: a config and a tokenizer, and tunnels' configs with their tasks."""
    place = tmp_path_factory.mktemp("stubs")
    for name in ("pythia", "llama"):
        shutil.copytree(hub.POCKET / name, place / name, ignore=shutil.ignore_patterns("*.safetensors"))
    flags = shlex.split("--width 16 --layers 2 --steps 2 --batch 4 --snapshots 2 --arch gpt2 -q --out")
    for task in ("bijection", "hmm", "recall"):
        made = CliRunner().invoke(main, ["train", task, *flags, str(place / task)])
        assert made.exit_code == 0, made.output
        (place / task / "model.safetensors").unlink()
    return place


@pytest.mark.parametrize("words", scans(), ids=shlex.join)
def test_every_scan_can_be_planned_without_a_weight_or_a_network(words, stubs, folders, monkeypatch):
    def located(model: str, *_, **__) -> hub.Located:
        tunnel = [task for task in ("bijection", "hmm", "recall") if task in model]
        stub = tunnel[0] if tunnel else "bijection" if model == "DIR" else "pythia" if "pythia" in model else "llama"
        return hub.Located(model, str(stubs / stub), None, "local")

    monkeypatch.setattr(hub, "locate", located)
    monkeypatch.setattr(Model, "load", lambda *_, **__: pytest.fail("a plan read weights"))
    words = ["mine.jsonl" if word == "FILE" else word for word in words if word != "--dry-run"]
    for flag in ("--prompts", "--prompts-from"):
        if flag in words:
            given = words[words.index(flag) + 1]
            record = synthetic()
            record = replace(record, prompts=record.prompts | {"tags": ("",) * len(record.prompts["text"])})
            record.save(folder := "run" if flag == "--prompts" else given)
            if flag == "--prompts":
                lines = Path(folder, "prompts.jsonl").read_text(encoding="utf-8")
                texts = "".join(f"{i} and some more words\n" for i in range(20))
                texts = f"text\n{texts}" if given.endswith(".csv") else texts
                Path(given).write_text(lines if given.endswith(".jsonl") else texts, encoding="utf-8")
    few = ["--limit", "40", "--control-models", "1"]
    few += [] if {"--prompts", "--prompts-from"} & {*words} else ["--n", "15"]
    told = CliRunner().invoke(main, [*words, *few, "--dry-run", "--json", "--out", "out"])
    assert told.exit_code == 0, told.output


def test_python_in_the_docs_runs(folders):
    """test_cookbook.py runs README's and the cookbook's, test_cli.py the scan of how-to.md; this is the rest."""
    pages = [path for path in PAGES[2:] if path.name != "cookbook.md"]
    found = [code for path in pages for code in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)]
    (rest,) = (code for code in found if "llmgeom.scan(" not in code)
    scope: dict = {}
    exec(rest, scope)
    assert scope["before"].any() and not scope["after"].any()


# ---- links ----------------------------------------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """The anchors that a renderer makes of headings."""
    prose = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    heads = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_every_link_leads_somewhere(path):
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text):
        if target.startswith("http"):
            continue
        there = (path.parent / target).resolve() if target else path
        assert there.exists(), f"{named(path)} links to {target}, which is not there"
        assert not anchor or anchor in anchors(there), f"{named(path)} links to #{anchor} of {named(there)}"


# ---- what a scan measures -------------------------------------------------------------------------------------------


def test_every_probe_has_its_section_and_every_section_its_probe():
    text = (DOCS / "scan.md").read_text(encoding="utf-8")
    assert re.findall(r"^## `(\w+)`\n", text, flags=re.MULTILINE) == sorted(names())
