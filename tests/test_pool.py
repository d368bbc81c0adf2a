"""A stratified sample has its share from every fifth of the entropies and at most two prompts of a template."""

from collections import Counter

import numpy as np
import pytest

from llmgeom.batch import Batch, Text
from llmgeom.errors import UserError
from llmgeom.prompts.pool import as_diverse, plain, stratify
from tests.refusals import refused

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
    assert max(Counter(one.cluster).values()) <= 2
    assert len(set(number(one))) == 75
    assert all(unit == f"t{i // 3}" for unit, i in zip(one.cluster, number(one), strict=True))
    np.random.seed(9)
    assert draw(1).text == one.text != draw(2).text


def test_too_large_a_sample_is_refused_with_what_the_bin_gives():
    with refused(UserError, "--n 301", 300):
        stratify(POOL, ENTROPY, 301)
    few = POOL.take(range(30))
    with refused(UserError, "--n 30", 5, 6, 2):
        stratify(few, ENTROPY[:30], 30)
    with refused(UserError, "--n 25", 20, 2):
        plain(few, 25)


LARGE = Batch(Text(tuple(f"prompt {i}" for i in range(1000))), tuple(f"t{i // 4}" for i in range(1000)), {"name": "l"})
BITS = np.random.default_rng(1).normal(4, 1, 1000)


def token_ids() -> list[list[int]]:
    """Every other prompt has a small vocabulary and few endings; the rest are about as varied as can be."""
    rng = np.random.default_rng(5)
    rows = []
    for i in range(len(LARGE)):
        words = 60 if i % 2 else 3000
        rows.append([*rng.integers(words, size=int(rng.integers(5, 12))).tolist(), int(rng.integers(words // 6))])
    return rows


IDS = token_ids()


def counted(batch: Batch, last: int = 1) -> tuple[int, int, int]:
    rows = number(batch)
    return (
        len(set().union(*(IDS[i] for i in rows))),
        len(set().union(*(IDS[i][-last:] for i in rows))),
        len({LARGE.cluster[i] for i in rows}),
    )


def alike(wanted: tuple[int, int, int], seed: int = 0, last: int = 1) -> Batch:
    return as_diverse(LARGE, BITS, IDS, [row[-last:] for row in IDS], wanted, 75, seed)


@pytest.mark.parametrize("wanted", [(250, 25, 50), (450, 60, 75)])
def test_a_diversity_that_can_be_had_is_reached_and_fifths_templates_and_the_seed_are_kept(wanted):
    """From any one seed a draw of both kinds of prompts starts far from it."""
    batch = alike(wanted)
    start = counted(stratify(LARGE, BITS, 75))
    assert max(abs(have - want) / want for have, want in zip(start, wanted, strict=True)) > 0.1
    assert counted(batch) == pytest.approx(wanted, rel=0.03)
    assert batch.source["as_diverse"] == {
        "n": 75, "wanted": list(wanted), "start": list(start), "reached": list(counted(batch)), "seed": 0,
    }  # fmt: skip
    rows, edges = number(batch), np.quantile(BITS, [0.2, 0.4, 0.6, 0.8])
    assert len(set(rows)) == 75 and np.bincount(np.searchsorted(edges, BITS[rows])).tolist() == [15] * 5
    assert max(Counter(batch.cluster).values()) <= 2
    np.random.seed(9)
    assert alike(wanted).text == batch.text != alike(wanted, 1).text


def test_of_several_positions_the_tokens_at_them_are_matched():
    """A match on final tokens leaves those before them as they come: 121 at the last three where 90 were wanted."""
    wanted = (300, 90, 60)
    assert counted(alike(wanted, last=3), last=3) == pytest.approx(wanted, rel=0.03)
    assert counted(alike((300, 30, 60)), last=3)[1] > 1.2 * 90


def test_one_that_cannot_be_had_is_come_near_and_said():
    batch = alike((10, 1, 75))
    reached = batch.source["as_diverse"]["reached"]
    assert reached == list(counted(batch))
    assert 10 < reached[0] < counted(stratify(LARGE, BITS, 75))[0]
