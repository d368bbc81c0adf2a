"""Files of labels: every column is kept, and what cannot be read is refused by row."""

import json
from dataclasses import replace

import numpy as np
import pandas
import pyarrow
import pytest
from pyarrow import parquet

from llmgeom.batch import Batch, Text
from llmgeom.errors import UserError
from llmgeom.probe import ProbeInput
from llmgeom.probes.labels.probe import LabelProbe
from llmgeom.probes.labels.target import read_target
from llmgeom.prompts import files
from studies.planted_labels import World
from tests.refusals import refused

# ---- refusals --------------------------------------------------------------------------------------------------------


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
        ([1.5, None] * 10, ("no value in rows 2, 4")),
        ([str(i) for i in range(40)], ("40 classes in 40 rows",)),
    ],
)
def test_labels_that_cannot_be_read_are_refused_by_row(values, words):
    with refused(UserError, *([words] if isinstance(words, str) else words)):
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
    with pytest.raises(UserError) as refusal:
        read_target(batch, "rigth")
    assert str(refusal.value) == (
        "unknown column of --target 'rigth': did you mean 'right'? known: right, size, the columns that can be a label"
    )
    with refused(UserError, "'nots': did you mean 'note'? known: right, size"):
        read_target(batch, "nots")
    with refused(UserError, "'xyz'; known: right, the columns"):
        read_target(batch, "xyz", "binary")
    for name in ("right", "size"):
        columns[name] = ("same",) * 20
    with refused(UserError, "--target nope", "none that can be a label", "two values"):
        read_target(replace(batch, columns=columns), "nope")


# ---- files -----------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("blob", "words"),
    [
        ("", ("is empty",)),
        ("text,n\n", ("no rows",)),
        ("prompt,n\na,1\n", ('"text"', "'prompt'")),
        ("text,n\na,1,2\n", ("row 1", "3 cells")),
        ('text,n\n"a,1\n', ("not a CSV",)),
        ("text,n\na,1\na,2\n", ("rows 1 and 2 are the same",)),
    ],
)
def test_refusals_of_csv(blob, words, tmp_path):
    (tmp_path / "a.csv").write_text(blob, encoding="utf-8")
    with refused(UserError, *words):
        files.read(str(tmp_path / "a.csv"))


def test_columns_of_lists_are_left_out_and_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a", "n": [1]}\n{"text": "b", "n": [2]}\n', encoding="utf-8")
    batch = files.read(str(tmp_path / "a.jsonl"))
    assert "n" not in batch.columns and batch.source["columns left out"] == "'n' holds a list in rows 1, 2"
