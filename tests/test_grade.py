"""A trained model is graded from its folder, by a function and by the command."""

import math

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner

from llmgeom import wind_tunnels
from llmgeom.cli import main
from llmgeom.commands.grade import RunConfig, prepare
from llmgeom.record import Record
from llmgeom.wind_tunnels.training import train
from llmgeom.wind_tunnels.training_config import Training
from tests.words import beyond
from tests.written_answers import KL, SKILL, found


@pytest.fixture(scope="module")
def tunnel(tmp_path_factory):
    """A one-layer model on the bijection, 250 steps."""
    out = tmp_path_factory.mktemp("tunnel") / "model"
    train(Training("bijection", width=32, layers=1, steps=250, batch=64, lr="1e-2", snapshots=2), out, "cpu")
    return out


def test_a_trained_model_is_graded_from_its_folder(tunnel, tmp_path):
    out, record = prepare(RunConfig(model=str(tunnel), n=100, nulls=8, out=str(tmp_path / "run"))).perform()
    assert found(record, "posterior", SKILL).value > 0.9
    assert 0.001 < found(record, "posterior", KL).value < 0.1
    assert beyond(found(record, "posterior", "mae_abs")) == "yes"
    assert record.source["name"] == "bijection" and record.facts["trained on"] == "bijection"
    assert "training drew 16,000 sequences" in record.facts["sizes"]
    (table,) = [why for why in record.results["posterior"].warnings if why.startswith("a table of 16,000")]
    assert "no sign of inference; train with --hold-out states" in table
    assert record.facts["command"] == f"llmgeom grade --model {tunnel} --n 100"
    assert (out / "report.html").exists()
    again = prepare(RunConfig(model=str(tunnel), n=100, nulls=8, out=str(tmp_path / "again"))).perform()[1]
    for probe, measured in Record.load(out).results.items():
        for name, array in measured.arrays.items():
            np.testing.assert_array_equal(array, again.results[probe].arrays[name])
    # Independently: the whole vocabulary's softmax of a plain forward pass.
    model = transformers.AutoModelForCausalLM.from_pretrained(tunnel)
    batch = wind_tunnels.load_world("bijection").sample(100, 0, "held-out")
    with torch.no_grad():
        log_q = model(batch.inputs.ids).logits[:, 0::2, 8:].double() - model(batch.inputs.ids).logits[
            :, 0::2
        ].double().logsumexp(-1, keepdim=True)
    p = batch.posterior.predictive.exp()
    kl = torch.where(p > 0, p * (p.clamp(min=1e-30).log() - log_q), 0).sum(-1) / math.log(2)
    assert found(record, "posterior", KL).value == pytest.approx(kl.mean().item(), abs=1e-5)


def test_the_first_snapshot_says_that_it_is_untrained(tunnel, tmp_path):
    asked = RunConfig(model=str(tunnel / "snapshots" / "step0"), n=50, nulls=2, out=str(tmp_path / "run"))
    record = prepare(asked).perform()[1]
    assert "untrained: the weights of step 0" in record.warnings
    assert found(record, "posterior", KL).verdict == found(record, "posterior", SKILL).verdict == "ruled out"


def test_longer_sequences_of_the_same_task_have_a_horizon(tunnel, tmp_path):
    asked = RunConfig(model=str(tunnel), task="bijection:pairs=8", n=50, nulls=2, out=str(tmp_path / "run"))
    record = prepare(asked).perform()[1]
    assert record.facts["horizon"] == 7 and len(record.results["posterior_horizon"].arrays["kl"]) == 8
    assert not any("never trained" in warning for warning in record.warnings)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--model", "pocket:pythia"], "pocket:pythia was trained on no task (no task.json next to its weights)"),
        (["--n", "9"], "--n 9: expected at least 10"),
        (["--task", "bijektion"], "unknown world 'bijektion': did you mean 'bijection'?"),
    ],
)
def test_a_refusal_is_one_sentence(flags, sentence):
    shown = CliRunner().invoke(main, ["grade", "-q", *flags])
    assert shown.exit_code == 1 and sentence in shown.output and shown.output.count("\n") == 1
