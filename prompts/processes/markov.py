"""Markov: the next mark depends on the last one, by rows of an unknown matrix; counting marks alone fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

import torch
from torch import Tensor

from llmgeom.answers import dirichlet_multinomial
from llmgeom.prompts.chance import weighted
from llmgeom.prompts.process import Draw, Process, counts, is_last, steps
from llmgeom.prompts.processes.dirichlet import dirichlet_shares


@dataclass(frozen=True)
class Markov(Process):
    """A visible Markov chain of marks; each row of its matrix is drawn from Dirichlet(a, ..., a).

    The first mark is drawn uniformly. After mark i the next is j with probability (a + n_ij) / (a K + n_i), with n_ij
    steps from i to j so far.

    Attributes:
        labels: K, the number of marks.
        a: Small values make chains that are nearly deterministic.
    """

    KS = (1, 2, 4, 8, 16)
    FEATURES: ClassVar = {"unigram": counts, "last mark": is_last}

    labels: int = 2
    a: float = 0.5

    def __post_init__(self) -> None:
        self.require_labels()
        self.require(self.a >= 0.01, f"a of 0.01 or more, since a Dirichlet({self.a:g}, ...) prior has no mass to draw")

    def draw(self, k: int, rng: Random) -> Draw:
        rows = [dirichlet_shares(self.labels, self.a, rng) for _ in range(self.labels)]
        chain = [int(rng.random() * self.labels)]
        for _ in range(k):
            chain.append(weighted(rng, rows[chain[-1]]))
        return Draw(tuple(chain[:k]), chain[k])

    def predictive(self, draws: Sequence[Draw]) -> Tensor:
        return dirichlet_multinomial(torch.from_numpy(steps(draws, self.labels)), self.a)

    def statistic(self, draw: Draw) -> str:
        last = draw.seen[-1] if draw.seen else "none"
        return f"after {last}: {','.join(map(str, steps([draw], self.labels)[0]))}"
