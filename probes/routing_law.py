"""Do scores move as Paper II's advantage says: by the gradient law itself, and in the next step of plain descent?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import torch
from torch import Tensor

from llmgeom.batch import Batch
from llmgeom.claims import Null, declared, estimate, layer_band
from llmgeom.errors import UserError
from llmgeom.model.attention_gradients import DECREASE, Mixing, step
from llmgeom.model.subject import Subject
from llmgeom.result import Estimate, Figure, quantity
from llmgeom.result import Result as Base
from llmgeom.scan import NULLS, Needs, View
from llmgeom.stats.resampling import Interval, jackknife

PROMPTS, SEQUENCES = 8, 32  # a text asks for a prediction at every token, a sequence of a tunnel for one
SHUFFLES = NULLS
LAW, NEXT, PULLED = "law against autograd", "next step follows the advantage", "the same, weighted by the gradient"
BEYOND, PART = "next step follows the advantage, beyond untrained", "advantage's part of the score gradient"
CLAIMS = declared("routing_law")
NONE = "the exact law"


@dataclass(frozen=True)
class Reading:
    """What one model's gradients and its next step say; sums [layer head sequence] unless said.

    error, rival   [gradient layer], [layer]: largest |law - autograd| over the largest |autograd|, and the same of the
                   score gradient with the baseline E_i b left out (attention) or put in (a scan).
    mass           shares of the rows with a choice, one row one; positive, agree: of these what lies on keys of
                   positive advantage, and on keys whose share the step moves as the advantage says.
    pull           |dL/ds|; pulled: of this what lies on keys that move so.
    shuffled       [draw layer weight head]: `agree` and `pulled` with the advantages of a row in random order, over
                   sequences.
    own, whole     squared score gradient: its advantage part, and all of it.
    stakes         [layer head]: mean over rows of sum_j |dL/ds_ij|, nats a unit of score, for the summed loss.
    map            -dL/ds [query key] of the first sequence at `where`, (layer, head) of the highest stakes.
    names, units   the kinds of gradient; the cluster of each sequence.
    """

    error: np.ndarray
    rival: np.ndarray
    mass: np.ndarray
    positive: np.ndarray
    agree: np.ndarray
    pull: np.ndarray
    pulled: np.ndarray
    shuffled: np.ndarray
    own: np.ndarray
    whole: np.ndarray
    stakes: np.ndarray
    map: np.ndarray
    where: tuple[int, int]
    names: tuple[str, ...]
    clusters: np.ndarray
    queries: int
    scan: bool
    expected: float
    found: float


def read(subject: Subject, batch: Batch) -> Reading:
    """One forward, backward and step on an input of each of the first few units. Raises Unavailable as `step` does."""
    first = {cluster: i for i, cluster in reversed(list(enumerate(batch.cluster)))}
    chosen = sorted(first.values())[: PROMPTS if batch.target is None else SEQUENCES]
    taken = step(subject, batch.take(chosen))
    layers, queries = taken.before.layers, taken.before.queries
    generator = torch.Generator().manual_seed(0)
    sums = [_layer(one, moved, generator) for one, moved in zip(layers, taken.share, strict=True)]
    stakes = np.stack([_stakes(one, queries) for one in layers])
    top = np.unravel_index(int(stakes.argmax()), stakes.shape)
    length = int(subject.tokens(batch.take(chosen[:1])).lengths[0])
    pull = -queries * layers[top[0]].law.score[0, top[1], :length, :length]
    return Reading(
        error=np.array([[float(e.max()) for e in one.errors.values()] for one in layers]).T,
        rival=np.array([_rival(one) for one in layers]),
        **{name: np.stack([each[name] for each in sums]) for name in sums[0] if name != "shuffled"},
        shuffled=np.stack([each["shuffled"] for each in sums], 1),
        stakes=stakes,
        map=pull.cpu().numpy(),
        where=(int(top[0]), int(top[1])),
        names=tuple(f.name for f in fields(layers[0].law)),
        clusters=np.asarray(batch.cluster)[chosen],
        queries=queries,
        scan=layers[0].scan,
        expected=taken.expected,
        found=taken.found,
    )


def _layer(one: Mixing, moved: Tensor, generator: torch.Generator) -> dict[str, np.ndarray]:
    """The sums of a Reading for one layer, [head sequence]; shuffled [draw head]."""
    choice = one.seen & (one.seen.sum(-1, keepdim=True) > 1)
    share, advantage = one.share * choice, one.advantage
    gradient = one.law.score * choice
    follows = (advantage * moved > 0).double()

    def total(x: Tensor) -> np.ndarray:
        return x.sum((-2, -1)).T.cpu().numpy()

    draws = _shuffles(advantage, moved, choice, (share, gradient.abs()), generator)
    return {
        "mass": total(share),
        "positive": total(share * (advantage > 0)),
        "agree": total(share * follows),
        "pull": total(gradient.abs()),
        "pulled": total(gradient.abs() * follows),
        "own": total((share * advantage).square() if one.scan else gradient.square()),
        "whole": total(gradient.square()),
        "shuffled": draws.cpu().numpy(),
    }


def _shuffles(
    advantage: Tensor, moved: Tensor, among: Tensor, weights: Sequence[Tensor], generator: torch.Generator
) -> Tensor:
    """[draw weight head]: what agrees when the advantages of each row are in random order among the keys that count."""
    places = (~among).to(torch.uint8).argsort(-1)  # keys that count first, in both orders as many
    draws = []
    for _ in range(SHUFFLES):
        lots = torch.rand(among.shape, generator=generator).to(among.device).masked_fill_(~among, 2)
        other = torch.empty_like(advantage).scatter_(-1, places, advantage.gather(-1, lots.argsort(-1)))
        follows = other * moved > 0
        draws.append(torch.stack([(weight * follows).sum((0, 2, 3)) for weight in weights]))
    return torch.stack(draws)


def _stakes(one: Mixing, queries: int) -> np.ndarray:
    rows = one.seen.any(-1).sum((0, 2)).clamp_min(1)
    return (queries * one.law.score.abs().sum((0, 2, 3)) / rows).cpu().numpy()


def _rival(one: Mixing) -> float:
    """Attention without the baseline, or a scan with it, held against autograd."""
    truth, wrong = one.autograd.score, one.weight * one.b
    if one.scan:
        wrong = -one.share * one.advantage
    return float((wrong - truth).abs().max() / truth.abs().max().clamp_min(torch.finfo(truth.dtype).tiny))


NEEDS = Needs(shuffled=False, read=read)


@dataclass(frozen=True, kw_only=True)
class Result(Base):
    """The law's errors, what is at stake in every head's routing, and how far the next step follows the advantage."""

    TITLE = "Routing law"
    MEANING = (
        "Paper II: descent on an attention score raises it where the key's value serves the loss better than the "
        "average of what the query already gets (a positive advantage). As arithmetic this holds for every softmax "
        "head, trained or not; what can be false is that training, which moves no score by itself but all parameters "
        "at once, routes that way. Agreement of 1 would say that it does, and the shuffled level that the advantage "
        "tells nothing of where weight goes next. A selective scan obeys another law: its weights are not normalised, "
        "no baseline is subtracted, and the advantage is a part of its score gradient."
    )
    COMPUTED = (
        "A float64 copy of the model, one forward and backward on the mean loss of the first prompt of each of 8 "
        "templates (every next token), or of 32 sequences of a tunnel (the outcome drawn): gradients of scores, "
        "values, queries and keys by the formulas and by automatic differentiation. Then one step of plain gradient "
        f"descent on all parameters, so small that the loss falls by {DECREASE:g} of itself, and the share of "
        "attention that lies on keys whose log weight it moved to the side that the advantage said, over all heads, "
        "layers and rows that have a choice. Intervals are jackknifed over templates or sequences, each left out of "
        "the sums, not of the step."
    )
    NULL = (
        "The law: autograd, 0. The step: the advantages of each row in random order (20 draws); beside it the model "
        "re-initialised, with gradients and a step of its own."
    )
    FAILURE_MODES = (
        "Parity with autograd says that this code has the law right, nothing about the model. About half of the "
        "attention always lies on either side of the average, so a map of its positive part is near one half wherever "
        "keys are many. A step that is not plain descent (Adam, momentum) may follow more or less. Of rows with one "
        "key, and of queries that the loss does not depend on, nothing is counted; a tunnel's cut sequences ask one "
        "query each, so that the last layer has one row of each. Gradients are sums: a few sequences may decide them."
    )

    error: np.ndarray = quantity("gradient layer", "of the largest", "largest |law - autograd|", Figure("heatmap"))
    rival: np.ndarray = quantity(
        "layer", "of the largest", "error of the score law without its baseline (of a scan: with one)"
    )
    map: np.ndarray = quantity(
        "query key", "nats per unit of score", "-dL/ds: where weight should go, head of the highest stakes",
        Figure("heatmap"),
    )  # fmt: skip
    stakes: np.ndarray = quantity(
        "layer head", "nats per unit of score", "sum over keys of |dL/ds|, mean over queries", Figure("heatmap")
    )
    positive: np.ndarray = quantity(
        "layer head", "fraction", "share of attention on keys of positive advantage", Figure("heatmap")
    )
    follows: np.ndarray = quantity(
        "layer head", "fraction", "share of attention that the next step moves as the advantage says", Figure("heatmap")
    )
    agreement: np.ndarray = quantity(
        "layer",
        "fraction",
        "share of attention that the next step moves as the advantage says",
        Figure("curve", band="agreement_null"),
    )
    agreement_null: np.ndarray = quantity("layer bound", "fraction", "advantages of a row in random order")
    estimates: tuple[Estimate, ...]
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    ticks: Mapping[str, tuple] = field(default_factory=dict)


def measure(view: View) -> Result:
    """Maps, curves and metrics. Raises UserError where fewer than 5 units are there, or no row has a choice."""
    ours, theirs = view.reading, view.control_readings
    if ours is None:
        raise UserError("the routing law is read from a model's gradients; scan a model, not a stored capture")
    every, clusters = np.arange(len(ours.clusters)), len(ours.clusters)
    if clusters < 5 or not ours.mass.sum():
        raise UserError(
            f"{clusters} templates or sequences with {ours.mass.sum():.0f} rows of two keys; at least 5 are needed"
        )
    shuffled = _ratio(ours.shuffled.sum((1, 3)), np.array([ours.mass.sum(), ours.pull.sum()]))

    def said(name: str, over: str, under: str, null: np.ndarray | None = None) -> Estimate:
        """Against these draws, or without any against the untrained controls."""

        def statistic(rows: np.ndarray, of: Reading = ours) -> float:
            return float(_ratio(getattr(of, over)[..., rows].sum(), getattr(of, under)[..., rows].sum()))

        value, claim = statistic(every), CLAIMS[name]
        if null is None:
            held = Null.of("re-initialised", value, np.array([statistic(every, one) for one in theirs]), claim.side)
        else:
            held = Null.of("advantages in random order", value, null, claim.side)
        return estimate(
            claim, value, jackknife(statistic, every, ours.clusters), [held], n=ours.queries, clusters=clusters
        )

    found = [
        _law(ours),
        said(NEXT, "agree", "mass", shuffled[:, 0]),
        said(PULLED, "pulled", "pull", shuffled[:, 1]),
    ]
    if theirs:
        found.append(said(BEYOND, "agree", "mass"))
        if ours.scan:
            found.append(said(PART, "own", "whole"))
    return Result(
        error=ours.error,
        rival=ours.rival,
        map=ours.map,
        stakes=ours.stakes,
        positive=_ratio(ours.positive.sum(2), ours.mass.sum(2)),
        follows=_ratio(ours.agree.sum(2), ours.mass.sum(2)),
        agreement=_ratio(ours.agree.sum((1, 2)), ours.mass.sum((1, 2))),
        agreement_null=layer_band({"random order": _ratio(ours.shuffled[:, :, 0].sum(2), ours.mass.sum((1, 2)))}),
        estimates=tuple(found),
        warnings=tuple(_warnings(ours)),
        notes=(
            f"map: layer {ours.where[0]}, head {ours.where[1]}, the first prompt or sequence",
            f"{ours.queries} predictions in {clusters} prompts or sequences",
        ),
        ticks={"gradient": ours.names},
    )


def _law(ours: Reading) -> Estimate:
    """Parity, not a measurement of the model: the largest error over gradients, layers and heads."""
    worst = float(ours.error.max())
    null = Null(NONE, 0.0, 0.0, 0.0, 1.0, 0)
    interval = Interval(0.0, worst, 0.95, "largest over gradients, layers and heads")
    return estimate(CLAIMS[LAW], worst, interval, [null], n=ours.queries, clusters=len(ours.clusters))


def _ratio(over: np.ndarray, under: np.ndarray) -> np.ndarray:
    """over / under, 0 where there is nothing."""
    over, under = np.broadcast_arrays(over, under)
    return np.divide(over, under, out=np.zeros_like(over), where=under > 0)


def _warnings(ours: Reading) -> list[str]:
    if abs(ours.found / ours.expected - 1) < 0.05:
        return []
    return [
        f"the step lowered the loss by {ours.found:.2g} nats where {ours.expected:.2g} was expected: it is no small "
        "step, and agreement is that of this step"
    ]
