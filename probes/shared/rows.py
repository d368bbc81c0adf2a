"""Rows of a capture: as matrices of one layer, and what each row is: its token, its position, and the entropy that
metrics relate it to, the exact predictive entropy within position if it is known, else the model's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from llmgeom.batch import Text
from llmgeom.probe import Capture, Site, UserError
from llmgeom.provenance import LEAST_SPREAD
from llmgeom.stats.information import bits


def as_matrix(x: Tensor) -> np.ndarray:
    """[row coordinate] float64, heads concatenated if the site has heads."""
    return x.flatten(1).double().numpy()


def layer_matrices(capture: Capture, site: Site) -> Iterator[np.ndarray]:
    """`as_matrix`, one layer at a time."""
    return map(as_matrix, capture.layers(site))


def last_layer(capture: Capture, site: Site) -> np.ndarray:
    """`as_matrix` of the last layer."""
    return as_matrix(capture.layers(site)[-1])


def captured(capture: Capture, site: Site) -> bool:
    """Whether a site is in the capture; some models lack optional sites."""
    return any(key == site for key, _ in capture.tensors)


def varies(x: np.ndarray) -> bool:
    """Whether any coordinate differs between two rows."""
    return bool((x.max(0) != x.min(0)).any())


def input_at_rows(capture: Capture) -> Tensor:
    """[row] the token id at each row's position; for real-valued inputs [row feature]."""
    inputs = capture.batch.inputs
    assert not isinstance(inputs, Text), "a scan tokenizes its batches before it captures them"
    return inputs.data[capture.prompt, capture.position]


def final_tokens(capture: Capture) -> np.ndarray:
    """[row] the token id at each row's position; equal real-valued inputs have the same number."""
    inputs = input_at_rows(capture).numpy()
    return inputs if inputs.ndim == 1 else np.unique(inputs, axis=0, return_inverse=True)[1].reshape(-1)


# ---- entropy ---------------------------------------------------------------------------------------------------------


class Constant(UserError):
    """Raised if the entropy hardly varies: a scale-free metric of it would rank rounding errors."""


@dataclass(frozen=True)
class Target:
    """The entropy of each row, in bits, as metrics of entropy use it.

    If the batch has an exact posterior, it is the entropy of the exact prediction, and rows are compared only within
    their position (for evidence in text, within their number of observations): the mean over the rows at the same
    position is subtracted from the target and the vectors, and the rest is pooled. Held-out predictions use the means
    of other folds (`stratum`), and a rank correlation has positions as covariates, since ranks of centred values still
    differ between positions of unequal spread. Without an exact posterior it is the model's own next-token entropy,
    unchanged. Intervals and permutations always use whole clusters.

    Attributes:
        values: [row] bits.
        group: [row] number of the row's position; 0 in all rows without an exact posterior.
        exact: whether it is the exact entropy.
    """

    values: np.ndarray
    group: np.ndarray
    exact: bool

    @classmethod
    def of(cls, capture: Capture, entropy: np.ndarray) -> Target:
        """The target of a sample.

        Args:
            entropy: [row] the model's own entropy, bits.
        """
        posterior = capture.batch.posterior
        if posterior is None:
            return cls(np.asarray(entropy, dtype=np.float64), np.zeros(len(entropy), dtype=np.int64), False)
        steps = capture.batch.columns.get("k")  # for evidence in text, whose items differ in length
        where = capture.position.numpy() if steps is None else np.array(steps)[capture.prompt.numpy()]
        group = np.unique(where, return_inverse=True)[1]
        exact = bits(posterior.flat.entropy.double().numpy())
        return cls(centred(exact, group), group, True)

    def require(self) -> Target:
        """The target itself. Raises Constant if it hardly varies, within position if it is exact."""
        free = len(self.values) - (int(self.group.max()) + 1)
        spread = float(np.sqrt(np.square(centred(self.values, self.group)).sum() / free)) if free > 0 else 0.0
        if not spread >= LEAST_SPREAD:
            what = "the exact entropy does not vary within a position" if self.exact else "entropy does not vary"
            raise Constant(f"not measured: {what} (sd {spread:.2g} bits, {LEAST_SPREAD:g} needed)")
        return self

    def at(self, rows: np.ndarray) -> Target:
        """The target of these rows only; an exact entropy is compared within their positions."""
        values, group = self.values[rows], np.unique(self.group[rows], return_inverse=True)[1]
        return Target(centred(values, group) if self.exact else values, group, self.exact)

    @property
    def stratum(self) -> np.ndarray | None:
        """[row] number of the position within which rows are compared; None if all rows are compared."""
        return self.group if self.exact and self.group.any() else None

    def covariates(self, others: np.ndarray | None = None) -> np.ndarray | None:
        """[row column] covariates of a rank correlation: an indicator of each position of several rows, and others."""
        if self.stratum is None:
            return others
        positions = np.eye(int(self.group.max()) + 1)[self.group]
        positions = positions[:, positions.sum(0) > 1]
        return positions if others is None else np.column_stack([positions, others])

    def within(self, x: np.ndarray) -> np.ndarray:
        """Vectors [row coordinate] minus their mean at the same position; unchanged if there is one group."""
        return centred(x, self.group) if self.exact else x


def centred(x: np.ndarray, group: np.ndarray) -> np.ndarray:
    """x [row ...] minus the mean over the rows of the same group."""
    sums = np.zeros((int(group.max()) + 1, *x.shape[1:]))
    np.add.at(sums, group, x)
    counts = np.bincount(group).reshape(-1, *[1] * (x.ndim - 1))
    return x - (sums / counts)[group]
