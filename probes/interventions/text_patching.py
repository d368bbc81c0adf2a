"""Interchange of evidence in text: where in a model one observation of a prompt is held on its way to the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from llmgeom.batch import Batch
from llmgeom.claims import Null, declared, estimate
from llmgeom.model.batching import BATCH_TOKENS
from llmgeom.model.capture import Capture, Site
from llmgeom.model.subject import Subject
from llmgeom.probe import Needs, ProbeInput
from llmgeom.probes.interventions.axis import rescaled
from llmgeom.probes.interventions.component_ablation import add
from llmgeom.probes.interventions.patching import Location, Patch, PatchingRun, copies
from llmgeom.probes.interventions.text_pairs import ROLES, TextPairs
from llmgeom.progress import Progress
from llmgeom.result import Estimate, Figure, Result, quantity
from llmgeom.stats.information import bits
from llmgeom.stats.resampling import LEAST_CLUSTERS, jackknife

PROBE, UNTRAINED = "text_patching", "re-initialised"
FOLLOWS, TOTAL = "total effect over the exact shift", "total effect"
WHOLE, EQUAL = "all of these", "equal evidence"
HELD = ("changed mark", "last token")  # where random directions of equal size are patched, too
LEAST_SHIFT = 0.05  # bits: a smaller total effect has no shares


@dataclass(frozen=True, eq=False)
class TextRun(PatchingRun):
    """Prompts x with the residual stream of x' at some positions.

    The effect is the rise, in bits, of the log odds of the mark of x' over that of x at the last token.
    """

    pairs: TextPairs
    batch_tokens: int = BATCH_TOKENS

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


def effects(
    subject: Subject,
    pairs: TextPairs,
    *,
    layers: Sequence[int],
    draws: int,
    seed: int,
    batch_tokens: int,
    progress: Progress | None = None,
) -> dict[str, np.ndarray]:
    """What each patch does in one model, in bits of log odds.

    Returns:
        total [prompt]; cells [layer role prompt], the last role being all of them together; equal [layer prompt], 0
        where a prompt has no other observation with its mark; random [layer held draw prompt].
    """

    def residuals(batch: Batch) -> list[Tensor]:
        rows = replace(batch, query=pairs.edited | _at(pairs, pairs.equal))
        capture = subject.capture(rows, {Site.RESIDUAL}, batch_tokens=batch_tokens)
        return [x.double() for x in capture.layers(Site.RESIDUAL)]

    read = pairs.edited | _at(pairs, pairs.equal)
    own, other = residuals(pairs.x), residuals(pairs.other)
    edited, role = pairs.edited[read], pairs.role[pairs.edited]
    mark, twin = (_at(pairs, x)[read] for x in (pairs.at, pairs.equal))
    paired = pairs.equal >= 0
    rng = np.random.default_rng([seed, 51])
    found: dict[str, list[Any]] = {"cells": [], "equal": [], "random": []}
    for done, layer in enumerate(layers, 1):
        step = (other[layer] - own[layer])[edited]
        in_role = [step * (role == i)[:, None] for i in range(len(ROLES))]
        exchanged = torch.zeros_like(step)
        rows = (role == ROLES.index("changed mark")).nonzero()[:, 0][paired]
        exchanged[rows] = own[layer][twin] - own[layer][mark][paired]
        noise = [
            rescaled(torch.from_numpy(rng.standard_normal(step.shape)), in_role[i].norm(dim=1, keepdim=True))
            for i in map(ROLES.index, HELD)
            for _ in range(draws)
        ]
        location: Location = ("residual", layer)
        patches: list[Patch] = [{location: add(delta)} for delta in (*in_role, step, exchanged, *noise)]
        shift = TextRun(subject, pairs.x, (location,), pairs, batch_tokens).run(patches)["shift"]
        found["cells"].append(shift[: len(ROLES) + 1])
        found["equal"].append(shift[len(ROLES) + 1])
        found["random"].append(shift[len(ROLES) + 2 :].reshape(len(HELD), draws, -1))
        if progress:
            progress("layers", done, len(layers))
    total = TextRun(subject, pairs.x, (), pairs, batch_tokens).total()
    return {"total": total} | {name: np.stack(rows) for name, rows in found.items()}


def _at(pairs: TextPairs, position: Tensor) -> Tensor:
    """[prompt seq] whether a position is that of the prompt; none where it is -1."""
    return torch.arange(pairs.role.shape[1]) == position[:, None]


# ---- the result -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TextPatching(Result):
    """How far answers follow one observation that is exchanged inside the model, by layer and position."""

    TITLE = "Interchange of evidence in text"
    TEXT = Path(__file__).parents[1] / "texts" / "text_patching.md"

    cells: np.ndarray = quantity(
        "layer position",
        "bits",
        "shift of the log odds towards the counterfactual answer, patched at the input of a layer",
        Figure("heatmap"),
    )
    total: np.ndarray = quantity("layer", "bits", "total effect, the same for every layer")
    mark: np.ndarray = quantity(
        "layer",
        "bits",
        "shift by a patch at the changed mark",
        Figure("curve", interval="mark_interval", band="mark_random", beside="total"),
    )
    mark_interval: np.ndarray = quantity("layer bound", "bits", "95 % interval over sets of labels")
    mark_random: np.ndarray = quantity("layer bound", "bits", "band of random directions of equal size there")
    last: np.ndarray = quantity(
        "layer",
        "bits",
        "shift by a patch at the last token",
        Figure("curve", interval="last_interval", band="last_random", beside="total"),
    )
    last_interval: np.ndarray = quantity("layer bound", "bits", "95 % interval over sets of labels")
    last_random: np.ndarray = quantity("layer bound", "bits", "band of random directions of equal size there")
    equal: np.ndarray | None = quantity(
        "layer",
        "bits",
        "shift by equal evidence: the residual of another observation with the same mark",
        Figure("curve", interval="equal_interval"),
    )
    equal_interval: np.ndarray | None = quantity("layer bound", "bits", "95 % interval over sets of labels")
    estimates: tuple[Estimate, ...]
    ticks: Mapping[str, tuple]
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unmeasured: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TextPatchingProbe:
    """Patches one observation's counterfactual into a model, at each layer's input and position.

    Attributes:
        spec: of the process. pairs: prompts and counterfactuals. layers: whose inputs are patched.
        draws: random directions. seed: of the directions.
    """

    spec: str
    pairs: TextPairs = field(compare=False, repr=False)
    layers: tuple[int, ...]
    draws: int
    seed: int
    batch_tokens: int
    progress: Progress | None = field(default=None, compare=False)

    @property
    def NEEDS(self) -> Needs:
        return Needs(
            shuffled=False,
            no_context=False,
            examine=self._effects,
            examine_control=self._total,
            cost=lambda _, batch: self._cost(
                4 + len(self.layers) * copies(len(batch), len(ROLES) + 2 + len(HELD) * self.draws)
            ),
            control_cost=lambda _, batch: self._cost(2),
        )

    def _effects(self, subject: Subject, _: Mapping[str, Capture]) -> dict[str, np.ndarray]:
        return effects(
            subject,
            self.pairs,
            layers=self.layers,
            draws=self.draws,
            seed=self.seed,
            batch_tokens=self.batch_tokens,
            progress=self.progress,
        )

    def _total(self, subject: Subject, _: Mapping[str, Capture]) -> dict[str, np.ndarray]:
        return {"total": TextRun(subject, self.pairs.x, (), self.pairs, self.batch_tokens).total()}

    def _cost(self, passes: int) -> list[tuple[int, Any]]:
        return [(passes, self.pairs.x.tokens.lengths.numpy())]

    def measure(self, data: ProbeInput) -> TextPatching:
        """Total effect and heat map. Raises UserError for fewer than 5 clusters."""
        controls = [one["total"] for one in data.control_observations]
        return measure_patching(data.observations, controls, self.pairs, self.layers)


def measure_patching(
    found: Mapping[str, np.ndarray], controls: Sequence[np.ndarray], pairs: TextPairs, layers: Sequence[int]
) -> TextPatching:
    """The same from what `effects` returns, and from the total effects of the untrained controls."""
    clusters, claims = np.array(pairs.x.cluster), declared(PROBE)
    finite = np.isfinite(pairs.exact)
    sign = np.where(finite, np.sign(np.where(finite, pairs.exact, 1.0)), 1.0)
    total = found["total"] * sign
    towards = {name: found[name] * sign for name in ("cells", "equal", "random")}
    size = {"n": len(total), "clusters": len(set(clusters))}

    def spans(rows: np.ndarray, of: np.ndarray) -> np.ndarray:
        intervals = [jackknife(np.mean, row, of) for row in rows]
        return np.array([[interval.low, interval.high] for interval in intervals])

    untrained = np.array([(one * sign).mean() for one in controls])
    null = Null.of(UNTRAINED, total.mean(), untrained, "upper")
    estimates = [estimate(claims[TOTAL], total.mean(), jackknife(np.mean, total, clusters), [null], **size)]
    unmeasured = {}
    if finite.all():
        exact, rows = np.abs(pairs.exact), np.arange(len(total))
        share = partial(_ratio, total, exact)
        null = Null.of(UNTRAINED, share(rows), untrained / exact.mean(), "upper")
        estimates.insert(0, estimate(claims[FOLLOWS], share(rows), jackknife(share, rows, clusters), [null], **size))
    else:
        unmeasured[FOLLOWS] = (
            f"the exact answer excludes a mark in {int((~finite).sum())} of {len(finite)} pairs: its log odds, and so "
            "their shift, are not finite"
        )
    mark, last = (towards["cells"][:, ROLES.index(name)] for name in HELD)
    random = np.percentile(towards["random"].mean(-1), [2.5, 97.5], axis=2).transpose(1, 2, 0)
    twin = (pairs.equal >= 0).numpy()
    equal = towards["equal"][:, twin] if len(set(clusters[twin])) >= LEAST_CLUSTERS else None
    return TextPatching(
        cells=towards["cells"].mean(-1),
        total=np.full(len(layers), total.mean()),
        mark=mark.mean(1),
        mark_interval=spans(mark, clusters),
        mark_random=random[:, 0],
        last=last.mean(1),
        last_interval=spans(last, clusters),
        last_random=random[:, 1],
        equal=None if equal is None else equal.mean(1),
        equal_interval=None if equal is None else spans(equal, clusters[twin]),
        estimates=tuple(estimates),
        ticks={"layer": tuple(layers), "position": (*ROLES, WHOLE)},
        notes=_notes(towards["cells"].mean(-1), total.mean(), layers),
        unmeasured=unmeasured,
    )


def _ratio(values: np.ndarray, over: np.ndarray, rows: np.ndarray) -> float:
    return float(values[rows].mean() / over[rows].mean())


def _notes(cells: Float[np.ndarray, "layer role"], total: float, layers: Sequence[int]) -> tuple[str, ...]:
    """Where more than half of the total effect passes, layer by layer."""
    if abs(total) < LEAST_SHIFT:
        return (f"the answers do not follow the evidence: the total effect is {total:.3g} bits",)
    said = []
    for layer, row in zip(layers, cells, strict=True):
        at = int(row[: len(ROLES)].argmax())
        said.append(f"layer {layer}: {ROLES[at]} {row[at] / total:.0%}")
    return ("the position that holds most of the total effect, at the input of " + "; ".join(said),)
