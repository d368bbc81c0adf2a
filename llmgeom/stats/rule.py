"""The numerical rule of a claim, declared before anything is measured; why a claim is open, and what decides that."""

from __future__ import annotations

import math
from collections.abc import Sized
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal, Protocol

from llmgeom.stats.tests import Scale, Side

ALPHA = 0.025  # one-sided level of every test behind a verdict
LEAST_DRAWS = 5  # draws of a control; fewer do not estimate its spread
NO_MORE = "more data will not help"  # of claims that no sample size decides


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


# ---- open claims -----------------------------------------------------------------------------------------------------


class Reason(Enum):
    """Why a claim is open."""

    LACK = auto()  # it would be open whatever its p: `Estimate.lacks`
    ROOM = auto()  # the metric has no value as far from the control as the claimed effect
    DRAWS = auto()  # the control has too few draws
    NEVER = auto()  # no number of clusters decides, as the control's own draws differ too much
    CLUSTERS = auto()  # there are fewer clusters than `Estimate.needed`
    CHANCE = auto()  # there are enough for the claimed effect; a smaller one is not excluded


class Open(Protocol):
    """The fields of an open claim that decide it: a part of `llmgeom.result.Estimate`, with the same meanings."""

    @property
    def lacks(self) -> Sized: ...
    @property
    def room(self) -> bool: ...
    @property
    def equivalence(self) -> bool: ...
    @property
    def averaged(self) -> bool: ...
    @property
    def draws(self) -> int: ...
    @property
    def needed(self) -> int: ...
    @property
    def clusters(self) -> int: ...
    @property
    def noise(self) -> float: ...
    @property
    def null_spread(self) -> float: ...
    @property
    def effect(self) -> float: ...
    @property
    def unit(self) -> str: ...


def reason(h: Open) -> Reason:
    """Why a claim is open: what a sentence about it must say first."""
    if h.lacks:
        return Reason.LACK
    if not (h.room or h.equivalence):
        return Reason.ROOM
    if h.draws and too_few(h.draws):
        return Reason.DRAWS
    if not h.needed and h.noise:
        return Reason.NEVER
    return Reason.CLUSTERS if h.clusters < h.needed else Reason.CHANCE


def remedy(h: Open) -> str:
    """What would decide an open claim that has room, if anything would."""
    why = reason(h)
    if why is Reason.DRAWS:
        return f"{too_few(h.draws)}: raise --nulls"
    if why is Reason.NEVER and h.averaged and h.draws:
        known = h.null_spread * h.effect * (1 + 1 / h.draws) ** 0.5
        return f"{NO_MORE}: {h.draws} draws fix the mean of the control only to within {known:.2g} {h.unit}".rstrip()
    if why is Reason.NEVER:
        return no_n(h.null_spread * h.effect, h.unit)
    if why is Reason.CLUSTERS:
        return f"needs n >= {h.needed} clusters for the claimed effect of {h.effect:.3g}, has {h.clusters}"
    return f"{h.clusters} clusters suffice for the claimed effect (n >= {h.needed}); a smaller one is not excluded"


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
