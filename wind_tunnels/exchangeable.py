"""Symbols drawn independently given a hidden cause: what coin, two-point, dirichlet and stated have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import one_hot

from llmgeom.sampling import Generator, uniforms, with_another_symbol
from llmgeom.world import Categorical, Sequences, World


@dataclass(frozen=True)
class Exchangeable(World):
    """A sequence whose exact answer depends on the counts of the symbols, not on their order.

    A subclass gives the number of `symbols`, `hypothesis`, and either `causes` or `after`.

    Attributes:
        steps: Symbols in a sequence; each is predicted before it is shown.
    """

    KS: ClassVar[tuple[int, ...]] = (0, 1, 2, 4, 8)

    @property
    def memorisable(self) -> str:
        """See `World`."""
        return "the answer depends on the counts of the symbols alone: a table of a few hundred entries"

    steps: int = 24

    @property
    def outcomes(self) -> int:
        """The number of symbols; tokens 0 .. outcomes - 1. The next token stands before the first symbol."""
        return 2

    @property
    def vocabulary(self) -> int:
        return self.outcomes + 1

    @property
    def length(self) -> int:
        return self.header + self.steps

    @property
    def answers(self) -> Categorical:
        return Categorical(tuple(range(self.outcomes)))

    def showing(self, k: int) -> Exchangeable:
        return replace(self, steps=k + 1)

    def opening(self, hypothesis: Tensor) -> Tensor:
        """The tokens before the first symbol, [n header + 1]."""
        return torch.full_like(hypothesis[:, :1], self.outcomes, dtype=torch.int64)

    def symbols_of(self, hypothesis: Tensor, generator: Generator) -> Tensor:
        """[n steps] symbols from the shares of the first ones, [n outcomes - 1] or more."""
        bounds = hypothesis[:, None, : self.outcomes - 1].cumsum(-1)
        return (uniforms(generator, len(hypothesis), self.steps)[..., None] >= bounds).sum(-1)

    def draw(self, hypothesis: Tensor, generator: Generator, training: bool = False) -> Sequences:
        symbols = self.symbols_of(hypothesis, generator)
        return Sequences(torch.cat([self.opening(hypothesis), symbols[:, :-1]], 1), symbols)

    def causes(self, inputs: Tensor) -> tuple[Tensor, Tensor] | None:
        """Shares of the symbols under each hidden cause, [... cause outcome], and its prior [... cause], float64."""
        return None

    def after(self, inputs: Tensor, seen: Tensor) -> Tensor:
        """log P(next symbol) in nats after counts [sequence query outcome]."""
        causes = self.causes(inputs)
        assert causes is not None, "a subclass gives `causes` or `after`"
        return (self._belief(causes, seen)[..., None] + causes[0].log()).logsumexp(-2)

    @staticmethod
    def _belief(causes: tuple[Tensor, Tensor], seen: Tensor) -> Tensor:
        shares, prior = causes
        return (torch.special.xlogy(seen[..., None, :], shares).sum(-1) + prior.log()).log_softmax(-1)

    def shown(self, inputs: Tensor) -> Float[Tensor, "sequence query outcome"]:
        """The symbol shown at each query, one-hot float64; 0 where none is."""
        return one_hot(inputs[:, self.header :], self.vocabulary)[..., : self.outcomes].double()

    def log_predictive(self, inputs: Tensor) -> Tensor:
        return self.after(inputs, self.shown(inputs).cumsum(1))

    def log_belief(self, inputs: Tensor) -> Tensor | None:
        """log P(cause | symbols so far); None for a continuum of causes."""
        causes = self.causes(inputs)
        return None if causes is None else self._belief(causes, self.shown(inputs).cumsum(1))

    def sufficient(self, inputs: Tensor) -> Tensor:
        """The counts."""
        return self.shown(inputs).cumsum(1).long()

    def counterfactual(self, inputs: Tensor, generator: Generator) -> Tensor | None:
        """Another symbol at one step, but not the last one shown."""
        if self.steps < 3:
            return None
        before, symbols = inputs[:, : self.header + 1], inputs[:, self.header + 1 :]
        return torch.cat([before, with_another_symbol(symbols, self.outcomes, generator)], 1)

    def trivial(self, inputs: Tensor) -> Mapping[str, Tensor]:
        """memoryless: the posterior after only the last symbol. (A bag of values is exact here.)"""
        return {"memoryless": self.after(inputs, self.shown(inputs))}
