"""What a claim declares before anything is measured, the word that its rule gives an estimate, with the reason, and the
number of clusters that would decide.

docs/claims.md states the rule and its error rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np

from llmgeom.stats.resampling import LEAST_CLUSTERS
from llmgeom.stats.tests import Scale, Side

ALPHA = 0.025  # one-sided level of every test behind a verdict
BEATEN_P = 0.05  # "ruled out" says that a control is not beaten: its p, uncorrected, is at least this
NO_END = -1e9  # of a range that has no lower end: an Estimate holds finite numbers
POWER = 0.9
MOST_UNITS = 10**6  # an experiment with more clusters is not practical
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


# ---- the clusters that a claim needs --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """The noise of an experiment, in units of the declared effect, for the power of a claim.

    A claim holds if the excess of its value over a control's centre is significant by Student's t, Holm's correction
    included (`stats.controls.excess`). With K claims Holm compares the smallest p with .025 / K; a plan uses that level
    for every claim. Let e be the standard error of the value on n clusters, tau the spread of m draws of the control,
    and d the effect between the value and a further draw. Then t is Student's with non-centrality
    d / sqrt(e^2 + tau^2 (1 + 1 / m)), and (a normal approximation; derived here)

        P(holds) = Phi((d / sqrt(e^2 + tau^2 (1 + 1 / m)) - q) / sqrt(1 + q^2 / (2 f))),

    q the quantile 1 - .025 / K of Student's t with Welch's degrees of freedom f. More clusters reduce e but not tau: if
    untrained models differ much from each other, no number of clusters is enough.

    Attributes:
        noise: Standard deviation between clusters: the value's standard error is noise / sqrt(n).
        spread: True standard deviation between draws of the control.
        draws: Number of draws; 0 for a control that is a number.
        noisy: The draws also have the value's sampling noise.
        sides: 2 for an equivalence claim with two one-sided tests; 1 otherwise.
    """

    noise: float
    spread: float
    draws: int
    noisy: bool = False
    claims: int = 1
    sides: int = 1

    def power(self, clusters: int) -> float:
        """Probability of "holds" where the effect is as declared; of an equivalence claim, where there is none.

        For noisy draws the rule takes the larger of two variance estimates: P is then a mean over 500 pairs of
        estimates, the same in every call.
        """
        from scipy.special import ndtr, stdtrit

        m, noisy = self.draws, self.noisy and self.draws > 0
        if clusters < LEAST_CLUSTERS or 0 < m < LEAST_DRAWS:
            return 0.0
        # The variances of the value, by its interval, and of the draws.
        error, spread = self.noise**2 / clusters, self.spread**2 + self.noisy * self.noise**2 / clusters
        noise, others = np.asarray(error), np.asarray(spread * (1 + 1 / m) if m else 0.0)
        if noisy:
            chi_own, chi_drawn = _chi_squares(clusters - 1, m - 1)
            noise, drawn = error * chi_own, spread * chi_drawn
            noise, others = np.where(drawn >= noise, [0 * noise, drawn * (1 + 1 / m)], [noise, drawn / m])
        whole = noise + others
        if not np.all(whole > 0):
            return 1.0
        degrees = whole**2 / (noise**2 / (clusters - 1) + others**2 / max(m - 1, 1))
        quantile = -stdtrit(degrees, ALPHA / self.claims)
        if noisy:
            power = float(ndtr((1 - quantile * np.sqrt(whole)) / math.sqrt(spread * (1 + 1 / m))).mean())
        else:
            power = float(ndtr((1 / np.sqrt(whole) - quantile) / np.sqrt(1 + quantile**2 / (2 * degrees))))
        return max(0.0, 2 * power - 1) if self.sides == 2 else power


@cache
def _chi_squares(*freedoms: int) -> tuple[np.ndarray, ...]:
    """[500] estimates of a variance of 1 with these degrees of freedom, independent of each other."""
    rng = np.random.default_rng(0)
    return tuple(rng.chisquare(freedom, 500) / freedom for freedom in freedoms)


def needed(plan: Setting, wanted: float = POWER) -> int | None:
    """The fewest clusters with the `wanted` power; None if no number suffices."""
    few, many = LEAST_CLUSTERS - 1, MOST_UNITS
    if plan.power(many) < wanted:
        return None
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if plan.power(middle) >= wanted else (middle, many)
    return many
