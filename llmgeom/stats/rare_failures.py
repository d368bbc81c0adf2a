"""Means of values of which most are small and a few may be huge, bounded even if the sample has no huge one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Real

from llmgeom.stats.resampling import TIE, Interval
from llmgeom.stats.tests import LEAST_P


@dataclass(frozen=True)
class RareFailures:
    """Bounds of a mean that may rest on rare failures.

    Student's interval fails there: if 1 value of 1,000 is 20, a sample of 1,000 has none in 37 % of cases. With
    c = `usual`, mean = E min(X, c) + E max(X - c, 0). The upper end is Student's for the first term plus
    (largest - c) times the exact binomial (Clopper and Pearson 1934) upper end of P(X > c) for the second, each with
    half of the error. The lower end is Student's for the first term. Even when no value exceeds c, about
    largest ln(2 / error) / n is added: without an assumption on the tail, no smaller sample excludes such values.

    Of two independent samples, the mean of X less that of Y is bounded likewise: Welch's interval for the difference of
    the clipped means, and the binomial end of X above it, that of Y below it. Derived here.

    A 95 % interval covers .98 to 1.00 of 1,000 simulated samples (1,000 values or twice as many, 0 to 1 % failures).

    Attributes:
        usual: c, above which a value is a failure.
        largest: What a failure is at most; larger values count as this one.
    """

    usual: float
    largest: float

    def interval(
        self, values: Real[np.ndarray, " row"], less: Real[np.ndarray, " other"] | None = None, level: float = 0.95
    ) -> Interval:
        """Interval of the mean of independent values, or of that mean less the mean of independent others.

        Raises:
            ValueError: A value is below 0.
        """
        low, high = self._ends(self._summary(values, less), (1 - level) / 2)
        rare = [int((x > self.usual).sum()) for x in (values, less) if x is not None]
        counts = " and ".join(map(str, rare))
        method = f"Student below {self.usual:g}, binomial above it ({counts} of {len(values)})"
        return Interval(low, high, level, method)

    def within_p(
        self, values: Real[np.ndarray, " row"], margin: float, less: Real[np.ndarray, " other"] | None = None
    ) -> float:
        """One-sided p that the mean is not below `margin`: the least error whose upper end is; at least 1e-6."""
        above, below = 0.0, math.log(LEAST_P)  # of log error: at 1 the upper end is lowest
        summary = self._summary(values, less)
        if self._ends(summary, LEAST_P)[1] <= margin:
            return LEAST_P
        if self._ends(summary, 1 - TIE)[1] > margin:
            return 1.0
        for _ in range(50):
            middle = (above + below) / 2
            if self._ends(summary, math.exp(middle))[1] <= margin:
                above = middle
            else:
                below = middle
        return math.exp(above)

    def needed(self, margin: float, error: float = 0.025) -> int:
        """How many values of exactly 0 bring the upper end to `margin`: (1 - error / 2)'s binomial end is that low."""
        return math.ceil(math.log(error / 2) / math.log1p(-margin / (self.largest - self.usual)))

    def clip(self, values: Real[np.ndarray, "*row"]) -> Float[np.ndarray, "*row"]:
        """The values, of which one above `largest` counts as `largest`; rounding below 0 counts as 0."""
        return np.clip(np.asarray(values, dtype=np.float64), 0, self.largest)

    def _summary(self, values: np.ndarray, less: np.ndarray | None) -> _Summary:
        samples = [np.asarray(x, dtype=np.float64) for x in (values, less) if x is not None]
        for x in samples:
            if x.min() < -TIE:
                raise ValueError(f"a value of {x.min()}; expected values from 0 on")
        clipped = [x.clip(max=self.usual) for x in samples]
        mean = clipped[0].mean() - sum(x.mean() for x in clipped[1:])
        parts = [x.var(ddof=1) / len(x) for x in clipped]
        spread = math.sqrt(sum(parts))
        welch = sum(v * v / (len(x) - 1) for v, x in zip(parts, clipped, strict=True))
        failures = tuple((int((x > self.usual).sum()), len(x)) for x in samples)
        return _Summary(float(mean), spread, spread**4 / welch if welch else 1.0, failures)

    def _ends(self, of: _Summary, error: float) -> tuple[float, float]:
        """Lower and upper end, each exceeded with probability `error` at most."""
        from scipy.special import stdtrit

        tails = [(self.largest - self.usual) * _share(*counts, error / 2) for counts in of.failures]
        high = of.mean + stdtrit(of.freedom, 1 - error / 2) * of.spread + tails[0]
        low = of.mean - stdtrit(of.freedom, 1 - error / len(tails)) * of.spread - sum(tails[1:])
        return float(low), float(high)


@dataclass(frozen=True)
class _Summary:
    """What the ends follow from: the difference of clipped means, its error, its freedom, and (failures, n) of each."""

    mean: float
    spread: float
    freedom: float
    failures: tuple[tuple[int, int], ...]


def _share(rare: int, n: int, error: float) -> float:
    """Clopper and Pearson's upper end of the share of failures."""
    from scipy.special import betaincinv

    return 1.0 if rare == n else float(betaincinv(rare + 1, n - rare, 1 - error))
