"""Do two sets of vectors place the same inputs alike, whatever directions each uses?"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float

from llmgeom.errors import UserError


def cka(x: Float[np.ndarray, "row feature"], y: Float[np.ndarray, "row other"]) -> float:
    """Debiased linear CKA of two sets of features of the same rows: 1 where they are equal up to rotation and scale,
    mean 0 where they are unrelated.

    hsic(x, y) / sqrt(hsic(x, x) hsic(y, y)), with x and y centred over n rows, a_i = |x_i|^2, b_i = |y_i|^2 and
    hsic(x, y) = |x' y|^2 - n / (n - 2) sum_i a_i b_i + sum_i a_i sum_i b_i / ((n - 1)(n - 2)): n (n - 3) times the
    unbiased HSIC of Song et al. (JMLR 13, 2012), in the CKA of Kornblith et al. (ICML 2019). |x' y|^2 is taken from
    inner products of rows where these are fewer than features. `compare.gram` and `compare.alignment` are the same for
    matrices that are kept and permuted.
    Raises UserError for fewer than 4 rows, and where all rows of one set are alike.
    """
    n = len(x)
    if n < 4:
        raise UserError(f"{n} rows were given to debiased CKA; it needs 4")
    x, y = (each.astype(np.float64) - each.mean(0, dtype=np.float64) for each in (x, y))

    def hsic(one: np.ndarray, other: np.ndarray) -> float:
        a, b = np.square(one).sum(1), np.square(other).sum(1)
        few = n < min(one.shape[1], other.shape[1])
        whole = np.vdot(one @ one.T, other @ other.T) if few else np.square(one.T @ other).sum()
        return float(whole - n / (n - 2) * a @ b + a.sum() * b.sum() / ((n - 1) * (n - 2)))

    own, theirs = hsic(x, x), hsic(y, y)
    for each, size in ((x, own), (y, theirs)):
        if size <= 1e-12 * np.square(each).sum() ** 2:
            raise UserError(f"all {n} rows of one side are alike; an alignment needs them to differ")
    return hsic(x, y) / math.sqrt(own * theirs)
