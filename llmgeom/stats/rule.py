"""The numerical rule of a claim, declared before anything is measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from llmgeom.stats.tests import Scale, Side

ALPHA = 0.025  # one-sided level of every test behind a verdict
LEAST_DRAWS = 5  # draws of a control; fewer do not estimate its spread


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
