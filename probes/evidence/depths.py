"""R2 of an exact target at every depth of a model, with the controls of a belief read-out.

It is read by one regression line shared by several coordinates (`Line`), or by ridge regression (`Ridge`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from llmgeom.claims import layer_band
from llmgeom.probe import UNTRAINED
from llmgeom.result import Labelled, labelled, line
from llmgeom.stats import ridge_probe
from llmgeom.stats.resampling import LEAST_CLUSTERS, Interval, interval_ends, jackknife
from llmgeom.stats.ridge_probe import folds

SHUFFLED = "shuffled evidence"
PERMUTATIONS = 199


def exchanged(group: np.ndarray, draws: int, rng: np.random.Generator) -> Int[np.ndarray, "draw row"]:
    """[draw row] the row that replaces each row: random permutations within groups."""
    order = np.tile(np.arange(len(group)), (draws, 1))
    for one in np.unique(group):
        at = np.flatnonzero(group == one)
        order[:, at] = rng.permuted(np.tile(at, (draws, 1)), axis=1)
    return order


@dataclass(frozen=True)
class ByDepth:
    """R2 at each depth.

    Attributes:
        value: [depth] of the model. spans: its 95 % intervals over clusters.
        untrained: [draw depth] of the untrained copies.
        without: [depth] of the model without context; 0 without such a control.
        shuffled: [depth draw] of the model, with the evidence of other prompts with as many observations.
    """

    value: np.ndarray
    spans: Sequence[Interval]
    untrained: np.ndarray
    without: np.ndarray
    shuffled: np.ndarray

    @classmethod
    def of(
        cls,
        target: Line | Ridge,
        activations: Sequence[np.ndarray],
        cluster: np.ndarray,
        seed: int,
        of_controls: Line | Ridge,
        untrained: Sequence[Sequence[np.ndarray]],
        without: Sequence[np.ndarray] | None,
        draws: int = PERMUTATIONS,
    ) -> ByDepth:
        """R2 of vectors [row coordinate] at each depth; `of_controls`: the target on the prompts that controls read."""
        every = np.arange(len(cluster))
        orders = exchanged(target.stratum, PERMUTATIONS, np.random.default_rng([seed, 21]))[:draws]
        return cls(
            np.array([target.r2(x) for x in activations]),
            [jackknife(partial(target.subset_r2, x), every, cluster) for x in activations],
            np.array([[of_controls.r2(x) for x in one] for one in untrained]).reshape(-1, len(activations)),
            np.zeros(len(activations)) if without is None else np.array([of_controls.r2(x) for x in without]),
            np.array([target.exchanged_r2(x, orders) for x in activations]),
        )

    def labelled(self, name: str, meaning: str, over: str, without: str, shuffled: str) -> dict[str, Labelled | None]:
        """R2 as the quantity `name`, with its intervals `over` clusters and the band of the untrained copies; and the
        quantities `without` and `shuffled`, of the model without context and with evidence of other prompts."""
        interval, band = interval_ends(self.spans), layer_band({UNTRAINED: self.untrained})
        around: Any = {"interval": (over, interval), "null": ("band of untrained copies", band)}
        of_others = layer_band({SHUFFLED: self.shuffled.T})
        cut = "the same of the trained weights without context; 0 where the model has no such control"
        return {
            **line(name, self.value, "depth", "R2", meaning, beside=without, **around),
            without: labelled(self.without, "depth", "R2", cut),
            shuffled: labelled(of_others, "depth bound", "R2", "band of the same with evidence of other prompts"),
        }


# ---- how a target is read --------------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class Ridge:
    """Ridge regression of y on all coordinates, within strata, held out by block (`stats.ridge_probe.read`).

    Attributes:
        y: [row column] the target, minus its mean within strata.
        stratum: [row] rows of one stratum are compared. fold: [row] the block of each row.
    """

    y: Float[np.ndarray, "row column"]
    stratum: np.ndarray
    fold: Int[np.ndarray, " row"]

    @cached_property
    def _member(self) -> Float[np.ndarray, "row stratum"]:
        return (self.stratum[:, None] == np.unique(self.stratum)).astype(float)

    def _predicted(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return ridge_probe.read(x, y, self.fold, confounds=self._member).prediction

    def r2(self, x: Float[np.ndarray, "row coordinate"]) -> float:
        """1 - squared error over the squared spread within strata, all columns together."""
        return self.subset_r2(x, np.arange(len(self.y)))

    def subset_r2(self, x: np.ndarray, rows: np.ndarray) -> float:
        """R2 of a subset of rows, with predictions fitted to all rows of other blocks."""
        last = self._last
        if not last or last[0] is not x:
            last[:] = x, self._predicted(x, self.y)
        y = self.y[rows]
        return float(1 - np.square(y - last[1][rows]).sum() / np.square(y).sum())

    def exchanged_r2(self, x: np.ndarray, orders: Int[np.ndarray, "draw row"]) -> Float[np.ndarray, " draw"]:
        """R2 for each order, where row r takes the target of row order[r]."""
        columns = self.y[orders].transpose(1, 0, 2).reshape(len(x), -1)
        missed = np.square(columns - self._predicted(x, columns)).sum(0).reshape(len(orders), -1).sum(1)
        return 1 - missed / np.square(self.y).sum()

    @cached_property
    def _last(self) -> list[np.ndarray]:
        """The last coordinates and their predictions, since a jackknife repeats the same coordinates many times."""
        return []


def blocks(groupings: Sequence[Any], seed: int) -> Int[np.ndarray, "row grouping"]:
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
        # Does every group of `fine` lie in one group of another?
        if not any(len(np.unique(np.stack([fine, coarse], 1), axis=0)) == fine.max() + 1 for coarse in coarser):
            needed.append(fine)
    return np.stack([folds(group, seed + i) for i, group in enumerate(needed)], 1)
