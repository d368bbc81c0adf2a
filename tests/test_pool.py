"""A stratified sample has its share from every fifth of the entropies and at most two prompts of a template."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from llmgeom.batch import Batch, Text
from llmgeom.errors import Refused
from llmgeom.prompts.pool import plain, stratify

POOL = Batch(Text(tuple(f"prompt {i}" for i in range(300))), tuple(f"t{i // 3}" for i in range(300)), {"name": "pool"})
# Skewed: without strata most of a sample would come from the low end.
ENTROPY = np.random.default_rng(0).exponential(1.0, 300)


def number(batch: Batch) -> list[int]:
    return [int(text.split()[1]) for text in batch.text]


@pytest.mark.parametrize("n", [75, 73, 10])
def test_each_fifth_of_the_entropies_gives_its_share(n):
    edges = np.sort(ENTROPY)[[60, 120, 180, 240]]
    shares = np.bincount(np.searchsorted(edges, ENTROPY[number(stratify(POOL, ENTROPY, n))], side="right"), minlength=5)
    assert shares.sum() == n
    assert shares.max() - shares.min() <= 1


@pytest.mark.parametrize(
    "draw", [lambda seed: stratify(POOL, ENTROPY, 75, seed=seed), lambda seed: plain(POOL, 75, seed)]
)
def test_at_most_two_of_a_template_none_twice_and_the_seed_decides(draw):
    one = draw(1)
    assert max(Counter(one.unit).values()) <= 2
    assert len(set(number(one))) == 75
    assert all(unit == f"t{i // 3}" for unit, i in zip(one.unit, number(one), strict=True))
    np.random.seed(9)
    assert draw(1).text == one.text != draw(2).text


def test_a_plain_sample_does_not_look_at_entropy():
    means = [ENTROPY[number(plain(POOL, 75, seed))].mean() for seed in range(40)]
    assert np.mean(means) == pytest.approx(ENTROPY.mean(), abs=0.05)


def test_too_large_a_sample_is_refused_with_what_the_bin_gives():
    with pytest.raises(Refused, match="--n 301: the pool has 300 prompts"):
        stratify(POOL, ENTROPY, 301)
    few = POOL.take(range(30))
    with pytest.raises(
        Refused, match=r"--n 30: entropy bin \d of 5 gives \d of 6 prompts with at most 2 of a template"
    ):
        stratify(few, ENTROPY[:30], 30)
    with pytest.raises(Refused, match="--n 25: the pool has 20 prompts with at most 2 of a template"):
        plain(few, 25)
