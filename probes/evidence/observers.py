"""Ways of turning labels seen into the next label's probability: Bayes' rule under several priors, and its rivals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from llmgeom.batch import Batch
from llmgeom.prompts.sula import Prior
from llmgeom.stats import conjugate as exact
from llmgeom.stats.information import bits


@dataclass(frozen=True)
class Reader:
    """A way of turning the labels seen into P(first), with parameters that are fitted to what the model says."""

    name: str
    bayesian: bool
    says: Callable[..., np.ndarray]
    start: tuple[float, ...] = ()
    bounds: tuple[tuple[float, float], ...] = ()


def readers(prior: Prior) -> tuple[Reader, ...]:
    """Exact under the prior, Bayesian under others, and not Bayesian. Each takes the labels seen, [prompt k] padded
    with -1 (0 first, 1 second), and gives P(first)."""

    def counts(seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return (seen == 0).sum(1), (seen == 1).sum(1)

    def of(rule: Callable, *fixed: float) -> Callable[..., np.ndarray]:
        return lambda seen, *fitted: np.exp(rule(*counts(seen), *(fixed or fitted))[:, 0])

    def majority(seen: np.ndarray, error: float) -> np.ndarray:
        return 0.5 + (0.5 - error) * np.sign(np.subtract(*counts(seen)))

    def last(seen: np.ndarray, error: float) -> np.ndarray:
        final = seen[np.arange(len(seen)), (seen >= 0).sum(1) - 1]
        return np.where(final == 0, 1 - error, error)

    def recent(seen: np.ndarray, keep: float, before: float) -> np.ndarray:
        age = (seen >= 0).sum(1, keepdims=True) - 1 - np.arange(seen.shape[1])
        weight = np.where(seen >= 0, keep ** np.maximum(age, 0), 0)
        return (before + (weight * (seen == 0)).sum(1)) / (2 * before + weight.sum(1))

    share, small = (1e-3, 0.499), (1e-2, 50.0)
    return (
        Reader("exact", True, lambda seen: np.exp(prior.predictive(*counts(seen))[:, 0])),
        Reader("two-point 0.9", True, of(exact.two_point, 0.9)),
        Reader("Beta(1, 1)", True, of(exact.beta_bernoulli, 1.0, 1.0)),
        Reader("KT, Beta(1/2, 1/2)", True, of(exact.beta_bernoulli, 0.5, 0.5)),
        Reader("fitted Beta", True, of(exact.beta_bernoulli), (1.0, 1.0), (small, small)),
        Reader("fitted reliability", True, of(exact.two_point), (0.8,), ((0.501, 0.999),)),
        Reader("majority", False, majority, (0.2,), (share,)),
        # Up to .8 a label: at 1 it would be a Beta prior's counting, which is Bayesian.
        Reader("recency-weighted", False, recent, (0.6, 1.0), ((0.0, 0.8), small)),
        Reader("copy-last", False, last, (0.2,), (share,)),
        Reader("unigram", False, lambda seen, p: np.full(len(seen), p), (0.5,), ((1e-3, 0.999),)),
    )


def seen(batch: Batch) -> Int[np.ndarray, "prompt k"]:
    """[prompt k] the labels of each prompt, 0 first, 1 second, padded with -1."""
    rows = [[int(one) for one in row] for row in batch.columns["seen"]]
    found = np.full((len(rows), max(map(len, rows))), -1)
    for into, row in zip(found, rows, strict=True):
        into[: len(row)] = row
    return found


def divergence(
    log_p: Float[np.ndarray, "prompt 2"], log_q: Float[np.ndarray, "prompt 2"]
) -> Float[np.ndarray, " prompt"]:
    """KL(p || q) in bits."""
    return bits((np.exp(log_p) * (log_p - log_q)).sum(-1))


def losses(
    reader: Reader,
    labels: Int[np.ndarray, "prompt k"],
    log_p: Float[np.ndarray, "prompt 2"],
    half: Bool[np.ndarray, " prompt"],
) -> Float[np.ndarray, " prompt"]:
    """[prompt] KL(model || reader) in bits; parameters fitted on the rows of the other half of the units."""
    from scipy.optimize import minimize

    def missed(rows: np.ndarray, values: Sequence[float]) -> np.ndarray:
        p = np.clip(reader.says(labels[rows], *values), 1e-9, 1 - 1e-9)
        return divergence(log_p[rows], np.log(np.stack([p, 1 - p], 1)))

    found = np.empty(len(labels))
    for held in (False, True):
        fit, out = np.flatnonzero(half != held), np.flatnonzero(half == held)
        values: Sequence[float] = reader.start
        if values:
            values = minimize(
                lambda v, fit=fit: missed(fit, v).mean(), reader.start, method="L-BFGS-B", bounds=reader.bounds
            ).x
        found[out] = missed(out, values)
    return found


def advantage(each: np.ndarray, half: np.ndarray, bayesian: Sequence[bool]) -> np.ndarray:
    """[prompt] bits by which the best other reader loses to the best Bayesian one; each [reader prompt] bits.

    The best of a kind is chosen on the prompts of one half and scored on those of the other.
    """
    gain = np.empty(each.shape[1])
    for held in (False, True):
        choose, out = half != held, half == held
        best = {
            kind: min((i for i, one in enumerate(bayesian) if one is kind), key=lambda i: each[i, choose].mean())
            for kind in (True, False)
        }
        gain[out] = each[best[False], out] - each[best[True], out]
    return gain
