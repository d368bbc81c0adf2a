"""What a number that is no claim shows against its control; it has no verdict of its own."""

from llmgeom.result import Estimate


def beyond(h: Estimate) -> str:
    """ "yes", "no" (the declared effect is excluded, and the control not beaten) or "open", without any correction."""
    if h.p < 0.025:
        return "yes"
    return "no" if h.p >= 0.05 and h.excess.p_excluded < 0.025 else "open"
