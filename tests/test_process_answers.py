"""Answers to processes in text: scores of planted observers, and the probabilities that a model really gives."""

import json
import math
import re

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from llmgeom.claims import judge
from llmgeom.cli import main
from llmgeom.commands.evidence import lines
from llmgeom.errors import UserError
from llmgeom.model.subject import Subject
from llmgeom.probes.evidence import answers
from llmgeom.probes.evidence.predictions import LabelPredictions, label_ids, label_words
from llmgeom.prompts.processes import load_process, names
from llmgeom.record import Record
from llmgeom.stats.information import best_constant, bits, kl
from tests.refusals import refused
from tests.source import ROOT


def planted(log_p: np.ndarray, mass: float = 0.9) -> LabelPredictions:
    n = len(log_p)
    return LabelPredictions(log_p, np.full(n, mass), np.zeros(n))


def noisy(log_p: np.ndarray, seed: int) -> np.ndarray:
    """An untrained model: answers that have nothing to do with the prompt."""
    raw = np.random.default_rng(seed).normal(0, 0.2, log_p.shape)
    return raw - np.log(np.exp(raw).sum(1, keepdims=True))


def measured(spec: str, observer, n: int = 60):
    """What is measured of an observer: (exact log-probabilities, batch) -> log-probabilities."""
    batch = load_process(spec).sample(n, 0)
    exact = batch.exact.predictive[:, 0].numpy()
    own = observer(exact, batch)
    controls = [planted(noisy(exact, seed)) for seed in range(20)]
    return batch, answers.measure_answers(batch, (planted(own), *controls), planted(noisy(exact, 99)))


def values(result) -> dict[str, float]:
    return {estimate.name: estimate.value for estimate in result.estimates}


def trivial(name: str):
    return lambda exact, batch: np.clip(batch.exact.trivial[name][:, 0].numpy(), -700, None)


@pytest.mark.parametrize("spec", names())
def test_the_exact_observer_has_skill_one_and_loses_nothing(spec):
    _, result = measured(spec, lambda exact, batch: np.clip(exact, -700, None))
    found = values(result)
    assert found[answers.SKILL] == pytest.approx(1, abs=1e-9) and found[answers.DIVERGENCE] == pytest.approx(
        0, abs=1e-9
    )
    assert found.get(answers.INFERENCE, 1) == pytest.approx(1, abs=1e-9)
    assert (answers.INFERENCE in found) == (spec != "two-point")  # majority is exact there, which is said
    assert bool(result.warnings) == (spec == "two-point")
    np.testing.assert_allclose(result.surface.value, 1, atol=1e-9)
    np.testing.assert_allclose(result.predicted, result.exact, atol=1e-9)


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("dirichlet", "majority"),
        ("markov", "unigram"),
        ("hmm", "Markov counts"),
        ("recall", "unigram and novelty"),
        ("bijection", "unigram and novelty"),
        ("stated", "counts"),
    ],
)
def test_the_best_observer_that_does_not_infer_has_skill_zero_over_itself(spec, name):
    _, result = measured(spec, trivial(name))
    found = values(result)
    assert found[answers.INFERENCE] == pytest.approx(0, abs=1e-12)
    assert found[answers.SKILL] > 0.2


@pytest.mark.parametrize("spec", ["recall", "bijection"])
def test_a_model_that_tells_new_items_from_known_ones_does_not_bind(spec):
    """It answers with the shares of the marks for an item that was shown, and as Bayes' rule does for a new one."""

    def answer(exact, batch):
        p = np.exp(exact)
        for i, (seen, items) in enumerate(zip(batch.columns["seen"], batch.columns["items"], strict=True)):
            *shown, asked = items.split()
            if asked in shown:
                p[i] = [(seen.count(str(mark)) + 1e-6) / (len(seen) + 1e-6 * p.shape[1]) for mark in range(p.shape[1])]
        return np.log(np.clip(p, 1e-9, None))

    _, result = measured(spec, answer)
    words = {h.name: h.verdict for h in judge({answers.PROCESS: result.lowered()})[answers.PROCESS].estimates}
    assert words[answers.SKILL] == "holds" and words[answers.INFERENCE] == "ruled out"


def test_divergence_is_that_of_the_formula_written_out():
    batch, result = measured("bijection", lambda exact, batch: noisy(exact, 7))
    exact, own = batch.exact.predictive[:, 0].exp().numpy(), np.exp(noisy(batch.exact.predictive[:, 0].numpy(), 7))
    by_k: dict[int, list[float]] = {}
    for k, p, q in zip(batch.columns["k"], exact, own, strict=True):
        by_k.setdefault(k, []).append(sum(a * math.log2(a / b) for a, b in zip(p, q, strict=True) if a > 0))
    np.testing.assert_allclose(result.divergence.value, [np.mean(by_k[k]) for k in sorted(by_k)], rtol=1e-12)
    with_evidence = [x for k, row in by_k.items() if k > 0 for x in row]
    assert values(result)[answers.DIVERGENCE] == pytest.approx(np.mean(with_evidence))
    h = [-sum(a * math.log2(a) for a in row) for row in own]
    k = np.array(batch.columns["k"])
    np.testing.assert_allclose(result.entropy, [np.array(h)[k == one].mean() for one in sorted(by_k)], rtol=1e-12)


def test_a_mark_that_was_never_possible_is_no_trouble():
    """Few prompts of recall: at some k a mark is excluded in all of them, by the exact answer and by every observer."""
    _, result = measured("recall:labels=3,stored=1", lambda exact, batch: noisy(exact, 3), n=10)
    assert all(np.isfinite(estimate.value) for estimate in result.estimates)


def test_controls_without_the_evidence_lie_at_or_below_zero():
    """An untrained model, a model without context and answers to other prompts know no evidence: no skill."""
    _, result = measured("dirichlet", lambda exact, batch: exact, n=120)
    skill = next(estimate for estimate in result.estimates if estimate.name == answers.SKILL)
    assert skill.null_high < 0.05 < 0.9 < skill.low
    shuffled = answers._exchanged(answers.ExactAnswers(_batch := load_process("dirichlet").sample(120, 0)),
                                  _batch.exact.predictive[:, 0].numpy(), 0)  # fmt: skip
    k = np.array(_batch.columns["k"])
    assert (shuffled[:, k > 0].mean(1) > 0.1).all() and np.allclose(shuffled[:, k == 0], 0)


def test_evidence_that_says_nothing_is_refused():
    with refused(UserError, 0):
        measured_batch = load_process("beta").sample(30, 0, ks=(0,))
        answers.measure_answers(measured_batch, (planted(measured_batch.exact.predictive[:, 0].numpy()),) * 3)
    with refused(UserError, "constant"):
        measured("hmm:stays=0.5,weights=1", lambda exact, batch: exact)


def test_the_observers_of_the_documentation_lose_what_it_says():
    page = (ROOT / "docs" / "observers.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \| ([\d.]+) \| (.*?) \|$", page, re.MULTILINE)
    assert {name for name, *_ in rows} == set(names())
    for spec, constant, others in rows:
        batch = load_process(spec).sample(300, 0)
        exact, k = batch.exact.predictive[:, 0].numpy(), np.array(batch.columns["k"])
        lost = {name: kl(exact, log_p[:, 0].numpy()) for name, log_p in batch.exact.trivial.items()}
        assert f"{bits(kl(exact, best_constant(exact, k))[k > 0].mean()):.3f}" == constant
        assert ", ".join(f"{name} {bits(x[k > 0].mean()):.3f}" for name, x in lost.items()) == others


# ---- with a model ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("process") / "run"
    words = ["evidence", "--process", "two-point", "--process", "recall:labels=3"]
    words += ["--n", "12", "--nulls", "2", "--quiet"]
    done = CliRunner().invoke(main, [*words, "--out", str(folder), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    return folder, json.loads(done.stdout)


def test_the_probabilities_are_those_that_the_model_gives(run):
    """Against a forward pass of the model by itself, prompt by prompt."""
    folder, _ = run
    record = Record.load(folder / "recall-labels-3")
    pythia = Subject.load("pocket:pythia")
    batch = load_process("recall:labels=3").sample(12, 0, pythia.tokenizer)
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
    found = {estimate.name: estimate.value for estimate in result.estimates}
    assert found[answers.DIVERGENCE] == pytest.approx(np.mean(lost), rel=1e-4)
    assert found[answers.MASS] == pytest.approx(np.mean(mass), rel=1e-4)


def test_several_processes_make_a_record_each_and_one_page(run):
    folder, printed = run
    assert (folder / "report.html").is_file() and printed["report"] == str(folder / "report.html")
    record = Record.load(folder / "two-point")
    assert answers.PROCESS in record.results and "sula_belief" in record.results
    assert record.source["kind"] == "process" and record.source["name"] == "two-point"
    # An exact probability of 0 has no log odds: said, not passed over.
    assert "log odds" in Record.load(folder / "recall-labels-3").unmeasured["sula_belief"]


def test_several_processes_without_a_whole_primitive_are_lines_and_no_profile(run):
    folder, printed = run
    records = [Record.load(folder / name) for name in ("two-point", "recall-labels-3")]
    assert not (folder / "profile").exists() and {row["probe"] for row in printed["verdicts"]} >= {answers.PROCESS}
    skill = next(h for h in records[1].results[answers.PROCESS].estimates if h.name == answers.SKILL)
    *_, last = lines(records)
    assert last.split(maxsplit=1)[0] == "recall:labels=3"
    assert last.endswith(f"{skill.value:.2f} [{skill.low:.2f}, {skill.high:.2f}] {skill.verdict}")


def test_the_tokens_of_the_answers_are_the_posterior_s():
    pythia = Subject.load("pocket:pythia")
    batch = load_process("markov").sample(6, 0, pythia.tokenizer)
    assert torch.equal(label_ids(None, batch), batch.exact.answers[:, 0])
    for words, ids in zip(batch.columns["marks"], batch.exact.answers[:, 0].tolist(), strict=True):
        assert [pythia.tokenizer.decode([token]).strip() for token in ids] == words.split()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--process", "markof"], ("markof", "markov")),
        (["--process", "beta", "--template", "is"], ("--template", "SULA")),
        (["--process", "beta", "--prior", "beta:2,1"], ("--prior", "SULA")),
        (["--process", "beta", "--surface", "lists"], ("lists", "code")),
        (["--surface", "list"], ("--surface", "--process")),
        (["--process", "two-point", "--k", "24"], ("--k 24", "two-point")),
    ],
)
def test_requests_that_cannot_be_are_one_sentence(words, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["evidence", *words, "--n", "10", "--nulls", "1", "--quiet"])
    assert done.exit_code == 1 and done.stderr.count("\n") == 1
    assert all(name in done.stderr for name in named), done.stderr


@pytest.mark.parametrize("spec", names())
def test_the_belief_is_read_along_the_marks_in_the_order_of_outcomes(spec):
    batch = load_process(spec).sample(5, 0)
    for text, words in zip(batch.text, label_words(batch), strict=True):
        places = [text.index(f" {word}") for word in words]  # the lead-in names outcomes in order
        assert spec == "stated" or places == sorted(places)
        assert len(words) == load_process(spec).answers
