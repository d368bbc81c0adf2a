"""The shape at which an architecture has a given number of parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from llmgeom.errors import UserError
from llmgeom.wind_tunnels.models.architectures import configured, known, step, usual

TOLERANCE = 0.02


def matched(
    arch: str, parameters: int, *, vocabulary: int, length: int, features: int = 0, layers: int = 2, heads: int = 4
) -> dict[str, int]:
    """A shape for `build(arch, **matched(...), ...)` with `parameters` parameters, within 2 %: a width, and where the
    widths that heads divide are too far apart, an inner width that makes up the difference.

    Raises:
        UserError: where there is none, with the nearest.
    """
    known(arch)
    fixed = {"vocabulary": vocabulary, "length": length, "features": features, "layers": layers, "heads": heads}

    @cache
    def count(**shape: int) -> int:
        return counted(configured(arch, **fixed, **shape))

    def last(width: int, low: int, high: int) -> int:
        """The largest inner width of low .. high with no more parameters; low - 1 where none is so small."""
        return low - 1 + _last(lambda n: count(width=width, inner=low - 1 + n) <= parameters, high - low + 1)

    by = step(arch, heads)
    below = by * _last(lambda n: count(width=by * n) <= parameters)
    shapes = []
    for width in (below, below + by) if below else (by,):
        plain = usual(arch, width)
        shapes.append({"width": width})
        # Half to twice the usual. An LSTM's count jumps at the usual one, where it needs no output map: two stretches.
        for low, high in ((plain // 2, plain - 1), (plain + 1, 2 * plain)):
            low = max(1, low)
            most = last(width, low, high)
            shapes += [{"width": width, "inner": i} for i in (most, most + 1) if low <= i <= high]

    def off(shape: dict[str, int]) -> float:
        return abs(count(**shape) / parameters - 1)

    def unusual(shape: dict[str, int]) -> tuple[float, float]:
        plain = usual(arch, shape["width"])
        return abs(shape.get("inner", plain) / plain - 1), off(shape)

    within = [shape for shape in shapes if off(shape) <= TOLERANCE]
    if within:
        return min(within, key=unusual)
    nearest = min(shapes, key=off)
    spelt = " and ".join(f"{name} {value}" for name, value in nearest.items())
    raise UserError(
        f"{arch}: no shape of {layers} layers and {heads} heads has {parameters} parameters within {TOLERANCE:.0%}; "
        f"the nearest, {spelt}, has {count(**nearest)}: ask for as many, or for other layers or heads"
    )


def counted(config: PreTrainedConfig) -> int:
    """Parameters of a model, without making any."""
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())


def _last(holds: Callable[[int], bool], most: int | None = None) -> int:
    """The largest n in 1 .. most for which `holds`, which does up to some n and then no more; 0 where for none."""
    high = 1
    while (most is None or high <= most) and holds(high):
        high *= 2
    low, high = high // 2, high if most is None else min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
