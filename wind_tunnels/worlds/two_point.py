"""One of two symbols rules, and each observation shows it with a known reliability (SULA)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llmgeom.sampling import Generator, constants, uniforms
from llmgeom.wind_tunnels.exchangeable import Exchangeable


@dataclass(frozen=True)
class TwoPoint(Exchangeable):
    """One of two symbols rules; each observation shows it with probability `reliability`.

    P(next is the first) = r p + (1 - r)(1 - p) with p = 1 / (1 + (r / (1 - r))^(n2 - n1)) after n1 and n2 symbols
    (Paper III's SULA).

    Attributes:
        reliability: r. Which symbol rules has probability 1/2 each.
    """

    reliability: float = 0.9

    def __post_init__(self) -> None:
        self.require(0.5 < self.reliability < 1, "a reliability above 0.5 and below 1")
        self.require(self.steps >= 1, "steps of 1 or more")

    def hypothesis(self, n: int, generator: Generator) -> Tensor:
        """The ruling symbol, [n 1]."""
        return (uniforms(generator, n, 1) < 0.5).long()

    def symbols_of(self, hypothesis: Tensor, generator: Generator) -> Tensor:
        right = uniforms(generator, len(hypothesis), self.steps) < self.reliability
        return torch.where(right, hypothesis, 1 - hypothesis)

    def causes(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """First the cause that the first symbol rules."""
        r = self.reliability
        shares = constants([r, 1 - r, 1 - r, r], inputs.device).view(2, 2)
        return shares, torch.full_like(shares[0], 0.5)
