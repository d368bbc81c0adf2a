"""Ablation of the entropy axis: its effect, the effect at every layer, and a positive control."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from llmgeom.claims import declared, layer_band
from llmgeom.flags import places
from llmgeom.model.batching import BATCH_TOKENS
from llmgeom.model.intervention import (
    Effects,
    Intervention,
    Location,
    Moves,
    Runner,
    copies_of,
    priced,
    rescaled,
    to_mean,
)
from llmgeom.plan import Plan
from llmgeom.probe import Batch, Capture, Model, Needs, Probe, ProbeInput, Site
from llmgeom.probes.interventions.axis import SIZE, VARIANCE, Axis, Mode, NoAxis, readout_direction
from llmgeom.probes.interventions.halves import ESTIMATION, EVALUATION, PROMPT_SITES, Halves, Positions, check, halves
from llmgeom.probes.shared.nulls import compare, log_if_positive, mean_of
from llmgeom.probes.shared.rows import as_matrix
from llmgeom.progress import within
from llmgeom.record import Record
from llmgeom.result import SENTENCE, Estimate, Labelled, Result, labelled, line
from llmgeom.stats.resampling import mean_intervals
from llmgeom.stats.tests import correlation_test, spearman

CONTROL = "ablation_control"
KL, EQUAL, ERROR = "KL of the edit", "KL of the edit, against equal edits", "rise of the read-out's error"
EVIDENCE, ODDS = "rise of the evidence error", "log-odds moved"
DIRECTIONS = ("pc1", "ridge")
DOSES: dict[Mode, tuple[float, ...]] = {
    "project-out": (0.5, 1.0),
    "keep-only": (0.5, 1.0),
    "steer": (-2.0, -1.0, 1.0, 2.0),
}
DECISIVE: dict[Mode, tuple[float, ...]] = {"project-out": (1.0,), "keep-only": (1.0,), "steer": (-2.0, 2.0)}
BAND_DRAWS = 39  # at doses and layers without a claim: the fewest draws for a 95 % band
ORDERED_P = 0.05  # of |rho| with entropy on the other half: an axis without that order is no entropy axis
BAND = "band of the control edits, the higher kind"


# ---- edits at doses -------------------------------------------------------------------------------------------------


def joint_edits(
    axes: Mapping[Location, Axis], mode: Mode, count: int, seed: int
) -> tuple[Moves, dict[str, list[Moves]]]:
    """The joint edit of several layers' axes, and joint control edits, drawn for each layer separately."""
    drawn = {at: axis.controls(mode, count, (seed, at[1])) for at, axis in axes.items()}
    kinds = [kind for kind in (SIZE, VARIANCE) if all(kind in by_kind for by_kind in drawn.values())]
    joint: dict[str, list[Moves]] = {
        kind: [{at: by_kind[kind][i] for at, by_kind in drawn.items()} for i in range(count)] for kind in kinds
    }
    return {at: axis.edit(mode) for at, axis in axes.items()}, joint


def edit_doses(runner: Runner, mode: Mode, own: Moves, draws: Mapping[str, Sequence[Moves]]) -> Effects:
    """Effects of the edit, "own/OUTCOME" [dose prompt], and of its controls, "KIND DOSE/OUTCOME" [draw prompt].

    All draws run at the decisive doses, BAND_DRAWS of them at the others.

    As many decide as give a 95 % band. Simulated, 6,000 edits that are draws like their controls, 37 clusters, KL of
    draws log-normal or chi-squared with 1 to 10 degrees of freedom: p < .025 in 0 to 2.7 % with 9 to 199 draws, and p <
    .00625, of four claims, in 0 to .8 %. Of an edit eight times the median control, whose log has a spread of .5, p <
    .00625 in 67 to 82 % with 9 draws, 91 to 100 with 39, and 96 to 100 with 199.
    """
    effects: Effects = {}
    for kind, some in draws.items():
        for dose in DOSES[mode]:
            chosen = some if dose in DECISIVE[mode] else some[:BAND_DRAWS]
            edits = [Intervention(f"{kind} {dose:g}", moves, dose=dose) for moves in chosen]
            effects |= runner.run(edits, f"{kind}, dose {dose:g}")
    return effects | runner.run([Intervention("own", own, dose=dose) for dose in DOSES[mode]])


def kinds(effects: Effects, mode: Mode) -> list[str]:
    """The kinds of control edit that there are."""
    return [kind for kind in (SIZE, VARIANCE) if f"{kind} {DOSES[mode][0]:g}/kl" in effects]


def decisive(effects: Effects, mode: Mode, outcome: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Effects at the decisive doses, averaged: [prompt] of the edit, and kind -> [draw prompt] of its controls."""
    doses = DECISIVE[mode]
    return effects[f"own/{outcome}"][[DOSES[mode].index(dose) for dose in doses]].mean(0), {
        kind: np.mean([effects[f"{kind} {dose:g}/{outcome}"] for dose in doses], 0) for kind in kinds(effects, mode)
    }


def dose_curve(
    effects: Effects, mode: Mode, outcome: str, unit: str, said: str, clusters: np.ndarray | None = None,
    null: str = BAND,
) -> dict[str, Labelled | None]:  # fmt: skip
    """[dose] mean over prompts, the band of the control kind with the higher band and, by cluster, an interval."""
    own = effects[f"own/{outcome}"]
    bands = [
        layer_band({kind: effects[f"{kind} {dose:g}/{outcome}"].mean(1)[:, None] for kind in kinds(effects, mode)})
        for dose in DOSES[mode]
    ]
    around: Any = {"interval": ("clusters", None if clusters is None else mean_intervals(own, clusters))}
    around["null"] = (null, np.concatenate([band for band in bands if band is not None]))
    return line(outcome, own.mean(1), "dose", unit, said, **around)


def dose_estimate(
    probe: str, name: str, effects: Effects, mode: Mode, outcome: str, clusters: np.ndarray, claimed: bool = True
) -> Estimate:
    """The estimate of an effect, compared with every kind of control edit; without its claim if `claimed` is False."""
    claim, (values, draws) = declared(probe)[name], decisive(effects, mode, outcome)
    claim = claim if claimed else replace(claim, claim="")
    return compare(claim, mean_of, values, clusters, draws, transform=log_if_positive(claim, clusters, values))


def effect_of_means(runner: Runner, axes: Mapping[Location, Axis]) -> dict[str, float]:
    """Mean effects over prompts when activations, even constant ones, become their mean over the estimation half."""
    effects = runner.run([Intervention("mean", {at: to_mean(axis.mean[None]) for at, axis in axes.items()})])
    return {name.removeprefix("mean/"): float(by_prompt[0].mean()) for name, by_prompt in effects.items()}


# ---- the entropy axis -----------------------------------------------------------------------------------------------


def axes_of(split: Halves, direction: str, layers: Sequence[int]) -> dict[Location, Axis]:
    """The axis of each layer's values, estimated on the estimation half."""
    values, entropy = split.captures[ESTIMATION].layers(Site.VALUE), split.entropy(ESTIMATION)
    return {
        ("value", n): Axis.estimate(as_matrix(values[n]), entropy, split.estimation.cluster, direction, split.seed)
        for n in layers
    }


def project_out(runner: Runner, layer: int, axis: Axis, direction: Tensor, count: int, seed: int) -> Effects:
    """Project a direction of each prompt, d [prompt coordinate] in x, out of a layer's values.

    The controls are random directions in the span of the estimation half, orthogonal to d, with edits of equal length.
    """
    d = direction / direction.norm(dim=1, keepdim=True).clamp_min(1e-300)
    span = torch.cat([axis.u[None], axis.others])
    rng = np.random.default_rng([seed, layer, 2])
    random = (torch.from_numpy(rng.standard_normal((count, len(span)))) @ span) * axis.sd
    at: Location = ("value", layer)

    def removed(x: Tensor, unit: Tensor) -> Tensor:
        return -((x - axis.mean) * unit).sum(1, keepdim=True) * unit

    def control(s: Tensor, x: Tensor, prompt: Tensor) -> Tensor:
        unit = s - (d[prompt] @ s)[:, None] * d[prompt]
        unit = unit / unit.norm(dim=1, keepdim=True)
        return rescaled(removed(x, unit), removed(x, d[prompt]))

    own: Moves = {at: lambda x, prompt: removed(x, d[prompt])}
    return edit_doses(runner, "project-out", own, {SIZE: [{at: partial(control, s)} for s in random]})


# ---- results --------------------------------------------------------------------------------------------------------


def measure_axis(
    probe: str, effects: Effects, mode: Mode, layers: Sequence[int], positions: Positions, clusters: np.ndarray
) -> Result:
    """The result of `edit_axes`; `probe` names the claims. Raises UserError: few clusters."""
    warnings, scale, rho = [], float(effects["scale"]), float(effects["rho"])
    name = probe.removeprefix("ablation_")
    if not (complete := VARIANCE in kinds(effects, mode)):
        warnings.append(
            "no edit has the same variance: all other components carry "
            f"{float(effects['variance_left']):.2f} of the axis's. "
            "Compared with edits of the same size alone, the result is a measurement and no claim"
        )
    # If even the mean changes less than the effect of interest, "ruled out" is nearly certain in advance; so is
    # equivalence if a tenth of that change is less than the margin.
    decidable = {KL: scale > declared(probe)[KL].effect, EQUAL: scale / 10 > declared(probe)[EQUAL].effect}
    for claim in [claim for claim, can_decide in decidable.items() if not can_decide]:
        warnings.append(
            f"replacing the values by their mean changes {scale:.3g} bits, too little for '{claim}' to be tested "
            f"at {declared(probe)[claim].effect:g} bits: it is a measurement and no claim"
        )
    if not (ordered := rho > 0 and float(effects["rho_p"]) < ORDERED_P):
        warnings.append(
            f"the axis ({name}) does not order the prompts that were measured by entropy (rho {rho:.2f}, p = "
            f"{float(effects['rho_p']):.2g}), so it is no entropy axis there: its effect is a measurement and no claim"
        )
    metrics = [(claim, "kl", complete and can_decide and ordered) for claim, can_decide in decidable.items()]
    metrics += [(ERROR, "error", True)] + [(EVIDENCE, "evidence", True)] * ("own/evidence" in effects)
    of_length = "mean length of the edits at the decisive dose, final token"
    of_scale = "KL when the values are replaced by their mean: what there is to lose"
    of_share = "of the standardised variance along the axis, estimation half"
    of_step = "spread sd u: what steering by dose 1 adds to the edited layers' values"
    estimates = tuple(
        dose_estimate(probe, name, effects, mode, outcome, clusters, claimed) for name, outcome, claimed in metrics
    )
    one = estimates[0]
    said = (
        f"Edited along its entropy axis ({name}, {mode}) the next token changes by "
        f"{one.value:.2g} bits of KL [{one.low:.2g}, {one.high:.2g}] (n = {one.n} prompts)"
    )
    said += "".join(f"; random edits of the {c.name} by {c.low:.2g} to {c.high:.2g}" for c in one.controls[:1])
    return Result.of(
        "Ablation of the entropy axis",
        {
            "dose": labelled(np.array(DOSES[mode]), "dose", "dose", "of the edit"),
            **dose_curve(effects, mode, "kl", "bits", "KL(clean || edited), mean over prompts", clusters),
            **dose_curve(effects, mode, "error", "bits^2", "rise of the read-out's error"),
            "length": labelled(effects["lengths"], "edit", "of the values' own", of_length),
            "scale": labelled(scale, "", "bits", of_scale),
            "tenth": labelled(scale / 10, "", "bits", "a tenth of `scale`"),
            "share": labelled(effects["share"], "", "fraction", of_share),
            "rho": labelled(rho, "", "rho", "Spearman's, of c and entropy on the evaluation half"),
            "step": labelled(effects["step"], "layer coordinate", "units of the values", of_step),
        },
        __name__,
        estimates=estimates,
        facts={SENTENCE: f"{said}."},
        ticks={"dose": DOSES[mode], "edit": ("axis", *kinds(effects, mode)), "layer": tuple(layers)},
        warnings=tuple(warnings),
        notes=(f"mode {mode}, layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}, {positions} positions",),
    )


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

    KINDS: ClassVar[int] = 2  # of control edits

    @property
    def site(self) -> Site:
        """The activations that are edited."""
        return Site.VALUE

    @property
    def NEEDS(self) -> Needs:
        return Needs(
            sites=PROMPT_SITES | {self.site},
            controls=frozenset(),
            samples=frozenset({ESTIMATION}),
            examine=self._examine,
        )

    def _examine(self, subject: Model, captures: Mapping[str, Capture]) -> Effects:
        with within(self.name):
            return self.effects(Halves(subject, captures, self.seed, self.batch_tokens))

    def effects(self, split: Halves) -> Effects:
        """Edit the axes of all layers at once, and make `controls` control edits of each kind.

        Returns:
            As `edit_doses`, with properties of the axes:
            scale: KL in bits when the layers' values are replaced by their mean: the largest loss to expect.
            lengths: [edit] mean length of the decisive edits over that of x - mean: the axis, then each control kind.
            share: Fraction of the standardised variance along the axis, mean over layers.
            variance_left: Smallest ratio, over layers, of the variance of all other components to the axis's.
            rho, rho_p: Spearman's rho of the axis's score and entropy on the evaluation half, last edited layer, and
                the p of |rho| over permuted clusters.
            step: [layer coordinate] spread sd u, the displacement of steering by dose 1.
        """
        axes, runner = axes_of(split, self.direction, self.layers), split.runner(self.positions)
        own, draws = joint_edits(axes, self.mode, self.controls, self.seed)
        effects = edit_doses(runner, self.mode, own, draws)
        values = split.captures[EVALUATION].layers(Site.VALUE)
        x = {at: values[at[1]].flatten(1).double() for at in axes}
        whole = {at: (rows - axes[at].mean).norm(dim=1).mean() for at, rows in x.items()}
        dose = abs(DECISIVE[self.mode][-1])

        def length(moves: Moves) -> float:
            steps = {at: moves[at](rows, torch.arange(len(rows))) for at, rows in x.items()}
            return float(np.mean([dose * step.norm(dim=1).mean() / whole[at] for at, step in steps.items()]))

        last, entropy = max(axes), split.entropy(EVALUATION)
        scores = (axes[last].z(x[last]) @ axes[last].u).numpy()
        numbers = {
            "scale": effect_of_means(runner, axes)["kl"],
            "lengths": [np.mean([*map(length, some)]) for some in ([own], *(a[:BAND_DRAWS] for a in draws.values()))],
            "share": np.mean([axis.share for axis in axes.values()]),
            "variance_left": min(axis.variance_left for axis in axes.values()),
            "rho": spearman(scores, entropy),
            "rho_p": correlation_test(scores, entropy, split.evaluation.cluster, seed=self.seed).p,
            "step": np.stack([(axis.sd * axis.spread * axis.u).numpy() for axis in axes.values()]),
        }
        return effects | {name: np.array(value) for name, value in numbers.items()}

    def first_layers(self, depth: int) -> Sequence[int]:
        """The first layer of each joint edit."""
        return (min(self.layers),)

    def priced(self, subject: Model, batch: Batch, control: bool = False) -> float:
        """Tokens of whole passes that the edits of one model take."""
        doses, few, depth = DOSES[self.mode], min(self.controls, BAND_DRAWS), len(subject.blocks)
        draws = sum(self.controls if dose in DECISIVE[self.mode] else few for dose in doses)
        whole = int(batch.tokens.lengths.sum())
        each = len(batch) if self.positions == "query" else whole
        every = [layer for layer in self.first_layers(depth) for _ in range(self.KINDS * draws + len(doses) + 1)]
        return whole + priced(every, depth, each, copies_of(batch, subject))

    def measure(self, data: ProbeInput) -> Result:
        """Raises UserError for few clusters."""
        return measure_axis(self.name, data.observations, self.mode, self.layers, self.positions, data.clusters)


@dataclass(frozen=True)
class EachLayerProbe(AxisProbe):
    """A probe that edits each layer alone, with fewer controls and no claims."""

    def effects(self, split: Halves) -> Effects:
        """by_layer [layer 4]: KL of the edit of each layer alone, the controls' band (low, high), KL when its values
        become their mean; NaN where there is no axis, e.g. in the first layer if all prompts end in one token."""
        rows, runner = np.full((len(split.subject.blocks), 4), np.nan), split.runner(self.positions)
        for layer, row in enumerate(rows):
            try:
                axes = axes_of(split, self.direction, (layer,))
                own, draws = joint_edits(axes, self.mode, min(BAND_DRAWS, self.controls), self.seed)
            except NoAxis:
                continue
            with within(f"layer {layer}"):
                kl, null = decisive(edit_doses(runner, self.mode, own, draws), self.mode, "kl")
            band = layer_band({kind: draws.mean(1)[:, None] for kind, draws in null.items()})
            assert band is not None  # every kind of control edit has draws
            row[:] = kl.mean(), *band[0], effect_of_means(runner, axes)["kl"]
        return {"by_layer": rows}

    def first_layers(self, depth: int) -> Sequence[int]:
        return range(depth)

    def measure(self, data: ProbeInput) -> Result:
        by_layer = data.observations["by_layer"]
        without = np.flatnonzero(np.isnan(by_layer[:, 0])).tolist()
        layers = f"layer{'s' * (len(without) > 1)} {', '.join(map(str, without))}"
        kl, low, high, scale = np.nan_to_num(by_layer).T
        said, null = "KL(clean || edited), mean over prompts", ("band of the control edits", np.stack([low, high], 1))
        tenth = "a tenth of the KL when the layer's values are replaced by their mean"
        return Result.of(
            "Ablation of the entropy axis, layer by layer",
            {
                **line("kl", kl, "layer", "bits", said, null=null, beside="tenth"),
                "tenth": labelled(scale / 10, "layer", "bits", tenth),
            },
            __name__,
            notes=(f"{layers}: no axis to edit, or no other direction to compare it with; drawn as 0",) * bool(without),
        )


@dataclass(frozen=True)
class PositiveControlProbe(AxisProbe):
    """A probe that projects the read-out direction of two tokens out of the last layer's values at the final token."""

    KINDS: ClassVar[int] = 1

    def effects(self, split: Halves) -> Effects:
        """As `project_out`. Raises Unavailable: the layout of the output weights is unknown."""
        (layer,) = self.layers
        (axis,) = axes_of(split, self.direction, self.layers).values()
        direction = readout_direction(split.subject, split.pair)
        return project_out(split.runner(self.positions), layer, axis, direction, self.controls, self.seed)

    def measure(self, data: ProbeInput) -> Result:
        """Raises UserError for few clusters."""
        mode: Mode = "project-out"
        said, null = "|change of the log-odds of the two tokens|, mean", "band of random edits of the same size"
        return Result.of(
            "Positive control: the read-out direction of two tokens",
            {
                "dose": labelled(np.array(DOSES[mode]), "dose", "dose", "of the edit"),
                **dose_curve(data.observations, mode, "odds", "bits", said, null=null),
            },
            __name__,
            estimates=(dose_estimate(CONTROL, ODDS, data.observations, mode, "odds", data.clusters),),
            ticks={"dose": DOSES[mode]},
        )


def question(
    subject: Model,
    batch: Batch,
    *,
    directions: Sequence[str] = DIRECTIONS,
    mode: Mode = "project-out",
    layers: Any = "last",
    positions: Positions = "query",
    controls: int = BAND_DRAWS,
    seed: int = 0,
    batch_tokens: int = BATCH_TOKENS,
) -> Plan:
    """The question that edits the entropy axis: axes from the estimation half, effects on the evaluation half.

    Args:
        directions: the ways to estimate the axis.
        layers: layers edited together, as `flags.places` reads them; "last"; "each" edits the last layer, and then
            each layer alone.
        controls: number of draws of each kind of control edit.

    Raises:
        UserError: a layer that does not exist; fewer than 5 clusters in a half; a batch that has query positions.
    """
    chosen = places("--layers", -1 if layers in ("last", "each") else layers, len(subject.blocks))
    check(subject, batch)
    shared = (positions, controls, seed, batch_tokens)
    probes: dict[str, Probe] = {}
    for direction in directions:
        name = f"ablation_{direction}"
        probes[name] = AxisProbe(name, direction, mode, chosen, *shared)
        if layers == "each":
            probes[f"{name}_layers"] = EachLayerProbe(f"{name}_layers", direction, mode, chosen, *shared)
    about = {"directions": list(directions), "mode": mode, "layers": list(chosen), "positions": positions}
    return on_halves(subject, batch, probes, about, (controls, seed, batch_tokens))


def on_halves(
    subject: Model, batch: Batch, probes: Mapping[str, Probe], about: Any, draws: tuple[int, int, int]
) -> Plan:
    """The question of probes that edit an axis, and of their positive control.

    Args:
        draws: number of control edits, seed, batch_tokens.
    """
    control = PositiveControlProbe(CONTROL, "pc1", "project-out", (len(subject.blocks) - 1,), "query", *draws)
    estimation, evaluation = halves(batch, draws[1])
    facts = {"estimated on": len(estimation), "axis": about}

    def with_doubt(record: Record, _: Mapping[str, Any]) -> Record:
        """A warning, if the positive control failed."""
        found = record.results.get(CONTROL)
        if found is not None and found.estimates[0].verdict in ("holds", "small"):
            return record
        doubt = "the positive control failed, so an axis that does no more than other edits proves nothing"
        return replace(record, warnings=(*record.warnings, doubt))

    return Plan.of(
        subject, evaluation, {CONTROL: control, **probes}, *draws, {ESTIMATION: estimation}, facts, finish=with_doubt
    )
