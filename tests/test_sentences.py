"""What Python refuses, it refuses in one sentence that names the value and what was expected."""

import numpy as np
import pytest
from click.testing import CliRunner

import llmgeom
from llmgeom.cli import main
from llmgeom.errors import UserError
from llmgeom.model.subject import Subject
from llmgeom.record import Record, Records

SHAPE = {"vocabulary": 8, "width": 32, "layers": 2, "heads": 4, "length": 8}


def scan(*words: str):
    return CliRunner().invoke(main, ["scan", *words, "--quiet"], prog_name="llmgeom")


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda subject: subject.capture({"a": 1}), ("{'a': 1}", "a list of strings")),
        (lambda subject: Subject.load(5), ("model 5", "pocket:pythia")),
        (lambda subject: llmgeom.scan(None), ("None", "llmgeom.load")),
        (lambda subject: llmgeom.scan(subject, "math", n="ten"), ("--n 'ten'", "a whole number")),
        (lambda subject: llmgeom.scan(subject, "math", n=25.5), ("--n 25.5", "a whole number")),
        (lambda subject: llmgeom.scan(subject, ["a b", "c d"]), ("['a b', 'c d']", "prompts_file")),
        (lambda subject: llmgeom.scan(subject, "mine.csv"), ("'mine.csv'", "--prompts FILE")),
        (lambda subject: Record.load(5), ("5", "the folder")),
        (lambda subject: Record.load(__file__), (__file__, "the folder")),
        (lambda subject: Subject.load("pocket:pythia", device="gpu"), ("--device gpu", "cuda:1")),
    ],
)
def test_python_calls_of_the_wrong_kind_are_one_sentence(call, named):
    with pytest.raises(UserError) as error:
        call(Subject.load("pocket:pythia"))
    assert all(word in str(error.value) for word in named) and "\n" not in str(error.value)


def test_a_run_and_a_stopped_training_are_no_models(tmp_path):
    for name, what in (("record.json", "a run"), ("resume.safetensors", "stopped")):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_text("{}")
        with pytest.raises(UserError, match=what):
            Subject.load(str(folder))


def test_half_a_surrogate_pair_is_refused_with_its_prompt():
    with pytest.raises(UserError, match=r"prompt 2.*surrogate"):
        Subject.load("pocket:pythia").capture(["fine", "a \ud800 b"])


def test_a_capture_says_what_it_holds():
    capture = Subject.load("pocket:pythia").capture(["the river is"], ("value", "entropy"))
    assert list(capture) == ["entropy", "value"] and "value" in capture and "key" not in capture
    with pytest.raises(LookupError, match="a site and a layer"):
        capture["value", -1, 0]


def test_a_scan_takes_numbers_of_numpy_and_names_an_edited_model():
    subject = Subject.load("pocket:pythia").edit("value", 0, layers=-1)
    options = {"nulls": 1, "limit": 60, "probes": ("attention_focus",)}
    record = llmgeom.scan(subject, "math", n=np.int64(25), batch_tokens=np.int64(4096), **options)
    assert record.title == "pocket:pythia, edited on math" and len(record.prompts["text"]) == 25


def test_records_say_that_a_number_is_of_one_of_them():
    records = Records({"mixed": None, "math": None})
    with pytest.raises(AttributeError, match=r"records\['mixed'\].frame"):
        records.frame()
    assert not hasattr(records, "nothing")
