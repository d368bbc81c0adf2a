"""Recall: items are shown with marks in random order, and the mark of one item is asked for again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

import torch
from torch import Tensor

from llmgeom.answers import evenly
from llmgeom.prompts.process import Draw, Process, counts, counts_by_novelty, is_last


@dataclass(frozen=True)
class Recall(Process):
    """Each item has a mark, drawn evenly; an item that was shown has the mark shown with it, a new one any.

    Attributes:
        labels: K, the number of marks.
        stored: The probability that the question is about an item that was shown.
    """

    KS = (1, 2, 4, 8)
    PRIMITIVE = "bind"
    FEATURES: ClassVar = {"unigram": counts, "unigram and novelty": counts_by_novelty, "last mark": is_last}

    labels: int = 4
    stored: float = 0.75

    def __post_init__(self) -> None:
        self.require_labels()
        self.require(0 <= self.stored <= 1, "stored between 0 and 1")

    def draw(self, k: int, rng: Random) -> Draw:
        seen = tuple(int(rng.random() * self.labels) for _ in range(k))
        stored, place, new = rng.random() < self.stored, int(rng.random() * k), int(rng.random() * self.labels)
        if stored and k:
            return Draw(seen, seen[place], (*range(k), place))
        return Draw(seen, new)

    def predictive(self, draws: Sequence[Draw]) -> Tensor:
        return evenly(torch.tensor([[not draw.known or outcome in draw.known for outcome in range(self.labels)]
                                    for draw in draws]))  # fmt: skip

    def statistic(self, draw: Draw) -> str:
        return f"stored {draw.known[0]}" if draw.known else "new item"
