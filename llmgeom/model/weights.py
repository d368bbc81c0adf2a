"""The matrices of one attention head, cut from the weights of a transformers model, one at a time.

Convention x @ W + b: x is the input of the attention module (after the layer's input norm where there is one), and what
comes out is what the family projects, before rotary embedding, query/key norms and any scale of queries (OPT). Every
function returns a copy, in the model's dtype and on its device: nobody writes into the model.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from llmgeom.errors import Unavailable, UserError
from llmgeom.model.capture import Site

Projection: TypeAlias = nn.Linear | Conv1D
Role = Literal["query", "key", "value"]
ROLES: tuple[Role, ...] = ("query", "key", "value")


def input_weights(
    subject: Any, layer: int, role: Role, head: int
) -> tuple[Float[Tensor, "d_model head_dim"], Float[Tensor, " head_dim"]]:
    """W_Q, W_K or W_V of one head and the bias added after it, zeros where the family has none.

    Query head h reads the keys and values of kv head h // (heads / kv_heads).

    Raises UserError for a layer or head that does not exist; Unavailable for offloaded weights and unknown layouts.
    """
    attention, dim = _attention(subject, layer)
    heads, kv_heads = subject.facts["heads"], subject.facts["kv_heads"]
    own = heads if role == "query" else kv_heads
    _there(subject, "head" if role == "query" else "kv_head", head, own)
    part = ROLES.index(role)
    before = (0, heads, heads + kv_heads)[part]  # heads that come first where all queries, keys, values lie in blocks
    # Name and kind of the projection, how many heads wide it is, and which of them is ours.
    layouts = (
        (f"{role[0]}_proj", nn.Linear, own, head),
        ("qkv_proj", nn.Linear, heads + 2 * kv_heads, before + head),  # Phi-3
        ("c_attn", Conv1D, 3 * heads, before + head),  # GPT-2; as a Linear (GPT-BigCode) it has another layout
        ("query_key_value", nn.Linear, 3 * heads, 3 * head + part),  # GPT-NeoX: each head its query, key and value
    )
    for name, kind, count, ours in layouts:
        projection = getattr(attention, name, None)
        if isinstance(projection, kind):
            weight = _weight(subject, layer, projection)
            # Known by name, confirmed by size: a gated or latent projection has another width.
            if weight.shape == (subject.facts["d_model"], count * dim):
                columns, bias = slice(ours * dim, (ours + 1) * dim), projection.bias
                bias = weight.new_zeros(dim) if bias is None else bias.detach()[columns].clone()
                return weight[:, columns].clone(), bias
    raise _unknown(subject, role, attention)


def query_weight(subject: Any, layer: int, head: int) -> Float[Tensor, "d_model head_dim"]:
    """W_Q of a query head. Raises as `input_weights`."""
    return input_weights(subject, layer, "query", head)[0]


def key_weight(subject: Any, layer: int, kv_head: int) -> Float[Tensor, "d_model head_dim"]:
    """W_K of a key/value head. Raises as `input_weights`."""
    return input_weights(subject, layer, "key", kv_head)[0]


def value_weight(subject: Any, layer: int, kv_head: int) -> Float[Tensor, "d_model head_dim"]:
    """W_V of a key/value head. Raises as `input_weights`."""
    return input_weights(subject, layer, "value", kv_head)[0]


def value_bias(subject: Any, layer: int, kv_head: int) -> Float[Tensor, " head_dim"]:
    """The bias added after W_V. Raises as `input_weights`."""
    return input_weights(subject, layer, "value", kv_head)[1]


def output_weight(subject: Any, layer: int, head: int) -> Float[Tensor, "head_dim d_model"]:
    """W_O of a query head: the sum over heads of z @ W_O, plus a bias where there is one, is what attention returns.

    In families that normalise this sum before adding it (Gemma-2, Gemma-3, OLMo-2, GLM-4) it is not yet the write.
    Raises as `input_weights`.
    """
    projection, (_, dim) = output_projection(subject, layer), _attention(subject, layer)
    _there(subject, "head", head, subject.facts["heads"])
    return _weight(subject, layer, projection)[head * dim : (head + 1) * dim].clone()


def output_projection(subject: Any, layer: int) -> Projection:
    """The module that mixes the heads back: W_O and its bias. Raises as `input_weights`."""
    attention, dim = _attention(subject, layer)
    shape = (subject.facts["heads"] * dim, subject.facts["d_model"])
    for name in ("o_proj", "out_proj", "dense", "c_proj"):
        projection = getattr(attention, name, None)
        if isinstance(projection, Projection) and _weight(subject, layer, projection).shape == shape:
            return projection
    raise _unknown(subject, "output", attention)


@torch.no_grad()
def norm_gain(norm: nn.Module, width: int) -> Tensor:
    """[width] float64 the gain of a norm at each coordinate, however the family stores it (Gemma stores gain - 1).

    (N(v) - N(-v)) / 2v for v = 1, -1, 1, -1 ..., with mean 0 and mean square 1: bias and eps cancel. Derived here.
    Raises Unavailable: the output has another width, as that of a projection.
    """
    v = 1 - 2.0 * (torch.arange(width) % 2)
    x = v.to(next(norm.parameters(), v))[None, None]
    gain = ((norm(x) - norm(-x)) / 2)[0, 0].double().cpu()
    if len(gain) != width:
        raise Unavailable(f"a {type(norm).__name__} from {width} to {len(gain)} coordinates has no gain for each")
    return gain * v


def whole(subject: Any) -> None:
    """Raises Unavailable for quantised weights: the stored numbers are not the ones that multiply."""
    if how := subject.facts.get("quantised"):
        raise Unavailable(f"the weights of {subject.name} are quantised ({how}); load it whole to read them")


def _attention(subject: Any, layer: int) -> tuple[nn.Module, int]:
    """A layer's attention, and the width of its heads."""
    _there(subject, "layer", layer, len(subject.blocks))
    if (attention := subject.blocks[layer].attention) is None:
        raise Unavailable(f"{subject.name}: layer {layer} has no attention weights: {subject.partial({Site.VALUE})}")
    return attention, getattr(attention, "head_dim", None) or subject.facts["head_dim"]


def _there(subject: Any, what: str, index: int, count: int) -> None:
    if not 0 <= index < count:
        raise UserError(f"{what} {index}: {subject.name} has {what}s 0 to {count - 1}")


def _weight(subject: Any, layer: int, projection: Projection) -> Tensor:
    """[in out], the same tensor as the model's: Linear stores W transposed, Conv1D as it is used."""
    whole(subject)
    weight = projection.weight.detach()
    if weight.is_meta:
        raise Unavailable(
            f"the weights of layer {layer} of {subject.name} are offloaded (on the meta device); "
            "load the model without --device-map to read them"
        )
    return weight if isinstance(projection, Conv1D) else weight.T


def _unknown(subject: Any, what: str, attention: nn.Module) -> Unavailable:
    found = ", ".join(name for name, _ in attention.named_children()) or "no modules"
    return Unavailable(
        f"{subject.name}: how model type {subject.facts['model_type']!r} lays out its {what} weights is not known "
        f"(its {type(attention).__name__} holds {found}); activations can still be captured"
    )
