"""Similarity of two sets of vectors (CKA, RSA), and orthogonality of the vectors of one set, by chance too."""

from __future__ import annotations

import math
from typing import Any

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


NOTHING = 1e-10  # share of the largest length: a shorter vector is rounding and has no direction


def random_cosine(dim: int) -> float:
    """Expected |cosine| of two independent isotropic directions in `dim` dimensions (unitless, 0-1).

    Gamma(d/2) / (sqrt(pi) Gamma((d+1)/2)), close to sqrt(2 / (pi d)) for large d. Derived here: the first coordinate t
    of a unit vector has density proportional to (1 - t^2)^((d-3)/2); take the mean of |t|. It is printed as a floor and
    never decides a claim: vectors of an untrained network are not isotropic. Raises UserError for dim < 1.
    """
    if dim < 1:
        raise UserError(f"directions in {dim} dimensions: give at least 1")
    # lgamma: Gamma(d/2) itself overflows a float from about d = 344.
    return math.exp(math.lgamma(dim / 2) - math.lgamma((dim + 1) / 2)) / math.sqrt(math.pi)


def cosines(x: Float[Any, "*set vector coordinate"], centre: bool = False) -> Float[Any, "*set vector vector"]:
    """|cosine| of every two vectors of a set (0-1), after subtracting their mean if `centre`.

    Args:
        x: An array, or a tensor on any device; float64 inside.
        centre: Whether the mean of each set is subtracted from its vectors.

    Raises:
        UserError: for fewer than 2 vectors, one that is not finite, and one of length 0 (or equal to the mean).
    """
    x = x.double() if hasattr(x, "double") else np.asarray(x, dtype=np.float64)
    if x.shape[-2] < 2:
        raise UserError(f"{x.shape[-2]} vectors have no pair; |cosine| needs at least 2")
    before = (x * x).sum(-1) ** 0.5
    if not math.isfinite(float(before.sum())):
        at = np.argwhere(~np.isfinite(_host(x)))[0]
        raise UserError(f"vector {at[-2]} holds {_host(x)[tuple(at)]}; a cosine needs finite numbers")
    if centre:
        x = x - x.mean(-2)[..., None, :]
    length = (x * x).sum(-1) ** 0.5 if centre else before
    largest = before.amax(-1) if hasattr(before, "amax") else before.max(-1)
    short = length <= NOTHING * largest[..., None]
    if bool(short.any()):
        which = np.argwhere(_host(short))[0][-1]
        raise UserError(
            f"vector {which} has no length{' once the mean is removed' if centre else ''}, so it has no direction"
        )
    x = x / length[..., None]
    return abs(x @ x.swapaxes(-1, -2)).clip(max=1)


def _host(x: Any) -> np.ndarray:
    return np.asarray(x.cpu() if hasattr(x, "cpu") else x)


def pair_mean(square: Float[Any, "*set vector vector"]) -> Float[Any, "*set"]:
    """Mean over distinct pairs of a symmetric matrix: its entries off the diagonal."""
    m = square.shape[-1]
    return (square.sum((-2, -1)) - square.diagonal(0, -2, -1).sum(-1)) / (m * (m - 1))


def mean_abs_cosine(x: Float[Any, "*set vector coordinate"], centre: bool = False) -> Float[Any, "*set"]:
    """Mean |cosine| over distinct pairs of each set (0-1): 0 for orthogonal vectors, 1 for parallel ones.

    sum_{i<j} |<x_i, x_j>| / (|x_i| |x_j|), over m (m - 1) / 2. Signs are dropped before averaging: signed cosines
    cancel. Arguments and errors are those of `cosines`.
    """
    return pair_mean(cosines(x, centre))


def seen_through(
    keys: Float[np.ndarray, "head vector coordinate"], metric: Float[np.ndarray, "head coordinate coordinate"]
) -> Float[np.ndarray, "head vector coordinate"]:
    """Keys in coordinates whose inner product is k' M l: k S, with S S = M symmetric and positive semidefinite.

    If M is the sum over a group's query heads of W_Q' W_Q (queries q = x W_Q), the cosines of the returned vectors,
    k' M l / sqrt(k' M k  l' M l), are those of the functions x -> q . k that give the attention scores. They do not
    change under k -> R' k, W_Q -> W_Q R^-1' for any invertible R: M -> R^-1 M R^-1' (derived here).
    """
    metric = np.asarray(metric, dtype=np.float64)
    values, vectors = np.linalg.eigh((metric + np.swapaxes(metric, -1, -2)) / 2)
    root = (vectors * np.sqrt(values.clip(0))[:, None, :]) @ np.swapaxes(vectors, -1, -2)
    return np.asarray(keys, dtype=np.float64) @ root
