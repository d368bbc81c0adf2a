"""Do two layers place the same inputs alike, whatever directions each uses?"""

from __future__ import annotations

import numpy as np


def centred_gram(x: np.ndarray) -> np.ndarray:
    """[row row] inner products of rows less their mean, float64."""
    x = x.astype(np.float64)
    x = x - x.mean(0)
    return x @ x.T


def hsic(k: np.ndarray, m: np.ndarray) -> float:
    """Unbiased estimate of the Hilbert-Schmidt independence criterion of two Gram matrices [row row], n of 4 or more:
    1 / (n (n - 3)) (tr K'M' + (1'K'1)(1'M'1) / ((n - 1)(n - 2)) - 2 / (n - 2) 1'K'M'1), K' and M' without their
    diagonals (Song et al. 2012, equation 5). Its mean is 0 where rows are paired at random.
    """
    n = len(k)
    k, m = k - np.diag(np.diag(k)), m - np.diag(np.diag(m))
    cross = (k * m).sum() + k.sum() * m.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * k.sum(0) @ m.sum(0)
    return float(cross / (n * (n - 3)))


def cka(k: np.ndarray, m: np.ndarray) -> float:
    """Linear centred kernel alignment HSIC(K, M) / sqrt(HSIC(K, K) HSIC(M, M)) of Gram matrices, by unbiased estimates:
    1 for rows that differ by a rotation and a factor, 0 in the mean where they are unrelated (Kornblith et al. 2019;
    the plain estimate tends to 1 where there are fewer rows than coordinates). 0 where one does not vary."""
    own = hsic(k, k) * hsic(m, m)
    return hsic(k, m) / own**0.5 if own > 0 else 0.0
