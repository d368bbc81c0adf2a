"""Results of component ablation: which heads and which blocks do the answers need?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from llmgeom.claims import declared, layer_band
from llmgeom.errors import UserError
from llmgeom.probes.interventions.component_ablation import AblationEffects, Kind, Method
from llmgeom.probes.interventions.component_metrics import (
    LARGEST,
    UNTRAINED,
    block_fractions,
    branch_estimates,
    branches,
    cross_selected,
    estimates,
    head_fractions,
    mlp_part,
    quotient,
)
from llmgeom.probes.interventions.patching import estimate_against
from llmgeom.result import Figure, Measured, Result, quantity
from llmgeom.stats.resampling import LEAST_CLUSTERS, jackknife, mean_intervals

PROSE = Path(__file__).parents[1] / "texts" / "components.md"
TITLES: dict[Method, str] = {"zero": "set to 0", "mean": "set to the mean", "resample": "resampled"}
HALVED = "heads above half of the largest"
POSITIONS = {
    "query": "ablated at the final token",
    "all": "ablated at every position but the first; the mean is over all of these",
}
TASK_POSITIONS = {
    "query": "ablated at every query; a mean for each query",
    "all": "ablated at every position; a mean for each position",
}


# ---- results --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Heads(Result):
    """What each head's ablation changes, and whether one head stands out."""

    TITLE = "Heads, one at a time"
    TEXT = PROSE

    kl: np.ndarray = quantity("layer head", "bits", "KL(clean || ablated), mean over prompts", Figure("heatmap"))
    interval: np.ndarray = quantity("layer head bound", "bits", "95 % interval over clusters, for each head alone")
    above_half: float = quantity("", "heads", "with more than half of the largest effect, the largest included")
    equal: float = quantity("", "fraction", "the share of each head if all had the same effect")


@dataclass(frozen=True, kw_only=True)
class HeadsWithEvidence(Heads):
    """The same where the exact answer is known; for label sequences over the two labels."""

    evidence: np.ndarray = quantity("layer head", "bits", "rise of KL(exact || model)", Figure("heatmap"))


@dataclass(frozen=True, kw_only=True)
class TaskHeads(HeadsWithEvidence):
    """The same on a task's sequences, with the error of entropy that the papers use."""

    error: np.ndarray = quantity("layer head", "bits", "rise of |H_model - H_exact|", Figure("heatmap"))
    clean_error: float = quantity("", "bits", "|H_model - H_exact| of the clean model")


def _curve(name: str) -> Figure:
    return Figure("curve", band=f"{name}_null", interval=f"{name}_interval")


@dataclass(frozen=True, kw_only=True)
class Blocks(Result):
    """What the ablation of each block, and of its two branches, changes."""

    TITLE = "Blocks, one at a time"
    TEXT = PROSE

    attention: np.ndarray = quantity("layer", "bits", "KL(clean || attention's write ablated)", _curve("attention"))
    attention_interval: np.ndarray = quantity("layer bound", "bits", "95 % interval over clusters")
    attention_null: np.ndarray | None = quantity("layer bound", "bits", "band of untrained copies")
    mlp: np.ndarray = quantity("layer", "bits", "KL(clean || the MLP's write ablated)", _curve("mlp"))
    mlp_interval: np.ndarray = quantity("layer bound", "bits", "95 % interval over clusters")
    mlp_null: np.ndarray | None = quantity("layer bound", "bits", "band of untrained copies")
    block: np.ndarray = quantity("layer", "bits", "KL(clean || both writes ablated)", _curve("block"))
    block_interval: np.ndarray = quantity("layer bound", "bits", "95 % interval over clusters")
    block_null: np.ndarray | None = quantity("layer bound", "bits", "band of untrained copies")
    relative: np.ndarray = quantity(
        "layer", "of the median block", "KL with both writes ablated", Figure("curve", band="relative_null")
    )
    relative_null: np.ndarray | None = quantity("layer bound", "of the median block", "band of untrained copies")
    attention_norm: np.ndarray = quantity("layer", "length", "rms of what attention writes, clean", Figure("curve"))
    mlp_norm: np.ndarray = quantity("layer", "length", "rms of what the MLP writes, clean", Figure("curve"))


@dataclass(frozen=True, kw_only=True)
class BlocksWithEvidence(Blocks):
    """The same where the exact answer is known; for label sequences over the two labels."""

    evidence: np.ndarray = quantity(
        "layer",
        "bits",
        "rise of KL(exact || model), both writes ablated",
        Figure("curve", band="evidence_null"),
    )
    evidence_null: np.ndarray | None = quantity("layer bound", "bits", "band of untrained copies")
    attention_evidence: np.ndarray = quantity("layer", "bits", "rise of KL(exact || model), attention's ablated")
    mlp_evidence: np.ndarray = quantity("layer", "bits", "rise of KL(exact || model), the MLP's ablated")


@dataclass(frozen=True, kw_only=True)
class TaskBlocks(BlocksWithEvidence):
    """The same on a task's sequences, with the error of entropy that the papers use."""

    error: np.ndarray = quantity(
        "layer", "times", "|H_model - H_exact| over that of the clean model", Figure("curve", band="error_null")
    )
    error_null: np.ndarray | None = quantity("layer bound", "times", "band of untrained copies")
    clean_error: float = quantity("", "bits", "|H_model - H_exact| of the clean model")


@dataclass(frozen=True, kw_only=True)
class Trainings(Result):
    """The metrics of several trainings of one architecture."""

    TITLE = "Over trainings"
    TEXT = PROSE

    training: np.ndarray = quantity("statistic training", "as named", "of each model, in the order of the command")


# ---- measuring ------------------------------------------------------------------------------------------------------


def _probe(effects: Mapping[str, np.ndarray], kind: str) -> str:
    """The probe under which the metrics are declared."""
    return f"{kind}_task" if "mae" in effects else kind


def _positions(own: AblationEffects, effects: Mapping[str, np.ndarray]) -> str:
    return (TASK_POSITIONS if "mae" in effects else POSITIONS)[own.positions]


def measure_heads(
    trained: AblationEffects, method: Method, untrained: Sequence[AblationEffects], half: np.ndarray
) -> Heads:
    """Heads ablated by one method, against the untrained controls; half [prompt] 0 or 1 by cluster, for selection.

    Raises:
        UserError: as `estimates`; fewer than 5 clusters.
    """
    effects, clusters, layers = trained.effects[method], trained.clusters, trained.layers
    kl, fractions = effects["kl"], head_fractions(effects, half, layers)
    null = [head_fractions(control.effects[method], half, layers) for control in untrained]
    metrics = estimates(_probe(effects, "heads"), fractions, null, clusters, method)
    mean = kl.mean(1)
    names = [trained.components[index].name for index in cross_selected(kl, half, 0)[1]]
    warnings = []
    if names[0] != names[1]:
        warnings.append(
            f"the two halves of the clusters select different largest heads, {names[0]} and {names[1]}: neither stands "
            "out for certain, and the shares are those of both"
        )
    if metrics[0].value < (least := declared("heads")[LARGEST].effect):
        warnings.append(
            f"the largest head changes {metrics[0].value:.2g} bits, less than {least:g}: shares of so small an effect "
            "mean little"
        )
    heads = Heads(
        kl=mean.reshape(layers, -1),
        interval=mean_intervals(kl, clusters).reshape(layers, -1, 2),
        above_half=above_half(mean),
        equal=1 / len(mean),
        estimates=metrics,
        warnings=tuple(warnings),
        notes=(
            _positions(trained, effects),
            f"largest head, as selected on one half of the clusters and on the other: {', '.join(names)}",
        ),
    )
    if "evidence" not in effects:
        return heads
    heads = HeadsWithEvidence(**vars(heads), evidence=effects["evidence"].mean(1).reshape(layers, -1))
    if "mae" not in effects:
        return heads
    rise = effects["mae"] - effects["clean_mae"]
    clean = float(effects["clean_mae"].mean())
    return TaskHeads(**vars(heads), error=rise.mean(1).reshape(layers, -1), clean_error=clean)


def measure_blocks(
    trained: AblationEffects, method: Method, untrained: Sequence[AblationEffects], half: np.ndarray
) -> Blocks:
    """Attentions, MLPs and whole blocks ablated by one method, as `measure_heads`."""
    effects, clusters, layers = trained.effects[method], trained.clusters, trained.layers
    controls = [control.effects[method] for control in untrained]
    probe = _probe(effects, "blocks")
    null = [block_fractions(control, half) for control in controls]
    warnings: tuple[str, ...] = ()
    metrics = estimates(probe, block_fractions(effects, half), null, clusters, method)
    notes = [_positions(trained, effects), _middle(trained, effects["kl"], half)]
    if method == "mean":
        more, warnings = branch_estimates(probe, trained, untrained, method)
        metrics += more
        shares = [mlp_part(branches(control, "kl")) for control in controls]
        notes.append(f"MLPs' share of their own effects in untrained copies: {min(shares):.2f} to {max(shares):.2f}")

    def by_branch(model: Mapping[str, np.ndarray], effect: str = "kl") -> np.ndarray:
        return model[effect].mean(1).reshape(3, layers)

    def times(model: Mapping[str, np.ndarray]) -> np.ndarray:
        return by_branch(model, "mae")[2] / by_branch(model, "clean_mae")[2]

    def null_band(statistic: Callable[[Mapping[str, np.ndarray]], np.ndarray]) -> np.ndarray | None:
        return layer_band({UNTRAINED: np.array([statistic(control) for control in controls])})

    kl, interval = by_branch(effects), mean_intervals(effects["kl"], clusters).reshape(3, layers, 2)
    norms = np.sqrt(trained.norms.mean(-1))
    blocks = Blocks(
        attention=kl[0],
        attention_interval=interval[0],
        attention_null=null_band(lambda model: by_branch(model)[0]),
        mlp=kl[1],
        mlp_interval=interval[1],
        mlp_null=null_band(lambda model: by_branch(model)[1]),
        block=kl[2],
        block_interval=interval[2],
        block_null=null_band(lambda model: by_branch(model)[2]),
        relative=kl[2] / np.median(kl[2]),
        relative_null=null_band(lambda model: (block := by_branch(model)[2]) / np.median(block)),
        attention_norm=norms[0],
        mlp_norm=norms[1],
        estimates=metrics,
        warnings=warnings,
        notes=tuple(notes),
    )
    if "evidence" not in effects:
        return blocks
    rises = by_branch(effects, "evidence")
    blocks = BlocksWithEvidence(
        **vars(blocks),
        evidence=rises[2],
        evidence_null=null_band(lambda model: by_branch(model, "evidence")[2]),
        attention_evidence=rises[0],
        mlp_evidence=rises[1],
    )
    if "mae" not in effects:
        return blocks
    clean = float(effects["clean_mae"].mean())
    return TaskBlocks(**vars(blocks), error=times(effects), error_null=null_band(times), clean_error=clean)


def measure_trainings(
    kind: Kind,
    method: Method,
    every: Sequence[AblationEffects],
    names: Sequence[str],
    untrained: Sequence[AblationEffects],
    half: np.ndarray,
) -> Trainings:
    """The metrics of each model, and their means over models.

    Raises:
        UserError: fewer than 5 models; no ablation of a model reaches its output.
    """
    if len(every) < LEAST_CLUSTERS:
        raise UserError(
            f"{len(every)} trainings: an interval over them needs at least {LEAST_CLUSTERS}; give more --also"
        )

    def metrics(model: AblationEffects) -> dict[str, float]:
        effects = model.effects[method]
        fractions = head_fractions(effects, half, model.layers) if kind == "heads" else block_fractions(effects, half)
        values = {name: quotient(fraction) for name, fraction in fractions.items()}
        return values | ({HALVED: above_half(effects["kl"].mean(1))} if kind == "heads" else {})

    values, null = [metrics(model) for model in every], [metrics(model) for model in untrained]
    means, trainings = [], np.arange(len(every))
    for name in values[0]:
        x = np.array([model[name] for model in values])
        entry = declared(_probe(every[0].effects[method], kind))[name]
        claim = replace(entry, name=f"{name}, over trainings", claim="", counts="trainings")
        draws = {UNTRAINED: np.array([control[name] for control in null])}
        means.append(estimate_against(claim, x.mean(), jackknife(np.mean, x, trainings), draws, trainings))
    table = np.array([[model[name] for model in values] for name in values[0]])
    return Trainings(training=table, estimates=tuple(means), ticks={"statistic": (*values[0],), "training": (*names,)})


def titled(result: Result, method: Method) -> Measured:
    """The result as plain data, with the method in its title."""
    plain = result.lowered()
    return replace(plain, title=f"{plain.title}: {TITLES[method]}")


def above_half(mean: np.ndarray) -> float:
    """How many have more than half of the largest effect, the largest included."""
    return float((mean > mean.max() / 2).sum())


def _middle(own: AblationEffects, kl: np.ndarray, half: np.ndarray) -> str:
    if own.layers < 3:
        return f"{own.layers} layers: none is in the middle"
    _, selected = cross_selected(np.split(kl, 3)[2][1:-1], half, -1)
    layers = ", ".join(str(1 + index) for index in selected)
    return f"weakest middle block, as selected on one half of the clusters and on the other: {layers}"
