"""Exact answers to what a sequence tells: which label rules, which symbol or value comes next, in which state is it?"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

Counts = np.ndarray | int


def two_point_belief(n1: Counts, n2: Counts, reliability: float = 0.9) -> np.ndarray:
    """log P(y | D) of the latent label y in nats, [... 2], y = first label and y = second.

    y has prior 1/2; each label seen equals y with probability r, the reliability, whatever the others are. After n1
    first and n2 second labels, P(y = first | D) = 1 / (1 + (r / (1 - r))^-d) with d = n1 - n2: the likelihood ratio
    of one label is r / (1 - r), and only the difference of the counts is left of all of them. Derived here.
    Raises ValueError for a reliability that is not between 0 and 1.
    """
    if not 0 < reliability < 1:
        raise ValueError(f"reliability {reliability}: give a probability between 0 and 1, neither end")
    odds = (np.asarray(n1) - np.asarray(n2)) * (math.log(reliability) - math.log1p(-reliability))
    return -np.logaddexp(0, np.stack([-odds, odds], axis=-1))


def two_point(n1: Counts, n2: Counts, reliability: float = 0.9) -> np.ndarray:
    """log P(next label | D) in nats, [... 2]: r P(y | D) + (1 - r)(1 - P(y | D)), as `two_point_belief` says.

    It stays between 1 - r and r however long the sequence: what is certain about y is not certain about a label.
    """
    belief = two_point_belief(n1, n2, reliability)
    return np.logaddexp(math.log(reliability) + belief, math.log1p(-reliability) + belief[..., ::-1])


def beta_bernoulli(n1: Counts, n2: Counts, a: float = 1.0, b: float = 1.0) -> np.ndarray:
    """log P(next label | D) in nats, [... 2]: first (a + n1) / (a + b + n1 + n2), second (b + n2) / the same.

    The share of first labels has a Beta(a, b) prior, and labels are drawn with it independently; Beta(1, 1) is uniform
    and gives Laplace's rule of succession. Raises ValueError for an a or b that is not positive.
    """
    weight = np.stack(_updated(n1, n2, a, b), axis=-1)
    return np.log(weight) - np.log(weight.sum(-1, keepdims=True))


def beta_majority(n1: Counts, n2: Counts, a: float = 1.0, b: float = 1.0) -> np.ndarray:
    """log P(theta > 1/2 | D) and log P(theta < 1/2 | D) in nats, [... 2]: which label is the commoner.

    theta is the share of first labels; after n1 first and n2 second ones its posterior is Beta(a + n1, b + n2). Raises
    ValueError as `beta_bernoulli` does.
    """
    from scipy.stats import beta

    posterior = beta(*_updated(n1, n2, a, b))
    return np.stack([posterior.logsf(0.5), posterior.logcdf(0.5)], axis=-1)


def _updated(n1: Counts, n2: Counts, a: float, b: float) -> tuple[np.ndarray, np.ndarray]:
    """a and b of the posterior."""
    if a <= 0 or b <= 0:
        raise ValueError(f"Beta({a}, {b}): both must be positive")
    return np.asarray(a + np.asarray(n1, dtype=np.float64)), np.asarray(b + np.asarray(n2, dtype=np.float64))


def dirichlet_multinomial(counts: Int[Tensor, "*at symbol"], a: float = 1.0) -> Float[Tensor, "*at symbol"]:
    """log P(next symbol | D) in nats, float64: (a + n_j) / (a S + n) after n_j of symbol j, n in all, of S symbols.

    Symbols are drawn independently with probabilities that have a Dirichlet(a, ..., a) prior; a = 1 is uniform. For two
    symbols this is `beta_bernoulli`. Raises ValueError for an a that is not positive.
    """
    if a <= 0:
        raise ValueError(f"Dirichlet({a}): a must be positive")
    weight = counts.double() + a
    return weight.log() - weight.sum(-1, keepdim=True).log()


def forward_filter(
    log_first: Float[Tensor, "#*at state"],
    log_move: Float[Tensor, "#*at #move state state"],
    log_seen: Float[Tensor, "*at step state"],
) -> Float[Tensor, "*at step state"]:
    """log P(s_t | o_1 .. o_t) in nats for every t, s_t the hidden state of a Markov chain: the forward algorithm.

    log_first is log P(s_1); log_move[t, i, j] is log P(s_t+1 = j | s_t = i), one matrix for all t or one for each;
    log_seen[t, i] is log P(o_t | s_t = i). With ~ for "in proportion to", a_1(i) ~ P(s_1 = i) P(o_1 | s_1 = i) and
    a_t+1(j) ~ P(o_t+1 | s_t+1 = j) sum_i a_t(i) P(s_t+1 = j | s_t = i) (Paper I's filtering posterior).
    Probabilities of 0 are allowed as long as what was seen is possible.
    """
    import torch

    log_move = log_move.expand(*log_move.shape[:-3], log_seen.shape[-2], *log_move.shape[-2:])
    ahead, found = log_first, []
    for seen, move in zip(log_seen.unbind(-2), log_move.unbind(-3), strict=True):
        belief = (ahead + seen).log_softmax(-1)
        ahead = (belief[..., :, None] + move).logsumexp(-2)
        found.append(belief)
    return torch.stack(found, -2)


def gaussian_regression(x: Tensor, y: Tensor, noise: float, scale: float) -> Tensor:
    """Mean and log variance of y_t given x_t and the pairs before it, for every t at once: [... t 2] float64.

    y = w.x + e with w ~ N(0, scale^2 I) and e ~ N(0, noise^2). After X and y, w ~ N(m, S) with
    S^-1 = I / scale^2 + X'X / noise^2 and m = S X'y / noise^2, and at x the answer is N(m.x, x'Sx + noise^2).
    Shapes: x [... t dim], y [... t] or without the last. A value is not looked at before the next t. Derived here.
    Raises ValueError for a noise or scale that is not positive.
    """
    import torch

    if noise <= 0 or scale <= 0:
        raise ValueError(f"noise {noise}, scale {scale}: both must be positive")
    x, y = x.double(), y.double()
    # Divided by the noise, so that one sum gives S^-1 and S^-1 m: [... t dim dim + 1].
    earlier, values = x[..., :-1, :] / noise, y[..., : x.shape[-2] - 1, None] / noise
    terms = earlier[..., None] * torch.cat([earlier, values], -1)[..., None, :]
    sums = torch.nn.functional.pad(terms.cumsum(-3), (0, 0, 0, 0, 1, 0))
    precision = sums[..., :-1] + torch.eye(x.shape[-1], dtype=x.dtype, device=x.device) / scale**2
    # S symmetric: m.x = (S^-1 m).(S x), so one solve serves both.
    s_x = torch.linalg.solve(precision, x)
    return torch.stack([(sums[..., -1] * s_x).sum(-1), ((x * s_x).sum(-1) + noise**2).log()], -1)
