"""From a value, its interval and its nulls to a headline with a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from llmgeom.result import Headline
from llmgeom.stats import Interval, band, larger_band, needed_n_mean, tail_p, verdict

Side = Literal["upper", "lower"]


@dataclass(frozen=True)
class Null:
    """What a value is held against: a name, the 95 % band, the one-sided p-value with the +1 rule, and the draws."""

    name: str
    low: float
    high: float
    p: float
    draws: int

    @classmethod
    def of(cls, name: str, value: float, draws: np.ndarray, side: Side = "upper") -> Null:
        """From draws of the same statistic through the same pipeline."""
        return cls(name, *band(draws), tail_p(value, draws, side), len(draws))


def headline(
    name: str,
    value: float,
    unit: str,
    interval: Interval,
    nulls: Sequence[Null],
    *,
    n: int,
    units: int,
    effect: float,
    needed: int | None = None,
    side: Side = "upper",
) -> Headline:
    """A Headline whose verdict comes from the null hardest to beat: each must be, so p is the largest of theirs.

    effect   the smallest difference from the null that is of interest, declared by the probe, in `unit`; it alone
             decides `needed`, how many units would settle an undecided case (given here where it is not a mean's).
    side     "lower" where the claim is that the value is below its null (e.g. a participation ratio).
    """
    decisive = max(nulls, key=lambda null: null.high if side == "upper" else -null.low)
    p = max(null.p for null in nulls)
    if needed is None:
        sd = max((interval.high - interval.low) / (2 * 1.96) * units**0.5, 1e-12)
        needed = needed_n_mean(effect, sd)
    if side == "upper":
        word, why = verdict(value, interval, (decisive.low, decisive.high), p, units, needed)
    else:
        turned = Interval(-interval.high, -interval.low, interval.level, interval.method)
        word, why = verdict(-value, turned, (-decisive.high, -decisive.low), p, units, needed)
        word, why = _turned(word, why, value, interval, decisive.low, p)
    return Headline(
        name=name,
        value=float(value),
        unit=unit,
        low=interval.low,
        high=interval.high,
        method=interval.method,
        null_low=decisive.low,
        null_high=decisive.high,
        null=f"{decisive.name} ({decisive.draws} draws)",
        p=float(p),
        n=n,
        units=units,
        verdict=word,
        why=why,
    )


def _turned(word, why: str, value: float, interval: Interval, low: float, p: float):
    """The words for a claim that a value lies below its null."""
    found = f"{value:.3g} [{interval.low:.3g}, {interval.high:.3g}]"
    if word == "above null":
        return "below null", f"the interval of {found} stays under the null's {low:.3g} and p = {p:.2g}"
    if word == "not above null":
        return "not below null", f"the interval of {found} starts above the null's {low:.3g}"
    return word, why


def layer_band(draws: Mapping[str, np.ndarray], side: Side = "upper") -> np.ndarray:
    """The deciding null's band at every layer, [layer bound], from name -> [draw layer]."""
    layers = next(iter(draws.values())).shape[1]
    return np.array(
        [larger_band({name: values[:, layer] for name, values in draws.items()}, side)[1:] for layer in range(layers)]
    )
