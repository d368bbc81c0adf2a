"""A model's answers at the queries of a task, taken during a capture, and its posterior scores."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from llmgeom.probe import Batch, Capture, Model, Observer, Step, UserError
from llmgeom.probes.posterior.scores import Evaluation, PosteriorScores, Scores, score
from llmgeom.world import Split, World

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
