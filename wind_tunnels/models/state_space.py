"""The mixers of Mamba-2 and Mamba-1, with transformers' parameters under transformers' names.

State h, input x, output y; dt > 0 is a step that depends on the input, A < 0 a rate, B and C read the input:

    h_t = exp(A dt_t) h_{t-1} + dt_t B_t x_t,    y_t = C_t . h_t + D x_t

Mamba-2 has one A and dt for each head (Dao & Gu 2024), Mamba-1 one A for each channel and state and one dt for each
channel (Gu & Dao 2023). Neither is the simplified scan that the papers' code calls Mamba.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from transformers import initialization as init

if TYPE_CHECKING:
    from llmgeom.wind_tunnels.models.config import TunnelConfig

EXPAND, KERNEL = 2, 4
SLOWEST, FASTEST = 0.001, 0.1  # steps dt at initialisation, log-uniform


class Mamba2(nn.Module):
    """y = (L o C B^T) (dt x) + D x with L_ij = exp(sum_{k=j+1..i} A dt_k) for j <= i, else 0.

    The recurrence above written out (state space duality): matrix products over positions, as attention has them.
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
        init.copy_(self.dt_bias, _inverse_softplus(_steps(self.heads)))
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
        init.copy_(self.dt_proj.bias, _inverse_softplus(_steps(self.dt_proj.out_features)))
        _as_linear(self.conv1d, self.out_proj)

    def forward(self, u: Float[Tensor, "batch seq hidden"]) -> Float[Tensor, "batch seq hidden"]:
        x, gate = self.in_proj(u).chunk(2, -1)
        x = _causal(self.conv1d, x)
        dt, b, c = self.x_proj(x).split([self.dt_proj.in_features, self.state, self.state], -1)
        dt = F.softplus(self.dt_proj(dt))
        rate = -self.A_log.exp()
        h, found = 0, []
        # A position at a time stays in the cache: all at once takes longer.
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


def _steps(n: int) -> Float[Tensor, " n"]:
    return torch.exp(torch.empty(n).uniform_(math.log(SLOWEST), math.log(FASTEST)))


def _inverse_softplus(x: Tensor) -> Tensor:
    return x + torch.log(-torch.expm1(-x))


def _as_linear(conv: nn.Conv1d, out: nn.Linear) -> None:
    """Both as torch initialises them, as transformers does; the convolution's bias at zero."""
    init.kaiming_uniform_(conv.weight, a=math.sqrt(5))
    if conv.bias is not None:
        init.zeros_(conv.bias)
    init.kaiming_uniform_(out.weight, a=math.sqrt(5))
