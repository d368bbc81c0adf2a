"""Samples from a pool of prompts: spread over next-token entropy, random, or of given diversity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from llmgeom.batch import Batch
from llmgeom.errors import UserError

USUAL, PER_CLUSTER = 75, 2


def candidates(n: int | None, limit: int | None = None) -> int:
    """How many prompts a sample of `n` (75 by default) is chosen from: `limit`, else 4 for each, from 300 to 1,000,
    but never fewer than `n`.

    Paper III (section 4.3) has 1,000 for 75. Bins are quantiles, so a smaller pool gives the same distribution: 300 to
    1,000 prompts of four domains gave 75 of the same mean and spread of entropy, from as many templates, of lengths as
    equal, and as diverse as asked for (two pocket models, eight seeds). The entropies of 1,000 were nine tenths of what
    a model reads before a scan's first page.
    """
    n = n or USUAL
    return limit or max(n, min(max(300, 4 * n), 1000))


def stratify(pool: Batch, entropy: np.ndarray, n: int = USUAL, bins: int = 5, seed: int = 0) -> Batch:
    """`n` prompts, as many from each of `bins` quantile bins of entropy, at most two of one template.

    Within a bin prompts are taken in a seeded random order, those of templates used least first. The remainder of n /
    bins goes to the lowest bins. Paper III (section 4.3) draws 15 from each quintile; the limit per template is ours:
    prompts of one template are not exchangeable. Raises UserError: a bin cannot give its share.
    """
    if n > len(pool):
        raise UserError(f"--n {n}: the pool has {len(pool)} prompts; ask for at most that, or a larger pool")
    rng = np.random.default_rng(seed)
    used: Counter[str] = Counter()
    chosen: list[int] = []
    for b, members in enumerate(_fifths(entropy, rng, bins)):
        share = n // bins + (b < n % bins)
        order = sorted(rng.permutation(members).tolist(), key=lambda i: used[pool.cluster[i]])
        taken = _first(order, share, pool, used)
        if len(taken) < share:
            raise UserError(
                f"--n {n}: entropy bin {b + 1} of {bins} gives {len(taken)} of {share} prompts with at most "
                f"{PER_CLUSTER} of a template ({len(set(pool.cluster))} templates in the pool); ask for fewer"
            )
        chosen += taken
    batch = pool.take(sorted(chosen))
    source = {**pool.source, "stratified": {"n": n, "bins": bins, "per_template": PER_CLUSTER, "seed": seed}}
    return replace(batch, source=source)


def plain(pool: Batch, n: int, seed: int = 0) -> Batch:
    """`n` random prompts of the pool, at most two of one template, independent of entropy."""
    chosen = _first(np.random.default_rng([seed, 1]).permutation(len(pool)).tolist(), n, pool, Counter())
    if len(chosen) < n:
        raise UserError(f"--n {n}: the pool has {len(chosen)} prompts with at most {PER_CLUSTER} of a template")
    return replace(pool.take(sorted(chosen)), source={**pool.source, "plain": {"n": n, "seed": seed}})


def diversity(
    ids: Sequence[Sequence[int]], read: Sequence[Sequence[int]], clusters: Sequence[str]
) -> tuple[int, int, int]:
    """The numbers of different tokens, of different tokens `read` and of templates of some prompts.

    Args:
        ids: [prompt] its tokens.
        read: [prompt] its tokens at the positions that are measured, by default the final one.
        clusters: [prompt] its template.
    """
    every, measured = (len({token for row in rows for token in row}) for rows in (ids, read))
    return every, measured, len(set(clusters))


def as_diverse(
    pool: Batch,
    entropy: np.ndarray,
    ids: Sequence[Sequence[int]],
    read: Sequence[Sequence[int]],
    wanted: tuple[int, int, int],
    n: int = 75,
    seed: int = 0,
) -> Batch:
    """A stratified sample of the pool with about the `diversity` of another, so that mainly the domain differs.

    It starts from `stratify`. 5,000 times a prompt is replaced by a random one of the same fifth of entropy, unless
    that raises sum_i |diversity_i - wanted_i| / wanted_i. The source has the initial and the final diversity. Derived
    here. A vector depends mainly on the token at its position, so `read` must be the tokens that are measured: with
    the final ones, math had 118 different tokens at its last three positions, and the prompts chosen had 145.
    """
    rng = np.random.default_rng([seed, 3])
    place = {text: i for i, text in enumerate(pool.text)}
    chosen = [place[text] for text in stratify(pool, entropy, n, seed=seed).text]
    fifth = {row: rows.tolist() for rows in _fifths(entropy, rng, 5) for row in rows.tolist()}
    # How often each token, each token that is read and each template occurs among the chosen.
    of_prompt: list[tuple[Iterable[int | str], ...]] = [
        (set(a), set(b), {c}) for a, b, c in zip(ids, read, pool.cluster, strict=True)
    ]
    counts: tuple[Counter, Counter, Counter] = (Counter(), Counter(), Counter())

    def replaced(old: int | None, new: int) -> float:
        """The distance from `wanted` with one prompt in place of another, or added."""
        for i, step in ((old, -1), (new, 1)):
            for counter, values in zip(counts, of_prompt[i] if i is not None else ((), (), ()), strict=True):
                for value in values:
                    counter[value] += step
                    if not counter[value]:
                        del counter[value]
        return sum(abs(len(have) - want) / max(want, 1) for have, want in zip(counts, wanted, strict=True))

    distance = [replaced(None, i) for i in chosen][-1]
    start = [len(counter) for counter in counts]
    for at, draw in zip(rng.integers(n, size=5000).tolist(), rng.random(5000).tolist(), strict=True):
        old = chosen[at]
        new = fifth[old][int(draw * len(fifth[old]))]
        full = counts[2][pool.cluster[new]] >= PER_CLUSTER and pool.cluster[new] != pool.cluster[old]
        if full or new in chosen:
            continue
        if (now := replaced(old, new)) <= distance:
            chosen[at], distance = new, now
        else:
            replaced(new, old)
    said = {"wanted": list(wanted), "start": start, "reached": [len(counter) for counter in counts]}
    return replace(pool.take(sorted(chosen)), source={**pool.source, "as_diverse": {"n": n, **said, "seed": seed}})


def _first(rows: Iterable[int], n: int, pool: Batch, used: Counter[str]) -> list[int]:
    """The first `n` of some rows with at most two per template; `used` counts those of each template."""
    taken: list[int] = []
    for i in rows:
        if len(taken) < n and used[pool.cluster[i]] < PER_CLUSTER:
            used[pool.cluster[i]] += 1
            taken.append(i)
    return taken


def _fifths(entropy: np.ndarray, rng: np.random.Generator, bins: int) -> list[np.ndarray]:
    """Rows of each quantile bin of entropy, lowest first; ties go in random order."""
    order = rng.permutation(len(entropy))
    return np.array_split(order[np.argsort(np.asarray(entropy)[order], kind="stable")], bins)
