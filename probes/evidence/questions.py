"""The questions of `llmgeom evidence`: the probes of each protocol, and those of a process in text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmgeom.errors import NO_TOKENIZER, UserError
from llmgeom.probe import Batch, Probe, Subject
from llmgeom.probes.evidence import answers, belief, controls, coordinates, martingale, published
from llmgeom.probes.evidence.predictions import label_ids
from llmgeom.provenance import CONTROLS
from llmgeom.run import BATCH_TOKENS, Question

PROBES: dict[str, dict[str, Probe]] = {
    "sound": {
        answers.PROCESS: answers,
        belief.BELIEF: belief,
        controls.CONTROLS: controls,
        martingale.MARTINGALE: martingale,
    },
    "published": {published.PROBE: published},
}
OF_PROCESS: dict[str, Probe] = {
    answers.PROCESS: answers,
    belief.BELIEF: belief,
    coordinates.COORDINATES: coordinates,
}


def wanted_samples(protocol: str) -> frozenset[str]:
    """The conditions, besides the main one, that the probes of a protocol read."""
    return frozenset().union(*(probe.NEEDS.samples for probe in PROBES[protocol].values()))


def question(
    subject: Subject,
    batch: Batch,
    samples: Mapping[str, Batch],
    *,
    protocol: str = "sound",
    seed: int = 0,
    nulls: int = CONTROLS,
    batch_tokens: int = BATCH_TOKENS,
    facts: Mapping[str, Any] | None = None,
) -> Question:
    """The question about label sequences; `samples` are the same draws, changed in one way per condition.

    Raises UserError: a tokenizer in which a label is several tokens.
    """
    for one in (batch, *samples.values()):
        label_ids(subject.tokenizer, one)
    main = next(iter(PROBES[protocol]))

    def columns(observations: Mapping[str, Any]) -> dict[str, tuple]:
        entropy = observations[main].h_label
        return {"H label": tuple(round(float(h), 6) for h in entropy)}

    draws = (nulls, seed, batch_tokens)
    return Question(batch, PROBES[protocol], *draws, samples, facts or {}, columns=columns, whole=False)


def question_of_process(batch: Batch, nulls: int, seed: int, batch_tokens: int) -> Question:
    """The question about a process; its batch has exact answers."""
    return Question(batch, OF_PROCESS, nulls, seed, batch_tokens, whole=False)


def check_tokenizer(subject: Subject) -> None:
    """Raise UserError for a model that reads no text."""
    if subject.tokenizer is None:
        raise UserError(f"{subject.name} {NO_TOKENIZER}")
