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
MOST = 1024  # tokens of a batch on a CPU; see `BatchRules`
SHARD = 64 * 2**20  # bytes
PARTS = 32
PREDICTED = 2**22  # log-probabilities of a batch on a CPU; see `BatchRules`


@dataclass(frozen=True)
class BatchRules:
    """Properties of a model and its device that determine its batches.

    A further pass costs its small operations and its part of a file. Measured on two cores, 75 prompts of 5 to 80
    tokens: with 32 in place of 128 a model of 410M takes .86 of the time (in bfloat16 .82), and with 8 no less; one of
    70M the same. A whole scan of a model of 1M takes 1.08 with 128 in place of 512: there the small operations are most
    of a pass.

    On a CPU several batches run at the same time, each on some of the cores: one alone does not keep all cores busy.
    Measured on two cores, tokens a second of batches of 400 tokens, two at a time over one at a time: 1.33 for a model
    of 70M (bfloat16 1.36), 1.14 for 160M (1.28), 1.11 for 410M (1.14); of 1,600 tokens 1.09, 1.11, 1.01.

    A batch of short prompts has many predictions: of 256 prompts of one token, over 50,304 tokens, each copy of the
    log-probabilities took 52 MB. With at most 83 prompts in a batch a scan of 70M took .15 of 1.4 GB less, in the same
    time.

    Attributes:
        borders: Prompts of at most so many tokens never run with longer ones.
        further: What a further pass costs, in tokens of padding that it may save.
        most: Tokens of a batch of several prompts where batches run at the same time; None where they do not.
        prompts: The most prompts of a batch; None for any number.
    """

    borders: tuple[int, ...] = ()
    further: int = PASS
    most: int | None = None
    prompts: int | None = None

    @classmethod
    def of(cls, facts: Mapping[str, Any], config: Any) -> BatchRules:
        """Of a model's facts and its config; None for a module of the user's own."""
        # The lengths above which LongRoPE turns all queries and keys of a batch by other angles (Phi-3 128k: 4096).
        borders = {one["original_max_position_embeddings"] for one in ropes(config) if one["rope_type"] == "longrope"}
        if facts["device"] != "cpu":  # a GPU takes as long for a pass of few tokens as for one of hundreds
            return cls(tuple(borders))
        size, vocabulary = facts.get("parameters"), facts.get("vocabulary")
        further = min(PASS, 32 + 400_000_000 // size) if size else PASS
        return cls(tuple(borders), further, MOST, max(1, PREDICTED // vocabulary) if vocabulary else None)


def plan_batches(
    lengths: Sequence[int], batch_tokens: int = BATCH_TOKENS, rules: BatchRules = BatchRules()
) -> tuple[tuple[int, ...], ...]:
    """Group prompts of similar length, longest first, so that prompts x longest <= batch_tokens and <= rules.most.

    Of all such groupings in order of length the one with the least padding; a further batch counts as `rules.further`
    tokens. A pure function of its arguments, so that a resumed run ends with the same bytes. A prompt longer than the
    budget runs alone.

    Args:
        lengths: Tokens of each prompt.
        batch_tokens: The budget of all batches that run at the same time, padding included.
        rules: Of the model.

    Returns:
        Indices of the prompts of each batch.

    Raises:
        UserError: The budget is below 1, or no whole number.
    """
    if not isinstance(batch_tokens, Integral) or batch_tokens < 1:
        raise UserError(f"--batch-tokens {batch_tokens!r}: expected a whole number, at least 1")
    return _planned(tuple(lengths), min(batch_tokens, rules.most or batch_tokens), rules)


def at_once(batches: Sequence[Sequence[int]], lengths: Sequence[int], batch_tokens: int, rules: BatchRules) -> int:
    """How many of these batches may run at the same time, so that their tokens stay within the budget."""
    if rules.most is None:
        return 1
    widest = max((len(members) * lengths[members[0]] for members in batches), default=batch_tokens)
    return max(1, min(len(batches), batch_tokens // max(widest, 1)))


def ropes(config: Any) -> list[Mapping[str, Any]]:
    """The parameters of each rotary embedding in a config: one for all layers, or one for each kind of layer."""
    rope = {} if config is None else getattr(config.get_text_config(), "rope_parameters", None) or {}
    return [one for one in (rope, *rope.values()) if isinstance(one, Mapping) and "rope_type" in one]


@lru_cache(maxsize=256)  # every control reads prompts of the same lengths
def _planned(lengths: tuple[int, ...], most_tokens: int, rules: BatchRules) -> tuple[tuple[int, ...], ...]:
    """`plan_batches` by dynamic programming: cost[i] is the least cost of prompts i, i + 1, ... in order of length."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    cost = np.zeros(len(order) + 1, dtype=np.int64)
    sizes = np.arange(1, len(order) + 1)
    end = [0] * len(order)
    stops = [sum(length > border for length in lengths) for border in rules.borders] + [len(order)]
    for i in reversed(range(len(order))):
        width = lengths[order[i]]  # the first prompt of a batch is its longest: it sets the padded width
        most = min(max(most_tokens // width, 1), rules.prompts or len(order), *(stop - i for stop in stops if stop > i))
        costs = sizes[:most] * width + cost[i + 1 : i + 1 + most]
        best = int(costs.argmin())
        cost[i], end[i] = rules.further + costs[best], i + 1 + best
    batches: list[tuple[int, ...]] = []
    i = 0
    while i < len(order):
        batches.append(tuple(order[i : end[i]]))
        i = end[i]
    return tuple(batches)


def group_batches(sizes: Sequence[int], at_once: int = 1) -> tuple[range, ...]:
    """Which batches share a file: neighbours, as many as fit in 64 MiB, and no more than a 32nd of all.

    A kill then costs at most one 32nd, and several processes can divide the rest evenly. A batch larger than 64 MiB has
    a file of its own. A pure function of its arguments.

    Args:
        sizes: Bytes of each batch.
        at_once: Batches that run at the same time share a file, too: to write one takes milliseconds.
    """
    most = max(at_once, -(-len(sizes) // PARTS))
    groups: list[range] = []
    start = total = 0
    for i, size in enumerate(sizes):
        if i > start and (total + size > SHARD or i - start == most):
            groups.append(range(start, i))
            start, total = i, 0
        total += size
    return (*groups, range(start, len(sizes))) if sizes else ()
