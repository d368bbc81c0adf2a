"""The rule that turns a value, its interval and its controls into a verdict: numbers in, a word and a reason out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from llmgeom.stats.resampling import Interval, band
from llmgeom.stats.tests import Scale, Side, equivalence_p, tail_p

ALPHA = 0.05


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What decides a verdict, declared before anything is measured.

    side         "upper": the claim says that the value lies above its controls; "lower": below them.
    effect       the smallest difference from the controls that is of interest.
    needed       how the number of clusters that would decide is computed: for a mean, or for a rank correlation.
    scale        the scale on which draws of the statistic are closest to normal: see `prediction_p`.
    equivalence  the claim says that there is no effect: the value lies within `margin` of its control's centre; if it is
                 also `one_sided`, at most that far above it.
    """

    side: Side
    needed: Literal["mean", "correlation"]
    effect: float = 0.0
    scale: Scale = "identity"
    equivalence: bool = False
    one_sided: bool = False
    margin: float = 0.0

    @property
    def smallest(self) -> float:
        """The smallest difference of interest: the effect, or an equivalence claim's margin."""
        return self.margin if self.equivalence else self.effect


@dataclass(frozen=True)
class Null:
    """A control that a value is compared with: its 95 % band, what the interval must clear, the one-sided p-value with
    the +1 rule, and the number of draws.

    margin  the far end of a control that differs in the training alone (untrained models on the same prompts), or the
            centre of a control whose p already carries the sampling noise (0 for a permuted correlation): an interval
            that had to clear the far end of the latter would count that noise twice.
    sample  the draws, where they are of the same statistic through the same pipeline, with the side they were compared
            on; empty for a permutation control, whose p is fine enough as it is.
    """

    name: str
    low: float
    high: float
    margin: float
    p: float
    draws: int
    sample: tuple[float, ...] = ()
    side: Side = "upper"

    @classmethod
    def of(cls, name: str, value: float, draws: np.ndarray, side: Side = "upper") -> Null:
        """From draws of the same statistic through the same pipeline; the interval must clear the band's near end."""
        low, high = band(draws)
        margin = high if side == "upper" else low
        return cls(name, low, high, margin, tail_p(value, draws, side), len(draws), tuple(map(float, draws)), side)

    @classmethod
    def half(cls, value: float, interval: Interval, clusters: int) -> Null:
        """The number one half, which the share of a majority exceeds, with Student's p."""
        return cls("one half", 0.5, 0.5, 0.5, equivalence_p(value, interval, 0.5, np.inf, clusters), 0)

    @property
    def centre(self) -> float:
        """The middle of the control: the median of its draws, or of its band."""
        return float(np.median(self.sample)) if self.sample else (self.low + self.high) / 2
