"""The rule of a claim, declared before anything is measured, and the word that it gives an estimate, with its reason.

docs/claims.md states the rule and its error rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Literal

from llmgeom.stats.tests import Scale, Side

ALPHA = 0.025  # one-sided level of every test behind a verdict
BEATEN_P = 0.05  # "ruled out" says that a control is not beaten: its p, uncorrected, is at least this
NO_END = -1e9  # of a range that has no lower end: an Estimate holds finite numbers
LEAST_DRAWS = 5  # draws of a control; fewer do not estimate its spread
NO_MORE = "more data will not help"  # of claims that no sample size decides
Word = Literal["holds", "small", "ruled out", "opposite", "open"]
Judged = Any  # an `llmgeom.result.Estimate`, which this folder does not import


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The rule that decides a verdict, declared before anything is measured.

    Attributes:
        side: "upper": the claim says that the value lies above its controls; "lower": below them.
        effect: The smallest difference from a control's centre that is of interest.
        needed: How a plan models the sampling error of the value: as that of a mean or of a rank correlation.
        scale: The scale on which draws of the statistic are closest to normal: see `on_scale`.
        equivalence: The claim says that there is no effect: the value lies within `margin` of its control's centre; if
            `one_sided`, at most that far above it.
        least, most: The range of the metric; infinite where it has no end.
    """

    side: Side
    needed: Literal["mean", "correlation"]
    effect: float = 0.0
    scale: Scale = "identity"
    equivalence: bool = False
    one_sided: bool = False
    margin: float = 0.0
    least: float = -math.inf
    most: float = math.inf

    @property
    def smallest(self) -> float:
        """The smallest difference of interest: the effect, or an equivalence claim's margin."""
        return self.margin if self.equivalence else self.effect

    def room(self, centre: float) -> bool:
        """Whether a control's centre plus the effect, on the metric's scale, is a value that the metric can have."""
        end = self.end(centre)
        if self.scale == "log" and end <= 0 < centre:
            return False
        return self.least <= end <= self.most and (self.scale not in ("fisher", "folded") or abs(end) < 1)

    def end(self, centre: float) -> float:
        """The declared effect, counted from a control's centre."""
        return centre + (self.effect if self.side == "upper" else -self.effect)


# ---- the five words --------------------------------------------------------------------------------------------------


def word(h: Judged, claims: int) -> tuple[Word, str]:
    """One of the five words and its reason, for a claim whose p-values are corrected over this many claims.

    opposite   the value lies beyond every control on the other side (corrected p < .025).
    small      the hardest control is beaten (corrected p < .025), and the declared effect is excluded (p < .025), or no
               value of the metric lies that far from the control.
    holds      the hardest control is beaten, the declared effect is not excluded.
    ruled out  the hardest control is not beaten (p >= .05, uncorrected), and the declared effect is excluded (corrected
               p < .025); without room for it, any effect is: the value lies on the control's other side.
    open       anything else; `because` says why.
    """
    if h.equivalence:
        return _equivalence_word(h, claims)
    way, other = ("above", "below") if h.side == "upper" else ("below", "above")
    value, effect = _difference(h) if h.paired else _interval(h), _effect(h)
    beaten = f"{value} lies {way} {_against(h, claims)}, p = {h.adjusted:.2g} {_corrected(claims)}"
    if h.adjusted_opposite < ALPHA:
        where = f"0, and the value {other} every other control" if h.paired else "every control"
        return "opposite", f"{value} lies {other} {where}, p = {h.adjusted_opposite:.2g} {_corrected(claims)}"
    if h.adjusted < ALPHA:
        if not h.room:
            return "small", f"{beaten}; there is no room for the claimed effect: this metric cannot reach {_end(h):.3g}"
        if h.p_excluded < ALPHA:
            return "small", f"{beaten}; the claimed effect ({effect}) is excluded, p = {h.p_excluded:.2g}"
        return "holds", beaten
    if h.p >= BEATEN_P and h.adjusted_excluded < ALPHA:
        tested = f"p = {h.adjusted_excluded:.2g} {_corrected(claims)}"
        if not h.room:
            return (
                "ruled out",
                f"{value} lies {other} {'0' if h.paired else _control(h)}, {tested}: no n can make it hold",
            )
        return "ruled out", f"{value} excludes the claimed effect ({effect}), {tested}"
    where = "0" if h.paired else _against(h, claims)
    return (
        "open",
        f"{value} is not clearly {way} {where}, p = {h.adjusted:.2g} {_corrected(claims)}; {because(h, claims)}",
    )


def _equivalence_word(h: Judged, claims: int) -> tuple[Word, str]:
    """holds, ruled out or open: a claim of no effect has no other side, and no effect that could be small."""
    span = f"{'the range up' if h.margin_low == NO_END else f'{h.margin_low:.3g}'} to {h.margin:.3g}"
    if h.adjusted < ALPHA:
        return "holds", f"{_interval(h)} stays within {span}, p = {h.adjusted:.2g} {_corrected(claims)}"
    if h.adjusted_excluded < ALPHA:
        return "ruled out", f"{_interval(h)} lies outside {span}, p = {h.adjusted_excluded:.2g} {_corrected(claims)}"
    over = h.low <= h.margin <= h.high or h.low <= h.margin_low <= h.high
    where = "reaches beyond an end of" if over else "is neither clearly inside nor clearly outside"
    return "open", f"{_interval(h)} {where} {span}, p = {h.adjusted:.2g} {_corrected(claims)}; {because(h, claims)}"


def _corrected(claims: int) -> str:
    return f"by Holm over {claims} claim{'s' * (claims > 1)}"


def _control(h: Judged) -> str:
    return f"{h.null}, {h.centre:.3g}"


def _against(h: Judged, claims: int) -> str:
    """The control with its hurdle, where it has enough draws for one; of a paired one the difference 0."""
    if h.paired:
        return "0"
    over = h.value > h.margin if h.side == "upper" else h.value < h.margin
    alone = " for this claim alone" * (over and h.adjusted >= ALPHA)  # Holm's correction raises it
    known = h.draws == 0 or not too_few(h.draws)  # of fewer draws no value is a hurdle
    return _control(h) + f" (hurdle {h.margin:.3g}{alone})" * known


def _end(h: Judged) -> float:
    return h.centre + h.effect if h.side == "upper" else h.centre - h.effect


def _effect(h: Judged) -> str:
    return f"{h.effect:.3g}" if h.paired else f"{h.centre:.3g} {'+' if h.side == 'upper' else '-'} {h.effect:.3g}"


def _interval(h: Judged) -> str:
    if h.high - h.low >= -NO_END:
        return f"{h.value:.3g}, which has no interval,"
    return f"{h.value:.3g} [{h.low:.3g}, {h.high:.3g}]"


def _difference(h: Judged) -> str:
    """Value minus control on the same prompts, which varies less than the value alone."""
    interval = f"[{h.difference_low:.3g}, {h.difference_high:.3g}]"
    return f"the difference from {h.null} ({h.centre:.3g}) on the same prompts, {h.value - h.centre:.3g} {interval},"


# ---- open claims -----------------------------------------------------------------------------------------------------


class Reason(Enum):
    """Why a claim is open."""

    LACK = auto()  # it would be open whatever its p: `Estimate.lacks`
    DRAWS = auto()  # the control has too few draws
    LESS = auto()  # the claimed effect is excluded; whether a control is beaten, or Holm's correction, leaves it open
    ROOM = auto()  # the metric has no value as far from the control as the claimed effect
    NEVER = auto()  # no number of clusters decides, as the control's own draws differ too much
    SOURCE = auto()  # the source of the prompts has fewer clusters than `Estimate.needed`
    CLUSTERS = auto()  # there are fewer clusters than `Estimate.needed`
    CHANCE = auto()  # there are enough for the claimed effect; a smaller one is not excluded


def reason(h: Judged) -> Reason:
    """Why a claim is open: what a sentence about it must say first."""
    if h.lacks:
        return Reason.LACK
    if h.draws and too_few(h.draws):
        return Reason.DRAWS
    if not h.equivalence:
        if h.room and h.p_excluded < ALPHA:
            return Reason.LESS
        if not h.room:
            return Reason.ROOM
    if not h.needed and h.noise:
        return Reason.NEVER
    if h.clusters < h.needed:
        return Reason.SOURCE if 0 < h.available < h.needed else Reason.CLUSTERS
    return Reason.CHANCE


def because(h: Judged, claims: int, counts: str = "clusters") -> str:
    """Why a claim is open, and what would decide it if anything would; `counts` is what its clusters are."""
    match reason(h):
        case Reason.LACK:
            return "; ".join(map(str, h.lacks))
        case Reason.DRAWS:
            return f"{too_few(h.draws)}: raise --nulls"
        case Reason.LESS:
            return _less(h, claims)
        case Reason.ROOM:
            return (
                f"no room: this metric cannot reach {_end(h):.3g}, the claimed effect, and a smaller one is not shown"
            )
        case Reason.NEVER if h.averaged and h.draws:
            known = h.null_spread * h.effect * (1 + 1 / h.draws) ** 0.5
            return (
                f"{NO_MORE}: {h.draws} draws fix the mean of the control only to within {known:.2g} {h.unit}".rstrip()
            )
        case Reason.NEVER:
            return no_n(h.null_spread * h.effect, h.unit)
        case Reason.SOURCE:
            return f"no n decides here: there are no more than {h.available:,} {counts}, which are too few"
        case Reason.CLUSTERS:
            return f"needs n >= {h.needed:,} {counts} for the claimed effect of {h.effect:.3g}, has {h.clusters:,}"
    if h.equivalence:
        return f"{h.clusters:,} {counts} suffice in nine of ten runs (n >= {h.needed:,}) where there is no effect"
    return (
        f"neither no effect nor the claimed one ({_effect(h)}) is excluded (p = {h.adjusted_excluded:.2g}), though "
        f"{h.clusters:,} {counts} suffice in nine of ten runs"
    )


def _less(h: Judged, claims: int) -> str:
    """The claimed effect is excluded; what is not decided then."""
    holm = _corrected(claims)
    excluded = f"the claimed effect ({_effect(h)}) is excluded, p = {h.p_excluded:.2g}"
    if h.p >= BEATEN_P:
        return f"{excluded} for this claim alone, {h.adjusted_excluded:.2g} {holm}"
    if h.p < ALPHA:
        return f"{excluded}; a smaller one is shown for this claim alone, p = {h.p:.2g}, not {holm}"
    return f"{excluded}; whether there is a smaller one is open, p = {h.p:.2g}"


def brief(h: Judged, counts: str = "clusters") -> str:
    """Why a claim is open, in a few words."""
    match reason(h):
        case Reason.LACK:
            return h.lacks[0].brief
        case Reason.DRAWS:
            return "too few draws of the control"
        case Reason.LESS:
            alone = h.p < ALPHA or h.p >= BEATEN_P  # Holm's correction leaves it open
            return "the claimed effect is excluded" + (", by Holm undecided" if alone else ", a smaller one open")
        case Reason.ROOM:
            return f"no room {'above' if h.side == 'upper' else 'below'} the control"
        case Reason.NEVER:
            return NO_MORE
        case Reason.SOURCE:
            return f"no n here decides: {h.available:,} {counts} in all"
        case Reason.CLUSTERS:
            return f"needs {h.needed:,} {counts}"
    if h.equivalence:
        return "the interval is wider than the claim allows"
    return "no effect and the claimed one are both possible"


def number_of_draws(n: int) -> str:
    """1 draw, 2 draws."""
    return f"{n} draw{'s' * (n != 1)}"


def too_few(draws: int) -> str:
    """The sentence of a verdict and of a dry run if a control has too few draws; empty if it has enough."""
    if draws >= LEAST_DRAWS:
        return ""
    return f"a control of {number_of_draws(draws)} decides nothing; at least {LEAST_DRAWS} are needed"


def no_n(spread: float, unit: str) -> str:
    """The sentence of a verdict and of a dry run if the draws of a control differ too much for any sample size."""
    return f"{NO_MORE}: the control's own draws vary by {spread:.2g} {unit}".rstrip() + " (one standard deviation)"
