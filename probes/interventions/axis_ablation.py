"""Ablation of an axis: edits of one direction of the values, and control edits of the same size and variance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from llmgeom.claims import layer_band
from llmgeom.model.capture import Site
from llmgeom.probes.interventions.axis import SIZE, VARIANCE, Axis, Mode, NoAxis
from llmgeom.probes.interventions.patching import Location, Patch, PromptRun, flat, nested, rescaled, to_mean
from llmgeom.probes.interventions.readout_direction import readout_direction
from llmgeom.probes.interventions.splits import ESTIMATION, EVALUATION, Positions, PromptSplit
from llmgeom.progress import within
from llmgeom.result import Curve
from llmgeom.stats.resampling import mean_intervals
from llmgeom.stats.tests import correlation_test, spearman

MODES: tuple[Mode, ...] = ("project-out", "keep-only", "steer")
DOSES: dict[Mode, tuple[float, ...]] = {
    "project-out": (0.5, 1.0),
    "keep-only": (0.5, 1.0),
    "steer": (-2.0, -1.0, 1.0, 2.0),
}
DECISIVE: dict[Mode, tuple[int, ...]] = {"project-out": (1,), "keep-only": (1,), "steer": (0, 3)}  # indices in DOSES
BAND_DRAWS = 39  # at doses and layers without a claim: the fewest draws for a 95 % band


PatchAtDose = Callable[[float], Patch]


@dataclass(frozen=True, eq=False)
class DoseEffects:
    """Effects of an edit and of its controls at every dose.

    Attributes:
        own: effect -> [dose prompt], of the edit.
        controls: kind -> for each dose, effect -> [draw prompt].
    """

    mode: Mode
    own: Mapping[str, np.ndarray]
    controls: Mapping[str, Sequence[Mapping[str, np.ndarray]]]

    @classmethod
    def of(
        cls, run: PromptRun, mode: Mode, edit: PatchAtDose, draws: Mapping[str, Sequence[PatchAtDose]]
    ) -> DoseEffects:
        """Apply the edit and all draws at the decisive doses, and BAND_DRAWS of them at the others."""
        controls = {
            kind: [
                run.run(
                    [draw(dose) for draw in (some if place in DECISIVE[mode] else some[:BAND_DRAWS])],
                    f"{kind}, dose {dose:g}",
                )
                for place, dose in enumerate(DOSES[mode])
            ]
            for kind, some in draws.items()
        }
        return cls(mode, run.run([edit(dose) for dose in DOSES[mode]]), controls)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The effects as arrays by name, for the cache."""
        by_place = {kind: dict(enumerate(doses)) for kind, doses in self.controls.items()}
        return flat({"own": self.own, "control": by_place})

    @classmethod
    def of_arrays(cls, mode: Mode, arrays: Mapping[str, np.ndarray]) -> DoseEffects:
        """The effects from `arrays`."""
        effects = nested(arrays)
        by_place = {kind: effects["control"][kind] for kind in (SIZE, VARIANCE) if kind in effects["control"]}
        places = [str(place) for place in range(len(DOSES[mode]))]
        return cls(mode, effects["own"], {kind: [by[place] for place in places] for kind, by in by_place.items()})

    def decisive(self, effect: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """[prompt] effects at the decisive doses, averaged; and kind -> [draw] means over prompts of the controls."""
        places = list(DECISIVE[self.mode])
        return self.own[effect][places].mean(0), {
            kind: np.mean([doses[i][effect] for i in places], 0).mean(1) for kind, doses in self.controls.items()
        }

    def curve(self, effect: str, clusters: np.ndarray | None = None) -> Curve:
        """[dose] mean over prompts, the band of the control kind with the higher band and, by cluster, an interval."""
        null = np.concatenate(
            [
                layer_band({kind: doses[i][effect].mean(1)[:, None] for kind, doses in self.controls.items()})
                for i in range(len(DOSES[self.mode]))
            ]
        )
        interval = None if clusters is None else mean_intervals(self.own[effect], clusters)
        return Curve(self.own[effect].mean(1), interval=interval, null=null)


@dataclass(frozen=True, eq=False)
class AxisEffects:
    """Effects of editing the axes of several layers together, and properties of the axes.

    Attributes:
        clusters: [prompt] of the evaluation half.
        has_exact: whether the prompts have an exact answer.
        scale: KL in bits when the layers' values are replaced by their mean: the largest loss to expect.
        lengths: [edit] mean length of the decisive edits over that of x - mean: the axis, then each control kind.
        share: fraction of the standardised variance along the axis, mean over layers.
        variance_left: smallest ratio, over layers, of the variance of all other components to the axis's.
        rho, rho_p: Spearman's rho of the axis's score and entropy on the evaluation half, last edited layer, and the p
            of |rho| over permuted clusters.
        step: [layer coordinate] spread sd u, the displacement of steering by dose 1.
    """

    dose: DoseEffects
    layers: tuple[int, ...]
    positions: Positions
    clusters: np.ndarray
    has_exact: bool
    scale: float
    lengths: np.ndarray
    share: float
    variance_left: float
    rho: float
    rho_p: float
    step: np.ndarray

    NUMBERS: ClassVar[tuple[str, ...]] = (
        "has_exact", "scale", "lengths", "share", "variance_left", "rho", "rho_p", "step"
    )  # fmt: skip

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The effects and properties of the axes as arrays by name, for the cache."""
        return self.dose.arrays | {name: np.array(getattr(self, name)) for name in self.NUMBERS}

    @classmethod
    def of_arrays(
        cls,
        mode: Mode,
        layers: tuple[int, ...],
        positions: Positions,
        clusters: np.ndarray,
        arrays: Mapping[str, np.ndarray],
    ) -> AxisEffects:
        """The effects from `arrays`."""
        values: dict[str, Any] = {
            name: arrays[name] if arrays[name].ndim else arrays[name].item() for name in cls.NUMBERS
        }
        return cls(DoseEffects.of_arrays(mode, arrays), layers, positions, clusters, **values)


def axes_of(split: PromptSplit, direction: str, layers: Sequence[int]) -> dict[Location, Axis]:
    """The axis of each layer's values, estimated on the estimation half."""
    values, entropy = split.captures[ESTIMATION].layers(Site.VALUE), split.entropy[ESTIMATION]
    return {
        ("value", n): Axis.estimate(_flat(values[n]).numpy(), entropy, split.estimation.cluster, direction, split.seed)
        for n in layers
    }


def edit_axes(
    split: PromptSplit, axes: Mapping[Location, Axis], mode: Mode, positions: Positions, count: int
) -> AxisEffects:
    """Edit the axes of all these layers at once, and make `count` control edits of each kind."""
    run = split.run(tuple(axes), positions)
    own, draws = joint_edits(axes, mode, count, split.seed)
    dose = DoseEffects.of(run, mode, own, draws)
    values = split.captures[EVALUATION].layers(Site.VALUE)
    x = {at: _flat(values[at[1]]) for at in axes}
    last = max(axes)
    edits = [[own], *(some[:BAND_DRAWS] for some in draws.values())]
    scores, entropy = (axes[last].z(x[last]) @ axes[last].u).numpy(), split.entropy[EVALUATION]
    return AxisEffects(
        dose=dose,
        layers=tuple(layer for _, layer in axes),
        positions=positions,
        clusters=split.clusters,
        has_exact=split.exact is not None,
        scale=effect_of_means(run, axes)["kl"],
        lengths=_lengths(x, axes, DOSES[mode][DECISIVE[mode][-1]], edits),
        share=float(np.mean([axis.share for axis in axes.values()])),
        variance_left=min(axis.variance_left for axis in axes.values()),
        rho=spearman(scores, entropy),
        rho_p=correlation_test(scores, entropy, split.clusters, seed=split.seed).p,
        step=np.stack([(axis.sd * axis.spread * axis.u).numpy() for axis in axes.values()]),
    )


def edit_each_layer(split: PromptSplit, direction: str, mode: Mode, positions: Positions, count: int) -> np.ndarray:
    """[layer 4] for each layer alone: KL of the edit, the controls' band (low, high), KL when values become their mean.

    NaN at a layer without an axis, e.g. the first layer if all prompts end in one token.
    """
    rows = np.full((len(split.subject.blocks), 4), np.nan)
    for layer, row in enumerate(rows):
        try:
            ((at, axis),) = axes_of(split, direction, (layer,)).items()
            own, draws = joint_edits({at: axis}, mode, min(BAND_DRAWS, count), split.seed)
        except NoAxis:
            continue
        run = split.run((at,), positions)
        with within(f"layer {layer}"):
            kl, null = DoseEffects.of(run, mode, own, draws).decisive("kl")
        band = layer_band({kind: draws[:, None] for kind, draws in null.items()})
        assert band is not None  # every kind of control edit has draws
        row[:] = kl.mean(), *band[0], effect_of_means(run, {at: axis})["kl"]
    return rows


def edit_readout_direction(split: PromptSplit, count: int) -> DoseEffects:
    """The positive control: project the read-out direction of each prompt's pair out of the last layer's values.

    Raises Unavailable: the layout of the output weights is unknown.
    """
    layer = len(split.subject.blocks) - 1
    direction = readout_direction(split.subject, split.pair)
    ((location, axis),) = axes_of(split, "pc1", (layer,)).items()
    return project_out(split.run((location,), "query"), layer, axis, direction, count, split.seed)


def project_out(run: PromptRun, layer: int, axis: Axis, direction: Tensor, count: int, seed: int) -> DoseEffects:
    """Project a direction of each prompt, d [prompt coordinate] in x, out of a layer's values.

    The controls are random directions in the span of the estimation half, orthogonal to d, with edits of equal length.
    """
    d = direction / direction.norm(dim=1, keepdim=True).clamp_min(1e-300)
    span = torch.cat([axis.u[None], axis.others])
    rng = np.random.default_rng([seed, layer, 2])
    random = (torch.from_numpy(rng.standard_normal((count, len(span)))) @ span) * axis.sd
    location: Location = ("value", layer)

    def removed(x: Tensor, unit: Tensor) -> Tensor:
        return -((x - axis.mean) * unit).sum(1, keepdim=True) * unit

    def edit(dose: float) -> Patch:
        return {location: lambda x, prompt: dose * removed(x, d[prompt])}

    def control(s: Tensor) -> PatchAtDose:
        def move(x: Tensor, prompt: Tensor) -> Tensor:
            unit = s - (d[prompt] @ s)[:, None] * d[prompt]
            unit = unit / unit.norm(dim=1, keepdim=True)
            return rescaled(removed(x, unit), removed(x, d[prompt]).norm(dim=1, keepdim=True))

        return lambda dose: {location: lambda x, prompt: dose * move(x, prompt)}

    return DoseEffects.of(run, "project-out", edit, {SIZE: [control(s) for s in random]})


def joint_edits(
    axes: Mapping[Location, Axis], mode: Mode, count: int, seed: int
) -> tuple[PatchAtDose, dict[str, list[PatchAtDose]]]:
    """The joint edit of several layers' axes, and joint control edits, drawn for each layer separately."""
    drawn = {at: axis.controls(mode, count, (seed, at[1])) for at, axis in axes.items()}
    kinds = [kind for kind in (SIZE, VARIANCE) if all(kind in by_kind for by_kind in drawn.values())]

    def control(kind: str, i: int) -> PatchAtDose:
        return lambda dose: {at: by_kind[kind][i](dose) for at, by_kind in drawn.items()}

    def edit(dose: float) -> Patch:
        return {at: axis.edit(mode, dose) for at, axis in axes.items()}

    return edit, {kind: [control(kind, i) for i in range(count)] for kind in kinds}


def effect_of_means(run: PromptRun, axes: Mapping[Location, Axis]) -> dict[str, float]:
    """Mean effects over prompts when activations, even constant ones, become their mean over the estimation half."""
    effects = run.run([{at: to_mean(axis.mean[None]) for at, axis in axes.items()}])
    return {name: float(by_prompt[0].mean()) for name, by_prompt in effects.items()}


def _lengths(
    values: Mapping[Location, Tensor],
    axes: Mapping[Location, Axis],
    dose: float,
    edits: Sequence[Sequence[PatchAtDose]],
) -> np.ndarray:
    """[edit] mean length of the displacement at a dose over that of x - mean; `edits` has the draws of each."""
    whole = {at: (x - axes[at].mean).norm(dim=1).mean() for at, x in values.items()}

    def length(draw: PatchAtDose) -> float:
        patch = draw(dose)
        steps = {at: patch[at](x, torch.arange(len(x))) for at, x in values.items()}
        return float(np.mean([step.norm(dim=1).mean() / whole[at] for at, step in steps.items()]))

    return np.array([np.mean([length(draw) for draw in draws]) for draws in edits])


def _flat(values: Tensor) -> Tensor:
    return values.flatten(1).double()
