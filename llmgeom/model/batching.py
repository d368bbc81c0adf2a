"""Batching: which prompts run together, decided before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral
from typing import Any

import numpy as np

from llmgeom.errors import UserError

BATCH_TOKENS = 4096
PASS = 512  # tokens; see `BatchRules`
SHARD = 64 * 2**20  # bytes
PARTS = 32


@dataclass(frozen=True)
class BatchRules:
    """What a model, where it is, says about its batches.

    A further pass costs its small operations, its shard and its sync. Measured on two cores, 75 prompts of 5 to 80
    tokens: with 128 in place of 512 a model of 410M takes .77 of the time (in bfloat16 .82), one of 70M .82; more
    passes gain nothing. A whole scan of a model of 1M takes 1.08 of it: there the small operations are most of a pass.

    Attributes:
        borders: Prompts of at most so many tokens never run with longer ones.
        further: What a further pass costs, in tokens of padding that it may save.
    """

    borders: tuple[int, ...] = ()
    further: int = PASS

    @classmethod
    def of(cls, facts: Mapping[str, Any], config: Any) -> BatchRules:
        """Of a model's facts and its config; None for a module of the user's own."""
        size, further = facts.get("parameters"), PASS
        if size and facts["device"] == "cpu":  # a GPU takes as long for a pass of few tokens as for one of hundreds
            further = min(PASS, 128 + 400_000_000 // size)
        return cls(_borders(config), further)


def plan_batches(
    lengths: Sequence[int], batch_tokens: int = BATCH_TOKENS, rules: BatchRules = BatchRules()
) -> tuple[tuple[int, ...], ...]:
    """Group prompts of similar length, longest first, so that prompts x longest <= batch_tokens.

    Of all such groupings in order of length the one with the least padding; a further batch counts as `rules.further`
    tokens. A pure function of its arguments, so that a resumed run ends with the same bytes. A prompt longer than the
    budget runs alone.

    Args:
        lengths: Tokens of each prompt.
        batch_tokens: The budget, padding included.
        rules: Of the model.

    Returns:
        Indices of the prompts of each batch.

    Raises:
        UserError: The budget is below 1, or no whole number.
    """
    if not isinstance(batch_tokens, Integral) or batch_tokens < 1:
        raise UserError(f"--batch-tokens {batch_tokens!r}: expected a whole number, at least 1")
    return _planned(tuple(lengths), batch_tokens, rules)


def _borders(config: Any) -> tuple[int, ...]:
    """The lengths above which LongRoPE turns all queries and keys of a batch by other angles (Phi-3 128k: 4096)."""
    if config is None:
        return ()
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    ropes = [rope, *(own for own in rope.values() if isinstance(own, Mapping))]  # of all layers, or by kind of layer
    return tuple({own["original_max_position_embeddings"] for own in ropes if own.get("rope_type") == "longrope"})


@lru_cache(maxsize=256)  # every control reads prompts of the same lengths
def _planned(lengths: tuple[int, ...], batch_tokens: int, rules: BatchRules) -> tuple[tuple[int, ...], ...]:
    """`plan_batches` by dynamic programming: cost[i] is the least cost of prompts i, i + 1, ... in order of length."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    cost = np.zeros(len(order) + 1, dtype=np.int64)
    sizes = np.arange(1, len(order) + 1)
    end = [0] * len(order)
    stops = [sum(length > border for length in lengths) for border in rules.borders] + [len(order)]
    for i in reversed(range(len(order))):
        width = lengths[order[i]]  # the first prompt of a batch is its longest: it sets the padded width
        most = min(max(batch_tokens // width, 1), *(stop - i for stop in stops if stop > i))
        costs = sizes[:most] * width + cost[i + 1 : i + 1 + most]
        best = int(costs.argmin())
        cost[i], end[i] = rules.further + costs[best], i + 1 + best
    batches: list[tuple[int, ...]] = []
    i = 0
    while i < len(order):
        batches.append(tuple(order[i : end[i]]))
        i = end[i]
    return tuple(batches)


def group_batches(sizes: Sequence[int]) -> tuple[range, ...]:
    """Which batches share a file: neighbours, as many as fit in 64 MiB, and no more than a 32nd of all.

    A kill then costs at most one 32nd, and several processes can divide the rest evenly. A batch larger than 64 MiB has
    a file of its own. A pure function of its argument.

    Args:
        sizes: Bytes of each batch.
    """
    most = -(-len(sizes) // PARTS)
    groups: list[range] = []
    start = total = 0
    for i, size in enumerate(sizes):
        if i > start and (total + size > SHARD or i - start == most):
            groups.append(range(start, i))
            start, total = i, 0
        total += size
    return (*groups, range(start, len(sizes))) if sizes else ()
