"""Probes of an edited axis: its effect, the effect at every layer, and a positive control."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from llmgeom.claims import declared
from llmgeom.probe import Batch, Capture, Needs, Probe, ProbeInput, Site, Subject
from llmgeom.probes.interventions.axis import VARIANCE, Mode
from llmgeom.probes.interventions.axis_ablation import (
    DOSES,
    AxisEffects,
    DoseEffects,
    axes_of,
    edit_axes,
    edit_each_layer,
    edit_readout_direction,
)
from llmgeom.probes.interventions.patching import chosen_layers, estimate_against, scale_of_interval
from llmgeom.probes.interventions.splits import ESTIMATION, PROMPT_SITES, Positions, PromptSplit, check_prompts, halves
from llmgeom.progress import within
from llmgeom.record import Record
from llmgeom.result import Curve, Estimate, Result, curve, quantity
from llmgeom.run import BATCH_TOKENS, Question
from llmgeom.stats.resampling import jackknife

CONTROL = "ablation_control"
KL, EQUAL, ERROR = "KL of the edit", "KL of the edit, against equal edits", "rise of the read-out's error"
EVIDENCE, ODDS = "rise of the evidence error", "log-odds moved"
DIRECTIONS = ("pc1", "ridge")
ORDERED_P = 0.05  # of |rho| with entropy on the other half: an axis without that order is no entropy axis
BAND = "band of the control edits, the higher kind"
Arrays = dict[str, np.ndarray]
# An edit is compared with other edits of the same model, so no other control is captured.
EDITED = Needs(sites=PROMPT_SITES, untrained=False, shuffled=False, no_context=False, samples=frozenset({ESTIMATION}))


# ---- results --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AxisAblation(Result):
    """The effect of editing one axis, compared with edits of the same size and of the same variance."""

    TITLE = "Ablation of the entropy axis"

    dose: np.ndarray = quantity("dose", "dose", "of the edit")
    kl: Curve = curve("dose", "bits", "KL(clean || edited), mean over prompts", interval="clusters", null=BAND)
    error: Curve = curve("dose", "bits^2", "rise of the read-out's error", null=BAND)
    length: np.ndarray = quantity(
        "edit", "of the values' own", "mean length of the edits at the decisive dose, final token"
    )
    scale: float = quantity("", "bits", "KL when the values are replaced by their mean: what there is to lose")
    tenth: float = quantity("", "bits", "a tenth of `scale`")
    share: float = quantity("", "fraction", "of the standardised variance along the axis, estimation half")
    rho: float = quantity("", "rho", "Spearman's, of c and entropy on the evaluation half")
    step: np.ndarray = quantity(
        "layer coordinate",
        "units of the values",
        "spread sd u: what steering by dose 1 adds to the edited layers' values",
    )


@dataclass(frozen=True)
class LayerCurve(Result):
    """The edit of each layer alone."""

    TITLE = "Ablation of the entropy axis, layer by layer"

    kl: Curve = curve(
        "layer", "bits", "KL(clean || edited), mean over prompts", null="band of the control edits", beside="tenth"
    )
    tenth: np.ndarray = quantity(
        "layer", "bits", "a tenth of the KL when the layer's values are replaced by their mean"
    )


@dataclass(frozen=True, kw_only=True)
class PositiveControl(Result):
    """A direction that must matter. If it does not, no result of the run shows that another direction is unused."""

    TITLE = "Positive control: the read-out direction of two tokens"

    dose: np.ndarray = quantity("dose", "dose", "of the edit")
    odds: Curve = curve(
        "dose", "bits", "|change of the log-odds of the two tokens|, mean", null="band of random edits of the same size"
    )


# ---- measuring ------------------------------------------------------------------------------------------------------


def measure_axis(probe: str, axis: AxisEffects) -> AxisAblation:
    """Estimates of an edited axis against its control edits; `probe` names the claims. UserError: few clusters."""
    dose, clusters, doses = axis.dose, axis.clusters, DOSES[axis.dose.mode]
    warnings = []
    if not (complete := VARIANCE in dose.controls):
        warnings.append(
            f"no edit has the same variance: all other components carry {axis.variance_left:.2f} of the axis's. "
            "Compared with edits of the same size alone, the result is a measurement and no claim"
        )
    # If even the mean changes less than the effect of interest, "ruled out" is nearly certain in advance; so is
    # equivalence if a tenth of that change is less than the margin.
    decidable = {KL: axis.scale > declared(probe)[KL].effect, EQUAL: axis.scale / 10 > declared(probe)[EQUAL].margin}
    for name in [name for name, can_decide in decidable.items() if not can_decide]:
        warnings.append(
            f"replacing the values by their mean changes {axis.scale:.3g} bits, too little for '{name}' to be tested "
            f"at {declared(probe)[name].smallest:g} bits: it is a measurement and no claim"
        )
    if not (ordered := axis.rho > 0 and axis.rho_p < ORDERED_P):
        warnings.append(
            f"the axis does not order the prompts that were measured by entropy (rho {axis.rho:.2f}, p = "
            f"{axis.rho_p:.2g}), so it is no entropy axis there: its effect is a measurement and no claim"
        )
    metrics = [(name, "kl", complete and can_decide and ordered) for name, can_decide in decidable.items()]
    metrics += [(ERROR, "error", True)] + [(EVIDENCE, "evidence", True)] * axis.has_exact
    return AxisAblation(
        dose=np.array(doses),
        kl=dose.curve("kl", clusters),
        error=dose.curve("error"),
        length=axis.lengths,
        scale=axis.scale,
        tenth=axis.scale / 10,
        share=axis.share,
        rho=axis.rho,
        estimates=tuple(
            dose_estimate(probe, name, dose, effect, clusters, claimed) for name, effect, claimed in metrics
        ),
        step=axis.step,
        ticks={"dose": doses, "edit": ("axis", *dose.controls), "layer": axis.layers},
        warnings=tuple(warnings),
        notes=(
            f"mode {dose.mode}, layer{'s' * (len(axis.layers) > 1)} {', '.join(map(str, axis.layers))}, "
            f"{axis.positions} positions",
        ),
    )


def measure_positive_control(dose: DoseEffects, clusters: np.ndarray) -> PositiveControl:
    """The positive control's estimate. UserError: few clusters."""
    return PositiveControl(
        dose=np.array(DOSES[dose.mode]),
        odds=dose.curve("odds"),
        estimates=(dose_estimate(CONTROL, ODDS, dose, "odds", clusters),),
        ticks={"dose": DOSES[dose.mode]},
    )


def dose_estimate(
    probe: str, name: str, dose: DoseEffects, effect: str, clusters: np.ndarray, claimed: bool = True
) -> Estimate:
    """The estimate of an effect, compared with every kind of control edit; without its claim if `claimed` is False."""
    claim, (values, null) = declared(probe)[name], dose.decisive(effect)
    claim = claim if claimed else replace(claim, claim="")
    interval = jackknife(np.mean, values, clusters, scale_of_interval(claim, clusters, values))
    return estimate_against(claim, values.mean(), interval, null, clusters)


# ---- probes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AxisProbe:
    """A probe that edits one axis in several layers at once. Its controls are other edits of the same model.

    Attributes:
        name: name of the probe in the declared claims.
        direction: how the axis is estimated; see `Axis.estimate`. Unused for a saved axis.
        controls: number of draws of each kind of control edit.
    """

    name: str
    direction: str
    mode: Mode
    layers: tuple[int, ...]
    positions: Positions
    controls: int
    seed: int
    batch_tokens: int

    @property
    def site(self) -> Site:
        """The activations that are edited."""
        return Site.VALUE

    @cached_property
    def NEEDS(self) -> Needs:
        return replace(EDITED, sites=PROMPT_SITES | {self.site}, examine=self._examine)

    def _split(self, subject: Subject, captures: Mapping[str, Capture]) -> PromptSplit:
        return PromptSplit.of(subject, captures, self.seed, self.batch_tokens)

    def _examine(self, subject: Subject, captures: Mapping[str, Capture]) -> Arrays:
        split = self._split(subject, captures)
        axes = axes_of(split, self.direction, self.layers)
        with within(self.name):
            return edit_axes(split, axes, self.mode, self.positions, self.controls).arrays

    def measure(self, data: ProbeInput) -> Result:
        """Raises UserError for few clusters."""
        given = (self.mode, self.layers, self.positions, data.clusters, data.observations)
        return measure_axis(self.name, AxisEffects.of_arrays(*given))


@dataclass(frozen=True)
class EachLayerProbe(AxisProbe):
    """A probe that edits each layer alone, with fewer controls and no claims."""

    def _examine(self, subject: Subject, captures: Mapping[str, Capture]) -> Arrays:
        split = self._split(subject, captures)
        return {"by_layer": edit_each_layer(split, self.direction, self.mode, self.positions, self.controls)}

    def measure(self, data: ProbeInput) -> Result:
        by_layer = data.observations["by_layer"]
        without = np.flatnonzero(np.isnan(by_layer[:, 0])).tolist()
        layers = f"layer{'s' * (len(without) > 1)} {', '.join(map(str, without))}"
        kl, low, high, scale = np.nan_to_num(by_layer).T
        return LayerCurve(
            kl=Curve(kl, null=np.stack([low, high], 1)),
            tenth=scale / 10,
            notes=(f"{layers}: no axis to edit, or no other direction to compare it with; drawn as 0",) * bool(without),
        )


@dataclass(frozen=True)
class PositiveControlProbe(AxisProbe):
    """A probe that projects the read-out direction of two tokens out of the last layer's values at the final token."""

    def _examine(self, subject: Subject, captures: Mapping[str, Capture]) -> Arrays:
        with within(self.name):
            return edit_readout_direction(self._split(subject, captures), self.controls).arrays

    def measure(self, data: ProbeInput) -> Result:
        """Raises UserError for few clusters."""
        return measure_positive_control(DoseEffects.of_arrays("project-out", data.observations), data.clusters)


def question(
    subject: Subject,
    batch: Batch,
    *,
    directions: Sequence[str] = DIRECTIONS,
    mode: Mode = "project-out",
    layers: Any = "last",
    positions: Positions = "query",
    controls: int = 199,
    seed: int = 0,
    batch_tokens: int = BATCH_TOKENS,
) -> Question:
    """The question that edits the entropy axis: axes from the estimation half, effects on the evaluation half.

    Args:
        directions: the ways to estimate the axis.
        layers: layers edited together, as `flags.places` reads them; "last"; "each" edits the last layer, and then
            each layer alone.
        controls: number of draws of each kind of control edit.

    Raises:
        UserError: a layer that does not exist; fewer than 5 clusters in a half; a batch that has query positions.
    """
    chosen = chosen_layers(subject, -1 if layers in ("last", "each") else layers)
    check_prompts(batch)
    estimation, evaluation = halves(batch, seed)
    shared: tuple[Any, ...] = (mode, chosen, positions, controls, seed, batch_tokens)
    probes: dict[str, Probe] = {CONTROL: PositiveControlProbe(CONTROL, "pc1", *shared)}
    for direction in directions:
        name = f"ablation_{direction}"
        probes[name] = AxisProbe(name, direction, *shared)
        if layers == "each":
            probes[f"{name}_layers"] = EachLayerProbe(f"{name}_layers", direction, *shared)
    about = {"directions": list(directions), "mode": mode, "layers": list(chosen), "positions": positions}
    return on_halves(estimation, evaluation, probes, about, (controls, seed, batch_tokens))


def on_halves(
    estimation: Batch, evaluation: Batch, probes: Mapping[str, Probe], about: Any, draws: tuple[int, int, int]
) -> Question:
    """The question of probes that edit an axis; draws: number of control edits, seed, batch_tokens."""
    facts = {"estimated on": len(estimation), "axis": about}
    return Question(evaluation, probes, *draws, {ESTIMATION: estimation}, facts, finish=with_doubts)


def with_doubts(record: Record) -> Record:
    """The record with a warning at every result without an effect, if the positive control failed."""
    control = record.results.get(CONTROL)
    if control is not None and control.estimates[0].verdict in ("holds", "small"):
        return record
    doubt = "the positive control failed, so an axis that does no more than other edits proves nothing"
    return replace(record, warnings=(*record.warnings, doubt))
