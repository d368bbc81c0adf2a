"""Power of a claim: the clusters needed to detect its effect.

A claim holds if the excess of its value over a control's centre is significant by Student's t, Holm's correction
included (`llmgeom.stats.controls.excess`). With K claims Holm compares the smallest p with .025 / K; a plan uses that
level for every claim. Let e be the standard error of the value on n clusters, tau the spread of m draws of the control,
and d the effect between the value and a further draw. Then t is Student's with non-centrality
d / sqrt(e^2 + tau^2 (1 + 1 / m)), and (a normal approximation; derived here)

    P(holds) = Phi((d / sqrt(e^2 + tau^2 (1 + 1 / m)) - q) / sqrt(1 + q^2 / (2 f))),

q the quantile 1 - .025 / K of Student's t with Welch's degrees of freedom f. More clusters reduce e but not tau: if
untrained models differ much from each other, no number of clusters is enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from llmgeom.stats.resampling import LEAST_CLUSTERS
from llmgeom.stats.verdict import ALPHA, LEAST_DRAWS

POWER = 0.9
MOST_UNITS = 10**6  # an experiment with more clusters is not practical


@dataclass(frozen=True)
class Setting:
    """The noise of an experiment, in units of the declared effect.

    Attributes:
        noise: Standard deviation between clusters: the value's standard error is noise / sqrt(n).
        spread: True standard deviation between draws of the control.
        draws: Number of draws; 0 for a control that is a number.
        noisy: The draws also have the value's sampling noise.
        sides: 2 for an equivalence claim with two one-sided tests; 1 otherwise.
    """

    noise: float
    spread: float
    draws: int
    noisy: bool = False
    claims: int = 1
    sides: int = 1

    def power(self, clusters: int) -> float:
        """Probability of "holds" where the effect is as declared; of an equivalence claim, where there is none.

        For noisy draws the rule takes the larger of two variance estimates: P is then a mean over 500 pairs of
        estimates, the same in every call.
        """
        from scipy.special import ndtr, stdtrit

        m, noisy = self.draws, self.noisy and self.draws > 0
        if clusters < LEAST_CLUSTERS or 0 < m < LEAST_DRAWS:
            return 0.0
        # The variances of the value, by its interval, and of the draws.
        error, spread = self.noise**2 / clusters, self.spread**2 + self.noisy * self.noise**2 / clusters
        noise, others = np.asarray(error), np.asarray(spread * (1 + 1 / m) if m else 0.0)
        if noisy:
            chi_own, chi_drawn = _chi_squares(clusters - 1, m - 1)
            noise, drawn = error * chi_own, spread * chi_drawn
            noise, others = np.where(drawn >= noise, [0 * noise, drawn * (1 + 1 / m)], [noise, drawn / m])
        whole = noise + others
        if not np.all(whole > 0):
            return 1.0
        degrees = whole**2 / (noise**2 / (clusters - 1) + others**2 / max(m - 1, 1))
        quantile = -stdtrit(degrees, ALPHA / self.claims)
        if noisy:
            power = float(ndtr((1 - quantile * np.sqrt(whole)) / math.sqrt(spread * (1 + 1 / m))).mean())
        else:
            power = float(ndtr((1 / np.sqrt(whole) - quantile) / np.sqrt(1 + quantile**2 / (2 * degrees))))
        return max(0.0, 2 * power - 1) if self.sides == 2 else power


@cache
def _chi_squares(*freedoms: int) -> tuple[np.ndarray, ...]:
    """[500] estimates of a variance of 1 with these degrees of freedom, independent of each other."""
    rng = np.random.default_rng(0)
    return tuple(rng.chisquare(freedom, 500) / freedom for freedom in freedoms)


def needed(plan: Setting, wanted: float = POWER) -> int | None:
    """The fewest clusters with the `wanted` power; None if no number suffices."""
    few, many = LEAST_CLUSTERS - 1, MOST_UNITS
    if plan.power(many) < wanted:
        return None
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if plan.power(middle) >= wanted else (middle, many)
    return many
