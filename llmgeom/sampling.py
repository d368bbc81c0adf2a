"""Functions that worlds share: random tensors on a generator's device, exchanged evidence, repeated symbols."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from scipy import special
from torch import Tensor

_gamma: Any = torch._standard_gamma  # pyright: ignore[reportPrivateImportUsage]  (no public one takes a generator)


class Lots:
    """One of Python's generators for each sequence, in place of a torch generator.

    Their random() is the same on every machine, so prompts are; and a sequence is the same whatever is drawn beside it.
    The functions below take either; one axis of what they draw has the length of the sequences.
    """

    device = torch.device("cpu")

    def __init__(self, each: Sequence[Random]) -> None:
        self.each = each

    def random(self, shape: tuple[int, ...]) -> Float[Tensor, "..."]:
        """Numbers uniform on [0, 1), float64."""
        axis = shape.index(len(self.each))
        inner = (*shape[:axis], *shape[axis + 1 :])
        each = [[rng.random() for _ in range(math.prod(inner))] for rng in self.each]
        return torch.tensor(each, dtype=torch.float64).reshape(len(self.each), *inner).movedim(0, axis)


Generator: TypeAlias = torch.Generator | Lots


def uniforms(generator: Generator, *shape: int) -> Float[Tensor, "..."]:
    """Numbers uniform on [0, 1), float32."""
    if isinstance(generator, Lots):
        return generator.random(shape)
    return torch.rand(shape, generator=generator, device=generator.device)


def normals(generator: Generator, *shape: int) -> Float[Tensor, "..."]:
    """Standard normal numbers: float32, of `Lots` float64."""
    if isinstance(generator, Lots):
        return torch.from_numpy(special.ndtri(generator.random(shape).numpy()))
    return torch.randn(shape, generator=generator, device=generator.device)


def integers(below: int, generator: Generator, *shape: int, least: int = 0) -> Int[Tensor, "..."]:
    """Integers uniform on least .. below - 1."""
    if isinstance(generator, Lots):
        return (generator.random(shape) * (below - least)).long() + least
    return torch.randint(least, below, shape, generator=generator, device=generator.device)


def permutations(n: int, size: int, generator: Generator) -> Int[Tensor, "n size"]:
    """n permutations of 0 .. size - 1."""
    return uniforms(generator, n, size).argsort(1)


def dirichlet(shape: tuple[int, ...], generator: Generator, a: float = 1.0) -> Float[Tensor, "..."]:
    """Rows of Dirichlet(a, ..., a): Gamma variables divided by their sum."""
    if isinstance(generator, Lots):
        weight = torch.from_numpy(special.gammaincinv(a, generator.random(shape).numpy()))
    elif a == 1:
        weight = torch.empty(shape, device=generator.device).exponential_(generator=generator)
    else:
        weight = _gamma(torch.full(shape, a, device=generator.device), generator=generator)
    return weight / weight.sum(-1, keepdim=True)


def beta(n: int, a: float, b: float, generator: Generator) -> Float[Tensor, "n 1"]:
    """Numbers from Beta(a, b): X / (X + Y) of two Gamma variables."""
    if isinstance(generator, Lots):
        return torch.from_numpy(special.betaincinv(a, b, generator.random((n, 1)).numpy()))
    gamma = _gamma(constants([a, b], generator.device).expand(n, 2), generator=generator)
    return (gamma[:, :1] / gamma.sum(1, keepdim=True)).float()


def constants(numbers: Sequence[float], device: torch.device) -> Float[Tensor, " number"]:
    """Constants in float64, filled on the device: a CUDA graph cannot record a copy from the host."""
    return torch.stack([torch.full((), number, dtype=torch.float64, device=device) for number in numbers])


def same_earlier(symbols: Int[Tensor, "sequence place"]) -> Bool[Tensor, "sequence place earlier"]:
    """Whether an earlier place has the same symbol as a place."""
    return (symbols[:, :, None] == symbols[:, None, :]).tril(-1)


def with_another_symbol(
    symbols: Int[Tensor, "sequence place"], count: int, generator: Generator
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
