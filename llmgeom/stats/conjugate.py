"""Exact posteriors of two conjugate models of label sequences: a latent label, and a share with a Beta prior."""

from __future__ import annotations

import numpy as np

Counts = np.ndarray | int
Share = np.ndarray | float


def two_point_belief(n1: Counts, n2: Counts, reliability: Share = 0.9, prior: Share = 0.5) -> np.ndarray:
    """log P(y | D) of the latent label y in nats, [... 2], y = first label and y = second.

    y is the first label with probability q, the prior; each label seen equals y with probability r, the reliability,
    whatever the others are. After n1 first and n2 second labels, P(y = first | D) = 1 / (1 + (r / (1 - r))^-d (1 - q)
    / q) with d = n1 - n2: the likelihood ratio of one label is r / (1 - r), and only the difference of the counts is
    left of all of them. Derived here. Raises ValueError for a reliability or prior that is not between 0 and 1.
    """
    for name, share in (("reliability", np.asarray(reliability)), ("prior", np.asarray(prior))):
        if not ((share > 0) & (share < 1)).all():
            raise ValueError(f"{name} {share}: give a probability between 0 and 1, neither end")
    odds = (np.asarray(n1) - np.asarray(n2)) * _log_odds(reliability) + _log_odds(prior)
    return -np.logaddexp(0, np.stack([-odds, odds], axis=-1))


def two_point(n1: Counts, n2: Counts, reliability: Share = 0.9, prior: Share = 0.5) -> np.ndarray:
    """log P(next label | D) in nats, [... 2]: r P(y | D) + (1 - r)(1 - P(y | D)), as `two_point_belief` says.

    It stays between 1 - r and r however long the sequence: what is certain about y is not certain about a label.
    """
    belief, r = two_point_belief(n1, n2, reliability, prior), np.asarray(reliability, dtype=np.float64)[..., None]
    return np.logaddexp(np.log(r) + belief, np.log1p(-r) + belief[..., ::-1])


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


def _log_odds(share: Share) -> np.ndarray:
    share = np.asarray(share, dtype=np.float64)
    return np.log(share) - np.log1p(-share)


def _updated(n1: Counts, n2: Counts, a: float, b: float) -> tuple[np.ndarray, np.ndarray]:
    """a and b of the posterior."""
    if a <= 0 or b <= 0:
        raise ValueError(f"Beta({a}, {b}): both must be positive")
    return np.asarray(a + np.asarray(n1, dtype=np.float64)), np.asarray(b + np.asarray(n2, dtype=np.float64))
