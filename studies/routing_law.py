"""Paper II's gradient law on one model: does a step of plain descent move attention as the advantage predicts?

The law itself is arithmetic (studies/gradients.py): every softmax head obeys it, trained or not, so
it is not a claim about a model. The claim is that training, which moves all parameters at once, routes in this way.
This module measures it; the runner treats it like any probe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from llmgeom.claims import Null, declared, layer_band
from llmgeom.probe import UNTRAINED, Batch, Model, Needs, ProbeInput, UserError
from llmgeom.probes.shared.nulls import compare
from llmgeom.result import Estimate, Figure, Result, labelled, line
from llmgeom.run import CONTROLS
from studies.gradients import Mixing, step

NAME = "routing_law"
PROMPTS, SEQUENCES = 8, 32  # a text has a prediction at every token, a sequence of a tunnel has one
SHUFFLES = CONTROLS
EXACT = 1e-9  # of the largest gradient: largest distance of the formulas from automatic differentiation in float64
NEXT, PULLED = "next step follows the advantage", "the same, weighted by the gradient"
BEYOND, PART = "next step follows the advantage, beyond untrained", "advantage's part of the score gradient"
CLAIMS = declared(NAME, Path(__file__).parent / "claims")


@dataclass(frozen=True)
class Reading:
    """Measurements of one model's gradients and next step; sums are [layer head sequence].

    Attributes:
        error: [gradient layer] largest |law - autograd| over the largest |autograd|.
        rival: [layer] that error for the score gradient without the baseline E_i b (for a scan: with one).
        mass: attention of the rows with at least two keys, which sums to 1 per row.
        positive: the part of it on keys of positive advantage.
        agree: the part of it on keys whose share the step moves as the advantage predicts.
        pull: |dL/ds|.
        pulled: the part of it on keys whose share the step moves as the advantage predicts.
        shuffled: [draw layer weight head] `agree` and `pulled`, summed over sequences, with the advantages of each row
            in random order.
        relative, whole: squared score gradient: the part that moves weight between keys, and the whole.
        stakes: [layer head] mean over rows of sum_j |dL/ds_ij|, nats per unit of score, for the summed loss.
        map: [query key] -dL/ds of the first sequence at `where`, the (layer, head) of the highest stakes.
        names: the kinds of gradient.
        clusters: the cluster of each sequence.
        scan: whether the model is a selective scan.
        expected, decrease: fall of the loss by the step, in nats: to first order, and measured.
    """

    error: np.ndarray
    rival: np.ndarray
    mass: np.ndarray
    positive: np.ndarray
    agree: np.ndarray
    pull: np.ndarray
    pulled: np.ndarray
    shuffled: np.ndarray
    relative: np.ndarray
    whole: np.ndarray
    stakes: np.ndarray
    map: np.ndarray
    where: tuple[int, int]
    names: tuple[str, ...]
    clusters: np.ndarray
    queries: int
    scan: bool
    expected: float
    decrease: float


def read(subject: Model, batch: Batch) -> Reading:
    """One forward, backward and step on the first input of each of the first few clusters.

    Raises Unavailable: Gradients cannot be computed for this model; see `studies.gradients.step`.
    """
    first = {cluster: i for i, cluster in reversed(list(enumerate(batch.cluster)))}
    chosen = sorted(first.values())[: PROMPTS if batch.target is None else SEQUENCES]
    taken = step(subject, batch.take(chosen))
    layers, queries = taken.before.layers, taken.before.queries
    generator = torch.Generator().manual_seed(0)
    sums = [_sums(mixing, moved, generator) for mixing, moved in zip(layers, taken.share, strict=True)]
    stakes = np.stack([_stakes(mixing, queries) for mixing in layers])
    layer, head = (int(i) for i in np.unravel_index(int(stakes.argmax()), stakes.shape))
    length = int(subject.tokens(batch.take(chosen[:1])).lengths[0])
    return Reading(
        error=np.array([[float(e.max()) for e in mixing.errors.values()] for mixing in layers]).T,
        rival=np.array([_rival(mixing) for mixing in layers]),
        **{name: np.stack([each[name] for each in sums]) for name in sums[0] if name != "shuffled"},
        shuffled=np.stack([each["shuffled"] for each in sums], 1),
        stakes=stakes,
        map=(-queries * layers[layer].law.score[0, head, :length, :length]).cpu().numpy(),
        where=(layer, head),
        names=tuple(f.name for f in fields(layers[0].law)),
        clusters=np.asarray(batch.cluster)[chosen],
        queries=queries,
        scan=layers[0].scan,
        expected=taken.expected,
        decrease=taken.found,
    )


def _sums(mixing: Mixing, moved: Tensor, generator: torch.Generator) -> dict[str, np.ndarray]:
    """The sums of a Reading for one layer, [head sequence]; shuffled [draw weight head]."""
    choice = mixing.seen & (mixing.seen.sum(-1, keepdim=True) > 1)
    share, advantage = mixing.share * choice, mixing.advantage
    gradient = mixing.law.score * choice
    follows = (advantage * moved > 0).double()

    def total(x: Tensor) -> np.ndarray:
        return x.sum((-2, -1)).T.cpu().numpy()

    return {
        "mass": total(share),
        "positive": total(share * (advantage > 0)),
        "agree": total(share * follows),
        "pull": total(gradient.abs()),
        "pulled": total(gradient.abs() * follows),
        "relative": total((share * advantage).square() if mixing.scan else gradient.square()),
        "whole": total(gradient.square()),
        "shuffled": _shuffles(advantage, moved, choice, (share, gradient.abs()), generator).cpu().numpy(),
    }


def _shuffles(
    advantage: Tensor, moved: Tensor, among: Tensor, weights: Sequence[Tensor], generator: torch.Generator
) -> Tensor:
    """[draw weight head] the agreeing part when each row's advantages are in random order among the counted keys."""
    places = (~among).to(torch.uint8).argsort(-1)  # keys that count first, equally many in both orders
    draws = []
    for _ in range(SHUFFLES):
        lots = torch.rand(among.shape, generator=generator).to(among.device).masked_fill_(~among, 2)
        other = torch.empty_like(advantage).scatter_(-1, places, advantage.gather(-1, lots.argsort(-1)))
        follows = other * moved > 0
        draws.append(torch.stack([(weight * follows).sum((0, 2, 3)) for weight in weights]))
    return torch.stack(draws)


def _stakes(mixing: Mixing, queries: int) -> np.ndarray:
    rows = mixing.seen.any(-1).sum((0, 2)).clamp_min(1)
    return (queries * mixing.law.score.abs().sum((0, 2, 3)) / rows).cpu().numpy()


def _rival(mixing: Mixing) -> float:
    """Error of the law for attention without its baseline, or for a scan with one."""
    truth = mixing.autograd.score
    wrong = -mixing.share * mixing.advantage if mixing.scan else mixing.weight * mixing.b
    return float((wrong - truth).abs().max() / truth.abs().max().clamp_min(torch.finfo(truth.dtype).tiny))


NEEDS = Needs(controls=frozenset({UNTRAINED}), examine=lambda subject, captures: read(subject, captures[""].batch))


def measure(view: ProbeInput) -> Result:
    """Maps, curves and metrics from the readings of the model and of its untrained controls.

    Raises UserError: the formulas do not give the gradients of automatic differentiation; fewer than 5 clusters; or no
    row has two keys.
    """
    ours, controls = view.observations, view.control_observations
    if ours is None:
        raise UserError("the routing law is read from a model's gradients; scan a model, not a stored capture")
    clusters = len(ours.clusters)
    if clusters < 5 or not ours.mass.sum():
        raise UserError(
            f"{clusters} templates or sequences with {ours.mass.sum():.0f} rows of two keys; at least 5 are needed"
        )
    if (worst := float(ours.error.max())) > EXACT:
        raise UserError(
            f"the law's gradients lie {worst:.2g} of the largest from those of automatic differentiation: this model's "
            "attention is not what the formulas describe"
        )
    shuffled = _ratio(ours.shuffled.sum((1, 3)), np.array([ours.mass.sum(), ours.pull.sum()]))

    def share(name: str, over: str, under: str, draws: np.ndarray | None = None) -> Estimate:
        """Ratio of two sums, compared with the draws in random order or, without these, with the untrained controls."""

        def statistic(of: Reading, rows: np.ndarray) -> float:
            return float(_ratio(getattr(of, over)[..., rows].sum(), getattr(of, under)[..., rows].sum()))

        if draws is None:
            h = compare(CLAIMS[name], statistic, ours, ours.clusters, {UNTRAINED: controls})
        else:
            nulls = [Null.of("advantages in random order", draws, CLAIMS[name].side)]
            h = compare(CLAIMS[name], statistic, ours, ours.clusters, {}, nulls)
        return replace(h, n=ours.queries)

    estimates = [share(NEXT, "agree", "mass", shuffled[:, 0]), share(PULLED, "pulled", "pull", shuffled[:, 1])]
    if controls:
        estimates.append(share(BEYOND, "agree", "mass"))
        if ours.scan:
            estimates.append(share(PART, "relative", "whole"))
    heatmap, largest, share_of = Figure("heatmap"), "of the largest", "share of attention"
    positive, follows = (_ratio(of.sum(2), ours.mass.sum(2)) for of in (ours.positive, ours.agree))
    agreement = _ratio(ours.agree.sum((1, 2)), ours.mass.sum((1, 2)))
    order = layer_band({"random order": _ratio(ours.shuffled[:, :, 0].sum(2), ours.mass.sum((1, 2)))})
    null, unit = ("advantages of a row in random order", order), "nats per unit of score"
    moved = f"{share_of} that the next step moves as the advantage says"
    rival = "error of the score law without its baseline (of a scan: with one)"
    to_go = "-dL/ds: where weight should go, head of the highest stakes"
    stakes, of_keys = "sum over keys of |dL/ds|, mean over queries", f"{share_of} on keys of positive advantage"
    return Result.of(
        "Next step and advantage",
        {
            "error": labelled(ours.error, "gradient layer", largest, "largest |law - autograd|", heatmap),
            "rival": labelled(ours.rival, "layer", largest, rival),
            "map": labelled(ours.map, "query key", unit, to_go, heatmap),
            "stakes": labelled(ours.stakes, "layer head", unit, stakes, heatmap),
            "positive": labelled(positive, "layer head", "fraction", of_keys, heatmap),
            "follows": labelled(follows, "layer head", "fraction", moved, heatmap),
            **line("agreement", agreement, "layer", "fraction", moved, null=null),
        },
        __name__,
        estimates=tuple(estimates),
        warnings=_warnings(ours),
        notes=(
            f"map: layer {ours.where[0]}, head {ours.where[1]}, the first prompt or sequence",
            f"{ours.queries} predictions in {clusters} prompts or sequences",
            f"the law's gradients agree with automatic differentiation to {worst:.1g} of the largest",
        ),
        ticks={"gradient": ours.names},
    )


def _ratio(over: np.ndarray, under: np.ndarray) -> np.ndarray:
    """over / under; 0 where `under` is 0."""
    over, under = np.broadcast_arrays(over, under)
    return np.divide(over, under, out=np.zeros_like(over), where=under > 0)


def _warnings(ours: Reading) -> tuple[str, ...]:
    if abs(ours.decrease / ours.expected - 1) < 0.05:
        return ()
    return (
        f"the step lowered the loss by {ours.decrease:.2g} nats where {ours.expected:.2g} was expected: it is no small "
        "step, and agreement is that of this step",
    )
