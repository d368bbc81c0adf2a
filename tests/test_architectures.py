"""Architectures of tunnels: causal, blind where they say so, saved and loaded, and as large as asked."""

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from llmgeom.errors import UserError
from llmgeom.wind_tunnels.models import ARCHITECTURES
from llmgeom.wind_tunnels.models.architectures import RowsForCausalLM, build, matched
from tests.architectures import EXACT, SHAPE, T, V, inputs, made
from tests.refusals import refused

CASES = (*((name, 0) for name in ARCHITECTURES), ("neox", 3), ("mamba2", 3))


@torch.no_grad()
def logits(model, x: Tensor, **options) -> Tensor:
    """As a Model asks for them."""
    position_ids = torch.arange(x.shape[1]).expand(x.shape[:2])
    return model(**{model.main_input_name: x}, position_ids=position_ids, use_cache=False, **options).logits


def other(x: Tensor) -> Tensor:
    """Inputs that differ from x everywhere."""
    return x + 1.5 if x.is_floating_point() else (x + 1) % V


# ---- what a position sees --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arch", "features"), CASES)
def test_no_position_sees_the_future_and_each_sees_itself(arch, features):
    model, x = made(arch, features), inputs(features)
    before = logits(model, x)
    for t in (0, 1, 6, T - 1):
        changed = x.clone()
        changed[:, t] = other(x)[:, t]
        moved = (logits(model, changed) - before).abs().amax((0, 2))
        assert moved[:t].max() <= 1e-12 if t else True
        assert moved[t] > 1e-4


@pytest.mark.parametrize("features", [0, 3])
def test_an_mlp_answers_from_its_own_position_alone(features):
    model, x = made("mlp", features), inputs(features)
    alone = torch.cat([logits(model, x[:, [t]]) for t in range(T)], 1)
    torch.testing.assert_close(logits(model, x), alone, **EXACT)


@pytest.mark.parametrize("length, window", [(37, 12), (6, 4)])
def test_a_window_of_one_layer_ends_where_it_says(length, window):
    model = made("window", length=length, layers=1)
    x, last = inputs(0, length=30), 29
    for back, seen in ((window - 1, True), (window, False), (window + 1, False)):
        changed = x.clone()
        changed[:, last - back] = other(x)[:, last - back]
        moved = (logits(model, changed) - logits(model, x))[:, last].abs().max()
        assert (moved > 1e-6) == seen, back


# ---- fresh weights, saving, loading ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("arch", "features"), CASES)
def test_a_seed_fixes_the_weights_and_leaves_the_generator(arch, features):
    first = build(arch, features=features, **SHAPE).state_dict()
    torch.manual_seed(99)
    torch.rand(7)
    before = torch.get_rng_state()
    again = build(arch, features=features, **SHAPE)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[k], v) for k, v in again.state_dict().items())
    assert all(p.dtype == torch.float32 and p.device.type == "cpu" for p in again.parameters())
    changed = build(arch, features=features, **SHAPE, seed=1).state_dict()
    assert all(not torch.equal(first[k], v) for k, v in changed.items() if k.endswith("proj.weight"))
    torch.manual_seed(0)  # as Model.untrained control does
    control = AutoModelForCausalLM.from_config(again.config).state_dict()
    assert all(torch.equal(first[k], v) for k, v in control.items())


@pytest.mark.parametrize(("arch", "features"), CASES)
def test_what_is_saved_is_what_is_loaded(arch, features, tmp_path):
    model = build(arch, features=features, **SHAPE).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter)  # unlike any initialisation
    model.save_pretrained(tmp_path)
    loaded, found = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(loaded) is type(model)
    told = [m.config.get_text_config().to_dict() for m in (loaded, model)]
    notes = {"_name_or_path", "architectures", "dtype", "transformers_version"}
    first, second = ({k: v for k, v in each.items() if k not in notes} for each in told)
    assert first == second
    assert all(torch.equal(loaded.state_dict()[k], v) for k, v in model.state_dict().items())
    x = inputs(features)
    assert torch.equal(logits(loaded.eval(), x), logits(model, x))


@pytest.mark.parametrize(("arch", "features"), CASES)
def test_every_parameter_is_in_use(arch, features):
    model = made(arch, features).train()
    x = inputs(features, batch=8)
    out = model(**{model.main_input_name: x}).logits
    (out * torch.randn_like(out)).sum().backward()
    beyond = {"inner.transformer.wpe.weight", "transformer.wpe.weight"}  # rows of longer sequences
    for name, parameter in model.named_parameters():
        if features and parameter is model.inner.get_input_embeddings().weight:
            assert parameter.grad is None
        elif name not in beyond and "key_value.bias" not in name and "c_attn.bias" not in name:
            assert (parameter.grad.flatten(1) if parameter.ndim > 1 else parameter.grad).abs().max() > 0, name
    assert torch.equal(model(**{model.main_input_name: x}).logits, out)  # no dropout in training


# ---- the interface a Model uses ------------------------------------------------------------------------------------


def test_rows_read_as_the_model_inside_with_embeddings_given():
    model, x = made("neox", 3), inputs(3)
    read = x @ model.read.weight.T + model.read.bias
    torch.testing.assert_close(logits(model, x), model.inner(inputs_embeds=read).logits, **EXACT)
    assert torch.equal(model.float()(rows=x).logits, model(rows=x.float()).logits)  # whatever the rows' dtype
    assert isinstance(model, RowsForCausalLM) and model.get_input_embeddings() is model.read


# ---- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arch", "features"), CASES)
def test_matched_has_the_parameters_within_two_percent(arch, features):
    shape = {"vocabulary": 16, "length": 10, "features": features}
    for parameters in (101_700,) if features else (26_300, 57_000):
        found = matched(arch, parameters, **shape)
        count = sum(p.numel() for p in build(arch, **found, **shape).parameters())
        assert count == pytest.approx(parameters, rel=0.02)


@pytest.mark.parametrize(
    "arch, change, named",
    [
        ("neoks", {}, ("neox", "llama")),
        ("neox", {"width": 36}, ("width 36", "4 heads", 8, 32)),
        ("gpt2", {"width": 2}, ("width 2", "4 heads", 4)),
        ("mamba2", {"width": 33}, ("width 33", "4 heads", 2, 32)),
        ("gqa", {"heads": 2}, ("2 heads", 4)),
        ("lstm", {"layers": 0}, ("layers 0", 1)),
        ("mlp", {"features": -1}, ("features -1", 0)),
    ],
)
def test_shapes_that_cannot_be_are_refused(arch, change, named):
    with refused(UserError, arch, *named):
        build(arch, **{**SHAPE, **change})
