"""Ridge regression for many more rows than coordinates: the results of `ridge_probe.read`, from sums over folds.

Products of all rows are formed once, fold by fold. Those of the other folds follow by subtraction, and confounds are
removed from the sums: residuals x - e C have the products x'x - x'e C - C'e'x + C'e'e C, a correction of low rank.
NumPy solves the equations because it releases Python's lock, so that several layers run at the same time: scipy's
`cho_solve` holds the lock, and two at once took twice as long as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from jaxtyping import Bool, Float, Int

LEAST_SPREAD = 0.01  # least share of a coordinate's squares outside a fold for which sums are subtracted


@dataclass(frozen=True)
class Sums:
    """Products, summed over rows, of coordinates x, columns y, and e, a constant and a basis of the confounds.

    Rows are scaled by the square roots of their weights, the constant too: e'e[0, 0] is the sum of weights.

    Attributes:
        xx, xe, xy, ee, ey: products of two of them.
        yy: [column] sums of squares.
    """

    xx: np.ndarray
    xe: np.ndarray
    xy: np.ndarray
    ee: np.ndarray
    ey: np.ndarray
    yy: np.ndarray

    @classmethod
    def of(cls, x: np.ndarray, e: np.ndarray, y: np.ndarray) -> Sums:
        """The sums over these rows."""
        return cls(x.T @ x, x.T @ e, x.T @ y, e.T @ e, e.T @ y, np.square(y).sum(0))

    @classmethod
    def total(cls, parts: Sequence[Sums]) -> Sums:
        """The sums over the rows of all parts."""
        return cls(*(sum(getattr(part, f.name) for part in parts) for f in fields(cls)))

    def less(self, other: Sums) -> Sums:
        """The sums over the rows that `other` does not contain."""
        return Sums(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(Sums)))

    def coordinates(self, kept: np.ndarray) -> Sums:
        """The sums of a subset of coordinates."""
        return Sums(self.xx[np.ix_(kept, kept)], self.xe[kept], self.xy[kept], self.ee, self.ey, self.yy)

    def residual(self, coef: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sums z of x - e coef, and their products with y."""
        return self.xe[:, 0] - coef.T @ self.ee[:, 0], self.xy - coef.T @ self.ey

    def centred(self, coef: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Products of the centred x - e coef with itself and with the centred y."""
        n, (z, zy) = self.ee[0, 0], self.residual(coef)
        left, right = np.column_stack([coef.T, z]), np.column_stack([self.xe - coef.T @ self.ee / 2, z / (2 * n)])
        both, other = np.hstack([left, right]), np.hstack([right, left])
        return self.xx - both @ other.T, zy - np.outer(z, self.ey[0] / n)


class Folds:
    """All rows sorted into folds; `read` predicts each fold from the others.

    x is first replaced by its residual on the confounds over all rows, so that the corrections for single folds are
    small and lose no digits.

    Args:
        confounds: x is replaced by its residual on a constant and these, fitted without the predicted fold.
    """

    def __init__(
        self,
        x: Float[np.ndarray, "row coordinate"],
        y: Float[np.ndarray, "row column"],
        fold: Int[np.ndarray, " row"],
        confounds: Float[np.ndarray, "row confound"] | None,
        weight: Float[np.ndarray, " row"],
    ) -> None:
        root = np.sqrt(weight)[:, None]
        self.design = root if confounds is None else np.column_stack([root, confounds * root])
        basis, size, axes = np.linalg.svd(self.design, full_matrices=False)
        kept = size > 1e-10 * size[0]
        self.basis, self.turn = basis[:, kept], size[kept, None] * axes[kept]  # design = basis turn
        self.explained = (self.basis * root).T @ x
        self.rows = [np.flatnonzero(fold == held) for held in range(int(fold.max()) + 1)]
        self.x = [root[at] * x[at] - self.basis[at] @ self.explained for at in self.rows]
        self.e = [np.column_stack([root[at], self.basis[at]]) for at in self.rows]
        self.y = [root[at] * y[at] for at in self.rows]
        self.sums = [Sums.of(*one) for one in zip(self.x, self.e, self.y, strict=True)]

    def read(
        self, test_fold: int, varying: Bool[np.ndarray, " coordinate"], penalties: Float[np.ndarray, " penalty"]
    ) -> tuple[Float[np.ndarray, "held_out column"], Float[np.ndarray, " column"], Float[np.ndarray, " column"]]:
        """Predict one fold with the penalty of least squared error when the other folds are held out in turn.

        The cost is one linear solve in the coordinates for each other fold and penalty, whatever the number of rows.
        One eigendecomposition instead of 8 solves was no faster: at 1,024 coordinates and 200 columns 203 ms and four
        products per penalty, against 8 solves of 34 ms.
        The error of an inner fold is y'y - 2 w'z'y + w'z'z w (means aside). Its z'z is T - A, with T over all rows and
        A over the fitted rows, for which A w = z'y - penalty w is known; and w'T w = |L'w|^2 with T = L L' costs half
        of the product with z'z.

        Args:
            varying: Coordinates that vary outside it.

        Returns:
            Predictions minus the mean of y over the other folds; for each column the penalty and its squared error.
        """
        others = [i for i, rows in enumerate(self.rows) if i != test_fold and len(rows)]
        coef, new = (one[:, varying] for one in self._confounded(test_fold, others))
        parts = [self.sums[i] if varying.all() else self.sums[i].coordinates(varying) for i in others]
        whole = Sums.total(parts)
        square, product = whole.centred(coef)
        if (square.diagonal() < LEAST_SPREAD * self._squares()[varying]).any():
            # Nearly all of a coordinate's squares lie in this fold: subtracted sums would contain rounding errors.
            parts = [Sums.of(self.x[i][:, varying] - self.e[i] @ coef, self.e[i], self.y[i]) for i in others]
            whole, coef = Sums.total(parts), np.zeros_like(coef)
            square, product = whole.centred(coef)
        scale = square.diagonal() * len(square) / whole.ee[0, 0]  # the penalty refers to standardised coordinates
        errors = _errors(whole, parts, coef, square, scale, penalties)
        chosen, prediction = penalties[errors.argmin(0)], np.empty((len(self.rows[test_fold]), errors.shape[1]))
        own = self.x[test_fold] if varying.all() else self.x[test_fold][:, varying]
        for penalty in np.unique(chosen):
            of = chosen == penalty
            weights = _ridge(square, penalty * scale, product[:, of])
            prediction[:, of] = own @ weights - self.e[test_fold] @ (new @ weights)
        return prediction / self.e[test_fold][:, :1], chosen, errors.min(0)

    def _squares(self) -> Float[np.ndarray, " coordinate"]:
        """Sum of squares over all rows."""
        return np.sum([one.xx.diagonal() for one in self.sums], 0)

    def _confounded(self, held: int, others: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """[e coordinate] coefficients of x on the confounds, fitted outside a fold: for those rows, and for the fold.

        The two differ if the rows outside do not determine the coefficients, e.g. for a level that occurs only in the
        fold: the fold then uses those of minimum norm for the original x, as `ridge_probe.residuals` does.
        """
        rest = np.concatenate([self.rows[i] for i in others])
        take = self.turn @ np.linalg.pinv(self.design[rest], rcond=1e-10)
        ends = np.cumsum([len(self.rows[i]) for i in others])[:-1]
        coef = sum(part @ self.x[i] for i, part in zip(others, np.split(take, ends, axis=1), strict=True))
        free = take @ self.basis[rest] - np.eye(len(take))
        none = np.zeros((1, coef.shape[1]))  # for the constant, which the basis contains too
        return np.vstack([none, coef]), np.vstack([none, coef + free @ self.explained])


def _errors(
    whole: Sums, parts: Sequence[Sums], coef: np.ndarray, square: np.ndarray, scale: np.ndarray, penalties: np.ndarray
) -> Float[np.ndarray, "penalty column"]:
    """Sum over parts of the squared error of the ridge regression fitted to the other parts."""
    least, errors = penalties[0], np.zeros((len(penalties), whole.xy.shape[1]))
    # L', with a penalty, since T alone may be singular.
    root = np.ascontiguousarray(np.linalg.cholesky(square + np.diag(least * scale)).T)
    for part in parts:
        rest, (z, zy) = whole.less(part), part.residual(coef)
        fitted, product = rest.centred(coef)
        n, m = rest.ee[0, 0], part.ee[0, 0]
        for i, penalty in enumerate(penalties):
            weights = _ridge(fitted, penalty * scale, product)
            along, size = z @ weights, scale @ np.square(weights)  # the sum of z over all parts is 0
            intercept = (rest.ey[0] + along) / n
            linear = _dots(weights, zy) + intercept * part.ey[0]
            inner = (penalty - least) * size - _dots(weights, product) - along**2 / n
            inner += np.square(root @ weights).sum(0)
            errors[i] += part.yy - 2 * linear + inner + 2 * intercept * along + m * intercept**2
    return errors


def _ridge(square: np.ndarray, penalty: np.ndarray, product: np.ndarray) -> Float[np.ndarray, "coordinate column"]:
    """The weights w of (square + diag penalty) w = product.

    The penalty is added to the diagonal of `square` and removed again: a copy of 1,024 coordinates costs 8 MB. LAPACK
    reads columns; the transpose of a symmetric matrix is equal and needs no strided copy (34 ms instead of 42).
    """
    diagonal = square.diagonal().copy()
    np.fill_diagonal(square, diagonal + penalty)
    weights = np.linalg.solve(square.T, product)
    np.fill_diagonal(square, diagonal)
    return weights


def _dots(one: np.ndarray, other: np.ndarray) -> Float[np.ndarray, " column"]:
    """Inner product of each column of one with the same column of the other."""
    return np.einsum("dc,dc->c", one, other)
