"""Stated: the prompt says in words how likely each mark is to be right and how reliable an entry is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from llmgeom.prompts.chance import pick
from llmgeom.prompts.process import Draw, Process, counts, is_commonest, numbers
from llmgeom.stats import conjugate

TENTHS = range(1, 10)


@dataclass(frozen=True)
class Stated(Process):
    """One of two marks is right; how likely a priori, and how often an entry shows it, the prompt states in words.

    The same marks have different exact answers under different stated numbers: no function of the counts is exact.

    Attributes:
        reliabilities: How many times in 10 an entry is right; each prompt draws one of them. Below 5 a mark is evidence
            for the other mark, which no counting rule uses.
        priors: In how many lists of 10 the first-named mark is right; each prompt draws one of them.
    """

    KS = (0, 1, 2, 4)
    FEATURES: ClassVar = {"counts": counts, "majority": is_commonest}  # both ignore the stated numbers

    reliabilities: str = "3,6,9"
    priors: str = "2,5,8"

    def __post_init__(self) -> None:
        for name in ("reliabilities", "priors"):
            self.require(
                all(number in TENTHS for number in numbers(self, name, int)),
                f"{name} from 1 to 9 in 10; 0 or 10 in 10 leaves one of the marks without prior mass",
            )

    def draw(self, k: int, rng: Random) -> Draw:
        stated = {
            "reliability": pick(rng, numbers(self, "reliabilities", int)),
            "prior": pick(rng, numbers(self, "priors", int)),
        }
        right = int(rng.random() >= stated["prior"] / 10)
        *seen, following = (right if rng.random() < stated["reliability"] / 10 else 1 - right for _ in range(k + 1))
        return Draw(tuple(seen), following, stated=stated)

    def statement(self, draw: Draw, marks: Sequence[str]) -> str:
        first, second = marks
        prior, reliability = draw.stated["prior"], draw.stated["reliability"]
        return (
            f"One mark is right for the whole list: {first} in {prior} of 10 lists, {second} in {10 - prior} of 10. "
            f"Each entry shows the right mark {reliability} times in 10."
        )

    def predictive(self, draws: Sequence[Draw]) -> Tensor:
        n1, n2 = counts(draws, 2).T
        return torch.from_numpy(conjugate.two_point(n1, n2, *_tenths(draws)))

    def belief(self, draws: Sequence[Draw]) -> Tensor:
        """The belief about which mark is right."""
        n1, n2 = counts(draws, 2).T
        return torch.from_numpy(conjugate.two_point_belief(n1, n2, *_tenths(draws)))

    def statistic(self, draw: Draw) -> str:
        difference = draw.seen.count(0) - draw.seen.count(1)
        return f"{difference:+d}, right {draw.stated['reliability']} in 10, prior {draw.stated['prior']} in 10"


def _tenths(draws: Sequence[Draw]) -> tuple[np.ndarray, np.ndarray]:
    """Reliability and prior of each prompt, as probabilities."""
    return tuple(np.array([draw.stated[name] for draw in draws]) / 10 for name in ("reliability", "prior"))  # type: ignore[return-value]
