"""One of two symbols is right, and the sequence states how likely each is and how reliable an entry is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from llmgeom.sampling import Generator, constants, integers, uniforms
from llmgeom.wind_tunnels.exchangeable import Exchangeable


@dataclass(frozen=True)
class Stated(Exchangeable):
    """One of two symbols is right; how likely a priori, and how often an entry shows it, the sequence says first.

    The same symbols have different exact answers under different stated numbers: no function of the counts is exact.
    Tokens 2 to 10 state the prior of the first symbol in tenths, 11 to 19 the reliability.

    Attributes:
        reliabilities: How many times in 10 an entry is right; each sequence draws one of them. Below 5 a symbol is
            evidence for the other one, which no counting rule uses.
        priors: In how many lists of 10 the first symbol is right; each sequence draws one of them.
    """

    KS: ClassVar[tuple[int, ...]] = (0, 1, 2, 4)

    reliabilities: str = "3,6,9"
    priors: str = "2,5,8"

    def __post_init__(self) -> None:
        self.require(self.steps >= 1, "steps of 1 or more")
        for name in ("reliabilities", "priors"):
            self.require(
                all(number in map(float, range(1, 10)) for number in self.numbers(name)),
                f"{name} from 1 to 9 in 10; 0 or 10 in 10 leaves one of the symbols without prior mass",
            )

    @property
    def vocabulary(self) -> int:
        return 20

    @property
    def header(self) -> int:
        """The stated prior; the first query is at the reliability."""
        return 1

    def hypothesis(self, n: int, generator: Generator) -> Tensor:
        """Reliability and prior in tenths, and the right symbol, [n 3]."""
        chosen = [
            constants(numbers, generator.device).long()[integers(len(numbers), generator, n, 1)]
            for numbers in (self.numbers("reliabilities"), self.numbers("priors"))
        ]
        return torch.cat([*chosen, (uniforms(generator, n, 1) >= chosen[1] / 10).long()], 1)

    def opening(self, hypothesis: Tensor) -> Tensor:
        return torch.stack([hypothesis[:, 1] + 1, hypothesis[:, 0] + 10], 1)

    def symbols_of(self, hypothesis: Tensor, generator: Generator) -> Tensor:
        right, lots = hypothesis[:, 2:], uniforms(generator, len(hypothesis), self.steps)
        return torch.where(lots < hypothesis[:, :1] / 10, right, 1 - right)

    def causes(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        p, r = ((inputs[:, :2] - inputs.new_tensor([1, 10])).double() / 10)[:, None].unbind(-1)
        return torch.stack([r, 1 - r, 1 - r, r], -1).unflatten(-1, (2, 2)), torch.stack([p, 1 - p], -1)

    def statement(self, inputs: Tensor, marks: Sequence[str]) -> str:
        prior, reliability = int(inputs[0]) - 1, int(inputs[1]) - 10
        return (
            f"One mark is right for the whole list: {marks[0]} in {prior} of 10 lists, {marks[1]} in {10 - prior} of "
            f"10. Each entry shows the right mark {reliability} times in 10."
        )
