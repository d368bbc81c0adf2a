"""One line for several coordinates at once, held out by every grouping of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
        y: what is predicted.
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
        prediction = np.empty_like(self.y)
        for block in np.unique(self.fold, axis=0):
            out = (self.fold == block).all(1)
            rest = (self.fold != block).all(1)
            prediction[out] = self._fitted(x, rest, out)
        return prediction

    def r2(self, x: Float[np.ndarray, "row slot"]) -> float:
        """1 - squared error over the squared spread within strata: 1 is exact, 0 as good as the stratum's mean."""
        missed = np.square(self.y - self.predicted(x)).sum()
        return float(1 - missed / np.square(self._centred(self.y)).sum())

    def subset_r2(self, x: Float[np.ndarray, "row slot"], rows: Int[np.ndarray, " kept"]) -> float:
        """R2 of some rows alone, fitted on them alone."""
        return Line(self.y[rows], self.stratum[rows], self.fold[rows]).r2(x[rows])

    def exchanged(self, order: Int[np.ndarray, " row"]) -> Line:
        """The same with row r given what row order[r] has to predict."""
        return replace(self, y=self.y[order])

    def slope(self, x: Float[np.ndarray, "row slot"]) -> float:
        """b of all rows; 0 where x does not vary."""
        return self._slope(x, np.ones(len(x), dtype=bool))

    def _centred(self, values: np.ndarray) -> np.ndarray:
        return values - self._member @ (self._member.T @ values / self._member.sum(0)[:, None])

    def _slope(self, x: np.ndarray, rows: np.ndarray) -> float:
        of = Line(self.y[rows], self.stratum[rows], self.fold[rows])
        flat, level = of._centred(x[rows]), of._centred(of.y)
        size = np.square(flat).sum()
        return float((flat * level).sum() / size) if size > 1e-20 * np.square(x).sum() else 0.0

    def _fitted(self, x: np.ndarray, rest: np.ndarray, out: np.ndarray) -> np.ndarray:
        member = self._member[rest]
        count = member.sum(0)[:, None]
        # A stratum without a row to learn from has the mean of all.
        x_mean, y_mean = (
            np.where(count > 0, member.T @ values[rest] / np.maximum(count, 1), values[rest].mean(0))
            for values in (x, self.y)
        )
        return self._member[out] @ y_mean + self._slope(x, rest) * (x[out] - self._member[out] @ x_mean)


def blocks(groupings: Sequence[Sequence], seed: int) -> Int[np.ndarray, "row grouping"]:
    """Blocks that hold out whole groups of every grouping.

    A grouping that another one holds out already (each of its groups lies in one group of the other) needs no blocks
    of its own; nor does one of fewer than 5 groups, unless it is the first.

    Raises:
        UserError: the first grouping has fewer than 5 groups.
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
