"""Batching: which prompts run together, decided before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

from llmgeom.errors import UserError

BATCH_TOKENS = 4096
SHARD = 64 * 2**20  # bytes
PARTS = 32


def plan_batches(lengths: Sequence[int], batch_tokens: int = BATCH_TOKENS) -> tuple[tuple[int, ...], ...]:
    """Group prompts of similar length, longest first, so that prompts x longest <= batch_tokens.

    A pure function of its arguments: the same prompts, tokenizer and budget give the same batches on every machine, so
    a resumed run ends with the same bytes. A prompt longer than the budget runs alone.

    Args:
        lengths: Tokens of each prompt.
        batch_tokens: The budget, padding included.

    Returns:
        Indices of the prompts of each batch.

    Raises:
        UserError: The budget is below 1.
    """
    if batch_tokens < 1:
        raise UserError(f"--batch-tokens {batch_tokens}: expected at least 1")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batches: list[tuple[int, ...]] = []
    current: list[int] = []
    for i in order:
        # The first prompt of a batch is its longest: it sets the padded width.
        if current and (len(current) + 1) * lengths[current[0]] > batch_tokens:
            batches.append(tuple(current))
            current = []
        current.append(i)
    if current:
        batches.append(tuple(current))
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
