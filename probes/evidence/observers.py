"""Ideal observers with another prior: Bayes' rule with parameters, and the observer nearest to a model's answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import minimize
from scipy.special import expit, logit

from llmgeom.batch import Batch
from llmgeom.stats import conjugate
from llmgeom.stats.information import bits

NEAR = 1e-9  # probabilities are clipped this far from 0 and 1


@dataclass(frozen=True, eq=False)
class Shown:
    """The labels of each prompt in their order, 0 the first of two and 1 the second.

    Attributes:
        labels: The label of each observation; padded with -1.
        exact: Exact log-probability of each label as the next one, nats.
    """

    labels: Int[np.ndarray, "prompt k"]
    exact: Float[np.ndarray, "prompt label"]

    @classmethod
    def of(cls, batch: Batch) -> Shown:
        """Sequences of a batch with the column `seen`."""
        rows = [[int(label) for label in row] for row in batch.columns["seen"]]
        labels = np.full((len(rows), max(map(len, rows))), -1)
        for into, row in zip(labels, rows, strict=True):
            into[: len(row)] = row
        return cls(labels, batch.exact.predictive[:, -1].double().numpy())

    @classmethod
    def joined(cls, several: Sequence[Shown]) -> Shown:
        """The prompts of several, one after another."""
        width = max(shown.labels.shape[1] for shown in several)
        padded = [np.pad(s.labels, ((0, 0), (0, width - s.labels.shape[1])), constant_values=-1) for s in several]
        return cls(np.concatenate(padded), np.concatenate([one.exact for one in several]))

    def take(self, rows: np.ndarray) -> Shown:
        """A subset of the prompts."""
        return replace(self, **{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    @cached_property
    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """[prompt] and [prompt] the counts of the first and of the second label."""
        return (self.labels == 0).sum(1), (self.labels == 1).sum(1)


@dataclass(frozen=True)
class Observer:
    """Bayes' rule under a prior: a rule for P(first label), with parameters that are fitted to a model's answers.

    Attributes:
        rule: (sequences, parameters ...) -> P(first) [prompt].
        start, bounds: First guess and range of each parameter.
    """

    rule: Callable[..., np.ndarray]
    start: tuple[float, ...] = ()
    bounds: tuple[tuple[float, float], ...] = ()


def divergence(p: Float[np.ndarray, " prompt"], q: Float[np.ndarray, " prompt"]) -> Float[np.ndarray, " prompt"]:
    """KL(p || q), bits, of P(first) of two labels."""
    p, q = (np.clip(np.stack([x, 1 - x], 1), NEAR, 1 - NEAR) for x in (p, q))
    return bits((p * np.log(p / q)).sum(1))


def fitted(observer: Observer, shown: Shown, p: np.ndarray) -> tuple[float, ...]:
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


def _beta(shown: Shown, a: float, b: float) -> np.ndarray:
    return np.exp(conjugate.beta_bernoulli(*shown.counts, a, b)[:, 0])


def _two_point(shown: Shown, reliability: float) -> np.ndarray:
    """r P + (1 - r)(1 - P), P the belief, with log odds (n1 - n2) log(r / (1 - r))."""
    belief = expit(np.subtract(*shown.counts) * logit(reliability))
    return reliability * belief + (1 - reliability) * (1 - belief)


def _two_shares(shown: Shown, one: float, other: float, prior: float) -> np.ndarray:
    """The share of first labels is `one` with probability `prior`, or else `other`."""
    n1, n2 = shown.counts
    belief = expit(logit(prior) + n1 * np.log(one / other) + n2 * np.log((1 - one) / (1 - other)))
    return one * belief + other * (1 - belief)


def _constant(shown: Shown, p: float) -> np.ndarray:
    return np.full(len(shown.labels), p)


COUNT, CHANCE = (1e-2, 50.0), (1e-3, 0.999)
# A fixed prior over the share of first labels makes an observer a martingale that ignores order. Such priors are
# two-point, Beta, and their limit, a constant.
COHERENT = (
    Observer(lambda shown: np.exp(shown.exact[:, 0])),
    Observer(_beta, (1.0, 1.0), (COUNT, COUNT)),
    Observer(_two_point, (0.8,), ((0.501, 0.999),)),
    Observer(_two_shares, (0.8, 0.3, 0.5), (CHANCE, CHANCE, CHANCE)),
    Observer(_constant, (0.5,), (CHANCE,)),
)
