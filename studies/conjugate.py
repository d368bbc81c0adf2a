"""Exact posteriors of two models of label sequences: a latent label, and a share of labels with a Beta prior."""

from __future__ import annotations

import numpy as np

Counts = np.ndarray | int
Share = np.ndarray | float


def two_point_belief(n1: Counts, n2: Counts, reliability: Share = 0.9, prior: Share = 0.5) -> np.ndarray:
    """log P(y | D) of the latent label y in nats, [... 2], y = first label and y = second.

    y is the first label with probability q, the prior. Each observed label equals y with probability r, the
    reliability, independently. After n1 first and n2 second labels, d = n1 - n2,
    P(y = first | D) = 1 / (1 + (r / (1 - r))^-d (1 - q) / q): the likelihood ratio of one label is r / (1 - r), so only
    the difference of the counts matters. Derived here. Raises ValueError for a reliability or prior outside (0, 1).
    """
    for name, share in (("reliability", np.asarray(reliability)), ("prior", np.asarray(prior))):
        if not ((share > 0) & (share < 1)).all():
            raise ValueError(f"{name} {share}: give a probability between 0 and 1, without the ends")
    odds = (np.asarray(n1) - np.asarray(n2)) * _log_odds(reliability) + _log_odds(prior)
    return -np.logaddexp(0, np.stack([-odds, odds], axis=-1))


def two_point(n1: Counts, n2: Counts, reliability: Share = 0.9, prior: Share = 0.5) -> np.ndarray:
    """log P(next label | D) in nats, [... 2]: r P(y | D) + (1 - r)(1 - P(y | D)), with P(y | D) of `two_point_belief`.

    The probability stays between 1 - r and r however long the sequence: certainty about y leaves a label uncertain.
    """
    belief, r = two_point_belief(n1, n2, reliability, prior), np.asarray(reliability, dtype=np.float64)[..., None]
    return np.logaddexp(np.log(r) + belief, np.log1p(-r) + belief[..., ::-1])


def beta_bernoulli(n1: Counts, n2: Counts, a: float = 1.0, b: float = 1.0) -> np.ndarray:
    """log P(next label | D) in nats, [... 2]: log of (a + n1, b + n2) / (a + b + n1 + n2).

    The share of first labels has a Beta(a, b) prior, and labels are independent given the share. Beta(1, 1) is uniform
    and gives Laplace's rule of succession. Raises ValueError for an a or b that is not positive.
    """
    weight = np.stack(_updated(n1, n2, a, b), axis=-1)
    return np.log(weight) - np.log(weight.sum(-1, keepdims=True))


def _log_odds(share: Share) -> np.ndarray:
    share = np.asarray(share, dtype=np.float64)
    return np.log(share) - np.log1p(-share)


def _updated(n1: Counts, n2: Counts, a: float, b: float) -> tuple[np.ndarray, np.ndarray]:
    """Parameters a and b of the posterior."""
    if a <= 0 or b <= 0:
        raise ValueError(f"Beta({a}, {b}): both must be positive")
    return np.asarray(a + np.asarray(n1, dtype=np.float64)), np.asarray(b + np.asarray(n2, dtype=np.float64))
