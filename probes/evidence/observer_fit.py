"""Observer models fitted to a model's answers on half of the clusters: their scores on the other half, absolute fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
from jaxtyping import Bool, Float
from scipy.optimize import minimize
from scipy.special import expit, logit, softmax

from llmgeom.probes.evidence.observers import Observer, Shown
from llmgeom.probes.evidence.sequence_observers import ProcessSequences
from llmgeom.stats.information import bits
from llmgeom.stats.resampling import Clusters, Interval, jackknife

# Level for rejecting a correct observer by its lack of fit. At .05 the exact observer of stated reliabilities was
# rejected in 10 of 100: most cells of its table have one prompt, and the noise is estimated from the others.
MISFIT_P = 0.02
LEAST_GAIN = 1e-4  # bits per label: least gain of a perfect model over every rival
NEAR = 1e-9  # probabilities are clipped this far from 0 and 1


Answers = Float[np.ndarray, " prompt"] | Float[np.ndarray, "prompt label"]  # P(first) of two labels, or P(label)
Seen = Shown | ProcessSequences


def divergence(p: Answers, q: Answers) -> Float[np.ndarray, " prompt"]:
    """KL(p || q), bits, for p and q away from 0 and 1."""
    p, q = (np.clip(x if x.ndim > 1 else np.stack([x, 1 - x], 1), NEAR, 1 - NEAR) for x in (p, q))
    return bits((p * np.log(p / q)).sum(1))


def log_odds(p: Answers) -> Answers:
    """Log odds of the first of two labels; for several labels the centred log-ratios, log p_j minus their mean."""
    if p.ndim == 1:
        return logit(np.clip(p, NEAR, 1 - NEAR))
    log_p = np.log(np.clip(p, NEAR, 1.0))
    return log_p - log_p.mean(1, keepdims=True)


def of_log_odds(odds: Answers) -> Answers:
    """The inverse of `log_odds`."""
    return expit(odds) if odds.ndim == 1 else softmax(odds, axis=1)


def fitted(observer: Observer, shown: Seen, p: Answers) -> tuple[float, ...]:
    """Parameters with the least mean KL(model || observer)."""
    if not observer.start:
        return ()
    result = minimize(
        lambda values: divergence(p, observer.rule(shown, *values)).mean(),
        observer.start,
        method="L-BFGS-B",
        bounds=observer.bounds,
    )
    return tuple(float(value) for value in result.x)


def losses(
    observer: Observer, shown: Seen, p: Answers, half: Bool[np.ndarray, " prompt"]
) -> Float[np.ndarray, " prompt"]:
    """KL(model || observer) in bits, with parameters fitted on the prompts of the other half."""
    scores = np.empty(len(p))
    for part in (False, True):
        fit, score = np.flatnonzero(half != part), np.flatnonzero(half == part)
        values = fitted(observer, shown.take(fit), p[fit])
        scores[score] = divergence(p[score], observer.rule(shown.take(score), *values))
    return scores


def halves(clusters: Clusters) -> Bool[np.ndarray, " row"]:
    """The half of each row; a cluster is in one half."""
    _, cluster = np.unique(np.asarray(clusters), return_inverse=True)
    return np.random.default_rng(0).permutation(cluster.max() + 1)[cluster] % 2 == 0


def advantage(scores: np.ndarray, half: np.ndarray, bayesian: Sequence[bool | None]) -> np.ndarray:
    """[prompt] advantage in bits of the best Bayesian observer over the best rival; scores [observer prompt] in bits.

    The best of a kind is chosen on the prompts of one half and scored on the other half. An observer of neither kind
    (None) takes no part.
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
        rules: the observers. shown: observations of each prompt. p: the model's answers. clusters: of each prompt.
    """

    rules: Sequence[Observer]
    shown: Seen
    p: Answers
    clusters: np.ndarray

    @cached_property
    def half(self) -> np.ndarray:
        """[prompt] the half."""
        return halves(self.clusters)

    @cached_property
    def scores(self) -> Float[np.ndarray, "observer prompt"]:
        """KL(model || observer) in bits, with parameters fitted on the other half."""
        return np.stack([losses(rule, self.shown, self.p, self.half) for rule in self.rules])

    @cached_property
    def gain(self) -> Float[np.ndarray, " prompt"]:
        """Advantage in bits of the best Bayesian observer over the best rival."""
        return advantage(self.scores, self.half, [None if rule.nests else rule.bayesian for rule in self.rules])

    @cached_property
    def forgets(self) -> bool:
        """Whether a rule that contains Bayes' rule as a special case predicts better than it (95 % interval)."""
        if not any(rule.nests for rule in self.rules):
            return False
        kinds = [True if rule.bayesian else False if rule.nests else None for rule in self.rules]
        return jackknife(np.mean, advantage(self.scores, self.half, kinds), self.clusters).high < 0

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
        some = [i for i, rule in enumerate(self.rules) if rule.bayesian is bayesian and not rule.nests]
        return self.rules[min(some, key=lambda i: self.scores[i].mean())]


def attainable(rules: Sequence[Observer], shown: Seen, clusters: np.ndarray) -> float:
    """The mean gain, bits per label, of a model whose answers are exact: 0 if a rival contains the exact rule."""
    return float(Contest(rules, shown, shown.answers, clusters).gain.mean())


# ---- absolute fit ---------------------------------------------------------------------------------------------------


def table(cell: np.ndarray, values: Answers) -> Answers:
    """The mean of the values in each prompt's cell: the best function of the sufficient statistic."""
    columns = values.reshape(len(values), -1).T
    means = np.stack([np.bincount(cell, column) for column in columns], 1) / np.maximum(np.bincount(cell), 1)[:, None]
    return means[cell].reshape(values.shape)


def lack_of_fit(observer: Observer, shown: Seen, p: Answers) -> float:
    """Mean KL(model || observer) minus mean KL(model || saturated table), bits per label, both fitted to all prompts.

    The table has one answer for each cell of the sufficient statistic: no function of the statistic fits better.
    """
    q = observer.rule(shown, *fitted(observer, shown, p))
    return float((divergence(p, q) - divergence(p, table(shown.cells, p))).mean())


def lack_of_fit_draws(observer: Observer, shown: Seen, p: Answers, draws: int, seed: int) -> Float[np.ndarray, " draw"]:
    """Lack of fit of simulated models that are this observer: its fitted log odds plus the model's own noise.

    The noise is drawn from the residuals of the model's log odds in the cells of the table, each times
    sqrt(m / (m - 1)) in a cell of m prompts. Every simulated model draws its noise from its own pool: as many residuals
    as there are degrees of freedom (residuals minus cells), drawn with replacement. So the draws also reflect the
    uncertainty of the size of the noise: with one pool for all, a correct observer of stated reliabilities was rejected
    in 6 of 100 at a nominal .02.
    """
    cell, rng = shown.cells, np.random.default_rng([seed, 31])
    odds, size = log_odds(p), np.bincount(cell)
    scale = np.sqrt(size[cell] / np.maximum(size[cell] - 1, 1))
    residual = (odds - table(cell, odds)) * scale.reshape(-1, *[1] * (p.ndim - 1))
    noise = residual[size[cell] > 1]
    free = max(len(noise) - int((size > 1).sum()), 1)
    values = fitted(observer, shown, p)
    centre, nearby = log_odds(observer.rule(shown, *values)), replace(observer, start=values)

    def simulated() -> Answers:
        pool = noise[rng.integers(len(noise), size=free)]
        return of_log_odds(centre + pool[rng.integers(free, size=len(p))])

    return np.array([lack_of_fit(nearby, shown, simulated()) for _ in range(draws)])


# ---- parameters -----------------------------------------------------------------------------------------------------


def parameter_intervals(
    observer: Observer, shown: Seen, p: Answers, clusters: np.ndarray
) -> tuple[tuple[float, ...], list[Interval]]:
    """Parameters fitted to all prompts, and their intervals by refitting without each cluster, cut to their ranges."""
    refits: dict[bytes, tuple[float, ...]] = {}

    def values(rows: np.ndarray) -> tuple[float, ...]:
        if (key := rows.tobytes()) not in refits:
            refits[key] = fitted(observer, shown.take(rows), p[rows])
        return refits[key]

    def value(i: int, rows: np.ndarray) -> float:
        return values(rows)[i]

    every = np.arange(len(p))
    spans = []
    for i, (least, most) in enumerate(observer.bounds):
        span = jackknife(partial(value, i), every, clusters)
        spans.append(replace(span, low=max(span.low, least), high=min(span.high, most)))
    return values(every), spans


# ---- the call -------------------------------------------------------------------------------------------------------

BAYESIAN, OTHER, UNDECIDED = "Bayesian", "not Bayesian", "open"


def called(gain: Interval, possible: float, misfit_p: float, forgets: bool = False) -> str:
    """A conservative verdict on a model: "Bayesian", "not Bayesian" or "open".

    Args:
        gain: interval of the best Bayesian observer's gain over the best rival.
        possible: the gain of a model whose answers are exact (`attainable`).
        misfit_p: p of the best Bayesian observer's lack of fit, from its simulated models.
        forgets: whether a rule that forgets predicts better than the Bayesian rule that it generalises.

    Returns:
        "not Bayesian" if a rival predicts better, or no Bayesian observer fits; "Bayesian" if one fits, predicts better
        than every rival, and the design separates the two; else "open".
    """
    if gain.high < 0 or misfit_p < MISFIT_P or forgets:
        return OTHER
    if possible > LEAST_GAIN and gain.low > 0:
        return BAYESIAN
    return UNDECIDED
