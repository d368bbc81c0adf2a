"""Interchange of evidence in text: where a model stores one observation of a prompt on its way to the answer.

Patches act at one position, or along one edge of attention to a later position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
import torch
from scipy.interpolate import interp1d
from torch import Tensor

from llmgeom.claims import declared, layer_band
from llmgeom.model.intervention import (
    EDITED,
    EVERY,
    Effects,
    Intervention,
    Location,
    Move,
    Runner,
    copies_of,
    gradients,
    priced,
    rescaled,
)
from llmgeom.model.resume import clean_pass
from llmgeom.plan import subset_of
from llmgeom.probe import UNTRAINED, Batch, Model, Needs, ProbeInput, Site, is_control
from llmgeom.probes.interventions.axis import SIZE, VARIANCE, Axis
from llmgeom.probes.interventions.text_pairs import ROLES, TextPairs
from llmgeom.probes.shared.nulls import compare, mean_of, ratio_of
from llmgeom.progress import tell
from llmgeom.result import SENTENCE, Figure, Result, labelled, line
from llmgeom.stats.resampling import LEAST_CLUSTERS, band, interval_ends, jackknife, mean_intervals

PROBE = "text_patching"
FOLLOWS, TOTAL = "total effect over the exact shift", "total effect"
EDGE = "edges of attention"
MARK, LAST = ROLES.index("changed mark"), ROLES.index("last token")
PLACES = (MARK, LAST)  # roles at which random directions of equal size are patched, too
LEAST_SHIFT = 0.05  # bits: shares of a smaller total effect are not computed
LEAST_SHARE = 0.1  # of the total effect: positions and edges with a smaller share are not followed
MOST_EDGES = 12  # the largest edges
CONTROLLED = 8  # layers at which random directions and equal evidence are patched; their effects change little by layer
OF_COPY = 40  # prompts on which an untrained copy is read
EDGES = (*((MARK, role) for role in range(1, len(ROLES))), *((role, LAST) for role in range(1, LAST)))
# Around the shift by a patch at one position.
BAND = "band of random directions of equal size there; along a direction, of the higher control"
SETS = "sets of labels"
NO_VARIANCE = "no exchange has the same variance: compared with exchanges of the same size alone"


# ---- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Exchange:
    """Exchange of one observation inside a model, layer by layer. Tokens are those at which x and x' can differ.

    Effects are bits towards the exact answer: the change of the log odds of the mark of x' over that of x at the last
    token, with the sign of the exact change.

    Attributes:
        along: [d_model] of length 1; only the component along it is exchanged. None exchanges the whole residual.
    """

    subject: Model
    pairs: TextPairs
    batch_tokens: int
    along: np.ndarray | None = None

    @cached_property
    def _read(self) -> Tensor:
        return self.pairs.edited | self.pairs.positions(self.pairs.equal)

    @cached_property
    def _residuals(self) -> tuple[list[Tensor], list[Tensor]]:
        """[layer][token d_model] of x and of x', also at the twin of the changed mark."""

        def residuals(batch: Batch) -> list[Tensor]:
            rows = replace(batch, query=self._read)
            capture = self.subject.capture(rows, {Site.RESIDUAL}, batch_tokens=self.batch_tokens)
            return [x.double() for x in capture.layers(Site.RESIDUAL)]

        return residuals(self.pairs.x), residuals(self.pairs.other)

    @cached_property
    def runner(self) -> Runner:
        """Its outcome, shift, is the effect."""
        return Runner(
            self.subject,
            self.pairs.x,
            self.pairs.edited,
            lambda clean, patched: {"shift": (self._odds(patched[0]) - self._odds(clean[0])).numpy()},
            batch_tokens=self.batch_tokens,
            clean=clean_pass(self.subject, self.pairs.x, self.batch_tokens),
        )

    def _odds(self, log_probs: Tensor, prompts: Sequence[int] | slice = slice(None)) -> Tensor:
        """[prompt] log odds of the mark of x' over that of x, bits, with the sign of their exact change."""
        old, new = log_probs.double().gather(1, self.pairs.marks[prompts].to(log_probs.device)).T
        return (new - old) / math.log(2) * torch.from_numpy(self.pairs.sign)[prompts].to(new)

    def first_order(self, patches: Sequence[Intervention]) -> np.ndarray:
        """[patch prompt] their effects, by gradients."""
        return self.runner.first_order(patches, lambda x, prompts: [self._odds(x, prompts).sum()])[0]

    def total(self, prompts: Sequence[int] | None = None) -> np.ndarray:
        """[prompt] the effect of reading x' in the place of x, of some or all prompts."""
        some = [*range(len(self.pairs.x))] if prompts is None else [*prompts]
        before, after = (
            self._odds(
                self.subject.capture(one.take(some), {Site.LOG_PROBS}, batch_tokens=self.batch_tokens).log_probs, some
            )
            for one in (self.pairs.x, self.pairs.other)
        )
        return (after - before).numpy()

    @cached_property
    def role(self) -> Tensor:
        """[token] the role of each token, an index of ROLES."""
        return self.pairs.role[self.pairs.edited]

    def step(self, layer: int, role: int) -> Tensor:
        """[token of this role, d_model] the residual of x' minus that of x."""
        own, other = self._residuals
        return self._part((other[layer] - own[layer])[self.pairs.edited[self._read]][self.role == role])

    def equal(self, layer: int) -> Tensor:
        """[prompt d_model] residual of another observation with the changed mark less its own, both of x; or 0."""
        own, pairs = self._residuals[0][layer], self.pairs
        mark, twin = (pairs.positions(x)[self._read] for x in (pairs.at, pairs.equal))
        step = torch.zeros(len(pairs.x), own.shape[1], dtype=own.dtype)
        step[pairs.equal >= 0] = own[twin] - own[mark][pairs.equal >= 0]
        return self._part(step)

    def _part(self, step: Tensor) -> Tensor:
        if self.along is None:
            return step
        u = torch.from_numpy(self.along)
        return (step @ u)[:, None] * u

    def controls(self, layer: int, place: int, draws: int, seed: int) -> dict[str, list[Tensor]]:
        """[token of this role, d_model] for each draw: patches of the same size.

        For the whole residual they are random directions. Along a direction they are the controls of `llmgeom ablate
        --axis`: they exchange another direction with equal length, or other components with equal variance (over
        prompts, at this role). The second kind is absent if all other components together vary less.
        """
        at, rng = self.role == place, np.random.default_rng([seed, 51, layer, place])
        patch = self.step(layer, place)
        in_any = {SIZE: [rescaled(torch.from_numpy(rng.standard_normal(patch.shape)), patch) for _ in range(draws)]}
        if self.along is None:
            return in_any
        if not patch.any():
            return {kind: [patch] * draws for kind in (SIZE, VARIANCE)}  # the patch is 0
        x, other = (rows[layer][self.pairs.edited[self._read]][at] for rows in self._residuals)
        axis, row = Axis.exchanged(x.numpy(), other.numpy(), self.along), torch.arange(len(x))
        if not len(axis.others):  # x is the same in all prompts, so it has no other components
            return in_any
        drawn = axis.controls("project-out", draws, (seed, 51, layer, place))
        return {kind: [move(x, row) for move in moves] for kind, moves in drawn.items()}

    def patch(self, location: Location, role: int, steps: Callable[[], Tensor], name: str = "") -> Intervention:
        """Add steps() [token of this role, d_model] at the tokens of one role."""
        index = (self.role == role).cumsum(0) - 1
        move: Move = lambda x, row: steps()[index[row].clamp_min(0)].to(x)  # noqa: E731 (rows of other roles stay)
        return Intervention(name, {location: move}, at=self.pairs.role == role)

    def writes(self, layer: int, patches: Sequence[Intervention]) -> Tensor:
        """[patch token d_model] float32, the change of this layer's attention write by patches of the layer's input."""
        runner = replace(
            self.runner,
            batch=replace(self.pairs.x, query=self.pairs.edited),
            outcomes=lambda clean, patched: {"write": (patched[0].float() - clean[0].float()).numpy()},
            sites=(Site.ATTN_OUT,),
            layer=layer,
        )
        return torch.from_numpy(runner.measure(patches)["write"])


def effects(exchange: Exchange, *, layers: Sequence[int], draws: int, seed: int, exact: bool = True) -> Effects:
    """Effects of each patch in one model, in bits towards the exact answer.

    Args:
        exact: Patch controls and equal evidence at every layer, too, not at those of `of_controls` alone, between which
            they lie on straight lines.

    Returns:
        total [prompt]; cells [layer role prompt]; equal [layer prompt], 0 if a prompt has no other observation with its
        mark; "same size" [layer place draw prompt], and along a direction "same variance", each if every layer and
        place has such controls; and the arrays of `edges`.
    """
    total, cached = exchange.total(), lru_cache(4)(lambda layer, role: exchange.controls(layer, role, draws, seed))
    some = [*layers] if exact else of_controls(layers)
    kinds = [SIZE]
    if exchange.along is not None and all(VARIANCE in cached(layer, role) for layer in some for role in PLACES):
        kinds.append(VARIANCE)

    def drawn(layer: int, role: int, kind: str, draw: int) -> Tensor:
        return cached(layer, role)[kind][draw]

    every: list[Intervention] = []
    for layer, role in [(layer, role) for layer in layers for role in range(len(ROLES))]:
        patch = partial(exchange.patch, ("residual", layer), role)
        every.append(patch(partial(exchange.step, layer, role), "cells"))
        if role in PLACES and layer in some:
            every += [patch(partial(drawn, layer, role, kind, draw), kind) for kind in kinds for draw in range(draws)]
        if role == MARK and layer in some:
            every.append(patch(partial(exchange.equal, layer), "equal"))
    shift = exchange.runner.measure(every, "patches")["shift"]

    def named(name: str, *shape: int) -> np.ndarray:
        """[layer ...] of the patches of one name, also between the layers where they were made."""
        x = shift[[one.name == name for one in every]].reshape(-1, *shape, shift.shape[1])
        return x if len(x) == len(layers) else np.array(interp1d(some, x, axis=0)(layers))

    cells = named("cells", len(ROLES))
    found = {kind: named(kind, len(PLACES), draws) for kind in kinds}
    found |= {"total": total, "equal": named("equal"), "cells": cells}
    if abs(total.mean()) < LEAST_SHIFT or exchange.subject.partial({Site.ATTN_OUT}):
        return found
    carried = np.abs(cells.mean(2)) >= LEAST_SHARE * abs(total.mean())
    senders = {layer: np.flatnonzero(carried[i, :LAST]).tolist() for i, layer in enumerate(layers)}
    return found | edges(exchange, senders, total.mean(), draws, seed, exact)


def of_controls(layers: Sequence[int]) -> list[int]:
    """The layers at which controls are patched: about CONTROLLED of them, evenly, with the first and the last."""
    places = np.linspace(0, len(layers) - 1, min(CONTROLLED, len(layers)))
    return [layers[i] for i in places.round().astype(int).tolist()]


def edges(
    exchange: Exchange, senders: Mapping[int, Sequence[int]], total: float, draws: int, seed: int, exact: bool
) -> Effects:
    """The largest edges of attention, with random directions and equal evidence.

    An edge leads in one layer from a sender to a receiver: the attention write at the receiver changes as if the
    sender's input to the layer were that of x', for this receiver only (path patching). So one token's key and value
    are exchanged as a single later token sees them. Of more than EVERY edges the EDITED largest by gradients are run.

    Args:
        senders: layer -> roles whose edges are measured. total: the mean total effect, bits.
        draws: number of random directions, each as long as the change of the write.

    Returns:
        edge [edge 3], layer, sender and receiver, in this order; edge_shift [edge prompt]; edge_random [edge draw
        prompt]; edge_equal [edge prompt], 0 where the sender is not the changed mark.
    """
    writes: dict[tuple[int, int], Tensor] = {}
    twin = len(ROLES)  # the number of the write by equal evidence
    for done, (layer, roles) in enumerate(senders.items(), 1):
        patch = partial(exchange.patch, ("residual", layer))
        patches = [patch(role, partial(exchange.step, layer, role)) for role in roles]
        if MARK in roles:
            patches.append(patch(MARK, partial(exchange.equal, layer)))
        if roles:
            every = exchange.writes(layer, patches)
            writes |= {(layer, role): write for role, write in zip((*roles, twin), every, strict=False)}
        tell("writes of attention", done, len(senders))
    chosen = [(layer, *edge) for layer, roles in senders.items() for edge in EDGES if edge[0] in roles]

    def arriving(layer: int, sender: int, receiver: int) -> Tensor:
        return writes[layer, sender][exchange.role == receiver].double()

    def patched(edge: tuple[int, int, int], steps: Callable[[], Tensor]) -> Intervention:
        return exchange.patch(("attn_out", edge[0]), edge[2], steps)

    own = [patched(edge, partial(arriving, *edge)) for edge in chosen]
    rough = gradients(None if exact else lambda: exchange.first_order(own), len(own), exchange.runner)
    if rough is not None:
        kept = sorted(np.argsort(-np.abs(rough.mean(1)))[:EDITED].tolist())
        chosen, own = [chosen[i] for i in kept], [own[i] for i in kept]
    empty = np.empty((0, len(exchange.pairs.x)))
    shift = exchange.runner.measure(own, "edges")["shift"] if own else empty
    size = np.abs(shift.mean(1))
    top = sorted(i for i in np.argsort(-size)[:MOST_EDGES].tolist() if size[i] >= LEAST_SHARE * abs(total))

    def control(edge: tuple[int, int, int], draw: int) -> Tensor:
        """Random, or for draw -1 by equal evidence: nothing where another position than the mark sends."""
        write, (layer, sender, receiver) = arriving(*edge), edge
        if draw < 0:
            return arriving(layer, twin, receiver) if sender == MARK else 0 * write
        noise = np.random.default_rng([seed, 52, *edge, draw]).standard_normal(write.shape)
        return rescaled(torch.from_numpy(noise), write)

    controls = [patched(chosen[i], partial(control, chosen[i], draw)) for i in top for draw in range(-1, draws)]
    drawn = exchange.runner.measure(controls, "controls of edges")["shift"] if top else empty
    drawn = drawn.reshape(len(top), 1 + draws, empty.shape[1])
    edge = np.array([chosen[i] for i in top], dtype=np.int64).reshape(-1, 3)
    return {"edge": edge, "edge_shift": shift[top], "edge_equal": drawn[:, 0], "edge_random": drawn[:, 1:]}


# ---- the result ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextPatchingProbe:
    """Patches one observation's counterfactual into a model, at each layer's input and position.

    Attributes:
        spec: spec of the process. pairs: prompts and counterfactuals. layers: layers whose inputs are patched.
        draws: number of random directions. seed: their seed.
        along: the only direction along which residuals are exchanged; () for the whole residual.
        exact: as in `effects`.
    """

    spec: str
    pairs: TextPairs = field(compare=False, repr=False)
    layers: tuple[int, ...]
    draws: int
    seed: int
    batch_tokens: int
    along: tuple[float, ...] = ()
    exact: bool = False

    @property
    def NEEDS(self) -> Needs:
        return Needs(controls=frozenset({UNTRAINED}), examine=self._effects)

    def _effects(self, subject: Model, _: Mapping[str, Any]) -> Effects:
        exchange = Exchange(subject, self.pairs, self.batch_tokens, np.array(self.along) if self.along else None)
        if is_control(subject):
            some = subset_of(self.pairs.x, self.seed, OF_COPY)
            rows = np.arange(len(self.pairs.x)) if some is None else some.numpy()
            return {"total": exchange.total(rows.tolist()), "exact": np.abs(self.pairs.exact[rows])}
        return effects(exchange, layers=self.layers, draws=self.draws, seed=self.seed, exact=self.exact)

    def priced(self, subject: Model, batch: Batch, control: bool = False) -> float:
        """Tokens of whole passes that the patches of one model take, if it follows the evidence: edges, too."""
        lengths, depth, role, n = batch.tokens.lengths, len(subject.blocks), self.pairs.role, len(batch)
        whole, most = int(lengths.sum()), copies_of(batch, subject)
        if control:
            return 2 * whole * min(1, OF_COPY / n)
        tokens = [int((lengths - ((role == one) | (role == LAST)).int().argmax(1)).sum()) for one in range(len(ROLES))]
        some = [*self.layers] if self.exact else of_controls(self.layers)
        controls = self.draws * (1 + bool(self.along))
        patches = 0.0
        for one in range(len(ROLES)):
            each = controls * (one in PLACES) + (one == MARK)
            patches += priced([*self.layers, *[x for x in some for _ in range(each)]], depth, tokens[one], most)
        writes = len(self.layers) / depth * tokens[MARK] * (LAST + 2)
        staged = not self.exact and len(EDGES) * len(self.layers) > EVERY
        follow = EDITED if staged else len(EDGES) * len(self.layers)
        every = [self.layers[i * len(self.layers) // follow] for i in range(follow)] + [
            self.layers[i * len(self.layers) // MOST_EDGES] for i in range(MOST_EDGES) for _ in range(1 + self.draws)
        ]
        return 5 * whole + patches + writes + priced(every, depth, sum(tokens) / len(tokens), most) + 3 * staged * whole

    def measure(self, data: ProbeInput) -> Result:
        """Total effect and heat map. Raises UserError for fewer than 5 clusters."""
        found = measure_patching(
            data.observations, data.control_observations, self.pairs, self.layers, bool(self.along)
        )
        some = [*self.layers] if self.exact else of_controls(self.layers)
        if len(some) == len(self.layers):
            return found
        said = (
            f"random directions and equal evidence are patched at layers {', '.join(map(str, some))}, and lie on "
            "straight lines between these; --exact patches them at every layer"
        )
        return replace(found, notes=(*found.notes, said))


def measure_patching(
    effect: Mapping[str, np.ndarray],
    controls: Sequence[Effects],
    pairs: TextPairs,
    layers: Sequence[int],
    along: bool = False,
) -> Result:
    """`TextPatchingProbe.measure` from the effects of the model and the total effects of the untrained controls.

    Args:
        controls: of each untrained control total [prompt], and exact, the absolute exact shifts of these prompts.
        along: whether only the component along a direction was exchanged.
    """
    clusters, claims = np.array(pairs.x.cluster), declared(PROBE)
    finite, total = np.isfinite(pairs.exact), effect["total"]
    estimates = [compare(claims[TOTAL], mean_of, total, clusters, {UNTRAINED: [one["total"] for one in controls]})]
    unmeasured = {}
    if finite.all():
        own = (total, np.abs(pairs.exact))
        untrained = [(one["total"], one["exact"]) for one in controls]
        estimates.insert(0, compare(claims[FOLLOWS], ratio_of, own, clusters, {UNTRAINED: untrained}))
    else:
        unmeasured[FOLLOWS] = (
            f"the exact answer excludes a mark in {int((~finite).sum())} of {len(finite)} pairs: its log odds, and so "
            "their shift, are not finite"
        )
    cells = effect["cells"]
    kinds = {kind: effect[kind].mean(-1) for kind in (SIZE, VARIANCE) if kind in effect}  # [layer place draw]
    random = [layer_band({kind: draws[:, place].T for kind, draws in kinds.items()}) for place in range(2)]

    def curve_of(name: str, meaning: str, values: np.ndarray, null: Any, of: np.ndarray, beside: str) -> dict:
        ends = mean_intervals(values, of)
        return line(
            name, values.mean(1), "layer", "bits", meaning, interval=(SETS, ends), null=(BAND, null), beside=beside
        )

    twin = (pairs.equal >= 0).numpy()
    has_equal = len(set(clusters[twin])) >= LEAST_CLUSTERS
    mark, last, mean = cells[:, MARK], cells[:, LAST], total.mean()
    notes, warnings, facts = [], [], {}
    if abs(mean) < LEAST_SHIFT:
        notes.append(f"the answers do not follow the evidence: the total effect is {mean:.3g} bits")
    else:
        shares = cells.mean(-1) / mean
        largest = [
            f"layer {layer}: {ROLES[row.argmax()]} {row.max():.0%}" for layer, row in zip(layers, shares, strict=True)
        ]
        notes.append("the position with the largest share of the total effect, at the input of " + "; ".join(largest))
        whole = next(one for one in estimates if one.name == TOTAL)
        said = (
            f"Another mark moves the log odds of the answer by {whole.value:.1f} bits [{whole.low:.1f}, "
            f"{whole.high:.1f}] (n = {whole.clusters} {SETS})"
        )
        said += "".join(f", untrained copies by {c.low:.2f} to {c.high:.2f}" for c in whole.controls)
        held = [
            f"{where} {layers[half[end]]}{then}"
            for role, end, where, then in (
                (MARK, -1, "at the mark up to the input of layer", ""),
                (LAST, 0, "at the last token from layer", " on"),
            )
            if len(half := np.flatnonzero(shares[:, role] >= 0.5))
        ]
        said += f". Half of that or more sits {', '.join(held)}" if held else ""
        facts[SENTENCE] = f"{said}."
    if along:
        warnings += [NO_VARIANCE] * (VARIANCE not in kinds)
        for i, layer in enumerate(layers):
            for place, role in enumerate(PLACES):
                bands = {kind: band(draws[i, place]) for kind, draws in kinds.items()}
                said = ", ".join(f"{kind} {low:.2f} to {high:.2f}" for kind, (low, high) in bands.items())
                shift = f"{ROLES[role]}: {cells[i, role].mean():.2f} bits; {said}"
                notes.append(f"along the direction alone, layer {layer}, {shift}")
    names, edges = _edges(effect, total, clusters)
    if names:
        each = zip(names, *(edges[key][1] for key in ("edge", "edge_interval")), strict=True)
        said = "; ".join(f"{name} {share:.2f} [{low:.2f}, {high:.2f}]" for name, share, (low, high) in each)
        notes.append(f"the largest edges of attention, in shares of the total effect: {said}")
    elif "edge" in effect:
        unmeasured[EDGE] = "no edge carries a tenth of the total effect at the layers that were patched"
    else:
        unmeasured[EDGE] = notes[0] if abs(mean) < LEAST_SHIFT else "what attention writes is not known in this model"
    at = "shift by a patch at the {}"
    map_of: dict[str, Any] = {"axes": "layer position", "figure": Figure("heatmap")}
    arrays = {
        "cells": labelled(
            cells.mean(-1),
            unit="bits",
            meaning="shift of the log odds towards the counterfactual answer, patched at the input of a layer",
            **map_of,
        ),
        "total": labelled(np.full(len(layers), mean), "layer", "bits", "total effect, the same for every layer"),
        **curve_of("mark", at.format("changed mark"), mark, random[0], clusters, "total"),
        **curve_of("last", at.format("last token"), last, random[1], clusters, "total"),
    }
    if has_equal:
        meaning = "shift by equal evidence: the residual of another observation with the same mark"
        arrays |= curve_of("equal", meaning, effect["equal"][:, twin], None, clusters[twin], "")
    return Result.of(
        "Interchange of evidence in text",
        arrays | edges,
        __name__,
        estimates=tuple(estimates),
        ticks={"layer": tuple(layers), "position": ROLES} | ({"edge": names} if names else {}),
        facts=facts,
        notes=tuple(notes),
        warnings=tuple(warnings),
        unmeasured=unmeasured,
    )


def _edges(
    effect: Mapping[str, np.ndarray], total: np.ndarray, clusters: np.ndarray
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Names of the largest edges in the order of layers, and their quantities as shares of the total effect."""
    if not len(effect.get("edge", ())):
        return (), {}
    shift, random, equal = (effect[f"edge_{name}"] for name in ("shift", "random", "equal"))
    rows, whole = np.arange(len(total)), total.mean()
    spans = [jackknife(partial(ratio_of, (row, total)), rows, clusters) for row in shift]
    bands = np.array([band(draws) for draws in random.mean(2) / whole])
    names = tuple(f"{layer}: {ROLES[sender]} -> {ROLES[receiver]}" for layer, sender, receiver in effect["edge"])
    unit, meaning = (
        "of the total effect",
        "share of an edge of attention; what the receiver reads off the sender, in one layer",
    )
    shares = line(
        "edge",
        shift.mean(1) / whole,
        "edge",
        unit,
        meaning,
        interval=(SETS, interval_ends(spans)),
        null=("band of random writes of equal size", bands),
        beside="edge_equal",
    )
    equals = "the same edge with equal evidence; 0 where the sender is not the changed mark"
    return names, shares | {"edge_equal": labelled(equal.mean(1) / whole, "edge", unit, equals)}
