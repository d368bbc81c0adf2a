"""The batch plan: which prompts run together, decided before anything runs."""

from __future__ import annotations

from collections.abc import Sequence

from llmgeom.errors import UserError

BATCH_TOKENS = 4096
SHARD = 64 * 2**20  # bytes
PARTS = 32


def plan(lengths: Sequence[int], batch_tokens: int = BATCH_TOKENS) -> tuple[tuple[int, ...], ...]:
    """Group prompts of like length, longest first, so that rows x longest <= batch_tokens.

    A pure function of its arguments: the same prompts, tokenizer and budget give the same plan on every machine, which
    is what makes a resumed run end with the same bytes. A prompt longer than the budget runs alone. Returns tuples of
    prompt indices. Raises UserError for a budget below 1.
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


def together(sizes: Sequence[int]) -> tuple[range, ...]:
    """Which batches of a plan share a file: neighbours, as many as fit in 64 MiB (a larger one is alone), and no more
    than a 32nd of them, so that a kill costs no more than that and several processes can divide the rest evenly.

    sizes: bytes of each batch. Also a pure function of its arguments.
    """
    most = -(-len(sizes) // PARTS)
    found: list[range] = []
    start = held = 0
    for i, size in enumerate(sizes):
        if i > start and (held + size > SHARD or i - start == most):
            found.append(range(start, i))
            start, held = i, 0
        held += size
    return (*found, range(start, len(sizes))) if sizes else ()
