"""Choices that are the same on every machine: of Random, only random() is promised never to change."""

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
    """`items` in random order, each order as likely as any other."""
    return [items[i] for _, i in sorted((rng.random(), i) for i in range(len(items)))]


def sha256(name: str) -> bytes:
    """What decides, without a seed, which names are held out: the least ones."""
    return hashlib.sha256(name.encode()).digest()


def weighted(rng: Random, weights: Collection[float]) -> int:
    """The place of one of `weights`, each as likely as its share of their sum, which must be above 0."""
    lot = rng.random() * sum(weights)
    for place, weight in enumerate(weights):
        lot -= weight
        if lot < 0:
            return place
    return max(place for place, weight in enumerate(weights) if weight > 0)  # rounding
