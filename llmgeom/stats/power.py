"""Power of a claim: the clusters needed to detect its effect, and the smallest effect that n clusters detect.

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
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np

from llmgeom.stats.resampling import LEAST_CLUSTERS, student_quantile
from llmgeom.stats.verdict import ALPHA, LEAST_DRAWS, Rule

POWER = 0.9
MOST_UNITS = 10**6  # an experiment with more clusters is not practical
HALF_MEDIAN = 0.67449  # the median of |z|
ROOT_MEAN, ROOT_SD = 0.82216, 0.34915  # mean and standard deviation of sqrt(|z|), z standard normal
Control = Literal["draws", "noisy draws", "number"]


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
        """Probability of "holds" where the effect is as declared; of an equivalence claim, where there is none."""
        if clusters < LEAST_CLUSTERS or 0 < self.draws < LEAST_DRAWS:
            return 0.0
        error, spread = self.noise**2 / clusters, self.spread**2 + self.noisy * self.noise**2 / clusters
        power = _holds(1.0, error, spread, clusters, self)
        return max(0.0, 2 * power - 1) if self.sides == 2 else power


def _holds(
    step: float, error: float, spread: float, clusters: int, setting: Setting, actual: float | None = None
) -> float:
    """P(holds) for an effect of `step`, from the variances of the value (by its interval) and of the draws.

    `actual` is the true variance of the excess if it differs from the rule's. For noisy draws the rule takes the larger
    of two variance estimates: P is then a mean over 500 pairs of estimates, the same in every call.
    """
    from scipy.special import ndtr, stdtrit

    m = setting.draws
    noise, others = np.asarray(error), np.asarray(spread * (1 + 1 / m) if m else 0.0)
    if setting.noisy and m:
        chi_own, chi_drawn = _chi_squares(clusters - 1, m - 1)
        noise, drawn = error * chi_own, spread * chi_drawn
        noise, others = np.where(drawn >= noise, [0 * noise, drawn * (1 + 1 / m)], [noise, drawn / m])
    whole = noise + others
    if not np.all(whole > 0):
        return float(step > 0)
    degrees = whole**2 / (noise**2 / (clusters - 1) + others**2 / max(m - 1, 1))
    quantile = -stdtrit(degrees, ALPHA / setting.claims)
    if setting.noisy and m:
        actual = spread * (1 + 1 / m) if actual is None else actual
        return float(ndtr((step - quantile * np.sqrt(whole)) / math.sqrt(actual)).mean())
    return float(ndtr((step / np.sqrt(whole) - quantile) / np.sqrt(1 + quantile**2 / (2 * degrees))))


@cache
def _chi_squares(*freedoms: int) -> tuple[np.ndarray, ...]:
    """[500] estimates of a variance of 1 with these degrees of freedom, independent of each other."""
    rng = np.random.default_rng(0)
    return tuple(rng.chisquare(freedom, 500) / freedom for freedom in freedoms)


@dataclass(frozen=True)
class Design:
    """A planned experiment: the rule of a claim, and the assumed noise of the value and its control.

    Attributes:
        spread: Standard deviation between clusters in the claim's unit. For a rank correlation it is known: on Fisher's
            scale the value's variance is (1 + rho^2 / 2) / (n - 3) (Bonett and Wright, 2000).
        null_spread: Standard deviation between draws of the control that is hardest to beat, in the claim's unit; for a
            rank correlation, that of their true values on Fisher's scale, to which each draw adds a sampling error of
            variance 1 / (n - 3).
        control: Kind of control: draws of models, draws that also have the value's sampling noise, or a number.
    """

    claim: Rule
    spread: float
    null_spread: float
    draws: int = 20
    claims: int = 1
    control: Control = "draws"

    def of(self, effect: float) -> Design:
        """The same design with another effect (for an equivalence claim, another margin)."""
        other = replace(self.claim, margin=effect) if self.claim.equivalence else replace(self.claim, effect=effect)
        return replace(self, claim=other)

    @property
    def setting(self) -> Setting:
        """The noise in units of the effect, for a mean."""
        claim, size = self.claim, self.claim.smallest
        if claim.equivalence or self.control == "number":
            sides = 2 if claim.equivalence and not claim.one_sided else 1
            return Setting(self.spread / size, 0.0, 0, False, self.claims, sides)
        noisy = self.control == "noisy draws"
        return Setting(self.spread / size, self.null_spread / size, self.draws, noisy, self.claims)

    def power(self, clusters: int) -> float:
        """Probability of "holds" where the effect is as declared; of an equivalence claim, where there is none."""
        from scipy.stats import norm

        claim = self.claim
        if claim.needed != "correlation":
            return self.setting.power(clusters)
        if clusters < LEAST_CLUSTERS or self.draws < LEAST_DRAWS:
            return 0.0
        width = math.sqrt(self.null_spread**2 + 1 / (clusters - 3))  # of the draws, on Fisher's scale
        folded = claim.scale == "folded"
        truth = claim.effect + (math.tanh(HALF_MEDIAN * width) if folded else 0.0)
        if truth >= 1:
            return 0.0
        at, error = math.atanh(truth), (1 + truth**2 / 2) / (clusters - 3)
        setting = Setting(0.0, 0.0, self.draws, True, self.claims)
        # Permutations are a control too; for a correlation without sign their p is two-sided.
        permuted = float(norm.cdf(at / math.sqrt(error) - norm.isf(ALPHA / self.claims / (1 + folded))))
        if not folded:
            return min(permuted, _holds(at, error, width**2, clusters, setting))
        quantile = student_quantile(clusters)  # for the error from the lower, longer side of the interval
        below = (math.sqrt(at) - math.sqrt(max(at - quantile * math.sqrt(error), 0.0))) / quantile
        above = math.sqrt(at) - ROOT_MEAN * math.sqrt(width)
        actual = (error + self.null_spread**2) / (4 * at) + ROOT_SD**2 * width / self.draws
        return min(permuted, _holds(above, below**2, ROOT_SD**2 * width, clusters, setting, actual))


def needed(plan: Setting | Design, wanted: float = POWER) -> int | None:
    """The fewest clusters with the `wanted` power; None if no number suffices."""
    few, many = LEAST_CLUSTERS - 1, MOST_UNITS
    if plan.power(many) < wanted:
        return None
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if plan.power(middle) >= wanted else (middle, many)
    return many


def detectable(design: Design, clusters: int) -> float | None:
    """The smallest effect (margin, for an equivalence claim) with the power POWER, to a thousandth of itself.

    None if even a hundred times the declared effect, or a correlation of 1, lacks that power.
    """
    low, high = 0.0, 100 * design.claim.smallest
    if design.claim.needed == "correlation":
        high = 1 - math.tanh(HALF_MEDIAN * math.sqrt(design.null_spread**2 + 1 / max(clusters - 3, 1))) - 1e-3
    if high <= 0 or design.of(high).power(clusters) < POWER:
        return None
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if design.of(middle).power(clusters) >= POWER else (middle, high)
    return high


def needed_in_any_layer(effect: float, layers: int) -> int:
    """Clusters needed to detect a rank correlation in any one of several layers, corrected by `max_statistic`.

    n = 3 + ((z_L + z_b) s / atanh(effect))^2, s^2 = 1 + effect^2 / 2, z_b the normal quantile of the power and z_L that
    of 1 - (1 - .95^(1 / L)) / 2, which bounds the largest of L independent |z| with probability .95 (derived here).
    Similar layers need fewer clusters.
    """
    from scipy.stats import norm

    z = norm.isf((1 - 0.95 ** (1 / layers)) / 2) + norm.ppf(POWER)
    return math.ceil(3 + (z * math.sqrt(1 + effect**2 / 2) / math.atanh(effect)) ** 2)
