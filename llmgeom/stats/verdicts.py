"""Five words for claims: numbers in, a word and a reason out. docs/claims.md states the rule and its error rates."""

from __future__ import annotations

from typing import Literal, Protocol

from llmgeom.stats.power import Setting, needed
from llmgeom.stats.rule import ALPHA, LEAST_DRAWS
from llmgeom.stats.tests import Side

BEATEN_P = 0.05  # "ruled out" says that a control is not beaten: its p, uncorrected, is at least this
Word = Literal["holds", "small", "ruled out", "opposite", "open"]
NO_MORE = "more data will not help"  # of claims that no sample size decides
NO_END = -1e9  # of a range that has no lower end: an Estimate holds finite numbers


class Numbers(Protocol):
    """What the rule reads of an estimate: see `result.Estimate`."""

    @property
    def value(self) -> float: ...

    @property
    def low(self) -> float: ...

    @property
    def high(self) -> float: ...

    @property
    def side(self) -> Side: ...

    @property
    def centre(self) -> float: ...

    @property
    def margin(self) -> float: ...

    @property
    def margin_low(self) -> float: ...

    @property
    def effect(self) -> float: ...

    @property
    def unit(self) -> str: ...

    @property
    def null(self) -> str: ...

    @property
    def equivalence(self) -> bool: ...

    @property
    def room(self) -> bool: ...

    @property
    def p(self) -> float: ...

    @property
    def p_excluded(self) -> float: ...

    @property
    def p_opposite(self) -> float: ...

    @property
    def paired(self) -> bool: ...

    @property
    def difference_low(self) -> float: ...

    @property
    def difference_high(self) -> float: ...

    @property
    def adjusted(self) -> float: ...

    @property
    def adjusted_excluded(self) -> float: ...

    @property
    def adjusted_opposite(self) -> float: ...

    @property
    def clusters(self) -> int: ...

    @property
    def needed(self) -> int: ...

    @property
    def noise(self) -> float: ...

    @property
    def null_spread(self) -> float: ...

    @property
    def draws(self) -> int: ...

    @property
    def noisy(self) -> bool: ...


def word(h: Numbers, claims: int) -> tuple[Word, str]:
    """One of the five words and its reason, for a claim whose p-values are corrected over this many claims.

    opposite   the value lies beyond every control on the other side (corrected p < .025).
    open       there is no room: the control's centre and the effect together are no value of the metric.
    small      the hardest control is beaten (corrected p < .025), the declared effect is excluded (p < .025).
    holds      the hardest control is beaten, the declared effect is not excluded.
    ruled out  the hardest control is not beaten (p >= .05, uncorrected), the effect is excluded (corrected p < .025).
    open       anything else.
    """
    holm = f"by Holm over {claims} claim{'s' * (claims > 1)}"
    if h.equivalence:
        return _equivalence_word(h, holm)
    way, other, plus = ("above", "below", "+") if h.side == "upper" else ("below", "above", "-")
    measured = _difference(h) if h.paired else _interval(h)
    end = h.centre + h.effect if h.side == "upper" else h.centre - h.effect
    effect = f"{h.effect:.3g}" if h.paired else f"{h.centre:.3g} {plus} {h.effect:.3g}"
    over = h.value > h.margin if h.side == "upper" else h.value < h.margin
    alone = " for this claim alone" * (over and h.adjusted >= ALPHA)  # Holm's correction raises it
    control = f"{h.null}, {h.centre:.3g} (hurdle {h.margin:.3g}{alone})"
    tested = f"p = {h.adjusted:.2g} {holm}"
    shown = f"{measured} lies {way} {'0' if h.paired else control}, {tested}"
    if h.adjusted_opposite < ALPHA:
        where = f"0, and the value {other} every other control" if h.paired else "every control"
        return "opposite", f"{measured} lies {other} {where}, p = {h.adjusted_opposite:.2g} {holm}"
    if not h.room:
        beaten = f"; {shown}" if h.adjusted < ALPHA else ""
        summed = "plus" if h.side == "upper" else "less"
        return "open", f"no room: this metric cannot reach {end:.3g}, the control {summed} the claimed effect{beaten}"
    if h.adjusted < ALPHA:
        if h.p_excluded < ALPHA:
            return "small", f"{shown}; the claimed effect ({effect}) is excluded, p = {h.p_excluded:.2g}"
        return "holds", shown
    if h.p >= BEATEN_P and h.adjusted_excluded < ALPHA:
        excluded = f"excludes the claimed effect ({effect}), p = {h.adjusted_excluded:.2g} {holm}"
        return "ruled out", f"{measured} {excluded}"
    return "open", (
        f"{measured} is not clearly {way} {'0' if h.paired else control}, {tested}, and the claimed effect "
        f"({effect}) is still possible (p = {h.adjusted_excluded:.2g}); {_wanted(h)}"
    )


def _equivalence_word(h: Numbers, holm: str) -> tuple[Word, str]:
    """holds, ruled out or open: a claim of no effect has no other side, and no effect that could be small."""
    span = f"{'the range up' if h.margin_low == NO_END else f'{h.margin_low:.3g}'} to {h.margin:.3g}"
    if h.adjusted < ALPHA:
        return "holds", f"{_interval(h)} stays within {span}, p = {h.adjusted:.2g} {holm}"
    if h.adjusted_excluded < ALPHA:
        return "ruled out", f"{_interval(h)} lies outside {span}, p = {h.adjusted_excluded:.2g} {holm}"
    over = h.low <= h.margin <= h.high or h.low <= h.margin_low <= h.high
    where = "reaches beyond an end of" if over else "is neither clearly inside nor clearly outside"
    return "open", f"{_interval(h)} {where} {span}, p = {h.adjusted:.2g} {holm}; {_wanted(h)}"


def _interval(h: Numbers) -> str:
    return f"{h.value:.3g} [{h.low:.3g}, {h.high:.3g}]"


def _difference(h: Numbers) -> str:
    """Value less control, where both are of the same prompts: it varies less than the value alone."""
    interval = f"[{h.difference_low:.3g}, {h.difference_high:.3g}]"
    return f"the difference from {h.null} ({h.centre:.3g}) on the same prompts, {h.value - h.centre:.3g} {interval},"


def units_needed(h: Numbers, claims: int) -> int:
    """Clusters at which the declared effect, where it is there, holds with 90 % power; 0 where no number does."""
    if not h.noise:
        return h.needed
    return needed(Setting(h.noise, h.null_spread, h.draws, h.noisy, claims, _sides(h))) or 0


def _sides(h: Numbers) -> int:
    return 2 if h.equivalence and h.margin_low != NO_END else 1


def _wanted(h: Numbers) -> str:
    if 0 < h.draws < LEAST_DRAWS:
        return too_few(h.draws)
    if not h.needed and h.noise and h.equivalence and h.draws:
        known = h.null_spread * h.effect * (1 + 1 / h.draws) ** 0.5
        return f"{NO_MORE}: {h.draws} draws fix the mean of the control only to within {known:.2g} {h.unit}".rstrip()
    if not h.needed and h.noise:
        return no_n(h.null_spread * h.effect, h.unit)
    if h.clusters < h.needed:
        return f"needs n >= {h.needed} clusters for the claimed effect of {h.effect:.3g}, has {h.clusters}"
    return f"{h.clusters} clusters suffice for the claimed effect (n >= {h.needed}); a smaller one is not excluded"


def too_few(draws: int) -> str:
    """The sentence of a verdict and of a dry run where a control has too few draws."""
    return f"a control of {draws} draws decides nothing; at least {LEAST_DRAWS} are needed: raise --nulls"


def no_n(spread: float, unit: str) -> str:
    """The sentence of a verdict and of a dry run where the draws of a control differ too much for any sample size."""
    return f"{NO_MORE}: the control's own draws vary by {spread:.2g} {unit}".rstrip() + " (one standard deviation)"
