"""Interchange of evidence in text: where a model stores one observation of a prompt on its way to the answer.

Patches act at one position, or along one edge of attention to a later position.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from llmgeom.claims import declared, layer_band
from llmgeom.model.resume import clean_pass
from llmgeom.probe import UNTRAINED, Batch, Model, Needs, ProbeInput, Site, is_control
from llmgeom.probes.interventions.axis import SIZE, VARIANCE, Axis
from llmgeom.probes.interventions.intervention import Effects, Intervention, Location, Runner, add, priced, rescaled
from llmgeom.probes.interventions.text_pairs import ROLES, TextPairs
from llmgeom.probes.shared.nulls import compare, mean_of
from llmgeom.progress import tell
from llmgeom.result import Figure, Labelled, Measured, labelled, line
from llmgeom.stats.information import bits
from llmgeom.stats.resampling import LEAST_CLUSTERS, band, interval_ends, jackknife, mean_intervals

PROBE = "text_patching"
FOLLOWS, TOTAL = "total effect over the exact shift", "total effect"
WHOLE, EDGE = "all of these", "edges of attention"
MARK, LAST = ROLES.index("changed mark"), ROLES.index("last token")
PLACES = (MARK, LAST)  # roles at which random directions of equal size are patched, too
LEAST_SHIFT = 0.05  # bits: shares of a smaller total effect are not computed
LEAST_SHARE = 0.1  # of the total effect: positions and edges with a smaller share are not followed
MOST_EDGES = 2  # the largest edges of a layer
EDGES = (*((MARK, role) for role in range(1, len(ROLES))), *((role, LAST) for role in range(1, LAST)))
NO_VARIANCE = "no exchange has the same variance: compared with exchanges of the same size alone"


# ---- effects ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Exchange:
    """Exchange of one observation inside a model, layer by layer. Tokens are those at which x and x' can differ.

    Attributes:
        along: [d_model] of length 1; only the component along it is exchanged. None exchanges the whole residual.
    """

    subject: Model
    pairs: TextPairs
    batch_tokens: int
    along: np.ndarray | None = None

    @cached_property
    def _read(self) -> Tensor:
        return self.pairs.edited | _at(self.pairs, self.pairs.equal)

    @cached_property
    def _residuals(self) -> tuple[list[Tensor], list[Tensor]]:
        """[layer][token d_model] of x and of x', also at the twin of the changed mark."""

        def residuals(batch: Batch) -> list[Tensor]:
            rows = replace(batch, query=self._read)
            capture = self.subject.capture(rows, {Site.RESIDUAL}, batch_tokens=self.batch_tokens)
            return [x.double() for x in capture.layers(Site.RESIDUAL)]

        return residuals(self.pairs.x), residuals(self.pairs.other)

    @cached_property
    def _runner(self) -> Runner:
        """Its outcome, shift: the rise, in bits, of the log odds of the mark of x' over that of x at the last token."""
        return Runner(
            self.subject,
            self.pairs.x,
            self.pairs.edited,
            lambda clean, patched: {"shift": self._odds(patched[0]) - self._odds(clean[0])},
            batch_tokens=self.batch_tokens,
            clean=clean_pass(self.subject, self.pairs.x, self.batch_tokens),
        )

    def _odds(self, log_probs: Tensor) -> np.ndarray:
        """[prompt] log odds of the mark of x' over that of x, bits."""
        old, new = log_probs.double().gather(1, self.pairs.marks).T
        return bits((new - old).numpy())

    def total(self) -> np.ndarray:
        """[prompt] what reading x' in the place of x does to the log odds, bits."""
        before, after = (
            self._odds(self.subject.capture(one, {Site.LOG_PROBS}, batch_tokens=self.batch_tokens).log_probs)
            for one in (self.pairs.x, self.pairs.other)
        )
        return after - before

    @cached_property
    def role(self) -> Tensor:
        """[token] the role of each token, an index of ROLES."""
        return self.pairs.role[self.pairs.edited]

    def steps(self, layer: int) -> list[Tensor]:
        """[token d_model] for each role: the residual of x' minus that of x at the tokens of this role, else 0."""
        own, other = self._residuals
        step = self._part((other[layer] - own[layer])[self.pairs.edited[self._read]])
        return [step * (self.role == role)[:, None] for role in range(len(ROLES))]

    def equal(self, layer: int) -> Tensor:
        """[token d_model] at the changed mark: residual of another observation with its mark minus its own; else 0."""
        own, pairs = self._residuals[0][layer], self.pairs
        mark, twin = (_at(pairs, x)[self._read] for x in (pairs.at, pairs.equal))
        has_twin = pairs.equal >= 0
        step = torch.zeros(len(self.role), own.shape[1], dtype=own.dtype)
        step[(self.role == MARK).nonzero()[:, 0][has_twin]] = own[twin] - own[mark][has_twin]
        return self._part(step)

    def _part(self, step: Tensor) -> Tensor:
        if self.along is None:
            return step
        u = torch.from_numpy(self.along)
        return (step @ u)[:, None] * u

    def controls(self, layer: int, place: int, draws: int, seed: int) -> dict[str, list[Tensor]]:
        """[token d_model] for each draw: patches of the same size at the tokens of one role, 0 at others.

        For the whole residual they are random directions. Along a direction they are the controls of `llmgeom ablate
        --axis`: they exchange another direction with equal length, or other components with equal variance (over
        prompts, at this role). The second kind is absent if all other components together vary less.
        """
        rng, at, patch = np.random.default_rng([seed, 51, layer, place]), self.role == place, self.steps(layer)[place]
        noise = [torch.from_numpy(rng.standard_normal(patch.shape)) for _ in range(draws)]
        in_any = {SIZE: [rescaled(direction, patch.norm(dim=1, keepdim=True)) for direction in noise]}
        if self.along is None:
            return in_any
        if not patch.any():
            return {kind: [patch] * draws for kind in (SIZE, VARIANCE)}  # the patch is 0
        x, other = (rows[layer][self.pairs.edited[self._read]][at] for rows in self._residuals)
        axis, row = Axis.exchanged(x.numpy(), other.numpy(), self.along), torch.arange(len(x))
        if not len(axis.others):  # x is the same in all prompts, so it has no other components
            return in_any
        controls: dict[str, list[Tensor]] = {}
        for kind, moves in axis.controls("project-out", draws, (seed, 51, layer, place)).items():
            controls[kind] = [torch.zeros_like(patch) for _ in moves]
            for step, move in zip(controls[kind], moves, strict=True):
                step[at] = move(1.0)(x, row)
        return controls

    def cells(self, layer: int, draws: int, seed: int) -> dict[str, np.ndarray]:
        """Effects of the patches of a layer's input, in bits.

        Returns:
            cells [1 role prompt], where the last role is all roles together; equal [1 prompt], 0 if a prompt has no
            other observation with its mark; "same size" [1 place draw prompt], and along a direction "same variance",
            each if every place has such controls.
        """
        steps = self.steps(layer)
        by_place = [self.controls(layer, place, draws, seed) for place in PLACES]
        kinds = [kind for kind in (SIZE, VARIANCE) if all(kind in controls for controls in by_place)]
        controls = [step for kind in kinds for place in by_place for step in place[kind]]
        shift = self.shifts(("residual", layer), [*steps, torch.stack(steps).sum(0), self.equal(layer), *controls])
        cells, equal, drawn = np.split(shift, [len(ROLES) + 1, len(ROLES) + 2])
        by_kind = drawn.reshape(len(kinds), 1, len(PLACES), draws, -1)
        return {"cells": cells[None], "equal": equal, **dict(zip(kinds, by_kind, strict=True))}

    def shifts(self, location: Location, steps: Sequence[Tensor]) -> np.ndarray:
        """[patch prompt] bits: the effect of adding each step at one point of a layer."""
        return self._runner.run([Intervention("", {location: add(step)}) for step in steps])["/shift"]

    def writes(self, layer: int, steps: Sequence[Tensor]) -> Tensor:
        """[patch token d_model] the change of this layer's attention write by each step at the layer's input."""
        runner = replace(
            self._runner,
            batch=replace(self.pairs.x, query=self.pairs.edited),
            outcomes=lambda clean, patched: {"write": (patched[0].double() - clean[0].double()).numpy()},
            sites=(Site.ATTN_OUT,),
            layer=layer,
        )
        at: Location = ("residual", layer)
        return torch.from_numpy(runner.run([Intervention("", {at: add(step)}) for step in steps])["/write"])

    def edges(self, layer: int, senders: Sequence[int], total: float, draws: int, rng: np.random.Generator) -> dict:
        """The largest edges of attention in one layer, with random directions and equal evidence.

        An edge leads from a sender to a receiver: the attention write at the receiver changes as if the sender's input
        to the layer were that of x', for this receiver only (path patching). So one token's key and value are exchanged
        as a single later token sees them.

        Args:
            senders: roles whose edges are measured. total: the mean total effect, bits.
            draws: number of random directions, each as long as the change of the write.

        Returns:
            edge [edge 3], layer, sender and receiver; edge_shift [edge prompt]; edge_random [edge draw prompt];
            edge_equal [edge prompt], 0 where the sender is not the changed mark.
        """
        chosen, steps = [edge for edge in EDGES if edge[0] in senders], self.steps(layer)
        empty = np.empty((0, 1 + draws, len(self.pairs.x)))
        writes = dict(zip((*senders, "equal"), self.writes(layer, [*(steps[i] for i in senders), self.equal(layer)]),
                          strict=True))  # fmt: skip

        def arriving(sender: Any, receiver: int) -> Tensor:
            return writes[sender] * (self.role == receiver)[:, None]

        shift = self.shifts(("attn_out", layer), [arriving(*edge) for edge in chosen]) if chosen else empty[:, 0]
        size = np.abs((shift * self.pairs.sign).mean(1))
        top = [i for i in np.argsort(-size)[:MOST_EDGES] if size[i] >= LEAST_SHARE * abs(total)]
        controls: list[Tensor] = []
        for sender, receiver in (chosen[i] for i in top):
            length = arriving(sender, receiver).norm(dim=1, keepdim=True)
            noise = rng.standard_normal((draws, *writes[sender].shape))
            twin = arriving("equal", receiver) if sender == MARK else torch.zeros_like(writes[sender])
            controls += [twin, *(rescaled(torch.from_numpy(draw), length) for draw in noise)]
        shifts = self.shifts(("attn_out", layer), controls).reshape(len(top), 1 + draws, -1) if top else empty
        return {
            "edge": np.array([(layer, *chosen[i]) for i in top], dtype=np.int64).reshape(-1, 3),
            "edge_shift": shift[top],
            "edge_equal": shifts[:, 0],
            "edge_random": shifts[:, 1:],
        }


def effects(exchange: Exchange, *, layers: Sequence[int], draws: int, seed: int) -> Effects:
    """Effects of each patch in one model, in bits of log odds.

    Edges are followed from the positions with at least LEAST_SHARE of the total effect at a layer's input.

    Returns:
        total [prompt]; the arrays of `Exchange.cells`, except a kind of control that some layer lacks; and those of
        `Exchange.edges`, absent if the total effect is too small for shares or attention's write is unknown.
    """
    pairs = exchange.pairs
    total, rng = exchange.total(), np.random.default_rng([seed, 51])
    mean = float((total * pairs.sign).mean())
    follow = abs(mean) >= LEAST_SHIFT and not exchange.subject.partial({Site.ATTN_OUT})
    by_layer: list[dict[str, np.ndarray]] = []
    for done, layer in enumerate(layers, 1):
        arrays = exchange.cells(layer, draws, seed)
        if follow:
            carried = np.abs((arrays["cells"][0] * pairs.sign).mean(1)) >= LEAST_SHARE * abs(mean)
            arrays |= exchange.edges(layer, [role for role in range(LAST) if carried[role]], mean, draws, rng)
        by_layer.append(arrays)
        tell("layers", done, len(layers))
    shared = [name for name in by_layer[0] if all(name in arrays for arrays in by_layer)]
    return {"total": total} | {name: np.concatenate([arrays[name] for arrays in by_layer]) for name in shared}


def _at(pairs: TextPairs, position: Tensor) -> Tensor:
    """[prompt seq] whether a position is the prompt's `position`; none if it is -1."""
    return torch.arange(pairs.role.shape[1]) == position[:, None]


# ---- the result ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextPatchingProbe:
    """Patches one observation's counterfactual into a model, at each layer's input and position.

    Attributes:
        spec: spec of the process. pairs: prompts and counterfactuals. layers: layers whose inputs are patched.
        draws: number of random directions. seed: their seed.
        along: the only direction along which residuals are exchanged; () for the whole residual.
    """

    spec: str
    pairs: TextPairs = field(compare=False, repr=False)
    layers: tuple[int, ...]
    draws: int
    seed: int
    batch_tokens: int
    along: tuple[float, ...] = ()

    @property
    def NEEDS(self) -> Needs:
        return Needs(controls=frozenset({UNTRAINED}), examine=self._effects)

    def _effects(self, subject: Model, _: Mapping[str, Any]) -> Effects:
        if is_control(subject):
            return {"total": Exchange(subject, self.pairs, self.batch_tokens).total()}
        along = np.array(self.along) if self.along else None
        exchange = Exchange(subject, self.pairs, self.batch_tokens, along)
        return effects(exchange, layers=self.layers, draws=self.draws, seed=self.seed)

    def priced(self, subject: Model, batch: Batch, control: bool = False) -> float:
        """Tokens of whole passes that the patches of one model take, if it follows the evidence: edges, too."""
        patches = len(ROLES) + 2 + len(PLACES) * self.draws * (1 + bool(self.along))
        edges = LAST + 1 + len(EDGES) + MOST_EDGES * (1 + self.draws)
        whole, after = int(batch.tokens.lengths.sum()), int((batch.tokens.lengths - self.pairs.at).sum())
        if control:
            return 2 * whole
        return 5 * whole + priced(self.layers, len(subject.blocks), after * (patches + edges))

    def measure(self, data: ProbeInput) -> Measured:
        """Total effect and heat map. Raises UserError for fewer than 5 clusters."""
        controls = [control["total"] for control in data.control_observations]
        return measure_patching(data.observations, controls, self.pairs, self.layers, bool(self.along))


def measure_patching(
    effect: Mapping[str, np.ndarray],
    controls: Sequence[np.ndarray],
    pairs: TextPairs,
    layers: Sequence[int],
    along: bool = False,
) -> Measured:
    """`TextPatchingProbe.measure` from the effects of the model and the total effects of the untrained controls.

    Args:
        controls: [prompt] total effect of each untrained control.
        along: whether only the component along a direction was exchanged.
    """
    clusters, claims = np.array(pairs.x.cluster), declared(PROBE)
    finite, total = np.isfinite(pairs.exact), effect["total"] * pairs.sign
    towards = {name: effect[name] * pairs.sign for name in ("cells", "equal", SIZE, VARIANCE) if name in effect}
    untrained = {UNTRAINED: [control * pairs.sign for control in controls]}
    estimates = [compare(claims[TOTAL], mean_of, total, clusters, untrained)]
    unmeasured = {}
    if finite.all():
        exact = np.abs(pairs.exact)
        follows = compare(claims[FOLLOWS], lambda x, rows: _ratio(x, exact, rows), total, clusters, untrained)
        estimates.insert(0, follows)
    else:
        unmeasured[FOLLOWS] = (
            f"the exact answer excludes a mark in {int((~finite).sum())} of {len(finite)} pairs: its log odds, and so "
            "their shift, are not finite"
        )
    mark, last = (towards["cells"][:, place] for place in (MARK, LAST))
    kinds = {kind: towards[kind].mean(-1) for kind in (SIZE, VARIANCE) if kind in towards}  # [layer place draw]
    random = [layer_band({kind: draws[:, place].T for kind, draws in kinds.items()}) for place in range(2)]
    twin = (pairs.equal >= 0).numpy()
    equal = towards["equal"][:, twin] if len(set(clusters[twin])) >= LEAST_CLUSTERS else None
    names, edges = _edges(effect, pairs, total, clusters)
    cells, every = towards["cells"].mean(-1), np.full(len(layers), total.mean())
    of_random = "band of random directions of equal size there; along a direction, of the higher control"

    def shift(
        name: str, by: np.ndarray, of: np.ndarray, said: str, null: Any = None, beside: str = ""
    ) -> dict[str, Labelled | None]:
        around: Any = {"interval": ("sets of labels", mean_intervals(by, of)), "null": (of_random, null)}
        return line(name, by.mean(1), "layer", "bits", f"shift by {said}", beside=beside, **around)

    of_cells = "shift of the log odds towards the counterfactual answer, patched at the input of a layer"
    of_equal = "equal evidence: the residual of another observation with the same mark"
    return Measured.of(
        "Interchange of evidence in text",
        {
            "cells": labelled(cells, "layer position", "bits", of_cells, Figure("heatmap")),
            "total": labelled(every, "layer", "bits", "total effect, the same for every layer"),
            **shift("mark", mark, clusters, "a patch at the changed mark", random[0], "total"),
            **shift("last", last, clusters, "a patch at the last token", random[1], "total"),
            **({} if equal is None else shift("equal", equal, clusters[twin], of_equal)),
            **edges,
        },
        __name__,
        estimates=tuple(estimates),
        ticks={"layer": tuple(layers), "position": (*ROLES, WHOLE), "edge": names},
        notes=_notes(towards["cells"].mean(-1), total.mean(), layers)
        + (_along(mark, last, kinds, layers) if along else ()),
        warnings=(NO_VARIANCE,) * (along and VARIANCE not in kinds),
        unmeasured=unmeasured | ({} if names else {EDGE: _why_no_edge(effect, total)}),
    )


def _edges(
    effect: Mapping[str, np.ndarray], pairs: TextPairs, total: np.ndarray, clusters: np.ndarray
) -> tuple[tuple[str, ...], dict[str, Labelled | None]]:
    """Names of the largest edges in the order of layers, and their quantities as shares of the total effect."""
    if not len(effect.get("edge", ())):
        return (), {}
    shift, random, equal = (effect[f"edge_{name}"] * pairs.sign for name in ("shift", "random", "equal"))
    rows, whole = np.arange(len(total)), total.mean()
    spans = [jackknife(partial(_ratio, row, total), rows, clusters) for row in shift]
    bands = np.array([band(draws) for draws in random.mean(2) / whole])
    names = tuple(f"{layer}: {ROLES[sender]} -> {ROLES[receiver]}" for layer, sender, receiver in effect["edge"])
    unit, said = "of the total effect", "the same edge with equal evidence; 0 where the sender is not the changed mark"
    around: Any = {
        "interval": ("sets of labels", interval_ends(spans)),
        "null": ("band of random writes of equal size", bands),
    }
    of_edge = "share of an edge of attention; what the receiver reads off the sender, in one layer"
    own = line("edge", shift.mean(1) / whole, "edge", unit, of_edge, beside="edge_equal", **around)
    return names, {**own, "edge_equal": labelled(equal.mean(1) / whole, "edge", unit, said)}


def _why_no_edge(found: Mapping[str, np.ndarray], total: np.ndarray) -> str:
    if abs(total.mean()) < LEAST_SHIFT:
        return f"the answers do not follow the evidence: the total effect is {total.mean():.3g} bits"
    if "edge" not in found:
        return "what attention writes is not known in this model"
    return "no edge carries a tenth of the total effect at the layers that were patched"


def edge_lines(measured: Measured) -> Iterator[str]:
    """The edges as text: a line for each, with its share of the total effect, interval and controls."""
    arrays = measured.arrays
    if "edge" not in arrays:
        return
    names = measured.ticks["edge"]
    width = max(map(len, names)) + 2
    yield f"{'layer: from -> to':{width}} share of the total effect   equal evidence   random writes of equal size"
    for name, share, (low, high), equal, (least, most) in zip(
        names, *(arrays[key] for key in ("edge", "edge_interval", "edge_equal", "edge_null")), strict=True
    ):
        placebo = f"{equal:.2f}" if ROLES[MARK] + " ->" in name else "-"
        yield f"{name:{width}} {share:5.2f} [{low:.2f}, {high:.2f}]       {placebo:>14}   {least:.2f} to {most:.2f}"


def _ratio(values: np.ndarray, over: np.ndarray, rows: np.ndarray) -> float:
    return float(values[rows].mean() / over[rows].mean())


def _along(
    mark: np.ndarray, last: np.ndarray, kinds: Mapping[str, np.ndarray], layers: Sequence[int]
) -> tuple[str, ...]:
    """Notes on the effect of the exchange along the direction, with the band of each kind of control."""
    notes = []
    for i, layer in enumerate(layers):
        for place, (name, shift) in enumerate(((ROLES[MARK], mark), (ROLES[LAST], last))):
            bands = {kind: band(draws[i, place]) for kind, draws in kinds.items()}
            controls = ", ".join(f"{kind} {low:.2f} to {high:.2f}" for kind, (low, high) in bands.items())
            notes.append(f"along the direction alone, layer {layer}, {name}: {shift[i].mean():.2f} bits; {controls}")
    return tuple(notes)


def _notes(cells: Float[np.ndarray, "layer role"], total: float, layers: Sequence[int]) -> tuple[str, ...]:
    """A note on the position with the largest share of the total effect, layer by layer."""
    if abs(total) < LEAST_SHIFT:
        return (f"the answers do not follow the evidence: the total effect is {total:.3g} bits",)
    positions = []
    for layer, row in zip(layers, cells, strict=True):
        shares = row[: len(ROLES)] / total
        positions.append(f"layer {layer}: {ROLES[int(shares.argmax())]} {shares.max():.0%}")
    return ("the position with the largest share of the total effect, at the input of " + "; ".join(positions),)
