"""What Python refuses, it refuses in one sentence that names the value and what was expected."""

import numpy as np
import pytest
from click.testing import CliRunner

import llmgeom
from llmgeom.cli import main
from llmgeom.errors import UserError
from llmgeom.model.model import Model
from llmgeom.record import Record


def scan(*words: str):
    return CliRunner().invoke(main, ["scan", *words, "--quiet"], prog_name="llmgeom")


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda subject: subject.capture({"a": 1}), ("{'a': 1}", "a list of strings")),
        (lambda subject: Model.load(5), ("model 5", "pocket:pythia")),
        (lambda subject: llmgeom.scan(None), ("None", "llmgeom.load")),
        (lambda subject: llmgeom.scan(subject, "math", n="ten"), ("--n 'ten'", "a whole number")),
        (lambda subject: llmgeom.scan(subject, "math", n=25.5), ("--n 25.5", "a whole number")),
        (lambda subject: llmgeom.scan(subject, ["a b", "c d"]), ("['a b', 'c d']", "prompts_file")),
        (lambda subject: llmgeom.scan(subject, "mine.csv"), ("'mine.csv'", "--prompts FILE")),
        (lambda subject: Record.load(5), ("5", "the folder")),
        (lambda subject: Record.load(__file__), (__file__, "the folder")),
        (lambda subject: Model.load("pocket:pythia", device="gpu"), ("--device gpu", "cuda:1")),
    ],
)
def test_python_calls_of_the_wrong_kind_are_one_sentence(call, named):
    with pytest.raises(UserError) as error:
        call(Model.load("pocket:pythia"))
    assert all(word in str(error.value) for word in named) and "\n" not in str(error.value)


def test_half_a_surrogate_pair_is_refused_with_its_prompt():
    with pytest.raises(UserError, match=r"prompt 2.*surrogate"):
        Model.load("pocket:pythia").capture(["fine", "a \ud800 b"])


def test_a_scan_takes_numbers_of_numpy_and_names_an_edited_model():
    subject = Model.load("pocket:pythia").edit("value", 0, layers=-1)
    options = {"nulls": 1, "limit": 60, "probes": ("attention_focus",)}
    record = llmgeom.scan(subject, "math", n=np.int64(25), batch_tokens=np.int64(4096), **options)
    assert record.title == "pocket:pythia, edited on math" and len(record.prompts["text"]) == 25
