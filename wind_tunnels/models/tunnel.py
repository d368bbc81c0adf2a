"""One skeleton, six ways of mixing positions: what stands in for attention is all that differs."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import CausalLMOutput

from llmgeom.errors import UserError
from llmgeom.wind_tunnels.models.config import TunnelConfig
from llmgeom.wind_tunnels.models.state_space import Mamba, Mamba2


class LSTM(nn.Module):
    """One LSTM layer; where its state is not as wide as the residual stream, a linear map brings it there."""

    def __init__(self, config: TunnelConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.inner_size
        self.lstm = nn.LSTM(width, inner, batch_first=True)
        self.out_proj = nn.Linear(inner, width, bias=False) if inner != width else nn.Identity()

    def forward(self, x: Float[Tensor, "batch seq hidden"]) -> Float[Tensor, "batch seq hidden"]:
        return self.out_proj(self.lstm(x)[0])


class Mean(nn.Module):
    """y_t = W (x_1 + ... + x_t) / t: uniform attention."""

    def __init__(self, config: TunnelConfig) -> None:
        super().__init__()
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Float[Tensor, "batch seq hidden"]) -> Float[Tensor, "batch seq hidden"]:
        count = torch.arange(1, x.shape[1] + 1, device=x.device)
        return self.out_proj(x.cumsum(1) / count[:, None])


class Slots(nn.Module):
    """y_t = sum_{j <= t} W_j x_j, with the MLP after it an MLP on the flattened prefix; weight[j] is W_j transposed."""

    def __init__(self, config: TunnelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.max_position_embeddings, config.hidden_size, config.hidden_size))
        self.std = config.initializer_range

    def initialise(self) -> None:
        init.normal_(self.weight, std=self.std)

    def forward(self, x: Float[Tensor, "batch seq hidden"]) -> Float[Tensor, "batch seq hidden"]:
        if x.shape[1] > len(self.weight):
            raise UserError(
                f"a flat model has maps for {len(self.weight)} positions, not for {x.shape[1]}: shorten the input"
            )
        return (x.transpose(0, 1) @ self.weight[: x.shape[1]]).transpose(0, 1).cumsum(1)


MIXERS = {"mamba2": Mamba2, "mamba": Mamba, "lstm": LSTM, "mlp": None, "meanpool": Mean, "flat": Slots}
WITH_MLP = frozenset({"mlp", "meanpool", "flat"})


class Layer(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)); state spaces and LSTMs have no MLP, and "mlp" nothing else."""

    def __init__(self, config: TunnelConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        width, inner = config.hidden_size, config.inner_size
        mixer = MIXERS[config.mixer]
        self.mixer = self.mlp = None
        if mixer:
            self.norm = nn.RMSNorm(width, eps=config.norm_eps)
            self.mixer = mixer(config)
        if config.mixer in WITH_MLP:
            self.mlp_norm = nn.RMSNorm(width, eps=config.norm_eps)
            self.mlp = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))

    def forward(self, x: Float[Tensor, "batch seq hidden"]) -> Float[Tensor, "batch seq hidden"]:
        if self.mixer is not None:
            x = x + self.mixer(self.norm(x))
        return x if self.mlp is None else x + self.mlp(self.mlp_norm(x))


class TunnelForCausalLM(PreTrainedModel):
    """Embedding, layers, norm, head. Position t answers from inputs 1 .. t. Inputs are padded on the right or not at
    all: `attention_mask` and `position_ids` would say nothing and are ignored, as is `use_cache`: there is no cache."""

    config_class = TunnelConfig
    _input_embed_layer = "embeddings"

    def __init__(self, config: TunnelConfig) -> None:
        super().__init__(config)
        # Named as in transformers' Mamba models.
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_hidden_layers))
        self.norm_f = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @property
    def without_attention(self) -> str:
        """Why there are no keys, queries and values to read, for `llmgeom.blocks`."""
        article = "an" if self.config.mixer in ("lstm", "mlp") else "a"
        return f"{article} {self.config.mixer} model has no attention"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Mamba2 | Mamba | Slots):
            module.initialise()

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **ignored: Any,
    ) -> CausalLMOutput:
        """logits_to_keep: the last so many positions (0: all), or positions [kept] int64."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give input_ids or inputs_embeds, one of the two")
        x = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            x = layer(x)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutput(logits=self.lm_head(self.norm_f(x[:, kept])))


AutoConfig.register(TunnelConfig.model_type, TunnelConfig, exist_ok=True)
AutoModelForCausalLM.register(TunnelConfig, TunnelForCausalLM, exist_ok=True)
