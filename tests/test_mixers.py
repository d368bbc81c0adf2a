"""Mixers of tunnels: by formulas written out, and state spaces by transformers' own."""

from contextlib import contextmanager

import pytest
import torch
import transformers
from torch import Tensor

from llmgeom.errors import UserError
from llmgeom.wind_tunnels.models.architectures import build
from llmgeom.wind_tunnels.models.tunnel import LSTM, Mean, Slots, TunnelConfig
from tests.architectures import EXACT, SHAPE, V, inputs, made
from tests.refusals import refused


def mixer(kind, **fields):
    torch.manual_seed(0)
    module = kind(TunnelConfig(hidden_size=4, max_position_embeddings=5, **fields)).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module, torch.randn(2, 5, 4, dtype=torch.float64)


def test_mean_is_uniform_attention():
    module, x = mixer(Mean)
    for t in range(5):
        expected = module.out_proj.weight @ (sum(x[1, j] for j in range(t + 1)) / (t + 1))
        torch.testing.assert_close(module(x)[1, t], expected, **EXACT)


def test_slots_are_one_linear_map_of_the_flattened_prefix():
    module, x = mixer(Slots)
    for t in range(5):
        whole = torch.cat([module.weight[j].T for j in range(t + 1)], 1)  # [width, (t + 1) width]
        torch.testing.assert_close(module(x)[1, t], whole @ x[1, : t + 1].flatten(), **EXACT)
    with refused(UserError, 5, 6):
        module(torch.zeros(1, 6, 4, dtype=torch.float64))


@pytest.mark.parametrize("inner", [4, 6])
def test_lstm_gates_written_out(inner):
    module, x = mixer(LSTM, inner_size=inner)
    weights = dict(module.lstm.named_parameters())
    h = c = torch.zeros(inner, dtype=torch.float64)
    for t in range(5):
        gates = weights["weight_ih_l0"] @ x[1, t] + weights["weight_hh_l0"] @ h
        i, f, g, o = (gates + weights["bias_ih_l0"] + weights["bias_hh_l0"]).chunk(4)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        expected = h if inner == 4 else module.out_proj.weight @ h
        torch.testing.assert_close(module(x)[1, t], expected, **EXACT)


@pytest.mark.parametrize("arch", ["mlp", "meanpool"])
def test_a_layer_is_pre_norm_and_residual(arch):
    model = made(arch, layers=1, inner=20)
    (layer,) = model.layers
    x = torch.randn(2, 5, 32, dtype=torch.float64)

    def norm(h):
        return h / (h.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()

    h = x + layer.mixer(norm(x)) if layer.mixer else x
    inside = torch.nn.functional.gelu(norm(h) @ layer.mlp[0].weight.T)
    h = h + inside @ layer.mlp[2].weight.T
    assert inside.shape[-1] == 20
    torch.testing.assert_close(model(inputs_embeds=x).logits, norm(h) @ model.lm_head.weight.T, **EXACT)


@contextmanager
def in_double(monkeypatch):
    """transformers' Mamba code calls .float() and .to(torch.float32) on what should stay float64; here that it does."""
    to = Tensor.to

    def kept(self, *args, **kwargs):
        swapped = [torch.float64 if a is torch.float32 else a for a in args]
        return to(self, *swapped, **{k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()})

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "float", Tensor.double)
        patch.setattr(Tensor, "to", kept)
        yield


def theirs(arch: str, ours):
    config = ours.config
    shared = {
        "vocab_size": V,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "state_size": config.inner_size,
        "expand": 2,
        "tie_word_embeddings": False,
        "residual_in_fp32": False,
    }
    if arch == "mamba":
        return transformers.MambaForCausalLM(transformers.MambaConfig(**shared))
    heads = config.num_heads
    shared |= {"num_heads": heads, "head_dim": 2 * config.hidden_size // heads, "n_groups": 1, "chunk_size": 8}
    return transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**shared))


def relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


@pytest.mark.parametrize("arch, inner", [("mamba2", 5), ("mamba", 16)])
def test_state_spaces_are_transformers_own(arch, inner, monkeypatch):
    ours = made(arch, inner=inner)
    torch.manual_seed(0)
    for parameter in ours.parameters():
        # What starts at zeros, ones or 1 .. heads would hide mistakes.
        parameter.data += 0.3 * torch.randn_like(parameter)
    reference = theirs(arch, ours).double()
    weights = {f"backbone.{k}" if k != "lm_head.weight" else k: v for k, v in ours.state_dict().items()}
    reference.load_state_dict(weights)
    x = inputs(0, length=19)
    weight = torch.randn(3, 19, V, dtype=torch.float64)
    with in_double(monkeypatch):
        expected = reference(input_ids=x, use_cache=False).logits
    found = ours(input_ids=x).logits
    assert expected.dtype == found.dtype == torch.float64
    assert relative(found, expected) < 1e-13
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    gradients = {name.removeprefix("backbone."): p.grad for name, p in reference.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert relative(parameter.grad, gradients[name]) < 1e-12, name


def test_long_sequences_with_fast_decay_have_gradients():
    model = build("mamba2", **SHAPE)
    for layer in model.layers:
        layer.mixer.dt_bias.data += 50
    model(input_ids=inputs(0, length=40)).logits.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("arch", ["mamba2", "mamba"])
def test_state_spaces_start_as_transformers_do(arch):
    ours = build(arch, **{**SHAPE, "width": 72}, layers=1)
    state, expected = ours.layers[0].mixer.state_dict(), theirs(arch, ours).backbone.layers[0].mixer.state_dict()
    assert {k: v.shape for k, v in state.items()} == {k: v.shape for k, v in expected.items()}
    for name in ("A_log", "D", "conv1d.bias"):
        torch.testing.assert_close(state[name], expected[name])
    for name in {"conv1d.weight", "out_proj.weight", "dt_proj.weight"} & set(state):
        assert state[name].std().item() == pytest.approx(expected[name].std().item(), rel=0.25), name
    # Theirs are N(0, 0.1); ours are as in every other architecture here.
    for name in {"in_proj.weight", "x_proj.weight"} & set(state):
        assert state[name].std().item() == pytest.approx(0.02, rel=0.05), name
    steps = torch.nn.functional.softplus(state["dt_bias" if arch == "mamba2" else "dt_proj.bias"])
    assert 0.001 <= steps.min() < steps.max() <= 0.1
