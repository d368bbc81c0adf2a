"""Belief in the residual stream as a point of the simplex (exact answers may exclude labels) and as a hidden state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from llmgeom.probe import Batch, Capture, ProbeInput, Site, UserError
from llmgeom.probes.evidence import belief
from llmgeom.probes.evidence.belief import Coordinates
from llmgeom.probes.evidence.depths import ByDepth, Line, Ridge, blocks
from llmgeom.probes.evidence.predictions import MAIN, ExactAnswers, Read
from llmgeom.result import Result

COORDINATES = "simplex"
HIDDEN = "hidden state"
DRAWS = 39  # draws of shuffled evidence
LEAST_SPREAD = 0.02  # least standard deviation of probabilities at equal k for a read-out
MEANINGS = {
    "along": "exact probabilities of the labels, read along the labels' directions, other labels and clusters",
    "state": "probabilities of the hidden states, one for each label, read in the same way",
    "chain": "probabilities of the hidden chains, read by ridge regression from the residual stream",
}


def collect(captures: Mapping[str, Capture], embedding: Mapping[str, np.ndarray]) -> Coordinates:
    """Those of `belief.collect`; if the process has hidden chains, with the residual stream."""
    found, capture = belief.collect(captures, embedding), captures[MAIN]
    if hidden(capture.batch) is None:
        return found
    return replace(found, stream=np.stack([x.float().numpy() for x in capture.layers(Site.RESIDUAL)]))


NEEDS = replace(belief.NEEDS, collect=collect)


def measure(data: ProbeInput) -> Result:
    """R2 at every depth, of the model and its controls. Raises UserError for answers that hardly vary at equal k."""
    return measure_simplex(data.capture.batch, data.observations, Read.of(data, collect), data.seed)


def measure_simplex(batch: Batch, model: Coordinates, read: Read, seed: int) -> Result:
    """`measure` from the coordinates of the model on a batch, and those on the prompts that controls read."""
    truth, of_read = ExactAnswers(batch), ExactAnswers(read.batch)
    rows, k, cluster = truth.observed, truth.k[truth.observed], truth.cluster[truth.observed]
    some, few = of_read.observed, of_read.k[of_read.observed]

    def by_depth(target: Line | Ridge, fewer: Line | Ridge, site: str) -> ByDepth:
        untrained = [[x[some] for x in getattr(one, site)] for one in read.untrained]
        without = None if read.without is None else [x[some] for x in getattr(read.without, site)]
        own = [x[rows] for x in getattr(model, site)]
        return ByDepth.of(target, own, cluster, seed, fewer, untrained, without, DRAWS)

    def line(p: np.ndarray, batch: Batch, rows: np.ndarray, k: np.ndarray) -> Line:
        return Line(p[rows] - 1 / p.shape[1], k, belief.held_out(batch, rows, seed))

    main, controls = (batch, rows, k), (read.batch, some, few)
    answers = line(np.exp(truth.log_p), *main)
    if answers.spread < LEAST_SPREAD:
        raise UserError(
            f"the exact probabilities vary by {answers.spread:.2g} at equal k; at least {LEAST_SPREAD:g} are needed to "
            "read them: show more observations"
        )
    parts = {"along": by_depth(answers, line(np.exp(of_read.log_p), *controls), "along")}
    notes = [f"{len(rows)} prompts with evidence, {len(set(cluster))} clusters, seed {seed}"]
    unmeasured = {HIDDEN: "what is hidden in this process has one state for each answer"}
    found, found_read = hidden(batch), hidden(read.batch)
    if found is not None and found_read is not None:
        (state, chain), (state_read, chain_read) = found, found_read
        parts["state"] = by_depth(line(state, *main), line(state_read, *controls), "along")
        target, fewer = _centred(chain[rows], k), _centred(chain_read[some], few)
        varies = target.std(0) >= LEAST_SPREAD
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
