"""Claims of a grading, of models whose answers are written down: exact, blind, certain, memorising."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from scipy.special import log_softmax
from sklearn.linear_model import LinearRegression

from llmgeom.commands.grade import table
from llmgeom.grading import Origin
from llmgeom.probes.length_generalisation import FAILURES
from llmgeom.probes.posterior.grading import StateTable, grade, read_answers, score_model
from llmgeom.probes.posterior.results import skill
from llmgeom.probes.posterior.scores import Evaluation, score
from llmgeom.reports import page
from llmgeom.wind_tunnels.worlds.coin import Coin
from llmgeom.wind_tunnels.worlds.markov import Markov
from llmgeom.world import held_out
from tests.written_answers import KL, LESS, PLAIN, REPLACED, SKILL, Mean, examine, found, noise, of, saying, uniform


def nearly(task, seed=4):
    """Answers near the exact ones, with noise that depends on the sequence."""
    first, last = task.answers.tokens[0], task.answers.tokens[-1] + 1
    noisy = noise(task, seed, 0.2)
    return saying(task, lambda x: (0.94 * task.log_predictive(x).exp() + 0.01).log() + noisy(x)[..., first:last])


def verdicts(record):
    return {(probe, h.name): h.verdict for probe, m in record.results.items() for h in m.estimates}


ENOUGH = 1100  # an exact model holds both claims about KL from 1,013 sequences on, with `small_failures`
FEW = {"sequences": 20}  # a table of 20 training sequences answers nothing


@pytest.fixture
def small_failures(monkeypatch):
    """A failure of at most 3 bits, not 10: a fourth of the sequences exclude rare ones."""
    monkeypatch.setitem(FAILURES.__dict__, "largest", 3.0)


@pytest.mark.parametrize(("says", "weight", "resolution"), [(2.0, 2.0, 1.0), (0.5, 0.5, 1.0), (0.0, 0.0, 0.0)])
def test_evidence_weighed_so_many_times_is_seen_in_the_weight_and_costs_no_resolution(says, weight, resolution):
    task = Coin(steps=8, prior="beta:1,1")
    biased = torch.tensor([0.7, 0.0])
    model = of(task, saying(task, lambda x: (says * task.log_predictive(x) + biased).log_softmax(-1)))
    record = examine(model, task, Origin(), n=800, nulls=1)
    assert found(record, "posterior", "weight of evidence").value == pytest.approx(weight, abs=1e-5)
    # The maps are fitted on other sequences, and a ridge of 1e-4 keeps them finite.
    assert found(record, "posterior", "resolution").value == pytest.approx(resolution, abs=0.002)


def test_the_posterior_itself_passes_everything(small_failures):
    task = REPLACED
    record = examine(of(task, saying(task, task.log_predictive)), task, Origin(task.title, 6, FEW), n=ENOUGH, nulls=8)
    got = found(record, "posterior", KL)
    assert abs(got.value) < 1e-6 and got.null == "the exact answer" and got.p < 0.0125
    assert found(record, "posterior", SKILL).value == pytest.approx(1, abs=1e-6)
    assert {verdicts(record)[key] for key in (("posterior", KL), ("posterior", SKILL), ("posterior_memory", LESS))} == {
        "holds"
    }
    assert found(record, "posterior_calibration", "calibration error").value < 1e-6
    arrays = record.results["posterior_calibration"].arrays
    np.testing.assert_array_equal(arrays["accuracy"], arrays["accuracy_exact"])
    assert arrays["count"].sum() == ENOUGH * 6 * 6 and (arrays["count"] > 0).all()
    assert np.abs(arrays["exact"] - arrays["drawn"])[arrays["count"] > 500].max() < 0.08
    assert record.warnings == ()
    assert page([record]).count('class="plot"') == 9


def test_a_predictor_that_rules_out_what_happens_is_left_out_and_named(monkeypatch):
    """Its divergence is infinite: no number to stand in a table."""
    task = REPLACED
    sure = torch.tensor([1.0, 0, 0, 0, 0, 0]).double().log().expand(200, 6, 6)
    monkeypatch.setattr(type(task), "trivial", lambda self, inputs: {"always the first": sure[: len(inputs)]})
    got = grade(of(task, uniform(task)), task, 200, seed=2)
    assert got.excluded == ("always the first",) and set(got.trivial) == {"uniform", "constant", "position"}
    record = examine(of(task, uniform(task)), task, Origin(task.title, 6, FEW), n=200, nulls=5)
    assert "always the first gives no probability" in " ".join(record.results["posterior"].notes)


def test_the_uniform_model_is_the_uniform_predictor():
    task = PLAIN
    record = examine(of(task, uniform(task)), task, Origin(task.title, 6, FEW), n=200, nulls=5)
    # After m pairs 6 - m values are left: KL = log2 6 - log2(6 - m), the same for every sequence.
    owed = [math.log2(6 / (6 - m)) for m in range(6)]
    np.testing.assert_allclose(record.results["posterior"].arrays["kl"], owed, atol=1e-6)
    # The best trivial predictor may be the mean at each position, which is the uniform one but for sampling.
    np.testing.assert_allclose(record.results["posterior"].arrays["kl_trivial"], owed, atol=5e-3)
    assert -1e-3 < found(record, "posterior", SKILL).value < 1e-6
    own = grade(of(task, uniform(task)), task, 200, 0)
    np.testing.assert_allclose(own.trivial["uniform"].kl, own.own.kl, atol=1e-6)
    assert found(record, "posterior", "mae_abs").value == pytest.approx(np.mean(owed), abs=1e-6)
    words = verdicts(record)
    assert words["posterior", KL] == words["posterior", SKILL] == "ruled out"
    assert record.unmeasured["posterior_memory"].startswith("skill over ")  # it knows nothing of any
    assert "excludes outcomes" in record.results["posterior"].unmeasured["weight of evidence"]
    assert any(w.startswith("bag of values is already exact") for w in record.warnings)
    assert len(record.results["posterior_calibration"].arrays["predicted"]) == 1  # nine of the tenths are empty
    assert page([record])


def test_errors_of_entropy_do_not_see_a_model_that_is_certain_of_the_wrong_thing():
    task = Coin(steps=8, prior="beta:1,1")
    mirrored = saying(task, lambda x: task.log_predictive(x).flip(-1))
    record = examine(of(task, mirrored), task, Origin(task.title, 8), n=300, nulls=5)
    assert found(record, "posterior", "mae_abs").value < 1e-6
    assert found(record, "posterior", "mae_mean").value < 1e-6
    expected = []
    for ids in grade(of(task, mirrored), task, 300, 0).batch.inputs.ids.tolist():
        heads = np.cumsum([i == 0 for i in ids])
        p = (1 + heads) / (2 + np.arange(8))
        expected.append(p * np.log2(p / (1 - p)) + (1 - p) * np.log2((1 - p) / p))
    assert found(record, "posterior", KL).value == pytest.approx(np.mean(expected), abs=1e-5)
    assert verdicts(record)["posterior", KL] == verdicts(record)["posterior", SKILL] == "ruled out"
    assert record.unmeasured["posterior_memory"].startswith("memorisable: ")
    assert record.warnings[0].startswith("memorisable: the answer depends on the counts of the symbols")


def test_a_model_that_looks_hypotheses_up_is_told_from_one_that_infers():
    task = PLAIN

    def looked_up(inputs):
        exact = task.log_predictive(inputs)
        keys, values = inputs[:, 0::2], inputs[:, 1::2] - 6
        last = 15 - values.sum(1, keepdim=True)  # the value that is left of 0 .. 5
        whole = torch.empty(len(inputs), 6, dtype=torch.long).scatter(1, keys, torch.cat([values, last], 1))
        never = held_out(whole)
        return torch.where(never[:, None, None], torch.full_like(exact, -math.log(6)), exact)

    record = examine(of(task, saying(task, looked_up)), task, Origin(task.title, 6, FEW), n=200, nulls=5)
    less = found(record, "posterior_memory", LESS)
    assert not any("a table of" in why for why in record.results["posterior"].warnings)  # of 20 sequences: useless
    assert less.value == pytest.approx(np.mean([math.log2(6 / (6 - m)) for m in range(6)]), abs=1e-6)
    assert less.verdict == "ruled out" and less.n == 400
    assert abs(found(record, "posterior_memory", "KL, seen").value) < 1e-6

    # A model that answers seen hypotheses no better than a trivial predictor shows nothing of its memory.
    def swapped(inputs):
        exact, seen = task.log_predictive(inputs), (looked_up(inputs) == task.log_predictive(inputs)).all(-1).all(-1)
        return torch.where(seen[:, None, None], -math.log(6.0), exact)

    record = examine(of(task, saying(task, swapped)), task, Origin(task.title, 6, FEW), n=200, nulls=5)
    assert record.unmeasured["posterior_memory"].startswith("skill over ")


def test_past_the_horizon_is_told_apart(small_failures):
    task, flat = PLAIN, -math.log(6)

    def to_the_horizon(inputs, mixed=0.0):
        exact = task.log_predictive(inputs)
        near = (exact.exp() * (1 - mixed) + mixed / 6).log()
        return torch.where(torch.arange(6)[:, None] < 4, near, flat)

    record = examine(of(task, saying(task, to_the_horizon)), task, Origin(task.title, 4, FEW), n=ENOUGH, nulls=5)
    assert verdicts(record)["posterior", KL] == "holds" and record.facts["horizon"] == 4
    owed = [math.log2(6 / (6 - m)) for m in range(6)]
    past = record.results["posterior_horizon"]
    np.testing.assert_allclose(past.arrays["kl"], [0] * 4 + owed[4:], atol=1e-6)
    assert past.ticks["query"] == (1, 2, 3, 4, 5, 6)
    assert [h.name for h in past.estimates] == ["KL past the horizon"]
    assert past.estimates[0].value == pytest.approx(np.mean(owed[4:]), abs=1e-6)
    assert "no ratio" in past.notes[1] and past.notes[0] == "the horizon is query 4"
    assert record.results["posterior"].arrays["kl"].shape == (4,)

    mixed = saying(task, lambda x: to_the_horizon(x, 0.3))
    record = examine(of(task, mixed), task, Origin("bijection:vocab=6,pairs=4", 4), n=100, nulls=5)
    within = []
    for m in range(4):
        p, q = 1 / (6 - m), 0.7 / (6 - m) + 0.05
        within.append(math.log2(p / q))
    ratio = found(record, "posterior_horizon", "first query past the horizon, over those within")
    assert ratio.value == pytest.approx(owed[4] / np.mean(within), rel=1e-5)
    assert "trained on bijection:vocab=6,pairs=4" in record.results["posterior"].notes
    assert "posterior_horizon" in examine(of(task, mixed), task, Origin(task.title, 5), n=20, nulls=2).results
    assert "posterior_horizon" not in examine(of(task, mixed), task, Origin(task.title, 6, FEW), n=20, nulls=2).results


def test_intervals_are_over_sequences():
    task = REPLACED
    record = examine(of(task, nearly(task)), task, Origin(task.title, 6, FEW), n=50, nulls=5)
    kl = grade(of(task, nearly(task)), task, 50, 0).own.kl

    def interval(x):
        return stats.t.interval(0.95, len(x) - 1, x.mean(), stats.sem(x))

    h = found(record, "posterior", KL)
    assert kl.mean(1).max() < 1 and (h.n, h.clusters, h.rule.counts) == (50, 50, "sequences")
    assert h.low == pytest.approx(interval(kl.mean(1))[0])
    # The other half of the error allows for failures that 50 sequences lack: see tests/test_rare_failures.py.
    usual = kl.mean() + stats.t.ppf(0.9875, 49) * stats.sem(kl.mean(1))
    assert h.high == pytest.approx(usual + 9 * (1 - 0.0125 ** (1 / 50)))
    np.testing.assert_allclose(record.results["posterior"].arrays["kl_interval"][3], interval(kl[:, 3]), atol=1e-9)
    seen = score_model(of(task, nearly(task)), task, task.sample(50, 0, "seen")).kl.mean(1)
    less = found(record, "posterior_memory", LESS)
    assert less.value == pytest.approx(kl.mean() - seen.mean())
    usual = stats.ttest_ind(kl.mean(1), seen, equal_var=False).confidence_interval(0.975)
    beyond_usual = 9 * (1 - 0.0125 ** (1 / 50))
    assert (less.low, less.high) == pytest.approx((usual.low - beyond_usual, usual.high + beyond_usual))


def test_what_is_shown_are_means_of_the_scores_within_the_horizon():
    task = REPLACED
    subject = of(task, nearly(task))
    record = examine(subject, task, Origin(task.title, 4, FEW), n=40, nulls=2)
    got, seen = grade(subject, task, 40, trained=4), grade(subject, task, 40, trained=4, split="seen")
    shown = {name: array for m in record.results.values() for name, array in m.arrays.items() if "kl" not in name}
    gap = got.own.gap[:, :4]
    tally = got.own.tally[:, :4].sum((0, 1))
    tally = tally[tally[:, 3] > 0]
    table = StateTable.filled(task, 20, 0).answers(got.batch.tokens.data)
    predictors = [got.own, *got.trivial.values(), score(task, got.batch, table)]
    for name, expected in {
        "entropy": got.own.entropy[:, :4].mean(0),
        "entropy_exact": got.own.exact[:, :4].mean(0),
        "error": np.abs(gap).mean(0),
        "tv": got.tv[:, :4].mean(0),
        "predictor": [one.kl[:, :4].mean() for one in predictors],
        "predictor_mae_abs": [np.abs(one.gap[:, :4]).mean() for one in predictors],
        "predictor_mae_mean": [np.abs(one.gap[:, :4].mean(0)).mean() for one in predictors],
        "predicted": tally[:, 0] / tally[:, 3],
        "exact": tally[:, 1] / tally[:, 3],
        "drawn": tally[:, 2] / tally[:, 3],
        "leaked": got.own.leaked[:, :4].mean(0),
        "accuracy": got.own.right[:, :4].mean(0),
        "accuracy_exact": got.exact.right[:, :4].mean(0),
        "ceiling": got.exact.right[:, :4].mean(),
        "held_out": got.own.kl[:, :4].mean(0),
        "seen": seen.own.kl[:, :4].mean(0),
    }.items():
        np.testing.assert_allclose(shown[name], expected, err_msg=name)
    off = np.abs(tally[:, 0] - tally[:, 1]).sum() / 160
    assert found(record, "posterior_calibration", "calibration error").value == pytest.approx(off)
    np.testing.assert_allclose(
        record.results["posterior_horizon"].arrays["kl_trivial"], got.trivial[got.best].kl.mean(0)
    )
    assert record.results["posterior"].ticks["query"] == (1, 2, 3, 4)
    for column, of_each in (("entropy", got.own.entropy), ("exact entropy", got.own.exact), ("KL", got.own.kl)):
        np.testing.assert_allclose(record.prompts[column], of_each[:, :4].mean(1), atol=1e-6)
    # Bands are those of untrained models in the same pipeline.
    untrained = [grade(of(task, noise(task, 1 + i)), task, 40, trained=4) for i in range(2)]
    kl = np.array([control.own.kl[:, :4].mean(0) for control in untrained])
    np.testing.assert_allclose(record.results["posterior"].arrays["kl_null"], np.stack([kl.min(0), kl.max(0)], 1))
    for name in ("mae_abs", "mae_mean"):
        h, each = found(record, "posterior", name), [getattr(control, name) for control in untrained]
        assert (h.null_low, h.null_high) == pytest.approx((min(each), max(each)))
    each = [grade(of(task, noise(task, 1 + i)), task, 40, split="seen", trained=4).kl for i in range(2)]
    h = found(record, "posterior_memory", "KL, seen")
    assert (h.null_low, h.null_high) == pytest.approx((min(each), max(each)))


def test_corrupted_labels_are_graded_against_both_answers(small_failures):
    task, p = PLAIN, 0.3
    says = saying(task, lambda x: ((1 - p) * task.log_predictive(x).exp() + p / 6).log())
    told = Origin(task.title, 6, {"training": {"corrupt": p}, "sequences": 20})
    record = examine(of(task, says), task, told, n=1400, nulls=2)  # more: Holm corrects over claims that fail, too
    words = verdicts(record)
    assert words["posterior", KL] == "ruled out" and words["posterior_mixture", "KL to the mixture"] == "holds"
    assert words["posterior_mixture", f"{SKILL}, mixture"] == "holds" and words["posterior_memory", LESS] == "holds"
    owed = np.mean([math.log2(1 / (6 - m) / ((1 - p) / (6 - m) + p / 6)) for m in range(6)])
    assert found(record, "posterior", KL).value == pytest.approx(owed, abs=1e-6)
    # A table of many such sequences answers as well: then held-out hypotheses say nothing about memory.
    many = replace(told, facts={"training": {"corrupt": p}, "sequences": 100_000})
    lacking = examine(of(task, says), task, many, n=100, nulls=2).unmeasured
    assert "memorisable: a table of 100,000" in lacking["posterior_memory"]
    # What was drawn is drawn again too: frequencies agree with the mixture.
    arrays = record.results["posterior_calibration"].arrays
    assert np.abs(arrays["drawn"] - arrays["predicted"])[arrays["count"] > 300].max() < 0.05
    np.testing.assert_allclose(arrays["exact"], arrays["predicted"], atol=1e-6)
    assert record.results["posterior_mixture"].title == "Distance to the mixture of the training targets"
    assert "2^9.5 hypotheses; training drew 20 sequences; the model has 1 parameters" in record.facts["sizes"]
    # The labels of seen sequences are corrupted too, and so are those that untrained controls answer.
    assert abs(found(record, "posterior_memory", "KL, seen").value) < 1e-6
    untrained = [grade(of(task, noise(task, 1 + i)), task, 1400, corrupt=p).own.tally.sum((0, 1)) for i in range(2)]
    errors = [np.abs(one[:, 0] - one[:, 1]).sum() / 8400 for one in untrained]
    h = found(record, "posterior_calibration", "calibration error")
    assert (h.null_low, h.null_high) == pytest.approx((min(errors), max(errors)))
    # Trivial predictors are of corrupted labels too: the bag of values is exact for these as it is for the others.
    assert grade(of(task, says), task, 50, corrupt=p).as_exact == ("bag of values",)
    names = [h.name for m in record.results.values() for h in m.estimates]
    assert len(names) == len(set(names))
    lines = list(table(record))
    assert next(filter(None, lines)).split()[0] == "posterior" and any("mixture" in line for line in lines)


def test_where_every_trivial_predictor_is_exact_there_is_nothing_to_grade():
    task = Coin(steps=1)
    record = examine(of(task, saying(task, task.log_predictive)), task, Origin(task.title, 1), n=20, nulls=5)
    assert "the position alone gives the answer; nothing is left to infer" in record.unmeasured["posterior"]
    assert "posterior_calibration" in record.results


def test_a_look_up_of_the_last_symbol_does_not_infer(small_failures):
    """On the sticky ring of three symbols the neighbours have weight 1 and the symbol .3, and it stays with .3 more."""
    task = Markov(symbols=3, steps=4, fixed=True, stay=0.3)
    table = (0.7 * torch.ones(3, 3).double().fill_diagonal_(0.3) / 2.3 + 0.3 * torch.eye(3)).log()
    record = examine(of(task, saying(task, lambda rows: table[rows])), task, Origin(task.title, 4), n=ENOUGH, nulls=5)
    assert verdicts(record) | {("posterior", KL): "holds"} == verdicts(record)
    measured = record.results["posterior"]
    assert SKILL not in [h.name for h in measured.estimates] and "last observation alone" in measured.unmeasured[SKILL]
    assert not any("next best" in warning for warning in record.warnings)
    unknown = Markov(symbols=3, steps=4, fixed=False)
    record = examine(of(unknown, uniform(unknown)), unknown, Origin(unknown.title, 4), n=400, nulls=5)
    assert found(record, "posterior", SKILL).claim


def test_standardised_residuals_tell_a_model_that_is_too_sure(small_failures):
    task = Mean()
    record = examine(of(task, lambda rows: task.log_predictive(rows).float()), task, Origin("x", 4), n=1250, nulls=5)
    assert verdicts(record)["posterior", KL] == "holds" and "never trained on this task, but on x" in record.warnings
    off = "|rms of standardised residuals - 1|"
    assert found(record, "posterior_calibration", off).value < 0.06
    sure = of(task, lambda rows: (task.log_predictive(rows) - torch.tensor([0, math.log(4)])).float())
    record = examine(sure, task, Origin(), n=1000, nulls=5)
    arrays = record.results["posterior_calibration"].arrays
    np.testing.assert_allclose(arrays["rms"], 2 * arrays["rms_exact"], rtol=1e-5)
    own = 2 * math.sqrt(np.square(arrays["rms_exact"]).mean())
    assert own == pytest.approx(2, abs=0.1) and found(record, "posterior_calibration", off).value == pytest.approx(
        own - 1
    )
    assert "never trained on this task: it has no task.json" in record.warnings
    assert "a continuum of hypotheses" in record.facts["sizes"] and "is not known" in record.facts["sizes"]
    assert page([record])


def test_without_enough_sequences_for_rare_failures_the_claim_is_open_and_says_how_many():
    task = REPLACED
    record = examine(of(task, saying(task, task.log_predictive)), task, Origin(task.title, 6, FEW), n=200, nulls=5)
    got = found(record, "posterior", KL)
    # Clopper and Pearson: with this share of failures, 200 sequences have none with probability .0125.
    assert got.high == pytest.approx(9 * (1 - 0.0125 ** (1 / 200)), rel=1e-3) and abs(got.value) < 1e-6
    assert got.verdict == "open" and "needs 4,566 clusters" in got.why


def test_skill_over_95_per_cent_needs_the_sequences_that_exclude_rare_failures():
    """10 bits in a share p of sequences take 10 p / .14 away: n falls with the trivial predictor's bits."""
    few = skill("posterior", SKILL, np.zeros(1000), np.full(1000, 0.14))
    assert few.p > 0.0125 and few.needed == math.ceil(math.log(0.00625) / math.log(1 - 0.007 / 9))
    enough = few.needed
    assert skill("posterior", SKILL, np.zeros(enough), np.full(enough, 0.14)).p < 0.0125
    assert skill("posterior", SKILL, np.zeros(enough - 1), np.full(enough - 1, 0.14)).p > 0.0125
    trivial = np.random.default_rng(1).gamma(2, 0.07, 10_000)
    h = skill("posterior", SKILL, 0.01 * trivial, trivial)
    assert h.p < 0.0125 and h.low < 0.99 < h.high


def test_resolution_is_that_of_maps_fitted_on_other_sequences():
    """By scipy's minimiser, fold by fold; the intervals of both numbers by deleting one sequence at a time."""
    task, n = Coin(steps=4, prior="beta:1,1"), 30
    noisy = noise(task, 4, 2.0)
    model = of(task, saying(task, lambda x: (1.5 * task.log_predictive(x) + noisy(x)[..., :2]).log_softmax(-1)))
    record = examine(model, task, Origin(), n=n, nulls=1)
    evaluation = Evaluation(task, n, 0, task.test_split, task.trained_queries)
    forms = evaluation.exact, read_answers(model, task, evaluation.batch)
    exact, z = (form[..., :2].double().log_softmax(-1).numpy() for form in forms)
    p, z, left = np.exp(exact), z - z.mean(-1, keepdims=True), np.empty(n)
    for fold in range(5):
        test = np.arange(n) % 5 == fold

        def loss(a, c, rows):
            return (p[rows] * (exact[rows] - log_softmax(a * z[rows] + np.array([c, -c]), axis=-1))).sum(-1)

        fitted = optimize.minimize(lambda ac, rest=~test: loss(*ac, rest).mean(), [0.0, 0.0], tol=1e-10).x
        left[test] = loss(*fitted, test).mean(1)
    even = (p * (exact + np.log(2))).sum(-1).mean(1)
    got = found(record, "posterior", "resolution")
    assert got.value == pytest.approx(1 - left.sum() / even.sum(), abs=2e-3) and got.n == n
    e = exact - exact.mean(-1, keepdims=True)

    def slope(rows):
        return LinearRegression().fit(e[rows][..., :1].reshape(-1, 1), z[rows][..., 0].ravel()).coef_[0]

    weights = np.array([slope(np.arange(n) != i) for i in range(n)])
    error = stats.t.ppf(0.975, n - 1) * np.sqrt((n - 1) / n * np.square(weights - weights.mean()).sum())
    weight = found(record, "posterior", "weight of evidence")
    assert (weight.high - weight.low) / 2 == pytest.approx(error, rel=0.1)
