"""A probe of grading: a model's answers on whole sequences, with untrained controls and a look-up table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from llmgeom.answers import corrupt_targets
from llmgeom.probe import UNTRAINED, Batch, Capture, Model, Needs, Observer, ProbeInput, Step, UserError
from llmgeom.probes.posterior.scores import Evaluation, PosteriorScores, Scores, score
from llmgeom.result import Result
from llmgeom.world import Categorical, Split, World, hashed, seeded

AT_ONCE = 10_000  # sequences drawn together
MOST = 200_000  # sequences that fill the table; with more, the share of known states hardly grows


@dataclass(frozen=True)
class StateTable:
    """A look-up table: counts of outcomes after each state of the evidence (`World.sufficient`) in training sequences.

    Its answer at a query is (n_k + 1/2) / (n + K/2) after n sequences in that state, n_k of them with outcome k of K
    (Krichevsky and Trofimov 1981), and uniform in an unknown state. With enough sequences it is exact in every known
    state. Derived here.

    Attributes:
        keys: [state] sorted 64-bit hashes of the query and its state. Two of a million states share a hash with
            probability 3e-8.
        counts: [state outcome].
        states_held_out: whether it lacks the states that training had no loss in (`World.held_out_states`).
    """

    task: World
    sequences: int
    keys: Int[np.ndarray, " state"]
    counts: Float[np.ndarray, "state outcome"]
    states_held_out: bool = False

    @classmethod
    def filled(
        cls, task: World, sequences: int, seed: int, corrupt: float = 0.0, states_held_out: bool = False
    ) -> StateTable | None:
        """A table from `sequences` sequences of the training split, at most MOST; None without any, or without states.

        Args:
            corrupt: The probability with which training drew a target again: the table sees such targets, too.
            states_held_out: Whether training had no loss in held-out states: the table does not see these.
        """
        if not sequences or not isinstance(task.answers, Categorical):
            return None
        if task.sufficient(task.draw_split(1, seeded("states", 0)).inputs) is None:
            return None
        total, generator = min(sequences, MOST), seeded("grade/table", seed)
        keys, counts = np.empty(0, dtype=np.int64), np.empty((0, len(task.answers.tokens)))
        for start in range(0, total, AT_ONCE):
            drawn = task.draw_split(min(AT_ONCE, total - start), generator, task.training_split)
            target = corrupt_targets(drawn.target, corrupt, counts.shape[1], generator) if corrupt else drawn.target
            shown = np.ones(target.shape, dtype=bool)
            if states_held_out:
                shown = ~task.held_out_states(drawn.inputs).numpy()
            outcomes = np.eye(counts.shape[1])[target.numpy()[shown]]
            keys, place = np.unique(np.concatenate([keys, _keys(task, drawn.inputs)[shown]]), return_inverse=True)
            weights = np.concatenate([counts, outcomes])
            counts = np.zeros((len(keys), weights.shape[1]))
            np.add.at(counts, place, weights)
        return cls(task, total, keys, counts, states_held_out)

    def answers(self, inputs: Tensor) -> Float[Tensor, "sequence query form"]:
        """The table's answers in the task's form."""
        rows = _keys(self.task, inputs)
        place = np.searchsorted(self.keys, rows).clip(max=len(self.keys) - 1)
        known = self.keys[place] == rows
        counts = np.where(known[..., None], self.counts[place], 0.0) + 0.5
        predictive = torch.from_numpy(counts / counts.sum(-1, keepdims=True)).log()
        return self.task.answers.exact(predictive)


def _keys(task: World, inputs: Tensor) -> Int[np.ndarray, "sequence query"]:
    states = task.sufficient(inputs)
    assert states is not None
    query = torch.arange(states.shape[1]).expand(len(states), -1)
    return hashed(torch.cat([query[..., None], states], -1).flatten(0, 1)).unflatten(0, query.shape).numpy()


MAIN, SEEN = "", "seen"  # samples of held-out hypotheses, and of hypotheses that training may have shown


@dataclass(frozen=True, eq=False)
class Grades:
    """Scores of a model and of its untrained controls, each computed when it is first used.

    Attributes:
        probe: what was read.
        own: sample -> the model's answers [sequence query form]; untrained: those of each control.
    """

    probe: GradeProbe
    own: Mapping[str, Tensor]
    untrained: tuple[Mapping[str, Tensor], ...]

    @property
    def evaluation(self) -> Evaluation:
        """The sequences of held-out hypotheses."""
        return self.probe.evaluation

    @cached_property
    def scores(self) -> PosteriorScores:
        """The model's scores on held-out hypotheses. Raises UserError if an answer is infinitely far from exact."""
        return self.evaluation.posterior_scores(self.own[MAIN])

    @cached_property
    def control_scores(self) -> list[Scores]:
        """The scores of each untrained control."""
        return [self.evaluation.scores(forms[MAIN]) for forms in self.untrained]

    @cached_property
    def table(self) -> StateTable | None:
        """The look-up table of the states of training sequences; None without states or outcomes."""
        of, evaluation = self.probe, self.evaluation
        return StateTable.filled(evaluation.task, of.drawn, evaluation.seed, of.corrupt, of.states_held_out)

    @property
    def rivals(self) -> dict[str, Scores]:
        """The scores of the look-up table, by its name."""
        if self.table is None:
            return {}
        answers = self.table.answers(self.evaluation.batch.tokens.data)
        return {f"table of {self.table.sequences:,} seen": self.evaluation.scores(answers)}


Ask = Callable[[Grades], Result]


@dataclass(frozen=True)
class GradeProbe:
    """One question about a model's answers on whole sequences of a task.

    Attributes:
        ask: the function that measures the grades.
        observer: reduces logits to answers; all probes of a run share one, so that it runs once.
        seen: whether the probe also reads sequences of seen hypotheses.
        drawn: number of training sequences that fill a look-up table.
        corrupt, states_held_out: what training did with these, as in `StateTable.filled`; the targets of `evaluation`
            may be true ones all the same.
    """

    evaluation: Evaluation
    drawn: int
    ask: Ask
    observer: Observer = field(compare=False)
    seen: bool = False
    corrupt: float = 0.0
    states_held_out: bool = False

    @property
    def NEEDS(self) -> Needs:
        return Needs(
            controls=frozenset({UNTRAINED}),
            samples=(SEEN,) * self.seen,
            observers=(self.observer,),
            collect=lambda captures, _: {
                name: observed_answers(captures[name]) for name in (MAIN, *[SEEN] * self.seen)
            },
        )

    def measure(self, data: ProbeInput) -> Result:
        """Raises UserError if the question has no answer on this task or for this model."""
        return self.ask(Grades(self, data.observations, data.control_observations))


NAME = "answers"
NEVER = -1e30  # nats


def answer_observer(task: World, *samples: str) -> Observer:
    """An observer that reduces the logits at the queries of the main sample and `samples` to the task's answer form."""
    width = len(task.answers.tokens) + 1 if task.answers.tokens else 2
    version = f"{NAME} of {task.title}"
    return Observer(NAME, partial(_answers, task), samples=("", *samples), version=version, row_bytes=4 * width)


def _answers(task: World, step: Step) -> dict[str, Tensor]:
    # A probability of exactly 0 (of other tokens, if all tokens are outcomes) has no finite logarithm to store.
    return {"form": task.answers.read(step.logits).clamp_min(NEVER)}


def observed_answers(capture: Capture) -> Tensor:
    """[sequence query form] the answers of `answer_observer` in a capture of whole sequences."""
    return capture.observed(f"{NAME}.form").unflatten(0, (len(capture.batch), -1))


def check_readable(subject: Model, task: World) -> None:
    """Raise UserError for an edited model, and for a model with fewer outputs than the task has tokens."""
    if subject.edits:
        raise UserError(f"{subject.name} is edited; posterior scores are those of unedited models")
    if subject.facts["vocabulary"] < task.vocabulary:
        raise UserError(
            f"{subject.name} has {subject.facts['vocabulary']} outputs; {task.title} needs {task.vocabulary}: "
            "give --task with the fields that it was trained with"
        )


def read_answers(subject: Model, task: World, batch: Batch) -> Tensor:
    """The model's answers, [sequence query form].

    Raises UserError: the model cannot read the inputs, or logits are not finite.
    """
    check_readable(subject, task)
    return observed_answers(subject.capture(batch, (), observers=[answer_observer(task)]))


def score_model(subject: Model, task: World, batch: Batch) -> Scores:
    """The model's scores on a batch, without other predictors."""
    return score(task, batch, read_answers(subject, task, batch))


def grade(
    subject: Model,
    task: World,
    n: int = 1000,
    seed: int = 0,
    *,
    split: Split | None = None,
    trained: int | None = None,
    corrupt: float = 0.0,
) -> PosteriorScores:
    """Posterior scores of one model on n sequences, without controls and intervals.

    Args:
        split: the split of hypotheses; by default `task.test_split`.
        trained: number of first queries with a training loss, if fewer than the task's.
        corrupt: probability with which training redrew targets; the exact answer is then the mixture.

    Raises:
        UserError: as `read_answers` and `Evaluation.posterior_scores`.
    """
    trained = min(task.trained_queries, trained or task.trained_queries)
    evaluation = Evaluation(task, n, seed, split or task.test_split, trained, corrupt)
    return evaluation.posterior_scores(read_answers(subject, task, evaluation.batch), subject.name)
