"""A probe as an object and of stored activations: scikit-learn's numbers and conventions, exact files, refusals."""

import numpy as np
import pyarrow
import pytest
import torch
from click.testing import CliRunner
from pyarrow import parquet
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch
from sklearn.base import clone
from sklearn.metrics import accuracy_score, r2_score
from sklearn.model_selection import GroupKFold, cross_val_score

import llmgeom
from llmgeom import Probe
from llmgeom.cli import main
from llmgeom.errors import UserError
from llmgeom.probes.labels.activations import read
from llmgeom.record import Record
from llmgeom.stats.nested_probe import stratified_folds
from tests.label_tables import sklearn_predictions
from tests.refusals import refused

N, LAYERS, WIDTH = 90, 3, 12
CLUSTER = np.arange(N) // 2
GOOD = ["good", "great", "fine", "nice", "kind", "warm", "calm", "safe"]
BAD = ["bad", "poor", "dull", "weak", "cold", "mean", "sad", "ugly"]
TEXTS = [f"The {thing} was {word}, I" for word in GOOD + BAD for thing in ("film", "meal")]
LABELS = [word in GOOD for word in GOOD + BAD for _ in range(2)]


@pytest.fixture(scope="module")
def table():
    """Activations whose layer 1 holds the label, of three classes and a number."""
    rng = np.random.default_rng(0)
    third = rng.permutation(np.arange(N) % 3)
    x = rng.standard_normal((N, LAYERS, WIDTH))
    for k in range(3):
        x[third == k, 1, k] += 2
    return x, np.array(["a", "b", "c"])[third], x[:, 1, 0] + rng.standard_normal(N)


@pytest.fixture(scope="module")
def subject():
    return llmgeom.load("pocket:llama", device="cpu")


@pytest.fixture(scope="module")
def sentiment(subject):
    return subject.probe(TEXTS, LABELS, [t.split()[3] for t in TEXTS], controls=1, confounds=())


def test_held_out_numbers_are_scikit_learns_nested_search(table):
    x, _, number = table
    probe = Probe().fit(x, number, CLUSTER)
    fold = stratified_folds("number", number, CLUSTER, 0)
    expected = [r2_score(number, sklearn_predictions(x[:, layer], number, fold)) for layer in (0, 1)]
    # A grid search weighs unequal folds alike.
    np.testing.assert_allclose(probe["R2"][:2], expected, rtol=1e-2, atol=5e-3)
    assert probe.layer == 1 and probe.classes_.size == 0
    assert probe.score(x, number) == pytest.approx(r2_score(number, x[:, 1] @ probe.coef_[0] + probe.intercept_[0]))
    with refused(UserError, "only classes have probabilities"):
        probe.predict_proba(x)
    with refused(UserError, "activations of 2 layers", "reads layer 2"):
        Probe(layers=2).fit(x, number, CLUSTER).predict(x[:, :2])
    with refused(UserError, "'a text'", "expected a list of texts"):
        probe.predict("a text")


def test_classes_have_probabilities_that_sum_to_one_and_name_the_class(table):
    x, label, _ = table
    probe = Probe(layers=1).fit(x, label, CLUSTER)
    p = probe.predict_proba(x)
    np.testing.assert_allclose(p.sum(1), 1)
    assert probe.classes_.tolist() == ["a", "b", "c"] and probe.direction is None
    np.testing.assert_array_equal(probe.classes_[p.argmax(1)], probe.predict(x[:, 1]))
    assert probe.score(x, label) == accuracy_score(label, probe.predict(x)) > 0.7


def test_a_direction_and_its_intercept_are_the_decision(table):
    x, label, _ = table
    probe = Probe().fit(x, label == "a", CLUSTER)
    assert probe.classes_.tolist() == [False, True] and np.linalg.norm(probe.direction) == pytest.approx(1)
    decision = probe.decision_function(x)
    length = np.linalg.norm(probe.coef_)
    np.testing.assert_allclose(length * (x[:, probe.layer] @ probe.direction + probe.intercept), decision)
    np.testing.assert_array_equal(probe.predict(x), probe.predict_proba(x)[:, 1] > 0.5)


def test_a_label_that_is_nowhere_has_the_probability_of_its_share(table):
    x, label, _ = table
    shuffled = np.random.default_rng(3).permutation(label == "a")
    p = Probe(layers=0).fit(x, shuffled, CLUSTER).predict_proba(x)[:, 1]
    assert abs(p.mean() - 1 / 3) < 0.1 and p.std() < 0.12


def test_scikit_learn_clones_and_cross_validates_it(table, subject):
    x, label, _ = table
    probe = Probe(subject, layers=[1, 2], seed=5).fit(x, label)
    other = clone(probe)
    assert other.get_params() == probe.get_params() and other.model is subject and not hasattr(other, "coef_")
    assert other.set_params(seed=6).seed == 6 and probe.n_features_in_ == WIDTH
    scores = cross_val_score(Probe(), x[:, 1], label, groups=CLUSTER, cv=GroupKFold(3))
    assert scores.min() > 0.6


def test_a_saved_probe_is_the_same_to_the_last_bit(table, sentiment, subject, tmp_path):
    x, label, number = table
    for target in (label, label == "a", number):
        probe = Probe(layers=[0, 1]).fit(x, target, CLUSTER)
        probe.save(tmp_path / "probe")
        again = Probe.load(tmp_path / "probe")
        for name in ("coef_", "intercept_", "classes_"):
            np.testing.assert_array_equal(getattr(again, name), getattr(probe, name))
        np.testing.assert_array_equal(again.predict(x), probe.predict(x))
    sentiment.save(tmp_path / "texts")
    again = Probe.load(tmp_path / "texts", subject)
    np.testing.assert_array_equal(again.predict_proba(TEXTS[:3]), sentiment.predict_proba(TEXTS[:3]))
    assert again.get_params() == sentiment.get_params() | {"layers": "all"}
    with refused(UserError, "was fitted to weights", "pocket:pythia has"):
        Probe.load(tmp_path / "texts", llmgeom.load("pocket:pythia", device="cpu"))


def test_texts_are_read_through_the_model_as_hooks_read_them(sentiment, subject):
    ids = [subject.tokenizer(text, return_tensors="pt")["input_ids"] for text in TEXTS[:4]]
    with torch.no_grad():
        streams = [subject.model(i, output_hidden_states=True).hidden_states[sentiment.layer][0, -1] for i in ids]
    x = torch.stack(streams).double().numpy()
    np.testing.assert_allclose(sentiment.decision_function(TEXTS[:4]), sentiment.decision_function(x), atol=1e-3)
    assert set(sentiment.predict(TEXTS)) <= {True, False}


def test_steering_with_a_probe_adds_its_direction_at_its_layer(sentiment, subject):
    steered = subject.steer(sentiment, 3.0)
    written = subject.steer(sentiment.direction, 3.0, layer=sentiment.layer)
    reads = [one.capture(TEXTS[0], "log_probs").log_probs for one in (subject, steered, written)]
    assert torch.equal(reads[1], reads[2]) and not torch.equal(reads[0], reads[1])
    curve = subject.dose_curve(TEXTS[:2], (11, 12), sentiment, doses=(2,), draws=1)
    assert len(curve["log odds"]) == 2
    with refused(UserError, "no layer of its own"):
        subject.steer(sentiment.direction, 3.0)


@pytest.mark.parametrize("direction", ["classes", "value"])
def test_a_probe_without_one_direction_in_the_stream_does_not_steer(direction, table, subject):
    x, label, _ = table
    probe = Probe(site="value").fit(x, label == "a") if direction == "value" else Probe().fit(x, label)
    with refused(UserError, "heads" if direction == "value" else "3 classes"):
        subject.steer(probe, 1.0)


# ---- files -----------------------------------------------------------------------------------------------------------


def written(path, x, label, cluster, untrained=()):
    drawn = {f"untrained {i}": u for i, u in enumerate(untrained)}
    if path.suffix == ".npz":
        np.savez(path, activations=x, label=label, document=cluster, **drawn)
    elif path.suffix == ".safetensors":
        save_file({"stored": x, "label": (label == "a").astype(np.int64), "document": cluster, **drawn}, path)
    else:
        columns = {"activations": x.tolist(), "label": label, "document": cluster}
        parquet.write_table(pyarrow.table(columns | {k: u.tolist() for k, u in drawn.items()}), path)
    return str(path)


@pytest.mark.parametrize("kind", ["npz", "safetensors", "parquet"])
def test_every_format_gives_the_arrays_the_labels_and_the_controls(kind, table, tmp_path):
    x, label, _ = table
    noise = np.random.default_rng(9).standard_normal((2, *x.shape))
    path = written(tmp_path / f"stored.{kind}", x, label, CLUSTER, noise)
    found, controls, batch = read(path, "document")
    np.testing.assert_array_equal(found, x.astype(found.dtype))
    assert len(controls) == 2 and batch.cluster == tuple(map(str, CLUSTER))
    assert len(set(batch.columns["label"])) == (2 if kind == "safetensors" else 3)


def test_the_command_measures_what_the_object_does(table, tmp_path):
    x, label, _ = table
    noise = np.random.default_rng(9).standard_normal((5, *x.shape))
    path = written(tmp_path / "stored.npz", x, label, CLUSTER, noise)
    (tmp_path / "texts.csv").write_text("text,note\n" + "".join(f"text {i},{i % 2}\n" for i in range(N)))
    flags = ["--target", "label", "--cluster", "document", "--prompts", str(tmp_path / "texts.csv"), "--out"]
    shown = CliRunner().invoke(main, ["probe", "--activations", path, *flags, str(tmp_path / "run")])
    assert shown.exit_code == 0, shown.output
    record = Record.load(tmp_path / "run")
    probe = Probe().fit(x, label, CLUSTER)
    np.testing.assert_allclose(record.results["label"].arrays["activations_score"], probe["balanced accuracy"])
    (h, *_) = record.results["label"].estimates
    assert {c.name for c in h.controls} == {"untrained", "labels in another order"} and h.clusters == 45
    assert h.claim.endswith("beyond labels in another order and untrained.") and h.verdict == "holds"
    assert record.results["label"].warnings[0].startswith("not tested: shuffled prompts")
    assert record.prompts["text"][3] == "text 3"
    np.testing.assert_array_equal(Probe.load(tmp_path / "run").predict(x), probe.predict(x))


def test_activations_in_bfloat16_are_read(tmp_path):
    save_torch({"x": torch.ones(6, 4, dtype=torch.bfloat16), "y": torch.arange(6)}, tmp_path / "a.safetensors")
    assert read(str(tmp_path / "a.safetensors"))[0].shape == (6, 1, 4)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": "nan"}, ("x: row 4, layer 1 is not finite",)),
        ({"x": np.zeros((N, 2, 2, 2)), "y": np.zeros(N)}, ("[90, 2, 2, 2]", "[row, layer, coordinate]")),
        ({"y": np.arange(N)}, ("holds y [90]", "expected one array")),
        ({"a": np.zeros((N, 2)), "b": np.zeros((N, 2))}, ("a [90, 2], b [90, 2]",)),
        ({"x": np.zeros((N, 2)), "y": np.zeros(7)}, ("y has 7 entries for 90 rows",)),
        ({"x": np.zeros((N, 2)), "untrained": np.zeros((N, 3))}, ("untrained has shape [90, 1, 3]",)),
        ({"x": np.ones((N, 2)), "y": np.array(["a", None] * 45, dtype=object)}, ("pickle", "never read")),
        ({"x": np.ones((N, 2)), "label": np.zeros(N)}, ("column 'label' is 0.0 in all 90 rows",)),
        ({"x": np.ones((N, 2)), "other": np.arange(N) % 2}, ("--target", "'label'", "other")),
    ],
)
def test_a_file_that_cannot_be_measured_is_refused_in_one_sentence(arrays, words, table, tmp_path):
    if isinstance(arrays.get("x"), str):
        x = table[0].copy()
        x[4, 1, 0] = np.nan
        arrays = {"x": x, "label": table[1]}
    np.savez(tmp_path / "a.npz", **arrays)
    flags = ["--target", "label", "--out", str(tmp_path / "run")]
    shown = CliRunner().invoke(main, ["probe", "--activations", str(tmp_path / "a.npz"), *flags])
    assert shown.exit_code == 1 and shown.stderr.count("\n") == 1, shown.output
    for word in words:
        assert word in shown.stderr


def test_lists_of_several_lengths_and_flags_of_a_model_are_refused(tmp_path):
    parquet.write_table(pyarrow.table({"activations": [[1.0, 2.0], [1.0]], "label": [0, 1]}), tmp_path / "a.parquet")
    for flags, word in (
        (["a.parquet", "--target", "label"], "lists of column 'activations' have 2 lengths"),
        (["a.txt", "--target", "label"], "ends in .txt: expected"),
        (["a.parquet", "--target", "label", "--sites", "value"], "--sites value with --activations"),
        (["none.npz", "--target", "label"], "is no file"),
    ):
        shown = CliRunner().invoke(main, ["probe", "--activations", str(tmp_path / flags[0]), *flags[1:]])
        assert shown.exit_code == 1 and word in shown.stderr, shown.output
