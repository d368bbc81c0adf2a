"""The shortest evidence at which answers leave the exact ones: a search by length, then step by step simpler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from llmgeom.prompts.process import Draw, Process

Distance = Callable[[Sequence[Draw]], np.ndarray]  # bits by which the answers to these draws miss the exact ones


@dataclass(frozen=True)
class Search:
    """What a search found.

    Attributes:
        draw: the evidence; None where no distance was above the bound.
        bits: its distance.
        tried: how many sequences were asked about.
    """

    draw: Draw | None
    bits: float
    tried: int


def search(process: Process, distance: Distance, bound: float, *, n: int, most: int, seed: int) -> Search:
    """Evidence, as short and simple as it can be made, at which a distance is above a bound.

    Lengths are tried from 0 on, each with `n` draws of the process; of the first length at which some are above the
    bound the farthest is simplified: an observation is left out, or its outcome replaced by an earlier one, as long as
    the distance stays above the bound. Deterministic: the same seed gives the same evidence.

    Args:
        process: of the draws.
        distance: of each draw.
        bound: bits.
        n: draws for each length. most: the longest. seed: of the draws.
    """
    tried = 0
    for k in range(most + 1):
        drawn = (process.draw(k, Random(f"llmgeom/fuzz/{process.title}/{seed}/{k}/{i}")) for i in range(n))
        draws = list({_key(draw): draw for draw in drawn}.values())
        bits = distance(draws)
        tried += len(draws)
        if bits.max() > bound:
            worst = int(bits.argmax())
            return _simplified(process, distance, bound, Search(draws[worst], float(bits[worst]), tried))
    return Search(None, 0.0, tried)


def _simplified(process: Process, distance: Distance, bound: float, hit: Search) -> Search:
    assert hit.draw is not None
    while True:
        steps = [draw for draw in _simpler(hit.draw, process.answers) if process.possible(draw)]
        bits = distance(steps) if steps else np.array([])
        tried = hit.tried + len(steps)
        above = np.flatnonzero(bits > bound)
        if not len(above):
            return replace(hit, tried=tried)
        hit = Search(steps[int(above[0])], float(bits[above[0]]), tried)


def _simpler(draw: Draw, answers: int) -> Iterator[Draw]:
    """Draws one step simpler, the simplest first: an observation less, or one with an earlier outcome."""
    for i in range(len(draw.seen)):
        items = (*draw.items[:i], *draw.items[i + 1 :])
        order = {item: number for number, item in enumerate(dict.fromkeys(items))}
        yield replace(draw, seen=(*draw.seen[:i], *draw.seen[i + 1 :]), items=tuple(order[item] for item in items))
    for i, outcome in enumerate(draw.seen):
        for earlier in range(min(outcome, answers)):
            yield replace(draw, seen=(*draw.seen[:i], earlier, *draw.seen[i + 1 :]))


def _key(draw: Draw) -> tuple:
    return draw.seen, draw.items, tuple(sorted(draw.stated.items()))
