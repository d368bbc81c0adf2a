"""Random choices that are the same on every machine: of Python's Random, only random() is guaranteed not to change."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


def pick(rng: Random, items: Sequence[T]) -> T:
    """One of `items`."""
    return items[int(rng.random() * len(items))]


def shuffled(rng: Random, items: Sequence[T]) -> list[T]:
    """`items` in random order; all orders are equally likely."""
    return [items[i] for _, i in sorted((rng.random(), i) for i in range(len(items)))]


def sha256(name: str) -> bytes:
    """The hash that decides, without a seed, which names are held out: those with the smallest."""
    return hashlib.sha256(name.encode()).digest()


def weighted(rng: Random, weights: Collection[float]) -> int:
    """A random place in `weights`, with probability its share of their sum, which must be above 0."""
    lot = rng.random() * sum(weights)
    for place, weight in enumerate(weights):
        lot -= weight
        if lot < 0:
            return place
    return max(place for place, weight in enumerate(weights) if weight > 0)  # rounding
