"""A coin of unknown bias: Beta-Bernoulli, or a bias from a short list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from llmgeom.errors import Refused
from llmgeom.wind_tunnels.task import Categorical, Drawn, Task

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
        beta = kind == "beta" and len(values) == 2 and min(values) > 0
        listed = kind == "list" and len(values) > 0 and min(values) >= 0 and max(values) <= 1
        if not (beta or listed):
            raise Refused(f"coin: prior {self.prior!r}; expected beta:A,B or list:P,P,... with probabilities of heads")
        if self.flips < 1:
            raise Refused(f"coin: flips {self.flips}; expected at least 1")

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
            return torch.tensor(values, device=generator.device)[chosen]
        # A Beta variable is the share of one of two Gamma variables.
        concentration = torch.tensor(values, device=generator.device).expand(n, 2)
        gamma = torch._standard_gamma(concentration.double(), generator=generator)
        return (gamma[:, :1] / gamma.sum(1, keepdim=True)).float()

    def draw(self, hypothesis: Tensor, generator: torch.Generator, training: bool = False) -> Drawn:
        lots = torch.rand(len(hypothesis), self.flips, generator=generator, device=generator.device)
        flips = (lots >= hypothesis).long()
        start = torch.full_like(flips[:, :1], START)
        return Drawn(torch.cat([start, flips[:, :-1]], 1), flips)

    def log_predictive(self, inputs: Tensor) -> Tensor:
        seen = _seen(inputs)
        kind, values = self._prior()
        if kind == "beta":
            weight = seen + torch.tensor(values, dtype=seen.dtype, device=seen.device)
            return weight.log() - weight.sum(-1, keepdim=True).log()
        heads = torch.tensor(values, dtype=seen.dtype, device=seen.device)
        each = torch.stack([heads, 1 - heads], -1).log()  # [bias outcome]
        return (self.log_belief(inputs)[..., None] + each).logsumexp(-2)

    def log_belief(self, inputs: Tensor) -> Tensor | None:
        """For a list: log P(which bias | flips so far)."""
        kind, values = self._prior()
        if kind == "beta":
            return None
        seen = _seen(inputs)
        heads = torch.tensor(values, dtype=seen.dtype, device=seen.device)
        likelihood = torch.special.xlogy(seen[..., :1], heads) + torch.special.xlogy(seen[..., 1:], 1 - heads)
        return likelihood.log_softmax(-1)

    def trivial(self, inputs: Tensor) -> Mapping[str, Tensor]:
        """memoryless: what the last flip alone says. A bag of values is exact here."""
        from llmgeom.exact import beta_bernoulli

        kind, values = self._prior()
        if kind != "beta":
            return {}
        last = torch.nn.functional.one_hot(inputs, 3)[..., :2].cpu().numpy()
        return {"memoryless": torch.from_numpy(beta_bernoulli(last[..., 0], last[..., 1], *values)).to(inputs.device)}


def _seen(inputs: Tensor) -> Tensor:
    """Heads and tails before each query, [sequence query 2] float64."""
    return torch.nn.functional.one_hot(inputs, 3)[..., :2].cumsum(1).double()
