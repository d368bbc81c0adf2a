"""A coin of unknown bias: Beta-Bernoulli, or a bias from a short list."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from llmgeom.task import Categorical, Sequences, Task
from llmgeom.wind_tunnels.sampling import constants, integers, uniforms, with_another_symbol

START = 2  # the token before the first flip; 0 is heads, 1 tails


@dataclass(frozen=True)
class Coin(Task):
    """Flips of a coin of unknown bias.

    After h heads and t tails the next flip is heads with probability (A + h) / (A + B + h + t) (Laplace's rule for
    A = B = 1); for a list of biases p_i, with probability sum_i w_i p_i, w_i proportional to p_i^h (1 - p_i)^t. Derived
    here.

    Attributes:
        flips: Flips in a sequence; each is predicted before it is shown.
        prior: Of the probability of heads: "beta:A,B", or "list:P,P,..." with equal weights.
    """

    memorisable = "the answer depends on the numbers of heads and tails alone: a table of a few hundred entries"

    flips: int = 24
    prior: str = "beta:1,1"

    def __post_init__(self) -> None:
        kind, values = self._prior()
        # Below 0.01 both Gamma variables of a draw may round to 0.
        is_beta = kind == "beta" and len(values) == 2 and all(0.01 <= value < math.inf for value in values)
        is_list = kind == "list" and all(0 <= value <= 1 for value in values)
        self.require(
            bool(values) and (is_beta or is_list),
            "prior beta:A,B with both 0.01 or more, or list:P,P,... with probabilities of heads",
        )
        self.require(self.flips >= 1, "flips of 1 or more")

    def _prior(self) -> tuple[str, list[float]]:
        kind, _, numbers = self.prior.partition(":")
        try:
            return kind, [float(number) for number in numbers.split(",")]
        except ValueError:
            return kind, []

    @property
    def vocabulary(self) -> int:
        return 3

    @property
    def length(self) -> int:
        return self.flips

    @property
    def answers(self) -> Categorical:
        return Categorical((0, 1))

    def hypothesis(self, n: int, generator: torch.Generator) -> Tensor:
        """The probability of heads, [n 1]."""
        kind, values = self._prior()
        if kind == "list":
            chosen = integers(len(values), generator, n, 1)
            return constants(values, generator.device).float()[chosen]
        # A Beta variable is X / (X + Y) of two Gamma variables.
        gamma = torch._standard_gamma(constants(values, generator.device).expand(n, 2), generator=generator)
        return (gamma[:, :1] / gamma.sum(1, keepdim=True)).float()

    def draw(self, hypothesis: Tensor, generator: torch.Generator, training: bool = False) -> Sequences:
        flips = (uniforms(generator, len(hypothesis), self.flips) >= hypothesis).long()
        start = torch.full_like(flips[:, :1], START)
        return Sequences(torch.cat([start, flips[:, :-1]], 1), flips)

    def log_predictive(self, inputs: Tensor) -> Tensor:
        return self._after(_flips(inputs).cumsum(1))

    def log_belief(self, inputs: Tensor) -> Tensor | None:
        """For a list: log P(bias i | flips so far)."""
        kind, values = self._prior()
        return None if kind == "beta" else _weights(_flips(inputs).cumsum(1), constants(values, inputs.device))

    def sufficient(self, inputs: Tensor) -> Tensor:
        """The numbers of heads and tails."""
        return _flips(inputs).cumsum(1).long()

    def counterfactual(self, inputs: Tensor, generator: torch.Generator) -> Tensor | None:
        """One flip turned over, but not the last one shown. None if a bias of 0 or 1 forbids it."""
        kind, values = self._prior()
        if self.flips < 3 or (kind == "list" and {0.0, 1.0} & {*values}):
            return None
        return torch.cat([inputs[:, :1], with_another_symbol(inputs[:, 1:], 2, generator)], 1)

    def trivial(self, inputs: Tensor) -> Mapping[str, Tensor]:
        """memoryless: the posterior after only the last flip. (A bag of values is exact here.)"""
        return {"memoryless": self._after(_flips(inputs))}

    def _after(self, seen: Tensor) -> Tensor:
        """log P(heads), log P(tails) after counts of heads and tails [... 2]."""
        kind, values = self._prior()
        prior = constants(values, seen.device)
        if kind == "beta":
            return (seen + prior).log() - (seen + prior).sum(-1, keepdim=True).log()
        outcomes = torch.stack([prior, 1 - prior], -1).log()  # [bias outcome]
        return (_weights(seen, prior)[..., None] + outcomes).logsumexp(-2)


def _flips(inputs: Tensor) -> Tensor:
    """The flip shown at each position, one-hot [sequence query 2] float64: heads, tails, or neither."""
    return one_hot(inputs, 3)[..., :2].double()


def _weights(seen: Tensor, heads: Tensor) -> Tensor:
    """log P(bias) after counts of heads and tails, from equal weights."""
    likelihood = torch.special.xlogy(seen[..., :1], heads) + torch.special.xlogy(seen[..., 1:], 1 - heads)
    return likelihood.log_softmax(-1)
