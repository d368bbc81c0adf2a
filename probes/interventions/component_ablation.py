"""Component ablation: each head or block is set to zero, to its mean, or to another input's activation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from llmgeom.model.batching import BATCH_TOKENS
from llmgeom.model.edits import Point
from llmgeom.model.intervention import (
    EDITED,
    EVERY,
    GRADIENTS,
    Effects,
    Intervention,
    Location,
    Move,
    add,
    copies_of,
    priced,
    to_mean,
    two_stages,
    zero,
)
from llmgeom.plan import Plan, subset_of
from llmgeom.probe import (
    UNTRAINED,
    Batch,
    Capture,
    Model,
    Needs,
    Probe,
    ProbeInput,
    Result,
    Site,
    Unavailable,
    is_control,
)
from llmgeom.probes.interventions.component_results import TITLES, measure_blocks, measure_heads
from llmgeom.probes.interventions.halves import (
    ESTIMATION,
    EVALUATION,
    PROMPT_SITES,
    Halves,
    Positions,
    check,
    halves,
)
from llmgeom.provenance import CONTROLS, UNCLAIMED
from llmgeom.stats.ridge_probe import folds
from llmgeom.world import World

Kind = Literal["heads", "blocks"]
Method = Literal["zero", "mean", "resample"]
METHODS: dict[Kind, tuple[Method, ...]] = {"heads": ("zero", "mean", "resample"), "blocks": ("zero", "mean")}
POINTS: dict[Kind, tuple[Point, ...]] = {"heads": ("z",), "blocks": ("attn_out", "mlp_out")}
BRANCHES: dict[str, tuple[Point, ...]] = {
    "attention": ("attn_out",),
    "mlp": ("mlp_out",),
    "block": ("attn_out", "mlp_out"),
}
DONORS = 4  # donors of an input in resample ablation, each from another cluster
OF_COPY = 12  # prompts on which an untrained copy is read


def components(kind: Kind, layers: int, heads: int, width: int) -> list[tuple[tuple[Location, ...], slice]]:
    """Locations and columns of every component: every query head, whose z has `width` coordinates, layer by layer; or
    every layer's attention, then every MLP, then every block."""
    if kind == "heads":
        columns = [slice(head * width, (head + 1) * width) for head in range(heads)]
        return [((("z", layer),), head) for layer in range(layers) for head in columns]
    return [
        (tuple((point, layer) for point in points), slice(None))
        for points in BRANCHES.values()
        for layer in range(layers)
    ]


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


def stages(kind: Kind, control: bool) -> tuple[int, tuple[int, ...]]:
    """How many components of a stratum (heads; attentions, MLPs, whole blocks) are edited as the largest by gradients,
    and at random, by `two_stages`; and the strata that are edited whole.

    Of the model every whole block is, since the weakest one counts. A third of the edits suffices for an untrained
    copy, whose numbers only say how far apart copies lie: simulated as in `two_stages`, with a log sd of .5, 4 and 4
    of 30 components give their total to 14 %, 8 and 8 of 270 to 12 %, by which the null is wider.
    """
    if kind == "heads":
        return (EDITED // 3 if control else EDITED), ()
    return (EDITED // 6, ()) if control else (EDITED // 3, (2,))


def ablate(
    split: Halves, kind: Kind, method: Method, positions: Positions, exact: bool = True, control: bool = False
) -> Effects:
    """Ablate every component on the evaluation half by one method, with means from the estimation half.

    Args:
        exact: Edit every component; otherwise of many of prompts whose exact answer is not known, as `two_stages`.
        positions: for prompts, "query" is the final token and "all" every position but the first, with one mean
            over all those positions. For a task's sequences, "query" is every query and "all" every position, with a
            mean for each position.
        control: whether it is an untrained copy, of which fewer are edited (`stages`).

    Returns:
        outcome -> [component prompt], of several donors their mean; layers, their number; half [prompt], 0 or 1 by
        cluster; of blocks also norms [branch layer prompt], squared length of the writes of attention and MLP in the
        clean model, mean over the edited positions (for prompts, the final token). Of two stages also what those give.

    Raises:
        Unavailable: layers whose heads have different sizes.
    """
    subject, points = split.subject, POINTS[kind]
    layers, heads, width = len(subject.blocks), subject.facts["heads"], subject.facts["head_dim"]
    mean = split.means(points, positions)
    if kind == "heads" and (unlike := {x.shape[1] for x in mean.values()} - {heads * width}):
        raise Unavailable(
            f"{subject.name}: a layer of {heads} heads of {width} and one of {unlike.pop()} coordinates; "
            "all layers need heads of one shape"
        )
    moves: list[Callable[[Location], Move]] = [lambda _: zero]
    if method == "mean":
        moves = [lambda at: to_mean(mean[at])]
    if method == "resample":
        _, activations = split.activations(EVALUATION, points, positions)
        by_input = {at: x.unflatten(0, (len(split.evaluation), -1)) for at, x in activations.items()}

        def to_donor(donor: Tensor, at: Location) -> Move:
            """The donor's activation minus the input's: one that is its own donor moves by exactly 0, however x was
            packed."""
            return add((by_input[at][donor] - by_input[at]).flatten(0, 1))

        given = torch.from_numpy(donors(split.evaluation.cluster, DONORS, split.seed))
        moves = [partial(to_donor, donor) for donor in given]
    groups = [
        [Intervention("", {at: move(at) for at in locations}, columns) for move in moves]
        for locations, columns in components(kind, layers, heads, width)
    ]
    edits = [one for group in groups for one in group]
    runner = split.runner("later" if split.task is None and positions == "all" else positions)
    all_exactly = exact or split.task is not None or split.exact is not None
    number, whole = stages(kind, control)
    effects = two_stages(
        runner,
        groups,
        "kl",
        None if all_exactly else lambda: runner.approximate_kl(edits, split.seed),
        seed=split.seed,
        strata=np.repeat(range(3), layers).tolist() if kind == "blocks" else (),
        whole=whole,
        number=number,
        stage=f"{kind}, {method}",
    )
    if kind == "blocks":
        _, writes = split.activations(EVALUATION, points, "query" if split.task is None else positions)
        n = len(split.evaluation)
        by_row = {at: x.square().sum(1).unflatten(0, (n, -1)).mean(1).numpy() for at, x in writes.items()}
        effects["norms"] = np.array([[x for at, x in by_row.items() if at[0] == point] for point in points])
    return effects | {"layers": np.array(layers), "half": folds(split.evaluation.cluster, split.seed, 2)}


@dataclass(frozen=True)
class ComponentProbe:
    """One method applied to every head or block of a model and its untrained controls.

    Attributes:
        task: the task of whole sequences; None for prompts, which are read at their final tokens.
        exact: as in `ablate`.
        copies: untrained copies that are read; of two stages on OF_COPY prompts.
    """

    kind: Kind
    method: Method
    positions: Positions
    seed: int
    batch_tokens: int
    task: World | None = None
    exact: bool = True
    copies: int = CONTROLS

    @property
    def NEEDS(self) -> Needs:
        here = {Site(point) for point in POINTS[self.kind]} if self.task is None or self.positions == "query" else set()
        return Needs(
            sites=frozenset(here) | (PROMPT_SITES if self.task is None else frozenset()),
            controls=frozenset({UNTRAINED}),
            samples=frozenset({ESTIMATION}),
            examine=self.effects,
        )

    def effects(self, subject: Model, captures: Mapping[str, Capture]) -> Effects:
        """`ablate` in one model; nothing of a copy that only another probe reads."""
        if control := is_control(subject):
            if subject.facts["untrained"] - self.seed > self.copies:
                return {}
            main = captures[EVALUATION]
            few = None if self.task or self.exact else subset_of(main.batch, self.seed, OF_COPY)
            if few is not None and len(set(main.batch.take(few.tolist()).cluster)) > 1:
                captures = {**captures, EVALUATION: main.take(few)}
        split = Halves(subject, captures, self.seed, self.batch_tokens, self.task)
        return ablate(split, self.kind, self.method, self.positions, self.exact, control)

    def priced(self, subject: Model, batch: Batch, control: bool = False) -> float:
        """Tokens of whole passes that the edits, and their gradients, of one model take."""
        depth, whole, draws, n = len(subject.blocks), int(batch.tokens.lengths.sum()), 1, len(batch)
        first = [locations[0][1] for locations, _ in components(self.kind, depth, subject.facts["heads"], 1)]
        everywhere, staged = self.positions == "all", len(first) > EVERY
        if self.exact or self.task is not None or "first" in batch.columns:
            staged = False
        read = everywhere * whole  # where the means come from
        if control and not self.exact and self.task is None and n > OF_COPY:
            whole, batch, n = whole * OF_COPY // n, batch.take(range(OF_COPY)), OF_COPY
        read += whole  # the clean pass
        if self.method == "resample":
            read, draws = read + everywhere * whole, DONORS
        if staged:
            number, all_of = stages(self.kind, control)
            some = 2 * number * (3 - len(all_of) if self.kind == "blocks" else 1)
            first = [i * depth // some for i in range(some)] + [*range(depth)] * len(all_of)
        each = whole if everywhere or self.task is not None else n
        edits = priced([layer for layer in first for _ in range(draws)], depth, each, copies_of(batch, subject))
        return read + edits + staged * whole * (1 + 2 * GRADIENTS)

    def measure(self, data: ProbeInput) -> Result:
        """Raises UserError if no ablated component reaches the answers."""
        measure = measure_heads if self.kind == "heads" else measure_blocks
        controls = [one for one in data.control_observations if one]
        clusters = np.array(data.capture.batch.cluster)
        found = measure(data.observations, controls, self.method, clusters, self.positions)
        return replace(found, title=f"{found.title}: {TITLES[self.method]}")


def question(
    subject: Model,
    batch: Batch,
    kind: Kind,
    *,
    task: World | None = None,
    positions: Positions = "all",
    exact: bool = True,
    nulls: int | None = None,
    seed: int = 0,
    batch_tokens: int = BATCH_TOKENS,
) -> Plan:
    """The question that ablates every head, or every block, by each method, in the model and in `nulls` controls.

    Args:
        nulls: untrained copies; by default CONTROLS where a claim names them, else UNCLAIMED: of prompts that is the
            MLPs' share of blocks' means alone.
        task: the task of the batch's whole sequences; None for prompts, which are read at their final tokens.
        positions, exact: as `ablate`; "all" of prompts, which differ in length, leaves out resample ablation.

    Raises:
        UserError: fewer than 5 clusters in a half; a batch that has query positions but no task; a task of real
            numbers, or with more tokens than the model has outputs; a model without such components.
    """
    check(subject, batch, task)
    if why := subject.partial({Site(point) for point in POINTS[kind]}):
        raise Unavailable(f"{subject.name}: {why}")
    estimation, evaluation = halves(batch, seed)
    methods: list[Method] = [
        way for way in METHODS[kind] if way != "resample" or task is not None or positions == "query"
    ]
    copies = {
        method: nulls or (CONTROLS if task or (kind, method) == ("blocks", "mean") else UNCLAIMED) for method in methods
    }
    probes: dict[str, Probe] = {
        f"{kind}_{method}": ComponentProbe(kind, method, positions, seed, batch_tokens, task, exact, copies[method])
        for method in methods
    }
    about = {"kind": kind, "methods": methods, "positions": positions, "donors": DONORS}
    facts = {"estimated on": len(estimation), "components": about}
    drawn, samples = max(copies.values()), {ESTIMATION: estimation}
    return Plan.of(subject, evaluation, probes, drawn, seed, batch_tokens, samples, facts)
