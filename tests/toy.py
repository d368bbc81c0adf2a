"""A claim about a probe called toy."""

from dataclasses import replace

from llmgeom.claims import Claim


def claim(**changes) -> Claim:
    plain = Claim(name="x", unit="fraction", side="upper", effect=0.1)
    return replace(plain, **changes)
