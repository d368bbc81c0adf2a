"""Observer models: rules that turn the labels seen into the next label's probability, Bayesian ones and rivals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float, Int

from llmgeom.batch import Batch
from llmgeom.stats import conjugate
from llmgeom.stats.information import bits


@dataclass(frozen=True)
class Shown:
    """What an observer sees of each prompt.

    Attributes:
        labels: [prompt k] padded with -1, 0 first, 1 second, in the order of the prompt.
        exact: [prompt 2] exact log-probability of each label as the next one, nats.
        reliability: [prompt] the reliability that the prompt states; nan where it states none.
        prior: [prompt] the prior probability of the first label that it states; nan where it states none.
    """

    labels: Int[np.ndarray, "prompt k"]
    exact: Float[np.ndarray, "prompt 2"]
    reliability: Float[np.ndarray, " prompt"]
    prior: Float[np.ndarray, " prompt"]

    @classmethod
    def of(cls, batch: Batch) -> Shown:
        """From a batch with the column `seen`, and where prompts state them `reliability` and `prior`."""
        rows = [[int(label) for label in row] for row in batch.columns["seen"]]
        labels = np.full((len(rows), max(map(len, rows))), -1)
        for into, row in zip(labels, rows, strict=True):
            into[: len(row)] = row
        absent = (np.nan,) * len(rows)
        stated = (np.array(batch.columns.get(name, absent), dtype=float) for name in ("reliability", "prior"))
        return cls(labels, batch.exact.predictive[:, -1].double().numpy(), *stated)

    def take(self, rows: np.ndarray) -> Shown:
        """Some of the prompts."""
        return Shown(self.labels[rows], self.exact[rows], self.reliability[rows], self.prior[rows])

    @cached_property
    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """How often each label was shown, [prompt] each."""
        return (self.labels == 0).sum(1), (self.labels == 1).sum(1)

    @cached_property
    def k(self) -> np.ndarray:
        """[prompt] how many labels were shown."""
        return (self.labels >= 0).sum(1)


@dataclass(frozen=True)
class Observer:
    """A rule for P(first label), with parameters that are fitted to the model's predictions.

    Attributes:
        bayesian: whether the rule is Bayes' rule under some prior.
        rule: (what was shown, parameters ...) -> P(first) [prompt].
        start, bounds: first guess and range of each parameter.
    """

    name: str
    bayesian: bool
    rule: Callable[..., np.ndarray]
    start: tuple[float, ...] = ()
    bounds: tuple[tuple[float, float], ...] = ()


def observers() -> tuple[Observer, ...]:
    """The exact observer, Bayesian ones under other priors, and some that are not Bayesian."""

    def conjugate_rule(predictive: Callable, *fixed: float) -> Callable[..., np.ndarray]:
        return lambda shown, *fitted: np.exp(predictive(*shown.counts, *(fixed or fitted))[:, 0])

    def majority(shown: Shown, error: float) -> np.ndarray:
        return 0.5 + (0.5 - error) * np.sign(np.subtract(*shown.counts))

    def last(shown: Shown, error: float) -> np.ndarray:
        final = shown.labels[np.arange(len(shown.labels)), shown.k - 1]
        return np.where(final == 0, 1 - error, error)

    def recent(shown: Shown, keep: float, before: float) -> np.ndarray:
        age = shown.k[:, None] - 1 - np.arange(shown.labels.shape[1])
        weight = np.where(shown.labels >= 0, keep ** np.maximum(age, 0), 0)
        return (before + (weight * (shown.labels == 0)).sum(1)) / (2 * before + weight.sum(1))

    share, count = (1e-3, 0.499), (1e-2, 50.0)
    two_point, beta = conjugate.two_point, conjugate.beta_bernoulli
    return (
        Observer("exact", True, lambda shown: np.exp(shown.exact[:, 0])),
        Observer("two-point 0.9", True, conjugate_rule(two_point, 0.9)),
        Observer("Beta(1, 1)", True, conjugate_rule(beta, 1.0, 1.0)),
        Observer("KT, Beta(1/2, 1/2)", True, conjugate_rule(beta, 0.5, 0.5)),
        Observer("fitted Beta", True, conjugate_rule(beta), (1.0, 1.0), (count, count)),
        Observer("fitted reliability", True, conjugate_rule(two_point), (0.8,), ((0.501, 0.999),)),
        Observer("majority", False, majority, (0.2,), (share,)),
        # A weight of at most .8 a label: at 1 it would count like a Beta prior, which is Bayesian.
        Observer("recency-weighted", False, recent, (0.6, 1.0), ((0.0, 0.8), count)),
        Observer("copy-last", False, last, (0.2,), (share,)),
        Observer("unigram", False, lambda shown, p: np.full(len(shown.labels), p), (0.5,), ((1e-3, 0.999),)),
    )


def divergence(
    log_p: Float[np.ndarray, "prompt outcome"], log_q: Float[np.ndarray, "prompt outcome"]
) -> Float[np.ndarray, " prompt"]:
    """KL(p || q) in bits, for p without zeros."""
    return bits((np.exp(log_p) * (log_p - log_q)).sum(-1))


def losses(
    observer: Observer,
    shown: Shown,
    log_p: Float[np.ndarray, "prompt 2"],
    half: Bool[np.ndarray, " prompt"],
) -> Float[np.ndarray, " prompt"]:
    """KL(model || observer) in bits, with parameters fitted on the rows of the other half."""
    from scipy.optimize import minimize

    def loss(rows: np.ndarray, values: Sequence[float]) -> np.ndarray:
        p = np.clip(observer.rule(shown.take(rows), *values), 1e-9, 1 - 1e-9)
        return divergence(log_p[rows], np.log(np.stack([p, 1 - p], 1)))

    scores = np.empty(len(log_p))
    for part in (False, True):
        fit, score = np.flatnonzero(half != part), np.flatnonzero(half == part)
        values: Sequence[float] = observer.start
        if values:
            values = minimize(
                lambda v, fit=fit: loss(fit, v).mean(), observer.start, method="L-BFGS-B", bounds=observer.bounds
            ).x
        scores[score] = loss(score, values)
    return scores


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
