"""Random choices that are the same on every machine: of Python's Random, only random() is guaranteed not to change."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
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
