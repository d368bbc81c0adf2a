"""SULA, two exchangeable symbols: controls with a known effect, one command, and models that learnt from labels."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from scipy import special as scipy_special

from llmgeom import claims
from llmgeom.cli import main
from llmgeom.commands import evidence
from llmgeom.model.model import Model
from llmgeom.plan import MODEL
from llmgeom.probe import UNTRAINED
from llmgeom.probes.evidence import controls
from llmgeom.probes.evidence.answers import measure_answers
from llmgeom.probes.evidence.controls import VARIANTS, measure_controls
from llmgeom.probes.evidence.predictions import MAIN, ExactAnswers, LabelPredictions, Read
from llmgeom.prompts import text
from llmgeom.record import Record
from llmgeom.run import Run, run_probes
from llmgeom.stats.resampling import jackknife
from llmgeom.wind_tunnels import load_world

WORLD = load_world("two-point", text=True)


@pytest.fixture(scope="module")
def batch():
    return text.sample(WORLD, 60, 0)


def says(p):
    p = np.clip(p, 1e-6, 1 - 1e-6)
    return LabelPredictions(np.log(np.stack([p, 1 - p], 1)), np.ones(len(p)))


def strangers(n, count=20):
    """Answers that have nothing to do with the prompts."""
    return [says(1 / (1 + np.exp(-np.random.default_rng(i).normal(0, 0.3, n)))) for i in range(count)]


def judged(batch, model):
    """Compared with answers that know nothing as those without context."""
    measured = measure_answers(batch, model, Read(batch, model, without=strangers(len(batch), 1)[0]))
    return {h.name: h for h in claims.judge({"process": measured})["process"].estimates}


def test_certainty_that_follows_the_number_of_labels_alone_is_not_evidence(batch):
    k, rng = ExactAnswers(batch).k, np.random.default_rng(0)
    by_k = [says(0.5 + 0.05 * k + size * 0.2 * (rng.random(len(k)) - 0.5)) for size in (0.02, 0.2, 1.0)]
    for model in (*by_k, strangers(len(batch), 21)[0]):
        assert judged(batch, model)["resolution"].verdict not in ("holds", "small")


def test_controls_of_the_exact_answer_do_not_move_beyond_it():
    batches = {name: text.sample(WORLD, 40, 0, condition=name) for name in (MAIN, *VARIANTS)}
    truth = {name: ExactAnswers(one) for name, one in batches.items()}
    own = {name: says(np.exp(one.log_p[:, 0])) for name, one in truth.items()}
    result = measure_controls(truth, own)
    assert result["movement"] == pytest.approx(0, abs=1e-9)
    named = {h.name: h for h in result.estimates}
    apart = named["consistent against alternating"]
    assert apart.value == pytest.approx(1) and apart.null_low < 0 < apart.null_high < 0.6
    # The exact answer to another prompt of as many labels is off by its mean difference over all pairs.
    main = truth[MAIN]
    p, far = np.exp(main.log_p[:, 0]), []
    for k in {*main.k} - {0, 1}:
        of_k = p[main.k == k]
        far += np.abs(of_k[:, None] - of_k).mean(1).tolist()
    for name in ("remap", "permuted"):  # both leave the exact answer
        control = named[f"movement: {name}"]
        assert control.centre == pytest.approx(np.mean(far), abs=0.02) and control.null_low > 0.1
    # An answer by the number of labels alone is that to any other prompt with as many.
    by_k = {name: says(0.5 + 0.05 * one.k) for name, one in truth.items()}
    for h in measure_controls(truth, by_k).estimates[:3]:
        assert h.null_low == pytest.approx(h.value) == h.null_high
    # Whoever copies the last label moves when the order does, and not when the words do.
    copied = {}
    for name, one in batches.items():
        p = np.full(len(one), 0.5)
        told = ExactAnswers(one).observed
        p[told] = np.where([row[-1] == "0" for row in np.array(one.columns["seen"])[told]], 0.9, 0.1)
        copied[name] = says(p)
    moved = dict(zip(result.ticks["control"], measure_controls(truth, copied)["movement"], strict=True))
    assert moved["permuted"] > 0.05 > moved["remap"] == pytest.approx(0, abs=1e-9)


def test_copies_read_no_sample_whose_probe_does_not_compare_with_them():
    pythia = Model.load("pocket:pythia", device="cpu", offline=True)
    plan = evidence.question(pythia, WORLD, evidence.RunConfig(model="pocket:pythia", n=10, surfaces=("list",)))
    read = {kind: {name for _, rows in plan.passes(kind, 0) for name in rows} for kind in (MODEL, UNTRAINED)}
    assert read == {MODEL: {MAIN, *VARIANTS}, UNTRAINED: {MAIN}}


def test_variants_missing_from_the_prompts_are_refused_in_a_sentence():
    pythia = Model.load("pocket:pythia", device="cpu", offline=True)
    drawn = text.sample(WORLD, 10, 0, pythia.tokenizer)
    record = run_probes(pythia, drawn, {"sula_controls": controls}, controls=1)
    assert "without the samples" in record.unmeasured["sula_controls"]


@pytest.mark.parametrize(
    ("name", "learnt"), [("pocket:mistral", True), ("pocket:pythia@step0", False), ("pocket:llama-noicl", False)]
)
@pytest.mark.slow
def test_the_positive_control_passes_and_the_negatives_do_not(name, learnt):
    subject = Model.load(name, device="cpu", offline=True)
    record = Run(evidence.question(subject, WORLD, evidence.RunConfig(model=name, n=30, surfaces=("list",)))).record()
    assert {*record.unmeasured} == {"simplex: hidden state"}  # there is none beside the two causes
    verdicts = {h.name: h.verdict for m in record.results.values() for h in m.estimates if h.claim}
    # Less than the declared effect is "small": the control is beaten all the same.
    wanted = ("resolution", "log odds along the labels, last layer")
    assert all((verdicts[one] in ("holds", "small")) == learnt for one in wanted), verdicts


def test_the_command_ends_in_a_table_and_a_page_and_repeats_itself(tmp_path):
    def call(*args):
        words = ["evidence", "--n", "10", "--control-models", "2", "--quiet", *args]
        return CliRunner().invoke(main, words, prog_name="llmgeom")

    out = tmp_path / "run"
    done = call("--k", "0,2,4", "--surface", "list", "--out", str(out), "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    probes = {"process", "sula_belief", "sula_controls", "simplex: hidden state"}
    assert {row["probe"] for row in told["verdicts"]} == probes
    record = Record.load(out)
    assert record.facts["command"] == (
        "llmgeom evidence --model pocket:pythia --surface list --k 0,2,4 --n 10 --control-models 2"
    )
    assert set(record.prompts["k"]) == {0, 2, 4} and len(record.prompts["text"]) == 30
    assert record.results["process"].ticks["k"] == (0, 2, 4)
    again = call("--k", "2,4", "--out", str(out))
    assert again.exit_code == 1 and "holds another run" in again.stderr
    for args, code, says in (
        (("--k", "2,x"), 2, "expected whole numbers with commas between"),
        (("--k", "0"), 1, "nothing to weigh"),
        (("--n", "3"), 1, "--n 3"),
        (("--process", "regression"), 1, "no form as text"),
    ):
        wrong = call(*args, "--out", str(tmp_path / "other"))
        assert wrong.exit_code == code and says in wrong.stderr and "Traceback" not in wrong.stderr, wrong.output


def test_intervals_cover_where_the_model_has_a_habit_about_each_word():
    """The mean KL of models that prefer each word by a draw of sd .7 log odds, of 31 sets of two words."""
    batch, rng = text.sample(WORLD, 50, 0), np.random.default_rng(1)
    words = sorted({word for name in ("first", "second") for word in batch.columns[name]})
    first, second = (np.array([words.index(word) for word in batch.columns[name]]) for name in ("first", "second"))
    exact = np.exp(batch.posterior.predictive[:, 0, 0].numpy())

    def drawn():
        habit, noise = 0.7 * rng.standard_normal(len(words)), 0.25 * rng.standard_normal(len(batch))
        p = scipy_special.expit(scipy_special.logit(exact) + habit[first] - habit[second] + noise)
        return exact * np.log2(exact / p) + (1 - exact) * np.log2((1 - exact) / (1 - p))

    truth = np.mean([drawn().mean() for _ in range(3000)])
    spans = [jackknife(np.mean, drawn(), batch.cluster) for _ in range(200)]
    assert np.mean([span.low <= truth <= span.high for span in spans]) >= 0.9
