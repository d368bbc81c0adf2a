"""Counterfactual evidence: another mark in one observation of a prompt, and its effect on the exact answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import numpy as np

from llmgeom.batch import Batch
from llmgeom.prompts.chance import shuffled
from llmgeom.prompts.process import Draw, Process, draws_of
from llmgeom.stats.information import bits

DIFFER = 0.01  # least difference of a probability: closer exact answers cannot show which prompt was read


@dataclass(frozen=True)
class Change:
    """One observation of a prompt with another mark.

    Attributes:
        prompt: its number in the batch.
        place: the number of the observation.
        mark: the new mark, an outcome.
        shift: rise in bits of the exact log odds of the new mark over the old one; infinite if an exact answer excludes
            one of the two.
    """

    prompt: int
    place: int
    mark: int
    shift: float


def changes(process: Process, batch: Batch, seed: int) -> list[Change]:
    """One random change for each prompt in which some change affects the exact answer."""
    found = (_change(process, i, draw, Random(f"llmgeom/change/{seed}/{i}")) for i, draw in enumerate(draws_of(batch)))
    return [change for change in found if change is not None]


def _change(process: Process, prompt: int, draw: Draw, rng: Random) -> Change | None:
    choices = [(i, mark) for i, old in enumerate(draw.seen) for mark in range(process.answers) if mark != old]
    for place, mark in shuffled(rng, choices):
        other = replace(draw, seen=(*draw.seen[:place], mark, *draw.seen[place + 1 :]))
        if not process.possible(other):
            continue
        before, after = process.predictive([draw, other]).double().numpy()
        if np.abs(np.exp(before) - np.exp(after)).max() > DIFFER:
            return Change(prompt, place, mark, _shift(before, after, mark, draw.seen[place]))
    return None


def _shift(before: np.ndarray, after: np.ndarray, new: int, old: int) -> float:
    ends = np.array([[p[new], p[old]] for p in (before, after)])
    if not np.isfinite(ends).all():
        return float("inf")
    odds = ends[:, 0] - ends[:, 1]
    return float(bits(odds[1] - odds[0]))
