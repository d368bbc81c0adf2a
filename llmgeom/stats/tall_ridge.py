"""Ridge regression for many more rows than coordinates: the numbers of `ridge_probe.read`, from sums over folds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np
from jaxtyping import Float, Int


@dataclass(frozen=True)
class Sums:
    """Sums over rows of coordinates z and columns y, from which ridge regressions and squared errors follow.

    Attributes:
        n: rows, or the sum of their weights, by which every sum is weighted.
        z, y: sums.
        zz, zy: products, [coordinate coordinate] and [coordinate column].
        yy: [column] squares.
    """

    n: float
    z: np.ndarray
    y: np.ndarray
    zz: np.ndarray
    zy: np.ndarray
    yy: np.ndarray

    @classmethod
    def of(cls, z: np.ndarray, y: np.ndarray, weight: np.ndarray) -> Sums:
        """The sums over these rows."""
        even = z * np.sqrt(weight)[:, None]  # one matrix times itself costs half of a product of two
        return cls(
            weight.sum(), weight @ z, weight @ y, even.T @ even, z.T @ (weight[:, None] * y), weight @ np.square(y)
        )

    def columns(self, some: np.ndarray) -> Sums:
        """The same of some columns of y."""
        return Sums(self.n, self.z, self.y[some], self.zz, self.zy[:, some], self.yy[some])

    def less(self, other: Sums) -> Sums:
        """The sums over the rows that are not among the others."""
        return Sums(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(Sums)))

    def solutions(self, penalties: Iterable[float]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Weights [coordinate column] and intercepts [column] that minimise sum (y - z w - b)^2 + penalty |w|^2."""
        from scipy.linalg import cho_factor, cho_solve

        centred = self.zz - np.outer(self.z, self.z / self.n)
        product = np.asfortranarray(self.zy - np.outer(self.z, self.y / self.n))
        fits = []
        for penalty in penalties:
            whole = centred.copy(order="F")  # LAPACK's order, else it makes a copy of its own
            whole[np.diag_indices(len(whole))] += penalty
            factor = cho_factor(whole, lower=True, overwrite_a=True, check_finite=False)
            weights = cho_solve(factor, product, check_finite=False)
            fits.append((weights, (self.y - self.z @ weights) / self.n))
        return fits

    def error(self, weights: np.ndarray, intercept: np.ndarray) -> Float[np.ndarray, " column"]:
        """Sum over these rows of (y - z w - b)^2, for each column."""
        linear = 2 * (weights * self.zy).sum(0) + 2 * intercept * self.y
        square = (weights * (self.zz @ weights)).sum(0) + 2 * intercept * (self.z @ weights) + self.n * intercept**2
        return self.yy - linear + square


def read(
    z: Float[np.ndarray, "row coordinate"],
    new: Float[np.ndarray, "held_out coordinate"],
    y: Float[np.ndarray, "row column"],
    fold: Int[np.ndarray, " row"],
    penalties: Float[np.ndarray, " penalty"],
    weight: Float[np.ndarray, " row"],
) -> tuple[Float[np.ndarray, "held_out column"], Float[np.ndarray, " column"], Float[np.ndarray, " column"]]:
    """Predict new rows with the penalty that has the least squared error when the folds are held out in turn.

    It costs a Cholesky factor of the coordinates for each fold and penalty, whatever the number of rows and columns.

    Returns:
        Predictions; for each column the penalty, and the sum of squared errors of the folds held out with it.
    """
    parts = [Sums.of(z[fold == held], y[fold == held], weight[fold == held]) for held in np.unique(fold)]
    whole = Sums(*(sum(getattr(part, f.name) for part in parts) for f in fields(Sums)))
    errors = np.zeros((len(penalties), y.shape[1]))
    for part in parts:
        for i, (weights, intercept) in enumerate(whole.less(part).solutions(penalties)):
            errors[i] += part.error(weights, intercept)
    chosen, prediction = penalties[errors.argmin(0)], np.empty((len(new), y.shape[1]))
    for penalty in np.unique(chosen):
        ((weights, intercept),) = whole.columns(chosen == penalty).solutions([penalty])
        prediction[:, chosen == penalty] = new @ weights + intercept
    return prediction, chosen, errors.min(0)
