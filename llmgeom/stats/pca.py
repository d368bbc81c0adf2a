"""PCA of standardised coordinates: the spectrum, its shares of variance and their intervals."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float

from llmgeom.errors import UserError
from llmgeom.stats.resampling import Clusters, Interval, deletions, jackknife_interval, require_finite

SAME = 1e-4  # share of the root mean square distance: closer vectors are equal up to rounding


@dataclass(frozen=True)
class Spectrum:
    """PCA of standardised coordinates.

    Attributes:
        shares: [component] eigenvalue over the sum of all eigenvalues (fraction), largest first, min(n - 1, d) of them.
        scores: [prompt 2] positions on the first two components, of variance share times d (ddof = 0). The sign is a
            convention: the prompt farthest from 0, the first of equals, is positive. Coinciding prompts share scores.
        n, d: number of prompts; number of coordinates that vary.
        dropped: number of coordinates left out because they are constant over prompts.
    """

    shares: np.ndarray
    scores: np.ndarray
    n: int
    d: int
    dropped: int

    @property
    def numbers(self) -> Float[np.ndarray, "3"]:
        """The shares of PC1 and of PC1+PC2 (fractions), and the participation ratio (sum l)^2 / sum l^2 over all
        eigenvalues l: k when k components carry equal variance. All are 0 where no coordinate varies."""
        return _summary(self.shares) if self.d else np.zeros(3)


def shares(x: Float[np.ndarray, "prompt coordinate"]) -> Spectrum:
    """PCA of x after standardising each coordinate over prompts: z_ij = (x_ij - mean_j) / sd_j, sd with ddof = 0.

    Shares are the eigenvalues of z z' or z' z, whichever is smaller, over their sum; ddof cancels. Computed in float64.
    The estimand is the expected share at this n and d: noise alone has a PC1 of about
    (1 + sqrt((n - 1) / d))^2 / (n - 1), the Marchenko-Pastur edge over its mean, so shares at different n or d are not
    comparable. A coordinate is constant if its largest and smallest values are equal.

    Raises:
        UserError: for fewer than 3 prompts, a value that is not finite, and when no coordinate varies.
    """
    z = standardised(x)
    n, d = z.shape
    if n <= d:
        values, vectors = np.linalg.eigh(z @ z.T)
        top = vectors[:, ::-1][:, :2] * np.sqrt(values[::-1][:2].clip(0))
    else:
        values, vectors = np.linalg.eigh(z.T @ z)
        top = z @ vectors[:, ::-1][:, :2]
    scores = np.zeros((n, 2))
    scores[:, : top.shape[1]] = signed(_coinciding(top, z))
    return Spectrum(_fractions(values, n), scores, n, d, np.asarray(x).shape[1] - d)


def _coinciding(scores: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Scores in which coinciding rows of z (closer than SAME times sqrt(2 d), the RMS distance) share one value.

    Without context, prompts that end in one token have one vector per fold. Ranks would order their scores by rounding:
    |rho| of pocket:pythia without context, 75 mixed prompts with one final token, is .133, and was .152 by rounding.
    """
    order = scores[:, 0].argsort(kind="stable")
    apart = np.linalg.norm(np.diff(z[order], axis=0), axis=1) > SAME * np.sqrt(2 * z.shape[1])
    first, shared = order[np.flatnonzero(np.r_[True, apart])], np.empty_like(scores)
    shared[order] = scores[first][np.r_[0, apart.cumsum()]]
    return shared


def signed(columns: Float[np.ndarray, "row column"]) -> Float[np.ndarray, "row column"]:
    """Each column or its negative, such that the value farthest from 0 (the first of equals) is positive."""
    size = np.abs(columns)
    farthest = (size >= size.max(0) * (1 - 1e-9)).argmax(0)
    return np.where(np.take_along_axis(columns, farthest[None], 0) >= 0, columns, -columns)


def standardised(x: np.ndarray) -> Float[np.ndarray, "prompt kept"]:
    """Each coordinate minus its mean, over its sd (ddof = 0), without constant ones. Raises the errors of `shares`."""
    x = np.asarray(x)
    if x.ndim != 2 or len(x) < 3:
        raise UserError(f"a PCA needs a matrix [prompt coordinate] of at least 3 prompts, got shape {x.shape}")
    require_finite(x, "a PCA", "row", "column")
    varies = x.max(0) != x.min(0)
    if not varies.any():
        raise UserError(
            f"all {x.shape[1]} coordinates are constant over {len(x)} prompts: there is no variance to share"
        )
    z = x[:, varies].astype(np.float64)
    z -= z.mean(0)
    return z / np.sqrt(np.square(z).mean(0))


def share_intervals(
    x: Float[np.ndarray, "prompt coordinate"], clusters: Clusters
) -> tuple[Interval, Interval, Interval]:
    """Jackknife intervals over clusters, on the log scale, of PC1, PC1+PC2 (fractions) and the participation ratio.

    Coordinates are standardised anew after every deletion. Estimand: the expected value at this n and d. Measured at 40
    clusters and d = 128: covers 92-97 % for Gaussian factors, curves and t(4) factors, 89-91 % for an exponential
    factor or log-normal row scale, 99 % for noise alone; the log scale was never worse than none by more than 1 %.
    """
    whole, without = deletions(_share_summary, x, clusters)
    pc1, pc12, ratio = (jackknife_interval(whole[i], without[:, i], clusters, "log", 0.95) for i in range(3))
    pc1, pc12 = (replace(interval, high=min(interval.high, 1.0)) for interval in (pc1, pc12))
    return pc1, pc12, replace(ratio, low=max(ratio.low, 1.0))


def _fractions(values: np.ndarray, n: int) -> np.ndarray:
    # Centring leaves rank n - 1: the n-th eigenvalue of the n x n matrix is rounding.
    kept = values[::-1][: n - 1].clip(0)
    return kept / kept.sum()


def _summary(fractions: np.ndarray) -> np.ndarray:
    """PC1, PC1+PC2, participation ratio of a spectrum of shares."""
    return np.array([fractions[0], fractions[:2].sum(), fractions.sum() ** 2 / np.square(fractions).sum()])


def _share_summary(x: np.ndarray) -> np.ndarray:
    """`_summary` of x without eigenvectors, which a deletion or a permutation does not need."""
    z = standardised(x)
    n, d = z.shape
    return _summary(_fractions(np.linalg.eigvalsh(z @ z.T if n <= d else z.T @ z), n))
