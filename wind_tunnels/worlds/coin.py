"""A coin of unknown bias: Beta-Bernoulli, or a bias from a short list."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from llmgeom.sampling import Generator, beta, constants, integers
from llmgeom.wind_tunnels.exchangeable import Exchangeable


@dataclass(frozen=True)
class Coin(Exchangeable):
    """Flips of a coin of unknown bias.

    After h heads and t tails the next flip is heads with probability (A + h) / (A + B + h + t) (Laplace's rule for
    A = B = 1); for a list of biases p_i, with probability sum_i w_i p_i, w_i proportional to p_i^h (1 - p_i)^t. Derived
    here.

    Attributes:
        prior: Of the probability of heads: "beta:A,B", or "list:P,P,..." with equal weights.
    """

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
        self.require(self.steps >= 1, "steps of 1 or more")

    def _prior(self) -> tuple[str, list[float]]:
        kind, _, numbers = self.prior.partition(":")
        try:
            return kind, [float(number) for number in numbers.split(",")]
        except ValueError:
            return kind, []

    def hypothesis(self, n: int, generator: Generator) -> Tensor:
        """The probability of heads, [n 1]."""
        kind, values = self._prior()
        if kind == "list":
            return constants(values, generator.device).float()[integers(len(values), generator, n, 1)]
        return beta(n, values[0], values[1], generator)

    def causes(self, inputs: Tensor) -> tuple[Tensor, Tensor] | None:
        kind, values = self._prior()
        if kind == "beta":
            return None
        heads = constants(values, inputs.device)
        return torch.stack([heads, 1 - heads], -1), torch.full_like(heads, 1 / len(values))

    def after(self, inputs: Tensor, seen: Tensor) -> Tensor:
        kind, values = self._prior()
        if kind == "list":
            return super().after(inputs, seen)
        weight = seen + constants(values, seen.device)
        return weight.log() - weight.sum(-1, keepdim=True).log()

    def counterfactual(self, inputs: Tensor, generator: Generator) -> Tensor | None:
        """One flip turned over, but not the last one shown. None if a bias of 0 or 1 forbids it."""
        kind, values = self._prior()
        return None if kind == "list" and {0.0, 1.0} & {*values} else super().counterfactual(inputs, generator)
