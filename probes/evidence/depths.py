"""R2 of an exact target at every depth of a model, with the controls of a belief read-out."""

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
from llmgeom.stats.resampling import Interval, interval_ends, jackknife
from llmgeom.stats.shared_line import Line

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
        cls, target: Line | Ridge, activations: Sequence[np.ndarray], cluster: np.ndarray, seed: int,
        of_controls: Line | Ridge, untrained: Sequence[Sequence[np.ndarray]], without: Sequence[np.ndarray] | None,
        draws: int = PERMUTATIONS,
    ) -> ByDepth:  # fmt: skip
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
