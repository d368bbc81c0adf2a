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
    """What a value is held against: a name, the 95 % band, the margin its interval must clear (see `verdict`), the
    one-sided p-value with the +1 rule, and the number of draws."""

    name: str
    low: float
    high: float
    margin: float
    p: float
    draws: int

    @classmethod
    def of(cls, name: str, value: float, draws: np.ndarray, side: Side = "upper") -> Null:
        """From draws of the same statistic through the same pipeline; the interval must clear the band's near end."""
        low, high = band(draws)
        return cls(name, low, high, high if side == "upper" else low, tail_p(value, draws, side), len(draws))


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
    sign = 1 if side == "upper" else -1
    decisive = max(nulls, key=lambda null: null.high if side == "upper" else -null.low)
    margin = max(sign * null.margin for null in nulls)
    p = max(null.p for null in nulls)
    if needed is None:
        sd = max((interval.high - interval.low) / (2 * 1.96) * units**0.5, 1e-12)
        needed = needed_n_mean(effect, sd)
    if side == "upper":
        word, why = verdict(value, interval, margin, p, units, effect=effect, needed=needed)
    else:
        turned = Interval(-interval.high, -interval.low, interval.level, interval.method)
        word, why = verdict(-value, turned, margin, p, units, effect=effect, needed=needed)
        word, why = _turned(word, why, value, interval, -margin, effect, p)
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


def _turned(word, why: str, value: float, interval: Interval, margin: float, effect: float, p: float):
    """The words for a claim that a value lies below its null."""
    found = f"{value:.3g} [{interval.low:.3g}, {interval.high:.3g}]"
    if word == "above null":
        return "below null", f"the interval of {found} stays under {margin:.3g}, p = {p:.2g}"
    if word == "not above null":
        return "not below null", f"the interval of {found} excludes {margin:.3g} - {effect:.3g}, the effect of interest"
    return word, why


def layer_band(draws: Mapping[str, np.ndarray], side: Side = "upper") -> np.ndarray:
    """The deciding null's band at every layer, [layer bound], from name -> [draw layer]."""
    layers = next(iter(draws.values())).shape[1]
    return np.array(
        [larger_band({name: values[:, layer] for name, values in draws.items()}, side)[1:] for layer in range(layers)]
    )
