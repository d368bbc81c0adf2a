"""Held-out KL in bits between a known distribution and its linear softmax read-out from vectors.

`stats.ridge_probe` reads a number; this module reads a distribution over outcomes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llmgeom.stats.information import bits, kl
from llmgeom.stats.resampling import Clusters
from llmgeom.stats.ridge_probe import folds

PENALTIES = (1.0, 0.03, 0.001, 0.00003)  # from the largest; each fit starts from the one before
FREE = 10.0  # the size of a position's indicator: its weight has 1 / FREE^2 of the penalty
ROUNDS, LEAST_GRADIENT = 100, 1e-7


@dataclass(frozen=True)
class Missed:
    """Errors of read-outs: kl [site row] in bits, each row by weights fitted to other clusters; the chosen penalty
    [site fold]; fold [row]."""

    kl: np.ndarray
    penalty: np.ndarray
    fold: np.ndarray


def read(sites: Sequence[Tensor], log_p: Tensor, position: Tensor, clusters: Clusters, seed: int) -> Missed:
    """KL(p || softmax(z W + b_position)) of every row at every site, with whole clusters held out.

    Args:
        sites: [row coordinate] for each site, of one width.
        log_p: [row outcome], or a separate target for each site [site row outcome]; nats.
        position: [row] int64; the read-out has a free b for each position, so that information from the position is not
            credited to the coordinates.

    Coordinates are standardised over the fitted rows (constant ones are 0) and divided by sqrt(d), so that a penalty
    means the same at every width. W and b minimise the mean over rows of -sum_k p_k log q_k, plus penalty / 2 times
    |W|^2 + |b|^2 / FREE^2. Folds are `ridge_probe.folds`. The penalty of a fold is the one of PENALTIES with the least
    loss on the next fold, when fitted without both; then a fit on all other folds predicts the fold.

    Raises:
        UserError: for fewer than 5 clusters.
    """
    fold, log_p = folds(clusters, seed), log_p.double()
    p = log_p.exp().expand(len(sites), *log_p.shape[-2:])
    x = torch.stack([site.double() for site in sites])
    count, place = int(fold.max()) + 1, (position[:, None] == position.unique()).double() * FREE
    missed = torch.empty(x.shape[:2], dtype=torch.float64)
    penalty = np.empty((len(x), count))
    for test_fold in range(count):
        check = (test_fold + 1) % count
        rest, later, out = (torch.from_numpy(rows) for rows in (fold != test_fold, fold == check, fold == test_fold))
        both, z = rest & ~later, x - x[:, rest].mean(1, keepdim=True)
        size = z[:, rest].square().mean(1, keepdim=True).sqrt()
        z = torch.where(size > 1e-9 * size.amax(-1, keepdim=True), z / size, 0.0) / x.shape[-1] ** 0.5
        z = torch.cat([z, place.expand(len(x), -1, -1)], -1)
        errors, start = [], None
        for value in PENALTIES:
            start = fit(z[:, both], p[:, both], torch.full((len(x),), value, dtype=torch.float64), start)
            errors.append(-(p[:, later] * (z[:, later] @ start).log_softmax(-1)).sum(-1).mean(-1))
        chosen = torch.tensor(PENALTIES, dtype=torch.float64)[torch.stack(errors).argmin(0)]
        penalty[:, test_fold] = chosen
        q = (z[:, out] @ fit(z[:, rest], p[:, rest], chosen, start)).log_softmax(-1)
        missed[:, out] = kl(log_p.expand_as(p)[:, out], q)
    return Missed(bits(missed.numpy()), penalty, fold)


def fit(x: Tensor, p: Tensor, penalty: Tensor, start: Tensor | None = None) -> Tensor:
    """[problem coordinate outcome] weights w that minimise, problem by problem, the mean over rows of
    -sum_k p_k log softmax(x w)_k plus penalty / 2 |w|^2. Shapes: x [problem row coordinate], p [problem row outcome],
    penalty [problem].

    The problems are convex. L-BFGS solves all at once, in coordinates in which they have similar curvature: with
    x'x / n = V diag(l) V' the curvature lies between penalty and l / 2 + penalty (Boehning 1992), and
    w = V u / sqrt(l / 4 + penalty).
    """
    values, vectors = torch.linalg.eigh(x.mT @ x / x.shape[1])
    kept = min(x.shape[1:])  # at most as many directions as rows or coordinates
    vectors = vectors[..., -kept:]
    scale = vectors / (values[:, None, -kept:].clamp_min(0) / 4 + penalty[:, None, None]).sqrt()
    turned, inverse = x @ scale, (vectors / scale.norm(dim=1, keepdim=True)).mT
    metric = penalty[:, None, None] * scale.square().sum(1)[..., None]
    u = torch.zeros(len(x), kept, p.shape[2], dtype=x.dtype) if start is None else inverse @ start
    u.requires_grad_()
    descent = torch.optim.LBFGS(
        [u], max_iter=ROUNDS, tolerance_grad=LEAST_GRADIENT, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        with torch.no_grad():
            log_q = (turned @ u).log_softmax(-1)
            u.grad = turned.mT @ (log_q.exp() - p) / x.shape[1] + metric * u
            return (metric * u.square()).sum() / 2 - (p * log_q).sum() / x.shape[1]

    descent.step(closure)
    return scale @ u.detach()
