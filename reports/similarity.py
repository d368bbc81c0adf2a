"""How alike two records place the same prompts: CKA and RSA of stored coordinates, against permuted clusters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from llmgeom.record import Record
from llmgeom.stats import tests
from llmgeom.stats.resampling import band, jackknife, permute_clusters
from llmgeom.stats.similarity import alignment, cka, distance_ranks, rsa

PERMUTATIONS = 1999
Measure = Literal["CKA", "RSA"]
MEASURES: dict[Measure, Callable[[np.ndarray, np.ndarray], float]] = {"CKA": cka, "RSA": rsa}


@dataclass(frozen=True)
class Similarity:
    """How alike two records place the same prompts.

    1 where places are equal up to rotation and scale (RSA: where the distances have one order), about 0 where they are
    unrelated.

    Attributes:
        probe, array: where the coordinates stand, [prompt component].
        components: how many of them the reference and the other record hold; `of` says so in words.
        low, high: 95 % jackknife interval over clusters, on Fisher's scale.
        null_low, null_high: 95 % of the permutations of clusters; p is one-sided against these.
    """

    probe: str
    array: str
    measure: Measure
    components: tuple[int, int]
    value: float
    low: float
    high: float
    null_low: float
    null_high: float
    p: float
    n: int
    clusters: int
    of: str


def permuted(
    measure: Measure, x: np.ndarray, y: np.ndarray, clusters: Sequence, permutations: int, seed: int
) -> np.ndarray:
    """[draw] similarities of x with y whose clusters have changed places. UserError as `permute_clusters`."""
    orders = permute_clusters(np.random.default_rng(seed), clusters, permutations)
    if measure == "CKA":
        return np.array([cka(x, y[order]) for order in orders])
    a, b = distance_ranks(x), distance_ranks(y)  # ranking 2,775 distances again for each order takes 20 times as long
    return np.array([alignment(a, b[np.ix_(order, order)]) for order in orders])


def similarities(probe: str, measure: Measure, first: Record, other: Record) -> list[Similarity]:
    """The similarity at each site, from the array with the most components that both hold.

    Of several such arrays it takes the first by name. Places in a control (`control_scores`) are not the models' own
    and are left out. Raises UserError: coordinates that are all alike, or clusters that cannot change places.
    """
    ours, theirs = _places(first, probe), _places(other, probe)
    shared = {name for name in ours.keys() & theirs.keys() if not name.endswith("control_scores")}
    both = sorted((-min(ours[name].shape[1], theirs[name].shape[1]), name) for name in shared)
    # The last assignment wins: the first array of each site, "" where the name says none.
    sites = {name.removesuffix("scores") if name.endswith("_scores") else "": name for _, name in reversed(both)}
    return [_similar(probe, name, measure, ours[name], theirs[name], first) for _, name in sorted(sites.items())]


def _similar(probe: str, name: str, measure: Measure, x: np.ndarray, y: np.ndarray, first: Record) -> Similarity:
    similarity = MEASURES[measure]
    clusters, seed = first.prompts["template"], first.facts.get("seed", 0)
    value, null = similarity(x, y), permuted(measure, x, y, clusters, PERMUTATIONS, seed)
    over = jackknife(lambda rows: similarity(x[rows], y[rows]), np.arange(len(x)), clusters, "fisher")
    few, site = (
        (x.shape[1], y.shape[1]),
        name.removesuffix("scores").replace("_", " ") if name.endswith("_scores") else "",
    )
    return Similarity(
        probe, name, measure, few, value, over.low, over.high, *band(null, "upper"), tests.tail_p(value, null),
        n=len(x), clusters=len(set(clusters)),
        of=f"{site}{measure} of the first {' and '.join(map(str, dict.fromkeys(few)))} components",
    )  # fmt: skip


def _places(record: Record, probe: str) -> dict[str, np.ndarray]:
    """The probe's arrays [prompt component], of one row a prompt."""
    measured, n = record.results[probe], len(record.prompts["text"])
    shaped = [name for name, q in measured.quantities.items() if len(q.axes) == 2 and q.axes[0] == "prompt"]
    return {name: measured.arrays[name].astype(np.float64) for name in shaped if len(measured.arrays[name]) == n}
