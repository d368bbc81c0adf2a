"""What is declared of a claim before anything is measured, as far as numbers decide it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from llmgeom.stats.tests import Scale, Side

ALPHA = 0.025  # one-sided, of every test behind a word
LEAST_DRAWS = 5  # of a control: fewer say too little about its spread


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What decides a verdict, declared before anything is measured.

    Attributes:
        side: "upper": the claim says that the value lies above its controls; "lower": below them.
        effect: The smallest difference from a control's centre that is of interest.
        needed: How the sampling error of the value falls with clusters in a plan: as a mean's, or a rank correlation's.
        scale: The scale on which draws of the statistic are closest to normal: see `on_scale`.
        equivalence: The claim says that there is no effect: the value lies within `margin` of its control's centre; if
            `one_sided`, at most that far above it.
        least, most: The ends of what the metric can be; infinite where it has none.
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
        """Whether a control's centre and the effect together are a value that the metric, on its scale, can have."""
        end = self.end(centre)
        if self.scale == "log" and end <= 0 < centre:
            return False
        return self.least <= end <= self.most and (self.scale not in ("fisher", "folded") or abs(end) < 1)

    def end(self, centre: float) -> float:
        """The declared effect, counted from a control's centre."""
        return centre + (self.effect if self.side == "upper" else -self.effect)
