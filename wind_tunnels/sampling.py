"""Functions that tasks share: random tensors on a generator's device, exchanged evidence, repeated symbols."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def uniforms(generator: torch.Generator, *shape: int) -> Float[Tensor, "..."]:
    """Numbers uniform on [0, 1), float32."""
    return torch.rand(shape, generator=generator, device=generator.device)


def integers(below: int, generator: torch.Generator, *shape: int, least: int = 0) -> Int[Tensor, "..."]:
    """Integers uniform on least .. below - 1."""
    return torch.randint(least, below, shape, generator=generator, device=generator.device)


def permutations(n: int, size: int, generator: torch.Generator) -> Int[Tensor, "n size"]:
    """n permutations of 0 .. size - 1."""
    return uniforms(generator, n, size).argsort(1)


def dirichlet(shape: tuple[int, ...], generator: torch.Generator) -> Float[Tensor, "..."]:
    """Rows of Dirichlet(1, ..., 1): exponential variables divided by their sum."""
    weight = torch.empty(shape, device=generator.device).exponential_(generator=generator)
    return weight / weight.sum(-1, keepdim=True)


def constants(numbers: Sequence[float], device: torch.device) -> Float[Tensor, " number"]:
    """Constants in float64, filled on the device: a CUDA graph cannot record a copy from the host."""
    return torch.stack([torch.full((), number, dtype=torch.float64, device=device) for number in numbers])


def same_earlier(symbols: Int[Tensor, "sequence place"]) -> Bool[Tensor, "sequence place earlier"]:
    """Whether an earlier place has the same symbol as a place."""
    return (symbols[:, :, None] == symbols[:, None, :]).tril(-1)


def with_another_symbol(
    symbols: Int[Tensor, "sequence place"], count: int, generator: torch.Generator
) -> Int[Tensor, "sequence place"]:
    """The sequences with one symbol, at a random place except the last, replaced by another of 0 .. count - 1."""
    n, places = symbols.shape
    place = integers(places - 1, generator, n, 1)
    step = integers(count, generator, n, 1, least=1)
    return symbols.scatter(1, place, (symbols.gather(1, place) + step) % count)


def exchanged(
    inputs: Int[Tensor, "sequence seq"], first: Int[Tensor, "sequence 1"], second: Int[Tensor, "sequence 1"]
) -> Int[Tensor, "sequence seq"]:
    """The sequences with two tokens exchanged at every position."""
    return torch.where(inputs == first, second, torch.where(inputs == second, first, inputs))
