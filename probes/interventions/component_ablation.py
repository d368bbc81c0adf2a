"""Component ablation: each head or block is set to zero, to its mean, or to another input's activation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from llmgeom.model.edits import Point
from llmgeom.probe import Site, Unavailable
from llmgeom.probes.interventions.patching import Location, Move, Patch, add, flat, to_mean, to_zero
from llmgeom.probes.interventions.splits import Positions, PromptSplit, TaskSplit

Kind = Literal["heads", "blocks"]
Method = Literal["zero", "mean", "resample"]
METHODS: dict[Kind, tuple[Method, ...]] = {"heads": ("zero", "mean", "resample"), "blocks": ("zero", "mean")}
POINTS: dict[Kind, tuple[Point, ...]] = {"heads": ("z",), "blocks": ("attention_write", "mlp_write")}
BRANCHES: dict[str, tuple[Point, ...]] = {
    "attention": ("attention_write",),
    "mlp": ("mlp_write",),
    "block": ("attention_write", "mlp_write"),
}
DONORS = 4  # donors of an input in resample ablation, each from another cluster


@dataclass(frozen=True)
class Component:
    """The coordinates and locations that are ablated together."""

    name: str
    locations: tuple[Location, ...]
    columns: slice = field(default_factory=lambda: slice(None))

    def patch(self, move: Callable[[Location], Move]) -> Patch:
        """The patch that changes these coordinates alone, at each location by its own move."""
        return {location: _within(move(location), self.columns) for location in self.locations}


def components(kind: Kind, layers: int, heads: int, head_dim: int) -> tuple[Component, ...]:
    """Every query head, layer by layer; or every layer's attention, then every MLP, then every block."""
    if kind == "heads":
        columns = [slice(head * head_dim, (head + 1) * head_dim) for head in range(heads)]
        return tuple(
            Component(f"L{layer}H{head}", (("z", layer),), columns[head])
            for layer in range(layers)
            for head in range(heads)
        )
    return tuple(
        Component(f"L{layer} {name}", tuple((point, layer) for point in points))
        for name, points in BRANCHES.items()
        for layer in range(layers)
    )


def sites(kind: Kind) -> set[Site]:
    """Sites of the clean model that the ablation needs."""
    return {Site(point) for point in POINTS[kind]}


def donors(clusters: Sequence[str], count: int, seed: int) -> np.ndarray:
    """Indices [draw prompt]: for each prompt a donor from another cluster.

    Clusters form a ring in random order; in draw i a prompt's donor comes from the i-th cluster after its own. So no
    cluster is its own donor, none is donor of the same cluster twice, and in each draw every cluster has one recipient.
    """
    rng = np.random.default_rng([seed, 3])
    names = np.array(clusters)
    ring = rng.permutation([*dict.fromkeys(clusters)])  # order of appearance, so that renaming changes nothing
    place = {name: i for i, name in enumerate(ring.tolist())}
    return np.array(
        [
            [rng.choice(np.flatnonzero(names == ring[(place[name] + step) % len(ring)])) for name in names.tolist()]
            for step in range(1, count + 1)
        ]
    )


def to_donor(activations: Mapping[Location, Tensor], donor: np.ndarray, location: Location) -> Move:
    """Resample ablation: replace each input's activation by its donor's at the same position.

    activations [row coordinate] have the same number of rows for every input. The move adds the donor's activation
    minus the input's, so that an input that is its own donor moves by exactly 0, however x was packed.
    """
    by_input = activations[location].unflatten(0, (len(donor), -1))
    return add((by_input[torch.from_numpy(donor)] - by_input).flatten(0, 1))


def _within(move: Move, columns: slice) -> Move:
    def only(x: Tensor, row: Tensor) -> Tensor:
        step = torch.zeros_like(x)
        step[:, columns] = move(x, row)[:, columns]
        return step

    return only


@dataclass(frozen=True, eq=False)
class AblationEffects:
    """Effects of ablating each component of one model.

    Attributes:
        clusters: [prompt] of the evaluation half.
        effects: method -> effect -> [component prompt], bits.
        norms: [branch layer prompt] squared length of the writes of attention and MLP in the clean model, mean over the
            edited positions (for prompts, the final token); empty for heads.
    """

    components: tuple[Component, ...]
    layers: int
    positions: Positions
    clusters: np.ndarray
    effects: Mapping[Method, Mapping[str, np.ndarray]]
    norms: np.ndarray = field(default_factory=lambda: np.empty((0, 0, 0)))

    @classmethod
    def of(cls, split: PromptSplit | TaskSplit, kind: Kind, positions: Positions) -> AblationEffects:
        """Ablate every component on the evaluation half, with means from the estimation half.

        Args:
            positions: for prompts, "query" is the final token and "all" every position but the first, with one mean
                over all those positions; "all" leaves out resample ablation, since prompts differ in length. For a
                task's sequences, "query" is every query and "all" every position, with a mean for each position.

        Raises:
            Unavailable: layers whose heads have different sizes.
        """
        layers, points, clusters = len(split.subject.blocks), POINTS[kind], split.clusters
        mean, activations = split.means(points, positions), split.activations(points, positions)
        heads, head_dim = (split.subject.facts[name] for name in ("heads", "head_dim"))
        if kind == "heads" and (unlike := {x.shape[1] for x in mean.values()} - {heads * head_dim}):
            raise Unavailable(
                f"{split.subject.name}: a layer of {heads} heads of {head_dim} and one of {unlike.pop()} coordinates; "
                "all layers need heads of one shape"
            )
        moves: dict[Method, list[Callable[[Location], Move]]] = {
            "zero": [lambda location: to_zero],
            "mean": [lambda location: to_mean(mean[location])],
        }
        if activations is not None and "resample" in METHODS[kind]:
            every_donor = donors(split.evaluation.cluster, DONORS, split.seed)
            moves["resample"] = [partial(to_donor, activations, donor) for donor in every_donor]
        ablated = components(kind, layers, heads, head_dim)
        patches = {method: [c.patch(move) for c in ablated for move in of] for method, of in moves.items()}
        locations = tuple((point, layer) for point in points for layer in range(layers))
        raw = split.ablation(locations, positions).run_kinds(patches, kind)
        effects: dict[Method, dict[str, np.ndarray]] = {
            method: {
                name: by_method[method].reshape(len(ablated), len(moves[method]), -1).mean(1)
                for name, by_method in raw.items()
            }
            for method in moves
        }
        if kind == "heads":
            return cls(ablated, layers, positions, clusters, effects)
        writes = split.activations(points, "query") if activations is None else activations
        assert writes is not None, "every activation is known at the queries"
        return cls(ablated, layers, positions, clusters, effects, _squared_lengths(writes, points, len(clusters)))

    def arrays(self, method: Method) -> dict[str, np.ndarray]:
        """The effects of one method as arrays by name, for the cache."""
        sizes = {"layers": self.layers, "components": len(self.components)}
        return flat({**sizes, "norms": self.norms, "effects": self.effects[method]})

    @classmethod
    def of_arrays(
        cls, kind: Kind, positions: Positions, method: Method, clusters: np.ndarray, arrays: Mapping[str, Any]
    ) -> AblationEffects:
        """The effects of one method from `arrays`, nested."""
        layers = int(arrays["layers"])
        every = components(kind, layers, int(arrays["components"]) // layers, 1)
        return cls(every, layers, positions, clusters, {method: arrays["effects"]}, arrays["norms"])


def _squared_lengths(writes: Mapping[Location, Tensor], points: Sequence[Point], n: int) -> np.ndarray:
    """[point layer prompt] mean over a prompt's rows of the squared length of the writes."""
    by_row = {at: x.square().sum(1).unflatten(0, (n, -1)).mean(1).numpy() for at, x in writes.items()}
    return np.array([[x for at, x in by_row.items() if at[0] == point] for point in points])
