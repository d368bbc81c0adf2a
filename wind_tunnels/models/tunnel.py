"""Our short models: one skeleton, and six ways of mixing positions instead of attention.

The mixers of Mamba-2 and Mamba-1 have transformers' parameters under transformers' names. State h, input x, output y;
dt > 0 is a step that depends on the input, A < 0 a rate, B and C read the input:

    h_t = exp(A dt_t) h_{t-1} + dt_t B_t x_t,    y_t = C_t . h_t + D x_t

Mamba-2 has one A and dt for each head (Dao & Gu 2024), Mamba-1 one A for each channel and state and one dt for each
channel (Gu & Dao 2023). Neither is the simplified scan that the papers' code calls Mamba.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, initialization as init
from transformers.modeling_outputs import CausalLMOutput

from llmgeom.errors import UserError


class TunnelConfig(PreTrainedConfig):
    """The shape of a TunnelForCausalLM.

    Attributes:
        mixer: One of MIXERS.
        inner_size: States of a channel's memory (mamba2, mamba), width of the LSTM's state, or of the MLP (mlp,
            meanpool, flat).
        num_heads: Decays of a layer (mamba2).
    """

    model_type = "llmgeom_tunnel"

    mixer: str = "mamba2"
    vocab_size: int = 16
    hidden_size: int = 64
    num_hidden_layers: int = 2
    num_heads: int = 4
    inner_size: int = 16
    max_position_embeddings: int = 64
    initializer_range: float = 0.02
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = False


EXPAND, KERNEL = 2, 4
SLOWEST, FASTEST = 0.001, 0.1  # steps dt at initialisation, log-uniform


class Mamba2(nn.Module):
    """y = (L o C B^T) (dt x) + D x with L_ij = exp(sum_{k=j+1..i} A dt_k) for j <= i, else 0.

    The recurrence above written out (state space duality): matrix products over positions, as in attention.
    """

    def __init__(self, config: TunnelConfig) -> None:
        super().__init__()
        wide, self.state, self.heads = EXPAND * config.hidden_size, config.inner_size, config.num_heads
        self.in_proj = nn.Linear(config.hidden_size, 2 * wide + 2 * self.state + self.heads, bias=False)
        self.conv1d = _convolution(wide + 2 * self.state)
        self.dt_bias = nn.Parameter(torch.empty(self.heads))
        self.A_log = nn.Parameter(torch.empty(self.heads))
        self.D = nn.Parameter(torch.empty(self.heads))
        self.norm = nn.RMSNorm(wide, eps=config.norm_eps)
        self.out_proj = nn.Linear(wide, config.hidden_size, bias=False)

    def initialise(self) -> None:
        init.copy_(self.A_log, torch.arange(1.0, self.heads + 1).log())
        init.copy_(self.dt_bias, _step_bias(self.heads))
        init.ones_(self.D)
        _as_linear(self.conv1d, self.out_proj)

    def forward(self, u: Float[Tensor, "batch seq hidden"]) -> Float[Tensor, "batch seq hidden"]:
        wide, seq = self.out_proj.in_features, u.shape[1]
        gate, mixed, dt = self.in_proj(u).split([wide, wide + 2 * self.state, self.heads], -1)
        x, b, c = _causal(self.conv1d, mixed).split([wide, self.state, self.state], -1)
        x = x.unflatten(-1, (self.heads, -1))
        dt = F.softplus(dt + self.dt_bias)
        total = (-self.A_log.exp() * dt).cumsum(1).mT
        # Filled before exp: the sums above the diagonal are positive, and inf * 0 has no gradient.
        future = torch.ones(seq, seq, dtype=torch.bool, device=u.device).triu(1)
        decay = (total[..., None] - total[..., None, :]).masked_fill(future, -math.inf).exp()
        y = (c @ b.mT)[:, None] * decay @ (dt[..., None] * x).transpose(1, 2)
        y = y.transpose(1, 2) + self.D[:, None] * x
        return self.out_proj(self.norm(y.flatten(2) * F.silu(gate)))


class Mamba(nn.Module):
    """The recurrence above, position by position: exact, and on a CPU faster than a parallel scan."""

    def __init__(self, config: TunnelConfig) -> None:
        super().__init__()
        wide, self.state = EXPAND * config.hidden_size, config.inner_size
        rank = math.ceil(config.hidden_size / 16)
        self.in_proj = nn.Linear(config.hidden_size, 2 * wide, bias=False)
        self.conv1d = _convolution(wide)
        self.x_proj = nn.Linear(wide, rank + 2 * self.state, bias=False)
        self.dt_proj = nn.Linear(rank, wide)
        self.A_log = nn.Parameter(torch.empty(wide, self.state))
        self.D = nn.Parameter(torch.empty(wide))
        self.out_proj = nn.Linear(wide, config.hidden_size, bias=False)

    def initialise(self) -> None:
        init.copy_(self.A_log, torch.arange(1.0, self.state + 1).log().expand_as(self.A_log))
        init.ones_(self.D)
        bound = self.dt_proj.in_features**-0.5
        init.uniform_(self.dt_proj.weight, -bound, bound)
        init.copy_(self.dt_proj.bias, _step_bias(self.dt_proj.out_features))
        _as_linear(self.conv1d, self.out_proj)

    def forward(self, u: Float[Tensor, "batch seq hidden"]) -> Float[Tensor, "batch seq hidden"]:
        x, gate = self.in_proj(u).chunk(2, -1)
        x = _causal(self.conv1d, x)
        dt, b, c = self.x_proj(x).split([self.dt_proj.in_features, self.state, self.state], -1)
        dt = F.softplus(self.dt_proj(dt))
        rate = -self.A_log.exp()
        h, found = 0, []
        # One position at a time fits the processor's cache; all positions at once take longer.
        for dt_t, dtx_t, b_t, c_t in zip(dt.unbind(1), (dt * x).unbind(1), b.unbind(1), c.unbind(1), strict=True):
            h = (dt_t[..., None] * rate).exp() * h + dtx_t[..., None] * b_t[:, None]
            found.append((h @ c_t[..., None])[..., 0])
        y = torch.stack(found, 1) + self.D * x
        return self.out_proj(y * F.silu(gate))


def _convolution(channels: int) -> nn.Conv1d:
    return nn.Conv1d(channels, channels, KERNEL, groups=channels, padding=KERNEL - 1)


def _causal(conv: nn.Conv1d, x: Float[Tensor, "batch seq channel"]) -> Float[Tensor, "batch seq channel"]:
    """SiLU of each channel's convolution with itself and the three positions before."""
    return F.silu(conv(x.mT)[..., : x.shape[1]].mT)


def _step_bias(n: int) -> Float[Tensor, " n"]:
    """Numbers whose softplus is log-uniform from SLOWEST to FASTEST."""
    steps = torch.exp(torch.empty(n).uniform_(math.log(SLOWEST), math.log(FASTEST)))
    return steps + torch.log(-torch.expm1(-steps))


def _as_linear(conv: nn.Conv1d, out: nn.Linear) -> None:
    """Initialise both as torch and transformers do, with the convolution's bias at zero."""
    init.kaiming_uniform_(conv.weight, a=math.sqrt(5))
    if conv.bias is not None:
        init.zeros_(conv.bias)
    init.kaiming_uniform_(out.weight, a=math.sqrt(5))


class LSTM(nn.Module):
    """One LSTM layer; if its state and the residual stream differ in width, a linear map connects them."""

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
    """y_t = sum_{j <= t} W_j x_j; with the next MLP, an MLP on the flattened prefix. weight[j] is W_j transposed."""

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
    """x + mixer(norm(x)), then x + mlp(norm(x)); state spaces and LSTMs have no MLP, "mlp" has no mixer."""

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
    all, so `attention_mask` and `position_ids` are ignored; so is `use_cache`, since there is no cache."""

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
        """logits_to_keep: the number of last positions (0: all), or positions [kept] int64."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give input_ids or inputs_embeds, one of the two")
        x = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            x = layer(x)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutput(logits=self.lm_head(self.norm_f(x[:, kept])))


AutoConfig.register(TunnelConfig.model_type, TunnelConfig, exist_ok=True)
AutoModelForCausalLM.register(TunnelConfig, TunnelForCausalLM, exist_ok=True)
