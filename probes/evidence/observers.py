"""Observer models: rules that predict the next label from the labels seen; Bayesian rules and their rivals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Self

import numpy as np
from jaxtyping import Float, Int
from scipy.special import expit, logit

from llmgeom.batch import Batch
from llmgeom.stats import conjugate


@dataclass(frozen=True, eq=False)
class Sequences:
    """The labels of each prompt in their order, as an observer sees them.

    Attributes:
        labels: the label of each observation, in the order of the prompt; padded with -1.
        exact: exact log-probability of each label as the next one, nats.
    """

    labels: Int[np.ndarray, "prompt k"]
    exact: Float[np.ndarray, "prompt label"]

    def take(self, rows: np.ndarray) -> Self:
        """A subset of the prompts."""
        return replace(self, **{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    @cached_property
    def k(self) -> Int[np.ndarray, " prompt"]:
        """The number of labels shown."""
        return (self.labels >= 0).sum(1)

    @cached_property
    def age(self) -> Int[np.ndarray, "prompt k"]:
        """The number of later labels; 0 for padding."""
        return np.maximum(self.k[:, None] - 1 - np.arange(self.labels.shape[1]), 0)


def labels_and_exact(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """The first two fields of `Sequences`, from a batch with the column `seen`."""
    rows = [[int(label) for label in row] for row in batch.columns["seen"]]
    labels = np.full((len(rows), max(map(len, rows))), -1)
    for into, row in zip(labels, rows, strict=True):
        into[: len(row)] = row
    return labels, batch.exact.predictive[:, -1].double().numpy()


@dataclass(frozen=True, eq=False)
class Shown(Sequences):
    """The labels and stated numbers of each prompt with two labels, 0 the first and 1 the second.

    Attributes:
        reliability: the reliability that the prompt states; nan if it states none.
        prior: the prior probability of the first label that it states; nan if it states none.
    """

    reliability: Float[np.ndarray, " prompt"]
    prior: Float[np.ndarray, " prompt"]

    @classmethod
    def of(cls, batch: Batch) -> Shown:
        """Sequences of a batch with the column `seen` and, if stated, `reliability` and `prior` (in tenths)."""
        absent = (np.nan,) * len(batch)
        stated = (np.array(batch.columns.get(name, absent), dtype=float) / 10 for name in ("reliability", "prior"))
        return cls(*labels_and_exact(batch), *stated)

    @classmethod
    def joined(cls, several: Sequence[Shown]) -> Shown:
        """The prompts of several, one after another."""
        width = max(shown.labels.shape[1] for shown in several)
        padded = [np.pad(s.labels, ((0, 0), (0, width - s.labels.shape[1])), constant_values=-1) for s in several]
        others = ([getattr(one, name) for one in several] for name in ("exact", "reliability", "prior"))
        return cls(np.concatenate(padded), *map(np.concatenate, others))

    @cached_property
    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """[prompt] and [prompt] the counts of the first and of the second label."""
        return (self.labels == 0).sum(1), (self.labels == 1).sum(1)

    @cached_property
    def signs(self) -> np.ndarray:
        """[prompt k] 1 for the first label, -1 for the second, 0 for padding."""
        return np.select([self.labels == 0, self.labels == 1], [1.0, -1.0], 0.0)

    @property
    def answers(self) -> np.ndarray:
        """[prompt] exact P(first)."""
        return np.exp(self.exact[:, 0])

    @cached_property
    def cells(self) -> np.ndarray:
        """[prompt] the value of the sufficient statistic: both counts and, if stated, reliability and prior."""
        parts = [*self.counts, np.nan_to_num(self.reliability, nan=-1.0), np.nan_to_num(self.prior, nan=-1.0)]
        return np.unique(np.stack(parts, 1), axis=0, return_inverse=True)[1].ravel()

    @property
    def stated(self) -> bool:
        """Whether every prompt states its reliability."""
        return bool(np.isfinite(self.reliability).all())


@dataclass(frozen=True)
class Observer:
    """A rule for P(first label), with parameters that are fitted to the model's predictions.

    Attributes:
        bayesian: whether the rule is Bayes' rule under some prior.
        rule: (sequences, parameters ...) -> P(first) [prompt], or P(label) [prompt label].
        names: names of the parameters. start, bounds: first guess and range of each.
        nests: whether it is a Bayesian rule with an additional parameter, such as a discount. It is no rival, since it
            predicts at least as well; its parameter measures the distance of the model from Bayes' rule.
    """

    name: str
    bayesian: bool
    rule: Callable[..., np.ndarray]
    names: tuple[str, ...] = ()
    start: tuple[float, ...] = ()
    bounds: tuple[tuple[float, float], ...] = ()
    nests: bool = False


# ---- Bayesian -------------------------------------------------------------------------------------------------------


def _beta(shown: Shown, a: float, b: float) -> np.ndarray:
    return np.exp(conjugate.beta_bernoulli(*shown.counts, a, b)[:, 0])


def _two_point(shown: Shown, reliability: float | np.ndarray) -> np.ndarray:
    """r P + (1 - r)(1 - P), P the belief: log odds of the prior plus (n1 - n2) log(r / (1 - r))."""
    prior = np.where(np.isfinite(shown.prior), shown.prior, 0.5)
    belief = expit(logit(prior) + np.subtract(*shown.counts) * logit(reliability))
    return reliability * belief + (1 - reliability) * (1 - belief)


def _misread(shown: Shown, weight: float) -> np.ndarray:
    """Two-point with the stated log odds of the reliability multiplied by a weight."""
    return _two_point(shown, expit(weight * logit(shown.reliability)))


def _mistrusted(shown: Shown, weight: float, trust: float) -> np.ndarray:
    """`_misread` with the stated log odds of the prior multiplied by a weight, too."""
    return _misread(replace(shown, prior=expit(trust * logit(shown.prior))), weight)


def _two_shares(shown: Shown, one: float, other: float, prior: float) -> np.ndarray:
    """The share of first labels is `one` with probability `prior`, or else `other`."""
    n1, n2 = shown.counts
    belief = expit(logit(prior) + n1 * np.log(one / other) + n2 * np.log((1 - one) / (1 - other)))
    return one * belief + other * (1 - belief)


# ---- others ---------------------------------------------------------------------------------------------------------


def _weighed(
    shown: Shown, slope: float, bias: float, lapse: float = 0.0, discount: float = 1.0, primacy: bool = False
) -> np.ndarray:
    """lapse + (1 - 2 lapse) / (1 + exp(-bias - slope sum_i w_i x_i)), x_i = 1 or -1 for label i, and w_i the discount
    to the power of the number of later labels or, with `primacy`, of earlier ones."""
    weight = discount ** (np.arange(shown.labels.shape[1]) if primacy else shown.age)
    return lapse + (1 - 2 * lapse) * expit(bias + slope * (weight * shown.signs).sum(1))


def _forgetting_shares(shown: Shown, discount: float, before: float) -> np.ndarray:
    """(before + sum of discount^age over first labels) / (2 before + sum over all)."""
    weight = discount**shown.age * (shown.labels >= 0)
    return (before + (weight * (shown.labels == 0)).sum(1)) / (2 * before + weight.sum(1))


def _majority(shown: Shown, error: float) -> np.ndarray:
    return 0.5 + (0.5 - error) * np.sign(np.subtract(*shown.counts))


def _copy_last(shown: Shown, error: float) -> np.ndarray:
    final = shown.labels[np.arange(len(shown.labels)), shown.k - 1]
    return np.where(final == 0, 1 - error, error)


def _copy_random(shown: Shown, error: float) -> np.ndarray:
    return error + (1 - 2 * error) * shown.counts[0] / np.maximum(shown.k, 1)


def _constant(shown: Shown, p: float) -> np.ndarray:
    return np.full(len(shown.labels), p)


SHARE, COUNT, SLOPE, BIAS = (1e-3, 0.499), (1e-2, 50.0), (-6.0, 6.0), (-4.0, 4.0)
LAPSE, DISCOUNT = (0.0, 0.45), (0.0, 1.5)  # above 1, earlier labels weigh more; an interval may include values above 1
SATURATING, FORGETTING = "saturating counter", "forgetting"
WEIGHED, PRIMACY = ("slope", "bias", "lapse", "discount"), partial(_weighed, primacy=True)
ALWAYS = (
    Observer("exact", True, lambda shown: shown.answers),
    Observer("two-point 0.9", True, lambda shown: _two_point(shown, 0.9)),
    Observer("Beta(1, 1)", True, lambda shown: _beta(shown, 1.0, 1.0)),
    Observer("KT, Beta(1/2, 1/2)", True, lambda shown: _beta(shown, 0.5, 0.5)),
    Observer("fitted Beta", True, _beta, ("a", "b"), (1.0, 1.0), (COUNT, COUNT)),
    Observer("fitted reliability", True, _two_point, ("reliability",), (0.8,), ((0.501, 0.999),)),
    Observer("logit-linear counter", False, _weighed, WEIGHED[:2], (0.5, 0.0), (SLOPE, BIAS)),
    Observer(SATURATING, False, _weighed, WEIGHED[:3], (1.0, 0.0, 0.1), (SLOPE, BIAS, LAPSE)),
    Observer(FORGETTING, False, _weighed, WEIGHED, (1.0, 0.0, 0.1, 0.8), (SLOPE, BIAS, LAPSE, DISCOUNT)),
    Observer("primacy", False, PRIMACY, WEIGHED, (1.0, 0.0, 0.1, 0.8), (SLOPE, BIAS, LAPSE, (0.0, 1.0))),
    Observer("forgetting shares", False, _forgetting_shares, ("discount", "before"), (0.6, 1.0), ((0.0, 1.0), COUNT)),
    Observer("majority", False, _majority, ("error",), (0.2,), (SHARE,)),
    Observer("copy-last", False, _copy_last, ("error",), (0.2,), (SHARE,)),
    Observer("copy-random", False, _copy_random, ("error",), (0.1,), ((0.0, 0.499),)),
    Observer("indifferent", False, lambda shown: _constant(shown, 0.5)),
    Observer("constant", False, _constant, ("p",), (0.5,), ((1e-3, 0.999),)),
)
EXACT = ALWAYS[0]
WHERE_STATED = (Observer("stated reliability, weighed", True, _misread, ("weight",), (1.0,), ((0.05, 5.0),)),)

# An observer with a fixed prior over the share of first labels is a martingale and ignores order. Such priors are
# two-point, Beta, and their limit, a constant.
CHANCE = (1e-3, 0.999)
COHERENT = (
    *(rule for rule in ALWAYS if rule.bayesian),
    ALWAYS[-1],
    Observer("two shares", True, _two_shares, ("one", "other", "prior"), (0.8, 0.3, 0.5), (CHANCE, CHANCE, CHANCE)),
)
COHERENT_WHERE_STATED = (
    *COHERENT,
    Observer("stated, weighed", True, _mistrusted, ("weight", "trust"), (1.0, 1.0), ((0.0, 5.0), (0.0, 5.0))),
)


def observers(shown: Shown) -> tuple[Observer, ...]:
    """Every observer that can read these prompts.

    If prompts state their reliability, an observer that ignores it is not Bayesian, whatever its rule.
    """
    if not shown.stated:
        return ALWAYS
    return (EXACT, *WHERE_STATED, *(replace(rule, bayesian=False) for rule in ALWAYS[1:]))
