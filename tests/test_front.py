"""The front door for Python: what a new user types first works, and is the command's own measurement."""

import json

import numpy as np
import pandas
import pytest
import torch
from click.testing import CliRunner

import llmgeom
from llmgeom.cli import main
from llmgeom.errors import UserError
from llmgeom.model.model import Model
from llmgeom.record import Record

pytestmark = pytest.mark.usefixtures("few_draws")


@pytest.fixture(scope="module")
def subject():
    return llmgeom.load("pocket:pythia")


def content(folder):
    body = json.loads((folder / "record.json").read_text())
    body.pop("run")
    return body, *((folder / name).read_bytes() for name in ("arrays.safetensors", "prompts.jsonl"))


FEW = {"n": 15, "limit": 60, "nulls": 2, "probes": ("attention_focus",)}
OF_VALUES = FEW | {"n": 12, "limit": 40, "probes": ("value_manifold",)}
FLAGS = ("--n", "15", "--limit", "60", "--control-models", "2", "--probes", "attention_focus")


def test_a_scan_from_python_is_the_commands_record_to_the_byte(subject, tmp_path):
    record = llmgeom.scan(subject, "math", **FEW)
    record.save(tmp_path / "python")
    done = scan("--domain", "math", *FLAGS, "--out", str(tmp_path / "command"))
    assert done.exit_code == 0, done.output
    assert content(tmp_path / "python") == content(tmp_path / "command")
    # With a folder it writes what the command writes, the page included.
    llmgeom.scan("pocket:pythia", "math", out=tmp_path / "written", **FEW)
    page = (tmp_path / "command" / "report.html").read_bytes()
    assert (tmp_path / "written" / "report.html").read_bytes() == page
    assert content(tmp_path / "written") == content(tmp_path / "command")


def test_a_scan_of_an_edited_model_says_so_and_has_a_place_of_its_own(subject, tmp_path):
    llmgeom.scan(subject, "math", out=tmp_path, **FEW)
    changed = subject.edit("value", lambda x: 0 * x, layers=1, spec={"do": "silence"})
    with pytest.raises(UserError, match="another run"):
        llmgeom.scan(changed, "math", out=tmp_path, **FEW)
    numpys = {"n": np.int64(OF_VALUES["n"]), "batch_tokens": np.int64(4096)}
    record = llmgeom.scan(changed, "math", out=tmp_path / "edited", **OF_VALUES | numpys)
    assert record.title == "pocket:pythia, edited on math" and len(record.prompts["text"]) == OF_VALUES["n"]
    assert record.arrays["value_manifold.pc1"][1] == 0, "the values of layer 1 are equal in all prompts"
    ((edit,), saved) = record.facts["edits"], json.loads((tmp_path / "edited" / "record.json").read_text())
    assert edit["spec"] == {"do": "silence"} == saved["facts"]["edits"][0]["spec"]
    assert [text for text in record.warnings if "edited" in text and "layers [1]" in text and "no command" in text]
    llmgeom.scan(changed, "math", out=tmp_path / "edited", **OF_VALUES)  # the same run again
    with pytest.raises(UserError, match=r"spec=\{\.\.\.\}"):
        llmgeom.scan(subject.edit("value", lambda x: 0 * x), "math", **FEW)


def test_the_command_of_a_loaded_model_loads_it_the_same_way():
    """A subject is to be recorded as its name with the options that it was loaded with."""
    options = {"dtype": torch.bfloat16, "device": "cpu", "offline": True}
    loaded = llmgeom.load("pocket:pythia", **options)
    records = [llmgeom.scan(loaded, "math", **FEW), llmgeom.scan("pocket:pythia", "math", **options, **FEW)]
    assert records[0].facts == records[1].facts and records[0].subject == records[1].subject
    assert all(f"--{name}" in records[0].facts["command"] for name in options)
    for name in ("dtype", "device"):
        with pytest.raises(UserError, match=f"loaded with {name}=.*: load it with {name}='other'"):
            llmgeom.scan(loaded, "math", **{name: "other"}, **FEW)


def test_a_model_in_memory_is_no_model_of_its_name(subject):
    mine = llmgeom.Model.of(subject.model, subject.tokenizer, "pocket:pythia")
    with pytest.raises(UserError, match=r"pocket:pythia is a model in memory.*run_probes"):
        llmgeom.scan(mine, "math", **FEW)


def test_a_loaded_model_that_was_written_to_is_no_model_of_its_name():
    changed = llmgeom.load("pocket:pythia")
    with torch.no_grad():
        changed.model.get_output_embeddings().weight.mul_(2)
    with pytest.raises(UserError, match=r"pocket:pythia .* was written to after .*run_probes"):
        llmgeom.scan(changed, "math", **FEW)


def test_a_token_s_text_is_a_position_and_a_misspelt_site_is_named(subject):
    texts = ["The capital of France is", "It is what it is"]
    capture = subject.capture(texts, "residual", positions=" is")
    ids = [subject.tokenizer(text)["input_ids"] for text in texts]
    token = subject.tokenizer(" is", add_special_tokens=False)["input_ids"][-1]
    places = [(i, place) for i, row in enumerate(ids) for place, one in enumerate(row) if one == token]
    assert len(places) > 2
    assert list(zip(capture.prompt.tolist(), capture.position.tolist(), strict=True)) == places
    with pytest.raises(UserError, match="unknown site 'valu': did you mean 'value'"):
        subject.capture(texts, "valu")


def test_strings_are_read_wherever_a_batch_is(subject):
    text = "The capital of France is"
    capture = subject.capture([text])
    ids = subject.tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        log_p = subject.model(ids).logits[0, -1].double().log_softmax(-1)
    expected = float(-(log_p.exp() * log_p).sum()) / np.log(2)
    assert subject.entropy(text)[0] == pytest.approx(expected, rel=1e-5)
    assert capture["entropy"][0] == capture.entropy[0] == pytest.approx(expected, rel=1e-5)
    assert capture["value", -1].equal(capture.value[-1]) and capture["value"].equal(capture.value)
    assert capture["residual", 0].equal(subject.model.get_input_embeddings()(ids)[0, -1:])
    assert [x.tolist() for x in capture["value", 1:3]] == [x.tolist() for x in capture.value[1:3]]
    with pytest.raises(LookupError, match="'keys' was not captured; this capture has entropy"):
        capture["keys", -1]
    with pytest.raises(LookupError, match="layers 0 to 3, not 4"):
        capture["value", 4]


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([], "there is none"),
        ([3.5], "3.5 is no string"),
        ({"text": ["one", "two"]}, "is no string"),
        # "text", the column's name, was captured.
        (pandas.DataFrame({"text": ["one", "two"]}), "DataFrame.*from_frame"),
    ],
)
def test_what_is_no_prompt_is_refused(subject, prompts, words):
    with pytest.raises(UserError, match=words):
        subject.capture(prompts)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompts": "mine.csv"}, r"unknown option of scan 'prompts': did you mean 'prompts_file'\? known: .*quiet"),
        ({"domain": "math"}, r"no option 'domain'.*scan\(model, 'math'\)"),
        ({"prompts_file": ["one", "two"]}, r"prompts_file=\['one', 'two'\].*the name of one file.*'mine.txt'"),
        ({"prompts_file": pandas.DataFrame({"text": ["one", "two"]})}, r"prompts_file=text 0 one 1 two\): expected"),
        ({"prompts_from": 3}, r"--prompts-from 3: expected a text \(str\)"),
        ({"processes": "nothere"}, "unknown world 'nothere'"),
        ({"probes": 5}, "--probes 5: expected several values"),
    ],
)
def test_an_option_that_scan_does_not_take_is_one_sentence(subject, options, words):
    with pytest.raises(UserError, match=words) as refusal:
        llmgeom.scan(subject, **options)
    assert "\n" not in str(refusal.value)


def test_a_record_is_tables_and_figures(subject, tmp_path):
    record = llmgeom.scan(subject, "math", **OF_VALUES)
    prompts, layers, metrics = (record.frame(kind) for kind in ("prompts", "layers", "metrics"))
    scores, share = (record.results["value_manifold"].arrays[name] for name in ("scores", "pc1"))
    assert tuple(prompts["text"]) == record.prompts["text"]
    assert prompts["value_manifold.scores.0"].to_numpy() == pytest.approx(scores[:, 0])
    own = layers[(layers["probe"] == "value_manifold") & (layers["quantity"] == "pc1")]
    assert own["value"].to_numpy() == pytest.approx(share)
    (trace, *_) = record.plot("value_manifold.scores").data
    assert trace.x == pytest.approx(scores[:, 0], rel=1e-4)
    with pytest.raises(UserError, match="expected prompts, layers, metrics"):
        record.frame("other")
    with pytest.raises(UserError, match=r"no figure 'x'; this record has value_manifold\."):
        record.plot("x")
    record.save(tmp_path)
    assert Record.load(tmp_path).frame("metrics").equals(metrics)


# ---- what Python refuses


def scan(*words: str):
    return CliRunner().invoke(main, ["scan", *words, "--quiet"], prog_name="llmgeom")


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda subject: Model.load(5), ("model 5", "pocket:pythia")),
        (lambda subject: llmgeom.scan(None), ("None", "llmgeom.load")),
        (lambda subject: llmgeom.scan(subject, "math", n="ten"), ("--n 'ten'", "a whole number")),
        (lambda subject: llmgeom.scan(subject, ["a b", "c d"]), ("['a b', 'c d']", "prompts_file")),
        (lambda subject: llmgeom.scan(subject, "mine.csv"), ("'mine.csv'", "--prompts FILE")),
        (lambda subject: Record.load(5), ("5", "the folder")),
        (lambda subject: Record.load(__file__), (__file__, "the folder")),
        (lambda subject: Model.load("pocket:pythia", device="gpu"), ("--device gpu", "cuda:1")),
    ],
)
def test_python_calls_of_the_wrong_kind_are_one_sentence(subject, call, named):
    with pytest.raises(UserError) as error:
        call(subject)
    assert all(word in str(error.value) for word in named) and "\n" not in str(error.value)


def test_half_a_surrogate_pair_is_refused_with_its_prompt(subject):
    with pytest.raises(UserError, match=r"prompt 2.*surrogate"):
        subject.capture(["fine", "a \ud800 b"])
