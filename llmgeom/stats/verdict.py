"""What a claim declares before anything is measured, and the word that its rule gives an estimate, with the reason.

docs/claims.md states the rule and its error rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from llmgeom.stats.tests import Scale, Side

ALPHA = 0.025  # one-sided level of every test behind a verdict
BEATEN_P = 0.05  # "ruled out" says that a control is not beaten: its p, uncorrected, is at least this
NO_END = -1e9  # of a range that has no lower end: an Estimate holds finite numbers
LEAST_DRAWS = 5  # draws of a control; fewer do not estimate its spread
CORRELATIONS = {"folded": (0.0, 1.0), "fisher": (-1.0, 1.0)}  # scale -> the values that a metric on it can have
Word = Literal["holds", "small", "ruled out", "opposite", "open"]
Judged = Any  # an `llmgeom.result.Estimate`, which this folder does not import


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What is declared of a metric: the rule that decides its verdict, and where it is a claim its sentence.

    Attributes:
        name, unit: of the metric.
        side: "upper": the value is expected above its controls; "lower": below them.
        effect: The smallest difference from a control's centre that is of interest.
        scale: The scale on which draws of the statistic are closest to normal: see `stats.tests.on_scale`.
        equivalence: "": an effect is claimed. "within": that there is none: the value lies within `effect` of its
            controls' centres. "at most": it lies at most that far above them.
        range: The values that the metric can have.
        noun: What a sentence calls the number; empty where its name says enough.
        claim: What "holds" says, in one sentence; empty for a metric that is no claim.
        null: The control and what is replicated, in words; the probe computes it.
        source: Where the claim is printed, and what was printed.
        counts: What n counts.
    """

    name: str
    unit: str
    side: Side
    effect: float
    scale: Scale = "identity"
    equivalence: Literal["", "within", "at most"] = ""
    range: tuple[float, float] = (-math.inf, math.inf)
    noun: str = ""
    claim: str = ""
    null: str = ""
    source: str = ""
    counts: str = "prompts"

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the largest value; of a correlation those that its scale has."""
        return CORRELATIONS.get(self.scale, self.range)

    @property
    def sign(self) -> int:
        """1 if the value is expected above its controls, else -1."""
        return 1 if self.side == "upper" else -1

    def end(self, centre: float) -> float:
        """The declared effect, counted from a control's centre."""
        return centre + self.sign * self.effect

    def room(self, centre: float) -> bool:
        """Whether a control's centre plus the effect, on the metric's scale, is a value that the metric can have."""
        (least, most), end = self.range, self.end(centre)
        if self.scale == "log" and end <= 0 < centre:
            return False
        return least <= end <= most and (self.scale not in CORRELATIONS or abs(end) < 1)


def word(h: Judged) -> tuple[Word, str]:
    """One of the five words and its reason, for a claim whose p-values are corrected over `h.among` claims.

    opposite   the value lies beyond every control on the other side (corrected p < .025).
    small      the hardest control is beaten (corrected p < .025), and the declared effect is excluded (p < .025), or no
               value of the metric lies that far from the control.
    holds      the hardest control is beaten, the declared effect is not excluded.
    ruled out  the hardest control is not beaten (p >= .05, uncorrected), and the declared effect is excluded (corrected
               p < .025); without room for it, any effect is: the value lies on the control's other side.
    open       anything else, or a requirement that no p replaces is not met (`h.lacks`); `because` says why.
    """
    beaten, excluded, opposite = (_p(p, h.among) for p in h.adjusted)
    holds, rules_out, reverses = (p < ALPHA for p in h.adjusted)
    way, other = ("above", "below") if h.rule.side == "upper" else ("below", "above")
    value, effect, where = _value(h), _effect(h), _against(h)
    if h.lacks:
        return "open", "; ".join(h.lacks)
    if h.rule.equivalence:
        low, span = h.excess.least, f"{h.excess.hurdle:.3g}"
        span = f"the range up to {span}" if low == NO_END else f"{low:.3g} to {span}"
        if holds:
            return "holds", f"{value} stays within {span}, {beaten}"
        if rules_out:
            return "ruled out", f"{value} lies outside {span}, {excluded}"
        over = any(h.low <= end <= h.high for end in (low, h.excess.hurdle))
        reaches = "reaches beyond an end of" if over else "is neither clearly inside nor clearly outside"
        return "open", f"{value} {reaches} {span}, {beaten}; {because(h)}"
    if reverses:
        every = f"0, and the value {other} every other control" if h.paired else "every control"
        return "opposite", f"{value} lies {other} {every}, {opposite}"
    if holds:
        said = f"{value} lies {way} {where}, {beaten}"
        if not h.excess.room:
            return (
                "small",
                f"{said}; there is no room for the claimed effect: this metric cannot reach {h.rule.end(h.centre):.3g}",
            )
        if h.excess.p_excluded < ALPHA:
            return "small", f"{said}; the claimed effect ({effect}) is excluded, p = {h.excess.p_excluded:.2g}"
        return "holds", said
    if h.p >= BEATEN_P and rules_out:
        if h.excess.room:
            return "ruled out", f"{value} excludes the claimed effect ({effect}), {excluded}"
        control = "0" if h.paired else f"{h.null}, {h.centre:.3g}"
        return "ruled out", f"{value} lies {other} {control}, {excluded}: no n can make it hold"
    return "open", f"{value} is not clearly {way} {where}, {beaten}; {because(h)}"


def because(h: Judged, counts: str = "clusters") -> str:
    """Why a claim is open, and what would decide it if anything would: a few words, a colon, the figures.

    Args:
        counts: What its clusters are.
    """
    excess, (_, excluded, _) = h.excess, h.adjusted
    if h.lacks:
        return "; ".join(h.lacks)
    if 0 < excess.setting.draws < LEAST_DRAWS:
        few = f"{number_of_draws(excess.setting.draws)} decide{'s' * (excess.setting.draws == 1)} nothing"
        return f"too few draws of the control: {few}, at least {LEAST_DRAWS} are needed; raise --control-models"
    if not h.rule.equivalence and not excess.room:
        where = "above" if h.rule.side == "upper" else "below"
        end = f"this metric cannot reach {h.rule.end(h.centre):.3g}"
        return f"no room {where} the control: {end}; a smaller effect is not shown"
    if not h.rule.equivalence and excess.p_excluded < ALPHA:
        alone = f"of {_effect(h)}, p = {excess.p_excluded:.2g} for this claim alone"
        if h.p >= BEATEN_P:
            return f"the claimed effect is excluded, by Holm undecided: {alone}, {_p(excluded, h.among)}"
        if h.p < ALPHA:
            return f"the claimed effect is excluded, by Holm undecided: {alone}; that there is one, p = {h.p:.2g}"
        return f"the claimed effect is excluded, a smaller one open: {alone}; that there is one, p = {h.p:.2g}"
    if not h.needed and excess.setting.noise:
        spread, draws = excess.setting.spread * h.rule.effect, excess.setting.draws
        if excess.averaged and draws:
            known = f"{spread * (1 + 1 / draws) ** 0.5:.2g} {h.unit}".rstrip()
            return f"more data will not help: {draws} draws fix the mean of the control only to within {known}"
        apart = f"{spread:.2g} {h.unit}".rstrip()
        return f"more data will not help: the control's own draws vary by {apart} (one standard deviation)"
    if h.clusters < h.needed:
        if 0 < h.available < h.needed:
            return f"no n here decides, of {h.available:,} {counts} in all: {h.needed:,} are needed"
        return f"needs {h.needed:,} {counts}: for the claimed effect of {h.rule.effect:.3g}, has {h.clusters:,}"
    enough = f"{h.clusters:,} {counts} suffice in nine of ten runs"
    if h.rule.equivalence:
        return f"the interval is wider than the claim allows: {enough} (n >= {h.needed:,}) where there is no effect"
    also = f"{_effect(h)} is not excluded either, p = {excluded:.2g}, though {enough}"
    return f"no effect and the claimed one are both possible: {also}"


def number_of_draws(n: int) -> str:
    """1 draw, 2 draws."""
    return f"{n} draw{'s' * (n != 1)}"


def _p(p: float, claims: int) -> str:
    return f"p = {p:.2g} by Holm over {claims} claim{'s' * (claims > 1)}"


def _effect(h: Judged) -> str:
    added = f"{h.centre:.3g} {'+' if h.rule.side == 'upper' else '-'} "
    return f"{added * (not h.paired)}{h.rule.effect:.3g}"


def _value(h: Judged) -> str:
    """The value with its interval; beside a control on the same prompts the difference, which varies less."""
    if h.paired:
        interval = "[{:.3g}, {:.3g}]".format(*h.difference)
        return (
            f"the difference from {h.null} ({h.centre:.3g}) on the same prompts, {h.value - h.centre:.3g} {interval},"
        )
    if h.high - h.low >= -NO_END:
        return f"{h.value:.3g}, which has no interval,"
    return f"{h.value:.3g} [{h.low:.3g}, {h.high:.3g}]"


def _against(h: Judged) -> str:
    """The control with its hurdle, where it has enough draws for one; of a paired one the difference 0."""
    if h.paired:
        return "0"
    over = h.rule.sign * (h.value - h.excess.hurdle) > 0
    alone = " for this claim alone" * (over and h.adjusted[0] >= ALPHA)  # Holm's correction raises it
    known = not 0 < h.excess.setting.draws < LEAST_DRAWS  # of so few draws no value is a hurdle
    return f"{h.null}, {h.centre:.3g}" + f" (hurdle {h.excess.hurdle:.3g}{alone})" * known
