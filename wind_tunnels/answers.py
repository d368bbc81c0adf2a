"""What an answer is, some of the tokens or a real number, and how far a model's answer is from the exact one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from llmgeom import information


class Answers(Protocol):
    """A model's logits are read into a `form`, in which it, the exact answer and every trivial predictor are compared.

    All divergences are in nats.
    """

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
        elsewhere = torch.ones(logits.shape[-1], dtype=torch.bool, device=logits.device)
        elsewhere[list(self.tokens)] = False
        own = log_p[..., list(self.tokens)]
        if not self.elsewhere(logits.shape[-1]):
            return self.exact(own)
        return torch.cat([own, log_p[..., elsewhere].logsumexp(-1, keepdim=True)], -1)

    def elsewhere(self, vocabulary: int) -> bool:
        """Are there tokens that are no outcome?"""
        return vocabulary > len(self.tokens)

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

    def tv(self, exact: Tensor, form: Tensor, points: int = 2001) -> Tensor:
        """Half the integral of |p - q|, by the trapezoidal rule over ten standard deviations of the wider one."""
        (m, log_v), (n, log_w) = exact.unbind(-1), form.unbind(-1)
        wide = torch.maximum(log_v, log_w).div(2).exp() * 10
        low, high = torch.minimum(m, n) - wide, torch.maximum(m, n) + wide
        grid = low[..., None] + (high - low)[..., None] * torch.linspace(0, 1, points, device=m.device)
        density = [(-self.loss(f[..., None, :], grid)).exp() for f in (exact, form)]
        return torch.trapezoid((density[0] - density[1]).abs(), grid, dim=-1) / 2

    def mean(self, form: Tensor, dims: tuple[int, ...]) -> Tensor:
        """The Gaussian with the moments of the mixture with equal weights."""
        m, v = form[..., 0], form[..., 1].exp()
        centre = m.mean(dims, keepdim=True)
        return torch.stack([centre, (v + (m - centre).square()).mean(dims, keepdim=True).log()], -1)
