"""A claim about a probe called toy."""

from dataclasses import replace

from llmgeom.claims import Claim


def claim(**changes) -> Claim:
    plain = Claim(probe="toy", name="x", unit="fraction", side="upper", effect=0.1, needed="mean")
    return replace(plain, **changes)
