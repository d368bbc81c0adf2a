"""Bijection: every item has a different mark, so a new item has one of the remaining marks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

import torch
from torch import Tensor

from llmgeom.answers import evenly
from llmgeom.prompts.chance import shuffled
from llmgeom.prompts.process import Draw, Process, counts, counts_by_novelty, is_last


@dataclass(frozen=True)
class Bijection(Process):
    """A one-to-one map of items to marks, shown pair by pair; a new item has one of the marks not yet shown.

    Attributes:
        labels: V, the number of marks and of items; at most V - 1 pairs are shown.
        stored: The probability that the question is about an item that was shown.
    """

    KS = (0, 1, 2, 3, 4)
    PRIMITIVE = "bind"
    # unigram: whether a mark was shown, not which item had it; novelty: whether the queried item was shown
    FEATURES: ClassVar = {"unigram": counts, "unigram and novelty": counts_by_novelty, "last mark": is_last}

    labels: int = 5
    stored: float = 0.25

    def __post_init__(self) -> None:
        self.require_labels()
        self.require(0 <= self.stored <= 1, "stored between 0 and 1")

    @property
    def most(self) -> int:
        return self.labels - 1

    def draw(self, k: int, rng: Random) -> Draw:
        of_item = shuffled(rng, range(self.labels))
        asked = int(rng.random() * k) if k and rng.random() < self.stored else k
        return Draw(tuple(of_item[:k]), of_item[asked], (*range(k), asked))

    def possible(self, draw: Draw) -> bool:
        return len(set(draw.seen)) == len(draw.seen)

    def predictive(self, draws: Sequence[Draw]) -> Tensor:
        return evenly(torch.tensor([[outcome in draw.known if draw.known else outcome not in draw.seen
                                     for outcome in range(self.labels)] for draw in draws]))  # fmt: skip

    def statistic(self, draw: Draw) -> str:
        left = "".join(str(outcome) for outcome in range(self.labels) if outcome not in draw.seen)
        return f"stored {draw.known[0]}" if draw.known else f"left {left}"
