"""Effects of patches on prompts of a process: at one position, or along one edge of attention to a later position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmgeom.model.edits import Clean
from llmgeom.model.resume import clean_pass
from llmgeom.probe import Batch, Site, Subject
from llmgeom.probes.interventions.axis import SIZE, VARIANCE, Axis
from llmgeom.probes.interventions.patching import Location, PatchingRun, add, rescaled
from llmgeom.probes.interventions.text_pairs import ROLES, TextPairs
from llmgeom.progress import tell
from llmgeom.stats.information import bits

MARK, LAST = ROLES.index("changed mark"), ROLES.index("last token")
PLACES = (MARK, LAST)  # roles at which random directions of equal size are patched, too
LEAST_SHIFT = 0.05  # bits: shares of a smaller total effect are not computed
LEAST_SHARE = 0.1  # of the total effect: positions and edges with a smaller share are not followed
MOST_EDGES = 2  # the largest edges of a layer
EDGES = (*((MARK, role) for role in range(1, len(ROLES))), *((role, LAST) for role in range(1, LAST)))


@dataclass(frozen=True, eq=False)
class TextRun(PatchingRun):
    """Prompts x, patched with activations of x' at some positions.

    The effect is the rise, in bits, of the log odds of the mark of x' over that of x at the last token.
    """

    pairs: TextPairs

    @property
    def at(self) -> Tensor:
        return self.pairs.edited

    def _effects(self, clean: Sequence[Tensor], patched: Sequence[Tensor]) -> dict[str, np.ndarray]:
        return {"shift": self.odds(patched[0]) - self.odds(clean[0])}

    def odds(self, log_probs: Tensor) -> np.ndarray:
        """[prompt] log odds of the mark of x' over that of x, bits."""
        old, new = log_probs.double().gather(1, self.pairs.marks).T
        return bits((new - old).numpy())

    def total(self) -> np.ndarray:
        """[prompt] what reading x' in the place of x does to the log odds, bits."""
        before, after = (
            self.odds(self.subject.capture(one, {Site.LOG_PROBS}, batch_tokens=self.batch_tokens).log_probs)
            for one in (self.pairs.x, self.pairs.other)
        )
        return after - before


@dataclass(frozen=True, eq=False)
class WriteRun(TextRun):
    """A TextRun whose effect is the change of one layer's attention write, [token d_model]."""

    layer: int

    sites = (Site.ATTENTION_WRITE,)

    @property
    def layers(self) -> int:
        return self.layer

    def _effects(self, clean: Sequence[Tensor], patched: Sequence[Tensor]) -> dict[str, np.ndarray]:
        return {"write": (patched[0].double() - clean[0].double()).numpy()}


@dataclass(frozen=True, eq=False)
class Exchange:
    """Exchange of one observation inside a model, layer by layer. Tokens are those at which x and x' can differ.

    Attributes:
        along: [d_model] of length 1; only the component along it is exchanged. None exchanges the whole residual.
    """

    subject: Subject
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
    def clean(self) -> Clean | None:
        """The clean pass of x, from which patched passes go on."""
        return clean_pass(self.subject, self.pairs.x, self.batch_tokens)

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
        options: Any = {"batch_tokens": self.batch_tokens, "clean": self.clean}
        run = TextRun(self.subject, self.pairs.x, (location,), self.pairs, **options)
        return run.run([{location: add(step)} for step in steps])["shift"]

    def writes(self, layer: int, steps: Sequence[Tensor]) -> Tensor:
        """[patch token d_model] the change of this layer's attention write by each step at the layer's input."""
        read = replace(self.pairs.x, query=self.pairs.edited)
        location: Location = ("residual", layer)
        options: Any = {"batch_tokens": self.batch_tokens, "clean": self.clean}
        run = WriteRun(self.subject, read, (location,), self.pairs, layer, **options)
        return torch.from_numpy(run.run([{location: add(step)} for step in steps])["write"])

    def total(self) -> np.ndarray:
        """[prompt] what reading x' in the place of x does to the log odds, bits."""
        return TextRun(self.subject, self.pairs.x, (), self.pairs, batch_tokens=self.batch_tokens).total()

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

        shift = self.shifts(("attention_write", layer), [arriving(*edge) for edge in chosen]) if chosen else empty[:, 0]
        size = np.abs((shift * self.pairs.sign).mean(1))
        top = [i for i in np.argsort(-size)[:MOST_EDGES] if size[i] >= LEAST_SHARE * abs(total)]
        controls: list[Tensor] = []
        for sender, receiver in (chosen[i] for i in top):
            length = arriving(sender, receiver).norm(dim=1, keepdim=True)
            noise = rng.standard_normal((draws, *writes[sender].shape))
            twin = arriving("equal", receiver) if sender == MARK else torch.zeros_like(writes[sender])
            controls += [twin, *(rescaled(torch.from_numpy(draw), length) for draw in noise)]
        shifts = self.shifts(("attention_write", layer), controls).reshape(len(top), 1 + draws, -1) if top else empty
        return {
            "edge": np.array([(layer, *chosen[i]) for i in top], dtype=np.int64).reshape(-1, 3),
            "edge_shift": shift[top],
            "edge_equal": shifts[:, 0],
            "edge_random": shifts[:, 1:],
        }


def effects(exchange: Exchange, *, layers: Sequence[int], draws: int, seed: int) -> dict[str, np.ndarray]:
    """Effects of each patch in one model, in bits of log odds.

    Edges are followed from the positions with at least LEAST_SHARE of the total effect at a layer's input.

    Returns:
        total [prompt]; the arrays of `Exchange.cells`, except a kind of control that some layer lacks; and those of
        `Exchange.edges`, absent if the total effect is too small for shares or attention's write is unknown.
    """
    pairs = exchange.pairs
    total, rng = exchange.total(), np.random.default_rng([seed, 51])
    mean = float((total * pairs.sign).mean())
    follow = abs(mean) >= LEAST_SHIFT and not exchange.subject.partial({Site.ATTENTION_WRITE})
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
