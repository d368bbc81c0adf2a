"""Divergence from the exact answer query by query, and what becomes of it past the last query that was trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypedDict

import numpy as np
from jaxtyping import Float

from llmgeom.claims import Null, declared, estimate, layer_band
from llmgeom.result import Estimate, Figure, Result, quantity
from llmgeom.stats.resampling import Transform, jackknife, mean_intervals

UNTRAINED = "The same model re-initialised, on the same sequences."
AS_EXACT = 1e-6  # bits: a predictor this near to the exact answer is it; float32 alone costs 1e-7
LEARNT = 0.5  # of a trivial predictor's error: with more than that left there is little that could be carried on
CLIFF = "length_cliff"
RATIO, LATER = "first query past the horizon, over those within", "last queries past the horizon, over those within"


# ---- results --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Graded(Result):
    """What every result here has."""

    estimates: tuple[Estimate, ...]
    ticks: Mapping[str, tuple]
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Curves(Graded):
    """Divergence query by query."""

    kl: np.ndarray = quantity(
        "query",
        "bits",
        "KL(exact || model), mean over sequences",
        Figure("curve", band="kl_null", interval="kl_interval", beside="kl_trivial"),
    )
    kl_interval: np.ndarray = quantity("query bound", "bits", "95 % interval over sequences")
    kl_null: np.ndarray = quantity("query bound", "bits", "band of the re-initialised model")
    kl_trivial: np.ndarray = quantity("query", "bits", "the best trivial predictor")


@dataclass(frozen=True, kw_only=True)
class Horizon(Curves):
    """What happens at queries later than any that a loss was on."""

    TITLE: ClassVar[str] = "Past the horizon"
    MEANING: ClassVar[str] = (
        "Queries up to the horizon were trained on, later ones never. Whoever found the rule goes on; a ratio under 2 "
        "at the first query past the horizon is what the papers would call an algorithm. The error often stays low for "
        "one query more and rises after it: read the last queries too."
    )
    COMPUTED: ClassVar[str] = (
        "KL(exact || model) at all queries, over the whole vocabulary. The ratios are of means over sequences, of the "
        "first query past the horizon, and of the last half of those past it, to all within; jackknifed over "
        "sequences on the log scale."
    )
    NULL: ClassVar[str] = f"The first ratio: 1, an error that stays as it is. Else: {UNTRAINED.lower()}"
    FAILURE_MODES: ClassVar[str] = (
        "Positions that were never trained have embeddings that were never trained either: a cliff can be theirs. A "
        "ratio is large where the mean within the horizon is small, and near 1 for whoever learnt nothing: it is left "
        "out where more than half of a trivial predictor's error remains. A rule that looks at the last observation "
        "alone goes on for ever, and is no inference: read the skill of `llmgeom grade`."
    )

    within: float = quantity("", "bits", "mean KL of the queries within the horizon")
    first: float = quantity("", "bits", "mean KL of the first query past the horizon")
    plateau: float = quantity("", "bits", "mean KL of the last half of the queries past the horizon")


# ---- measuring ------------------------------------------------------------------------------------------------------

Statistic = Callable[[np.ndarray], float]


def measured(
    probe: str,
    name: str,
    statistic: Statistic,
    own: np.ndarray,
    untrained: Sequence[np.ndarray],
    transform: Transform = "identity",
) -> Estimate:
    """A statistic of rows, a sequence each, held against the same of the untrained controls."""
    claim, value, n = declared(probe)[name], statistic(own), len(own)
    null = Null.of("re-initialised", value, np.array([statistic(control) for control in untrained]), claim.side)
    return estimate(claim, value, jackknife(statistic, own, np.arange(n), transform), [null], n=n, clusters=n)


def near(
    probe: str,
    name: str,
    statistic: Statistic,
    own: np.ndarray,
    centre: float,
    null: str,
    transform: Transform = "identity",
) -> Estimate:
    """A statistic of rows, claimed to be no farther from `centre` than is declared."""
    n = len(own)
    span = jackknife(statistic, own, np.arange(n), transform)
    at = Null(null, centre, centre, centre, 1.0, 0)
    found = estimate(declared(probe)[name], statistic(own), span, [at], n=n, clusters=n)
    return replace(found, p=found.p_claim)


def mean(rows: np.ndarray) -> float:
    return float(rows.mean())


def numbered(first: int, last: int) -> dict[str, tuple]:
    return {"query": tuple(range(first, last + 1))}


class Fields(TypedDict):
    """Those of `Curves`."""

    kl: np.ndarray
    kl_interval: np.ndarray
    kl_null: np.ndarray
    kl_trivial: np.ndarray


def curves(kl: np.ndarray, untrained: Sequence[np.ndarray], trivial: np.ndarray) -> Fields:
    """From [sequence query] bits."""
    return {
        "kl": kl.mean(0),
        "kl_interval": mean_intervals(kl.T),
        "kl_null": layer_band({"re-initialised": np.stack([control.mean(0) for control in untrained])}),
        "kl_trivial": trivial.mean(0),
    }


def past(
    kl: Float[np.ndarray, "sequence query"],
    untrained: Sequence[Float[np.ndarray, "sequence query"]],
    trivial: Float[np.ndarray, "sequence query"],
    trained: int,
) -> dict[str, Any]:
    """The fields of a `Horizon`, from divergences in bits: the model's, its controls', and those of a predictor that does
    not infer. `trained` queries, the first ones, lie within the horizon, and at least one past it.

    With D(q) the mean divergence over sequences at query q and h the horizon, the first ratio is D(h + 1) over the mean
    of D(1) .. D(h), the other the mean of D over the last half past h, over the same (Paper I gives means over all
    lengths, which hide both; ratios derived here).
    """
    later = trained + (kl.shape[1] - trained) // 2

    def edge(who: np.ndarray) -> np.ndarray:
        return np.stack([who[:, :trained].mean(1), who[:, trained], who[:, later:].mean(1)], -1)

    own, others = edge(kl), [edge(control) for control in untrained]
    within, first, plateau = own.mean(0)
    beyond = [who[:, trained:].mean(1) for who in (kl, *untrained)]
    found, notes, warnings = [measured(CLIFF, "KL past the horizon", mean, beyond[0], beyond[1:])], [], []
    if within < AS_EXACT:
        notes.append("no ratio: within the horizon the answers are exact")
    elif within > LEARNT * (left := float(trivial[:, :trained].mean())):
        warnings.append(
            f"no ratio: within the horizon {within:.3g} bits remain of the {left:.3g} of a predictor that does not "
            "infer; there is little that could be carried on"
        )
    else:
        found += [
            near(CLIFF, RATIO, lambda rows: _over(rows, 1), own, 1.0, "no cliff: a ratio of 1", "log"),
            measured(CLIFF, LATER, lambda rows: _over(rows, 2), own, others, "log"),
        ]
    return {
        **curves(kl, untrained, trivial),
        "within": float(within),
        "first": float(first),
        "plateau": float(plateau),
        "estimates": tuple(found),
        "ticks": numbered(1, kl.shape[1]),
        "notes": (f"the horizon is query {trained}", *notes),
        "warnings": tuple(warnings),
    }


def _over(edge: np.ndarray, column: int) -> float:
    """A column's mean over the first's; an error that counts as none has a logarithm all the same."""
    means = edge.mean(0).clip(AS_EXACT)
    return float(means[column] / means[0])
