"""Grading: judged by Bayes' rule in plain Python, scipy, and models whose answers are written down."""

from __future__ import annotations

import json
import math
import zlib
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from scipy import integrate, special, stats

from llmgeom import wind_tunnels
from llmgeom.bench.grading import Origin, question
from llmgeom.cli import main
from llmgeom.commands.grade import RunConfig, perform, table
from llmgeom.errors import UserError
from llmgeom.model.edits import Edit
from llmgeom.model.layers import Block
from llmgeom.model.subject import Subject
from llmgeom.probes.posterior.answers import grade, score_model
from llmgeom.probes.posterior.grading import StateTable
from llmgeom.probes.posterior.results import divergence
from llmgeom.probes.posterior.scores import score
from llmgeom.record import Record
from llmgeom.reports import page
from llmgeom.task import Categorical, Gaussian, Sequences, Task, held_out
from llmgeom.wind_tunnels import models
from llmgeom.wind_tunnels.checkpoint import save_model
from llmgeom.wind_tunnels.tasks.bijection import Bijection
from llmgeom.wind_tunnels.tasks.coin import Coin
from llmgeom.wind_tunnels.training import train
from llmgeom.wind_tunnels.training_config import Training
from tests.refusals import refused
from tests.words import beyond

NEVER = -1e9  # a logit of probability 0


class Written(torch.nn.Module):
    """A model whose logits at the queries are a function of its inputs."""

    def __init__(self, task, logits):
        super().__init__()
        self.task, self.answer, self.weight = task, logits, torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids=None, rows=None, use_cache=True, logits_to_keep=None):
        assert not use_cache and tuple(logits_to_keep.tolist()) == self.task.query
        return SimpleNamespace(logits=self.answer(rows if input_ids is None else input_ids))


@dataclass(frozen=True, eq=False)
class Answers:
    """A forward pass without layers: `Written` gives the logits of the queried rows."""

    model: Written
    backend: ClassVar[str] = "transformers"
    remedy: ClassVar[str] = ""

    def attached(self):
        return nullcontext()

    def logits(self, inputs):
        return self.model.answer(inputs)

    def run(self, recorder, inputs):
        query, (prompt, position) = self.model.task.query, recorder.rows
        place = [query.index(at) if at in query else 0 for at in position.tolist()]
        return self.logits(inputs)[prompt, place]


@dataclass(frozen=True, eq=False)
class Fake(Subject):
    def untrained(self, seed):
        return of(self.model.task, noise(self.model.task, seed), "untrained")

    def control(self, seed):
        return nullcontext(self.untrained(seed))


def of(task, logits, name="fake"):
    facts = {"name": name, "vocabulary": task.vocabulary, "features": task.features, "positions": None}
    sizes = dict.fromkeys(("parameters", "layers", "heads", "kv_heads", "head_dim", "d_model"), 1)
    layer = Block(torch.nn.Identity(), None, None, None)
    model = Written(task, logits)
    return Fake(model, None, name, {**facts, **sizes, "dtype": "float32", "device": "cpu"}, (layer,), Answers(model))


def noise(task, seed, spread=1.0):
    """Normal logits that depend on the sequence and the seed, whatever runs with it: SplitMix64 of a checksum."""
    size = len(task.query) * task.vocabulary

    def logits(inputs):
        rows = [zlib.crc32(one.tobytes()) + 2**32 * seed for one in inputs.numpy()]
        with np.errstate(over="ignore"):
            z = np.array(rows, np.uint64)[:, None] * np.uint64(0xBF58476D1CE4E5B9)
            z = z + np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        even = ((z ^ (z >> np.uint64(31))) >> np.uint64(11)).astype(float) * 2.0**-53 + 2.0**-54
        drawn = torch.from_numpy(spread * special.ndtri(even)).float()
        return drawn.view(len(inputs), len(task.query), task.vocabulary)

    return logits


def saying(task, predictive):
    """Logits of an answer [sequence query outcome] of log-probabilities, and nothing on other tokens."""

    def logits(inputs):
        log_p = predictive(inputs)
        whole = torch.full((*log_p.shape[:2], task.vocabulary), NEVER, dtype=torch.float64)
        whole[..., list(task.answers.tokens)] = log_p.clamp(min=NEVER)
        return whole.float()

    return logits


def uniform(task):
    return saying(task, lambda x: torch.zeros(len(x), len(task.query), len(task.answers.tokens), dtype=torch.float64))


def nearly(task, seed=4):
    """Answers near the exact ones, with noise that depends on the sequence."""
    first, last = task.answers.tokens[0], task.answers.tokens[-1] + 1
    noisy = noise(task, seed, 0.2)
    return saying(task, lambda x: (0.94 * task.log_predictive(x).exp() + 0.01).log() + noisy(x)[..., first:last])


def examine(subject, task, origin, **options):
    return question(subject, task, origin, **options).record(subject)


def verdicts(record):
    return {(probe, h.name): h.verdict for probe, m in record.results.items() for h in m.estimates}


def found(record, probe, name):
    return next(h for h in record.results[probe].estimates if h.name == name)


ENOUGH = 4700  # an exact model holds both claims about KL from 4,566 sequences on
KL, SKILL, LESS = "KL to the posterior", "skill over the best trivial predictor", "KL, held-out less seen"
REPLACED = Bijection(vocab=6, pairs=6, replacement=True)
PLAIN = Bijection(vocab=6, pairs=6)
COIN = Coin(flips=5)
FEW = {"sequences": 20}  # a table of 20 training sequences answers nothing


# ---- by plain Python ------------------------------------------------------------------------------------------------


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


def test_no_constant_is_nearer_than_the_mean_of_the_exact_answers():
    task = Coin(flips=6, prior="beta:1,6")
    got = grade(of(task, uniform(task)), task, 4000, seed=0)
    exact = got.batch.posterior.predictive.exp().numpy()[..., 0]
    grid = np.linspace(0.02, 0.5, 481)
    each = [(exact * np.log2(exact / q) + (1 - exact) * np.log2((1 - exact) / (1 - q))).mean() for q in grid]
    assert grid[np.argmin(each)] == pytest.approx(1 / 7, abs=0.01)
    assert got.trivial["constant"].kl.mean() == pytest.approx(min(each), abs=2e-3)


def test_a_mean_over_few_sequences_rules_no_outcome_out():
    # At the last of six keys one value is left. Five sequences cannot show all six; the uniform answer is the sixth.
    got = grade(of(PLAIN, uniform(PLAIN)), PLAIN, 5, seed=0)
    shown = {round(-math.log2((count + 1 / 6) / 6), 6) for count in range(6)}
    last = set(got.trivial["position"].kl[:, 5].round(6).tolist())
    assert last <= shown and round(math.log2(36), 6) in last


@dataclass(frozen=True)
class Turns(Task):
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


@pytest.mark.parametrize(("flips", "names"), [(2, ("memoryless",)), (3, ())])
def test_a_predictor_is_exact_or_it_is_not(flips, names):
    task = Coin(flips=flips)  # the last of one flip is all of them; of two it is not
    got = grade(of(task, uniform(task)), task, 200)
    assert got.as_exact == names and got.trivial["memoryless"].kl.mean() < 0.1


def test_it_is_held_out_hypotheses_that_are_graded():
    task = PLAIN  # whose whole map can be read off every sequence
    batch = grade(of(task, uniform(task)), task, 50, seed=1).batch
    for ids, target in zip(batch.inputs.ids.tolist(), batch.target.tolist(), strict=True):
        values = dict(zip(ids[0::2], target, strict=True))
        assert held_out(torch.tensor([[values[key] for key in range(6)]])).item()
    assert batch.source["split"] == "held-out"


# ---- models that are known ------------------------------------------------------------------------------------------


def test_the_posterior_itself_passes_everything():
    task = REPLACED
    record = examine(of(task, saying(task, task.log_predictive)), task, Origin(task.title, 6, FEW), n=ENOUGH, nulls=20)
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
    assert np.abs(arrays["exact"] - arrays["drawn"])[arrays["count"] > 500].max() < 0.06
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
    assert any(w.startswith("bag of values is already exact") for w in record.warnings)
    assert len(record.results["posterior_calibration"].arrays["predicted"]) == 1  # nine of the tenths are empty
    assert page([record])


def test_errors_of_entropy_do_not_see_a_model_that_is_certain_of_the_wrong_thing():
    task = Coin(flips=8, prior="beta:1,1")
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
    assert record.warnings[0].startswith("memorisable: the answer depends on the numbers of heads")


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
    assert less.value == pytest.approx(np.mean([math.log2(6 / (6 - m)) for m in range(6)]), abs=1e-6)
    assert less.verdict == "ruled out" and less.n == 400
    assert abs(found(record, "posterior_memory", "KL, seen").value) < 1e-6

    # A model that answers seen hypotheses no better than a trivial predictor shows nothing of its memory.
    def swapped(inputs):
        exact, seen = task.log_predictive(inputs), (looked_up(inputs) == task.log_predictive(inputs)).all(-1).all(-1)
        return torch.where(seen[:, None, None], -math.log(6.0), exact)

    record = examine(of(task, saying(task, swapped)), task, Origin(task.title, 6, FEW), n=200, nulls=5)
    assert record.unmeasured["posterior_memory"].startswith("skill over ")


def test_past_the_horizon_is_told_apart():
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
    assert kl.mean(1).max() < 1 and (h.n, h.clusters, h.counts) == (50, 50, "sequences")
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
    h = found(record, "posterior", KL)
    assert h.p > 0.5
    untrained = [grade(of(task, noise(task, 1 + i)), task, 40, split="seen", trained=4).kl for i in range(2)]
    h = found(record, "posterior_memory", "KL, seen")
    assert (h.null_low, h.null_high) == pytest.approx((min(untrained), max(untrained)))


def test_the_band_is_that_of_the_twins_in_the_same_pipeline():
    task = REPLACED
    record = examine(of(task, uniform(task)), task, Origin(task.title, 6, FEW), n=30, seed=7, nulls=5)
    untrained = [grade(of(task, noise(task, 8 + i)), task, 30, 7) for i in range(5)]
    band = record.results["posterior"].arrays["kl_null"]
    kl = np.array([control.own.kl.mean(0) for control in untrained])
    np.testing.assert_allclose(band, np.stack([kl.min(0), kl.max(0)], 1))
    for name in ("mae_abs", "mae_mean"):
        h, each = found(record, "posterior", name), [getattr(control, name) for control in untrained]
        assert (h.null_low, h.null_high) == pytest.approx((min(each), max(each)))
    assert record.warnings == ("only 5 draws of each control, too few to know how much they vary; 20 are the default",)


def test_corrupted_labels_are_graded_against_both_answers():
    task, p = PLAIN, 0.3
    says = saying(task, lambda x: ((1 - p) * task.log_predictive(x).exp() + p / 6).log())
    told = Origin(task.title, 6, {"training": {"corrupt": p}, "sequences": 20})
    record = examine(of(task, says), task, told, n=6000, nulls=2)  # more: Holm corrects over claims that fail, too
    words = verdicts(record)
    assert words["posterior", KL] == "ruled out" and words["posterior_mixture", "KL to the mixture"] == "holds"
    assert words["posterior_mixture", f"{SKILL}, mixture"] == "holds" and words["posterior_memory", LESS] == "holds"
    owed = np.mean([math.log2(1 / (6 - m) / ((1 - p) / (6 - m) + p / 6)) for m in range(6)])
    assert found(record, "posterior", KL).value == pytest.approx(owed, abs=1e-6)
    # What was drawn is drawn again too: frequencies agree with the mixture.
    arrays = record.results["posterior_calibration"].arrays
    assert np.abs(arrays["drawn"] - arrays["predicted"])[arrays["count"] > 300].max() < 0.05
    np.testing.assert_allclose(arrays["exact"], arrays["predicted"], atol=1e-6)
    assert record.results["posterior_mixture"].title == "Distance to the mixture of the training targets"
    assert "2^9.5 hypotheses; training drew 20 sequences; the model has 1 parameters" in record.facts["sizes"]
    # So are the seen ones, and what the untrained controls are held against.
    assert abs(found(record, "posterior_memory", "KL, seen").value) < 1e-6
    untrained = [grade(of(task, noise(task, 1 + i)), task, 6000, corrupt=p).own.tally.sum((0, 1)) for i in range(2)]
    errors = [np.abs(one[:, 0] - one[:, 1]).sum() / 36000 for one in untrained]
    h = found(record, "posterior_calibration", "calibration error")
    assert (h.null_low, h.null_high) == pytest.approx((min(errors), max(errors)))
    # Trivial predictors are of corrupted labels too: the bag of values is exact for these as it is for the others.
    assert grade(of(task, says), task, 50, corrupt=p).as_exact == ("bag of values",)
    names = [h.name for m in record.results.values() for h in m.estimates]
    assert len(names) == len(set(names))
    lines = list(table(record))
    assert next(filter(None, lines)).split()[0] == "posterior" and any("mixture" in line for line in lines)


def test_where_every_trivial_predictor_is_exact_there_is_nothing_to_grade():
    task = Coin(flips=1)
    record = examine(of(task, saying(task, task.log_predictive)), task, Origin(task.title, 1), n=20, nulls=20)
    assert record.unmeasured["posterior"] == "coin:flips=1: every trivial predictor is exact; nothing is left to infer"
    assert "posterior_calibration" in record.results


# ---- real numbers ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mean(Task):
    """Values m + noise, both standard normal: after k of them the next is N(sum / (k + 1), 1 + 1 / (k + 1))."""

    vocabulary = 2
    features = 1
    length = 4
    query = (0, 1, 2, 3)
    answers = Gaussian()

    def hypothesis(self, n, generator):
        return torch.randn(n, 1, generator=generator)

    def split_key(self, hypothesis):
        return (hypothesis * 1000).long()

    def draw(self, hypothesis, generator, training=False):
        y = hypothesis + torch.randn(len(hypothesis), 4, generator=generator)
        return Sequences(torch.nn.functional.pad(y[:, :3], (1, 0))[..., None], y)

    def log_predictive(self, inputs):
        k = torch.arange(1, 5).double()
        return torch.stack([inputs[..., 0].double().cumsum(1) / k, (1 + 1 / k).log().expand(len(inputs), 4)], -1)


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


def test_rows_are_read_in_the_precision_of_the_weights():
    task = Mean()
    model = models.build("gpt2", vocabulary=2, length=4, features=1, width=16, layers=1, heads=2, seed=0)
    assert np.isfinite(grade(Subject.of(model.to(torch.bfloat16)), task, 10).own.kl).all()


def test_standardised_residuals_tell_a_model_that_is_too_sure():
    task = Mean()
    record = examine(of(task, lambda rows: task.log_predictive(rows).float()), task, Origin("x", 4), n=ENOUGH, nulls=5)
    assert verdicts(record)["posterior", KL] == "holds" and "never trained on this task, but on x" in record.warnings
    off = "|rms of standardised residuals - 1|"
    assert found(record, "posterior_calibration", off).value < 0.03
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


# ---- refusals -------------------------------------------------------------------------------------------------------


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
    edit = Edit("value", (0,), lambda x, *_: x)
    with refused(UserError, "fake", "edited"):
        grade(replace(of(PLAIN, uniform(PLAIN)), edits=(edit,)), PLAIN, 10)


# ---- a model that was trained ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tunnel(tmp_path_factory):
    """A one-layer model on the bijection, 250 steps."""
    from llmgeom.wind_tunnels import models

    def build(arch, *, vocabulary, length, features=0, width=64, layers=2, heads=4, seed=0):
        config = transformers.GPTNeoXConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            max_position_embeddings=4 * length,
            bos_token_id=None,
            eos_token_id=None,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return transformers.AutoModelForCausalLM.from_config(config)

    out = tmp_path_factory.mktemp("tunnel") / "model"
    with pytest.MonkeyPatch.context() as patch:
        if not hasattr(models, "build"):
            patch.setattr(models, "build", build, raising=False)
        train(Training("bijection", width=32, layers=1, steps=250, batch=64, lr="1e-2", snapshots=2), out, "cpu")
    return out


def test_a_trained_model_is_graded_from_its_folder(tunnel, tmp_path):
    out, record = perform(RunConfig(model=str(tunnel), n=200, nulls=20, out=str(tmp_path / "run")))
    assert found(record, "posterior", SKILL).value > 0.9
    assert 0.001 < found(record, "posterior", KL).value < 0.1
    assert beyond(found(record, "posterior", "mae_abs")) == "yes"
    assert record.source["name"] == "bijection" and record.facts["trained on"] == "bijection"
    assert "training drew 16,000 sequences" in record.facts["sizes"]
    assert record.facts["command"] == f"llmgeom grade --model {tunnel} --n 200"
    assert (out / "report.html").exists()
    again = perform(RunConfig(model=str(tunnel), n=200, nulls=20, out=str(tmp_path / "again")))[1]
    for probe, measured in Record.load(out).results.items():
        for name, array in measured.arrays.items():
            np.testing.assert_array_equal(array, again.results[probe].arrays[name])
    # Independently: the whole vocabulary's softmax of a plain forward pass.
    model = transformers.AutoModelForCausalLM.from_pretrained(tunnel)
    batch = wind_tunnels.load_task("bijection").sample(200, 0, "held-out")
    with torch.no_grad():
        log_q = model(batch.inputs.ids).logits[:, 0::2, 8:].double() - model(batch.inputs.ids).logits[
            :, 0::2
        ].double().logsumexp(-1, keepdim=True)
    p = batch.posterior.predictive.exp()
    kl = torch.where(p > 0, p * (p.clamp(min=1e-30).log() - log_q), 0).sum(-1) / math.log(2)
    assert found(record, "posterior", KL).value == pytest.approx(kl.mean().item(), abs=1e-5)


def test_the_first_snapshot_says_that_it_is_untrained(tunnel, tmp_path):
    asked = RunConfig(model=str(tunnel / "snapshots" / "step0"), n=50, nulls=2, out=str(tmp_path / "run"))
    record = perform(asked)[1]
    assert "untrained: the weights of step 0" in record.warnings
    assert found(record, "posterior", KL).verdict == found(record, "posterior", SKILL).verdict == "ruled out"


def test_longer_sequences_of_the_same_task_have_a_horizon(tunnel, tmp_path):
    asked = RunConfig(model=str(tunnel), task="bijection:pairs=8", n=50, nulls=2, out=str(tmp_path / "run"))
    record = perform(asked)[1]
    assert record.facts["horizon"] == 7 and len(record.results["posterior_horizon"].arrays["kl"]) == 8
    assert not any("never trained" in warning for warning in record.warnings)


def test_the_command_prints_the_verdicts_and_every_predictor(tunnel, tmp_path):
    asked = ["grade", "--model", str(tunnel), "--n", "40", "--nulls", "2", "-q", "--out", str(tmp_path / "run")]
    shown = CliRunner().invoke(main, asked)
    assert shown.exit_code == 0, shown.output
    for word in (
        "this model",
        "uniform",
        "constant",
        "position",
        "bag of values",
        "mae_abs [bits]",
        "table of 16,000 seen",
    ):
        assert word in shown.output
    body = json.loads(CliRunner().invoke(main, [*asked, "--json"]).output)
    assert body["status"] == "ok" and any(row["metric"] == KL for row in body["verdicts"])


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--model", "pocket:pythia"], "pocket:pythia was trained on no task (no task.json next to its weights)"),
        (["--n", "9"], "--n 9: expected at least 10"),
        (["--nulls", "0"], "--nulls 0: expected at least 1"),
        (["--seed", "-1"], "--seed -1: expected at least 0"),
        (["--task", "bijektion"], "unknown task 'bijektion': did you mean 'bijection'?"),
    ],
)
def test_a_refusal_is_one_sentence(flags, sentence):
    shown = CliRunner().invoke(main, ["grade", "-q", *flags])
    assert shown.exit_code == 1 and sentence in shown.output and shown.output.count("\n") == 1


def test_a_damaged_task_file_is_refused(tunnel, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(tunnel)
    facts = {"task": "bijection", "trained_queries": 7}
    save_model(model, tmp_path / "copy", facts)
    (tmp_path / "copy" / "task.json").write_text('{"task": "bijection"}')
    with refused(UserError, "task.json"):
        perform(RunConfig(model=str(tmp_path / "copy")))


def test_without_enough_sequences_for_rare_failures_the_claim_is_open_and_says_how_many():
    task = REPLACED
    record = examine(of(task, saying(task, task.log_predictive)), task, Origin(task.title, 6, FEW), n=200, nulls=5)
    got = found(record, "posterior", KL)
    # Clopper and Pearson: with this share of failures, 200 sequences have none with probability .0125.
    assert got.high == pytest.approx(9 * (1 - 0.0125 ** (1 / 200)), rel=1e-3) and abs(got.value) < 1e-6
    assert got.verdict == "open" and "needs n >= 4566 clusters" in got.why


def test_the_claim_that_answers_are_exact_fails_where_one_sequence_in_a_thousand_is_wrong_by_20_bits():
    """True KL: .02 bits, twice the margin. By Student's interval of 1,000 sequences the claim held in 36 %."""
    rng = np.random.default_rng(0)
    graded = [divergence("posterior", KL, np.where(rng.random(6000) < 1e-3, 20.0, 0.0)) for _ in range(60)]
    assert sum(h.p < 0.025 for h in graded) <= 4 and not any(h.p_excluded < 0.025 for h in graded)
