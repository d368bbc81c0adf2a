"""From a pool of prompts to a sample that is spread evenly over next-token entropy."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from llmgeom.batch import Batch
from llmgeom.errors import Refused

PER_UNIT = 2


def stratify(pool: Batch, entropy: np.ndarray, n: int = 75, bins: int = 5, seed: int = 0) -> Batch:
    """`n` prompts, as many from each of `bins` quantile bins of entropy, at most two of one template.

    Within a bin prompts are taken in a seeded random order, those of templates used least first. The remainder of
    n / bins goes to the lowest bins. Paper III (section 4.3) draws 15 from each quintile of 1,000 candidates; the limit
    per template is ours: prompts of one template are not exchangeable.
    Raises Refused where a bin cannot give its share.
    """
    if n > len(pool):
        raise Refused(f"--n {n}: the pool has {len(pool)} prompts; ask for at most that, or a larger pool")
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(pool))
    ranked = order[np.argsort(np.asarray(entropy)[order], kind="stable")]
    used: Counter[str] = Counter()
    chosen: list[int] = []
    for b, members in enumerate(np.array_split(ranked, bins)):
        share = n // bins + (b < n % bins)
        taken = 0
        for i in sorted(rng.permutation(members).tolist(), key=lambda i: used[pool.unit[i]]):
            if taken < share and used[pool.unit[i]] < PER_UNIT:
                used[pool.unit[i]] += 1
                chosen.append(i)
                taken += 1
        if taken < share:
            raise Refused(
                f"--n {n}: entropy bin {b + 1} of {bins} gives {taken} of {share} prompts with at most {PER_UNIT} of "
                f"a template ({len(set(pool.unit))} templates in the pool); ask for fewer"
            )
    batch = pool.take(sorted(chosen))
    source = {**pool.source, "stratified": {"n": n, "bins": bins, "per_template": PER_UNIT, "seed": seed}}
    return _with_source(batch, source)


def plain(pool: Batch, n: int, seed: int = 0) -> Batch:
    """`n` prompts of the pool at random, at most two of one template, without regard to entropy."""
    used: Counter[str] = Counter()
    chosen = []
    for i in np.random.default_rng([seed, 1]).permutation(len(pool)).tolist():
        if len(chosen) < n and used[pool.unit[i]] < PER_UNIT:
            used[pool.unit[i]] += 1
            chosen.append(i)
    if len(chosen) < n:
        raise Refused(f"--n {n}: the pool has {len(chosen)} prompts with at most {PER_UNIT} of a template")
    return _with_source(pool.take(sorted(chosen)), {**pool.source, "plain": {"n": n, "seed": seed}})


def _with_source(batch: Batch, source: dict) -> Batch:
    return replace(batch, source=source)
