"""Dirichlet: several marks with unknown shares, a point of a simplex that the counts narrow down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

import numpy as np
import torch
from scipy.stats import gamma
from torch import Tensor

from llmgeom.answers import dirichlet_multinomial
from llmgeom.prompts.chance import weighted
from llmgeom.prompts.process import Draw, Process, counts, is_commonest, is_last


@dataclass(frozen=True)
class Dirichlet(Process):
    """Several marks; their shares are drawn from Dirichlet(a, ..., a), and observations with them.

    The hidden cause is a point of the simplex, not a finite state: its posterior mean is the predictive.

    Attributes:
        labels: K, the number of marks.
        a: 1 is uniform on the simplex.
    """

    FEATURES: ClassVar = {"majority": is_commonest, "last mark": is_last}  # counts are left out: they are exact here

    labels: int = 3
    a: float = 1.0

    def __post_init__(self) -> None:
        self.require_labels()
        # Below 0.01 all Gamma variables of a draw may round to 0.
        self.require(self.a >= 0.01, f"a of 0.01 or more, since a Dirichlet({self.a:g}, ...) prior has no mass to draw")

    def draw(self, k: int, rng: Random) -> Draw:
        shares = dirichlet_shares(self.labels, self.a, rng)
        *seen, following = (weighted(rng, shares) for _ in range(k + 1))
        return Draw(tuple(seen), following)

    def predictive(self, draws: Sequence[Draw]) -> Tensor:
        return dirichlet_multinomial(torch.from_numpy(counts(draws, self.labels)), self.a)

    def statistic(self, draw: Draw) -> str:
        return ",".join(str(draw.seen.count(outcome)) for outcome in range(self.labels))


def dirichlet_shares(size: int, a: float, rng: Random) -> np.ndarray:
    """A draw from Dirichlet(a, ..., a): Gamma variables, by inversion, over their sum."""
    draws = gamma.ppf([rng.random() for _ in range(size)], a)
    return draws / draws.sum()
