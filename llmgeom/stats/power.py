"""How many units a claim needs to PASS where its effect is there, and which effect is found with those there are.

PASS asks three things of a value v measured on u units, the null being m draws (`claims.judge`): A, its 95 % interval
clears the margin; B, its rank p against the draws is under .05; C, so is its p by Holm's correction. Of K claims Holm
holds the smallest p against .05 / K: a plan takes that for each, and a claim that passes beside others needs less.

With e the standard error of v, the draws tau z, z standard normal (|z| where the sign is dropped) and the truth T the
expected margin + effect, v is normal around T, and given the draws PASS has the probability (derived here)

    min(P(A), Phi((T - h) / e)),    P(A) = Phi(((T - margin) / e - q) / sqrt(1 + q^2 / (2 (u - 1)))),

h the higher of the hurdles B and C: the draw that leaves fewer than .05 (m + 1) - 1 above it, and mean + t sd
sqrt(1 + 1 / m) of the draws on the claim's scale, t the quantile 1 - .05 / K of Student's distribution with m - 1
degrees of freedom (`prediction_p`); q Student's quantile of the interval, the root for e being an estimate.
`power` is the mean over 2,000 sets of draws, the same in every call. More units make e small and leave tau as it is:
where untrained models differ much from one another, no number of units is enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np

from llmgeom.stats.resampling import LEAST_CLUSTERS, band
from llmgeom.stats.verdicts import ALPHA, Rule

SETS = 2000
POWER = 0.9
MOST_UNITS = 10**6  # more are no plan
HALF_NORMAL = 0.67449  # the median of |z|
Margin = Literal["end", "centre", "fixed"]


@dataclass(frozen=True)
class Design:
    """The rule of a claim, and what is assumed of the experiment that is to decide it.

    spread       s, sd between units in the claim's unit: e = s / sqrt(u). Of a rank correlation it is known: on
                 Fisher's scale e^2 = (1 + rho^2 / 2) / (u - 3) (Bonett and Wright, 2000).
    null_spread  tau, sd between draws of the null that is hardest to beat, in the claim's unit; of a rank correlation,
                 of their true values on Fisher's scale: each has a sampling error of variance 1 / (u - 3) besides.
    draws        m.
    claims       K, the claims of the record.
    null_margin  what the interval must clear: the far end of the draws, their centre, or a fixed number.
    """

    claim: Rule
    spread: float
    null_spread: float
    draws: int = 20
    claims: int = 1
    null_margin: Margin = "end"

    def of(self, effect: float) -> Design:
        """The same for another effect (of an equivalence claim, another margin)."""
        other = replace(self.claim, margin=effect) if self.claim.equivalence else replace(self.claim, effect=effect)
        return replace(self, claim=other)


def power(design: Design, clusters: int) -> float:
    """Probability of PASS where the effect is as declared; of an equivalence claim, where there is none.

    An equivalence claim has two sides to win, unless it is `one_sided`: 2 P(A) - 1, its margin in the effect's place.
    """
    from scipy.stats import norm, t

    claim, freedom = design.claim, clusters - 1
    if clusters < LEAST_CLUSTERS:
        return 0.0
    interval, corrected = t.isf(0.025, freedom), t.isf(ALPHA / design.claims, freedom)
    if claim.needed == "correlation":
        tau, centre, folded = design.null_spread, True, claim.scale == "folded"
        truth = claim.effect + (math.tanh(HALF_NORMAL * tau) if folded else 0.0)
        if truth >= 1:
            return 0.0
        at, error = math.atanh(truth), math.sqrt((1 + truth**2 / 2) / (clusters - 3))
        # Permutations, a null too, ask less than draws do that have the same sampling error.
        scale, least = math.sqrt(tau**2 + 1 / (clusters - 3)), -math.inf
    else:
        scale, centre, folded, least = design.null_spread, design.null_margin == "centre", False, -math.inf
        at, error = claim.smallest, design.spread / math.sqrt(clusters)
        if claim.equivalence or design.null_margin == "fixed":  # the corrected p is Student's, as the interval is
            one = float(_clears(at / error, max(interval, corrected), freedom))
            return max(0.0, 2 * one - 1) if claim.equivalence and not claim.one_sided else one
        if centre:  # permutations of units are a null too, and spread as the value does
            least = norm.isf(ALPHA / design.claims) * error
    margin, hurdle = (scale * one for one in _hurdles(design.draws, design.claims, folded, centre))
    if not centre:
        at += margin.mean()
    passed = norm.cdf((at - np.maximum(hurdle, least)) / error)
    return float(np.minimum(_clears((at - margin) / error, interval, freedom), passed).mean())


def _clears(distance: float | np.ndarray, quantile: float, freedom: int) -> float | np.ndarray:
    """P((x + distance) / r > quantile), r an estimate of the sd of x, a standard normal: noncentral t, nearly."""
    from scipy.stats import norm

    return norm.cdf((distance - quantile) / math.sqrt(1 + quantile**2 / (2 * freedom)))


@cache
def _hurdles(draws: int, claims: int, folded: bool, centre: bool) -> tuple[np.ndarray, np.ndarray]:
    """[set] the margin and the higher of the hurdles B and C, for draws of sd 1; infinite where B cannot be taken."""
    from scipy.stats import t

    z = np.random.default_rng(0).standard_normal((SETS, max(draws, 2)))
    z = np.sort(np.abs(z) if folded else z, axis=1)
    margin = np.median(z, axis=1) if centre else np.array([band(one)[1] for one in z])
    above = math.ceil(ALPHA * (draws + 1) - 1e-9) - 2  # draws that may be as large as the value
    if above < 0:
        return margin, np.full(SETS, np.inf)
    on = np.sqrt(z) if folded else z
    tail = on.mean(1) + t.isf(ALPHA / claims, draws - 1) * math.sqrt(1 + 1 / draws) * on.std(1, ddof=1)
    return margin, np.maximum(z[:, -1 - above], tail**2 if folded else tail)


def needed(design: Design, wanted: float = POWER) -> int | None:
    """The fewest units with that power; None where no number has it."""
    few, many = LEAST_CLUSTERS - 1, MOST_UNITS
    if power(design, many) < wanted:
        return None
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if power(design, middle) >= wanted else (middle, many)
    return many


def detectable(design: Design, clusters: int, wanted: float = POWER) -> float | None:
    """The smallest effect (of an equivalence claim, margin) that is found with that power, to a thousandth of itself;
    None where none is, up to a hundred times the declared one, or a correlation of 1."""
    low, high = 0.0, 100 * design.claim.smallest
    if design.claim.needed == "correlation":
        high = 1 - math.tanh(HALF_NORMAL * design.null_spread) - 1e-3
    if power(design.of(high), clusters) < wanted:
        return None
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if power(design.of(middle), clusters) >= wanted else (middle, high)
    return high


def needed_in_any_layer(effect: float, layers: int, wanted: float = POWER) -> int:
    """Units at which the rank correlation of one layer of several, of the declared size, has a p under .05 after
    correction for having looked at them all (`max_statistic`).

    n = 3 + ((z_L + z_b) s / atanh(effect))^2, s^2 = 1 + effect^2 / 2, z_b the normal quantile of the power and z_L that
    of 1 - (1 - .95^(1 / L)) / 2: what the largest of L independent |z| stays under with probability .95 (derived here).
    Layers that resemble one another need fewer.
    """
    from scipy.stats import norm

    z = norm.isf((1 - (1 - ALPHA) ** (1 / layers)) / 2) + norm.ppf(wanted)
    return math.ceil(3 + (z * math.sqrt(1 + effect**2 / 2) / math.atanh(effect)) ** 2)
