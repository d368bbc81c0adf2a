"""What an answer is, some of the tokens or a real number, and how far a model's answer is from the exact one."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from llmgeom.stats import information


class Answers(Protocol):
    """A model's logits are read into a `form`, in which it, the exact answer and every trivial predictor are compared.

    All divergences are in nats. tokens: of each outcome; empty where the answer is a real number.
    """

    @property
    def tokens(self) -> tuple[int, ...]: ...
    def read(self, logits: Tensor) -> Tensor: ...
    def exact(self, log_predictive: Tensor) -> Tensor: ...
    def loss(self, form: Tensor, target: Tensor) -> Tensor: ...
    def cross_entropy(self, exact: Tensor, form: Tensor) -> Tensor: ...
    def entropy(self, form: Tensor) -> Tensor: ...
    def kl(self, exact: Tensor, form: Tensor) -> Tensor: ...
    def tv(self, exact: Tensor, form: Tensor) -> Tensor: ...
    def mean(self, form: Tensor, dims: tuple[int, ...]) -> Tensor: ...


@dataclass(frozen=True)
class Categorical:
    """Outcome k is the token tokens[k]. A form is [... outcome + 1] log-probabilities in nats: of each outcome, over
    the model's full vocabulary, and of everything else together, which is no answer and counts against it."""

    tokens: tuple[int, ...]

    def read(self, logits: Float[Tensor, "*at token"]) -> Float[Tensor, "*at form"]:
        """log_softmax over the vocabulary in float32, gathered."""
        log_p = logits.float().log_softmax(-1)
        own, others = _columns(self.tokens, logits.shape[-1], logits.device)
        if not len(others):
            return self.exact(log_p[..., own])
        return torch.cat([log_p[..., own], log_p[..., others].logsumexp(-1, keepdim=True)], -1)

    def exact(self, log_predictive: Float[Tensor, "*at outcome"]) -> Float[Tensor, "*at form"]:
        return torch.nn.functional.pad(log_predictive, (0, 1), value=-math.inf)

    def loss(self, form: Float[Tensor, "*at form"], target: Int[Tensor, "*at"]) -> Float[Tensor, "*at"]:
        """-log q(outcome)."""
        return -form.gather(-1, target[..., None])[..., 0]

    def cross_entropy(self, exact: Tensor, form: Tensor) -> Tensor:
        """-sum_k p_k log q_k: the loss in the mean over what might be drawn."""
        p = exact.exp()
        return -(p * form).masked_fill(p == 0, 0).sum(-1)

    def entropy(self, form: Tensor) -> Tensor:
        return information.entropy(form)

    def kl(self, exact: Tensor, form: Tensor) -> Tensor:
        return information.kl(exact, form)

    def tv(self, exact: Tensor, form: Tensor) -> Tensor:
        return information.tv(exact, form)

    def mean(self, form: Tensor, dims: tuple[int, ...]) -> Tensor:
        """The mixture with equal weights: log of the mean probability."""
        count = math.prod(form.shape[d] for d in dims)
        return form.logsumexp(dims, keepdim=True) - math.log(count)


@dataclass(frozen=True)
class Gaussian:
    """The answer is a real number. Logits and form are [... 2]: mean and log variance. Entropies are differential: they
    may be negative."""

    tokens = ()

    def read(self, logits: Float[Tensor, "*at 2"]) -> Float[Tensor, "*at 2"]:
        return logits.float()

    def exact(self, log_predictive: Tensor) -> Tensor:
        return log_predictive

    def loss(self, form: Tensor, target: Float[Tensor, "*at"]) -> Tensor:
        """-log N(y; m, v) = (log(2 pi v) + (y - m)^2 / v) / 2."""
        m, log_v = form.unbind(-1)
        return (math.log(2 * math.pi) + log_v + (target - m).square() * (-log_v).exp()) / 2

    def cross_entropy(self, exact: Tensor, form: Tensor) -> Tensor:
        return self.kl(exact, form) + self.entropy(exact)

    def entropy(self, form: Tensor) -> Tensor:
        """log(2 pi e v) / 2."""
        return (math.log(2 * math.pi * math.e) + form[..., 1]) / 2

    def kl(self, exact: Tensor, form: Tensor) -> Tensor:
        """KL(N(m, v) || N(n, w)) = (log(w / v) + (v + (m - n)^2) / w - 1) / 2."""
        (m, log_v), (n, log_w) = exact.unbind(-1), form.unbind(-1)
        return (log_w - log_v + (log_v - log_w).exp() + (m - n).square() * (-log_w).exp() - 1) / 2

    def tv(self, exact: Tensor, form: Tensor) -> Tensor:
        """Half the integral of |p - q|: the densities cross at most twice, and in between the narrower one is above.
        Derived here.

        In units of the narrower one, N(0, 1) against N(d, s^2) with d >= 0 and s >= 1 cross where
        (s^2 - 1) x^2 + 2 d x - d^2 - 2 s^2 log s = 0.
        """
        (m, log_v), (n, log_w) = exact.double().unbind(-1), form.double().unbind(-1)
        log_s = (log_v - log_w).abs() / 2
        s, wider = log_s.exp(), torch.expm1(2 * log_s)
        d = (m - n).abs() * (-torch.minimum(log_v, log_w) / 2).exp()
        least = torch.finfo(d.dtype).tiny
        root = (d + s * (d.square() + 2 * wider * log_s).sqrt()).clamp_min(least)
        right, left = (d.square() + 2 * s.square() * log_s) / root, -root / wider.clamp_min(least)
        narrow, wide = (
            torch.special.ndtr(right / f - at) - torch.special.ndtr(left / f - at) for f, at in ((1, 0), (s, d / s))
        )
        return narrow - wide

    def mean(self, form: Tensor, dims: tuple[int, ...]) -> Tensor:
        """The Gaussian with the moments of the mixture with equal weights."""
        m, v = form[..., 0], form[..., 1].exp()
        centre = m.mean(dims, keepdim=True)
        return torch.stack([centre, (v + (m - centre).square()).mean(dims, keepdim=True).log()], -1)


@functools.cache
def _columns(tokens: tuple[int, ...], vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The outcomes' columns of the logits, and all others. Kept, since a CUDA graph cannot hold a copy from the host;
    made outside inference mode, since training comes back for them."""
    others = sorted(set(range(vocabulary)) - set(tokens))
    with torch.inference_mode(False):
        own, other = (torch.tensor(columns, dtype=torch.int64, device=device) for columns in (tokens, others))
    return own, other
