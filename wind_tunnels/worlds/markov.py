"""A visible Markov chain: the sticky ring of Paper II, or a transition matrix to be learnt from its own steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot, pad

from llmgeom.answers import dirichlet_multinomial
from llmgeom.sampling import Generator, dirichlet, integers, same_earlier, uniforms, with_another_symbol
from llmgeom.wind_tunnels.chains import walk
from llmgeom.world import Sequences, World


@dataclass(frozen=True)
class Markov(World):
    """A visible Markov chain.

    Ring (Paper II section 5.2, as its code has it): W_ii = stay, W_ij = 1 / d(i, j) with d the distance round the ring,
    and P = (1 - stay) W / sum_j W_ij + stay I. The diagonal is in both terms, so the probability of staying is
    stay + (1 - stay) stay / sum_j W_ij. For S = 8 and stay = .3 it is .349802, not .3, and the entropy of a row, the
    least loss, is 1.829188 nats, not the 1.883 of a ring that stays with .3.

    Own matrix (derived here): with n_ij steps from i to j so far and n_i from i, the next symbol after i is j with
    probability (a + n_ij) / (a S + n_i).

    Attributes:
        symbols: S; a sequence is y_1, ..., y_K, the first one drawn uniformly, and each is a query for the next.
        steps: K.
        fixed: true: every sequence follows the same sticky ring. false: each sequence has its own matrix, with rows
            from Dirichlet(a, ..., a).
        stay: The ring's weight of staying.
        a: Of an own matrix; small values make chains that are nearly deterministic.
    """

    TEXT: ClassVar = {"symbols": 2, "fixed": False, "a": 0.5}
    KS: ClassVar = (1, 2, 4, 8, 16)

    symbols: int = 8
    steps: int = 24
    fixed: bool = True
    stay: float = 0.3
    a: float = 1.0

    def __post_init__(self) -> None:
        self.require(self.symbols >= 2 and self.steps >= 1, "2 or more symbols and 1 or more steps")
        self.require(0 <= self.stay < 1, "stay of 0 or more and less than 1")
        self.require(self.a >= 0.01, f"a of 0.01 or more, since a Dirichlet({self.a:g}, ...) prior has no mass to draw")

    @property
    def memorisable(self) -> str:
        return f"the answer is one of {self.symbols} rows, by the last symbol" if self.fixed else ""

    @property
    def vocabulary(self) -> int:
        return self.symbols

    @property
    def length(self) -> int:
        return self.steps

    @property
    def log2_hypotheses(self) -> float:
        return 0.0 if self.fixed else math.inf

    def ring(self, device: torch.device | str = "cpu") -> Float[Tensor, "symbol next"]:
        """P of the sticky ring, float64."""
        place = torch.arange(self.symbols, device=device)
        apart = (place[:, None] - place).abs()
        weight = 1 / torch.minimum(apart, self.symbols - apart).double()
        weight.fill_diagonal_(self.stay)
        normalised = weight / weight.sum(1, keepdim=True)
        return (1 - self.stay) * normalised + self.stay * torch.eye(self.symbols, dtype=weight.dtype, device=device)

    def hypothesis(self, n: int, generator: Generator) -> Tensor:
        """Transition matrices, [n symbol next]."""
        if self.fixed:
            return self.ring(generator.device).float().expand(n, -1, -1)
        return dirichlet((n, self.symbols, self.symbols), generator, self.a)

    def split_key(self, hypothesis: Tensor) -> Tensor:
        """Hundredths: with few symbols, quarters would give too few cells to hold out a tenth of them."""
        return (hypothesis.flatten(1) * 100).long()

    def draw(self, hypothesis: Tensor, generator: Generator, training: bool = False) -> Sequences:
        first = integers(self.symbols, generator, len(hypothesis), 1, 1)
        chain = walk(hypothesis, uniforms(generator, len(hypothesis), 1, self.steps), first)[:, 0]
        return Sequences(chain[:, :-1], chain[:, 1:])

    def log_predictive(self, inputs: Tensor) -> Tensor:
        if self.fixed:
            return self.ring(inputs.device).log()[inputs]
        return dirichlet_multinomial(self._followers(inputs), self.a)

    def showing(self, k: int) -> Markov:
        return replace(self, steps=k)

    def sufficient(self, inputs: Tensor) -> Tensor:
        """The last symbol and, for an unknown matrix, how often each symbol followed it."""
        if self.fixed:
            return inputs[..., None]
        return torch.cat([inputs[..., None], self._followers(inputs)], -1)

    def _followers(self, inputs: Tensor) -> Int[Tensor, "sequence query symbol"]:
        """How often each symbol followed the query's symbol so far."""
        followed = one_hot(inputs[:, 1:], self.symbols)
        # Counts are small: float32 represents them exactly, and a matrix product of int64 is slow.
        return (same_earlier(inputs)[..., :-1].float() @ followed.float()).long()

    def bearing(self, inputs: Tensor) -> Tensor:
        """Ring: only the query. Own matrix: both ends of each earlier step from the query's symbol; the query bears
        once a step was taken. (With two symbols, another symbol at a step's end is the other outcome.)"""
        query = torch.eye(self.steps, dtype=torch.bool, device=inputs.device).expand(len(inputs), -1, -1)
        if self.fixed:
            return query
        start = same_earlier(inputs)
        later = torch.arange(self.steps, device=inputs.device)[:, None] > 0
        return start | pad(start, (1, -1)) | query & later

    def counterfactual(self, inputs: Tensor, generator: Generator) -> Tensor | None:
        """Another symbol at one step, but not the last one. On the ring, later answers do not depend on it."""
        return with_another_symbol(inputs, self.symbols, generator) if self.steps > 1 else None

    def trivial(self, inputs: Tensor) -> Mapping[str, Tensor]:
        """bag of values: (1 + n_j) / (S + n), where n_j of the n symbols so far are j, whatever came before them.
        memoryless: exact on the ring; about an unknown matrix the last symbol alone says nothing."""
        bag = dirichlet_multinomial(one_hot(inputs, self.symbols).cumsum(1))
        return {"bag of values": bag} | ({"memoryless": self.log_predictive(inputs)} if self.fixed else {})
