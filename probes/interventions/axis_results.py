"""Results of editing the entropy axis: the estimates, curves and prose of the run's page."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from llmgeom.claims import declared
from llmgeom.probes.interventions.axis import VARIANCE
from llmgeom.probes.interventions.axis_ablation import DOSES, AxisEffects, DoseEffects
from llmgeom.probes.interventions.patching import estimate_against
from llmgeom.result import Estimate, Figure, Result, quantity
from llmgeom.stats.resampling import jackknife, mean_intervals

PROSE = Path(__file__).parents[1] / "texts" / "entropy_axis.md"
CONTROL = "ablation_control"
KL, EQUAL, ERROR = "KL of the edit", "KL of the edit, against equal edits", "rise of the read-out's error"
EVIDENCE, ODDS = "rise of the evidence error", "log-odds moved"


@dataclass(frozen=True, kw_only=True)
class AxisAblation(Result):
    """The effect of editing one axis, beside edits of the same size and of the same variance."""

    TITLE = "Ablation of the entropy axis"
    TEXT = PROSE

    dose: np.ndarray = quantity("dose", "dose", "of the edit")
    kl: np.ndarray = quantity(
        "dose",
        "bits",
        "KL(clean || edited), mean over prompts",
        Figure("curve", band="kl_null", interval="kl_interval"),
    )
    kl_null: np.ndarray = quantity("dose bound", "bits", "band of the control edits, the higher kind")
    kl_interval: np.ndarray = quantity("dose bound", "bits", "95 % interval over clusters")
    error: np.ndarray = quantity("dose", "bits^2", "rise of the read-out's error", Figure("curve", band="error_null"))
    error_null: np.ndarray = quantity("dose bound", "bits^2", "band of the control edits, the higher kind")
    length: np.ndarray = quantity(
        "edit", "of the values' own", "mean length of the edits at the decisive dose, final token"
    )
    scale: float = quantity("", "bits", "KL when the values are replaced by their mean: what there is to lose")
    tenth: float = quantity("", "bits", "a tenth of that")
    share: float = quantity("", "fraction", "of the standardised variance along the axis, estimation half")
    rho: float = quantity("", "rho", "Spearman's, of c and entropy on the evaluation half")
    step: np.ndarray = quantity(
        "layer coordinate",
        "units of the values",
        "spread sd u: what steering by dose 1 adds to the edited layers' values",
    )


@dataclass(frozen=True)
class LayerCurve(Result):
    """The same edit at every layer, one at a time."""

    TITLE = "Ablation of the entropy axis, layer by layer"
    TEXT = PROSE

    kl: np.ndarray = quantity(
        "layer", "bits", "KL(clean || edited), mean over prompts", Figure("curve", band="kl_null", beside="tenth")
    )
    kl_null: np.ndarray = quantity("layer bound", "bits", "band of the control edits")
    tenth: np.ndarray = quantity(
        "layer", "bits", "a tenth of the KL when the layer's values are replaced by their mean"
    )


@dataclass(frozen=True, kw_only=True)
class PositiveControl(Result):
    """A direction that must matter. If it does not, no other result of the run says that a direction is unused."""

    TITLE = "Positive control: the read-out direction of two tokens"
    TEXT = PROSE

    dose: np.ndarray = quantity("dose", "dose", "of the edit")
    odds: np.ndarray = quantity(
        "dose", "bits", "|change of the log-odds of the two tokens|, mean", Figure("curve", band="odds_null")
    )
    odds_null: np.ndarray = quantity("dose bound", "bits", "band of random edits of the same size")


def measure_axis(probe: str, axis: AxisEffects) -> AxisAblation:
    """Estimates of an edited axis against its control edits; `probe` names the claims. UserError: few clusters."""
    dose, clusters, doses = axis.dose, axis.clusters, DOSES[axis.dose.mode]
    warnings = []
    if not (complete := VARIANCE in dose.controls):
        warnings.append(
            f"no edit has the same variance: all other components carry {axis.variance_left:.2f} of the axis's. "
            "Compared with edits of the same size alone, the result is a measurement and no claim"
        )
    # Where there is less to lose than the effect of interest, "ruled out" is nearly certain in advance; where a tenth
    # of it is less than the margin, so is equivalence.
    decidable = {
        KL: axis.scale > declared(probe)[KL].effect,
        EQUAL: axis.scale / 10 > declared(probe)[EQUAL].margin,
    }
    for name in [name for name, can_decide in decidable.items() if not can_decide]:
        warnings.append(
            f"replacing the values by their mean changes {axis.scale:.3g} bits, too little for '{name}' to be decided "
            f"by {declared(probe)[name].smallest:g} bits: it is a measurement and no claim"
        )
    metrics = [(name, "kl", complete and can_decide) for name, can_decide in decidable.items()]
    metrics += [(ERROR, "error", True)] + [(EVIDENCE, "evidence", True)] * axis.has_exact
    return AxisAblation(
        dose=np.array(doses),
        kl=dose.own["kl"].mean(1),
        kl_null=dose.bands("kl"),
        kl_interval=mean_intervals(dose.own["kl"], clusters),
        error=dose.own["error"].mean(1),
        error_null=dose.bands("error"),
        length=axis.lengths,
        scale=axis.scale,
        tenth=axis.scale / 10,
        share=axis.share,
        rho=axis.rho,
        estimates=tuple(_estimate(probe, name, dose, effect, clusters, claimed) for name, effect, claimed in metrics),
        step=axis.step,
        ticks={"dose": doses, "edit": ("axis", *dose.controls), "layer": axis.layers},
        warnings=tuple(warnings),
        notes=(
            f"mode {dose.mode}, layer{'s' * (len(axis.layers) > 1)} {', '.join(map(str, axis.layers))}, "
            f"{axis.positions} positions",
        ),
    )


def measure_layers(by_layer: np.ndarray) -> LayerCurve:
    """The curve over layers, from `edit_each_layer`."""
    return LayerCurve(kl=by_layer[:, 0], kl_null=by_layer[:, 1:3], tenth=by_layer[:, 3] / 10)


def measure_positive_control(dose: DoseEffects, clusters: np.ndarray) -> PositiveControl:
    """The positive control's estimate. UserError: few clusters."""
    return PositiveControl(
        dose=np.array(DOSES[dose.mode]),
        odds=dose.own["odds"].mean(1),
        odds_null=dose.bands("odds"),
        estimates=(_estimate(CONTROL, ODDS, dose, "odds", clusters),),
        ticks={"dose": DOSES[dose.mode]},
    )


def _estimate(
    probe: str, name: str, dose: DoseEffects, effect: str, clusters: np.ndarray, claimed: bool = True
) -> Estimate:
    """Compared with every kind of control edit; without its claim where it cannot be decided."""
    claim, (values, null) = declared(probe)[name], dose.decisive(effect)
    claim = claim if claimed else replace(claim, claim="")
    return estimate_against(claim, values.mean(), jackknife(np.mean, values, clusters), null, clusters)
