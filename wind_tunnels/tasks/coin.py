"""A coin of unknown bias: Beta-Bernoulli, or a bias from a short list."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from llmgeom.errors import UserError
from llmgeom.task import Categorical, Sequences, Task, altered, on_device

START = 2  # the token before the first flip; 0 is heads, 1 tails


@dataclass(frozen=True)
class Coin(Task):
    """Flips of a coin of unknown bias.

    flips   in a sequence; each is asked for before it is shown.
    prior   of the probability of heads: "beta:A,B", or "list:P,P,..." with equal weights.

    After h heads and t tails the next flip is heads with probability (A + h) / (A + B + h + t) (Laplace's rule for
    A = B = 1; `exact.beta_bernoulli` is the same for prompts); for a list, sum_i w_i p_i with
    w_i proportional to p_i^h (1 - p_i)^t. Derived here.
    """

    memorisable = "the answer depends on the numbers of heads and tails alone: a table of a few hundred entries"

    flips: int = 24
    prior: str = "beta:1,1"

    def __post_init__(self) -> None:
        kind, values = self._prior()
        beta = kind == "beta" and len(values) == 2 and all(0.01 <= value < math.inf for value in values)
        listed = kind == "list" and all(0 <= value <= 1 for value in values)
        if not values or not (beta or listed):
            raise UserError(
                f"{self.title}: prior {self.prior!r}; expected beta:A,B with both 0.01 or more, or list:P,P,... with "
                f"probabilities of heads"
            )
        if self.flips < 1:
            raise UserError(f"{self.title}: flips {self.flips}; expected at least 1")

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
    def query(self) -> tuple[int, ...]:
        return tuple(range(self.flips))

    @property
    def answers(self) -> Categorical:
        return Categorical((0, 1))

    def hypothesis(self, n: int, generator: torch.Generator) -> Tensor:
        """The probability of heads, [n 1]."""
        kind, values = self._prior()
        if kind == "list":
            chosen = torch.randint(len(values), (n, 1), generator=generator, device=generator.device)
            return on_device(values, generator.device).float()[chosen]
        # A Beta variable is the share of one of two Gamma variables; below 0.01 both might round to 0.
        gamma = torch._standard_gamma(on_device(values, generator.device).expand(n, 2), generator=generator)
        return (gamma[:, :1] / gamma.sum(1, keepdim=True)).float()

    def draw(self, hypothesis: Tensor, generator: torch.Generator, training: bool = False) -> Sequences:
        lots = torch.rand(len(hypothesis), self.flips, generator=generator, device=generator.device)
        flips = (lots >= hypothesis).long()
        start = torch.full_like(flips[:, :1], START)
        return Sequences(torch.cat([start, flips[:, :-1]], 1), flips)

    def log_predictive(self, inputs: Tensor) -> Tensor:
        return self._after(_flips(inputs).cumsum(1))

    def log_belief(self, inputs: Tensor) -> Tensor | None:
        """For a list: log P(which bias | flips so far)."""
        kind, values = self._prior()
        if kind == "beta":
            return None
        return _weights(_flips(inputs).cumsum(1), on_device(values, inputs.device))

    def counterfactual(self, inputs: Tensor, generator: torch.Generator) -> Tensor | None:
        """One flip turned over, the last that is shown excepted. None where a bias of 0 or 1 forbids it."""
        kind, values = self._prior()
        if self.flips < 3 or (kind == "list" and {0.0, 1.0} & {*values}):
            return None
        return torch.cat([inputs[:, :1], altered(inputs[:, 1:-1], 2, generator), inputs[:, -1:]], 1)

    def trivial(self, inputs: Tensor) -> Mapping[str, Tensor]:
        """memoryless: what the last flip alone says. A bag of values is exact here."""
        return {"memoryless": self._after(_flips(inputs))}

    def _after(self, seen: Tensor) -> Tensor:
        """log P(heads), log P(tails) after numbers of heads and tails [... 2]."""
        kind, values = self._prior()
        prior = on_device(values, seen.device)
        if kind == "beta":
            return (seen + prior).log() - (seen + prior).sum(-1, keepdim=True).log()
        each = torch.stack([prior, 1 - prior], -1).log()  # [bias outcome]
        return (_weights(seen, prior)[..., None] + each).logsumexp(-2)


def _flips(inputs: Tensor) -> Tensor:
    """The flip shown at each position, [sequence query 2] float64: heads, tails, or neither."""
    return torch.nn.functional.one_hot(inputs, 3)[..., :2].double()


def _weights(seen: Tensor, heads: Tensor) -> Tensor:
    """log P(which bias), equal before any flip, after numbers of heads and tails."""
    likelihood = torch.special.xlogy(seen[..., :1], heads) + torch.special.xlogy(seen[..., 1:], 1 - heads)
    return likelihood.log_softmax(-1)
