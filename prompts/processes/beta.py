"""Beta: each mark comes with a fixed, unknown share; the prior over the share is a symmetric Beta distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

import torch
from scipy.stats import beta
from torch import Tensor

from llmgeom.prompts.process import Draw, Process, counts, is_commonest, is_last
from llmgeom.stats import conjugate


@dataclass(frozen=True)
class Beta(Process):
    """Two marks; the share of either is drawn from Beta(a, a), and observations with it.

    Attributes:
        a: 1 is uniform: Laplace's rule is exact.
    """

    FEATURES: ClassVar = {"majority": is_commonest, "last mark": is_last}  # counts are left out: they are exact here

    a: float = 1.0

    def __post_init__(self) -> None:
        self.require(self.a > 0, f"a above 0, since Beta({self.a:g}, {self.a:g}) is a prior without mass")

    def draw(self, k: int, rng: Random) -> Draw:
        share = float(beta.ppf(rng.random(), self.a, self.a))
        *seen, following = (int(rng.random() >= share) for _ in range(k + 1))
        return Draw(tuple(seen), following)

    def predictive(self, draws: Sequence[Draw]) -> Tensor:
        n1, n2 = counts(draws, 2).T
        return torch.from_numpy(conjugate.beta_bernoulli(n1, n2, self.a, self.a))

    def belief(self, draws: Sequence[Draw]) -> Tensor:
        """The belief about which mark is more frequent in the long run."""
        n1, n2 = counts(draws, 2).T
        return torch.from_numpy(conjugate.beta_majority(n1, n2, self.a, self.a))

    def statistic(self, draw: Draw) -> str:
        return f"{draw.seen.count(0)},{draw.seen.count(1)}"
