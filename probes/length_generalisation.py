"""Does the model keep its accuracy at queries beyond those with a training loss?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmgeom.claims import declared
from llmgeom.probe import WHOLE, Batch, Capture, Needs, ProbeInput, Site, Subject, UserError
from llmgeom.probes.shared.length_curves import (
    PROBE,
    LengthGeneralisation as Result,
    measure_past,
)
from llmgeom.probes.shared.matrices import input_at_rows
from llmgeom.stats.information import best_of_input, bits, kl

LEAST_ALIKE = 5  # sequences with one input at a query, whose mean exact answer is known well enough
CLAIMS = declared(PROBE)
NO_TASK = "length generalisation needs the whole sequences of a wind-tunnel task: use scan --task"


@dataclass(frozen=True)
class Reach:
    """The number of first queries with a training loss, and the task of the training ("" if unknown)."""

    queries: int
    task: str


def reach(subject: Subject, batch: Batch) -> Reach:
    """The task's number of trained queries, or that of the model's folder if it is less and the task is the same.

    Raises UserError for a process in text, whose training loss is unknown.
    """
    source = batch.source
    if "trained" not in source:
        raise UserError(NO_TASK)
    queries, task = int(source["trained"]), str(subject.facts.get("trained_on", ""))
    if task.partition(":")[0] == source["name"].partition(":")[0]:
        queries = min(queries, subject.facts["trained_queries"])
    return Reach(queries, task)


NEEDS = Needs(
    sites=frozenset({Site.LOG_PROBS}),
    shuffled=False,
    no_context=False,
    samples=frozenset({WHOLE}),
    exact=True,
    examine=lambda subject, captures: reach(subject, captures[""].batch),
)


def measure(view: ProbeInput) -> Result:
    """Raises UserError if every query was trained on, answers are real numbers, or an answer is infinitely wrong."""
    if WHOLE not in view.samples:
        raise UserError(NO_TASK)
    sample, horizon = view.samples[WHOLE], view.observations
    exact = sample.capture.exact
    if not exact.outcomes:
        raise UserError("this task asks for real numbers; llmgeom grade measures it past the horizon too")
    n = len(sample.capture.batch)
    queries = len(sample.capture.prompt) // n
    if queries <= horizon.queries:
        raise UserError(
            f"all {queries} queries are within the {horizon.queries} that a loss was on: nothing lies past the "
            "horizon; name longer sequences of the task with --task, e.g. hmm:steps=24"
        )
    model, *untrained = (_divergence(capture, n) for capture in (sample.capture, *sample.untrained))
    if not np.isfinite(model).all():
        sequence, query = np.argwhere(~np.isfinite(model))[0] + 1
        raise UserError(f"the model is infinitely far from the exact answer at query {query} of sequence {sequence}")
    trivial = _trivial(sample.capture).reshape(n, queries)
    unknown = ["what the model was trained on is not known: the horizon is the task's own"] * (not horizon.task)
    return measure_past(model, untrained, trivial, horizon.queries, unknown)


def _divergence(capture: Capture, n: int) -> np.ndarray:
    """[sequence query] bits: KL(exact || model), over the whole vocabulary."""
    exact = capture.exact
    predicted = capture.log_probs[:, list(exact.outcomes)].double()
    return bits(kl(exact.predictive.double(), predicted)).view(n, -1).numpy()


def _trivial(capture: Capture) -> np.ndarray:
    """[row] bits: KL(exact || `best_of_input`), what a look-up of the last observation reaches at best."""
    exact, position = capture.exact.predictive.double().numpy(), capture.position.numpy()
    return bits(kl(exact, best_of_input(exact, position, input_at_rows(capture).numpy(), LEAST_ALIKE)))
