"""A selective state space written out as weights on earlier inputs, y_i = sum_{j<=i} w_ij x_j, and its gradients.

Derived here from the recurrences of Mamba-2 (Dao & Gu 2024) and Mamba-1 (Gu & Dao 2023):

    w_ij = sum_n C_in B_jn dt_j exp(A_n (dt_{j+1} + ... + dt_i))

in every head (Mamba-2; one A, and all heads share C and B) or channel (Mamba-1). With u_i = dL/dy_i, b_ij = u_i . x_j

    dL/dw_ij = b_ij        dL/d log|w_ij| = w_ij b_ij        dL/dx_j = sum_i w_ij u_i    (through the values only)

and no baseline is subtracted: weights are not normalised, so keys do not compete, and the softmax's baseline E_i b is
absent. One part of the gradient corresponds to the advantage: write |w_ij| = g_i pi_ij with sum_j pi_ij = 1, and
f_ij = g_i sign(w_ij) b_ij, whose mean under pi is u_i . y_i. Then

    dL/d log|w_ij| = pi_ij (f_ij - E_i f) + pi_ij (u_i . y_i)

The first part moves weight between keys at a constant gain g_i, with the advantage E_i f - f_ij; the second part
changes the gain, for which attention has no counterpart. Weights do not move independently: the fraction a_k kept at
step k is a factor of every weight across it, dL/d log a_k = sum_{j<k<=i} w_ij b_ij. The term D x_i next to the scan is
not routing and is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Gradients:
    """Gradients of the loss in nats by score, value, query and key, as attention or a scan uses them."""

    score: Float[Tensor, "batch head query key"]
    value: Float[Tensor, "batch kv_head seq head_dim"]
    query: Float[Tensor, "batch head seq head_dim"]
    key: Float[Tensor, "batch kv_head seq head_dim"]


@dataclass(frozen=True, eq=False)
class Forgetting(Gradients):
    """Gradients of a scan: score is log|w_ij|, query C, key B, step the log of the fraction kept at each position."""

    step: Tensor


@dataclass(frozen=True, eq=False)
class Unrolled:
    """The tensors of one layer's scan, on the autograd graph.

    Attributes:
        query, key: C and B [batch 1 seq state], shared by all heads.
        value: x [batch head seq dim].
        kept: [batch head (state) query key] dt_j exp(A (...)), 0 where j > i; without `state` if each head has one A.
        nudge, step: zeros added to log|w_ij| and to log a_k, whose gradients are taken.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    kept: Tensor
    nudge: Tensor
    step: Tensor
    weight: Tensor
    z: Tensor
    allowed: Tensor

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor, decay: Tensor) -> Unrolled:
        states = "bhnij" if decay.dim() == 5 else "bhij"
        batch, heads, seq, _ = value.shape
        plain = torch.einsum(f"bin,bjn,{states}->bhij", query[:, 0], key[:, 0], decay)
        nudge = torch.zeros_like(plain, requires_grad=True)
        step = torch.zeros(batch, heads, seq, 1, dtype=value.dtype, device=value.device, requires_grad=True)
        upto = step.cumsum(2)
        allowed = torch.ones(seq, seq, dtype=torch.bool, device=value.device).tril()
        weight = plain * (nudge + (upto - upto.mT).masked_fill(~allowed, 0)).exp()
        return cls(query, key, value, decay, nudge, step, weight, weight @ value, allowed[None, None])

    @property
    def wanted(self) -> tuple[Tensor, ...]:
        """The tensors of the gradients, in their order; the output last."""
        return (self.nudge, self.value, self.query, self.key, self.step, self.z)

    @property
    def score(self) -> Tensor:
        """log|w_ij|, 0 where the weight is 0."""
        return self.weight.detach().abs().masked_fill(self.weight.detach() == 0, 1).log()

    def law(self, u: Tensor) -> Forgetting:
        """The formulas of this module."""
        states = "bhnij" if self.kept.dim() == 5 else "bhij"
        b = u @ self.value.mT
        score = self.weight * b
        # [k, j]: the sum over i >= k, of which the part at j < k counts.
        later = score.flip(2).cumsum(2).flip(2)
        across = later.tril(-1).sum(3, keepdim=True)
        return Forgetting(
            score=score,
            value=self.weight.mT @ u,
            query=torch.einsum(f"bhij,{states},bjn->bin", b, self.kept, self.key[:, 0])[:, None],
            key=torch.einsum(f"bhij,{states},bin->bjn", b, self.kept, self.query[:, 0])[:, None],
            step=across,
        )


class Mixer(Protocol):
    """The parameters of both kinds, as transformers names them; `state` and `heads` are sizes."""

    in_proj: nn.Linear
    conv1d: nn.Conv1d
    A_log: Tensor
    D: Tensor
    out_proj: nn.Linear
    state: int


class Mamba2(Mixer, Protocol):
    heads: int
    dt_bias: Tensor
    norm: nn.Module


class Mamba(Mixer, Protocol):
    x_proj: nn.Linear
    dt_proj: nn.Linear


def scan_of(mixer: nn.Module, keep: Callable[[Unrolled], None]) -> Callable[[Tensor], Tensor]:
    """The forward of a mixer with an explicit scan, which is passed to `keep`; otherwise the mixer's own forward.

    Args:
        mixer: Mamba-2 or Mamba-1 (which has `dt_proj`); parameters as transformers names them.
    """
    if hasattr(mixer, "dt_proj"):
        return lambda u: _mamba(cast(Mamba, mixer), u, keep)
    return lambda u: _mamba2(cast(Mamba2, mixer), u, keep)


def _mamba2(mixer: Mamba2, u: Tensor, keep: Callable[[Unrolled], None]) -> Tensor:
    wide, state, heads = mixer.out_proj.in_features, mixer.state, mixer.heads
    gate, mixed, dt = mixer.in_proj(u).split([wide, wide + 2 * state, heads], -1)
    x, b, c = _causal(mixer.conv1d, mixed).split([wide, state, state], -1)
    value = x.unflatten(-1, (heads, -1)).transpose(1, 2)
    dt = F.softplus(dt + mixer.dt_bias).mT
    # + 0: a new tensor, so that the gradient by the value excludes the path through D.
    one = Unrolled.of(c[:, None], b[:, None], value + 0, _kept(-mixer.A_log.exp()[:, None] * dt, dt))
    keep(one)
    y = one.z + mixer.D[:, None, None] * value
    return mixer.out_proj(mixer.norm(y.transpose(1, 2).flatten(2) * F.silu(gate)))


def _mamba(mixer: Mamba, u: Tensor, keep: Callable[[Unrolled], None]) -> Tensor:
    x, gate = mixer.in_proj(u).chunk(2, -1)
    x = _causal(mixer.conv1d, x)
    rank, state = mixer.dt_proj.in_features, mixer.state
    dt, b, c = mixer.x_proj(x).split([rank, state, state], -1)
    dt = F.softplus(mixer.dt_proj(dt)).mT
    value = x.mT[..., None]
    log_kept = -mixer.A_log.exp()[..., None] * dt[:, :, None]
    # + 0: a new tensor, so that the gradient by the value excludes the paths of x through dt, B, C and D.
    one = Unrolled.of(c[:, None], b[:, None], value + 0, _kept(log_kept, dt[:, :, None]))
    keep(one)
    y = (one.z + mixer.D[:, None, None] * value)[..., 0].mT
    return mixer.out_proj(y * F.silu(gate))


def _kept(log_kept: Tensor, dt: Tensor) -> Tensor:
    """[... query key]: dt_j exp(sum of log_kept over j < k <= i), 0 where j > i, from log_kept and dt [... seq]."""
    total = log_kept.cumsum(-1)
    future = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=total.device).triu(1)
    # Filled before exp: the sums above the diagonal are positive, and inf * 0 has no gradient.
    return (total[..., None] - total[..., None, :]).masked_fill(future, -torch.inf).exp() * dt[..., None, :]


def _causal(conv: nn.Conv1d, x: Tensor) -> Tensor:
    return F.silu(conv(x.mT)[..., : x.shape[1]].mT)
