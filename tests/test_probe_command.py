"""`llmgeom probe` from a file of prompts to a page, a table and a direction, on a pocket model."""

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from sklearn.metrics import r2_score

from llmgeom.batch import Batch, Text
from llmgeom.cli import main
from llmgeom.commands.probe import RunConfig, perform
from llmgeom.errors import UserError
from llmgeom.model.capture import Site
from llmgeom.model.model import Model
from llmgeom.probes.labels.directions import SavedDirection
from llmgeom.probes.labels.inputs import read_target
from llmgeom.prompts import files
from llmgeom.prompts.domains import Domain
from llmgeom.record import Record
from llmgeom.stats import ridge_probe
from llmgeom.stats.label_scores import coded
from tests.label_tables import sklearn_predictions
from tests.refusals import refused

N = 60


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    pool = Domain("mixed").sample(N, 3)
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("prompts") / "mine.jsonl"
    rows = []
    for text, cluster in zip(pool.text, pool.cluster, strict=True):
        labels = {"words": len(text.split()), "long": len(text) > 60, "coin": str(rng.choice(["a", "b"]))}
        rows.append(json.dumps({"text": text, "template": cluster, **labels}) + "\n")
    path.write_text("".join(rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def run(prompts, pythia, tmp_path_factory):
    place = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMGEOM_CACHE", str(place / "cache"))
        asked = RunConfig(
            model="pocket:pythia", prompts=str(prompts), target="words", given=("final_token",), nulls=2,
            out=str(place / "run"),
        )  # fmt: skip
        yield perform(asked, subject=pythia), place


def test_the_curve_is_scikit_learns_on_the_captured_activations(run, prompts, pythia):
    """Two layers again, from a capture of our own and scikit-learn's nested search."""
    (out, record), _ = run
    measured = record.results["label"]
    batch = files.read(str(prompts))
    capture = pythia.capture(replace(batch, inputs=pythia.tokens(batch)), frozenset({Site.RESIDUAL}))
    words = np.array(batch.columns["words"], dtype=np.float64)
    fold = ridge_probe.folds(batch.cluster, 0)
    assert set(np.bincount(fold).tolist()) == {N // 5}  # a grid search weighs folds alike, ours rows
    assert measured.ticks["control"][0] == "this model, confounds left in"
    for layer in (0, 3):
        x = capture.layers(Site.RESIDUAL)[layer].double().numpy()
        expected = r2_score(words, sklearn_predictions(x, words, fold))
        assert measured.arrays["residual_controls"][0, layer] == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert [e.name for e in measured.estimates] == ["R2", "R2, confounds left in"]
    assert measured.estimates[0].verdict in ("holds", "small", "ruled out", "opposite", "open")
    assert measured.estimates[1].verdict == ""
    assert (out / "report.html").stat().st_size > 10_000
    assert Record.load(out).results["label"].notes == measured.notes


def test_columns_reach_the_record_as_what_they_are(run, prompts):
    (_, record), _ = run
    rows = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]
    assert record.prompts["words"] == tuple(row["words"] for row in rows)
    assert record.prompts["coin"] == tuple(row["coin"] for row in rows)
    assert record.prompts["long"] == tuple(row["long"] for row in rows)
    prediction = np.array(record.prompts["held-out prediction"])
    residual = record.results["label"].arrays["probe_residual"]
    np.testing.assert_allclose(np.array(record.prompts["words"]) - prediction, residual, atol=1e-5)


def test_many_prompts_are_all_read_and_the_controls_read_some(prompts, pythia, monkeypatch, tmp_path):
    monkeypatch.setattr("llmgeom.probes.labels.probe.MOST_PROMPTS", 40)
    monkeypatch.setenv("LLMGEOM_CACHE", str(tmp_path / "cache"))
    asked = RunConfig(
        model="pocket:pythia", prompts=str(prompts), target="words", given=("none",), layers="2", nulls=1,
        out=str(tmp_path / "run"),
    )  # fmt: skip
    _, record = perform(asked, subject=pythia)
    claimed, every = record.results["label"].estimates
    assert (claimed.n, every.n) == (40, N)
    assert len(record.prompts["held-out prediction"]) == len(record.prompts["text"]) == N
    words = np.array(record.prompts["words"])
    residual = record.results["label"].arrays["probe_residual"]
    np.testing.assert_allclose(words - np.array(record.prompts["held-out prediction"]), residual, atol=1e-5)


def test_the_direction_is_saved_with_its_place(run, pythia):
    (out, record), _ = run
    direction = SavedDirection.load(out / "direction.safetensors")
    assert direction.site is Site.RESIDUAL and 0 <= direction.layer <= pythia.facts["layers"]
    assert direction.model == record.subject["weights"] and direction.target == "words"
    assert direction.vector.shape == (pythia.facts["d_model"],)
    assert np.linalg.norm(direction.vector) == pytest.approx(1)
    claim = record.results["label"].estimates[0]
    assert direction.claim == json.loads(json.dumps(claim.plain())) and claim.verdict
    assert direction.score == record.results["label"].arrays["residual_score"][direction.layer]
    (out / "direction.safetensors").rename(out / "broken")
    (out / "broken").write_bytes(b"no")
    with refused(UserError, "broken"):
        SavedDirection.load(out / "broken")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], ("--prompts",)),
        (["--prompts", "FILE"], ("--target",)),
        (["--prompts", "FILE", "--target", "wordz"], ("wordz", "words")),
        (["--prompts", "FILE", "--target", "coin", "--given", "coin"], ("coin", "itself")),
        (["--prompts", "FILE", "--target", "coin", "--given", "nothere"], ("nothere",)),
        (["--prompts", "FILE", "--target", "coin", "--given", "lenght"], ("did you mean 'length'?", "final_token")),
        (["--prompts", "FILE", "--target", "coin", "--given", "none,length"], ("none,length", "none stands alone")),
        (["--prompts", "FILE", "--target", "coin", "--transfer", "words"], ("--transfer words: '", "fewer than 5")),
        (["--prompts", "FILE", "--target", "coin", "--cluster", "templat"], ("did you mean 'template'?", "words")),
        (["--prompts", "FILE", "--target", "coin", "--positions", "first"], ("expected last, mean",)),
        (["--prompts", "FILE", "--target", "coin", "--transfer", "long"], ("--transfer long", "at least 3")),
        (["--prompts", "FILE", "--target", "coin", "--sites", "head"], ("--sites", "head", "residual")),
        (["--prompts", "FILE", "--target", "coin", "--layers", "x"], ("--layers", "all")),
        (["--prompts", "FILE", "--target", "coin", "--kind", "number"], ("number", "'a'")),
        (["--prompts", "FILE", "--target", "words", "--kind", "binary"], ("binary", "two")),
    ],
)
def test_refusals_before_a_weight_is_read(flags, words, prompts, monkeypatch):
    monkeypatch.setattr(Model, "load", lambda *_, **__: pytest.fail("weights were read"))
    shown = CliRunner().invoke(main, ["probe", *(str(prompts) if flag == "FILE" else flag for flag in flags)])
    assert shown.exit_code == 1, shown.output
    for word in words:
        assert word in shown.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--answers", "coin", "--sites", "value"], ("--sites value", "--answers coin")),
        (["--answers", "coin", "--given", "words"], ("--given words", "leave it out")),
        (["--answers", "coin", "--control-models", "3"], ("--control-models 3", "--answers coin")),
    ],
)
def test_flags_that_answers_do_not_read_are_refused(flags, words, prompts):
    shown = CliRunner().invoke(main, ["probe", "--prompts", str(prompts), *flags])
    assert shown.exit_code == 1 and all(word in shown.stderr for word in words), shown.output


def test_a_layer_that_is_not_there_is_refused_before_prompts_are_read(prompts, pythia, monkeypatch, tmp_path):
    monkeypatch.setattr(Model, "capture", lambda *_, **__: pytest.fail("prompts were read"))
    for site, layer, last in (("residual", "5", 4), ("value", "4", 3)):
        asked = {"target": "words", "sites": (site,), "layers": layer, "out": str(tmp_path / "run")}
        with refused(UserError, f"--layers {layer}", f"expected 0 to {last}, or -4 to -1"):
            perform(RunConfig(model="pocket:pythia", prompts=str(prompts), **asked), subject=pythia)


@pytest.mark.parametrize(
    ("column", "classes", "positive"),
    [
        ((10, 5), ("5", "10"), (1, 0)),
        ((2.5, -1), ("-1", "2.5"), (1, 0)),
        ((0, 1, 0.0, 1.0), ("0", "1"), (0, 1, 0, 1)),
        ((False, True), ("False", "True"), (0, 1)),
        (("no", "yes"), ("no", "yes"), (0, 1)),
    ],
)
def test_the_positive_value_of_two_is_the_larger(column, classes, positive):
    batch = Batch(Text(("line",) * 20), tuple("abcde" * 4), {}, columns={"kind": (column * 20)[:20]})
    target = read_target(batch, "kind")
    assert (target.kind, target.classes) == ("binary", classes)
    truth = coded(target.kind, target.label, target.classes)[:, 0]
    assert truth.tolist() == [positive[i % len(column)] for i in range(20)]


CRAMPED = "text,kind,template\n" + "".join(
    f"line {i} of {t},{'person' if t < 3 else 'place'},t{t}\n" for i in range(10) for t in range(10)
)
RARE = "text,kind\n" + "".join(f"line {i},{'yes' if i % 250 == 1 else 'no'}\n" for i in range(1500))
UNSEEN = "of 1,500 prompts controls read 1,000, drawn by --seed; of those the label has 2 rows of yes in 2 clusters"
NUMBERS = "text,kind,template\n" + "".join(f"line {i},{i},t{i % 4}\n" for i in range(40))


@pytest.mark.parametrize(
    ("name", "table", "words"),
    [
        ("few.csv", CRAMPED, "the label has 30 rows of person in 3 clusters; each class needs rows in at least 5"),
        ("rare.csv", RARE, UNSEEN),
        ("numbers.csv", NUMBERS, "got 4: add templates"),
        ("mine.txt", "one\ntwo\n", "no columns; give a .csv or .jsonl file with `text` and `kind`"),
        ("semi.csv", "text;kind\none;a\n", "columns are separated by ';': use commas"),
        ("quoted.csv", '"text";"kind"\n"one";"a"\n', "columns are separated by ';': use commas"),
        ("short.csv", "text,kind,x\none\n", "row 1 has 1 cell, the header 3: write every cell"),
        ("long.csv", "text,kind\none,a,b\n", "row 1 has 3 cells, the header 2: quote cells"),
    ],
)
def test_a_file_that_cannot_be_probed_is_refused_before_a_weight_is_read(name, table, words, tmp_path, monkeypatch):
    monkeypatch.setattr(Model, "load", lambda *_, **__: pytest.fail("weights were read"))
    (tmp_path / name).write_text(table, encoding="utf-8")
    shown = CliRunner().invoke(main, ["probe", "--prompts", str(tmp_path / name), "--target", "kind"])
    assert shown.exit_code == 1 and words in shown.stderr and shown.stderr.count("\n") == 1, shown.output
