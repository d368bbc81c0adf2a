"""Does the model keep its accuracy at queries later than any that had a training loss?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from llmgeom.probe import WHOLE, Batch, Capture, Needs, ProbeInput, Site, Subject, UserError
from llmgeom.probes.shared.length_curves import LengthGeneralisation as Result
from llmgeom.probes.shared.length_curves import measure_past
from llmgeom.stats.information import bits, kl

NO_TASK = "length generalisation needs the whole sequences of a wind-tunnel task: use scan --task"


@dataclass(frozen=True)
class Reach:
    """How many queries, the first ones, a loss was on, and what the model was trained on ("" where that is unknown)."""

    queries: int
    task: str


def reach(subject: Subject, batch: Batch) -> Reach:
    """What the task says of itself, or the model's folder where that is less and the task is the same one.

    Raises UserError for a process in text, on which no loss is known.
    """
    source = batch.source
    if "trained" not in source:
        raise UserError(NO_TASK)
    queries, told = int(source["trained"]), str(subject.facts.get("trained_on", ""))
    if told.partition(":")[0] == source["name"].partition(":")[0]:
        queries = min(queries, subject.facts["trained_queries"])
    return Reach(queries, told)


def judged(_: str, subject: Subject, batch: Batch, samples: Mapping[str, Batch]) -> bool:
    """A query must lie past those that a loss was on."""
    whole, exact = samples.get(WHOLE), batch.posterior
    if whole is None or exact is None or not exact.outcomes:
        return False
    return whole.exact.predictive.shape[1] > reach(subject, batch).queries


NEEDS = Needs(
    sites=frozenset({Site.LOG_PROBS}),
    shuffled=False,
    no_context=False,
    samples=frozenset({WHOLE}),
    exact=True,
    examine=lambda subject, captures: reach(subject, captures[""].batch),
    judged=judged,
)


def measure(view: ProbeInput) -> Result:
    """Raises UserError where every query was trained on, where answers are real numbers, or one is infinitely wrong."""
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
    model, *untrained = (_divergence(one, n) for one in (sample.capture, *sample.untrained))
    if not np.isfinite(model).all():
        sequence, query = np.argwhere(~np.isfinite(model))[0] + 1
        raise UserError(f"the model is infinitely far from the exact answer at query {query} of sequence {sequence}")
    p = exact.predictive.double().view(n, queries, -1)
    trivial = bits(kl(p, (p.logsumexp(0, keepdim=True) - np.log(n)).expand_as(p))).numpy()
    unknown = ["what the model was trained on is not known: the horizon is the task's own"] * (not horizon.task)
    return measure_past(model, untrained, trivial, horizon.queries, unknown)


def _divergence(capture: Capture, n: int) -> np.ndarray:
    """[sequence query] bits: KL(exact || model), over the whole vocabulary."""
    exact = capture.exact
    said = capture.log_probs[:, list(exact.outcomes)].double()
    return bits(kl(exact.predictive.double(), said)).view(n, -1).numpy()
