"""Answers to processes in text: scores of planted observers, and the probabilities that a model really gives."""

import json
import math

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from scipy.special import log_softmax
from sklearn.linear_model import LogisticRegression

from llmgeom.claims import judge
from llmgeom.cli import main
from llmgeom.commands.evidence import lines
from llmgeom.errors import UserError
from llmgeom.model.model import Model
from llmgeom.probes.evidence import answers
from llmgeom.probes.evidence.predictions import LabelPredictions, Read, label_ids, label_words
from llmgeom.prompts import text as in_text
from llmgeom.record import Record
from llmgeom.result import SENTENCE, Estimate
from llmgeom.stats import weighing
from llmgeom.wind_tunnels import load_world, names
from studies import answerers
from tests.refusals import refused


def planted(log_p: np.ndarray, mass: float = 0.9) -> LabelPredictions:
    n = len(log_p)
    return LabelPredictions(log_p, np.full(n, mass))


def noisy(log_p: np.ndarray, seed: int) -> np.ndarray:
    """An untrained model: answers that have nothing to do with the prompt."""
    raw = np.random.default_rng(seed).normal(0, 0.2, log_p.shape)
    return raw - np.log(np.exp(raw).sum(1, keepdims=True))


def measured(spec: str, observer, n: int = 50, mass: float = 0.9, seed: int = 0):
    """What is measured of an observer: (exact log-probabilities, batch) -> log-probabilities."""
    batch = in_text.sample(load_world(spec, text=True), n, seed)
    exact = batch.exact.predictive[:, 0].numpy()
    own = planted(observer(exact, batch), mass)
    return batch, answers.measure_answers(batch, own, Read(batch, own, without=planted(noisy(exact, 99), mass)))


def found(result) -> dict[str, Estimate]:
    """The judged numbers, by name."""
    return {h.name: h for h in judge({answers.PROCESS: result})[answers.PROCESS].estimates}


def scaled(slope: float, bias: float = 0.0, noise: float = 0.0):
    """An answerer of known weight and bias (nats for the first label), with noise (sd, nats) in its log odds."""

    def answer(exact, batch):
        e = np.clip(exact, -20, None)
        z = slope * (e - e.mean(1, keepdims=True)) + bias * np.eye(e.shape[1])[0]
        return log_softmax(z + noise * np.random.default_rng(5).standard_normal(z.shape), 1)

    return answer


@pytest.mark.parametrize("spec", names(text=True))
def test_the_exact_observer_holds_all_of_the_evidence_and_loses_nothing(spec):
    _, result = measured(spec, lambda exact, batch: np.clip(exact, -700, None))
    h = found(result)
    excludes = spec in ("recall", "bijection")
    assert h[answers.RESOLUTION].value == pytest.approx(1, abs=0.002) and h[answers.RESOLUTION].verdict == "holds"
    assert h[answers.DIVERGENCE].value == pytest.approx(0, abs=1e-9) and h[answers.LOSS].verdict == "holds"
    assert h[answers.BIAS].value == pytest.approx(0, abs=1e-9) or excludes
    assert (h[answers.WEIGHT].value == pytest.approx(1) and h[answers.WEIGHT].verdict == "holds") or excludes
    assert bool(h[answers.WEIGHT].claim) != excludes and (answers.EXCLUDES in result.notes) == excludes
    np.testing.assert_allclose(result["predicted"], result["exact"], atol=1e-9)
    np.testing.assert_allclose(result["accuracy"], result["accuracy_exact"])


@pytest.mark.parametrize(("slope", "bias"), [(0.4, 1.0), (1.0, 0.0), (2.5, 1.0)])
def test_planted_slope_bias_and_noise_come_back(slope, bias):
    _, result = measured("two-point", scaled(slope, bias, 0.5))
    h = found(result)
    assert h[answers.WEIGHT].low <= slope <= h[answers.WEIGHT].high
    assert h[answers.WEIGHT].value == pytest.approx(slope, abs=0.12)
    assert h[answers.BIAS].value == pytest.approx(bias / math.log(2), abs=0.35)
    assert result["surface_weight"] == pytest.approx(slope, abs=0.25)
    assert h[answers.LOSS].value == pytest.approx(h[answers.DIVERGENCE].value - result["observer"][1])
    if slope == 2.5:  # it uses the evidence, and weighs it too much
        words = [h[name].verdict for name in (answers.RESOLUTION, answers.WEIGHT, answers.LOSS)]
        assert words == ["holds", "ruled out", "ruled out"] and "times too much" in result.facts[SENTENCE]


@pytest.mark.parametrize("slope", [-1.0, 0.0])
def test_answers_against_or_without_the_evidence_do_not_use_it(slope):
    """A recalibration may not turn answers round: those against the evidence are no better than even ones."""
    _, result = measured("two-point", scaled(slope, noise=0.5))
    h = found(result)
    assert h[answers.RESOLUTION].verdict == "ruled out" and h[answers.WEIGHT].value == pytest.approx(slope, abs=0.1)


def test_nothing_is_ruled_out_where_the_answers_have_less_than_half_of_the_probability():
    for slope, word in ((2.5, "holds"), (0.0, "open")):
        _, result = measured("two-point", scaled(slope, noise=0.5), mass=0.3)
        h = found(result)
        assert h[answers.RESOLUTION].verdict == word and h[answers.WEIGHT].verdict == "open"
        assert "ruled out" not in {one.verdict for one in h.values()} and "30%" in h[answers.WEIGHT].why
        assert any("30%" in warning for warning in result.warnings)


def test_recalibration_is_logistic_regression_on_the_other_clusters():
    """Against scikit-learn's, with each exact probability as the weight of a row."""
    batch = in_text.sample(load_world("two-point", text=True), 40, 0)
    exact, cluster = batch.exact.predictive[:, 0].numpy(), np.array(batch.cluster)
    own = scaled(2.0, 0.7, 1.0)(exact, batch)
    z, fold = weighing.log_odds(own), weighing.folds(cluster)
    got = weighing.recalibrated(z, exact, fold)
    for number in range(fold.max() + 1):
        train, test = fold != number, fold == number
        x, p = (z[:, 0] - z[:, 1])[:, None], np.exp(exact[:, 0])
        fit = LogisticRegression(C=1e6, tol=1e-10, max_iter=1000)
        rows, label = np.concatenate([x[train], x[train]]), np.repeat([1, 0], train.sum())
        fit.fit(rows, label, np.concatenate([p[train], 1 - p[train]]))
        np.testing.assert_allclose(np.exp(got[test, 0]), fit.predict_proba(x[test])[:, 1], atol=2e-3)


def test_divergence_is_that_of_the_formula_written_out():
    batch, result = measured("bijection", lambda exact, batch: noisy(exact, 7))
    exact, own = batch.exact.predictive[:, 0].exp().numpy(), np.exp(noisy(batch.exact.predictive[:, 0].numpy(), 7))
    by_k: dict[int, list[float]] = {}
    for k, p, q in zip(batch.columns["k"], exact, own, strict=True):
        by_k.setdefault(k, []).append(sum(a * math.log2(a / b) for a, b in zip(p, q, strict=True) if a > 0))
    np.testing.assert_allclose(result["divergence"], [np.mean(by_k[k]) for k in sorted(by_k)], rtol=1e-12)
    with_evidence = [x for k, row in by_k.items() if k > 0 for x in row]
    assert found(result)[answers.DIVERGENCE].value == pytest.approx(np.mean(with_evidence))


def test_a_mark_that_was_never_possible_is_no_trouble():
    """Few prompts of recall: at some k a mark is excluded in all of them, by the exact answer and by every observer."""
    _, result = measured("recall:values=3", lambda exact, batch: noisy(exact, 3), n=10)
    assert all(np.isfinite(estimate.value) for estimate in result.estimates)


def test_controls_read_fewer_prompts_than_the_model():
    """The difference from the model without context is that on the prompts which both read."""
    batch = in_text.sample(load_world("two-point", text=True), 50, 0)
    exact = batch.exact.predictive[:, 0].numpy()
    own, cut = scaled(2.0, noise=0.5)(exact, batch), noisy(exact, 9)
    some = list(range(0, len(batch), 2))
    part = batch.take(some)
    result = answers.measure_answers(batch, planted(own), Read(part, planted(own[some]), without=planted(cut[some])))
    whole = answers.measure_answers(batch, planted(own))
    h, alone = ({one.name: one for one in each.estimates}[answers.RESOLUTION] for each in (result, whole))
    assert h.value == alone.value and h.n == (np.array(batch.columns["k"]) > 0).sum()
    paired = next(control for control in h.controls if control.name.startswith("without context"))
    w, without = (answers.weighing(part, planted(x[some])) for x in (own, cut))
    expected = weighing.resolution(w.left, w.even) - weighing.resolution(without.left, without.even)
    assert h.value - paired.centre == pytest.approx(expected)


def test_evidence_that_says_nothing_is_refused():
    with refused(UserError, 0):
        measured_batch = in_text.sample(load_world("coin", text=True), 30, 0, ks=(0,))
        answers.measure_answers(measured_batch, planted(measured_batch.exact.predictive[:, 0].numpy()))
    with refused(UserError, "even"):
        measured("hmm-mixture:stays=0.5,weights=1", lambda exact, batch: exact)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("process") / "run"
    words = ["evidence", "--process", "two-point", "--process", "recall:values=3"]
    words += ["--n", "12", "--control-models", "1", "--quiet"]
    done = CliRunner().invoke(main, [*words, "--out", str(folder), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    return folder, json.loads(done.stdout)


def test_the_probabilities_are_those_that_the_model_gives(run):
    """Against a forward pass of the model by itself, prompt by prompt."""
    folder, _ = run
    record = Record.load(folder / "recall-values-3")
    pythia = Model.load("pocket:pythia")
    batch = in_text.sample(load_world("recall:values=3", text=True), 12, 0, pythia.tokenizer)
    assert tuple(record.prompts["text"]) == batch.text
    lost, mass = [], []
    shares = batch.exact.predictive[:, 0].exp().tolist()
    for text, words, p in zip(batch.text, map(str.split, batch.columns["marks"]), shares, strict=True):
        with torch.no_grad():
            logits = pythia.model(**pythia.tokenizer(text, return_tensors="pt")).logits[0, -1].double()
        ids = [pythia.tokenizer(f"{text} {word}")["input_ids"][-1] for word in words]
        q = logits.softmax(-1)[ids].tolist()
        mass.append(sum(q))
        lost.append(sum(a * math.log2(a * sum(q) / b) for a, b in zip(p, q, strict=True) if a > 0))
    result = record.results[answers.PROCESS]
    values = {estimate.name: estimate.value for estimate in result.estimates}
    assert values[answers.DIVERGENCE] == pytest.approx(np.mean(lost), rel=1e-4)
    assert values[answers.MASS] == pytest.approx(np.mean(mass), rel=1e-4)


def test_several_processes_make_a_profile_and_a_table(run):
    folder, printed = run
    records = [Record.load(folder / name) for name in ("profile", "two-point", "recall-values-3")]
    assert {row["probe"] for row in printed["verdicts"]} >= {answers.PROCESS}
    used = next(h for h in records[2].results[answers.PROCESS].estimates if h.name == answers.RESOLUTION)
    *_, last = lines(records)
    assert last.split()[:2] == ["recall:values=3", "8"]
    assert f"{used.value:.2f} [{used.low:.2f}, {used.high:.2f}]" in last
    shown = records[0].results["profile"]
    assert shown.ticks["process"] == ("two-point", "recall:values=3") and shown.arrays["resolution"][1] == used.value


def test_the_tokens_of_the_answers_are_the_posterior_s():
    pythia = Model.load("pocket:pythia")
    batch = in_text.sample(load_world("markov", text=True), 6, 0, pythia.tokenizer)
    assert torch.equal(label_ids(None, batch), batch.exact.answers[:, 0])
    for words, ids in zip(batch.columns["marks"], batch.exact.answers[:, 0].tolist(), strict=True):
        assert [pythia.tokenizer.decode([token]).strip() for token in ids] == words.split()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--process", "markof"], ("markof", "markov")),
        (["--process", "coin", "--surface", "lists"], ("lists", "code")),
        (["--process", "two-point", "--k", "24"], ("--k 24", "two-point")),
    ],
)
def test_requests_that_cannot_be_are_one_sentence(words, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["evidence", *words, "--n", "10", "--control-models", "1", "--quiet"])
    assert done.exit_code == 1 and done.stderr.count("\n") == 1
    assert all(name in done.stderr for name in named), done.stderr


@pytest.mark.parametrize("spec", names(text=True))
def test_the_belief_is_read_along_the_marks_in_the_order_of_outcomes(spec):
    batch = in_text.sample(load_world(spec, text=True), 5, 0)
    for text, words in zip(batch.text, label_words(batch), strict=True):
        places = [text.index(f" {word}") for word in words]  # the lead-in names outcomes in order
        assert spec == "stated" or places == sorted(places)


@pytest.mark.parametrize(
    "name", ["Bayes", "over-confident", "under-confident", "biased", "noisy", "forgets", "counts", "even"]
)
def test_simulated_answerers_are_told_apart(name):
    """One data set of two-point each; `python -m studies.answerers` has all processes and 20 data sets."""
    batch = in_text.sample(load_world("two-point", text=True), 50, 0)
    called = {"over-confident": "too steep", "under-confident": "too flat", "even": "ignores the evidence"}
    assert answerers.kind(answers.measure_answers(batch, answerers.answered(name, batch, 0))) == called.get(name, name)
