"""Prompts, model folders and run folders that are hostile or broken anywhere: never a traceback, never a hang, and what
is a prompt stays one, from its file to the page."""

import copy
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from llmgeom import grading
from llmgeom.commands.scan import Scan
from llmgeom.errors import UserError
from llmgeom.model import hub
from llmgeom.prompts import files
from llmgeom.record import Record
from llmgeom.reports.text import visible
from llmgeom.wind_tunnels.training import train
from llmgeom.wind_tunnels.training_config import Training
from tests.hostile import ended
from tests.pages import Tree
from tests.test_record import record

FUZZ = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
SOON = settings(max_examples=25, derandomize=True, **FUZZ)

# ---- prompts --------------------------------------------------------------------------------------------------------

KEPT = {
    "script": "</script><script>alert(1)</script>",
    "image": "\"'><img src=x onerror=alert(1)>",
    "comment": "<!-- <svg/onload=alert(1)> ]]>",
    "template": "{{7*7}} ${x} {% raw %} #{y} %s %n",
    "bidi": "left \u202eright\u202c \u2066in\u2069 \u200f",
    "zero width": "a\u200bb\u200dc\ufeffd",
    "emoji": "👩‍👩‍👧‍👦 🏴󠁧󠁢󠁳󠁣󠁴󠁿 😀",
    "combining": "Z̸̡̢̧̛̛̗a̴l̷g̵o̶",
    "controls": "bell\x07 escape\x1b[2J delete\x7f tab\t",
    "separators": "a\u2028b\u2029c\x85d\x0bf\x0c",
    "special tokens": "<|endoftext|>",
    "special tokens alone": "<|endoftext|><|endoftext|><|endoftext|>",
    "another's special tokens": "<s></s>[INST]<|im_start|><pad>",
    "one space more": " one  space more  ",
    "no word": ".",
    "right to left": "שלום עולם",
    "far planes": "\U0010fffd\U0001f9ff𝔘𝔫𝔦",
    "not a character": "\uffff\ufdd0",
    "path": "../../etc/passwd; rm -rf / `id` $(id)",
    "json": '{"text": "x"}]}',
    "quotes": "\\\" \\' \\\\ \\u0041",
}
SENT_BACK = {
    "empty": "",
    "blank": " \t ",
    "null byte": "a\0b",
    "lone surrogate": "a\ud800b",
    "a megabyte": "word " * 200_000,
    "one long word": "a" * 100_001,
    "more tokens than it reads": "word " * 9_000,
    "more tokens in one word": "ab" * 40_000,
}


def written(path: Path, prompts: list[str]) -> str:
    """A file of prompts: JSONL, or text where the name says so."""
    lines = prompts if path.suffix == ".txt" else [json.dumps({"text": text}) for text in prompts]
    path.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass") + b"\n")
    return str(path)


def scan(path: str, out: Path):
    flags = ["--probes", "value_manifold", "--control-models", "1", "-q"]
    return ended("scan", "--prompts", path, *flags, "--out", str(out))


@pytest.mark.usefixtures("few_draws")
def test_hostile_prompts_reach_the_page_as_they_were_written_and_as_text(tmp_path):
    done = scan(written(tmp_path / "prompts.jsonl", list(KEPT.values())), tmp_path / "run")
    assert done.exit_code == 0, done.output
    assert Record.load(tmp_path / "run").prompts["text"] == tuple(KEPT.values())
    html = (tmp_path / "run/report.html").read_text(encoding="utf-8")
    tame = [f"prompt {i} of a tame kind" for i in range(len(KEPT))]
    assert scan(written(tmp_path / "tame.jsonl", tame), tmp_path / "tame").exit_code == 0
    # A claim's value is a point in the plot of claims or, off its scale, an arrow, and a curve that is not measured for
    # one of them has no dashed line: numbers decide, not the prompts.
    by_value = {("circle", "class", "cx", "cy", "r"), ("text", "class", "x", "y")}
    by_value |= {("path", "d", "fill", "stroke", "stroke-dasharray", "stroke-width")}
    kinds = {(tag, *sorted(given)) for tag, given in Tree(html).elements} - by_value
    assert kinds <= {(tag, *sorted(given)) for tag, given in Tree((tmp_path / "tame/report.html").read_text()).elements}
    for text in KEPT.values():
        assert visible(text) in Tree(html).text
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff]", html)
    for path in (tmp_path / "run").iterdir():
        path.read_bytes().decode() if path.suffix != ".safetensors" else None


@pytest.mark.parametrize("kind", SENT_BACK)
def test_what_is_no_prompt_is_sent_back_with_its_line(tmp_path, kind):
    prompts = [*[f"The number {i} is" for i in range(12)], SENT_BACK[kind], "the last"]
    done = scan(written(tmp_path / "mine.jsonl", prompts), tmp_path / "run")
    assert done.exit_code == 1 and re.search(r"line 13\b|prompt 13\b", done.stderr), done.output
    assert not (tmp_path / "run/record.json").exists()


def test_a_file_without_end_is_sent_back(monkeypatch):
    monkeypatch.setattr(files, "MOST", 2**16)
    done = ended("scan", "--prompts", "/dev/zero")
    assert done.exit_code == 1 and "/dev/zero has more than" in done.stderr


def characters(**more) -> st.SearchStrategy[str]:
    return st.text(st.characters(**more), max_size=40)


def reads_or_refuses(path: Path, expected: list[str] | None) -> None:
    """The prompts as they were written, or one sentence that names the file."""
    try:
        found = files.read(str(path))
    except UserError as refusal:
        assert str(path) in str(refusal) and "\n" not in str(refusal)
        return
    if expected is not None:
        assert list(found.text) == expected
    assert list(files.read(str(path)).text) == list(found.text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | characters(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(characters() | st.just("text"), inner, max_size=3),
)


@SOON
@given(st.binary(max_size=200) | st.lists(JSON.map(json.dumps), max_size=3).map("\n".join).map(str.encode))
def test_any_bytes_and_any_json_are_read_or_refused(tmp_path_factory, blob):
    path = tmp_path_factory.mktemp("blob") / "p.jsonl"
    path.write_bytes(blob)
    reads_or_refuses(path, None)


# ---- model folders --------------------------------------------------------------------------------------------------

WHOLE = [b"", b"{", b"[]", b"null", b"\xff\xfe", b"{}", b"[" * 100_000]
VALUES = [None, -1, 0, 10**30, -(10**30), math.nan, 1e308, 3.5, "x", [], {}, True, ["a"] * 3, "\ud800", "<b>"]
GONE = object()
READ_ON = "this is where it would be read on"


class Broken:
    """A model folder and the command that reads it; both stop where the model is loaded and checked."""

    def __init__(self, folder: Path, work: Path, *words: str) -> None:
        self.folder, self.work, self.words = folder, work, words
        self.names = sorted(path.name for path in folder.glob("*.json"))

    def after(self, spoil: Callable[[Path], object]):
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        for path in self.folder.iterdir():
            if path.is_file():
                shutil.copy(path, self.work)
        spoil(self.work)
        done = ended(*self.words, "--model", str(self.work), "--out", str(self.work.parent / "out"))
        assert done.exit_code == 1 and (READ_ON in done.stderr or str(self.work) in done.stderr), done.stderr
        return done

    def keys(self, name: str) -> list[tuple]:
        body = json.loads((self.folder / name).read_bytes())
        if name == "tokenizer.json":
            return [("model",), ("model", "vocab"), ("model", "merges"), ("pre_tokenizer",), ("added_tokens",)]
        return [(key,) for key in body]

    def with_value(self, name: str, key: tuple, value: object):
        def spoil(work: Path) -> None:
            at = body = copy.deepcopy(json.loads((self.folder / name).read_bytes()))
            for step in key[:-1]:
                at = at[step]
            at.pop(key[-1]) if value is GONE else at.__setitem__(key[-1], value)
            (work / name).write_text(json.dumps(body))

        return self.after(spoil)


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """A tunnel's folder and a language model's; nothing is measured."""
    patch = pytest.MonkeyPatch()

    def stop(*_, **__):
        raise UserError(READ_ON)

    patch.setattr(grading, "question", stop)
    patch.setattr(Scan, "plan", stop)
    asked = Training("bijection:vocab=4,pairs=3", width=16, layers=1, heads=2, steps=2, batch=4, snapshots=2)
    root = tmp_path_factory.mktemp("models")
    yield {
        "tunnel": Broken(train(asked, root / "tunnel").out, root / "work", "grade", "--n", "10"),
        "pocket": Broken(
            Path(hub.locate("pocket:pythia").path), root / "work", "scan", "--limit", "20", "--domain", "math"
        ),
    }
    patch.undo()


def test_what_is_whole_is_read(broken):
    for one in broken.values():
        assert READ_ON in one.after(lambda _: None).stderr


@pytest.mark.parametrize("kind", ["tunnel", "pocket"])
def test_a_file_that_is_no_json_object_of_its_kind_is_named(broken, kind):
    one = broken[kind]
    for name in one.names:
        whole = (one.folder / name).read_bytes()
        for data in (b"[]", b"[" * 100_000, whole[: len(whole) // 2]):
            done = one.after(lambda work, name=name, data=data: (work / name).write_bytes(data))
            if name in ("config.json", "task.json"):
                assert name in done.stderr or "model_type" in done.stderr, (name, data[:20], done.stderr)
        one.after(lambda work, name=name: (work / name).unlink())
        one.after(lambda work, name=name: ((work / name).unlink(), (work / name).mkdir()))


def test_more_layers_than_weights_are_refused_before_they_are_made(broken):
    for layers in (10**9, math.inf, math.nan):
        done = broken["pocket"].with_value("config.json", ("num_hidden_layers",), layers)
        assert "config.json is corrupt (num_hidden_layers is" in done.stderr


def test_a_task_that_is_none_is_told_with_its_file(broken):
    for task in ("x", "nowhere.py:Own"):
        assert "task.json" in broken["tunnel"].with_value("task.json", ("task",), task).stderr


@SOON
@given(st.data())
def test_a_value_that_is_wrong_anywhere_ends_in_a_sentence(broken, data):
    one = broken[data.draw(st.sampled_from(["tunnel", "pocket"]))]
    name = data.draw(st.sampled_from(one.names))
    key = data.draw(st.sampled_from(one.keys(name)))
    one.with_value(name, key, data.draw(st.sampled_from([GONE, *VALUES]) | st.integers() | st.floats() | characters()))


# ---- run folders ----------------------------------------------------------------------------------------------------


def test_a_run_folder_that_is_broken_anywhere_ends_in_a_sentence(tmp_path):
    record().save(tmp_path / "run")
    path = tmp_path / "run/record.json"
    whole = path.read_bytes()
    body = json.loads(whole)
    blobs = [*WHOLE, whole[:-5]]
    blobs += [json.dumps({**body, key: value}).encode() for key in body for value in (None, -1, math.nan, "x", [], {})]
    blobs += [json.dumps({k: v for k, v in body.items() if k != key}).encode() for key in body]
    toy = body["results"]["toy"]
    blobs += [json.dumps({**body, "results": {"toy": {**toy, key: 5}}}).encode() for key in toy]
    for blob in blobs:
        path.write_bytes(blob)
        done = ended("report", str(tmp_path / "run"))
        if blob != whole and json_of(blob) is None:
            assert done.exit_code == 1 and "record.json" in done.stderr
    path.write_bytes(whole)
    for name in ("arrays.safetensors", "prompts.jsonl"):
        held = (tmp_path / "run" / name).read_bytes()
        for data in (b"", held[:-1], held + b" ", b"x" * len(held)):
            (tmp_path / "run" / name).write_bytes(data)
            assert f"{name} was changed after the run" in ended("report", str(tmp_path / "run")).stderr
        (tmp_path / "run" / name).write_bytes(held)


def json_of(blob: bytes) -> object:
    try:
        return json.loads(blob)
    except (ValueError, RecursionError):
        return None
