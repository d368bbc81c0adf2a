"""NaN and inf, in weights, in the activations of one layer for one prompt, in training: named, and never averaged."""

import json
import math
import shutil

import pytest
import torch
from click.testing import CliRunner

from llmgeom import probes
from llmgeom.batch import Batch, Text
from llmgeom.cli import main
from llmgeom.errors import UserError
from llmgeom.model.capture import Site
from llmgeom.model.edits import Edit
from llmgeom.model.model import Model
from llmgeom.run import run_probes
from llmgeom.wind_tunnels import training as trainer
from llmgeom.wind_tunnels.training import train
from llmgeom.wind_tunnels.training_config import Training
from tests.families import FAMILIES
from tests.refusals import refused

SMALL = Training(
    "bijection:vocab=4,pairs=3", width=16, layers=2, heads=2, steps=20, batch=16, lr="1e-2", warmup=5, snapshots=3
)


@pytest.fixture(scope="module")
def tunnel(tmp_path_factory):
    return train(SMALL, tmp_path_factory.mktemp("tunnel") / "model").out


def prompts(n: int) -> Batch:
    return Batch(Text(tuple(f"The number {i} is" for i in range(n))), tuple(map(str, range(n))), {"name": "x"})


@pytest.mark.parametrize(
    ("command", "bad"),
    [("scan", math.nan), ("grade", math.inf), ("patch", -math.inf), ("ablate --what heads", math.nan)],
)
def test_a_weight_that_is_not_finite_is_named_by_layer(tunnel, tmp_path, command, bad):
    from safetensors.torch import load_file, save_file

    shutil.copytree(tunnel, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in weights if "layers.1" in name and name.endswith("dense_4h_to_h.weight"))
    weights[name][0, 0] = bad
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    done = CliRunner().invoke(main, [*command.split(), "--model", str(tmp_path), "--out", str(tmp_path / "out"), "-q"])
    assert done.exit_code == 1 and len(done.stderr.splitlines()) == 1, done.output
    assert "not finite on prompt 1 (random tokens" in done.stderr and "layer 1" in done.stderr
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize(("layer", "bad"), [(0, math.nan), (2, -math.inf)])
def test_an_activation_of_one_layer_for_one_prompt_is_named_by_both(pythia, bad, layer):
    def spoil(x, where):
        x = x.clone()
        x[where.prompt == 7, 1, 3] = bad
        return x

    with pythia.edited(Edit("mlp_out", spoil, layers=(layer,), spec={"do": "spoil"})) as spoilt:
        with refused(UserError, "prompt 8", "The number 7 is", f"layer {layer}"):
            run_probes(spoilt, prompts(20), probes.known(("value_manifold",)), controls=1)
        fine = spoilt.capture(prompts(20).take([i for i in range(20) if i != 7][:7]), {Site.ENTROPY})
    assert torch.isfinite(fine.entropy).all()


def test_who_looks_for_the_layer_edits_where_the_pass_did(pythia):
    """A donor is put at the queried position of each prompt, one row a prompt: no other position has one."""
    donors = torch.zeros(20, pythia.facts["d_model"])
    donors[7, 3] = math.nan

    def put(x, where):
        return x.masked_scatter(where.query[..., None], donors[where.prompt].to(x))

    named = ("prompt 8", "The number 7 is", "layer 1")
    edit = Edit("residual", put, layers=(2,), spec={"do": "put"})
    with pythia.edited(edit) as changed, refused(UserError, *named):
        changed.capture(prompts(20), {Site.ENTROPY})


@pytest.mark.parametrize(("layer", "bad"), [(0, math.inf), (3, math.nan)])
def test_what_does_not_reach_the_logits_is_named_by_site_layer_and_prompt(pythia, bad, layer):
    """A value that is not finite, of a head that is then silenced: logits are finite, a mean over values is not."""

    def spoil(x, where):
        x = x.clone()
        x[(where.prompt == 11)[:, None] & where.query] = bad
        return x

    edits = (
        Edit("value", spoil, layers=(layer,), spec={"do": "spoil"}),
        Edit("z", lambda x, where: torch.zeros_like(x), layers=(layer,), spec={"do": "silence"}),
    )
    batch = prompts(20)
    with pythia.edited(*edits) as spoilt:
        assert torch.isfinite(spoilt.capture(batch, {Site.LOG_PROBS}).log_probs).all()
        named = ("value", f"layer {layer}", "prompt 12", "The number 11 is")
        for batch_tokens in (4096, 40):
            with refused(UserError, *named):
                spoilt.capture(batch, {Site.KEY, Site.VALUE}, batch_tokens=batch_tokens)
        with refused(UserError, *named):
            run_probes(spoilt, batch, probes.known(("value_manifold",)), controls=1)
        assert spoilt.capture(batch, {Site.KEY}).key.isfinite().all()


def test_a_model_whose_attn_outs_nothing_is_read_and_saved():
    """The agreement with its own output is 0 / 0 there, and a record takes no NaN."""
    model = FAMILIES["llama"].model()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "v_proj" in name:
                weight.zero_()
    found = Model.of(model).check()
    assert all(math.isfinite(value) for value in found.values() if isinstance(value, float)) and found["rows"] == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_burst_in_the_last_step_are_never_saved(tmp_path, monkeypatch, bad):
    """No loss tells of them: each loss is of the weights before its step."""
    plain = trainer.Trainer.step

    def burst(run, i):
        loss = plain(run, i)
        if i == 19:
            with torch.no_grad():
                next(run.module.parameters())[0, 0] = bad
        return loss

    monkeypatch.setattr(trainer.Trainer, "step", burst)
    with refused(UserError, "gpt_neox.embed_in.weight", 20, "--lr"):
        train(SMALL, tmp_path / "a")
    assert not (tmp_path / "a/model.safetensors").exists() and not (tmp_path / "a/snapshots/step20").exists()


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_loss_that_is_not_finite_is_named_by_its_step_and_leaves_no_number(tmp_path, monkeypatch, bad):
    monkeypatch.setattr(trainer, "CHECK_EVERY", 5)
    plain = trainer.Trainer.loss
    calls = []
    monkeypatch.setattr(
        trainer.Trainer, "loss", lambda run: plain(run) * (bad if calls.append(1) or len(calls) == 8 else 1)
    )
    with refused(UserError, bad, "step 7"):
        train(SMALL, tmp_path / "a")
    for path in tmp_path.rglob("*.json"):
        json.loads(path.read_text(), parse_constant=pytest.fail)
