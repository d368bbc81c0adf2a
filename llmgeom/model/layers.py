"""Which modules of a causal LM are its layers, which of them attend, and which write to the residual stream."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from llmgeom.errors import UnsupportedModel

# Families whose attention bypasses transformers' interface and that TransformerLens reads (tests/test_tl.py).
THROUGH_TL = ("bloom", "codegen", "gpt_neo", "gptj", "mpt")
# Names of a layer's MLP, and of what mixes positions in its place where it does not attend.
MLPS = ("mlp", "feed_forward", "ffn", "mlp_block", "block_sparse_moe", "shared_mlp", "fc2")
MIXERS = (
    "linear_attn", "mamba", "conv", "mixer", "temporal_block", "mlstm_layer",
    "self_attn", "self_attention", "attention", "attn",
)  # fmt: skip
# Norms of what attention and the MLP return, before it is added: they are the writers then.
NORMED = (
    ("post_self_attn_layernorm", "post_mlp_layernorm"),  # GLM-4, whose post_attention_layernorm the MLP reads
    ("post_attention_layernorm", "post_feedforward_layernorm"),  # Gemma-2, Gemma-3, OLMo-2
    ("post_attention_layernorm", "post_mlp_layernorm"),
    ("post_operator_norm", "post_ffn_norm"),
    ("post_norm1", "post_norm2"),
)


@dataclass(frozen=True)
class Block:
    """One layer.

    Attributes:
        layer: The layer's module.
        attention: The module whose attention is read; None where the layer has none that can be (`without_attention`).
        attention_writer, mlp_writer: The modules whose outputs, times `scale`, are added to the residual stream. None
            where there is none, or it could not be told by structure. Whoever builds on them checks the identity
            residual out = residual in + attention write + MLP write (`self_check` does).
        mixer: In a layer whose attention is not read, the module that adds what other positions say: a recurrence, a
            convolution, or attention of another kind.
        scale: Granite multiplies what a module returns before it is added.
    """

    layer: nn.Module
    attention: nn.Module | None
    attention_writer: nn.Module | None
    mlp_writer: nn.Module | None
    mixer: nn.Module | None = None
    scale: float = 1.0


def blocks(model: Any, name: str) -> tuple[Block, ...]:
    """The layers in order. Attention is told by its code: it calls transformers' attention interface.

    Raises UnsupportedModel: the layers cannot be told, or the model has an encoder.
    """
    config: Any = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name}: model type {config.model_type!r} has an encoder; only decoders are read")
    bypassed = not getattr(model, "_can_set_attn_implementation", bool)()
    scale = float(getattr(config and config.get_text_config(), "residual_multiplier", None) or 1.0)
    found = []
    for layer in _stack(model, name):
        attending, children = [] if bypassed else attentions(layer), dict(layer.named_children())
        attention = attending[0] if len(attending) == 1 else None
        mixer = attention or next((children[name] for name in MIXERS if name in children), None)
        mlp = next((children[name] for name in MLPS if name in children), None)
        for after_mixer, after_mlp in NORMED:
            if after_mixer in children and after_mlp in children:
                mixer, mlp = children[after_mixer], children[after_mlp]
                break
        if mlp is None and type(mixer).__name__.lower().endswith(("mlp", "moe")):
            mixer, mlp = None, mixer  # Nemotron-H: a layer is one thing alone, and all of them are called mixer
        if attention is None:
            found.append(Block(layer, None, None, mlp, mixer, scale))
        else:
            found.append(Block(layer, attention, mixer, mlp, None, scale))
    return tuple(found)


def _stack(model: Any, name: str) -> nn.ModuleList:
    """The list of layers: of the outermost lists of modules the one that is as long as the config says."""
    text = model.config.get_text_config() if hasattr(model, "config") else None
    decoder = next((m for m in model.modules() if isinstance(m, PreTrainedModel) and m.config is text), model)
    lists = [(path.count("."), m) for path, m in decoder.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    outer = [m for depth, m in lists if depth == min(depth for depth, _ in lists)]
    stacks = [m for m in outer if len(m) == getattr(text, "num_hidden_layers", None)] or outer
    if len(stacks) != 1:
        raise UnsupportedModel(
            f"{name}: model type {getattr(text, 'model_type', type(model).__name__)!r} has {len(stacks)} stacks of "
            "layers; one decoder whose layers run once, one after another, is read"
        )
    return stacks[0]


def attentions(layer: nn.Module) -> list[nn.Module]:
    """The modules inside a layer whose code calls transformers' attention interface."""
    found = []
    for module in layer.modules():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names:
            found.append(module)
    return found


def attending(blocks: Sequence[Block]) -> tuple[int, ...]:
    """The numbers of the layers whose attention is read."""
    return tuple(index for index, block in enumerate(blocks) if block.attention is not None)


def without_attention(model: Any, blocks: Sequence[Block]) -> str:
    """Why no layer has attention that can be read, with a way that exists; empty where one has."""
    if attending(blocks):
        return ""
    if own := getattr(model, "without_attention", ""):
        return own
    config = model.config.get_text_config()
    kind = config.model_type
    if getattr(config, "num_attention_heads", None) and not model._can_set_attn_implementation():
        way = "--backend tl reads it" if kind in THROUGH_TL else "the residual stream can be read"
        return f"model type {kind!r} does not send its attention through transformers' interface; {way}"
    if any(len(attentions(block.layer)) > 1 for block in blocks):
        return f"each layer of model type {kind!r} has several attention modules; the residual stream can be read"
    return f"model type {kind!r} has no softmax attention; the residual stream can be read"
