"""Results of interchange interventions: where in a model evidence is held, and in how many directions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from llmgeom.claims import declared, layer_band
from llmgeom.probes.interventions.interchange import AS_FAR, RANDOM, InterchangeEffects
from llmgeom.probes.interventions.patching import estimate_against
from llmgeom.result import Figure, Result, quantity
from llmgeom.stats.resampling import jackknife, mean_intervals

PROSE = Path(__file__).parents[1] / "texts" / "interchange.md"
PROBE, TOTAL, UNTRAINED = "interchange", "total effect", "untrained controls"
DECLARED_LAYERS = {0: "at the embedding", 1: "after the first layer"}  # the inputs of layers 0 and 1


def _curve(name: str, **more: str) -> Figure:
    return Figure("curve", interval=f"{name}_interval", **more)


@dataclass(frozen=True, kw_only=True)
class Interchange(Result):
    """How far answers follow evidence that is exchanged inside the model."""

    TITLE = "Interchange of evidence"
    TEXT = PROSE

    whole: np.ndarray = quantity("layer", "bits", "effect of the whole patch", _curve("whole", beside="total"))
    whole_interval: np.ndarray = quantity("layer bound", "bits", "95 % interval over sequences")
    total: np.ndarray = quantity("layer", "bits", "total effect, the same for every layer")
    frame: np.ndarray = quantity(
        "layer", "bits", "effect of the patch in the frame", _curve("frame", band="frame_null")
    )
    frame_interval: np.ndarray = quantity("layer bound", "bits", "95 % interval over sequences")
    frame_null: np.ndarray = quantity("layer bound", "bits", "band of random subspaces, the higher kind")
    random: np.ndarray = quantity("layer", "bits", "effect of patches in random subspaces, mean over draws")
    as_far: np.ndarray = quantity("layer", "bits", "the same, moved as far as the frame, mean over draws")
    rest: np.ndarray = quantity("layer", "bits", "effect of the patch outside the frame", _curve("rest"))
    rest_interval: np.ndarray = quantity("layer bound", "bits", "95 % interval over sequences")
    placebo: np.ndarray = quantity("layer", "bits", "effect of the placebo", _curve("placebo"))
    placebo_interval: np.ndarray = quantity("layer bound", "bits", "95 % interval over sequences")
    placebo_lost: np.ndarray = quantity("layer", "bits", "rise of KL(p || q) by the placebo, p the answer to x")
    dimensions: np.ndarray = quantity("layer", "dimensions", "of the frame")


def measure_interchange(
    trained: InterchangeEffects, untrained: Sequence[InterchangeEffects], layers: Sequence[int], clusters: np.ndarray
) -> Interchange:
    """The total effect, the effect at each layer and, at the declared layers, estimates. UserError: few sequences."""
    layers, claims = tuple(layers), declared(PROBE)
    total, rows = trained.total.mean(), np.arange(len(clusters))
    spans = {
        kind: mean_intervals(trained.moved[kind][:, 0], clusters) for kind in ("whole", "frame", "rest", "placebo")
    }
    total_interval = jackknife(np.mean, trained.total, clusters)
    null = {UNTRAINED: np.array([control.total.mean() for control in untrained])}
    estimates = [estimate_against(claims[TOTAL], total, total_interval, null, clusters)]
    follows = total_interval.low > 0
    note, warnings = _where(trained.moved["whole"][:, 0].mean(1), total, layers, follows)
    for i, layer in enumerate(layers):
        if layer not in DECLARED_LAYERS:
            continue
        name, effect = f"frame {DECLARED_LAYERS[layer]}", trained.moved["frame"][i, 0]
        null = {kind: trained.moved[kind][i].mean(1) for kind in (RANDOM, AS_FAR)}
        controls = {UNTRAINED: np.array([control.moved["frame"][i, 0].mean() for control in untrained])}
        claim = claims[name]
        if claim.claim and total <= claim.effect:
            claim = replace(claim, claim="")
            warnings.append(
                f"the total effect is {total:.3g} bits, too little for '{name}' to be decided by {claim.effect:g} "
                "bits: it is a measurement and no claim"
            )
        interval = jackknife(np.mean, effect, clusters)
        estimates.append(estimate_against(claim, effect.mean(), interval, null | controls, clusters))
        if follows:
            interval = jackknife(partial(_share, effect, trained.total), rows, clusters)
            shares = {kind: draws / total for kind, draws in null.items()}
            claim = claims[f"{name}, over the total effect"]
            estimates.append(estimate_against(claim, effect.mean() / total, interval, shares, clusters))
    values = {kind: trained.moved[kind][:, 0].mean(1) for kind in spans}
    bands = [
        layer_band({k: trained.moved[k][i].mean(1)[:, None] for k in (RANDOM, AS_FAR)}) for i in range(len(layers))
    ]
    return Interchange(
        whole=values["whole"],
        whole_interval=spans["whole"],
        frame=values["frame"],
        frame_interval=spans["frame"],
        rest=values["rest"],
        rest_interval=spans["rest"],
        placebo=values["placebo"],
        placebo_interval=spans["placebo"],
        total=np.full(len(layers), total),
        frame_null=np.concatenate([band for band in bands if band is not None]),  # each layer has draws
        random=trained.moved[RANDOM].mean((1, 2)),
        as_far=trained.moved[AS_FAR].mean((1, 2)),
        placebo_lost=trained.lost["placebo"][:, 0].mean(1),
        dimensions=np.array(trained.dimensions, dtype=float),
        estimates=tuple(estimates),
        ticks={"layer": layers},
        warnings=tuple(warnings),
        notes=(note,),
    )


def _where(whole: np.ndarray, total: float, layers: tuple[int, ...], follows: bool) -> tuple[str, list[str]]:
    """A note on the depth at which the whole patch loses its effect; a warning where layer 0 is not the embedding."""
    if not follows:
        return (
            f"the answers do not follow the evidence: the total effect is {total:.3g} bits, not above 0, and patched "
            "effects have no fractions of it",
            [],
        )
    shares = whole / total
    reaching = [layer for layer, share in zip(layers, shares, strict=True) if share > 0.5]
    where = f"up to the input of layer {reaching[-1]}" if reaching else "at none of these layers"
    note = f"the whole patch has more than half of the total effect {where}: {', '.join(f'{x:.2f}' for x in shares)}"
    if layers[0] == 0 and abs(shares[0] - 1) > 0.01:
        return note, [
            f"at the embedding the whole patch has {shares[0]:.3f} of the total effect; there it is x' itself and "
            "should have all of it. This model reads its inputs elsewhere, too, and no layer's patch can be trusted"
        ]
    return note, []


def _share(effect: np.ndarray, total: np.ndarray, rows: np.ndarray) -> float:
    return effect[rows].mean() / total[rows].mean()
