"""Two-point: one of two marks rules the list, and each observation shows it with a fixed reliability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from llmgeom.answers import dirichlet_multinomial
from llmgeom.prompts.process import Draw, Process, counts, is_commonest
from llmgeom.stats import conjugate


@dataclass(frozen=True)
class TwoPoint(Process):
    """One of two marks rules; each observation shows it with probability `reliability`.

    Attributes:
        reliability: r. Which mark rules has probability 1/2 each.
    """

    FEATURES: ClassVar = {"majority": is_commonest}

    reliability: float = 0.9

    def __post_init__(self) -> None:
        self.require(0.5 < self.reliability < 1, "a reliability above 0.5 and below 1")

    def draw(self, k: int, rng: Random) -> Draw:
        ruling = int(rng.random() < 0.5)
        *seen, following = (ruling if rng.random() < self.reliability else 1 - ruling for _ in range(k + 1))
        return Draw(tuple(seen), following)

    def predictive(self, draws: Sequence[Draw]) -> Tensor:
        n1, n2 = counts(draws, 2).T
        return torch.from_numpy(conjugate.two_point(n1, n2, self.reliability))

    def belief(self, draws: Sequence[Draw]) -> Tensor:
        """The belief about which mark rules."""
        n1, n2 = counts(draws, 2).T
        return torch.from_numpy(conjugate.two_point_belief(n1, n2, self.reliability))

    def statistic(self, draw: Draw) -> str:
        return f"{draw.seen.count(0) - draw.seen.count(1):+d}"

    def trivial(self, draws: Sequence[Draw]) -> Mapping[str, np.ndarray]:
        """Also Laplace's rule, (1 + n_j) / (2 + k)."""
        laplace = dirichlet_multinomial(torch.from_numpy(counts(draws, 2))).numpy()
        return {**super().trivial(draws), "Laplace's rule": laplace}
