"""Similarity of two sets of vectors of the same inputs, independent of rotations of each set: CKA and RSA."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float

from llmgeom.errors import UserError


def cka(x: Float[np.ndarray, "row feature"], y: Float[np.ndarray, "row other"]) -> float:
    """Debiased linear CKA of two sets of features of the same rows.

    It is 1 for sets that are equal up to rotation and scale. Its mean is 0 for unrelated sets, so it can be negative;
    the biased form grows with features over rows.

    hsic(x, y) / sqrt(hsic(x, x) hsic(y, y)), with x and y centred over n rows, a_i = |x_i|^2, b_i = |y_i|^2 and
    hsic(x, y) = |x' y|^2 - n / (n - 2) sum_i a_i b_i + sum_i a_i sum_i b_i / ((n - 1)(n - 2)): n (n - 3) times the
    unbiased HSIC of Song et al. (JMLR 13, 2012), which Nguyen, Raghu and Kornblith (ICLR 2021) put in place of the
    biased one in the CKA of Kornblith et al. (ICML 2019). |x' y|^2 is computed from inner products of rows where these
    are fewer than features.

    Raises:
        UserError: fewer than 4 rows, or all rows of one set are equal.
    """
    n = len(x)
    if n < 4:
        raise UserError(f"debiased CKA needs at least 4 rows, got {n}")
    x, y = (rows.astype(np.float64) - rows.mean(0, dtype=np.float64) for rows in (x, y))

    def hsic(a: np.ndarray, b: np.ndarray) -> float:
        size_a, size_b = np.square(a).sum(1), np.square(b).sum(1)
        few = n < min(a.shape[1], b.shape[1])
        whole = np.vdot(a @ a.T, b @ b.T) if few else np.square(a.T @ b).sum()
        return float(whole - n / (n - 2) * size_a @ size_b + size_a.sum() * size_b.sum() / ((n - 1) * (n - 2)))

    hsic_x, hsic_y = hsic(x, x), hsic(y, y)
    for rows, size in ((x, hsic_x), (y, hsic_y)):
        if size <= 1e-12 * np.square(rows).sum() ** 2:
            raise UserError(f"all {n} rows of one side are equal; an alignment needs them to differ")
    return hsic(x, y) / math.sqrt(hsic_x * hsic_y)


def rsa(x: Float[np.ndarray, "row feature"], y: Float[np.ndarray, "row other"]) -> float:
    """Spearman's rho of the distances between rows (Kriegeskorte, Mur and Bandettini, 2008).

    Raises:
        UserError: all distances of one set are equal.
    """
    return alignment(distance_ranks(x), distance_ranks(y))


def distance_ranks(x: Float[np.ndarray, "row feature"]) -> Float[np.ndarray, "row row"]:
    """Ranks of the distances between rows of x minus the mean rank, 0 on the diagonal."""
    from scipy.spatial.distance import pdist, squareform
    from scipy.stats import rankdata

    ranks = rankdata(pdist(x))
    return squareform(ranks - ranks.mean())


def alignment(a: np.ndarray, b: np.ndarray) -> float:
    """Cosine of two matrices, sum a b / sqrt(sum a^2 sum b^2). Raises UserError where one is 0."""
    size = math.sqrt(np.vdot(a, a) * np.vdot(b, b))
    if size == 0:
        raise UserError("all rows of one side are equal; an alignment needs them to differ")
    return float(np.vdot(a, b)) / size
