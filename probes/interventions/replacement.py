"""Heads and blocks replaced one at a time, by 0, by a mean, or by what another prompt has there, and what each did."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from llmgeom.errors import Unavailable
from llmgeom.model.capture import Site
from llmgeom.model.edits import Point
from llmgeom.model.subject import Positions
from llmgeom.probes.interventions.axis import Move
from llmgeom.probes.interventions.patching import Copy, Place
from llmgeom.probes.interventions.splits import Halves, Sequences

Kind = Literal["heads", "blocks"]
Way = Literal["zero", "mean", "interchange"]
WAYS: dict[Kind, tuple[Way, ...]] = {"heads": ("zero", "mean", "interchange"), "blocks": ("zero", "mean")}
POINTS: dict[Kind, tuple[Point, ...]] = {"heads": ("z",), "blocks": ("attention_write", "mlp_write")}
BRANCHES: dict[str, tuple[Point, ...]] = {
    "attention": ("attention_write",),
    "mlp": ("mlp_write",),
    "block": ("attention_write", "mlp_write"),
}
WHERE: dict[Positions, str] = {
    "query": "replaced at the final token",
    "all": "replaced at every position but the first, the mean being taken over all of these",
}
WHERE_OF_A_TASK: dict[Positions, str] = {
    "query": "replaced at every query, the means being taken query by query",
    "all": "replaced at every position, the means being taken position by position",
}
DONORS = 4  # prompts whose z takes the place of a prompt's own, one after another; each of another unit


@dataclass(frozen=True)
class Part:
    """What is replaced at once: these coordinates of these places."""

    name: str
    places: tuple[Place, ...]
    columns: slice = field(default_factory=lambda: slice(None))


def parts(kind: Kind, layers: int, heads: int, head_dim: int) -> tuple[Part, ...]:
    """Every query head, layer by layer; or every layer's attention, then every MLP, then every block."""
    if kind == "heads":
        cut = [slice(head * head_dim, (head + 1) * head_dim) for head in range(heads)]
        return tuple(
            Part(f"L{layer}H{head}", (("z", layer),), cut[head]) for layer in range(layers) for head in range(heads)
        )
    return tuple(
        Part(f"L{layer} {name}", tuple((point, layer) for point in points))
        for name, points in BRANCHES.items()
        for layer in range(layers)
    )


def donors(clusters: Sequence[str], count: int, seed: int) -> np.ndarray:
    """[draw prompt] for each prompt one of another unit: units in a random ring, and in draw i the unit i + 1 further.

    No unit gives to itself, none gives twice to the same, and in a draw each gives to one other.
    """
    rng = np.random.default_rng([seed, 3])
    names = np.array(clusters)
    ring = rng.permutation(np.unique(names))
    place = {name: i for i, name in enumerate(ring.tolist())}
    return np.array(
        [
            [rng.choice(np.flatnonzero(names == ring[(place[name] + step) % len(ring)])) for name in names.tolist()]
            for step in range(1, count + 1)
        ]
    )


def zero(x: Tensor, row: Tensor) -> Tensor:
    """To 0."""
    return -x


def towards(mean: Tensor) -> Move:
    """To the mean [position coordinate], of one position or of each that is edited in an input."""
    return lambda x, row: mean[row % len(mean)] - x


def exchanged(own: Tensor, donor: np.ndarray) -> Move:
    """To what the donor of an input has at the same position, own [row coordinate] with as many rows an input, by what
    it has more than one's own: who gives to himself is moved by exactly nothing, in whatever packing x was computed."""
    each = own.unflatten(0, (len(donor), -1))
    given = (each[torch.from_numpy(donor)] - each).flatten(0, 1)
    return moved_by(given)


def moved_by(steps: Tensor) -> Move:
    """By a step of its own each, [row coordinate]."""
    return lambda x, row: steps[row]


def _given(own: Mapping[Place, Tensor], donor: np.ndarray, place: Place) -> Move:
    return exchanged(own[place], donor)


def _within(move: Move, columns: slice) -> Move:
    def only(x: Tensor, row: Tensor) -> Tensor:
        kept = torch.zeros_like(x)
        kept[:, columns] = move(x, row)[:, columns]
        return kept

    return only


@dataclass(frozen=True, eq=False)
class Replaced:
    """What replacing each part did: by way and effect [part prompt], bits; units: of the prompts."""

    parts: tuple[Part, ...]
    layers: int
    positions: Positions
    clusters: np.ndarray
    effects: Mapping[Way, Mapping[str, np.ndarray]]

    @classmethod
    def of(
        cls,
        halves: Halves | Sequences,
        kind: Kind,
        positions: Positions,
        tell: Callable[[int, int], None] | None = None,
    ) -> Replaced:
        """Means from one half of the units, effects on the other.

        positions   "query": at the final token. "all": at every position but the first, to which many models tie
                    what no head says, and by the mean over all those positions; there is no interchange then, for
                    prompts differ in length. Of a task, whose sequences are alike: at every query, or at every
                    position, by the mean of each or by what the donor has there.
        """
        layers, points = len(halves.subject.blocks), POINTS[kind]
        places: list[Place] = [(point, layer) for point in points for layer in range(layers)]
        mean, own = halves.means(points, positions), halves.own(points, positions)
        heads, size = (halves.subject.facts[name] for name in ("heads", "head_dim"))
        if kind == "heads" and (unlike := {x.shape[1] for x in mean.values()} - {heads * size}):
            raise Unavailable(
                f"{halves.subject.name}: a layer of {heads} heads of {size} and one of {unlike.pop()} "
                "coordinates; heads are cut alike in every layer"
            )
        every = parts(kind, layers, heads, size)
        moves: dict[Way, list[Callable[[Place], Move]]] = {
            "zero": [lambda place: zero],
            "mean": [lambda place: towards(mean[place])],
        }
        if own is not None:
            moves["interchange"] = [
                partial(_given, own, donor) for donor in donors(halves.held.cluster, DONORS, halves.seed)
            ]
        ways = [way for way in WAYS[kind] if way in moves]
        copies: list[Copy] = [
            {place: _within(to(place), part.columns) for place in part.places}
            for way in ways
            for part in every
            for to in moves[way]
        ]
        found = halves.replacing(tuple(places), positions).run(copies, tell)
        effects: dict[Way, dict[str, np.ndarray]] = {way: {} for way in ways}
        ends = np.cumsum([len(every) * len(moves[way]) for way in ways])[:-1]
        for name, each in found.items():
            for way, mine in zip(ways, np.split(each, ends), strict=True):
                effects[way][name] = mine.reshape(len(every), len(moves[way]), -1).mean(1)
        return cls(every, layers, positions, np.array(halves.held.cluster), effects)


def sites(kind: Kind) -> set[Site]:
    """What has to be captured of the clean model."""
    return {Site(point) for point in POINTS[kind]}
