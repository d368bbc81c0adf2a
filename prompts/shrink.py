"""The shortest evidence at which answers differ from exact: a search by length, then stepwise simplification."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from llmgeom.prompts.process import Draw, Process

Distance = Callable[[Sequence[Draw]], np.ndarray]  # draws -> distance in bits of their answers from the exact answers


@dataclass(frozen=True)
class Search:
    """The result of a search.

    Attributes:
        draw: the evidence; None if no distance was above the bound.
        bits: its distance.
        tried: number of sequences given to the model.
    """

    draw: Draw | None
    bits: float
    tried: int


def search(process: Process, distance: Distance, bound: float, *, n: int, most: int, seed: int) -> Search:
    """Evidence, as short and simple as possible, at which a distance is above a bound.

    Lengths are tried from 0 on, each with `n` draws of the process. At the first length with a draw above the bound,
    the
    draw with the largest distance is simplified: an observation is left out, or its outcome replaced by an earlier one,
    as long as the distance stays above the bound. The same seed gives the same evidence.

    Args:
        distance: distance of each draw.
        bound: bits.
        n: draws for each length. most: the largest length. seed: seed of the draws.
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
    """Draws one step simpler, the simplest first: one observation fewer, or one with an earlier outcome."""
    for i in range(len(draw.seen)):
        items = (*draw.items[:i], *draw.items[i + 1 :])
        order = {item: number for number, item in enumerate(dict.fromkeys(items))}
        yield replace(draw, seen=(*draw.seen[:i], *draw.seen[i + 1 :]), items=tuple(order[item] for item in items))
    for i, outcome in enumerate(draw.seen):
        for earlier in range(min(outcome, answers)):
            yield replace(draw, seen=(*draw.seen[:i], earlier, *draw.seen[i + 1 :]))


def _key(draw: Draw) -> tuple:
    return draw.seen, draw.items, tuple(sorted(draw.stated.items()))
