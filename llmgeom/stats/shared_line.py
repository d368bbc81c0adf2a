"""One regression line shared by several coordinates; every grouping of the rows is held out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int

from llmgeom.stats.resampling import LEAST_CLUSTERS
from llmgeom.stats.ridge_probe import folds


@dataclass(frozen=True)
class Line:
    """Predicts y[row slot] from x[row slot] by one slope for all slots and an intercept for each slot and stratum.

    y_rj = a_(s, j) + b (x_rj - mean of x in (s, j)), s the stratum of row r, least squares. The rows that a fit
    uses share no block of any grouping with the rows that it predicts.

    Attributes:
        stratum: [row] rows of one stratum share intercepts, and R2 counts the spread within strata.
        fold: [row grouping] the block of each row in each grouping.
    """

    y: Float[np.ndarray, "row slot"]
    stratum: np.ndarray
    fold: Int[np.ndarray, "row grouping"]

    @cached_property
    def _member(self) -> Float[np.ndarray, "row stratum"]:
        return (self.stratum[:, None] == np.unique(self.stratum)).astype(float)

    @property
    def spread(self) -> float:
        """Standard deviation of y within strata, in its unit."""
        return float(np.sqrt(np.square(self._centred(self.y)).mean()))

    def predicted(self, x: Float[np.ndarray, "row slot"]) -> Float[np.ndarray, "row slot"]:
        """Each row's prediction, from rows of other blocks."""
        return self._predicted(x, self.y[None])[0]

    def r2(self, x: Float[np.ndarray, "row slot"]) -> float:
        """1 - squared error over the squared spread within strata: 1 is exact, 0 as good as the stratum's mean."""
        return float(self._r2(x, self.y[None])[0])

    def subset_r2(self, x: Float[np.ndarray, "row slot"], rows: Int[np.ndarray, " kept"]) -> float:
        """R2 of a subset of rows, fitted to that subset only."""
        return Line(self.y[rows], self.stratum[rows], self.fold[rows]).r2(x[rows])

    def exchanged_r2(
        self, x: Float[np.ndarray, "row slot"], orders: Int[np.ndarray, "draw row"]
    ) -> Float[np.ndarray, " draw"]:
        """R2 for each order, where row r takes the target of row order[r]."""
        return self._r2(x, self.y[orders])

    def slope(self, x: Float[np.ndarray, "row slot"]) -> float:
        """b fitted to all rows; 0 if x does not vary."""
        return float(self._fitted(x, self.y[None], np.ones(len(x), dtype=bool))[0][0])

    def _centred(self, values: np.ndarray) -> np.ndarray:
        return values - self._member @ (self._member.T @ values / self._member.sum(0)[:, None])

    def _r2(self, x: np.ndarray, y: np.ndarray) -> Float[np.ndarray, " draw"]:
        error, spread = (np.square(part).sum((1, 2)) for part in (y - self._predicted(x, y), self._centred(y)))
        return 1 - error / spread

    def _predicted(self, x: np.ndarray, y: np.ndarray) -> Float[np.ndarray, "draw row slot"]:
        prediction = np.empty_like(y)
        for block in np.unique(self.fold, axis=0):
            out, rest = (self.fold == block).all(1), (self.fold != block).all(1)
            slope, x_mean, y_mean = self._fitted(x, y, rest)
            member = self._member[out]
            prediction[:, out] = member @ y_mean + slope[:, None, None] * (x[out] - member @ x_mean)
        return prediction

    def _fitted(self, x: np.ndarray, y: np.ndarray, rest: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[draw] slopes fitted to the rows `rest`; means there, [stratum slot] of x and [draw stratum slot] of y."""
        least = 1e-20 * np.square(x).sum()
        member, x, y = self._member[rest], x[rest], y[:, rest]
        count = member.sum(0)[:, None]
        # A stratum without a training row gets the mean of all training rows.
        x_mean, y_mean = (
            np.where(count > 0, member.T @ z / np.maximum(count, 1), z.mean(-2, keepdims=True)) for z in (x, y)
        )
        flat = x - member @ x_mean
        size = np.square(flat).sum()
        along = ((y - member @ y_mean) * flat).sum((1, 2))
        return np.where(size > least, along / (size or 1.0), 0.0), x_mean, y_mean


def blocks(groupings: Sequence[Sequence], seed: int) -> Int[np.ndarray, "row grouping"]:
    """Blocks that hold out whole groups of every grouping.

    A grouping needs no blocks of its own if another one already holds out its groups (each lies in one group of the
    other), or if it has fewer than 5 groups and is not the first. Raises UserError: the first grouping has fewer than 5
    groups.
    """
    numbered = [np.unique([str(group) for group in grouping], return_inverse=True)[1] for grouping in groupings]
    usable = [g for i, g in enumerate(numbered) if i == 0 or g.max() + 1 >= LEAST_CLUSTERS]
    needed: list[np.ndarray] = []
    for i, fine in enumerate(usable):
        coarser = [*needed, *usable[i + 1 :]]
        if not any(_within(fine, coarse) for coarse in coarser):
            needed.append(fine)
    return np.stack([folds(group, seed + i) for i, group in enumerate(needed)], 1)


def _within(fine: np.ndarray, coarse: np.ndarray) -> bool:
    """Whether every group of `fine` lies in one group of `coarse`."""
    pairs = np.unique(np.stack([fine, coarse], 1), axis=0)
    return len(pairs) == fine.max() + 1
