"""Scores of answers against the exact posterior, by Bayes' rule in plain Python, loops and quadrature."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from llmgeom.errors import UserError
from llmgeom.model.edits import Edit
from llmgeom.model.model import Model
from llmgeom.probes.posterior.grading import grade
from llmgeom.wind_tunnels.models.architectures import build
from llmgeom.wind_tunnels.worlds.bijection import Bijection
from llmgeom.wind_tunnels.worlds.coin import Coin
from llmgeom.world import Categorical, Sequences, World, held_out
from tests.refusals import refused
from tests.written_answers import PLAIN, REPLACED, Mean, noise, of, uniform


def bijection_by_hand(inputs, task):
    """[query][value] probabilities: one sequence, read pair by pair."""
    answers, known = [], {}
    for t in range(task.pairs):
        key = inputs[2 * t]
        left = [v for v in range(task.vocab) if v not in known.values()]
        if key in known:
            answers.append([float(v == known[key]) for v in range(task.vocab)])
        else:
            answers.append([(v in left) / len(left) for v in range(task.vocab)])
        if t + 1 < task.pairs:
            known[key] = inputs[2 * t + 1] - task.vocab
    return answers


def test_every_score_of_a_model_that_leaks_is_what_loops_say():
    task = REPLACED
    subject = of(task, noise(task, 3, spread=2.0))
    got = grade(subject, task, 40, seed=5, trained=4)
    inputs, targets = got.batch.inputs.ids, got.batch.target.tolist()
    logits = noise(task, 3, 2.0)(inputs).double().numpy()
    gaps, model_kl, model_tv, right, leaks = (np.zeros((40, 6)) for _ in range(5))
    tally = np.zeros((10, 4))
    for s, ids in enumerate(inputs.tolist()):
        for q, p in enumerate(bijection_by_hand(ids, task)):
            whole = np.exp(logits[s, q]) / np.exp(logits[s, q]).sum()
            said, leaked = whole[6:12], whole[:6].sum()
            model_kl[s, q] = sum(a * math.log2(a / b) for a, b in zip(p, said, strict=True) if a > 0)
            model_tv[s, q] = (np.abs(np.array(p) - said).sum() + leaked) / 2
            h = -sum(b * math.log2(b) for b in [*said, leaked])
            gaps[s, q] = h - -sum(a * math.log2(a) for a in p if a > 0)
            right[s, q], leaks[s, q] = said.argmax() == targets[s][q], leaked
            for v in range(6):
                if q < 4:
                    tally[min(int(said[v] * 10), 9)] += (said[v], p[v], targets[s][q] == v, 1)
    np.testing.assert_allclose(got.own.kl, model_kl, atol=2e-6)
    np.testing.assert_allclose(got.tv, model_tv, atol=1e-6)
    np.testing.assert_allclose(got.own.gap, gaps, atol=2e-6)
    np.testing.assert_allclose(got.own.leaked, leaks, atol=1e-6)
    assert (got.own.right == right).all()
    # Two float32 probabilities may fall on either side of a tenth's edge; none does here.
    np.testing.assert_allclose(got.own.tally[:, :4].sum((0, 1)), tally, atol=1e-4)
    assert got.kl == pytest.approx(model_kl[:, :4].mean(), abs=1e-6)
    assert got.mae_abs == pytest.approx(np.mean([abs(g) for g in gaps[:, :4].ravel()]), abs=1e-6)
    assert got.mae_mean == pytest.approx(np.mean([abs(gaps[:, q].mean()) for q in range(4)]), abs=1e-6)
    assert got.mae_mean < got.mae_abs


def test_trivial_predictors_are_fitted_to_other_sequences_and_scored_on_these():
    task = REPLACED
    got = grade(of(task, uniform(task)), task, 300, seed=2, trained=4)
    exact = np.array([bijection_by_hand(ids, task) for ids in got.batch.inputs.ids.tolist()])

    def kl(q):
        return np.where(exact > 0, exact * np.log2(np.where(exact > 0, exact, 1) / q), 0).sum(-1)

    np.testing.assert_allclose(got.trivial["uniform"].kl, kl(np.full(6, 1 / 6)), atol=1e-6)
    # Fitted to the graded sequences themselves a constant is nearer to them than one fitted to others, by little.
    for name, fitted in (("constant", exact[:, :4].mean((0, 1))), ("position", exact.mean(0))):
        here = got.trivial[name].kl[:, :4].mean()
        own = kl(fitted)[:, :4].mean()
        assert own < here < own + 0.03
    own = {"memoryless", "bag of values"}
    assert got.excluded == () and set(got.trivial) == {"uniform", "constant", "position", *own}
    each = {name: one.kl[:, :4].mean() for name, one in got.trivial.items()}
    assert each[got.best] == min(each.values())
    assert got.skill == pytest.approx(1 - got.kl / min(each.values()))


def test_a_mean_over_few_sequences_rules_no_outcome_out():
    # At the last of six keys one value is left. Five sequences cannot show all six; the uniform answer is the sixth.
    got = grade(of(PLAIN, uniform(PLAIN)), PLAIN, 5, seed=0)
    shown = {round(-math.log2((count + 1 / 6) / 6), 6) for count in range(6)}
    last = set(got.trivial["position"].kl[:, 5].round(6).tolist())
    assert last <= shown and round(math.log2(36), 6) in last


@pytest.mark.parametrize(("flips", "names"), [(2, ("memoryless",)), (3, ())])
def test_a_predictor_is_exact_or_it_is_not(flips, names):
    task = Coin(steps=flips)  # the last of one flip is all of them; of two it is not
    got = grade(of(task, uniform(task)), task, 200)
    assert got.as_exact == names and got.trivial["memoryless"].kl.mean() < 0.1


def test_it_is_held_out_hypotheses_that_are_graded():
    task = PLAIN  # whose whole map can be read off every sequence
    batch = grade(of(task, uniform(task)), task, 50, seed=1).batch
    for ids, target in zip(batch.inputs.ids.tolist(), batch.target.tolist(), strict=True):
        values = dict(zip(ids[0::2], target, strict=True))
        assert held_out(torch.tensor([[values[key] for key in range(6)]])).item()
    assert batch.source["split"] == "held-out"


def test_real_answers_are_no_mixture_of_labels():
    with refused(UserError, "real"):
        grade(of(Mean(), Mean().log_predictive), Mean(), 5, corrupt=0.3)


def test_real_answers_are_graded_by_quadrature():
    task = Mean()
    shifted = of(task, lambda rows: (task.log_predictive(rows) + torch.tensor([0.4, -0.3])).float())
    got = grade(shifted, task, 5, seed=0)
    for q in range(4):
        m, log_v = got.batch.posterior.predictive[0, q].tolist()
        p, o = stats.norm(m, math.exp(log_v / 2)), stats.norm(m + 0.4, math.exp((log_v - 0.3) / 2))
        ends = (m - 14, m + 14)
        kl = integrate.quad(lambda x, p=p, o=o: p.pdf(x) * (p.logpdf(x) - o.logpdf(x)), *ends)[0] / math.log(2)
        tv = integrate.quad(lambda x, p=p, o=o: abs(p.pdf(x) - o.pdf(x)) / 2, *ends, limit=200)[0]
        assert got.own.kl[0, q] == pytest.approx(kl, abs=1e-5) and got.tv[0, q] == pytest.approx(tv, abs=1e-4)
        assert got.own.entropy[0, q] == pytest.approx(o.entropy() / math.log(2), abs=1e-5)
        z = (float(got.batch.target[0, q]) - o.mean()) / o.std()
        assert got.own.residual[0, q] == pytest.approx(z, abs=1e-4)
    assert (got.mae_abs, got.mae_mean) == pytest.approx((0.15 / math.log(2),) * 2, abs=1e-5)
    assert set(got.trivial) == {"constant", "position"}


def test_logits_that_are_not_finite_are_named_with_their_sequence():
    task = PLAIN
    bad = task.sample(138, 0, "held-out").inputs.ids[129]

    def broken(inputs):
        logits = torch.zeros(len(inputs), 6, 12)
        logits[(inputs == bad).all(1), 2, 7] = float("nan")
        return logits

    with refused(UserError, "fake", "prompt 130"):
        grade(of(task, broken), task, 138)


def test_an_answer_infinitely_far_is_refused():
    task = Mean()
    with refused(UserError, "fake", "query 1", "sequence 1"):
        grade(of(task, lambda rows: torch.full((len(rows), 4, 2), -2000.0)), task, 10)


def test_what_cannot_be_read_is_refused():
    small = of(Bijection(vocab=4, pairs=4), uniform(Bijection(vocab=4, pairs=4)))
    with refused(UserError, "fake", 8, "bijection:vocab=6,pairs=6", 12, "--task"):
        grade(small, PLAIN, 10)
    edit = Edit("value", lambda x, *_: x, (0,))
    with refused(UserError, "fake", "edited"):
        grade(replace(of(PLAIN, uniform(PLAIN)), edits=(edit,)), PLAIN, 10)


@dataclass(frozen=True)
class Turns(World):
    """The first answer is mostly 0, the second mostly 1, whatever else."""

    memorisable = "there is nothing to infer"
    vocabulary = 2
    length = 2
    query = (0, 1)
    answers = Categorical((0, 1))

    def draw(self, hypothesis, generator, training=False):
        return Sequences(*torch.randint(2, (2, len(hypothesis), 2), generator=generator))

    def log_predictive(self, inputs):
        return torch.tensor([[0.9, 0.1], [0.2, 0.8]], dtype=torch.float64).log().expand(len(inputs), 2, 2)


@pytest.mark.parametrize(("trained", "mean"), [(2, 0.55), (1, 0.9)])
def test_a_position_has_its_own_mean_and_a_constant_that_of_the_trained_queries(trained, mean):
    task = Turns()
    got = grade(of(task, uniform(task)), task, 1000, trained=trained)
    found = {name: one.kl.mean(0) for name, one in got.trivial.items()}
    np.testing.assert_allclose(found["position"], 0, atol=1e-6)
    kl = [sum(a * math.log2(a / b) for a, b in ((p, mean), (1 - p, 1 - mean))) for p in (0.9, 0.2)]
    np.testing.assert_allclose(found["constant"], kl, atol=1e-9)
    assert got.as_exact == (("position",) if trained == 2 else ("position", "constant"))
    assert grade(of(task, uniform(task)), task, 10, trained=99).trained == 2


def test_rows_are_read_in_the_precision_of_the_weights():
    task = Mean()
    model = build("gpt2", vocabulary=2, length=4, features=1, width=16, layers=1, heads=2, seed=0)
    assert np.isfinite(grade(Model.of(model.to(torch.bfloat16)), task, 10).own.kl).all()
