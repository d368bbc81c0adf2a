"""A state that is never shown moves by one of a few known chains; which one, the symbols have to tell."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from llmgeom.wind_tunnels.worlds.edge_hmm import EdgeHMM


@dataclass(frozen=True)
class HMMMixture(EdgeHMM):
    """A hidden state moves by one of a few chains; each symbol shows it with probability `reliability`.

    There are as many states as symbols; the first state is drawn uniformly. In chain c the state stays with probability
    s_c, else moves uniformly to another state; a symbol shows the state with probability r, else uniformly another. The
    belief is over chain and state together, chain by chain.

    Attributes:
        symbols: K, the number of symbols and states.
        stays: s_c of each chain: by default one that mostly stays and one that mostly alternates.
        weights: Prior weights of the chains, in proportion.
        reliability: r.
    """

    process: str = "mixture"
    symbols: int = 2
    stays: str = "0.9,0.1"
    weights: str = "1,1"
    reliability: float = 0.9

    def __post_init__(self) -> None:
        stays, weights = self.numbers("stays"), self.numbers("weights")
        self.require(self.symbols >= 2, "2 or more symbols")
        self.require(all(0 <= stay <= 1 for stay in stays), "stays between 0 and 1")
        self.require(
            len(weights) == len(stays) and all(0 <= weight < math.inf for weight in weights) and sum(weights) > 0,
            "a weight of 0 or more for each chain, with a sum above 0: a prior without mass draws nothing",
        )
        self.require(0 < self.reliability < 1, "a reliability between 0 and 1, neither end")
        super().__post_init__()

    def matrices(self) -> Float[Tensor, "symbol state state"]:
        """The state moves, then a symbol comes from where it arrives: T^x = move diag(P(x | state))."""
        move = torch.block_diag(*(self._mixing(stay) for stay in self.numbers("stays")))
        shows = self._mixing(self.reliability).repeat(len(self.numbers("stays")), 1)
        return move * shows.T[:, None]

    def first(self) -> Float[Tensor, " state"]:
        """Uniform within a chain, which a step leaves as it is."""
        weights = torch.tensor(self.numbers("weights"), dtype=torch.float64)
        return (weights / weights.sum()).repeat_interleave(self.symbols) / self.symbols

    def _mixing(self, p: float) -> Tensor:
        """p on the diagonal, the rest shared evenly: [state other]."""
        off = (1 - p) / (self.symbols - 1)
        return torch.full((self.symbols, self.symbols), off, dtype=torch.float64).fill_diagonal_(p)
