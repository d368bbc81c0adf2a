"""Hidden Markov: a state that is never shown moves by one of a few chains, and each mark shows it with some error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from llmgeom.answers import dirichlet_multinomial, forward_filter
from llmgeom.prompts.chance import weighted
from llmgeom.prompts.process import Draw, Process, counts, is_last, numbers, steps


@dataclass(frozen=True)
class HMM(Process):
    """A hidden state moves by one of a few chains; each mark shows it with probability `reliability`.

    There are as many states as marks; the first state is drawn uniformly. In chain c the state stays with probability
    s_c, else moves uniformly to another state; a mark shows the state with probability r, else uniformly another. The
    belief is over chain and state together, chain by chain.

    Attributes:
        labels: K, the number of marks and states.
        stays: s_c of each chain: by default one that mostly stays and one that mostly alternates.
        weights: Prior weights of the chains, in proportion.
        reliability: r.
    """

    KS = (1, 2, 4, 8, 16)
    PRIMITIVE = "transport"
    FEATURES: ClassVar = {"unigram": counts, "last mark": is_last}

    labels: int = 2
    stays: str = "0.9,0.1"
    weights: str = "1,1"
    reliability: float = 0.9

    def __post_init__(self) -> None:
        stays, weights = numbers(self, "stays"), numbers(self, "weights")
        self.require_labels()
        self.require(all(0 <= stay <= 1 for stay in stays), "stays between 0 and 1")
        self.require(
            len(weights) == len(stays) and all(0 <= weight < math.inf for weight in weights) and sum(weights) > 0,
            "a weight of 0 or more for each chain, with a sum above 0: a prior without mass draws nothing",
        )
        self.require(0 < self.reliability < 1, "a reliability between 0 and 1, neither end")

    def draw(self, k: int, rng: Random) -> Draw:
        stay = numbers(self, "stays")[weighted(rng, numbers(self, "weights"))]
        state, marks = int(rng.random() * self.labels), []
        for _ in range(k + 1):
            marks.append(self._kept(state, self.reliability, rng))
            state = self._kept(state, stay, rng)
        return Draw(tuple(marks[:k]), marks[k])

    def _kept(self, state: int, p: float, rng: Random) -> int:
        """The state with probability p, else another state, drawn uniformly."""
        return weighted(rng, [p if other == state else (1 - p) / (self.labels - 1) for other in range(self.labels)])

    def _matrices(self) -> tuple[Tensor, Tensor, Tensor]:
        """log of the prior over chain and state, of its moves, and of each mark given it; all float64."""
        weights = torch.tensor(numbers(self, "weights"), dtype=torch.float64)
        prior = (weights / weights.sum()).repeat_interleave(self.labels) / self.labels
        moves = torch.block_diag(*(self._mixing(stay) for stay in numbers(self, "stays")))
        return prior.log(), moves.log(), self._mixing(self.reliability).repeat(len(weights), 1).log()

    def _mixing(self, p: float) -> Tensor:
        """p on the diagonal, the rest shared evenly: [state other]."""
        off = (1 - p) / (self.labels - 1)
        return torch.full((self.labels, self.labels), off, dtype=torch.float64).fill_diagonal_(p)

    def belief(self, draws: Sequence[Draw]) -> Tensor:
        """Chain and state at the last mark; at k = 0 the prior."""
        first, moves, marks = self._matrices()
        lengths = torch.tensor([len(draw.seen) for draw in draws])
        seen = torch.zeros(len(draws), int(lengths.max()), dtype=torch.int64)  # places after the last mark are not read
        for row, draw in zip(seen, draws, strict=True):
            row[: len(draw.seen)] = torch.tensor(draw.seen, dtype=torch.int64)
        before = first.expand(len(draws), 1, -1)
        if not seen.shape[1]:
            return before[:, 0]
        beliefs = torch.cat([before, forward_filter(first, moves[None], marks.mT[seen])], 1)
        return beliefs[torch.arange(len(draws)), lengths]

    def predictive(self, draws: Sequence[Draw]) -> Tensor:
        _, moves, marks = self._matrices()
        # No state has moved before the first mark, but a step leaves the prior unchanged, since it is uniform.
        ahead = (self.belief(draws)[:, :, None] + moves).logsumexp(1)
        return (ahead[:, :, None] + marks).logsumexp(1)

    def statistic(self, draw: Draw) -> str:
        return "".join(map(str, draw.seen)) or "nothing"

    def trivial(self, draws: Sequence[Draw]) -> Mapping[str, np.ndarray]:
        """Also Markov counts: (1 + n_ij) / (K + n_i) with n_ij steps from mark i to mark j, as if marks were states."""
        markov = dirichlet_multinomial(torch.from_numpy(steps(draws, self.labels))).numpy()
        return {**super().trivial(draws), "Markov counts": markov}
