"""SULA: prompts whose next label has one exact distribution, and an instrument that tells Bayes from its rivals."""

import json
import math
import re
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from scipy import special as scipy_special, stats as scipy_stats

from llmgeom import claims
from llmgeom.cli import main
from llmgeom.commands import evidence as experiment
from llmgeom.errors import UserError
from llmgeom.model.subject import Subject
from llmgeom.probes.evidence import answers, controls
from llmgeom.probes.evidence.answers import Controls, measure_answers
from llmgeom.probes.evidence.controls import measure_controls
from llmgeom.probes.evidence.predictions import MAIN, VARIANTS, ExactAnswers, LabelPredictions, label_entropy, label_ids
from llmgeom.prompts import nonce
from llmgeom.prompts.sula import CONDITIONS, TEMPLATES, Beta, Sula, TwoPoint, available, prior
from llmgeom.record import Record
from llmgeom.run import observe, run_probes
from llmgeom.stats.resampling import jackknife
from tests.refusals import refused

LABELS = nonce.LABELS[:12]
SOURCE = Sula(LABELS)


# ---- prompts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("given", [TwoPoint(0.8), Beta(2, 1)])
def test_a_prompt_says_what_its_columns_say(template, given):
    batch = Sula(LABELS, given, template, (0, 1, 3)).sample(20, seed=1)
    for i, text in enumerate(batch.text):
        row = {name: column[i] for name, column in batch.columns.items()}
        named = (row["first"], row["second"])
        body = text.removeprefix(row["lead"].format(*named)).strip()
        assert body != text or template == "plain"
        found = re.findall(r"[a-z]+(?::| is) ([a-z]+)", body)
        assert found == [named[int(one)] for one in row["seen"]] and len(found) == row["k"]
        assert row["n1"] == found.count(named[0]) and row["pair"] == "-".join(sorted(named))
        assert re.search(r"[a-z](:| is)$", text)
        assert template == "plain" or all(name in row["lead"].format(*named) for name in named)


def enumerated(given, n1, n2):
    """P(first next), P(latent first), by a grid over the share of first labels."""
    if isinstance(given, TwoPoint):
        share, weight = np.array([given.reliability, 1 - given.reliability]), np.array([0.5, 0.5])
    else:
        share = (np.arange(200_000) + 0.5) / 200_000
        weight = scipy_stats.beta.pdf(share, given.a, given.b)
    posterior = weight * share**n1 * (1 - share) ** n2
    posterior /= posterior.sum()
    return posterior @ share, posterior[share > 0.5].sum()


@pytest.mark.parametrize("given", [TwoPoint(), TwoPoint(0.7), Beta(), Beta(2, 1)])
def test_exact_answers_are_bayes_rule_over_a_grid_of_shares(given):
    batch = Sula(LABELS, given).sample(6, seed=0)
    for i in range(len(batch)):
        n1, k = batch.columns["n1"][i], batch.columns["k"][i]
        following, latent = enumerated(given, n1, k - n1)
        assert math.exp(batch.posterior.predictive[i, 0, 0]) == pytest.approx(following, abs=1e-6)
        assert math.exp(batch.posterior.belief[i, 0, 0]) == pytest.approx(latent, abs=1e-4)


@pytest.mark.parametrize("given", [TwoPoint(), Beta(1, 1), Beta(3, 1)])
def test_what_is_drawn_is_distributed_as_the_exact_answer_says(given):
    batch = Sula(LABELS, given, ks=(0, 1, 4)).sample(2000, seed=0)
    for column, answer in (("next", batch.posterior.predictive), ("latent", batch.posterior.belief)):
        p = answer[:, 0, 0].exp().numpy()
        missing = (np.array(batch.columns[column]) == 0) - p
        assert abs(missing.sum()) < 3.5 * np.sqrt((p * (1 - p)).sum())
        assert abs((missing * (p - p.mean())).sum()) < 3.5 * np.sqrt((p * (1 - p) * (p - p.mean()) ** 2).sum())


def test_conditions_change_one_thing_each():
    batches = {name: replace(SOURCE, condition=name).sample(30, seed=3) for name in CONDITIONS}
    main = batches["main"].columns
    for i, (k, labels) in enumerate(zip(main["k"], main["seen"], strict=True)):
        of = {name: batch.columns["seen"][i] for name, batch in batches.items()}
        assert of["remap"] == of["no words"] == labels
        assert of["swap"] == labels.translate(str.maketrans("01", "10"))
        assert sorted(of["permuted"]) == sorted(labels)
        assert of["consistent"] == labels[:1] * k
        assert all(a != b for a, b in zip(of["alternating"], of["alternating"][1:], strict=False))
        assert of["alternating"][:1] == labels[:1]
    moved = ("pair", "first", "second", "lead", "item", "latent", "next")
    for name, batch in batches.items():
        assert all(batch.columns[column] == main[column] for column in moved if name != "remap"), name
    theirs = batches["remap"].columns
    for label, name in enumerate(("then first", "then second")):
        assert batches[name].columns["seen"] == tuple(f"{seen}{label}" for seen in main["seen"])
    others = zip(
        zip(main["first"], main["second"], strict=True),
        zip(theirs["first"], theirs["second"], strict=True),
        strict=True,
    )
    assert all(not {*one} & {*other} for one, other in others)
    shuffled = np.array([int(one) for row in batches["shuffled"].columns["seen"] for one in row])
    assert abs(shuffled.mean() - 0.5) < 3 * 0.5 / len(shuffled) ** 0.5
    assert all(set(re.findall(r"(\S+):", text.split(". ", 1)[1])) == {"[MASK]"} for text in batches["no words"].text)
    assert SOURCE.sample(30, seed=3).text == batches["main"].text != SOURCE.sample(30, seed=4).text


def test_pairs_that_pockets_were_trained_on_are_not_used_and_a_pair_keeps_its_lead_in():
    assert not {*SOURCE.pairs} & {*nonce.pairs(nonce.Part.TRAINED)}
    batch = SOURCE.sample(60, seed=0)
    leads = {}
    for pair, lead in zip(batch.cluster, batch.columns["lead"], strict=True):
        assert leads.setdefault(pair, lead) == lead
    assert len(set(leads.values())) > 5


def test_no_word_is_in_two_pairs():
    words = [word for pair in Sula(nonce.LABELS).pairs for word in pair]
    assert len(words) == len(set(words)) == len(nonce.LABELS)


@pytest.mark.parametrize(
    ("words", "samples", "least", "most"), [(80, 200, 0.9, 1), (12, 600, 0.8, 0.88), (24, 600, 0.84, 0.92)]
)
def test_intervals_cover_where_the_model_has_a_habit_about_each_word(words, samples, least, most):
    """The mean KL of models that prefer each word by a draw of sd .7 log odds; with all pairs of 16 words .62 cover."""
    labels = nonce.LABELS[:words]
    batch, rng = Sula(labels).sample(50, 0), np.random.default_rng(1)
    first, second = (np.array([labels.index(word) for word in batch.columns[name]]) for name in ("first", "second"))
    exact = np.exp(batch.posterior.predictive[:, 0, 0].numpy())

    def drawn():
        habit, noise = 0.7 * rng.standard_normal(words), 0.25 * rng.standard_normal(len(batch))
        p = scipy_special.expit(scipy_special.logit(exact) + habit[first] - habit[second] + noise)
        return exact * np.log2(exact / p) + (1 - exact) * np.log2((1 - exact) / (1 - p))

    truth = np.mean([drawn().mean() for _ in range(3000)])
    spans = [jackknife(np.mean, drawn(), batch.cluster) for _ in range(samples)]
    assert least <= np.mean([span.low <= truth <= span.high for span in spans]) <= most


@pytest.mark.parametrize("number", [0.9, 0.875, 0.8125, 0.666666666667, 0.999])
def test_an_instruction_states_the_prior_of_the_exact_answer(number):
    for sentence in TwoPoint(number).instructions:
        (percent,) = re.findall(r"[\d.]+(?= times in 100)", sentence)
        assert Fraction(percent) / 100 == Fraction(repr(number))
    for sentence in Beta(number, 12345678).instructions:
        stated = re.search(r"from ([\d.]+) of the first kind and ([\d.]+) of the second", sentence)
        assert [Fraction(part) for part in stated.groups()] == [Fraction(repr(number)), 12345678]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: prior("two-point:0.4"), "reliability 0.4"),
        (lambda: prior("beta:2"), "--prior beta:2"),
        (lambda: prior("normal"), "--prior normal"),
        (lambda: prior("beta:0,1"), "Beta(0, 1)"),
        (lambda: prior("beta:inf,1"), "Beta(inf, 1)"),
        (lambda: prior("beta:1e308,1e308"), "finite"),
        (lambda: Sula(LABELS, template="colons"), "colon"),
        (lambda: Sula(LABELS, ks=(1, 1)), "--k 1,1"),
        (lambda: Sula(LABELS, ks=(99,)), "--k 99"),
        (lambda: Sula(("dax", "zug")), 1),
        (lambda: SOURCE.sample(0, 0), "--n 0"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(make, says):
    with refused(UserError, says):
        make()


def test_priors_are_read_from_words():
    assert prior("two-point") == TwoPoint(0.9) and prior("two-point:0.8") == TwoPoint(0.8)
    assert prior("beta") == Beta(1, 1) and prior("beta:2,0.5") == Beta(2, 0.5)


def test_prompts_longer_than_the_model_reads_are_refused_by_their_number_of_observations(pythia):
    source = Sula(available(pythia.tokenizer), template="instructed", ks=(2, 24))
    with refused(UserError, "--k 24", pythia.facts["positions"], "--k 2"):
        experiment.question(pythia, source, n=10)


def test_labels_are_single_tokens_of_the_tokenizer(pythia):
    found = available(pythia.tokenizer)
    assert len(found) == len(nonce.LABELS) and {len(pythia.tokenizer(f" {one}")["input_ids"]) for one in found} == {1}

    class Letters:
        def __call__(self, text, add_special_tokens):
            return {"input_ids": list(text)}

    with refused(UserError, 0):
        available(Letters())


# ---- answers --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def batch():
    return SOURCE.sample(60, seed=0)


def says(p, rows=None):
    p = np.clip(p, 1e-6, 1 - 1e-6)
    n = len(p)
    return LabelPredictions(np.log(np.stack([p, 1 - p], 1)), np.ones(n), np.ones(n))


def strangers(n, count=20):
    """Answers that have nothing to do with the prompts."""
    return [says(1 / (1 + np.exp(-np.random.default_rng(i).normal(0, 0.3, n)))) for i in range(count)]


def measured(batch, model):
    """Compared with answers that know nothing as those without context."""
    return measure_answers(batch, model, Controls(batch, model, strangers(len(batch), 1)[0]))


def judged(batch, model):
    return claims.judge({"process": measured(batch, model).lowered()})["process"].estimates


# ---- the measures ---------------------------------------------------------------------------------------------------


def test_the_exact_answer_has_all_of_the_evidence_and_weighs_it_once(batch):
    truth = ExactAnswers(batch)
    result = measured(batch, says(np.exp(truth.log_p[:, 0])))
    found = {h.name: h for h in result.estimates}
    assert found["resolution"].value == pytest.approx(1, abs=1e-3)
    assert found["weight of evidence"].value == pytest.approx(1) and found["bias"].value == pytest.approx(0, abs=1e-9)
    assert result.accuracy.value == pytest.approx(result.accuracy_exact)
    assert result.predicted == pytest.approx(result.exact)
    assert np.abs(result.drawn - result.exact).max() < 0.35  # 24 prompts a decile
    # Published targets, by k: the mean entropy of the latent label.
    exact = {0: 1.0, 1: 0.4690, 2: 0.2579, 4: 0.0781, 8: 0.0081}
    big = ExactAnswers(SOURCE.sample(4000, seed=5))
    h = label_entropy(big.belief)
    for k, value in exact.items():
        assert h[big.k == k].mean() == pytest.approx(value, abs=0.012)


def test_what_is_said_before_any_evidence_enters_no_headline(batch):
    truth = ExactAnswers(batch)
    p = 0.2 + 0.6 * np.exp(truth.log_p[:, 0])
    wild = np.where(truth.k == 0, 0.99, p)
    usual, other = (measured(batch, says(one)) for one in (p, wild))
    assert other.estimates == usual.estimates
    assert other.divergence.value[0] > usual.divergence.value[0] + 0.5


def test_an_answer_without_evidence_is_given_no_verdict_in_its_favour(batch):
    (used,) = [h for h in judged(batch, strangers(len(batch), 21)[0]) if h.name == "resolution"]
    assert used.verdict not in ("holds", "small")


@pytest.mark.parametrize("size", [0.02, 0.2, 0.5, 1.0])
def test_certainty_that_follows_the_number_of_labels_alone_is_not_evidence(batch, size):
    k, rng = ExactAnswers(batch).k, np.random.default_rng(0)
    p = 0.5 + 0.05 * k + size * 0.2 * (rng.random(len(k)) - 0.5)
    (used,) = [h for h in judged(batch, says(p)) if h.name == "resolution"]
    assert used.verdict not in ("holds", "small")


def test_controls_of_the_exact_answer_do_not_move_beyond_it():
    batches = {name: replace(SOURCE, condition=name or "main").sample(40, seed=0) for name in (MAIN, *VARIANTS)}
    truth = {name: ExactAnswers(one) for name, one in batches.items()}
    own = {name: says(np.exp(one.log_p[:, 0])) for name, one in truth.items()}
    untrained = [{name: control for name in batches} for control in strangers(len(batches[MAIN]))]
    result = measure_controls(truth, [own, *untrained])
    assert result.movement.value == pytest.approx(0, abs=1e-9)
    assert {h.name: h.value for h in result.estimates}["consistent against alternating"] == pytest.approx(1)
    assert result.published[:, 1] == pytest.approx(0, abs=1e-9)
    # Whoever copies the last label moves when the order does, and not when the words do.
    copied = {}
    for name, one in batches.items():
        p = np.full(len(one), 0.5)
        told = ExactAnswers(one).observed
        p[told] = np.where([row[-1] == "0" for row in np.array(one.columns["seen"])[told]], 0.9, 0.1)
        copied[name] = says(p)
    moved = dict(
        zip(result.ticks["control"], measure_controls(truth, [copied, *untrained]).movement.value, strict=True)
    )
    assert moved["permuted"] > 0.1 > moved["remap"] == pytest.approx(0, abs=1e-9)


def test_a_model_is_heard_as_one_prompt_at_a_time_says(pythia):
    batch = SOURCE.sample(4, seed=0)
    found = observe(pythia, batch, answers.NEEDS)
    for i, text in enumerate(batch.text):
        ids = torch.tensor([pythia.tokenizer(text)["input_ids"]])
        with torch.no_grad():
            p = pythia.model(ids).logits[0, -1].double().softmax(-1)
        two = p[[pythia.tokenizer(f" {batch.columns[name][i]}")["input_ids"][0] for name in ("first", "second")]]
        assert found.p[i] == pytest.approx(float(two[0] / two.sum()), rel=1e-4)
        assert found.mass[i] == pytest.approx(float(two.sum()), rel=1e-4)
        assert found.h_vocab[i] == pytest.approx(float(-(p * p.log2()).sum()), rel=1e-4)


def test_a_label_of_several_tokens_is_refused(pythia):
    with refused(UserError, "incomprehensible"):
        label_ids(pythia.tokenizer, Sula((*LABELS, "incomprehensible", "unutterable")).sample(40, 0))


def test_the_record_of_a_repeated_run_is_the_same_and_runs_no_model(pythia, tmp_path, monkeypatch):
    def asked():
        asks = experiment.question(pythia, Sula(LABELS, ks=(1, 2, 4)), n=10, nulls=2)
        return asks.record(pythia, store=str(tmp_path))

    first = asked()
    monkeypatch.setattr(type(pythia.model), "forward", lambda *_, **__: pytest.fail("the model ran again"))
    again = asked()
    for name, measured in first.results.items():
        assert again.results[name].estimates == measured.estimates
    assert again.prompts["H label"] == first.prompts["H label"]
    assert not again.unmeasured


def test_variants_missing_from_the_prompts_are_refused_in_a_sentence(pythia):
    record = run_probes(pythia, SOURCE.sample(10, 0), {"sula_controls": controls}, controls=1)
    assert "without the samples" in record.unmeasured["sula_controls"]


# ---- pocket models: one trained on evidence, two that were not ------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "learnt"), [("pocket:mistral", True), ("pocket:pythia@step0", False), ("pocket:llama-noicl", False)]
)
@pytest.mark.slow
def test_the_positive_control_passes_and_the_negatives_do_not(name, learnt):
    subject = Subject.load(name, device="cpu", offline=True)
    question = experiment.question(subject, Sula(available(subject.tokenizer)), n=30)
    if not learnt:  # the other probes have no claim, and their prompts are nine tenths of what is read
        kept = {one: question.probes[one] for one in ("process", "sula_belief")}
        question = replace(question, probes=kept, samples={})
    record = question.record(subject)
    assert not record.unmeasured
    verdicts = {h.name: h.verdict for m in record.results.values() for h in m.estimates if h.claim}
    wanted = ("resolution", "log odds along the labels, last layer")
    assert set(verdicts) == {*wanted, "weight of evidence", "calibration loss"}
    # Less than the declared effect is "small": the control is beaten all the same.
    assert all((verdicts[one] in ("holds", "small")) == learnt for one in wanted), verdicts


def test_the_command_ends_in_a_table_and_a_page_and_repeats_itself(tmp_path):
    def call(*args):
        return CliRunner().invoke(main, ["sula", "--n", "10", "--nulls", "2", "--quiet", *args], prog_name="llmgeom")

    out = tmp_path / "run"
    done = call("--k", "0,2,4", "--prior", "beta:2,1", "--template", "instructed", "--out", str(out), "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    probes = {"process", *(f"sula_{name}" for name in ("belief", "controls", "martingale"))}
    assert {row["probe"] for row in told["verdicts"]} == probes
    record = Record.load(out)
    assert record.facts["command"] == (
        "llmgeom evidence --model pocket:pythia --prior beta:2,1 --template instructed --k 0,2,4 --n 10 --nulls 2"
    )
    assert set(record.prompts["k"]) == {0, 2, 4} and len(record.prompts["text"]) == 30
    assert record.prompts["template"] == record.prompts["pair"]  # what is independent; comparisons pair by it
    assert any("only 2 draws" in warning for warning in record.warnings)
    assert record.results["process"].ticks["k"] == (0, 2, 4)
    again = call("--k", "2,4", "--out", str(out))
    assert again.exit_code == 1 and "holds another run" in again.stderr
    for args, code, says in (
        (("--prior", "gauss"), 1, "--prior gauss"),
        (("--k", "2,x"), 2, "expected whole numbers with commas between"),
        (("--k", "0,1"), 1, "at least one number of observations above 1"),
        (("--n", "3"), 1, "--n 3"),
        (("--labels", "dax,incomprehensible,vif,zug,bop,mib,tok,lug,wes,ruk"), 1, "not single tokens"),
        (("--labels", "dax,vif,zug,bop,mib,tok"), 1, "3 pairs that share no word; 5 are needed"),
    ):
        wrong = call(*args, "--out", str(tmp_path / "other"))
        assert wrong.exit_code == code and says in wrong.stderr and "Traceback" not in wrong.stderr, wrong.output


def test_a_protocol_that_there_is_not_is_refused():
    with refused(UserError, "--protocol loud", "sound", "published"):
        experiment.prepare(experiment.RunConfig(protocol="loud"))
