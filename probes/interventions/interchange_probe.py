"""Interchange interventions as a probe: where a model stores evidence, and in how many directions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from llmgeom.claims import declared, layer_band
from llmgeom.probe import Capture, Needs, Probe, ProbeInput, Subject
from llmgeom.probes.interventions import hypothesis_frame
from llmgeom.probes.interventions.interchange import AS_FAR, RANDOM, Controls, InterchangeEffects, Pairs
from llmgeom.probes.interventions.patching import chosen_layers, estimate_against
from llmgeom.provenance import CONTROLS, few_draws
from llmgeom.result import Curve, Estimate, Result, curve, quantity
from llmgeom.run import BATCH_TOKENS, Question
from llmgeom.stats.resampling import jackknife, mean_intervals
from llmgeom.task import Task

PROBE, TOTAL, UNTRAINED = "interchange", "total effect", "untrained controls"
DECLARED_LAYERS = {0: "at the embedding", 1: "after the first layer"}  # the inputs of layers 0 and 1
SUBSPACES = 39  # random controls


# ---- results --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Interchange(Result):
    """Effect on the answers of evidence that is exchanged inside the model, by layer."""

    TITLE = "Interchange of evidence"

    whole: Curve = curve("layer", "bits", "effect of the whole patch", interval="sequences", beside="total")
    total: np.ndarray = quantity("layer", "bits", "total effect, the same for every layer")
    frame: Curve = curve(
        "layer",
        "bits",
        "effect of the patch in the frame",
        interval="sequences",
        null="band of random subspaces, the higher kind",
    )
    random: np.ndarray = quantity("layer", "bits", "effect of patches in random subspaces, mean over draws")
    as_far: np.ndarray = quantity("layer", "bits", "the same, moved as far as the frame, mean over draws")
    rest: Curve = curve("layer", "bits", "effect of the patch outside the frame", interval="sequences")
    placebo: Curve = curve("layer", "bits", "effect of the placebo", interval="sequences")
    placebo_lost: np.ndarray = quantity("layer", "bits", "rise of KL(p || q) by the placebo, p the answer to x")
    dimensions: np.ndarray = quantity("layer", "dimensions", "of the frame")


def measure_interchange(
    trained: InterchangeEffects, untrained: Sequence[InterchangeEffects], layers: Sequence[int], clusters: np.ndarray
) -> Interchange:
    """The total effect, the effect at each layer and, at the declared layers, estimates. UserError: few sequences."""
    layers, total = tuple(layers), trained.total.mean()
    curves: dict[str, Any] = {}
    for kind in ("whole", "frame", "rest", "placebo"):
        moved = trained.moved[kind][:, 0]
        curves[kind] = Curve(moved.mean(1), mean_intervals(moved, clusters))
    bands = [
        layer_band({k: trained.moved[k][i].mean(1)[:, None] for k in (RANDOM, AS_FAR)}) for i in range(len(layers))
    ]
    # Every layer has draws.
    curves["frame"] = replace(curves["frame"], null=np.concatenate([band for band in bands if band is not None]))
    interval = jackknife(np.mean, trained.total, clusters)
    null = {UNTRAINED: np.array([control.total.mean() for control in untrained])}
    estimates = [estimate_against(declared(PROBE)[TOTAL], total, interval, null, clusters)]
    follows = interval.low > 0
    note, warnings = _where(curves["whole"].value, total, layers, follows)
    for i, layer in enumerate(layers):
        if layer in DECLARED_LAYERS:
            estimates += _of_layer((trained, *untrained), i, DECLARED_LAYERS[layer], clusters, follows)
            warnings += _too_small(DECLARED_LAYERS[layer], total)
    return Interchange(
        **curves,
        total=np.full(len(layers), total),
        random=trained.moved[RANDOM].mean((1, 2)),
        as_far=trained.moved[AS_FAR].mean((1, 2)),
        placebo_lost=trained.lost["placebo"][:, 0].mean(1),
        dimensions=np.array(trained.dimensions, dtype=float),
        estimates=tuple(estimates),
        ticks={"layer": layers},
        warnings=tuple(warnings),
        notes=(note,),
    )


def _of_layer(
    models: Sequence[InterchangeEffects], i: int, where: str, clusters: np.ndarray, follows: bool
) -> Iterator[Estimate]:
    """The effect of the frame at the i-th layer and, if the answers follow the evidence, its share of the total;
    `models` are the model, then its untrained controls."""
    (trained, *untrained), claims = models, declared(PROBE)
    total, effect = trained.total.mean(), trained.moved["frame"][i, 0]
    null = {kind: trained.moved[kind][i].mean(1) for kind in (RANDOM, AS_FAR)}
    controls = {UNTRAINED: np.array([control.moved["frame"][i, 0].mean() for control in untrained])}
    claim = claims[f"frame {where}"]
    if _too_small(where, total):
        claim = replace(claim, claim="")
    yield estimate_against(claim, effect.mean(), jackknife(np.mean, effect, clusters), null | controls, clusters)
    if follows:
        rows = np.arange(len(clusters))
        interval = jackknife(lambda kept: effect[kept].mean() / trained.total[kept].mean(), rows, clusters)
        shares = {kind: draws / total for kind, draws in null.items()}
        claim = claims[f"frame {where}, over the total effect"]
        yield estimate_against(claim, effect.mean() / total, interval, shares, clusters)


def _too_small(where: str, total: float) -> list[str]:
    """A warning if the total effect is too small for a claim about the frame to be decided."""
    claim = declared(PROBE)[f"frame {where}"]
    if not claim.claim or total > claim.effect:
        return []
    return [
        f"the total effect is {total:.3g} bits, too little for '{claim.name}' to be tested at {claim.effect:g} bits: "
        "it is a measurement and no claim"
    ]


def _where(whole: np.ndarray, total: float, layers: tuple[int, ...], follows: bool) -> tuple[str, list[str]]:
    """A note on the depth at which the whole patch loses its effect; a warning if layer 0 is not the embedding."""
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


# ---- the probe ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InterchangeProbe:
    """Interchange interventions on sequences of a task and their counterfactuals, at one layer's input at a time.

    Attributes:
        n: number of sequences drawn; the probe uses those in which other evidence changes a later answer.
        layers: layers whose inputs are patched.
        controls: number of random subspaces; like the placebo, only in the trained model.
        seed: seed of sequences, donors, halves and subspaces.
    """

    task: Task
    n: int
    layers: tuple[int, ...]
    controls: int
    seed: int
    batch_tokens: int

    @cached_property
    def halves(self) -> tuple[Pairs, Pairs]:
        """Estimation and evaluation half. Raises UserError as `Pairs.of` and `Pairs.halves`."""
        return Pairs.of(self.task, self.n, self.seed, self.task.test_split).halves(self.seed)

    @cached_property
    def NEEDS(self) -> Needs:
        return Needs(
            shuffled=False,
            no_context=False,
            examine=self._with_controls,
            examine_control=lambda subject, _: self._effects(subject),
            collect=lambda _, arrays: InterchangeEffects.of_arrays(arrays),
        )

    def measure(self, data: ProbeInput) -> Interchange:
        """Total and patched effects at every layer, with all controls."""
        clusters = np.array(self.halves[1].x.cluster)
        return measure_interchange(data.observations, data.control_observations, self.layers, clusters)

    def _with_controls(self, subject: Subject, _: Mapping[str, Capture]) -> dict[str, np.ndarray]:
        donors = self.halves[1].donors(self.seed, self.task.test_split)
        return self._effects(subject, controls=Controls(self.controls, donors, self.seed))

    def _effects(self, subject: Subject, **more: Any) -> dict[str, np.ndarray]:
        return InterchangeEffects.of(subject, *self.halves, self.layers, batch_tokens=self.batch_tokens, **more).arrays


def question(
    subject: Subject,
    task: Task,
    *,
    n: int = 200,
    layers: str | Sequence[int] | None = None,
    controls: int = SUBSPACES,
    nulls: int = CONTROLS,
    seed: int = 0,
    batch_tokens: int = BATCH_TOKENS,
    warnings: Sequence[str] = (),
) -> Question:
    """The question of interchange interventions in a model, on a task.

    Args:
        layers: layers whose inputs are patched, one at a time; all by default.
        controls: number of random subspaces.
        nulls: untrained controls; None for as many as the claims need, at most 20.

    Raises:
        UserError: a layer that does not exist; a task without counterfactuals; fewer than 5 sequences in a half whose
            answers change.
    """
    chosen = chosen_layers(subject, layers)
    probe = InterchangeProbe(task, n, chosen, controls, seed, batch_tokens)
    estimation, evaluation = probe.halves
    patched = {"layers": list(chosen), "controls": controls, "positions": float(evaluation.at.sum(1).double().mean())}
    probes: dict[str, Probe] = {PROBE: probe, hypothesis_frame.PROBE: hypothesis_frame}
    facts, notes = {"estimated on": len(estimation.x), "interchange": patched}, (*warnings, *few_draws(controls))
    return Question(evaluation.x, probes, nulls, seed, batch_tokens, facts=facts, notes=notes)
