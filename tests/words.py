"""What a number that is no claim shows against its control; it has no verdict of its own."""

import numpy as np

from llmgeom.result import Estimate, Result
from llmgeom.stats.controls import Null, excess
from llmgeom.stats.resampling import Interval
from llmgeom.stats.verdict import Claim


def named(result: Result) -> dict[str, Estimate]:
    """The estimates of a result by their names."""
    return {h.name: h for h in result.estimates}


def beyond(h: Estimate) -> str:
    """ "yes", "no" (the declared effect is excluded, and the control not beaten) or "open", without any correction."""
    if h.p < 0.025:
        return "yes"
    return "no" if h.p >= 0.05 and h.excess.p_excluded < 0.025 else "open"


def prediction_p(value: float, draws, side: str = "upper", scale: str = "identity") -> float:
    """p by the rule of a value that was measured without error: as one more draw."""
    exactly = Interval(value, value, 0.95, "")
    null = Null.of("draws", np.asarray(draws, float), side)
    rule = Claim(name="x", unit="", side=side, effect=0.0, scale=scale)
    return excess(rule, value, exactly, null, 40)[1].p
