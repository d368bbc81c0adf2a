"""A visible Markov chain: the sticky ring of Paper II, or a transition matrix to be learnt from its own steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import one_hot

from llmgeom.errors import UserError
from llmgeom.task import Categorical, Sequences, Task, altered
from llmgeom.wind_tunnels.tasks.hmm import dirichlet, walk


@dataclass(frozen=True)
class Markov(Task):
    """A visible Markov chain.

    symbols   S; a sequence is y_1, ..., y_K, the first one drawn evenly, and at each the next is asked.
    steps     K.
    fixed     true: every sequence goes round the same sticky ring. false: each has a matrix of its own, with rows drawn
              from Dirichlet(1, ..., 1).
    stay      of the ring: the weight of staying.

    Ring (Paper II section 5.2, as its code has it): W_ii = stay, W_ij = 1 / d(i, j) with d the distance round the ring,
    and P = (1 - stay) W / sum_j W_ij + stay I. The diagonal is in both terms, so that one stays with probability
    stay + (1 - stay) stay / sum_j W_ij: for S = 8 and stay = .3 it is .349802, not .3, and the entropy of a row, the
    least loss, is 1.829188 nats, not the 1.883 of a ring that stays with .3.
    Own matrix (derived here): with n_ij steps from i to j so far and n_i from i, the next after i is j with probability
    (1 + n_ij) / (S + n_i).
    """

    symbols: int = 8
    steps: int = 24
    fixed: bool = True
    stay: float = 0.3

    def __post_init__(self) -> None:
        if self.symbols < 2 or self.steps < 1:
            raise UserError(f"{self.title}: expected 2 or more symbols and 1 or more steps")
        if not 0 <= self.stay < 1:
            raise UserError(f"{self.title}: stay {self.stay}; expected 0 or more and less than 1")

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
    def query(self) -> tuple[int, ...]:
        return tuple(range(self.steps))

    @property
    def answers(self) -> Categorical:
        return Categorical(tuple(range(self.symbols)))

    @property
    def log2_hypotheses(self) -> float:
        return 0.0 if self.fixed else math.inf

    def ring(self, device: torch.device | str = "cpu") -> Float[Tensor, "symbol next"]:
        """P of the sticky ring, float64."""
        place = torch.arange(self.symbols, device=device)
        apart = (place[:, None] - place).abs()
        weight = 1 / torch.minimum(apart, self.symbols - apart).double()
        weight.fill_diagonal_(self.stay)
        once = weight / weight.sum(1, keepdim=True)
        return (1 - self.stay) * once + self.stay * torch.eye(self.symbols, dtype=once.dtype, device=device)

    def hypothesis(self, n: int, generator: torch.Generator) -> Tensor:
        """Transition matrices, [n symbol next]."""
        if self.fixed:
            return self.ring(generator.device).float().expand(n, -1, -1)
        return dirichlet((n, self.symbols, self.symbols), generator)

    def split_key(self, hypothesis: Tensor) -> Tensor:
        """Hundredths: with few symbols, quarters would leave too few cells to hold a tenth of them out."""
        return (hypothesis.flatten(1) * 100).long()

    def draw(self, hypothesis: Tensor, generator: torch.Generator, training: bool = False) -> Sequences:
        lots = torch.rand(len(hypothesis), 1, self.steps, generator=generator, device=generator.device)
        chain = walk(hypothesis, lots, generator)[:, 0]
        return Sequences(chain[:, :-1], chain[:, 1:])

    def log_predictive(self, inputs: Tensor) -> Tensor:
        if self.fixed:
            return self.ring(inputs.device).log()[inputs]
        # [sequence query earlier]: which earlier symbols are the one that a step is now taken from.
        same = (inputs[:, :, None] == inputs[:, None, :]).tril(-1).double()
        followed = one_hot(inputs[:, 1:], self.symbols).double()
        return dirichlet_multinomial(same[..., :-1] @ followed)

    def bearing(self, inputs: Tensor) -> Tensor:
        """Ring: the query alone. Own matrix: the steps taken before from the symbol at the query, both ends of each;
        the query bears once a step was taken. (Of two symbols the other one at a step's end is the one asked about.)"""
        own = torch.eye(self.steps, dtype=torch.bool, device=inputs.device).expand(len(inputs), -1, -1)
        if self.fixed:
            return own
        start = (inputs[:, :, None] == inputs[:, None, :]).tril(-1)
        end = torch.nn.functional.pad(start, (1, -1))
        taken = torch.arange(self.steps, device=inputs.device)[:, None] > 0
        return start | end | own & taken

    def counterfactual(self, inputs: Tensor, generator: torch.Generator) -> Tensor | None:
        """Another symbol at one step, the last excepted. On the ring later answers do not depend on it."""
        if self.steps < 2:
            return None
        return torch.cat([altered(inputs[:, :-1], self.symbols, generator), inputs[:, -1:]], 1)

    def trivial(self, inputs: Tensor) -> Mapping[str, Tensor]:
        """bag of values: (1 + n_j) / (S + n) with n_j of the n symbols so far being j, whatever stood before them. The
        last symbol alone, exact on the ring, tells nothing of a matrix not yet seen."""
        return {"bag of values": dirichlet_multinomial(one_hot(inputs, self.symbols).cumsum(1))}


def dirichlet_multinomial(counts: Int[Tensor, "*at symbol"], a: float = 1.0) -> Float[Tensor, "*at symbol"]:
    """log P(next symbol | D) in nats, float64: (a + n_j) / (a S + n) after n_j of symbol j, n in all, of S symbols.

    Symbols are drawn independently with probabilities that have a Dirichlet(a, ..., a) prior; a = 1 is uniform. For two
    symbols this is `beta_bernoulli`. Raises ValueError for an a that is not positive.
    """
    if a <= 0:
        raise ValueError(f"Dirichlet({a}): a must be positive")
    weight = counts.double() + a
    return weight.log() - weight.sum(-1, keepdim=True).log()
