"""Probes of grading: a model's answers on whole sequences of a task, compared with untrained controls'."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from llmgeom.errors import UserError
from llmgeom.model.capture import Capture
from llmgeom.model.passes import Observer
from llmgeom.probe import Needs, ProbeInput
from llmgeom.probes.posterior.answers import observed_answers
from llmgeom.probes.posterior.memory import StateMemory, measure_states, require_skill, require_useless
from llmgeom.probes.posterior.results import (
    Calibration,
    Distance,
    Memory,
    Residuals,
    measure_calibration,
    measure_distance,
    measure_horizon,
    measure_memory,
)
from llmgeom.probes.posterior.scores import Evaluation, PosteriorScores, Scores
from llmgeom.probes.posterior.state_table import StateTable
from llmgeom.probes.shared.length_curves import LengthGeneralisation
from llmgeom.result import Result

MAIN, SEEN = "", "seen"  # sequences of held-out hypotheses, and of hypotheses that training may have shown


@dataclass(frozen=True, eq=False)
class Grades:
    """Scores of a model and of its untrained controls, each computed where a measure reads it.

    Attributes:
        evaluation, seen: the sequences of held-out and of seen hypotheses.
        own: sample -> the model's answers [sequence query form]; untrained: the same of each control.
        drawn: how many training sequences fill a look-up table.
    """

    evaluation: Evaluation
    own: Mapping[str, Tensor]
    untrained: tuple[Mapping[str, Tensor], ...]
    drawn: int

    @cached_property
    def scores(self) -> PosteriorScores:
        """The model's, on held-out hypotheses. Raises UserError: an answer is infinitely far from the exact one."""
        return self.evaluation.posterior_scores(self.own[MAIN])

    @cached_property
    def control_scores(self) -> list[Scores]:
        """Those of each untrained control."""
        return [self.evaluation.scores(forms[MAIN]) for forms in self.untrained]

    @cached_property
    def table(self) -> StateTable | None:
        """The look-up table of the states of training sequences; None without states or outcomes."""
        return StateTable.filled(self.evaluation.task, self.drawn, self.evaluation.seed)

    @property
    def rivals(self) -> dict[str, Scores]:
        """The table's scores, by its name."""
        if self.table is None:
            return {}
        answers = self.table.answers(self.evaluation.batch.tokens.data)
        return {f"table of {self.table.sequences:,} seen": self.evaluation.scores(answers)}


@dataclass(frozen=True)
class GradeProbe:
    """One question about a model's answers on whole sequences of a task.

    Attributes:
        ask: measures the grades.
        observer: reduces logits to answers; one for all probes of a run, so that it runs once.
        seen: whether sequences of seen hypotheses are read too.
    """

    evaluation: Evaluation
    drawn: int
    ask: Callable[[Grades], Result]
    observer: Observer = field(compare=False)
    seen: bool = False

    @cached_property
    def NEEDS(self) -> Needs:
        return Needs(
            shuffled=False,
            no_context=False,
            samples=frozenset({SEEN} if self.seen else ()),
            observers=(self.observer,),
            collect=self._answers,
        )

    def _answers(self, captures: Mapping[str, Capture], _: Any) -> dict[str, Tensor]:
        return {name: observed_answers(captures[name]) for name in (MAIN, *[SEEN] * self.seen)}

    def measure(self, data: ProbeInput) -> Result:
        """Raises UserError where the question has no answer on this task or for this model."""
        return self.ask(Grades(self.evaluation, data.observations, data.control_observations, self.drawn))


# ---- the questions --------------------------------------------------------------------------------------------------


def distance(probe: str, notes: tuple[str, ...], grades: Grades) -> Distance:
    """Distance to the posterior, or to the mixture that corrupted targets make exact."""
    return measure_distance(probe, grades.scores, grades.control_scores, notes, grades.rivals)


def calibration(grades: Grades) -> Calibration | Residuals:
    """How often outcomes occur, against the model's probabilities."""
    return measure_calibration(grades.scores, grades.control_scores)


def memory(notes: tuple[str, ...], grades: Grades) -> Memory:
    """Held-out less seen hypotheses. Raises UserError where a table would pass, or the model infers too little."""
    evaluation = grades.evaluation
    if why := evaluation.task.memorisable:
        raise UserError(f"memorisable: {why}")
    shown = replace(evaluation, split="seen")
    seen, held_out = shown.scores(grades.own[SEEN]), grades.scores
    require_skill(seen.kl[:, held_out.within], held_out)
    for rival in grades.rivals.values():
        require_useless(grades.table, rival.kl, held_out)
    return measure_memory(held_out, seen, [shown.scores(forms[SEEN]) for forms in grades.untrained], notes)


def states(notes: tuple[str, ...], grades: Grades) -> StateMemory:
    """Held-out less seen states of the evidence."""
    batch = grades.evaluation.batch
    return measure_states(grades.scores, grades.evaluation.task.held_out_states(batch.tokens.data).numpy(), notes)


def horizon(grades: Grades) -> LengthGeneralisation:
    """Divergence past the queries that training had a loss on."""
    return measure_horizon(grades.scores, grades.control_scores)
