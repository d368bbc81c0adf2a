"""The families that are read, as one table: a tiny random model of each, and where its own code keeps what.

The paths and layouts were read from each family's modelling file, not from llmgeom, so that they can judge it.
"""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from llmgeom.batch import Batch, Tokens

VOCAB = 120
WIDE = {"hidden_size": 64, "vocab_size": VOCAB, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}
USUAL = WIDE | {
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "pad_token_id": 0,
}


def separate(projected: Tensor, attention: nn.Module) -> Tensor:
    """A value projection of its own: [batch seq kv_head*dim]."""
    return projected.unflatten(-1, (-1, attention.head_dim))


def interleaved(projected: Tensor, attention: nn.Module) -> Tensor:
    """GPT-NeoX's fused projection: head by head, each head its query, key and value."""
    return projected.unflatten(-1, (-1, 3, attention.head_size))[..., 2, :]


def thirds(projected: Tensor, attention: nn.Module) -> Tensor:
    """GPT-2's fused projection: all queries, all keys, all values."""
    return projected.unflatten(-1, (3, -1, attention.head_dim))[..., 2, :, :]


def grouped(projected: Tensor, attention: nn.Module) -> Tensor:
    """Phi-3's fused projection: all queries, then the fewer keys, then as many values."""
    kv_heads = attention.num_key_value_heads
    return projected[..., -kv_heads * attention.head_dim :].unflatten(-1, (kv_heads, attention.head_dim))


@dataclass(frozen=True)
class Family:
    """What a test must know of a family to judge us without us.

    settings          of the tiny config; `name` is the model type.
    attention         path of the attention module inside a layer; `layers`: path of the list of layers.
    attn_out   path inside a layer of the module whose output attention adds to the residual; mlp_out alike.
    projection        path inside attention of the module that makes values (perhaps with queries and keys).
    values            its output as values [batch seq kv_head head_dim], a view, so that a hook can write through it.
    output            path inside attention of W_O.
    sharpen           factor on what makes queries and keys: flat attention would hide errors of mask and scale.
    key_norm          queries and keys are normalised after their projection.
    query_scale       factor on queries before attention sees them (OPT).
    window            positions a query of layer 0 can reach, itself included; None for all.
    """

    name: str
    settings: dict[str, Any]
    layers: str = "model.layers"
    attention: str = "self_attn"
    attn_out: str = "self_attn"
    mlp_out: str = "mlp"
    projection: str = "v_proj"
    values: Callable[[Tensor, nn.Module], Tensor] = separate
    output: str = "o_proj"
    sharpen: float = 1.8
    key_norm: bool = False
    query_scale: float = 1.0
    window: int | None = None

    def config(self) -> Any:
        return transformers.AutoConfig.for_model(self.name, **self.settings)

    def model(self, seed: int = 0, eager: bool = False) -> Any:
        """The tiny model, the same for the same seed; `eager` only says how its attention is computed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            eager = eager or bool(self.settings.get("attn_logit_softcapping"))
            model = transformers.AutoModelForCausalLM.from_config(
                self.config(), **({"attn_implementation": "eager"} if eager else {})
            )
        rng = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for path, parameter in sorted(model.named_parameters()):
                noise = torch.randn(parameter.shape, generator=rng)
                if parameter.dim() < 2:
                    parameter.add_(0.1 * noise)  # norms and biases that are not 1 and 0, so that forgetting one shows
                else:
                    parameter.copy_(noise / parameter.shape[-1] ** 0.5)
                if any(part in path for part in ("q_proj", "k_proj", "query_key_value", "c_attn", "qkv_proj")):
                    parameter.mul_(self.sharpen)
                if "q_norm" in path or "k_norm" in path:
                    parameter.add_(self.sharpen - 1)  # added: some families count these weights from 1, others from 0
        return model.eval()

    def layer(self, model: nn.Module, index: int) -> nn.Module:
        return model.get_submodule(self.layers)[index]

    def part(self, model: nn.Module, index: int, path: str) -> nn.Module:
        """The module that `path` names in layer `index`; projection and output are inside the attention."""
        inside = f"{self.attention}." if path in (self.projection, self.output) else ""
        return self.layer(model, index).get_submodule(inside + path)


_gemma = {
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"],
}
_caps = {"attn_logit_softcapping": 12.0, "final_logit_softcapping": 4.0}
_oss = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "sliding_window": 7,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_normed = partial(Family, attn_out="post_attention_layernorm", mlp_out="post_feedforward_layernorm")

FAMILIES = {
    family.name: family
    for family in (
        Family(
            "gpt_neox",
            WIDE | {"num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 64},
            layers="gpt_neox.layers",
            attention="attention",
            attn_out="attention",
            projection="query_key_value",
            values=interleaved,
            output="dense",
        ),
        Family("phi", USUAL | {"num_key_value_heads": 4}, output="dense"),
        Family("llama", USUAL),
        Family("mistral", USUAL | {"sliding_window": 7, "head_dim": 10}, window=7, sharpen=1.6),
        Family(
            "gpt2",
            WIDE | {"num_hidden_layers": 2, "num_attention_heads": 8},
            layers="transformer.h",
            attention="attn",
            attn_out="attn",
            projection="c_attn",
            values=thirds,
            output="c_proj",
            sharpen=3.6,
        ),
        Family("qwen3", USUAL | {"head_dim": 16, "tie_word_embeddings": True}, key_norm=True, sharpen=1.7),
        _normed("gemma2", USUAL | _gemma | _caps, window=7, sharpen=2.0),
        Family(
            "opt",
            WIDE | {"num_hidden_layers": 2, "num_attention_heads": 8, "ffn_dim": 64, "word_embed_proj_dim": 64},
            layers="model.decoder.layers",
            mlp_out="fc2",
            output="out_proj",
            query_scale=8**-0.5,
        ),
        Family("qwen2", USUAL | {"num_key_value_heads": 1}, sharpen=2.0),
        _normed("gemma3_text", USUAL | _gemma, window=7, key_norm=True, sharpen=1.6),
        _normed("olmo2", USUAL | {"num_key_value_heads": 4}, key_norm=True),
        Family("mixtral", USUAL | {"num_local_experts": 4}),
        Family("phi3", USUAL, projection="qkv_proj", values=grouped),
        Family(
            "glm4",
            USUAL | {"head_dim": 8},
            attn_out="post_self_attn_layernorm",
            mlp_out="post_mlp_layernorm",
        ),
        Family("gpt_oss", USUAL | _oss, window=7, sharpen=1.6),
    )
}  # fmt: skip


# ---- what every test of a family needs -------------------------------------------------------------------------------

LENGTHS = (23, 9, 17, 2)


def ragged(seed: int = 1, lengths: tuple[int, ...] = LENGTHS) -> Batch:
    """Random prompts of unequal length. The pads are random tokens too: whoever looks at one is found out."""
    ids = torch.randint(3, VOCAB, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
    return Batch(Tokens(ids, torch.tensor(lengths)), tuple(map(str, range(len(lengths)))), {"kind": "random"})


def prompts(batch: Batch) -> list[Tensor]:
    """Each prompt alone and without pads: [1 length] token ids."""
    return [ids[None, :length] for ids, length in zip(batch.inputs.ids, batch.inputs.lengths.tolist(), strict=True)]


def apart(x: Tensor, y: Tensor, of: Tensor | None = None) -> float:
    """Largest |x - y| over the rms of y, or of `of` where y is a small part of it."""
    assert x.shape == y.shape, f"{tuple(x.shape)} and {tuple(y.shape)}: broadcasting would hide it"
    whole = y if of is None else of
    return float((x.float() - y.float()).abs().max() / whole.float().square().mean().sqrt())


@contextmanager
def hooked(*handles):
    """Hooks for one block of code."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def first(out: Any) -> Tensor:
    """What a module returns, without the extras of a tuple."""
    return out[0] if isinstance(out, tuple) else out


@torch.no_grad()
def outputs(model: Any, modules: list[nn.Module], ids: Tensor) -> list[Tensor]:
    """What each module returned in one plain forward pass of `ids` [1 seq]: [seq ...] each, on every family."""
    kept: dict[int, Tensor] = {}

    def keep(i: int):
        return lambda _module, _args, out: kept.__setitem__(i, first(out).clone().view(ids.shape[1], -1))

    with hooked(*(module.register_forward_hook(keep(i)) for i, module in enumerate(modules))):
        model(ids)
    return [kept[i] for i in range(len(modules))]
