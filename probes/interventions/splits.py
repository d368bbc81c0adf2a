"""A batch split by cluster into an estimation half and an evaluation half, with the clean model's activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from torch import Tensor

from llmgeom.model.edits import Clean, Point
from llmgeom.model.resume import clean_pass
from llmgeom.probe import Batch, Capture, Site, Subject, UserError
from llmgeom.probes.evidence.predictions import label_ids
from llmgeom.probes.interventions.patching import Location, PatchingRun, PromptRun, TaskRun
from llmgeom.stats.resampling import LEAST_CLUSTERS
from llmgeom.stats.ridge_probe import fit, folds
from llmgeom.task import Categorical, Task

Positions = Literal["query", "all"]  # at which an edit is made
EVALUATION, ESTIMATION = "", "estimation"  # names of the samples: the main one is the evaluation half
# Sites that a split of prompts captures in the clean model at the final tokens.
PROMPT_SITES = frozenset({Site.RESIDUAL, Site.LIKELY})


def halves(batch: Batch, seed: int) -> tuple[Batch, Batch]:
    """Estimation and evaluation half; no cluster is in both. Raises UserError: fewer than 5 clusters in a half."""
    half = folds(batch.cluster, seed, 2)
    estimation, evaluation = (batch.take(np.flatnonzero(half == part)) for part in (0, 1))
    if (least := min(len(set(part.cluster)) for part in (estimation, evaluation))) < LEAST_CLUSTERS:
        raise UserError(
            f"{len(set(batch.cluster))} clusters leave {least} in a half; {LEAST_CLUSTERS} in each are needed: "
            "add templates"
        )
    return estimation, evaluation


def check_prompts(batch: Batch) -> None:
    """Raise UserError for a batch that has query positions."""
    if batch.query is not None:
        raise UserError(
            "edits of prompts are at their final token, and this batch has other query positions: give prompts"
        )


def check_task(subject: Subject, task: Task) -> None:
    """Raise UserError if answers are real numbers, or the model has too few outputs."""
    if not isinstance(task.answers, Categorical):
        raise UserError(
            f"{task.title} asks for real numbers: ablations compare next-token distributions, which such a task lacks"
        )
    if (outputs := subject.facts["vocabulary"]) < task.vocabulary:
        raise UserError(
            f"{subject.name} has {outputs} outputs; {task.title} needs {task.vocabulary}: give --task with the "
            "fields that it was trained with"
        )


@dataclass(frozen=True, eq=False)
class EstimationSplit:
    """A batch in two halves: one gives means, axes and subspaces, the other the effects of an intervention.

    Attributes:
        captures: ESTIMATION and EVALUATION -> the clean model at the queried positions.
    """

    subject: Subject
    captures: Mapping[str, Capture]
    seed: int
    batch_tokens: int

    @property
    def estimation(self) -> Batch:
        """The half that gives means and axes, tokenized."""
        return self.captures[ESTIMATION].batch

    @property
    def evaluation(self) -> Batch:
        """The half on which effects are measured, tokenized."""
        return self.captures[EVALUATION].batch

    @cached_property
    def clean(self) -> Clean | None:
        """The clean pass of the evaluation half, from which edited passes go on."""
        return clean_pass(self.subject, self.evaluation, self.batch_tokens)

    @property
    def clusters(self) -> np.ndarray:
        """[input] of the evaluation half."""
        return np.array(self.evaluation.cluster)


@dataclass(frozen=True, eq=False)
class PromptSplit(EstimationSplit):
    """The halves of a batch of prompts, which are read at their final tokens.

    Attributes:
        entropy: half -> [prompt] bits.
        read: last residual stream [prompt d_model] -> bits, a ridge regression of entropy on the estimation half.
        pair, exact: as in `PromptRun`.
    """

    entropy: Mapping[str, np.ndarray]
    read: Callable[[np.ndarray], np.ndarray]
    pair: Tensor
    exact: Tensor | None

    @classmethod
    def of(cls, subject: Subject, captures: Mapping[str, Capture], seed: int, batch_tokens: int) -> PromptSplit:
        """From captures of both halves with PROMPT_SITES and the entropy; `seed` decides the folds of the ridge."""
        entropy = {half: captures[half].entropy.numpy() for half in (ESTIMATION, EVALUATION)}
        stream = captures[ESTIMATION].layers(Site.RESIDUAL)[-1].double().numpy()
        centre, sd = stream.mean(0), np.where(stream.std(0) > 0, stream.std(0), 1)
        fold = folds(captures[ESTIMATION].batch.cluster, seed)
        w, intercept = fit((stream - centre) / sd, entropy[ESTIMATION], fold)
        evaluation = captures[EVALUATION].batch
        exact, pair = None, captures[EVALUATION].likely[:, 0, :2].long()
        if evaluation.posterior and "first" in evaluation.columns:
            exact, pair = evaluation.posterior.predictive[:, -1].double(), label_ids(subject.tokenizer, evaluation)

        def read(x: np.ndarray) -> np.ndarray:
            return (x - centre) / sd @ w + intercept

        return cls(subject, captures, seed, batch_tokens, entropy, read, pair, exact)

    def run(self, locations: tuple[Location, ...], positions: Literal["query", "all", "later"]) -> PromptRun:
        """The evaluation half, ready to be patched at these locations."""
        bare, entropy = replace(self.evaluation, posterior=None, columns={}), self.entropy[EVALUATION]
        rest = (entropy, self.read, self.pair, self.exact)
        options: Any = {"batch_tokens": self.batch_tokens, "clean": self.clean}
        return PromptRun(self.subject, bare, locations, positions, *rest, **options)

    def ablation(self, locations: tuple[Location, ...], positions: Positions) -> PatchingRun:
        """The run that ablates components; "all" leaves out the first token, an attention sink in many models."""
        return self.run(locations, "query" if positions == "query" else "later")

    def means(self, points: Sequence[Point], positions: Positions) -> dict[Location, Tensor]:
        """[1 coordinate] means over the edited positions of the estimation half."""
        capture, later = self.captures[ESTIMATION], None
        if positions == "all":
            sites = set(map(Site, points))
            capture = self.subject.capture(self.estimation, sites, positions="all", batch_tokens=self.batch_tokens)
            later = capture.position > 0
        activations = by_location(capture, points).items()
        return {at: (x if later is None else x[later]).mean(0, keepdim=True) for at, x in activations}

    def activations(self, points: Sequence[Point], positions: Positions) -> dict[Location, Tensor] | None:
        """[row coordinate] activations of the evaluation half at the edited positions; None at "all", since positions
        of prompts of different lengths do not correspond."""
        return by_location(self.captures[EVALUATION], points) if positions == "query" else None


@dataclass(frozen=True, eq=False)
class TaskSplit(EstimationSplit):
    """The halves of whole sequences of a task, whose positions correspond."""

    task: Task

    def ablation(self, locations: tuple[Location, ...], positions: Positions) -> PatchingRun:
        """The run in which components are ablated."""
        options: Any = {"batch_tokens": self.batch_tokens, "clean": self.clean}
        return TaskRun(self.subject, self.evaluation, locations, self.task, positions, **options)

    def means(self, points: Sequence[Point], positions: Positions) -> dict[Location, Tensor]:
        """[position coordinate] means over the estimation half for each position, so that position stays known."""
        n = len(self.estimation)
        activations = self._activations(ESTIMATION, points, positions).items()
        return {at: x.unflatten(0, (n, -1)).mean(0) for at, x in activations}

    def activations(self, points: Sequence[Point], positions: Positions) -> dict[Location, Tensor]:
        """[row coordinate] activations of the evaluation half at the edited positions, sequence after sequence."""
        return self._activations(EVALUATION, points, positions)

    def _activations(self, half: str, points: Sequence[Point], positions: Positions) -> dict[Location, Tensor]:
        capture = self.captures[half]
        if positions == "all":
            sites = set(map(Site, points))
            capture = self.subject.capture(capture.batch, sites, positions="all", batch_tokens=self.batch_tokens)
        return by_location(capture, points)


def by_location(capture: Capture, points: Sequence[Point]) -> dict[Location, Tensor]:
    """[row coordinate] float64 at these points of each layer."""
    return {(point, n): x.flatten(1).double() for point in points for n, x in enumerate(capture.layers(Site(point)))}
