"""Prompts from files and standard input come through untouched, or are refused in one sentence."""

import io
import json
import sys
from types import SimpleNamespace

import pytest
import torch

from llmgeom.batch import Batch, Text
from llmgeom.errors import UserError
from llmgeom.prompts import files
from llmgeom.prompts.domains import Domain
from tests.refusals import refused


def lines(batch: Batch) -> str:
    blank = ("",) * len(batch)
    columns = zip(
        batch.text, batch.cluster, batch.columns.get("domain", blank), batch.columns.get("tags", blank), strict=True
    )
    return "".join(
        json.dumps(dict(zip(("text", "template", "domain", "tags"), row, strict=True)), ensure_ascii=False) + "\n"
        for row in columns
    )


def test_a_saved_pool_reads_back_to_the_same_prompts(tmp_path):
    batch = Domain("mixed").sample(150, 0)
    path = tmp_path / "prompts.jsonl"
    path.write_text(lines(batch), encoding="utf-8")
    again = files.read(str(path))
    assert (again.inputs, again.cluster, dict(again.columns)) == (batch.inputs, batch.cluster, dict(batch.columns))


HOSTILE = (
    "</script><script>alert(1)</script>",
    "{person} | {1/0}",
    "a\u2028b",
    "%s $HOME `id`",
    " odd  spaces ",
    "é\tü",
)


def test_hostile_prompts_come_through_untouched(tmp_path):
    batch = Batch(Text(HOSTILE), tuple("uvwxyz"), {})
    (tmp_path / "a.jsonl").write_text(lines(batch), encoding="utf-8")
    assert files.read(str(tmp_path / "a.jsonl")).text == HOSTILE
    (tmp_path / "a.txt").write_text("\n".join(HOSTILE) + "\n\n", encoding="utf-8")
    read = files.read(str(tmp_path / "a.txt"))
    assert read.text == HOSTILE
    assert read.cluster == tuple(f"line-{i}" for i in range(1, 7))
    assert read.source == {"kind": "file", "name": "a.txt", "n": 6}


@pytest.mark.parametrize(
    ("blob", "text"),
    [
        (b'\n{"text": "one", "entropy": 2.5}\n', None),
        (b'{"text": "one"}\r\n{"text": "two", "template": "t"}\r\n', ("one", "two")),
        (b"one\r\ntwo\r\n", ("one", "two")),
        (b"\xef\xbb\xbfone\n", ("one",)),
    ],
)
def test_standard_input_is_jsonl_where_it_begins_with_a_brace(blob, text, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(blob)))
    if text is None:
        with refused(UserError, "line 1", "blank"):
            files.read("-")
    else:
        assert files.read("-").text == text


@pytest.mark.parametrize(
    ("name", "blob", "sentence"),
    [
        ("p.txt", b" \n", "{} is empty: expected a prompt a line, or one JSON object a line"),
        ("p.txt", b"", "{} is empty: expected a prompt a line, or one JSON object a line"),
        ("p.txt", b"a\n\nb\n", "{}, line 2 is a blank prompt: give it a text or remove the line"),
        ("p.jsonl", b'{"text": " "}', "{}, line 1 is a blank prompt: give it a text or remove the line"),
        (
            "p.jsonl",
            b'{"text": "a"}\n{text}',
            "{}, line 2 is not JSON (Expecting property name enclosed in double quotes at column 2): "
            'expected {{"text": "..."}}',
        ),
        ("p.jsonl", b"[1]", '{}, line 1 is a JSON list, not an object: expected {{"text": "..."}}'),
        ("p.jsonl", b'{"prompt": "a"}', "{}, line 1 has no \"text\" (its keys: 'prompt'): add it"),
        ("p.jsonl", b'{"text": 3}', '{}, line 1 has a "text" of type int: expected a string'),
        ("p.jsonl", b'{"text": "a", "tags": []}', '{}, line 1 has a "tags" of type list: expected a string'),
        (
            "p.jsonl",
            b'{"text": "a", "template": ""}',
            '{}, line 1 has a blank "template": name the template, or leave the key out and the prompt is '
            "its own cluster",
        ),
        (
            "p.jsonl",
            b'{"text": "\\ud800"}',
            '{}, line 1 has a lone surrogate in "text": write the character itself or remove it',
        ),
        ("p.txt", b"a\nb\na\n", "{}, lines 1 and 3 are the same prompt: remove one of them"),
        ("p.txt", b"a\na\na\n", "{}: 2 prompts repeat an earlier one (lines 1 and 2; 1 and 3): remove them"),
        (
            "p.csv",
            b"text\n" + b"a\nb\nc\n" * 2 + b"d\nb\nd\n",
            "{}: 5 prompts repeat an earlier one (rows 1 and 4; 2 and 5; 3 and 6 and 2 more): remove them",
        ),
        ("p.txt", b"a\nb\xff\n", "{}, line 2 is not UTF-8 (byte 0xff): save the file as UTF-8"),
        ("p.txt", b"a\nb\0c\n", "{}, line 2 holds a NUL character at position 2: remove it"),
        (
            "p.txt",
            b"a\n" + b"b" * 100_001,
            "{}, line 2 has 100001 characters: expected at most 100000; shorten it or split it",
        ),
        (
            "p.jsonl",
            b"[" * 99_999,
            '{}, line 1 is JSON that is nested too deep or holds too long a number: expected {{"text": "..."}}',
        ),
    ],
)
def test_refusals_of_files(name, blob, sentence, tmp_path):
    path = tmp_path / name
    path.write_bytes(blob)
    with pytest.raises(UserError) as refusal:
        files.read(str(path))
    assert str(refusal.value) == sentence.format(path)


def test_a_column_of_more_than_64_bits_is_text(tmp_path):
    """Whole numbers of an id: no float, no column of a table holds them."""
    rows = ({"text": "a", "id": 2**63, "y": -(2**63)}, {"text": "b", "id": 10**400, "y": 0})
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    read = files.read(str(tmp_path / "p.jsonl"))
    assert read.columns["id"] == (str(2**63), str(10**400)) and read.columns["y"] == (-(2**63), 0)
    (tmp_path / "p.csv").write_text(f"text,id\na,{10**20}\nb,{10**400}\n")
    assert files.read(str(tmp_path / "p.csv")).columns["id"] == (str(10**20), str(10**400))


def test_a_line_of_a_table_may_be_longer_than_a_prompt(tmp_path):
    """A record's own prompts hold pieces and attention beside the text."""
    (tmp_path / "p.jsonl").write_text(json.dumps({"text": "a", "attention": ["x" * files.LONGEST]}))
    assert files.read(str(tmp_path / "p.jsonl")).text == ("a",)
    (tmp_path / "p.csv").write_text(f"text,more\na,{'x' * 2 * files.LONGEST}\n")
    assert files.read(str(tmp_path / "p.csv")).text == ("a",)
    (tmp_path / "p.csv").write_text(f"text\n{'x' * 2 * files.LONGEST}\n")
    with refused(UserError, "row 1 has 200000 characters"):
        files.read(str(tmp_path / "p.csv"))


@pytest.mark.parametrize("ending", ["json", "ndjson", "TSV", "pdf", "xlsx", "docx", "pkl", "npz", "txt.gz"])
def test_an_ending_that_is_no_text_is_refused_with_those_that_are_read(ending, tmp_path):
    path = tmp_path / f"prompts.{ending}"
    path.write_text("one\ntwo\n", encoding="utf-8")
    kind = ending.lower().removeprefix("txt.")
    with refused(UserError, path, f".{kind}", ".jsonl", ".csv", ".parquet", ".txt"):
        files.read(str(path))


@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_are_refused_under_an_ending_that_is_portuguese_too(zipped, tmp_path):
    path = tmp_path / "questions.pt"
    torch.save({"weight": torch.arange(8.0)}, path, _use_new_zipfile_serialization=zipped)
    with refused(UserError, path, ".pt", ".jsonl", ".txt"):
        files.read(str(path))
    path.write_bytes("Qual é a capital?\nOnde está".encode("latin-1"))  # text in another encoding is told as such
    with refused(UserError, path, "line 1", "UTF-8"):
        files.read(str(path))


@pytest.mark.parametrize(
    "name", ["p.txt", "p", "p.prompts", "p.md", "questions.pt", "json", "v1.2", "x.json/p", ".hidden"]
)
def test_any_other_file_holds_a_prompt_a_line(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a file may be called json
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("one\ntwo\n", encoding="utf-8")
    assert files.read(name).text == ("one", "two") and not files.tabular(name)


def test_refusals_of_what_is_no_file(tmp_path):
    with pytest.raises(UserError) as refusal:
        files.read(str(tmp_path / "absent.txt"))
    assert str(refusal.value) == (
        f"{tmp_path}/absent.txt does not exist: give a .txt, .jsonl, .csv or .parquet file, or - for standard input"
    )
    with pytest.raises(UserError) as refusal:
        files.read(str(tmp_path))
    assert str(refusal.value).startswith(f"{tmp_path} is a folder: give a file in it")
    with refused(UserError, "read"):
        files.read("a\0b")
