"""Belief in the residual stream: exact log odds of the labels, read along the labels' rows of the unembedding; and as a
point of the simplex, where exact answers may exclude labels, and as a hidden state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from llmgeom.claims import Null, declared
from llmgeom.probe import (
    NO_CONTEXT,
    UNTRAINED,
    Batch,
    Capture,
    Model,
    Needs,
    ProbeInput,
    Site,
    UserError,
    exact_answers,
)
from llmgeom.probes.evidence.depths import SHUFFLED, ByDepth, Line, Ridge, blocks
from llmgeom.probes.evidence.predictions import (
    CONTROL_PROMPTS,
    LABELS,
    MAIN,
    ExactAnswers,
    Read,
    label_ids,
    label_words,
)
from llmgeom.probes.shared.nulls import compare
from llmgeom.result import Estimate, Figure, Result, labelled
from llmgeom.stats.information import bits
from llmgeom.stats.weighing import log_odds

BELIEF, SIMPLEX = "sula_belief", "simplex"
LAST, MIDDLE = "log odds along the labels, last layer", "log odds along the labels, half way"
LEAST_SPREAD = 0.05  # nats: least standard deviation of the exact log odds for a read-out
CLAIMS = declared(BELIEF)
HIDDEN = "hidden state"
SIMPLEX_DRAWS = 39  # draws of shuffled evidence
LEAST_APART = 0.02  # least standard deviation of probabilities at equal k for a read-out
MEANINGS = {
    "along": "exact probabilities of the labels, read along the labels' directions, other labels and clusters",
    "state": "probabilities of the hidden states, one for each label, read in the same way",
    "chain": "probabilities of the hidden chains, read by ridge regression from the residual stream",
}


def rows_of_labels(subject: Model, captures: Mapping[str, Capture]) -> dict[str, np.ndarray]:
    """Token ids of all labels, [label], and their rows of the output embedding, [label d_model]."""
    ids = label_ids(subject.tokenizer, captures[MAIN].batch).unique()
    head = subject.model.get_output_embeddings()
    if head is None or next(head.parameters()).is_meta:
        raise UserError(f"{subject.name} has no output embedding in memory: labels have no directions to read along")
    with torch.no_grad():
        rows = head.weight[ids.to(head.weight.device)]
    return {"ids": ids.numpy(), "rows": rows.double().cpu().numpy()}


@dataclass(frozen=True)
class Coordinates:
    """Label-aligned coordinates of one model.

    Attributes:
        along: [depth prompt label] z_j = x . (u_j - mean of the prompt's u) / |x|, x the residual stream of the last
            token at each depth (the input of each layer, then the output of the last), u_j the row of the output
            embedding of the prompt's label j.
        stream: [depth prompt d_model] the residual stream itself; empty where nothing reads it.
        embedding: the labels' rows of the output embedding, as `rows_of_labels` returns them.
    """

    along: np.ndarray
    stream: np.ndarray = field(default_factory=lambda: np.empty((0, 0, 0)))
    embedding: Mapping[str, np.ndarray] = field(default_factory=dict)


def collect(captures: Mapping[str, Capture], embedding: Mapping[str, np.ndarray]) -> Coordinates:
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
    return Coordinates(np.stack(along), embedding=embedding)


NEEDS = Needs(
    sites=frozenset({Site.RESIDUAL}),
    controls=frozenset({UNTRAINED, NO_CONTEXT}),
    check=exact_answers,
    control_prompts=CONTROL_PROMPTS,
    observers=(LABELS,),
    examine=rows_of_labels,
    collect=collect,
)


def measure(data: ProbeInput) -> Result:
    """Held-out R2 at every depth, of the model and its controls.

    Raises UserError: fewer than 5 clusters, or exact log odds that hardly vary.
    """
    return measure_belief(data.capture.batch, data.observations, Read.of(data, collect), data.seed)


def measure_belief(batch: Batch, model: Coordinates, read: Read, seed: int) -> Result:
    """`measure` from the coordinates of the model on a batch, and those on the prompts that controls read."""
    truth, of_read = ExactAnswers(batch), ExactAnswers(read.batch)
    if truth.k.max() < 2:
        raise UserError("no prompt shows two observations, which this probe needs: give --k 2 or more")
    rows, some, activations = truth.observed, of_read.observed, model.along
    odds, cluster = _centred_odds(truth), truth.cluster[rows]
    line = Line(odds, truth.k[rows], held_out(batch, rows, seed))
    if line.spread < LEAST_SPREAD:
        raise UserError(
            f"the exact log odds vary by {bits(line.spread):.2g} bits given k; at least {bits(LEAST_SPREAD):.2g} are "
            "needed to read them: show more labels"
        )
    fewer = Line(_centred_odds(of_read), of_read.k[some], held_out(read.batch, some, seed))
    own, cut = [z[rows] for z in activations], None if read.without is None else [z[some] for z in read.without.along]
    r2 = ByDepth.of(line, own, cluster, seed, fewer, [[z[some] for z in one.along] for one in read.untrained], cut)

    def claimed(name: str, depth: int) -> Estimate:
        claim = CLAIMS[name]
        nulls = [
            Null.of(UNTRAINED, r2.untrained[:, depth], claim.side),
            Null.of(SHUFFLED, r2.shuffled[depth], claim.side, noisy=True),
        ]

        def statistic(x: np.ndarray, at: np.ndarray) -> float:
            return (line if len(x) == len(rows) else fewer).subset_r2(x, at)

        without = None if cut is None else (read.model.along[depth][some], cut[depth], of_read.cluster[some])
        return compare(claim, statistic, own[depth], cluster, {}, nulls, interval=r2.spans[depth], without=without)

    last, middle = len(activations) - 1, len(activations) // 2
    coordinate = bits(np.stack([odds[:, 0], line.predicted(own[last])[:, 0]], 1))
    slope, along = bits(np.array([line.slope(z) for z in own])), "exact log odds read from the label-aligned coordinate"
    read_along = f"{along}, other labels and clusters"
    pairs = "centred log odds of the first label: exact, and as read at the last layer"
    return Result.of(
        "Belief in the residual stream",
        {
            **r2.labelled("along", read_along, "clusters", "without_context", "shuffled"),
            "slope": labelled(slope, "depth", "bits", "slope of the line: log odds for one unit of the coordinate"),
            "coordinate": labelled(coordinate, "row answer", "bits", pairs, Figure("scatter")),
        },
        __name__,
        estimates=(claimed(LAST, last), claimed(MIDDLE, middle)),
        ticks={
            "depth": (*(f"in {layer}" for layer in range(last)), "out"),
            "answer": ("exact", "as read at the last layer"),
        },
        notes=(f"{len(rows)} prompts with evidence, {len(set(cluster))} clusters, seed {seed}",),
    )


def _centred_odds(truth: ExactAnswers) -> np.ndarray:
    """[row label] log p_j minus the mean over the labels, nats, in the prompts with evidence."""
    log_p = truth.log_p[truth.observed]
    if not np.isfinite(log_p).all():
        raise UserError("an exact probability of 0 has no log odds; leave out the prompts that exclude a label")
    return log_odds(log_p)


def held_out(batch: Batch, rows: np.ndarray, seed: int) -> np.ndarray:
    """Blocks that hold out clusters, sets of labels and lead-ins together."""
    groupings: list[Any] = [batch.cluster, [tuple(sorted(words)) for words in label_words(batch)]]
    groupings += [batch.columns[name] for name in ("surface",) if name in batch.columns]
    return blocks([[grouping[i] for i in rows] for grouping in groupings], seed)


# ---- as a point of the simplex, and as a hidden state ----------------------------------------------------------------


def collect_hidden(captures: Mapping[str, Capture], embedding: Mapping[str, np.ndarray]) -> Coordinates:
    """Those of `collect`; if the process has hidden chains, with the residual stream."""
    found, capture = collect(captures, embedding), captures[MAIN]
    if hidden(capture.batch) is None:
        return found
    return replace(found, stream=np.stack([x.float().numpy() for x in capture.layers(Site.RESIDUAL)]))


def measure_simplex(batch: Batch, model: Coordinates, read: Read, seed: int) -> Result:
    """R2 at every depth, of the model and its controls, from the coordinates of the model on a batch, and those on the
    prompts that controls read. Raises UserError for answers that hardly vary at equal k."""
    truth, of_read = ExactAnswers(batch), ExactAnswers(read.batch)
    rows, k, cluster = truth.observed, truth.k[truth.observed], truth.cluster[truth.observed]
    some, few = of_read.observed, of_read.k[of_read.observed]

    def by_depth(target: Line | Ridge, fewer: Line | Ridge, site: str) -> ByDepth:
        untrained = [[x[some] for x in getattr(one, site)] for one in read.untrained]
        without = None if read.without is None else [x[some] for x in getattr(read.without, site)]
        own = [x[rows] for x in getattr(model, site)]
        return ByDepth.of(target, own, cluster, seed, fewer, untrained, without, SIMPLEX_DRAWS)

    def line(p: np.ndarray, batch: Batch, rows: np.ndarray, k: np.ndarray) -> Line:
        return Line(p[rows] - 1 / p.shape[1], k, held_out(batch, rows, seed))

    main, controls = (batch, rows, k), (read.batch, some, few)
    answers = line(np.exp(truth.log_p), *main)
    if answers.spread < LEAST_APART:
        raise UserError(
            f"the exact probabilities vary by {answers.spread:.2g} at equal k; at least {LEAST_APART:g} are needed to "
            "read them: show more observations"
        )
    parts = {"along": by_depth(answers, line(np.exp(of_read.log_p), *controls), "along")}
    notes = [f"{len(rows)} prompts with evidence, {len(set(cluster))} clusters, seed {seed}"]
    unmeasured = {HIDDEN: "what is hidden in this process has one state for each answer"}
    found, found_read = hidden(batch), hidden(read.batch)
    if found is not None and found_read is not None:
        (state, chain), (state_read, chain_read) = found, found_read
        parts["state"] = by_depth(line(state, *main), line(state_read, *controls), "along")
        target, fewer, reason = _centred(chain[rows], k), _centred(chain_read[some], few), ""
        varies = target.std(0) >= LEAST_APART
        if still := ", ".join(str(i + 1) for i in np.flatnonzero(~varies)):
            reason = f"of {len(varies)} hidden chains, the probability of chain {still} hardly varies at equal k"
            notes.append(f"{reason}: it is left out")
        # The probabilities of all chains sum to 1, so one that varies is redundant.
        kept = np.flatnonzero(varies)[1:]
        target, fewer = target[:, kept], fewer[:, kept]
        unmeasured = {} if target.size else {HIDDEN: reason}
        if target.size:
            held = blocks([cluster], seed)[:, 0], blocks([of_read.cluster[some]], seed)[:, 0]
            parts["chain"] = by_depth(Ridge(target, k, held[0]), Ridge(fewer, few, held[1]), "stream")
    last = len(model.along) - 1
    curves: dict[str, Any] = {}
    for part, r2 in parts.items():
        over = "clusters" + ", fits held fixed" * (part == "chain")
        curves |= r2.labelled(part, MEANINGS[part], over, f"{part}_without", f"{part}_shuffled")
    return Result.of(
        "Belief as a point of the simplex",
        curves,
        __name__,
        ticks={"depth": (*(f"in {layer}" for layer in range(last)), "out")},
        notes=tuple(notes),
        unmeasured=unmeasured,
    )


def hidden(batch: Batch) -> tuple[np.ndarray, np.ndarray] | None:
    """Exact probabilities of the hidden state of each label, [prompt label], and of each hidden chain, [prompt chain].

    None if the belief has no more states than there are labels.
    """
    exact = batch.exact
    labels = exact.predictive.shape[-1]
    if exact.belief is None or exact.belief.shape[-1] <= labels or exact.belief.shape[-1] % labels:
        return None
    joint = exact.belief[:, -1].exp().numpy().reshape(len(batch), -1, labels)
    return joint.sum(1), joint.sum(2)


def _centred(values: np.ndarray, stratum: np.ndarray) -> np.ndarray:
    means = {name: values[stratum == name].mean(0) for name in np.unique(stratum)}
    return values - np.array([means[name] for name in stratum])


# The probe of this part: what a module of a probe has, a second time in this one.
AS_POINT = SimpleNamespace(
    NEEDS=replace(NEEDS, collect=collect_hidden),
    measure=lambda data: measure_simplex(
        data.capture.batch, data.observations, Read.of(data, collect_hidden), data.seed
    ),
)
