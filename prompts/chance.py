"""Random choices that are the same on every machine: of Random, only random() is promised never to change."""

from __future__ import annotations

from random import Random


def pick(rng: Random, items):
    """One of `items`."""
    return items[int(rng.random() * len(items))]


def shuffled(rng: Random, items) -> list:
    """`items` in random order, each order as likely as any other."""
    return [items[i] for _, i in sorted((rng.random(), i) for i in range(len(items)))]
