"""Two commands of each page run, at a small size, on pocket models and on tunnels of four steps."""

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
    "dynamics": "--n 20 --probes '' -q",
    "cache": "",
    "report": "",
    "export": "",
    "list": "",
}
# Without a flag a command is only named in the text, but for these.
BARE = ("scan", "evidence", "ablate", "list")
# A GPU, a network, a launcher, a plugin, a placeholder, a log of another program, or several full passes.
ELSEWHERE = re.compile(
    r"hf:|\.\.\.|path/to|--log|\b(DIR|NAME|RUN|RUNS|FOLDER|M)\b|--process all|--revisions|--task bijection --seeds"
    r"|--(backend|device-map|quantize|scale|also|transfer)\b"
)


def smaller(words: list[str]) -> list[str] | None:
    """The command at a small size, with a pocket model for a hub id. None: it is not run."""
    line = re.sub(r" --revision \S+", "", shlex.join(words))
    lacks = words[0] in ("patch", "probe", "grade") and not {"--model", "--axis"} & {*words}
    if words[0] not in SMALL or ELSEWHERE.search(line) or lacks or (len(words) == 1 and words[0] not in BARE):
        return None
    more = SMALL[words[0]]
    if "--axis" in words:
        more = "--controls 3 --n 24 -q"
    if "--answers" in words:
        more = "-q"
    if words[0] in ("ablate", "patch") and "--prompts" in words:  # every prompt of the file is read
        more = more.replace("--n 24 ", "")
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
    for name, more in (("seed0", "--seed 0"), ("seed1", "--seed 1"), ("random0", "--seed 0 --corrupt 1")):
        same = ["train", "bijection", "--schedule", "constant", *more.split(), *flags, str(place / name)]
        made = CliRunner().invoke(main, same)
        assert made.exit_code == 0, made.output
    own = place / "mine.jsonl"
    furnish(["--prompts", str(own)], place)
    words = shlex.split(
        f"probe --model pocket:llama --prompts {own} --target narrative --sites residual --nulls 1 -q --out"
    )
    made = CliRunner().invoke(main, [*words, str(place / "mine")])
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
            plain = "".join(line["text"] + "\n" for line in lines)
            path.write_text({".jsonl": text, ".csv": "text\n" + plain}.get(path.suffix, plain))
        elif word.startswith("runs/") and before == "--model":
            task = next((task for task in ("hmm", "recall", "markov") if task in word), "bijection")
            shutil.copytree(place / task, path)
        elif word.startswith("runs/"):
            folder = path.parent if path.suffix == ".safetensors" else path
            known = place / folder.name
            shutil.copytree(known if known.exists() else place / "run", folder, dirs_exist_ok=True)
        elif word == "length.py":
            (code,) = re.findall(
                r"(@probe\(\"residual\"\)\ndef length.*?)\n\n", (DOCS / "cookbook.md").read_text(), re.S
            )
            Path(word).write_text(f"from llmgeom.probe import probe\n\n\n{code}\n")
        elif word.startswith("dice.py"):
            shutil.copy(DOCS.parent / "tests" / "dice.py", "dice.py")


def every(path: Path) -> list[list[str]]:
    """The different commands of a page; a bare name is none."""
    text = path.read_text(encoding="utf-8")
    found = {tuple(words): words for words in [*shown(text), *mentioned(text)]}
    return [words for words in found.values() if len(words) > 1 or words[0] in BARE]


def commands(path: Path) -> list[list[str]]:
    """The first two commands of a page that can be run here."""
    small = filter(None, map(smaller, every(path)))
    return list(islice({tuple(words): list(words) for words in small}.values(), 2))


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in PAGES if commands(path)], ids=named)
def test_two_commands_of_a_page_run(path, place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for words in commands(path):
        furnish(words, place)
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0, f"llmgeom {shlex.join(words)}\n{done.output}"
