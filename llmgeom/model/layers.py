"""Which modules of a causal LM are its layers, and which of them write to the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from llmgeom.errors import UnsupportedModel


@dataclass(frozen=True)
class Block:
    """One layer: the layer module, its attention module, and the modules whose outputs are added to the residual.

    attention is None in a model without (an LSTM), and so are the two writers then.

    The two writers are None where they could not be told by structure. Whoever builds on them checks the identity
    residual out = residual in + attention write + MLP write (Subject does so at load).
    """

    layer: nn.Module
    attention: nn.Module | None
    attention_writer: nn.Module | None
    mlp_writer: nn.Module | None


def blocks(model: nn.Module, name: str) -> tuple[Block, ...]:
    """The layers in order, found by the `layer_idx` that transformers gives every self-attention module.

    A model that says why it has no attention (`without_attention`) is read between its layers alone.
    Raises UnsupportedModel where there is no complete run 0 .. L-1 of them.
    """
    if without_attention(model):
        return tuple(Block(layer, None, None, None) for layer in model.get_submodule("layers").children())
    attention_at: dict[int, tuple[str, nn.Module]] = {}
    modules = dict(model.named_modules())
    for path, module in modules.items():
        index = getattr(module, "layer_idx", None)
        # Decoder layers may carry layer_idx too; attention is the one that holds head_dim or projections itself.
        called = path.rsplit(".", 1)[-1].lower().replace("attention", "attn")
        # Qwen3-Next's linear_attn has no attention weights: it is refused here, before weights are read.
        if isinstance(index, int) and "attn" in called and "linear" not in called:
            if index in attention_at:
                raise UnsupportedModel(
                    f"{name}: layer {index} has two attention modules ({attention_at[index][0]}, {path}); "
                    "cross-attention and encoder-decoder models are not read"
                )
            attention_at[index] = (path, module)
    model_type = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if attention_at and sorted(attention_at) != list(range(len(attention_at))):
        raise UnsupportedModel(
            f"{name}: only layers {', '.join(map(str, sorted(attention_at)))} of model type {model_type!r} have "
            "self-attention; hybrid models are not read"
        )
    if not attention_at:
        raise UnsupportedModel(
            f"{name}: model type {model_type!r} has no self-attention layers that transformers' attention interface "
            "reaches; try --backend tl, which reads models through TransformerLens"
        )
    return tuple(_block(modules, *attention_at[index]) for index in range(len(attention_at)))


def without_attention(model: nn.Module) -> str:
    """Why a model has no attention, as it says itself ("an lstm model has no attention"); empty where it has."""
    return getattr(model, "without_attention", "")


def _block(modules: dict[str, nn.Module], path: str, attention: nn.Module) -> Block:
    layer = modules[path.rsplit(".", 1)[0]]
    children = dict(layer.named_children())
    mlp = children.get("mlp") or children.get("fc2")
    # Gemma-2, Gemma-3, OLMo-2 and GLM-4 normalise a branch's output before adding it: the norm is the writer.
    if norm := children.get("post_feedforward_layernorm") or children.get("post_mlp_layernorm"):
        # GLM-4 has both: its post_attention_layernorm is what the MLP reads.
        before = children.get("post_self_attn_layernorm") or children.get("post_attention_layernorm")
        return Block(layer, attention, before, norm)
    return Block(layer, attention, attention, mlp)
