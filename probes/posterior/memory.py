"""Is it memory? What a table of training states could answer, and divergence in states that training left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float

from llmgeom.errors import UserError
from llmgeom.probes.posterior.grading import PROSE, SEEN, SKILL, Grades, StateTable, skill_of, useful
from llmgeom.probes.posterior.results import FAILURES, divergence, rare
from llmgeom.probes.posterior.scores import PosteriorScores
from llmgeom.probes.shared.length_curves import mean, measured, numbered
from llmgeom.result import Figure, Result, quantity
from llmgeom.stats.resampling import mean_intervals

MEMORY, STATES = "posterior_memory", "posterior_states"


@dataclass(frozen=True, kw_only=True)
class Memory(Result):
    """Divergence on hypotheses that training may have shown, and on hypotheses that it never did."""

    TITLE = "Seen and held-out hypotheses"
    TEXT = PROSE

    held_out: np.ndarray = quantity(
        "query",
        "bits",
        "KL on held-out hypotheses, mean over sequences",
        Figure("curve", interval="held_out_interval", beside="seen"),
    )
    held_out_interval: np.ndarray = quantity("query bound", "bits", "95 % interval over sequences")
    seen: np.ndarray = quantity("query", "bits", "KL on seen hypotheses")


@dataclass(frozen=True, kw_only=True)
class StateMemory(Result):
    """Divergence in states of the evidence that training had a loss on, and in states that it never had one on."""

    TITLE = "Seen and held-out states"
    TEXT = PROSE

    held_out: np.ndarray = quantity(
        "query", "bits", "KL in held-out states, mean over sequences", Figure("curve", beside="seen")
    )
    seen: np.ndarray = quantity("query", "bits", "KL in seen states")
    share: np.ndarray = quantity("query", "fraction", "share of sequences in a held-out state")


def memory(notes: Sequence[str], grades: Grades) -> Memory:
    """Held-out less seen hypotheses. Raises UserError where a table would pass, or the model infers too little."""
    evaluation, scores = grades.evaluation, grades.scores
    if why := evaluation.task.memorisable:
        raise UserError(f"memorisable: {why}")
    shown = replace(evaluation, split="seen")
    out, known = scores.own.kl[:, scores.within], shown.scores(grades.own[SEEN]).kl[:, scores.within]
    require_skill(known, scores)
    for rival in grades.rivals.values():
        require_useless(grades.table, rival.kl, scores)
    controls = [shown.scores(forms[SEEN]).kl[:, scores.within].mean(1) for forms in grades.untrained]
    return Memory(
        held_out=out.mean(0),
        held_out_interval=mean_intervals(out.T),
        seen=known.mean(0),
        estimates=(
            divergence(MEMORY, "KL, held-out less seen", out.mean(1), known.mean(1)),
            measured(MEMORY, "KL, seen", mean, known.mean(1), controls),
        ),
        ticks=numbered(1, scores.trained),
        notes=tuple(notes),
    )


def states(notes: Sequence[str], grades: Grades) -> StateMemory:
    """Held-out less seen states of the evidence."""
    inputs = grades.evaluation.batch.tokens.data
    return measure_states(grades.scores, grades.evaluation.task.held_out_states(inputs).numpy(), notes)


def measure_states(
    scores: PosteriorScores,
    held_out: Bool[np.ndarray, "sequence query"],
    notes: Sequence[str] = (),
) -> StateMemory:
    """KL in held-out states less that in seen ones at the same query: mean over sequences, of its held-out states.

    A sequence without a held-out state does not count, and one with several counts once, by their mean. What seen
    states have at the same query is subtracted, as queries differ in difficulty. Derived here.

    Failures may be rare, as in `results.divergence`, and a query counts at most 10 bits. An exact model
    needs 4,566 sequences with a held-out state. Simulated with the states of a bijection, 400 to 1,000 gradings each:
    at a difference of .01 bits, by 10 bits in 1 of 1,000 held-out states, the claim held in none, and by a jackknife's
    interval of the mean over queries in 53 % (1,000 sequences) and 12 % (12,000); at .003 bits everywhere it held in
    all (12,000 sequences).

    Args:
        scores: of sequences whose queries are in states of both kinds.
        held_out: `Task.held_out_states` of these sequences.

    Raises:
        UserError: too little skill; no query with states of both kinds.
    """
    kl, out = scores.own.kl[:, scores.within], held_out[:, scores.within]
    require_skill(kl[~out], scores)
    both = out.any(0) & ~out.all(0)
    if not both.any():
        raise UserError("no query has both held-out and seen states: its states are too few to hold some out")
    kl, out = kl[:, both], out[:, both]
    name, difference = "KL, held-out less seen states", FAILURES.matched(FAILURES.clip(kl), out)
    return StateMemory(
        held_out=_mean_where(kl, out),
        seen=_mean_where(kl, ~out),
        share=out.mean(0),
        estimates=(rare(STATES, name, difference, "no difference", 0.0, len(kl), float(out.any(1).mean())),),
        ticks={"query": tuple((np.flatnonzero(both) + 1).tolist())},
        notes=tuple(notes),
    )


def _mean_where(kl: np.ndarray, where: np.ndarray) -> np.ndarray:
    return (kl * where).sum(0) / where.sum(0).clip(min=1)


def require_skill(seen: Float[np.ndarray, "*at"], scores: PosteriorScores) -> None:
    """Raise UserError for a model that answers little better than a trivial predictor what training showed.

    Such a model has the same error on held-out hypotheses, and "nothing was memorised" would be vacuous.

    Args:
        seen: its KL(exact || model) on seen hypotheses, or in seen states, bits.
        scores: its scores on held-out hypotheses, with those of trivial predictors.
    """
    skill = skill_of(seen, scores)
    if skill < SKILL:
        raise UserError(
            f"skill over {scores.best} is {skill:.2f} on what training showed, and {SKILL} is needed: "
            "without inference held-out evidence is answered as badly as seen evidence, with or "
            "without memorisation"
        )


def require_useless(table: StateTable | None, kl: Float[np.ndarray, "sequence query"], scores: PosteriorScores) -> None:
    """Raise UserError where the table is `useful`: a model that is such a table passes "nothing was memorised"."""
    if why := useful(table, kl, scores):
        raise UserError(f"memorisable: {why}")
