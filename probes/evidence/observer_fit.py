"""Observer models fitted to a model's answers: on one half of the clusters, scored on the other, and absolutely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float
from scipy.optimize import minimize
from scipy.special import expit, logit

from llmgeom.probes.evidence.observers import Observer, Shown
from llmgeom.stats.information import bits
from llmgeom.stats.resampling import Clusters, Interval, jackknife

# Of a right observer's lack of fit. At .05 the exact observer of stated reliabilities was refused in 10 of 100: most
# cells of its table hold one prompt, and the noise is estimated from the others.
MISFIT_P = 0.02
LEAST_GAIN = 1e-4  # bits per label: what a perfect model gains over every rival must be above it
NEAR = 1e-9  # probabilities are kept this far from 0 and 1


def divergence(p: Float[np.ndarray, " prompt"], q: Float[np.ndarray, " prompt"]) -> Float[np.ndarray, " prompt"]:
    """KL(p || q) of two labels, bits, for p and q away from 0 and 1."""
    p, q = (np.clip(x, NEAR, 1 - NEAR) for x in (p, q))
    return bits(p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q)))


def fitted(observer: Observer, shown: Shown, p: Float[np.ndarray, " prompt"]) -> tuple[float, ...]:
    """Parameters with the least mean KL(model || observer)."""
    if not observer.start:
        return ()
    found = minimize(
        lambda values: divergence(p, observer.rule(shown, *values)).mean(),
        observer.start,
        method="L-BFGS-B",
        bounds=observer.bounds,
    )
    return tuple(float(value) for value in found.x)


def losses(
    observer: Observer, shown: Shown, p: Float[np.ndarray, " prompt"], half: Bool[np.ndarray, " prompt"]
) -> Float[np.ndarray, " prompt"]:
    """KL(model || observer) in bits, with parameters fitted on the prompts of the other half."""
    scores = np.empty(len(p))
    for part in (False, True):
        fit, score = np.flatnonzero(half != part), np.flatnonzero(half == part)
        values = fitted(observer, shown.take(fit), p[fit])
        scores[score] = divergence(p[score], observer.rule(shown.take(score), *values))
    return scores


def halves(clusters: Clusters) -> Bool[np.ndarray, " row"]:
    """Which half each row is in; a cluster is in one."""
    _, cluster = np.unique(clusters, return_inverse=True)
    return np.random.default_rng(0).permutation(cluster.max() + 1)[cluster] % 2 == 0


def advantage(scores: np.ndarray, half: np.ndarray, bayesian: Sequence[bool]) -> np.ndarray:
    """[prompt] bits by which the best other observer loses to the best Bayesian one; scores [observer prompt] in bits.

    The best of a kind is chosen on the prompts of one half and scored on those of the other.
    """
    gain = np.empty(scores.shape[1])
    for part in (False, True):
        choose, score = half != part, half == part
        best = {
            kind: min((i for i, is_bayesian in enumerate(bayesian) if is_bayesian is kind),
                      key=lambda i: scores[i, choose].mean())
            for kind in (True, False)
        }  # fmt: skip
        gain[score] = scores[best[False], score] - scores[best[True], score]
    return gain


@dataclass(frozen=True)
class Contest:
    """All observers on one model's answers.

    Attributes:
        rules: the observers. shown: what each prompt shows. p: [prompt] the model's P(first). clusters: of each prompt.
    """

    rules: Sequence[Observer]
    shown: Shown
    p: Float[np.ndarray, " prompt"]
    clusters: np.ndarray

    @cached_property
    def half(self) -> np.ndarray:
        """[prompt] which half."""
        return halves(self.clusters)

    @cached_property
    def scores(self) -> Float[np.ndarray, "observer prompt"]:
        """KL(model || observer), bits, parameters from the other half."""
        return np.stack([losses(rule, self.shown, self.p, self.half) for rule in self.rules])

    @cached_property
    def gain(self) -> Float[np.ndarray, " prompt"]:
        """Bits by which the best rival loses to the best Bayesian observer."""
        return advantage(self.scores, self.half, [rule.bayesian for rule in self.rules])

    @property
    def winner(self) -> Observer:
        """The observer with fewest parameters whose loss is within one standard error of the least."""
        means = self.scores.mean(1)
        least = int(means.argmin())
        for i in sorted(range(len(self.rules)), key=lambda i: (len(self.rules[i].start), means[i])):
            span = jackknife(np.mean, self.scores[i] - self.scores[least], self.clusters, level=0.68)
            if span.low <= 0:
                return self.rules[i]
        return self.rules[least]

    def best(self, bayesian: bool) -> Observer:
        """The best observer of a kind over both halves."""
        some = [i for i, rule in enumerate(self.rules) if rule.bayesian is bayesian]
        return self.rules[min(some, key=lambda i: self.scores[i].mean())]


def attainable(rules: Sequence[Observer], shown: Shown, clusters: np.ndarray) -> float:
    """The mean gain, bits per label, of a model whose answers are exact: 0 where some rival has the exact rule."""
    return float(Contest(rules, shown, np.exp(shown.exact[:, 0]), clusters).gain.mean())


# ---- absolute fit ---------------------------------------------------------------------------------------------------


def cells(shown: Shown) -> np.ndarray:
    """[prompt] the number of its cell in the table of the sufficient statistic.

    The statistic is the counts of both labels and, where prompts state them, reliability and prior.
    """
    parts = [*shown.counts, np.nan_to_num(shown.reliability, nan=-1.0), np.nan_to_num(shown.prior, nan=-1.0)]
    return np.unique(np.stack(parts, 1), axis=0, return_inverse=True)[1].ravel()


def lack_of_fit(observer: Observer, shown: Shown, p: Float[np.ndarray, " prompt"]) -> float:
    """Mean KL(model || observer) less mean KL(model || saturated table), bits per label, both fitted to all prompts.

    The table has one probability for each cell of the sufficient statistic: what any function of it could reach.
    """
    cell = cells(shown)
    table = (np.bincount(cell, p) / np.bincount(cell))[cell]
    q = observer.rule(shown, *fitted(observer, shown, p))
    return float((divergence(p, q) - divergence(p, table)).mean())


def lack_of_fit_draws(
    observer: Observer, shown: Shown, p: Float[np.ndarray, " prompt"], draws: int, seed: int
) -> Float[np.ndarray, " draw"]:
    """The same of simulated models that are this observer: its fitted log odds plus the model's own noise.

    The noise is drawn from the residuals of the model's log odds in its cells of the table, each times
    sqrt(m / (m - 1)) in a cell of m prompts.
    """
    cell, rng = cells(shown), np.random.default_rng([seed, 31])
    odds = logit(np.clip(p, NEAR, 1 - NEAR))
    size = np.bincount(cell)
    residual = odds - (np.bincount(cell, odds) / size)[cell]
    several = size[cell] > 1
    noise = (residual * np.sqrt(size[cell] / np.maximum(size[cell] - 1, 1)))[several]
    centre = logit(np.clip(observer.rule(shown, *fitted(observer, shown, p)), NEAR, 1 - NEAR))
    simulated = expit(centre + rng.choice(noise, (draws, len(p))))
    return np.array([lack_of_fit(observer, shown, one) for one in simulated])


# ---- parameters -----------------------------------------------------------------------------------------------------


def parameter_intervals(
    observer: Observer, shown: Shown, p: Float[np.ndarray, " prompt"], clusters: np.ndarray
) -> tuple[tuple[float, ...], list[Interval]]:
    """Fitted parameters of all prompts and their intervals, fitted anew without each cluster, within their ranges."""
    refits: dict[bytes, tuple[float, ...]] = {}

    def values(rows: np.ndarray) -> tuple[float, ...]:
        if (key := rows.tobytes()) not in refits:
            refits[key] = fitted(observer, shown.take(rows), p[rows])
        return refits[key]

    every = np.arange(len(p))
    spans = []
    for i, (least, most) in enumerate(observer.bounds):
        span = jackknife(lambda rows, i=i: values(rows)[i], every, clusters)
        spans.append(replace(span, low=max(span.low, least), high=min(span.high, most)))
    return values(every), spans


# ---- the call -------------------------------------------------------------------------------------------------------

BAYESIAN, OTHER, UNDECIDED = "Bayesian", "not Bayesian", "open"


def called(gain: Interval, possible: float, misfit_p: float) -> str:
    """What a model is called, conservatively.

    Args:
        gain: interval of the best Bayesian observer's gain over the best rival.
        possible: the gain of a model whose answers are exact (`attainable`).
        misfit_p: of the best Bayesian observer's lack of fit, against its own simulated models.

    Returns:
        "not Bayesian" where a rival predicts better, or no Bayesian observer fits; "Bayesian" where one fits, predicts
        better than every rival, and the design parts the two; else "open".
    """
    if gain.high < 0 or misfit_p < MISFIT_P:
        return OTHER
    if possible > LEAST_GAIN and gain.low > 0:
        return BAYESIAN
    return UNDECIDED
