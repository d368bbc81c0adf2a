"""Prompts and labels from files and standard input come through untouched, or are refused in one sentence."""

import io
import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas
import pyarrow
import pytest
import torch
from pyarrow import parquet

from llmgeom.batch import Batch, Text
from llmgeom.errors import UserError
from llmgeom.probe import ProbeInput
from llmgeom.probes.labels.inputs import read_target
from llmgeom.probes.labels.probe import LabelProbe
from llmgeom.prompts import files
from llmgeom.prompts.domains import Domain
from studies.planted_labels import World
from tests.refusals import refused


def lines(batch: Batch) -> str:
    names, blank = ("text", "template", "domain", "tags"), ("",) * len(batch)
    rows = zip(batch.text, batch.cluster, *(batch.columns.get(name, blank) for name in names[2:]), strict=True)
    return "".join(json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False) + "\n" for row in rows)


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
    ("name", "blob", "words"),
    [
        ("p.txt", b" \n", ("is empty",)),
        ("p.txt", b"a\n\nb\n", ("line 2", "blank prompt")),
        ("p.jsonl", b'{"text": "a"}\n{text}', ("line 2 is not JSON", "column 2")),
        ("p.jsonl", b"[1]", ("line 1 is a JSON list",)),
        ("p.jsonl", b'{"prompt": "a"}', ("line 1", 'no "text"', "'prompt'")),
        ("p.jsonl", b'{"text": 3}', ("line 1", "int")),
        ("p.jsonl", b'{"text": "a", "tags": []}', ("line 1", "tags", "list")),
        ("p.jsonl", b'{"text": "a", "template": ""}', ("line 1", 'blank "template"')),
        ("p.jsonl", b'{"text": "\\ud800"}', ("line 1", "lone surrogate")),
        ("p.txt", b"a\nb\na\n", ("lines 1 and 3 are the same prompt",)),
        ("p.csv", b"text\n" + b"a\nb\nc\n" * 2 + b"d\nb\nd\n", ("rows 1 and 4; 2 and 5; 3 and 6 and 2 more",)),
        ("p.txt", b"a\nb\xff\n", ("line 2 is not UTF-8", "byte 0xff")),
        ("p.txt", b"a\nb\0c\n", ("line 2 holds a NUL character at position 2",)),
        ("p.txt", b"a\n" + b"b" * 100_001, ("line 2 has 100001 characters",)),
        ("p.jsonl", b"[" * 99_999, ("line 1", "nested too deep")),
        ("p.csv", b"text,n\n", ("no rows",)),
        ("p.csv", b"prompt,n\na,1\n", ('"text"', "'prompt'")),
        ("p.csv", b"text,n\na,1,2\n", ("row 1", "3 cells")),
        ("p.csv", b'text,n\n"a,1\n', ("not a CSV",)),
    ],
)
def test_refusals_of_files(name, blob, words, tmp_path):
    (tmp_path / name).write_bytes(blob)
    with refused(UserError, tmp_path / name, *words) as refusal:
        files.read(str(tmp_path / name))
    assert "\n" not in str(refusal.value)


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


@pytest.mark.parametrize("ending", ["TSV", "txt.gz"])
def test_an_ending_that_is_no_text_is_refused_with_those_that_are_read(ending, tmp_path):
    path = tmp_path / f"prompts.{ending}"
    path.write_text("one\ntwo\n", encoding="utf-8")
    kind = ending.lower().removeprefix("txt.")
    with refused(UserError, path, f".{kind}", ".jsonl", ".csv", ".parquet", ".txt"):
        files.read(str(path))


def test_tensors_are_refused_under_an_ending_that_is_portuguese_too(tmp_path):
    path = tmp_path / "questions.pt"
    torch.save({"weight": torch.arange(8.0)}, path)
    with refused(UserError, path, ".pt", ".jsonl", ".txt"):
        files.read(str(path))
    path.write_bytes("Qual é a capital?\nOnde está".encode("latin-1"))  # text in another encoding is told as such
    with refused(UserError, path, "line 1", "UTF-8"):
        files.read(str(path))


@pytest.mark.parametrize("name", ["p.txt", "p", "json", "v1.2", "x.json/p"])
def test_any_other_file_holds_a_prompt_a_line(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a file may be called json
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("one\ntwo\n", encoding="utf-8")
    assert files.read(name).text == ("one", "two") and not files.tabular(name)


def test_refusals_of_what_is_no_file(tmp_path):
    with refused(UserError, tmp_path / "absent.txt", "does not exist", ".parquet"):
        files.read(str(tmp_path / "absent.txt"))
    with refused(UserError, tmp_path, "is a folder: give a file in it"):
        files.read(str(tmp_path))
    with refused(UserError, "read"):
        files.read("a\0b")


def labelled(values) -> ProbeInput:
    data = World(n=len(values), controls=1).data(0)
    batch = replace(data.capture.batch, columns={"label": tuple(values)})
    return replace(data, capture=replace(data.capture, batch=batch))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (["a"] * 20, ("'a'", "all 20 rows", "two values")),
        (["a"] * 18 + ["b"] * 2, ("fewer than 5 rows of 'b'", "rows 19, 20")),
        ([1, 2, "x"] * 8, ("mixes kinds", "rows 3, 6, 9, 12, 15 and 3 more")),
        ([1.5, None] * 10, ("no value in rows 2, 4",)),
        ([str(i) for i in range(40)], ("40 classes in 40 rows",)),
    ],
)
def test_labels_that_cannot_be_read_are_refused_by_row(values, words):
    with refused(UserError, *words):
        LabelProbe("label").measure(labelled(values))


def test_a_column_that_is_not_there_is_refused_with_the_nearest():
    with refused(UserError, "labell", "label"):
        LabelProbe("labell").measure(labelled(["a", "b"] * 10))


def test_only_columns_that_can_be_a_label_are_offered():
    columns = {
        "domain": ("",) * 20,
        "template": tuple(f"row-{i}" for i in range(20)),
        "right": ("yes", "no") * 10,
        "size": tuple(range(20)),
        "note": (None, "a") * 10,
    }
    batch = Batch(Text(tuple(f"line {i}" for i in range(20))), tuple("abcde" * 4), {}, columns=columns)
    with refused(UserError, "'rigth': did you mean 'right'? known: right, size, the columns that can be a label"):
        read_target(batch, "rigth")
    with refused(UserError, "'nots': did you mean 'note'? known: right, size"):
        read_target(batch, "nots")
    with refused(UserError, "'xyz'; known: right, the columns"):
        read_target(batch, "xyz", "binary")
    for name in ("right", "size"):
        columns[name] = ("same",) * 20
    with refused(UserError, "--target nope", "none that can be a label", "two values"):
        read_target(replace(batch, columns=columns), "nope")


def test_every_further_column_is_kept(tmp_path):
    rows = [{"text": f"prompt {i}", "n": i / 2, "right": i % 2 == 0, "who": "ab"[i % 2]} for i in range(6)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "a.csv").write_text(
        "text,n,right,who\n" + "".join(f"{r['text']},{r['n']},{r['right']},{r['who']}\n" for r in rows),
        encoding="utf-8",
    )
    json_batch, csv_batch = (files.read(str(tmp_path / f"a.{kind}"), "who") for kind in ("jsonl", "csv"))
    assert json_batch.columns["n"] == csv_batch.columns["n"] == (0, 0.5, 1, 1.5, 2, 2.5)
    assert json_batch.columns["right"] == (True, False) * 3
    assert csv_batch.columns["right"] == ("True", "False") * 3
    assert json_batch.cluster == csv_batch.cluster == ("a", "b") * 3
    frame = files.from_frame({"text": [r["text"] for r in rows], "n": np.arange(6) / 2})
    assert frame.columns["n"] == json_batch.columns["n"]


def test_a_frame_of_pandas_is_read_as_its_cells():
    own = {"text": ["a b", "c d"], "n": pandas.array([1, None], dtype="Int64"), "when": [None, "now"], 3: [1.5, 2.5]}
    batch = files.from_frame(pandas.DataFrame(own))
    assert batch.columns["n"] == (1, None) and batch.columns["when"] == (None, "now")
    assert batch.columns["3"] == (1.5, 2.5)
    assert files.from_frame(pandas.DataFrame({1: ["a"]}), text=1).text == ("a",)
    for frame, words in (
        (["a"], ("a list is no frame", "mapping of columns")),
        (pandas.DataFrame([["a", "b"]], columns=["text", "text"]), ("'text', 'text'", "no name twice")),
        ({"text": ["a", "b"], "n": [1]}, ("1 cells in 'n' and 2 prompts",)),
        ({"text": []}, ("the frame has no rows",)),
    ):
        with refused(UserError, *words):
            files.from_frame(frame)


def test_a_stray_word_in_a_column_of_numbers_is_refused_by_its_row(tmp_path):
    cells = [str(i) for i in range(30)]
    cells[6], cells[20] = "n/a", ""
    (tmp_path / "a.csv").write_text("text,n\n" + "".join(f"prompt {i},{cell}\n" for i, cell in enumerate(cells)))
    batch = files.read(str(tmp_path / "a.csv"))
    assert batch.columns["n"][:8] == (0, 1, 2, 3, 4, 5, "n/a", 7) and batch.columns["n"][20] is None
    with refused(UserError, "no value in row 21"):
        batch.column("n")
    cells[20] = "2.5"
    (tmp_path / "a.csv").write_text("text,n\n" + "".join(f"prompt {i},{cell}\n" for i, cell in enumerate(cells)))
    with refused(UserError, "numbers in rows 1, 2", "text in row 7"):
        files.read(str(tmp_path / "a.csv")).column("n")


def test_parquet_is_read(tmp_path):
    parquet.write_table(pyarrow.table({"text": ["one", "two"], "n": [1, None]}), tmp_path / "a.parquet")
    batch = files.read(str(tmp_path / "a.parquet"))
    assert batch.text == ("one", "two") and batch.columns["n"] == (1, None)
    with refused(UserError, "'n'", "no value in row 2"):
        batch.column("n")


def test_columns_of_lists_are_left_out_and_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "n": [1]}\n{"text": "b", "n": [2]}\n', encoding="utf-8")
    batch = files.read(str(tmp_path / "a.jsonl"))
    assert "n" not in batch.columns and batch.source["columns left out"] == "'n' holds a list in rows 1, 2"
