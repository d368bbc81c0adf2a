"""Bayesian linear regression: a weight vector is learnt from points and noisy values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from llmgeom.answers import Answers
from llmgeom.sampling import Generator, normals
from llmgeom.world import Categorical, Gaussian, Sequences, World


@dataclass(frozen=True)
class Regression(World):
    """The value at the next point of a noisy linear function.

    After t pairs w ~ N(m, S) with S^-1 = I / tau^2 + X'X / sigma^2 and m = S X'y / sigma^2, and y at x is
    N(m.x, x'Sx + sigma^2). Paper I names the task without a specification; this one is derived here.

    Attributes:
        dims: D. Weights w ~ N(0, tau^2 I), points x_i ~ N(0, I), values y_i = w.x_i + e_i, e_i ~ N(0, sigma^2).
        points: Points in a sequence, each a query for its value.
        noise: sigma.
        scale: tau.
        layout: paired: row i is [x_i, x_(i-1), y_(i-1)], with zeros before the first. separate: a row [x_i, 0, 0] for a
            point and a row [0, y_i, 1] for its value; the last column distinguishes them.
        bins: 0: the answer is a real number, read as a mean and a log variance. Otherwise this number of intervals,
            equally probable under N(0, D tau^2 + sigma^2), which has the variance of y.
    """

    dims: int = 2
    points: int = 10
    noise: float = 0.5
    scale: float = 1.0
    layout: str = "paired"
    bins: int = 0

    def __post_init__(self) -> None:
        self.require(self.layout in ("paired", "separate"), "layout paired or separate")
        self.require(
            self.dims >= 1 and self.points >= 1 and 0 < self.noise < math.inf and 0 < self.scale < math.inf,
            "dims and points of 1 or more, noise and scale above 0",
        )
        self.require(self.bins >= 2 or self.bins == 0, "bins of 0 (a real number) or at least 2 intervals")

    @property
    def vocabulary(self) -> int:
        return self.bins or 2

    @property
    def features(self) -> int:
        return 2 * self.dims + 1 if self.layout == "paired" else self.dims + 2

    @property
    def length(self) -> int:
        return self.points if self.layout == "paired" else 2 * self.points - 1

    @property
    def query(self) -> tuple[int, ...]:
        return tuple(range(0, self.length, 1 if self.layout == "paired" else 2))

    @property
    def answers(self) -> Answers:
        return Categorical(tuple(range(self.bins))) if self.bins else Gaussian()

    def hypothesis(self, n: int, generator: Generator) -> Tensor:
        """The weights, [n dim]."""
        return self.scale * normals(generator, n, self.dims)

    def split_key(self, hypothesis: Tensor) -> Tensor:
        """Cells of width tau / 100: with wider cells, the few around 0 would determine the held-out share."""
        return (100 / self.scale * hypothesis).floor().long()

    def draw(self, hypothesis: Tensor, generator: Generator, training: bool = False) -> Sequences:
        n, device = len(hypothesis), generator.device
        lots = normals(generator, n, self.points, self.dims + 1)
        x, noise = lots[..., :-1], lots[..., -1]
        y = (x @ hypothesis[:, :, None])[..., 0] + self.noise * noise
        if self.layout == "paired":
            before = torch.cat([x, y[..., None]], -1)[:, :-1]
            inputs = torch.cat([x, pad(before, (0, 0, 1, 0))], -1)
        else:
            inputs = torch.zeros(n, 2 * self.points, self.features, device=device)
            inputs[:, 0::2, : self.dims], inputs[:, 1::2, -2], inputs[:, 1::2, -1] = x, y, 1.0
            inputs = inputs[:, :-1]
        return Sequences(inputs, torch.bucketize(y.double(), self._edges(device)[1:-1]) if self.bins else y)

    def log_predictive(self, inputs: Tensor) -> Tensor:
        return self._answer(gaussian_regression(*self._pairs(inputs), self.noise, self.scale))

    def trivial(self, inputs: Tensor) -> Mapping[str, Tensor]:
        """memoryless: N(0, tau^2 x.x + sigma^2), the prior's answer at x."""
        x, _ = self._pairs(inputs)
        variance = self.scale**2 * x.double().square().sum(-1) + self.noise**2
        return {"memoryless": self._answer(torch.stack([torch.zeros_like(variance), variance.log()], -1))}

    def _pairs(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The points [sequence query dim], and the values shown, one fewer."""
        if self.layout == "paired":
            return inputs[..., : self.dims], inputs[:, 1:, -1]
        return inputs[:, 0::2, : self.dims], inputs[:, 1::2, -2]

    def _edges(self, device: torch.device) -> Tensor:
        """The ends of the intervals, from -inf to inf, float64."""
        share = torch.arange(self.bins + 1, dtype=torch.float64, device=device) / self.bins
        return math.sqrt(self.dims * self.scale**2 + self.noise**2) * torch.special.ndtri(share)

    def _answer(self, gaussian: Tensor) -> Tensor:
        """Mean and log variance, or the log-probabilities of the intervals."""
        if not self.bins:
            return gaussian
        m, log_v = gaussian[..., None, :].unbind(-1)
        ends = (self._edges(gaussian.device) - m) * (-log_v / 2).exp()
        low, high = ends[..., :-1], ends[..., 1:]
        # An interval above the mean is mirrored below it, since a difference of two small numbers keeps its digits.
        above = low + high > 0
        low, high = torch.where(above, -high, low), torch.where(above, -low, high)
        log_low, log_high = torch.special.log_ndtr(low), torch.special.log_ndtr(high)
        return log_high + (-torch.expm1(log_low - log_high)).log()


def gaussian_regression(x: Tensor, y: Tensor, noise: float, scale: float) -> Tensor:
    """Mean and log variance of y_t given x_t and the pairs before it, for every t at once: [... t 2] float64.

    y = w.x + e with w ~ N(0, scale^2 I) and e ~ N(0, noise^2). After X and y, w ~ N(m, S) with
    S^-1 = I / scale^2 + X'X / noise^2 and m = S X'y / noise^2, and at x the answer is N(m.x, x'Sx + noise^2). Derived
    here.

    Args:
        x: Points [... t dim].
        y: Values [... t], or one fewer; each value enters from the next t on.
        noise: Standard deviation of the noise.
        scale: Standard deviation of the weights' prior, above 0, as the noise.
    """
    x, y = x.double(), y.double()
    # Divided by the noise, so that one sum gives S^-1 and S^-1 m: [... t dim dim + 1].
    earlier, values = x[..., :-1, :] / noise, y[..., : x.shape[-2] - 1, None] / noise
    terms = earlier[..., None] * torch.cat([earlier, values], -1)[..., None, :]
    sums = pad(terms.cumsum(-3), (0, 0, 0, 0, 1, 0))
    precision = sums[..., :-1] + torch.eye(x.shape[-1], dtype=x.dtype, device=x.device) / scale**2
    # S is symmetric: m.x = (S^-1 m).(S x), so one solve serves both.
    s_x = torch.linalg.solve(precision, x)
    return torch.stack([(sums[..., -1] * s_x).sum(-1), ((x * s_x).sum(-1) + noise**2).log()], -1)
