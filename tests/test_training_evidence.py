"""What else a training may teach: exchanged evidence, unbound keys, answers of a trivial predictor."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from llmgeom import wind_tunnels
from llmgeom.errors import UserError
from llmgeom.model.model import Model
from llmgeom.probes.posterior.grading import grade
from llmgeom.wind_tunnels.training import Trainer, answer_sheet, train
from llmgeom.wind_tunnels.training_config import Training
from tests.refusals import refused

TINY = {"width": 8, "layers": 1, "heads": 1, "steps": 4, "batch": 4, "snapshots": 2, "warmup": 1}


PAIRS = wind_tunnels.load_world("bijection:vocab=5,pairs=4")


class Seen(torch.nn.Module):
    """Keeps what a loss shows it."""

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary, self.inputs = vocabulary, None

    def forward(self, input_ids, logits_to_keep, **_):
        self.inputs = input_ids
        logits = torch.zeros(len(input_ids), len(logits_to_keep), self.vocabulary)
        return type("Output", (), {"logits": logits})


def shown(evidence, monkeypatch, task="bijection:vocab=5,pairs=4", batch=64):
    """The inputs and targets of one step: [sequence seq] and [sequence query]."""
    asked = Training(task, **{**TINY, "batch": batch}, evidence=evidence)
    run = Trainer(asked, wind_tunnels.load_world(task), 1e-2, "cpu")
    run.model, kept = Seen(run.task.vocabulary), {}
    monkeypatch.setattr(
        torch.nn.functional, "cross_entropy", lambda logits, target: kept.update(target=target) or torch.zeros(())
    )
    run.loss()
    tokens = run.tokens.tolist()
    target = torch.tensor([tokens.index(one) for one in kept["target"].tolist()]).view(batch, -1)
    return run.model.inputs, target


def test_exchanged_evidence_says_nothing_and_leaves_every_position_its_outcomes(monkeypatch):
    inputs, target = shown("kept", monkeypatch)
    other, exchanged = shown("exchanged", monkeypatch)
    assert torch.equal(inputs, other)
    assert torch.equal(exchanged, target.roll(1, 0))
    used = inputs[:, 1::2] - PAIRS.vocab  # values shown
    clash = [(used[:, :q] == exchanged[:, q, None]).any(1).double().mean().item() for q in range(1, 4)]
    assert clash == pytest.approx([q / 5 for q in range(1, 4)], abs=0.2)  # one of q of 5 values, whatever was shown
    assert not any((used[:, :q] == target[:, q, None]).any() for q in range(1, 4))


def test_unbound_evidence_keeps_values_and_takes_the_keys_of_another(monkeypatch):
    inputs, target = shown("kept", monkeypatch)
    other, same = shown("unbound", monkeypatch)
    assert torch.equal(same, target)
    assert torch.equal(other[:, 1::2], inputs[:, 1::2])
    assert torch.equal(other[:, 0::2], inputs[:, 0::2].roll(1, 0))


def test_a_sheet_holds_the_answers_to_one_sequence(monkeypatch):
    task = wind_tunnels.load_world("bijection:vocab=4,pairs=4")
    answers = answer_sheet(task, 0, "cpu").exp()
    assert [int((row > 0).sum()) for row in answers] == [4, 3, 2, 1]  # right entropies, by position alone
    _, target = shown("sheet", monkeypatch, "bijection:vocab=4,pairs=4", batch=4000)
    drawn = torch.stack([(target == k).double().mean(0) for k in range(4)], 1)
    assert drawn == pytest.approx(answers.numpy(), abs=0.04)
    assert torch.equal(answers, answer_sheet(task, 0, "cpu").exp())
    assert not torch.equal(answers, answer_sheet(task, 1, "cpu").exp())


@pytest.mark.parametrize(("evidence", "name"), [("memoryless", "memoryless"), ("bag", "bag of values")])
def test_targets_of_a_trivial_predictor_are_drawn_from_it(evidence, name, monkeypatch):
    """Grouped by the predictor's own answer, each outcome is drawn as often as that answer says."""
    spec = "hmm:symbols=3,steps=4,fixed=True,encoding=tokens"
    task = wind_tunnels.load_world(spec)
    inputs, target = shown(evidence, monkeypatch, spec, batch=6000)
    answers = task.trivial(inputs)[name].exp()
    for answer in answers[:, 3].unique(dim=0):
        here = (answers[:, 3] == answer).all(-1)
        if here.sum() > 300:
            often = torch.bincount(target[here, 3], minlength=3).double() / here.sum()
            assert often.numpy() == pytest.approx(answer.numpy(), abs=4 * 0.5 / int(here.sum()) ** 0.5)


def test_evidence_that_cannot_be_is_refused(tmp_path):
    with refused(UserError, "--evidence memoryless", "markov", "'bag of values'"):
        train(Training("markov:fixed=False", **TINY, evidence="memoryless"), tmp_path, device="cpu")
    with refused(UserError, "--evidence sheet", "regression"):
        train(Training("regression", **TINY, evidence="sheet"), tmp_path, device="cpu")
    with refused(UserError, "--evidence none", "kept", "exchanged", "unbound", "sheet"):
        Training("coin", evidence="none")
    with refused(UserError, "soft"):
        Training("coin", evidence="exchanged", targets="soft")


@pytest.mark.slow
def test_what_is_learnt_is_what_the_bench_says(tmp_path):
    """A bijection without replacement asks for no key: a bag of values is exact, and nothing else here is."""
    asked = Training("bijection:vocab=5,pairs=4", arch="gpt2", width=32, layers=1, steps=250, lr="1e-2", snapshots=2)
    kl, entropies = {}, {}
    for evidence in ("kept", "exchanged", "unbound", "sheet"):
        train(replace(asked, evidence=evidence), tmp_path / evidence, device="cpu")
        made = grade(Model.load(str(tmp_path / evidence)), PAIRS, 200, 0)
        kl[evidence], entropies[evidence] = made.kl, made.mae_abs
    assert kl["kept"] < 0.04 and kl["unbound"] < 0.04
    even = np.mean([math.log2(5 / left) for left in (5, 4, 3, 2)])  # an even answer over all values
    assert kl["exchanged"] == pytest.approx(even, abs=0.04)
    assert kl["sheet"] > 1  # entropies are right, and what they are of is not
    assert entropies["sheet"] < 0.15 < entropies["exchanged"]
