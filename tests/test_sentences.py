"""The golden sentences: about thirty errors word for word, as a user reads them. Elsewhere words are free."""

import numpy as np
import pytest
from click.testing import CliRunner

import llmgeom
from llmgeom.cli import main
from llmgeom.errors import UserError
from llmgeom.model import hub
from llmgeom.model.edits import Edit
from llmgeom.model.subject import Subject
from llmgeom.prompts.domains import Domain
from llmgeom.record import Record, Records
from llmgeom.stats import cosines, pca, resampling, tests
from llmgeom.wind_tunnels import load_task
from llmgeom.wind_tunnels.models import build
from llmgeom.wind_tunnels.training import Training

SHAPE = {"vocabulary": 8, "width": 32, "layers": 2, "heads": 4, "length": 8}


def scan(*words: str):
    return CliRunner().invoke(main, ["scan", *words, "--quiet"], prog_name="llmgeom")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--n", "1"], "--n 1: expected at least 10"),
        (
            ["--domain", "mth"],
            "unknown domain 'mth': did you mean 'math'? known: code, fiction, math, mixed, news, "
            "philosophy, qa, science",
        ),
        (["--nulls", "0"], "--nulls 0: expected at least 1"),
        (["--batch-tokens", "0"], "--batch-tokens 0: expected at least 1"),
        (
            ["--prompts", "nowhere.txt"],
            "nowhere.txt does not exist: give a .txt, .jsonl, .csv or .parquet file, or - for standard input",
        ),
        (
            ["--model", "./nowhere"],
            "./nowhere is not a folder that exists; give a folder written by save_pretrained, or a hub id, OWNER/NAME",
        ),
        (
            ["--model", "pocket:pithia"],
            "pocket:pithia: no such pocket model; did you mean pocket:pythia? here: pocket:llama, "
            "pocket:llama-bind, pocket:llama-evidence, pocket:llama-noicl, pocket:mistral, pocket:phi, pocket:pythia",
        ),
        (
            ["--prompts-from", "nowhere"],
            "nowhere holds no record.json: give the folder that `llmgeom scan` printed; --look keeps no record",
        ),
        (["--shard", "2/2"], "--shard 2/2: expected i/n with i from 0 to n - 1, e.g. 0/4"),
    ],
    ids=str,
)
def test_a_command_that_cannot_be_run(words, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = scan(*words)
    assert (done.exit_code, done.stderr) == (1, f"llmgeom: {sentence}\n")


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Domain("math").sample(0, 0), "0 prompts of 'math' were asked for; ask for at least 1"),
        (
            lambda: load_task("bijektion"),
            "unknown task 'bijektion': did you mean 'bijection'? known: bijection, coin, edge_hmm, hmm, "
            "keyed_hmm, markov, recall, recurrence, regression, or path/to/file.py:CLASS",
        ),
        (
            lambda: load_task("coin:flip=3"),
            "coin: no field 'flip=3'; it has flips (int, default 24), prior (str, default beta:1,1)",
        ),
        (lambda: load_task("coin:flips=three"), "coin: flips='three'; expected int below 2,147,483,648"),
        (
            lambda: load_task("bijection:vocab=1"),
            "bijection:vocab=1: expected vocab of 2 or more, pairs of 1 or more, sticky between 0 and 1",
        ),
        (
            lambda: load_task("none/there.py:X"),
            "none/there.py is not a file that exists; a task of your own is given as path/to/file.py:CLASS",
        ),
        (lambda: Training("coin", steps=0), "--steps 0: expected at least 1"),
        (lambda: Training("coin", lr="fast"), "--lr fast: expected a number above 0, or auto"),
        (lambda: Training("coin", targets="warm"), "--targets warm: expected hard or soft"),
        (
            lambda: build("neoks", **SHAPE),
            "unknown architecture 'neoks': did you mean 'neox'? known: neox, llama, gqa, window, gpt2, "
            "mamba2, mamba, lstm, mlp, meanpool, flat",
        ),
        (
            lambda: build("neox", **SHAPE | {"width": 36}),
            "neox: width 36 does not go with 4 heads; expected a multiple of 8, as 32",
        ),
        (
            lambda: Edit("resid", lambda x, _: x),
            "edit point 'resid' is unknown; an edit acts on one of residual, query, key, value, scores, attention, z, "
            "attention_write, mlp_write",
        ),
        (
            lambda: Edit("z", lambda x, _: x, positions="last"),
            "edit positions 'last': expected 'all', 'query' or a tuple of places",
        ),
        (
            lambda: hub.locate("a b"),
            "'a b' is neither a folder here nor a hub id, OWNER/NAME (its revision goes into --revision)",
        ),
        (
            lambda: Subject.load("pocket:pythia", dtype="int8"),
            "--dtype int8: expected one of float32, bfloat16, float16",
        ),
        (lambda: Subject.load("pocket:pythia", backend="x"), "--backend x: expected transformers or tl"),
        (
            lambda: pca.shares(np.ones((5, 4))),
            "all 4 coordinates are constant over 5 prompts: there is no variance to share",
        ),
        (
            lambda: pca.shares(np.ones((2, 4))),
            "a PCA needs a matrix [prompt coordinate] of at least 3 prompts, got shape (2, 4)",
        ),
        (
            lambda: tests.spearman(np.arange(9.0), np.ones(9)),
            "the second variable is constant over 9 prompts, or determined by the covariates: no rank correlation",
        ),
        (lambda: cosines.mean_abs_cosine(np.ones((1, 4))), "1 vectors have no pair; |cosine| needs at least 2"),
        (
            lambda: resampling.permute_clusters(np.random.default_rng(0), [0, 1, 2, 3], 10),
            "4 of 4 clusters can change places with one of equal size, in 24 ways; a permutation test needs 5 "
            "such clusters or 100 ways: add templates or even out their sizes",
        ),
    ],
)
def test_a_call_that_cannot_be_made(make, sentence):
    with pytest.raises(UserError) as error:
        make()
    assert str(error.value) == sentence


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
