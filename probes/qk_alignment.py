"""Does attention go to the positions on which the exact answer depends, and do queries select keys by direction?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from llmgeom.claims import Null, declared
from llmgeom.probe import WHOLE, Capture, Needs, Observer, ProbeInput, Sample, Site, Step, UserError
from llmgeom.probes.shared.nulls import UNTRAINED, compare, mean_of, null_band, permutation_null
from llmgeom.result import Curve, Estimate, Figure, Result as Base, curve, quantity
from llmgeom.stats.resampling import LEAST_CLUSTERS
from llmgeom.stats.ridge_probe import folds

LEAST_TOKENS = 5  # three keys between the first token and the last
PLACEBOS = 999
CLAIMS = declared("qk_alignment")
LAST, CHANGE = (f"attention on bearing positions, {of}" for of in ("last layer", "last less first"))
BEST = "attention on bearing positions by content, best head"
PLACES = ", same places in every sequence"
SPREAD, RISE = (f"spread of query-key cosines, {of}" for of in ("last layer", "last less first"))
OTHER = "positions that bear in another sequence"


@dataclass(frozen=True)
class Cosines:
    """Cosines of the final query with earlier keys, without the first key and the query's own.

    Attributes:
        spread: [layer head prompt] sd of the cosine over these keys.
        contrast: [layer head prompt] mean over bearing keys minus mean over the others; None if the bearing keys are
            unknown.
    """

    spread: np.ndarray
    contrast: np.ndarray | None


def cosines(step: Step) -> dict[str, torch.Tensor]:
    """c_j = q.k_j / (|q| |k_j|), 0 < j < T - 1: q the query at the final position T - 1 of a prompt, k_j the key at j
    of the kv head that the query head reads (head h reads h // (heads / kv_heads)).

    Queries and keys are those of attention, after rotary embedding: the score is |q| |k_j| c_j / sqrt(head_dim), so c_j
    includes the effect of distance. It is Paper I's figure of cos(q_t, k_j), by head instead of averaged over heads.

    Returns:
        spread [row layer head]: sd of c_j over j, 0 without any j; contrast [row layer head], if the batch says which
        positions bear on the answer: mean over bearing j minus mean over the others, 0 if one of the two sets is empty.
    """
    lengths = step.lengths.to(step.logits.device)
    place = (step.all_prompt, step.all_position)  # of each row: prompt after prompt
    ends = step.lengths.cumsum(0) - 1
    at = torch.arange(int(step.lengths.max()), device=lengths.device)
    between = ((at > 0) & (at < lengths[:, None] - 1)).double()[:, None]
    layers = []
    for query, key in zip(step.everywhere(Site.QUERY), step.everywhere(Site.KEY), strict=True):
        heads, kv_heads = query.shape[1], key.shape[1]
        keys = torch.zeros(len(lengths), len(at), *key.shape[1:], dtype=torch.float64, device=key.device)
        keys[place] = torch.nn.functional.normalize(key.double(), dim=-1)
        last = torch.nn.functional.normalize(query[ends].double(), dim=-1)
        layers.append(torch.einsum("phd,pthd->pht", last, keys.repeat_interleave(heads // kv_heads, 2)))
    c = torch.stack(layers)  # [layer prompt head position]

    def mean(x: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        return (x * of).sum(-1) / of.sum(-1).clamp_min(1)

    arrays = {"spread": mean((c - mean(c, between)[..., None]) ** 2, between).sqrt().transpose(0, 1)}
    posterior = step.batch.posterior
    if posterior is not None and posterior.bearing is not None:
        bears = posterior.bearing[:, -1:, : len(at)].to(between) * between
        some = (bears.sum(-1) > 0) & (bears.sum(-1) < between.sum(-1))
        arrays["contrast"] = ((mean(c, bears) - mean(c, between - bears)) * some).transpose(0, 1)
        arrays["contrasted"] = some[:, 0].double()
    return {name: array[step.prompt] for name, array in arrays.items()}


def collect(captures: Mapping[str, Capture], _: Any = None) -> Cosines:
    """The cosines of prompts that are long enough. Raises UserError if these have fewer than 5 clusters."""
    capture = captures[""]
    first = np.unique(capture.prompt.numpy(), return_index=True)[1]  # all rows of a prompt hold the same numbers
    long = long_enough(capture.lengths.numpy())
    clusters = {cluster for cluster, rows in zip(capture.batch.cluster, long, strict=True) if rows}
    if len(clusters) < LEAST_CLUSTERS:
        raise UserError(
            f"the {long.sum()} prompts of {LEAST_TOKENS} tokens or more have {len(clusters)} templates; query-key "
            f"cosines need {LEAST_CLUSTERS}"
        )
    spread, contrast = capture.observed("cosines.spread").numpy()[first][long], None
    if ("cosines.contrast", -1) in capture.tensors:
        rows = long & (capture.observed("cosines.contrasted").numpy()[first] > 0)
        contrast = capture.observed("cosines.contrast").numpy()[first][rows].transpose(1, 2, 0)
    return Cosines(spread.transpose(1, 2, 0), contrast)


def long_enough(lengths: np.ndarray) -> np.ndarray:
    return lengths >= LEAST_TOKENS


NEEDS = Needs(
    frozenset({Site.ATTENTION}),
    shuffled=False,
    samples=frozenset({WHOLE}),
    observers=(Observer("cosines", cosines, everywhere=frozenset({Site.QUERY, Site.KEY}), version="1"),),
    collect=collect,
)


@dataclass(frozen=True, kw_only=True)
class Result(Base):
    """Spread of the cosines of the final query with earlier keys, by layer and head."""

    TITLE = "Query-key alignment"

    spread: np.ndarray = quantity("layer head", "sd of cos", "spread of the final query's cosines", Figure("heatmap"))
    mean_spread: Curve = curve("layer", "sd of cos", "the same, mean over heads", null="the same, untrained copies")


@dataclass(frozen=True, kw_only=True)
class WithBearing(Result):
    """The result if it is known which positions bear on the answer."""

    excess: np.ndarray = quantity(
        "layer head", "fraction", "attention on bearing positions over even attention", Figure("heatmap")
    )
    content: np.ndarray = quantity(
        "layer head", "fraction", "of this by content: minus the excess of average positions", Figure("heatmap")
    )
    mean_excess: Curve = curve("layer", "fraction", "the same, mean over heads", null="the same, untrained copies")
    most: float = quantity("", "fraction", "if all attention went to bearing positions")
    first: np.ndarray = quantity("layer head", "fraction", "weight on the first position", Figure("heatmap"))
    own: np.ndarray = quantity("layer head", "fraction", "weight on the query's own position", Figure("heatmap"))
    contrast: Curve = curve(
        "layer", "cos", "with bearing keys minus with others, mean over heads", null="the same, untrained copies"
    )


def measure(view: ProbeInput) -> Result:
    """The spread of cosines, and the attention on bearing positions if they are known.

    Raises UserError: fewer than 5 clusters, or no control was read.
    """
    if not view.control_observations:
        raise UserError("no untrained copy was read (a preview, or no controls), and the cosines have no other control")
    spread, untrained = view.observations.spread, [control.spread for control in view.control_observations]
    long = long_enough(view.capture.lengths.numpy())
    clusters = np.asarray(view.capture.batch.cluster)[long]
    curves, null = spread.mean(1), np.array([control.mean((1, 2)) for control in untrained])
    forms = {SPREAD: lambda x: x[-1]} | ({RISE: lambda x: x[-1] - x[0]} if len(curves) > 1 else {})
    estimates = [
        compare(CLAIMS[name], mean_of, form(curves), clusters, {}, [Null.of(UNTRAINED, form(null.T))])
        for name, form in forms.items()
    ]
    fields = {"spread": spread.mean(2), "mean_spread": Curve(curves.mean(1), null=null_band({UNTRAINED: null}))}
    notes = [f"{int((~long).sum())} prompts of fewer than {LEAST_TOKENS} tokens were left out"] * (not long.all())
    notes += ["one layer: there is no change from the first to the last"] * (len(curves) == 1)
    whole = view.samples.get(WHOLE)
    if whole is None or (bearing := whole.capture.exact.bearing) is None:
        return Result(**fields, estimates=tuple(estimates), notes=tuple(notes))
    metrics, more, note = _attention(whole, bearing.numpy(), view.seed)
    notes.append(note)
    if not metrics:
        return Result(**fields, estimates=tuple(estimates), notes=tuple(notes))
    if not view.observations.contrast.size:
        raise UserError("in no sequence do some earlier keys bear on the answer and others not: raise --n")
    contrast, *untrained = (x.contrast.mean((1, 2)) for x in (view.observations, *view.control_observations))
    more["contrast"] = Curve(contrast, null=null_band({UNTRAINED: untrained}))
    return WithBearing(**fields, **more, estimates=(*metrics, *estimates), notes=tuple(notes))


def _row(name: str, above: np.ndarray, below: np.ndarray, clusters: np.ndarray, nulls: list[Null]) -> Estimate:
    """The metric of sum(above) / sum(below) over sequences or prompts."""

    def ratio(_: None, rows: np.ndarray) -> float:
        return float(above[rows].sum() / below[rows].sum())

    return compare(CLAIMS[name], ratio, None, clusters, {}, nulls)


# ---- attention on bearing positions ----------------------------------------------------------------------------------


def reach(captures: tuple[Capture, ...]) -> list[int]:
    """The largest distance at which each layer attends, over heads and models: a sliding window's width minus one, or
    the longest distance in the sequences."""

    def back(capture: Capture, layer: torch.Tensor) -> int:
        return int((capture.position - (layer > 0).any(1).long().argmax(1)).max())

    by_model = [[back(capture, layer) for layer in capture.layers(Site.ATTENTION)] for capture in captures]
    return np.max(by_model, axis=0).tolist()


def against_even(place: np.ndarray, bearing: np.ndarray, back: int) -> np.ndarray:
    """[row position] b_j - b for queries at `place`, b_j whether position j bears, b its mean over counted positions.

    It is 0 at positions that do not count, and in rows where all or none bear. Its sum with attention weights is the
    attention on bearing positions minus that of even attention.
    """
    at, own = np.arange(bearing.shape[1]), place[:, None]
    counts = (at > 0) & (at < own) & (at >= own - back)
    bears = bearing & counts
    share = bears.sum(1, keepdims=True) / np.maximum(counts.sum(1, keepdims=True), 1)
    return np.where(counts, bears - share, 0.0)


Parts = tuple[np.ndarray, np.ndarray]  # [layer head sequence] excess over even attention, and its part by content


def _parts(weights: np.ndarray, contrast: np.ndarray, usual: np.ndarray) -> Parts:
    """Attention on bearing positions minus that of even attention, summed over queries; and its part by content.

    Args:
        weights: [layer head sequence query*position].
        contrast: [layer sequence query*position] from `against_even`.
        usual: its mean over sequences, which a rule about positions knows: the excess over it is due to content.
    """
    total, by_place = (
        np.einsum("lhsx,lsx->lhs", weights, x) for x in (contrast, np.broadcast_to(usual, contrast.shape))
    )
    return total, total - by_place


def _attention(whole: Sample, bearing: np.ndarray, seed: int) -> tuple[list[Estimate], dict, str]:
    """Metrics, fields and a note; no metrics if no query has contrast."""
    capture, clusters = whole.capture, np.asarray(whole.capture.batch.cluster)
    n, place = len(clusters), capture.position.numpy()
    # [layer sequence query position], from one row per query: all sequences of a task have the same queries.
    even = np.stack([against_even(place, bearing, back) for back in reach((capture, *whole.untrained))])
    even = even.reshape(len(even), n, -1, even.shape[-1])
    has = (even[-1] != 0).any(-1)
    if not has.any():
        note = "no query has both earlier positions that bear and others that do not: attention cannot distinguish them"
        return [], {}, note
    contrast = even.reshape(len(even), n, -1)
    alike, usual = bool((contrast == contrast[:, :1]).all()), contrast.mean(1, keepdims=True)
    half, queries = folds(clusters, seed, 2), has.sum(1).astype(float)

    def weights(captured: Capture) -> np.ndarray:
        """[layer head sequence query*position]"""
        x = np.stack([layer.double().numpy() for layer in captured.layers(Site.ATTENTION)])
        return x.transpose(0, 2, 1, 3).reshape(*x.shape[:1], x.shape[2], n, -1)

    attention = weights(capture)
    model, controls = _parts(attention, contrast, usual), [_parts(weights(x), contrast, usual) for x in whole.untrained]
    rng = np.random.default_rng(seed)
    orders = [] if alike else [rng.permutation(n) for _ in range(PLACEBOS)]
    exchanged = [_parts(attention, contrast[:, order], usual) for order in orders]

    metrics = _metrics(model, controls, exchanged, queries, half, clusters)
    note = f"{int(has.sum())} of {has.size} queries have earlier positions that bear and others that do not; "
    if alike:
        note += "the same positions bear in every sequence, so that a rule about positions does as well as content"
    else:
        heads = attention.shape[1]
        which = ", ".join(f"L{i // heads}H{i % heads}" for i in best_head(model[1], half)[1])
        note += f"best head, as found on one half of the sequences and on the other: {which}"
    every = has.reshape(-1)
    by_query = [layer.double().numpy()[every] for layer in capture.layers(Site.ATTENTION)]

    def by_layer(total: np.ndarray) -> np.ndarray:
        return total.sum(2).mean(1) / queries.sum()

    fields = {
        "excess": model[0].sum(2) / queries.sum(),
        "content": model[1].sum(2) / queries.sum(),
        "mean_excess": Curve(by_layer(model[0]), null=null_band({UNTRAINED: [by_layer(x) for x, _ in controls]})),
        "most": float(np.where(even[-1] > 0, even[-1], 0).max(-1)[has].mean()),
        "first": np.stack([weight[..., 0].mean(0) for weight in by_query]),
        "own": np.stack([weight[np.arange(len(weight)), :, place[every]].mean(0) for weight in by_query]),
    }
    return metrics, fields, note


def _metrics(
    model: Parts,
    controls: Sequence[Parts],
    exchanged: Sequence[Parts],
    queries: np.ndarray,
    half: np.ndarray,
    clusters: np.ndarray,
) -> list[Estimate]:
    """Attention on bearing positions in the last layer, its change over layers, and the best head's by content.

    Args:
        exchanged: the model's parts with the bearing positions of other sequences; none if all have the same ones.
        queries: [sequence] number of queries that the parts are summed over.
        half: [sequence] 0 or 1; the best head is selected on the other half.
    """
    layers, alike = len(model[0]), not exchanged
    # Each metric from the two parts: [sequence], summed over queries.
    forms: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {LAST: lambda total, _: total[-1].mean(0)}
    if layers > 1:
        forms[CHANGE] = lambda total, _: (total[-1] - total[0]).mean(0)
    if not alike:
        forms[BEST] = lambda _, content: best_head(content, half)[0]
    metrics = []
    for name, form in forms.items():
        value, *draws = (form(*parts).sum() / queries.sum() for parts in (model, *controls, *exchanged))
        nulls = [Null.of(UNTRAINED, np.array(draws[: len(controls)]))]
        if not alike:
            # A permutation's p contains the sampling noise, so the interval need only exclude the centre of the null.
            nulls.append(permutation_null(OTHER, value, np.array(draws[len(controls) :])))
        metrics.append(_row(name + PLACES * alike, form(*model), queries, clusters, nulls))
    return metrics


def best_head(content: np.ndarray, half: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """[sequence] the value of the head that is largest on the other half; and the heads that halves 0 and 1 select.

    content: [layer head sequence]. On the sequences that select it, the largest value is biased upwards.
    """
    heads = content.reshape(-1, content.shape[-1])
    selected = [int(heads[:, half == part].sum(1).argmax()) for part in (0, 1)]
    return np.where(half == 0, heads[selected[1]], heads[selected[0]]), selected
