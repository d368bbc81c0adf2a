"""The rule that turns a value, its interval and its controls into a verdict: numbers in, a word and a reason out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from llmgeom.stats.resampling import Interval, band
from llmgeom.stats.tests import Scale, Side, equivalence_p, needed_n_correlation, needed_n_mean, tail_p

ALPHA = 0.05
NO_END = -1e9  # of a range that has no lower end: an Estimate holds finite numbers


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What decides a verdict, declared before anything is measured.

    side         "upper": the claim says that the value lies above its controls; "lower": below them.
    effect       the smallest difference from the controls that is of interest.
    needed       how the number of clusters that would decide is computed: for a mean, or for a rank correlation.
    scale        the scale on which draws of the statistic are closest to normal: see `prediction_p`.
    equivalence  the claim says that there is no effect: the value lies within `margin` of its control's centre; if
                 `one_sided`, at most that far above it.
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


class Numbers(Protocol):
    """What the rule reads of an estimate: value, interval, margin, p-values and sample size (see `result.Estimate`)."""

    value: float
    low: float
    high: float
    side: Side
    margin: float
    margin_low: float
    effect: float
    equivalence: bool
    p: float
    adjusted: float
    clusters: int
    needed: int


def clusters_needed(rule: Rule, interval: Interval, clusters: int) -> int:
    """Clusters that would decide with 90 % power; an equivalence test has two sides to win, 95 % each."""
    power = 0.95 if rule.equivalence else 0.9
    if rule.needed == "correlation":
        return needed_n_correlation(rule.smallest, power)
    sd = max((interval.high - interval.low) / (2 * 1.96) * clusters**0.5, 1e-12)
    return needed_n_mean(rule.smallest, sd, power)


def measurement_word(h: Numbers) -> tuple[str, str]:
    """Word and reason for a number that is no claim."""
    if h.equivalence:
        within, outside = _range(h)
        if within:
            return "not above null", f"the interval of {_interval(h)} stays within {_hurdle(h)}"
        if outside:
            word = "above null" if h.low > h.margin else "below null"
            return word, f"the interval of {_interval(h)} lies outside {_hurdle(h)}"
        return "undecided", f"the interval of {_interval(h)} reaches over the edge of {_hurdle(h)}; {_wanted(h)}"
    clears, excluded = _against(h)
    upper = h.side == "upper"
    if clears and h.p < ALPHA:
        word, way = ("above null", "clears") if upper else ("below null", "stays under")
        return word, f"the interval of {_interval(h)} {way} {h.margin:.3g}, p = {h.p:.2g}"
    if excluded:
        why = f"the interval of {_interval(h)} excludes {_hurdle(h)}, the effect of interest"
        return "not above null" if upper else "not below null", why
    return "undecided", _wanted(h)


def claim_word(h: Numbers, claims: int) -> tuple[str, str]:
    """PASS, FAIL or INCONCLUSIVE and the reason, for a claim whose p is adjusted over this many claims."""
    tested = f"p = {h.adjusted:.2g} by Holm over {claims} claim{'s' * (claims > 1)}"
    if h.equivalence:
        clears, excluded = _range(h)
        yes, no = f"stays within {_hurdle(h)}", f"lies outside {_hurdle(h)}"
    else:
        clears, excluded = _against(h)
        yes, no = f"clears {h.margin:.3g}", f"excludes {_hurdle(h)}, the effect of interest"
    if clears and (h.equivalence or h.p < ALPHA) and h.adjusted < ALPHA:
        small = "" if h.equivalence or not excluded else f"; an effect of {h.effect:.3g} is excluded: it is a small one"
        return "PASS", f"the interval of {_interval(h)} {yes}, {tested}{small}"
    if excluded:
        return "FAIL", f"the interval of {_interval(h)} {no}, {tested}"
    lacking = f"reaches over the edge of {_hurdle(h)}" if h.equivalence else f"does not clear {h.margin:.3g}"
    return "INCONCLUSIVE", ("" if clears else f"the interval of {_interval(h)} {lacking}, ") + f"{tested}; {_wanted(h)}"


def _against(h: Numbers) -> tuple[bool, bool]:
    """Whether the interval clears the margin, and whether it excludes the effect of interest."""
    if h.side == "upper":
        return h.low > h.margin, h.high < h.margin + h.effect
    return h.high < h.margin, h.low > h.margin - h.effect


def _range(h: Numbers) -> tuple[bool, bool]:
    """Whether the interval lies within the range of no effect, and whether it lies wholly outside."""
    return h.margin_low < h.low and h.high < h.margin, h.low > h.margin or h.high < h.margin_low


def _interval(h: Numbers) -> str:
    return f"{h.value:.3g} [{h.low:.3g}, {h.high:.3g}]"


def _hurdle(h: Numbers) -> str:
    """What the interval is compared with, effect included."""
    if h.equivalence:
        return f"{'the range up' if h.margin_low == NO_END else f'{h.margin_low:.3g}'} to {h.margin:.3g}"
    return f"{h.margin:.3g} {'+' if h.side == 'upper' else '-'} {h.effect:.3g}"


def _wanted(h: Numbers) -> str:
    if h.clusters < h.needed:
        return f"needs n >= {h.needed} units for the declared effect of {h.effect:.3g}, has {h.clusters}"
    return f"{h.clusters} units suffice for the declared effect (n >= {h.needed}); a smaller one is not excluded"
