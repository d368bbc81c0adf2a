"""Revisions of a language model and checkpoints of a trainer are followed like snapshots."""

import copy
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from llmgeom.commands.dynamics import RunConfig, perform
from llmgeom.dynamics import study
from llmgeom.dynamics.drift import state
from llmgeom.dynamics.runs import Run, revision_step
from llmgeom.dynamics.study import Inputs
from llmgeom.errors import UserError
from llmgeom.model.capture import Site
from llmgeom.model.model import Model
from tests.refusals import refused


def halved(name: str) -> Model:
    """The first two layers of a pocket model: half the time."""
    subject = Model.load(name)
    del subject.model.gpt_neox.layers[2:]
    subject.model.config.num_hidden_layers = 2
    return Model.of(subject.model, subject.tokenizer, "m")


def test_revisions_of_a_language_model_are_followed_to_the_last(tmp_path, monkeypatch):
    """Stand-ins for revisions: untrained, half-way between, trained. Precision is then KL(last || model)."""
    first, last = halved("pocket:pythia@step0"), halved("pocket:pythia")
    middle = copy.deepcopy(last.model)
    with torch.no_grad():
        for own, start in zip(middle.parameters(), first.model.parameters(), strict=True):
            own.lerp_(start, 0.3)
    held = {"step0": first, "step8": Model.of(middle, last.tokenizer, "m"), "step64": last}
    called = []

    def stub(cls, model, revision=None, **options):
        called.append((model, revision, options["offline"]))
        return held[revision]

    monkeypatch.setattr(Model, "load", classmethod(stub))
    asked = RunConfig(model="a/b", revisions=tuple(held), probes=(), n=10, offline=True, out=str(tmp_path / "o"))
    _, record = perform(asked)
    assert called[:3] == [("a/b", revision, True) for revision in ("step64", "step0", "step8")]  # the last comes first
    precision, batch = record.results["drift"].arrays["precision"], Inputs(n=10).batch()
    log_p, log_q = (held[r].capture(batch, {Site.LOG_PROBS}).log_probs.double() for r in ("step64", "step8"))
    by_hand = (log_p.exp() * (log_p - log_q)).sum(-1).mean().item() / np.log(2)
    assert precision[1] == pytest.approx(by_hand, rel=1e-6) and precision[2] == 0
    assert precision[0] > precision[1] > 0 and record.results["drift"].arrays["frame"][1] > 0
    assert {h.verdict for h in record.results["drift"].estimates} <= {"open", ""}
    assert any("log P does not fall" in note for note in record.results["drift"].notes)
    assert asked.command() == "llmgeom dynamics --model a/b --revisions step0,step8,step64 --probes '' --n 10 --offline"
    assert RunConfig(runs=("https://me:secret@h/x",)).command() == "llmgeom dynamics https://…@h/x"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    """A trainer's output folder: untrained, half-way between, trained."""
    root = tmp_path_factory.mktemp("trainer")
    first, last = halved("pocket:pythia@step0"), halved("pocket:pythia")
    for step, share in ((0, 0.0), (100, 0.5), (1000, 1.0)):
        middle = copy.deepcopy(first.model)
        with torch.no_grad():
            for own, end in zip(middle.parameters(), last.model.parameters(), strict=True):
                own.lerp_(end, share)
        middle.save_pretrained(root / f"checkpoint-{step}")
        last.tokenizer.save_pretrained(root / f"checkpoint-{step}")
    (root / "checkpoint-best").mkdir()
    return root


def test_checkpoints_of_a_trainer_are_followed(checkpoints, tmp_path):
    run = Run.of(str(checkpoints))
    assert run.steps == (0, 100, 1000) and not run.task and not run.random
    _, record = perform(RunConfig(runs=(str(checkpoints),), probes=(), n=10, out=str(tmp_path / "o")))
    assert record.facts["steps"] == [0, 100, 1000]
    frame = record.results["drift"].arrays["frame"]
    assert frame[0] > frame[1] > 0.01 and abs(frame[2]) < 1e-12
    assert not any("rises" in warning or "the first snapshot" in warning for warning in record.warnings)


def test_the_loss_of_a_snapshot_is_that_of_transformers(checkpoints):
    subject = Model.load(str(checkpoints / "checkpoint-1000"))
    batch = Inputs(n=10).batch()
    total = count = 0
    for text in batch.text:
        ids = torch.tensor([subject.tokenizer(text)["input_ids"]])
        with torch.no_grad():
            total += float(subject.model(input_ids=ids, labels=ids).loss) * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    assert state(subject, batch, None).loss == pytest.approx(total / count, rel=1e-5)


def test_a_checkpoint_with_the_weights_of_another_is_refused(checkpoints, tmp_path):
    """One whose weights are swapped with those of another step is warned of: test_dynamics_streaming.py."""
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    for step, name in ((0, 0), (100, 1000), (1000, 1000)):
        (wrong / f"checkpoint-{step}").symlink_to(checkpoints / f"checkpoint-{name}")
    with refused(UserError, "checkpoint-100 and"):
        perform(RunConfig(runs=(str(wrong),), probes=(), n=10, out=str(tmp_path / "a")))


@pytest.mark.parametrize(
    ("revision", "expected"),
    [
        ("step512", ("step512", 512)),
        ("main=143000", ("main", 143000)),
        ("stage1-step1000-tokens5B", ("stage1-step1000-tokens5B", 1000)),
        ("checkpoint-500", ("checkpoint-500", 500)),
        ("iter_2000", ("iter_2000", 2000)),
        ("v7", ("v7", 7)),
    ],
)
def test_the_step_of_a_revision_is_read_from_its_name(revision, expected):
    assert revision_step(revision) == expected


def test_seeds_of_a_suite_are_replicates(tmp_path, monkeypatch):
    """Two hub models with the same revisions are two runs."""
    followed, names = [], ("step0", "step100", "step1000")
    monkeypatch.setattr(study, "study", lambda runs, *_, **__: followed.extend(runs))
    perform(RunConfig(runs=("a/seed1", "a/seed2"), revisions=names, probes=(), out=str(tmp_path / "o")))
    assert [(run.name, run.steps) for run in followed] == [(name, (0, 100, 1000)) for name in ("a/seed1", "a/seed2")]
    assert all(run.places == tuple((run.name, name) for name in names) for run in followed)


def test_a_training_whose_start_was_not_saved_is_warned_of():
    """5 % of the value at step 100 is not 5 % of what there was to learn, and what settled before is not seen."""
    for first, said in ((50, 1), (0, 0)):
        warned = study.warnings([Run("late", (first, 100, 1000), ())], [], probed=False)
        assert sum("the first snapshot is of step 50:" in warning for warning in warned) == said


def test_models_of_two_architectures_are_neither_steps_nor_replicates(checkpoints, tmp_path):
    """Models of a suite in two sizes were pooled as two seeds; another model's checkpoint in a folder ended in zip."""
    other = shutil.copytree(checkpoints, tmp_path / "other")
    for step in (0, 100, 1000):
        smaller = Model.load(f"{other}/checkpoint-{step}").model
        del smaller.gpt_neox.layers[1:]
        smaller.config.num_hidden_layers = 1
        smaller.save_pretrained(other / f"checkpoint-{step}")
    mixed = shutil.copytree(checkpoints, tmp_path / "mixed")
    shutil.copytree(other / "checkpoint-100", mixed / "checkpoint-100", dirs_exist_ok=True)
    for runs, place in (((str(checkpoints), str(other)), "checkpoint-1000"), ((str(mixed),), "checkpoint-100")):
        with refused(UserError, f"{runs[-1]}/{place}", "its layers", 1, 2):
            perform(RunConfig(runs=runs, probes=(), n=10, out=str(tmp_path / "o")))


def test_one_training_under_two_names_is_no_replicate(checkpoints, tmp_path):
    copied = shutil.copytree(checkpoints, tmp_path / "copied")
    with refused(UserError, "the end of", checkpoints.name, "the end of copied", "same weights"):
        perform(RunConfig(runs=(str(checkpoints), str(copied)), probes=(), n=10, out=str(tmp_path / "o")))


@pytest.mark.parametrize(
    ("revisions", "why"),
    [
        (("main", "step1", "step2"), "--revisions main"),
        (("step1", "step2", f"main={'9' * 5000}"), "--revisions main"),
        (("step2", "step1", "step3"), "ascending"),
        (("step1", "step2"), "a/b"),
    ],
)
def test_revisions_are_ascending_steps(revisions, why):
    with refused(UserError, why):
        Run.at("a/b", revisions)


@pytest.mark.slow
def test_a_head_whose_values_are_alike_costs_its_curve_and_not_the_run(checkpoints, tmp_path):
    """Weights of 0 at the start, or a pruned head: the whole command was refused, without a word of which head."""
    dead = shutil.copytree(checkpoints, tmp_path / "dead")
    subject = Model.load(f"{dead}/checkpoint-0")
    with torch.no_grad():
        fused = subject.model.gpt_neox.layers[1].attention.query_key_value
        fused.weight.view(4, 3, 32, -1)[2, 2] = 0
        fused.bias.view(4, 3, 32)[2, 2] = 0
    subject.model.save_pretrained(dead / "checkpoint-0")
    _, record = perform(RunConfig(runs=(str(dead),), probes=(), n=10, out=str(tmp_path / "o")))
    drift = record.results["drift"]
    assert "value" not in drift.arrays and drift.arrays["frame"][0] > 0 and "gradients" in record.results
    assert "frame over values" not in {h.name for h in drift.estimates}
    where = "not measured, dead, snapshot 1 of 3 and the last, values of layer 1, head 2: "
    assert any(where in note for note in drift.notes)
