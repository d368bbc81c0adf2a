"""Answers: predictions about tokens or real numbers, read from logits, scored and compared.

`read` turns logits into a *prediction*, the tensor in which the model, the exact answer and every trivial predictor are
compared. Losses, entropies and divergences are in nats.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from llmgeom.stats import information


@dataclass(frozen=True)
class Categorical:
    """Outcome k is the token tokens[k].

    A prediction is [... outcome + 1] log-probabilities over the model's full vocabulary: of each outcome, and of all
    other tokens together. Mass on other tokens raises the model's divergence.
    """

    tokens: tuple[int, ...]
    entropy = staticmethod(information.entropy)
    kl = staticmethod(information.kl)
    tv = staticmethod(information.tv)

    def read(self, logits: Float[Tensor, "*at token"]) -> Float[Tensor, "*at prediction"]:
        """log_softmax over the vocabulary in float32, gathered."""
        log_p = logits.float().log_softmax(-1)
        outcomes, others = _columns(self.tokens, logits.shape[-1], logits.device)
        if not len(others):
            return self.exact(log_p[..., outcomes])
        return torch.cat([log_p[..., outcomes], log_p[..., others].logsumexp(-1, keepdim=True)], -1)

    def exact(self, log_predictive: Float[Tensor, "*at outcome"]) -> Float[Tensor, "*at prediction"]:
        """The exact log-probabilities as a prediction: other tokens have probability 0."""
        return torch.nn.functional.pad(log_predictive, (0, 1), value=-math.inf)

    def loss(self, prediction: Float[Tensor, "*at prediction"], target: Int[Tensor, "*at"]) -> Float[Tensor, "*at"]:
        """-log q(target)."""
        return -prediction.gather(-1, target[..., None])[..., 0]

    def cross_entropy(self, exact: Tensor, prediction: Tensor) -> Tensor:
        """-sum_k p_k log q_k, the expected loss."""
        p = exact.exp()
        return -(p * prediction).masked_fill(p == 0, 0).sum(-1)

    def mean(self, prediction: Tensor, dims: tuple[int, ...]) -> Tensor:
        """The mixture with equal weights: log of the mean probability."""
        count = math.prod(prediction.shape[d] for d in dims)
        return prediction.logsumexp(dims, keepdim=True) - math.log(count)


@dataclass(frozen=True)
class Gaussian:
    """The answer is a real number; logits and predictions are [... 2], mean and log variance.

    Entropies are differential, so they may be negative.
    """

    tokens: ClassVar[tuple[int, ...]] = ()  # no outcome is a token

    def read(self, logits: Float[Tensor, "*at 2"]) -> Float[Tensor, "*at 2"]:
        return logits.float()

    def exact(self, log_predictive: Tensor) -> Tensor:
        return log_predictive

    def loss(self, prediction: Tensor, target: Float[Tensor, "*at"]) -> Tensor:
        """-log N(y; m, v) = (log(2 pi v) + (y - m)^2 / v) / 2."""
        m, log_v = prediction.unbind(-1)
        return (math.log(2 * math.pi) + log_v + (target - m).square() * (-log_v).exp()) / 2

    def cross_entropy(self, exact: Tensor, prediction: Tensor) -> Tensor:
        """The expected loss, KL(exact || prediction) + H(exact)."""
        return self.kl(exact, prediction) + self.entropy(exact)

    def entropy(self, prediction: Tensor) -> Tensor:
        """log(2 pi e v) / 2."""
        return (math.log(2 * math.pi * math.e) + prediction[..., 1]) / 2

    def kl(self, exact: Tensor, prediction: Tensor) -> Tensor:
        """KL(N(m, v) || N(n, w)) = (log(w / v) + (v + (m - n)^2) / w - 1) / 2."""
        (m, log_v), (n, log_w) = exact.unbind(-1), prediction.unbind(-1)
        return (log_w - log_v + (log_v - log_w).exp() + (m - n).square() * (-log_w).exp() - 1) / 2

    def tv(self, exact: Tensor, prediction: Tensor) -> Tensor:
        """Half the integral of |p - q|, from the points where the two densities cross (derived here).

        In units of the narrower density, N(0, 1) and N(d, s^2) with d >= 0 and s >= 1 cross where
        (s^2 - 1) x^2 + 2 d x - d^2 - 2 s^2 log s = 0. Between the two roots the narrower density is larger.
        """
        (m, log_v), (n, log_w) = exact.double().unbind(-1), prediction.double().unbind(-1)
        log_s = (log_v - log_w).abs() / 2
        s, wider = log_s.exp(), torch.expm1(2 * log_s)
        d = (m - n).abs() * (-torch.minimum(log_v, log_w) / 2).exp()
        least = torch.finfo(d.dtype).tiny
        root = (d + s * (d.square() + 2 * wider * log_s).sqrt()).clamp_min(least)
        right, left = (d.square() + 2 * s.square() * log_s) / root, -root / wider.clamp_min(least)
        narrow, wide = (
            torch.special.ndtr(right / scale - shift) - torch.special.ndtr(left / scale - shift)
            for scale, shift in ((1, 0), (s, d / s))
        )
        return narrow - wide

    def mean(self, prediction: Tensor, dims: tuple[int, ...]) -> Tensor:
        """The Gaussian with the mean and variance of the mixture with equal weights."""
        m, v = prediction[..., 0], prediction[..., 1].exp()
        centre = m.mean(dims, keepdim=True)
        return torch.stack([centre, (v + (m - centre).square()).mean(dims, keepdim=True).log()], -1)


Answers: TypeAlias = Categorical | Gaussian


def uniform(inputs: Tensor, queries: int, outcomes: int) -> Float[Tensor, "sequence query outcome"]:
    """The uniform prediction: log 1/K in float64 at every query of every sequence."""
    return torch.full((len(inputs), queries, outcomes), -math.log(outcomes), dtype=torch.float64, device=inputs.device)


def query_logits(model: Callable[..., Any], inputs: Tensor, query: Tensor) -> Tensor:
    """A model's logits at the queried positions, [sequence query output]; inputs are tokens or rows."""
    named = {"rows": inputs} if inputs.is_floating_point() else {"input_ids": inputs}
    return model(**named, use_cache=False, logits_to_keep=query).logits


# ---- exact answers that tasks and processes share -------------------------------------------------------------------


def evenly(possible: Bool[Tensor, "*at outcome"]) -> Float[Tensor, "*at outcome"]:
    """Log-probabilities, float64: the possible outcomes share the probability equally, the others have none."""
    weight = possible.double()
    return (weight / weight.sum(-1, keepdim=True)).log()


def dirichlet_multinomial(counts: Int[Tensor, "*at symbol"], a: float = 1.0) -> Float[Tensor, "*at symbol"]:
    """log P(next symbol | counts) in nats, float64: (a + n_j) / (a S + n), n_j of symbol j, n in all, S symbols.

    Symbols are drawn independently, with probabilities from a Dirichlet(a, ..., a) prior; a = 1 is uniform. For two
    symbols this is Laplace's rule with a. Raises ValueError: `a` is not positive.
    """
    if a <= 0:
        raise ValueError(f"Dirichlet({a}): a must be positive")
    weight = counts.double() + a
    return weight.log() - weight.sum(-1, keepdim=True).log()


def forward_filter(
    log_first: Float[Tensor, "#*at state"],
    log_move: Float[Tensor, "#*at #move state state"],
    log_likelihood: Float[Tensor, "*at step state"],
) -> Float[Tensor, "*at step state"]:
    """The forward algorithm: log P(s_t | o_1 .. o_t) in nats for every t, s_t the hidden state (Paper I's posterior).

    With ~ for "in proportion to", a_1(i) ~ P(s_1 = i) P(o_1 | s_1 = i) and
    a_t+1(j) ~ P(o_t+1 | s_t+1 = j) sum_i a_t(i) P(s_t+1 = j | s_t = i). Probabilities of 0 are allowed, if the
    observations are possible.

    Args:
        log_first: log P(s_1).
        log_move: log P(s_t+1 = j | s_t = i) at [i, j], one matrix for all t or one for each.
        log_likelihood: log P(o_t | s_t = i).
    """
    log_move = log_move.expand(*log_move.shape[:-3], log_likelihood.shape[-2], *log_move.shape[-2:])
    ahead, beliefs = log_first, []
    for likelihood, move in zip(log_likelihood.unbind(-2), log_move.unbind(-3), strict=True):
        belief = (ahead + likelihood).log_softmax(-1)
        ahead = (belief[..., :, None] + move).logsumexp(-2)
        beliefs.append(belief)
    return torch.stack(beliefs, -2)


# ---- corrupted labels -----------------------------------------------------------------------------------------------


def corrupt_targets(target: Tensor, p: float, outcomes: int, generator: torch.Generator) -> Tensor:
    """Each target replaced, with probability p, by an outcome drawn evenly; the inputs keep the true outcomes."""
    lots = torch.rand(target.shape, generator=generator, device=target.device)
    other = torch.randint(outcomes, target.shape, generator=generator, device=target.device)
    return torch.where(lots < p, other, target)


def corrupt_predictive(log_predictive: Tensor, p: float) -> Tensor:
    """The exact predictive of corrupted targets: (1 - p) P(outcome) + p / K, in nats.

    Derived here: a target is the task's with probability 1 - p, else uniform, independently of everything shown.
    """
    even = torch.full_like(log_predictive, math.log(p / log_predictive.shape[-1]) if p else -math.inf)
    return torch.logaddexp(log_predictive + (math.log1p(-p) if p < 1 else -math.inf), even)


@functools.cache
def _columns(tokens: tuple[int, ...], vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The logit columns of the outcomes, and all other columns."""
    others = sorted(set(range(vocabulary)) - set(tokens))
    # Cached, because a CUDA graph cannot record a copy from the host; outside inference mode, because training reuses
    # a tensor that grading may have created.
    with torch.inference_mode(False):
        outcomes, rest = (torch.tensor(columns, dtype=torch.int64, device=device) for columns in (tokens, others))
    return outcomes, rest
