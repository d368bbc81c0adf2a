"""Belief in the residual stream: exact log odds of the labels, read along the labels' rows of the unembedding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from llmgeom.claims import Null, declared
from llmgeom.probe import Batch, Capture, Needs, ProbeInput, Site, Subject, UserError
from llmgeom.probes.evidence.depths import SHUFFLED, ByDepth
from llmgeom.probes.evidence.estimates import against_untrained, indicators, mean_by
from llmgeom.probes.evidence.predictions import (
    LABELS,
    LAST_VALUES,
    MAIN,
    ExactAnswers,
    label_entropy,
    label_ids,
    label_words,
)
from llmgeom.probes.shared.nulls import UNTRAINED, compare
from llmgeom.result import Curve, Estimate, Figure, Result, curve, quantity
from llmgeom.stats import shared_line
from llmgeom.stats.information import bits
from llmgeom.stats.pca import shares
from llmgeom.stats.resampling import Interval, in_groups
from llmgeom.stats.tests import regrouped_interval, spearman

BELIEF = "sula_belief"
LAST, MIDDLE = "log odds along the labels, last layer", "log odds along the labels, half way"
PC1, STEPS = "|rho| of PC1 and exact entropy, given k", "|rho| of PC1 and k"
LEAST_SPREAD = 0.05  # nats: least standard deviation of the exact log odds for a read-out
CLAIMS = declared(BELIEF)


@dataclass(frozen=True, kw_only=True)
class Belief(Result):
    """R2 of the exact log odds read along the labels' own directions, layer by layer."""

    TITLE = "Belief in the residual stream"

    along: Curve = curve(
        "depth",
        "R2",
        "exact log odds read from the label-aligned coordinate, other labels and clusters",
        interval="clusters",
        null="band of untrained copies",
        beside="without_context",
    )
    without_context: np.ndarray = quantity(
        "depth", "R2", "the same of the trained weights without context; 0 where the model has no such control"
    )
    shuffled: np.ndarray | None = quantity("depth bound", "R2", "band of the same with evidence of other prompts")
    slope: np.ndarray = quantity("depth", "bits", "slope of the line: log odds for one unit of the coordinate")
    coordinate: np.ndarray = quantity(
        "row answer",
        "bits",
        "centred log odds of the first label: exact, and as read at the last layer",
        Figure("scatter"),
    )
    k: np.ndarray = quantity("k", "observations", "number of labelled words before the question")
    pc1: np.ndarray = quantity("k", "standard deviations", "PC1 of the last layer's values, mean", Figure("curve"))


def rows_of_labels(subject: Subject, captures: Mapping[str, Capture]) -> dict[str, np.ndarray]:
    """Token ids of all labels, [label], and their rows of the output embedding, [label d_model]."""
    ids = label_ids(subject.tokenizer, captures[MAIN].batch).unique()
    head = subject.model.get_output_embeddings()
    if head is None or next(head.parameters()).is_meta:
        raise UserError(f"{subject.name} has no output embedding in memory: labels have no directions to read along")
    with torch.no_grad():
        rows = head.weight[ids.to(head.weight.device)]
    return {"ids": ids.numpy(), "rows": rows.double().cpu().numpy()}


@dataclass(frozen=True)
class LabelCoordinates:
    """Label-aligned coordinates and last-layer values of one model.

    Attributes:
        along: [depth prompt label] z_j = x . (u_j - mean of the prompt's u) / |x|, x the residual stream of the last
            token at each depth (the input of each layer, then the output of the last), u_j the row of the output
            embedding of the prompt's label j.
        value: [prompt coordinate] values of the last layer.
        embedding: the labels' rows of the output embedding, as `rows_of_labels` returns them.
    """

    along: np.ndarray
    value: np.ndarray
    embedding: Mapping[str, np.ndarray] = field(default_factory=dict)


def collect(captures: Mapping[str, Capture], embedding: Mapping[str, np.ndarray]) -> LabelCoordinates:
    """Coordinates from the main sample's capture and the labels' rows of the output embedding."""
    capture = captures[MAIN]
    place = np.searchsorted(embedding["ids"], capture.observed("labels.ids").numpy())
    rows = embedding["rows"][place]
    rows = rows - rows.mean(1, keepdims=True)
    along = []
    for layer in capture.layers(Site.RESIDUAL):
        x = layer.double().numpy()
        size = np.linalg.norm(x, axis=1, keepdims=True)
        along.append(np.einsum("pd,pld->pl", x / np.where(size > 0, size, 1), rows))
    return LabelCoordinates(np.stack(along), capture.observed("values.last").double().numpy(), embedding)


NEEDS = Needs(
    sites=frozenset({Site.RESIDUAL}),
    shuffled=False,
    exact=True,
    observers=(LABELS, LAST_VALUES),
    examine=rows_of_labels,
    collect=collect,
)


def measure(data: ProbeInput) -> Belief:
    """Held-out R2 at every depth, of the model and its controls, and the first component of the values.

    Raises UserError: fewer than 5 clusters, or exact log odds that hardly vary.
    """
    cut = data.no_context
    without = None if cut is None else collect({MAIN: cut}, data.observations.embedding)
    return measure_belief(data.capture.batch, (data.observations, *data.control_observations), data.seed, without)


def measure_belief(
    batch: Batch, models: Sequence[LabelCoordinates], seed: int, without: LabelCoordinates | None = None
) -> Belief:
    """`measure` from the coordinates of the model and its controls.

    Args:
        batch: the prompts. models: the model, then its untrained controls. seed: seed of the folds.
        without: the model without context; None without such a control.
    """
    truth = ExactAnswers(batch)
    if truth.k.max() < 2:
        raise UserError("no prompt shows two observations, which this probe needs: give --k 2 or more")
    rows, activations = truth.observed, models[0].along
    odds, stratum, cluster = _centred_odds(truth), truth.k[rows], truth.cluster[rows]
    line = shared_line.Line(odds, stratum, held_out(batch, rows, seed))
    if line.spread < LEAST_SPREAD:
        raise UserError(
            f"the exact log odds vary by {bits(line.spread):.2g} bits given k; at least {bits(LEAST_SPREAD):.2g} are "
            "needed to read them: show more labels"
        )
    read = [[z[rows] for z in model.along] for model in models]
    cut = None if without is None else [z[rows] for z in without.along]
    r2 = ByDepth.of(line, read, cut, cluster, seed)

    def claimed(name: str, depth: int) -> Estimate:
        claim, along = CLAIMS[name], read[0][depth]
        nulls = [
            Null.of(UNTRAINED, r2.untrained[:, depth], claim.side),
            Null.of(SHUFFLED, r2.shuffled[depth], claim.side, noisy=True),
        ]
        without = None if cut is None else (along, cut[depth], cluster)
        return compare(claim, line.subset_r2, along, cluster, {}, nulls, interval=r2.spans[depth], without=without)

    last, middle = len(activations) - 1, len(activations) // 2
    first, components = _first_component(truth, models, seed)
    ks = tuple(np.unique(stratum).tolist())
    return Belief(
        along=r2.curve,
        without_context=r2.without,
        shuffled=r2.shuffled_band,
        slope=bits(np.array([line.slope(z[rows]) for z in activations])),
        coordinate=bits(np.stack([odds[:, 0], line.predicted(activations[last][rows])[:, 0]], 1)),
        k=np.array(ks, dtype=float),
        pc1=mean_by(stratum, first / first.std()),
        estimates=(claimed(LAST, last), claimed(MIDDLE, middle), *components),
        ticks={
            "depth": (*(f"in {layer}" for layer in range(last)), "out"),
            "answer": ("exact", "as read at the last layer"),
            "k": ks,
        },
        notes=(f"{len(rows)} prompts with evidence, {len(set(cluster))} clusters, seed {seed}",),
    )


def _centred_odds(truth: ExactAnswers) -> np.ndarray:
    """[row label] log p_j minus the mean over the labels, nats, in the prompts with evidence."""
    log_p = truth.log_p[truth.observed]
    if not np.isfinite(log_p).all():
        raise UserError("an exact probability of 0 has no log odds; leave out the prompts that exclude a label")
    return log_p - log_p.mean(1, keepdims=True)


def held_out(batch: Batch, rows: np.ndarray, seed: int) -> np.ndarray:
    """Blocks that hold out clusters, sets of labels and lead-ins together."""
    groupings: list[Any] = [batch.cluster, [tuple(sorted(words)) for words in label_words(batch)]]
    groupings += [batch.columns[name] for name in ("lead", "surface") if name in batch.columns]
    return shared_line.blocks([[grouping[i] for i in rows] for grouping in groupings], seed)


def _first_component(
    truth: ExactAnswers, models: Sequence[LabelCoordinates], seed: int
) -> tuple[np.ndarray, list[Estimate]]:
    """PC1 of the last layer's values in the prompts with evidence, and its correlations with the exact entropy and k.

    Prompts without evidence enter neither the component nor a correlation, since they lie far from all others: in
    simulated models whose values depend only on whether k is 0, |rho| of PC1 and k was .5. Intervals recompute the
    component without each of 20 groups; with a fixed component they are too short if two components share a variance.
    """
    at = truth.observed
    h, k, cluster = label_entropy(truth.log_p)[at], truth.k[at], truth.cluster[at]
    every, rows = np.arange(len(at)), np.flatnonzero(k >= 2)

    def scores(value: np.ndarray, among: np.ndarray) -> np.ndarray:
        score = np.zeros(len(at))
        score[among] = shares(value[at[among]]).scores[:, 0]
        return score * (np.sign(spearman(score[among], h[among])) or 1)

    def order(score: np.ndarray, chosen: np.ndarray) -> float:
        return abs(spearman(score[chosen], h[chosen], indicators(k[chosen])))

    def order_of_k(score: np.ndarray, chosen: np.ndarray) -> float:
        return abs(spearman(score[chosen], k[chosen]))

    by_model = [scores(model.value, every) for model in models]
    group = in_groups(cluster, seed)
    outside = [np.flatnonzero(group != number) for number in range(int(group.max()) + 1)]
    refitted = [scores(models[0].value, among) for among in outside]

    def span(statistic: Callable[[np.ndarray, np.ndarray], float], of: np.ndarray) -> Interval:
        without = [statistic(x, np.intersect1d(among, of)) for x, among in zip(refitted, outside, strict=True)]
        return regrouped_interval(statistic(by_model[0], of), np.array(without), group)

    return by_model[0], [
        against_untrained(BELIEF, PC1, order, by_model, rows, cluster, span(order, rows)),
        against_untrained(BELIEF, STEPS, order_of_k, by_model, every, cluster, span(order_of_k, every)),
    ]
