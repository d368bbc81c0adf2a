"""Fresh models by the name of an architecture and a seed, and shapes with a given number of parameters."""

from __future__ import annotations

import math
from bisect import bisect_right
from functools import cache, partial
from typing import Any

import torch
import transformers
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from llmgeom.errors import UserError, unknown
from llmgeom.wind_tunnels.models import ARCHITECTURES
from llmgeom.wind_tunnels.models.tunnel import EXPAND, MIXERS, TunnelConfig

LONGER = 4  # positions of a model, in lengths of its task, so that longer sequences can be graded
STATE = 16  # states of a state space
SHARED = 4  # query heads that share a key and value head in gqa
ROTARY = frozenset({"neox", "llama", "gqa", "window"})
GATED = ROTARY - {"neox"}
TOLERANCE = 0.02  # of the requested number of parameters


def build(arch: str, *, seed: int = 0, **shape: Any) -> PreTrainedModel:
    """A model with fresh weights that depend only on `seed`, float32 on the CPU; `shape` as in `configured`.

    Raises UserError: an unknown architecture, or a shape that it cannot have.
    """
    config = configured(arch, **shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def configured(
    arch: str,
    *,
    vocabulary: int,
    length: int,
    features: int = 0,
    width: int = 64,
    layers: int = 2,
    heads: int = 4,
    inner: int | None = None,
) -> PreTrainedConfig:
    """The config of the model that `build` builds.

    Args:
        vocabulary: Number of tokens; for rows of inputs, outputs of the head.
        features: Real numbers in a row of inputs; 0 if inputs are tokens.
        inner: Width of the MLP (transformers, mlp, meanpool, flat) or of the LSTM's state, or states of a state space;
            None for the usual number.
    """
    if arch not in ARCHITECTURES:
        raise unknown("architecture", arch, ARCHITECTURES)
    inner = usual(arch, width) if inner is None else inner
    sizes = {"vocabulary": vocabulary, "length": length, "width": width, "layers": layers, "heads": heads}
    for name, value in {**sizes, "inner": inner}.items():
        if value < 1:
            raise UserError(f"{arch}: {name} {value}; expected at least 1")
    if features < 0:
        raise UserError(f"{arch}: features {features}; expected how many numbers a row has, or 0 for tokens")
    if width % (by := step(arch, heads)):
        near = max(by, round(width / by) * by)
        raise UserError(f"{arch}: width {width} does not go with {heads} heads; expected a multiple of {by}, as {near}")
    if arch == "gqa" and heads % SHARED:
        raise UserError(f"gqa: {heads} heads; expected a multiple of {SHARED}, the heads that share keys and values")
    config = _inside(arch, inner=inner, **sizes)
    if not features:
        return config
    return RowsConfig(features=features, text_config=config, initializer_range=config.initializer_range)


def usual(arch: str, width: int) -> int:
    """The usual `inner` of `build` for a width."""
    if arch in ("mamba2", "mamba"):
        return STATE
    if arch == "lstm":
        return width
    # A gated MLP has three matrices, a plain one two.
    return max(1, round(8 * width / 3)) if arch in GATED else 4 * width


def step(arch: str, heads: int) -> int:
    """Widths must be multiples of this: heads divide the width (for mamba2 the expanded one), and rotary embedding
    rotates pairs of a head's numbers."""
    if arch == "mamba2":
        return heads // math.gcd(heads, EXPAND)
    return 2 * heads if arch in ROTARY else heads if arch == "gpt2" else 1


def _inside(
    arch: str, *, vocabulary: int, length: int, width: int, layers: int, heads: int, inner: int
) -> PreTrainedConfig:
    """The config of the inner model, which reads embeddings of any origin."""
    shared: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "max_position_embeddings": length if arch == "flat" else LONGER * length,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if arch in MIXERS:
        return TunnelConfig(mixer=arch, inner_size=inner, num_heads=heads, **shared)
    shared["num_attention_heads"] = heads
    # With the usual .02, which suits widths of a thousand and more, a model of width 64 had not learnt associative
    # recall after 1,000 steps; with .125 it had after 150 (neox, 2 heads, lr 2e-3). State spaces learn better with .02.
    shared["initializer_range"] = width**-0.5
    if arch == "gpt2":
        shared |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return transformers.GPT2Config(n_inner=inner, **shared)
    rotary = {"rope_type": "default", "rope_theta": 10000.0}
    shared["intermediate_size"] = inner
    if arch == "neox":
        return transformers.GPTNeoXConfig(rope_parameters=rotary | {"partial_rotary_factor": 1.0}, **shared)
    shared |= {"rope_parameters": rotary, "num_key_value_heads": heads // SHARED if arch == "gqa" else heads}
    if arch == "window":
        return transformers.MistralConfig(sliding_window=max(4, length // 3), **shared)
    return transformers.LlamaConfig(**shared)


# ---- the shape of a size ---------------------------------------------------------------------------------------------


def matched(
    arch: str, parameters: int, *, vocabulary: int, length: int, features: int = 0, layers: int = 2, heads: int = 4
) -> dict[str, int]:
    """A shape for `build(arch, **matched(...), ...)` with `parameters` parameters, within 2 %: a width and, if the
    widths that heads divide are too far apart, an inner width that compensates.

    Raises:
        UserError: no such shape exists; the message has the nearest one.
    """
    fixed = {"vocabulary": vocabulary, "length": length, "features": features, "layers": layers, "heads": heads}

    @cache
    def count(width: int, inner: int | None = None) -> int:
        config = configured(arch, width=width, inner=inner, **fixed)
        with torch.device("meta"):  # without allocating them
            return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())

    by = step(arch, heads)
    # Every architecture has a matrix of width times width, so no width that fits is above the root.
    below = by * bisect_right(range(by, math.isqrt(parameters) + 1, by), parameters, key=count)
    shapes = []
    for width in (below, below + by) if below else (by,):
        plain = usual(arch, width)
        shapes.append({"width": width})
        # Half to twice the usual. An LSTM's count jumps at the usual one, where it needs no output map: two ranges.
        for inner in (range(max(1, plain // 2), plain), range(plain + 1, 2 * plain + 1)):
            fitting = bisect_right(inner, parameters, key=partial(count, width))
            shapes += [{"width": width, "inner": i} for i in inner[max(0, fitting - 1) : fitting + 1]]

    def off(shape: dict[str, int]) -> float:
        return abs(count(**shape) / parameters - 1)

    def unusual(shape: dict[str, int]) -> tuple[float, float]:
        plain = usual(arch, shape["width"])
        return abs(shape.get("inner", plain) / plain - 1), off(shape)

    if within := [shape for shape in shapes if off(shape) <= TOLERANCE]:
        return min(within, key=unusual)
    nearest = min(shapes, key=off)
    spelt = " and ".join(f"{name} {value}" for name, value in nearest.items())
    raise UserError(
        f"{arch}: no shape of {layers} layers and {heads} heads has {parameters} parameters within {TOLERANCE:.0%}; "
        f"the nearest, {spelt}, has {count(**nearest)}: ask for as many, or for other layers or heads"
    )


# ---- any causal LM on rows of real numbers: a linear map replaces its embedding -------------------------------------


class RowsConfig(PreTrainedConfig):
    """The config of a RowsForCausalLM.

    Attributes:
        features: real numbers in a row.
        text_config: config of the inner model; its vocabulary is the number of outputs of the head.
    """

    model_type = "llmgeom_rows"
    # transformers' own way to say so: with an annotation it would be a field.
    sub_configs = {"text_config": AutoConfig}  # noqa: RUF012  # pyright: ignore

    features: int = 1
    text_config: dict | PreTrainedConfig | None = None
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs: Any) -> None:
        if isinstance(self.text_config, dict):
            self.text_config = CONFIG_MAPPING[self.text_config["model_type"]](**self.text_config)
        super().__post_init__(**kwargs)


class RowsForCausalLM(PreTrainedModel):
    """A causal LM on rows: inner(inputs_embeds=read(rows)). The inner model keeps its unused embedding, so that it can
    be saved and loaded as its own class."""

    config_class = RowsConfig
    main_input_name = "rows"
    _input_embed_layer = "read"
    _supports_sdpa = True

    def __init__(self, config: RowsConfig) -> None:
        super().__init__(config)
        inner = config.get_text_config()
        self.read = nn.Linear(config.features, inner.hidden_size)
        self.inner = AutoModelForCausalLM.from_config(inner)
        self.post_init()

    @property
    def without_attention(self) -> str:
        """Why the inner model has no attention; empty if it has."""
        return getattr(self.inner, "without_attention", "")

    @property
    def layers(self) -> nn.ModuleList:
        """The layers of an inner model without attention; other models' layers are found by their attention."""
        return self.inner.layers

    def _can_set_attn_implementation(self) -> bool:  # type: ignore[override]  # theirs is of the class
        """transformers calls this on the class; here the result depends on the inner model."""
        return self.inner._can_set_attn_implementation()

    def get_output_embeddings(self) -> nn.Module:
        return self.inner.get_output_embeddings()

    def forward(self, rows: Float[Tensor, "batch seq feature"], **kwargs: Any) -> Any:
        """The forward of the inner model, with its arguments: logits_to_keep, position_ids, use_cache ..."""
        return self.inner(inputs_embeds=self.read(rows.to(self.read.weight.dtype)), **kwargs)


AutoConfig.register(RowsConfig.model_type, RowsConfig, exist_ok=True)
AutoModelForCausalLM.register(RowsConfig, RowsForCausalLM, exist_ok=True)
