"""Three commands of each page run, at a small size, on pocket models and on tunnels of four steps."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from itertools import islice, pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from llmgeom.cli import main
from tests.test_docs import DOCS, PAGES, mentioned, named, shown

# What is appended; of a flag that is given twice the last counts. What is missing here takes hours or a network at any
# size: test_docs.py parses it.
SMALL = {
    "scan": "--limit 60 --nulls 1 -q",
    "probe": "--nulls 1 -q",
    "evidence": "--n 10 --nulls 1 -q",
    "ablate": "--n 24 -q",
    "patch": "--n 40 --controls 3 --nulls 1 -q",
    "train": "--steps 4 --batch 4 --snapshots 2 -q",
    "grade": "--n 20 --nulls 1 -q",
    "reproduce": "--dry-run",
    "report": "",
    "export": "",
    "list": "",
}
# A GPU, a network, a launcher, a plugin, a placeholder, the direction of a label, or several full passes.
ELSEWHERE = re.compile(
    r"hf:|\.\.\.|path/to|--axis|steered|\b(DIR|NAME|RUN|M)\b"
    r"|--(backend|device-map|quantize|shard|stability|scale|also|process|transfer)\b"
)


def smaller(words: list[str]) -> list[str] | None:
    """The command at a small size, with a pocket model for a hub id. None: it is not run."""
    line = re.sub(r" --revision \S+", "", shlex.join(words))
    lacks = words[0] in ("evidence", "patch", "probe", "grade") and "--model" not in words
    if words[0] not in SMALL or ELSEWHERE.search(line) or lacks or (len(words) == 1 and words[0] != "scan"):
        return None
    more = SMALL[words[0]]
    if words[0] == "scan" and not {"--prompts", "--prompts-from"} & {*words}:
        more += " --n 15"
    if words[0] == "ablate":
        more += " --nulls 1" if "--what" in words else " --controls 3"
    if words[0] == "scan" and not {"--probes", "--protocol"} & {*words}:
        more += " --probes value_manifold"
    return [re.sub(r"^(?!runs/)[\w-]+/[\w.-]+$", "pocket:pythia", word) for word in shlex.split(f"{line} {more}")]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Tiny models and a run, from which the folders that a command reads are copied."""
    place = tmp_path_factory.mktemp("made")
    flags = shlex.split("--width 16 --layers 2 --steps 4 --batch 4 --snapshots 2 --arch gpt2 -q --out")
    for task in ("bijection", "hmm", "recall", "markov:symbols=4,fixed=false"):
        made = CliRunner().invoke(main, ["train", task, *flags, str(place / task.split(":")[0])])
        assert made.exit_code == 0, made.output
    scan = ["scan", "--domain", "math", "--n", "15", *SMALL["scan"].split(), "--out", str(place / "run")]
    assert CliRunner().invoke(main, scan).exit_code == 0
    return place


def furnish(words: list[str], place: Path) -> None:
    """Make what the command reads and does not exist."""
    for before, word in pairwise(words):
        path = Path(word)
        if path.exists() or before == "--out":
            continue
        if before == "--prompts":
            domains = ("math", "news")
            lines = [
                {"text": f"{i} and {i} make", "narrative": i % 2, "right": str(i % 3), "domain": domains[i % 2]}
                for i in range(40)
            ]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            path.write_text(text if path.suffix == ".jsonl" else "".join(line["text"] + "\n" for line in lines))
        elif word.startswith("runs/") and before == "--model":
            task = next((task for task in ("hmm", "recall", "markov") if task in word), "bijection")
            shutil.copytree(place / task, path)
        elif word.startswith("runs/"):
            shutil.copytree(place / "run", path)
        elif word.startswith("dice.py"):
            (code,) = re.findall(r"```python\n(\"\"\"Loaded dice.*?)```", (DOCS / "tunnels.md").read_text(), re.S)
            Path("dice.py").write_text(code)


def commands(path: Path) -> list[list[str]]:
    """The first three commands of a page that can be run here."""
    text = path.read_text(encoding="utf-8")
    small = filter(None, map(smaller, [*shown(text), *mentioned(text)]))
    return list(islice({tuple(words): list(words) for words in small}.values(), 3))


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in PAGES if commands(path)], ids=named)
def test_three_commands_of_a_page_run(path, place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words in commands(path):
        furnish(words, place)
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0, f"llmgeom {shlex.join(words)}\n{done.output}"


def test_enough_pages_have_commands_that_run():
    found = {named(path): len(commands(path)) for path in PAGES}
    assert sum(found.values()) >= 30 and found["README.md"] == found["docs/tutorial.md"] == found["docs/how-to.md"] == 3
    assert smaller(["scan", "--model", "EleutherAI/pythia-410m", "--revision", "step1"])[:3] == [
        "scan",
        "--model",
        "pocket:pythia",
    ]
    assert smaller(["calibrate"]) is None and smaller(["scan", "--shard", "0/4"]) is None
