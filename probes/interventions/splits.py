"""A batch split by cluster into an estimation half and an evaluation half, with the clean model's activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from torch import Tensor

from llmgeom.batch import Batch
from llmgeom.errors import UserError
from llmgeom.model.capture import Capture, Site
from llmgeom.model.edits import Point
from llmgeom.model.subject import Positions, Subject
from llmgeom.probes.evidence.predictions import label_ids
from llmgeom.probes.interventions.patching import Location, PatchingRun, PromptRun, TaskRun
from llmgeom.prompt_table import prompt_table
from llmgeom.provenance import provenance
from llmgeom.record import Record
from llmgeom.result import Measured
from llmgeom.stats.information import bits
from llmgeom.stats.resampling import LEAST_CLUSTERS
from llmgeom.stats.ridge_probe import fit, folds
from llmgeom.task import Categorical, Task


@dataclass(frozen=True, eq=False)
class EstimationSplit:
    """What an intervention starts from: means, axes and subspaces come from one half, effects from the other.

    Attributes:
        source: the evaluation half in the form in which the user gave it.
        whole: the batch as the model reads it.
        estimation, evaluation: its halves; a cluster is never in both.
    """

    subject: Subject
    source: Batch
    whole: Batch
    estimation: Batch
    evaluation: Batch
    seed: int
    batch_tokens: int

    @staticmethod
    def halves(subject: Subject, batch: Batch, seed: int) -> tuple[Batch, Batch, Batch, Batch]:
        """source, whole, estimation and evaluation. Raises UserError: fewer than 5 clusters in a half."""
        half = folds(batch.cluster, seed, 2)
        whole = replace(batch, inputs=subject.tokens(batch))
        estimation, evaluation = (whole.take(np.flatnonzero(half == part)) for part in (0, 1))
        if (least := min(len(set(part.cluster)) for part in (estimation, evaluation))) < LEAST_CLUSTERS:
            raise UserError(
                f"{len(set(batch.cluster))} clusters leave {least} in a half; {LEAST_CLUSTERS} in each are needed: "
                "add templates"
            )
        return batch.take(np.flatnonzero(half == 1)), whole, estimation, evaluation

    @property
    def clusters(self) -> np.ndarray:
        """[input] of the evaluation half."""
        return np.array(self.evaluation.cluster)

    def recorded(
        self,
        entropy: np.ndarray,
        results: Mapping[str, Measured],
        unmeasured: Mapping[str, str],
        nulls: int,
        facts: Mapping[str, Any],
    ) -> Record:
        """The record of what was measured on the evaluation half; entropy [input] in bits."""
        return Record(
            results=results,
            unmeasured=unmeasured,
            prompts=prompt_table(self.subject, self.source, self.evaluation.tokens, entropy),
            subject={k: v for k, v in self.subject.facts.items() if v is not None},
            source=dict(self.source.source),
            facts={
                **provenance(self.evaluation, self.whole.tokens, self.seed, nulls),
                "estimated on": len(self.estimation),
                **facts,
            },
        )


@dataclass(frozen=True, eq=False)
class PromptSplit(EstimationSplit):
    """The halves of prompts, which are read at their final tokens.

    Attributes:
        captures: "estimation" and "evaluation" -> the clean model at the final tokens.
        entropy: the same -> [prompt] bits.
        read: last residual stream [prompt d_model] -> bits, a ridge regression of entropy on the estimation half.
        pair, exact: as in `PromptRun`.
    """

    captures: Mapping[str, Capture]
    entropy: Mapping[str, np.ndarray]
    read: Callable[[np.ndarray], np.ndarray]
    pair: Tensor
    exact: Tensor | None

    @classmethod
    def of(cls, subject: Subject, batch: Batch, sites: Set[Site], seed: int, batch_tokens: int) -> PromptSplit:
        """Split by seed and capture `sites` of the clean model.

        Raises:
            UserError: the batch has query positions of its own; fewer than 5 clusters in a half.
        """
        if batch.query is not None:
            raise UserError(
                "edits of prompts are at their final token, and this batch has other query positions: give prompts"
            )
        source, whole, estimation, evaluation = cls.halves(subject, batch, seed)
        sites = {*sites, Site.RESIDUAL, Site.ENTROPY}
        captures = {"estimation": subject.capture(estimation, sites, batch_tokens=batch_tokens)}
        captures["evaluation"] = subject.capture(evaluation, sites | {Site.LOG_PROBS}, batch_tokens=batch_tokens)
        entropy = {half: bits(capture.entropy.double().numpy()) for half, capture in captures.items()}
        stream = captures["estimation"].layers(Site.RESIDUAL)[-1].double().numpy()
        centre, sd = stream.mean(0), np.where(stream.std(0) > 0, stream.std(0), 1)
        fold = folds(estimation.cluster, seed)
        w, intercept = fit((stream - centre) / sd, entropy["estimation"], fold)
        exact, pair = None, captures["evaluation"].log_probs.topk(2).indices
        if evaluation.posterior and "first" in evaluation.columns:
            exact, pair = evaluation.posterior.predictive[:, -1].double(), label_ids(subject.tokenizer, evaluation)

        def read(x: np.ndarray) -> np.ndarray:
            return (x - centre) / sd @ w + intercept

        rest = (seed, batch_tokens, captures, entropy, read, pair, exact)
        return cls(subject, source, whole, estimation, evaluation, *rest)

    def run(self, locations: tuple[Location, ...], positions: Literal["query", "all", "later"]) -> PromptRun:
        """The evaluation half, ready to be patched at these locations."""
        bare, entropy = replace(self.evaluation, posterior=None, columns={}), self.entropy["evaluation"]
        rest = (entropy, self.read, self.pair, self.exact, self.batch_tokens)
        return PromptRun(self.subject, bare, locations, positions, *rest)

    def ablation(self, locations: tuple[Location, ...], positions: Positions) -> PatchingRun:
        """The run that ablates components; "all" spares the first token, on which many models park attention."""
        return self.run(locations, "query" if positions == "query" else "later")

    def means(self, points: Sequence[Point], positions: Positions) -> dict[Location, Tensor]:
        """[1 coordinate] means over the edited positions of the estimation half."""
        capture, later = self.captures["estimation"], None
        if positions == "all":
            sites = set(map(Site, points))
            capture = self.subject.capture(self.estimation, sites, positions="all", batch_tokens=self.batch_tokens)
            later = capture.position > 0
        activations = by_location(capture, points).items()
        return {at: (x if later is None else x[later]).mean(0, keepdim=True) for at, x in activations}

    def activations(self, points: Sequence[Point], positions: Positions) -> dict[Location, Tensor] | None:
        """[row coordinate] of the evaluation half at the edited positions; None at "all", since prompts of different
        lengths have no positions in common."""
        return by_location(self.captures["evaluation"], points) if positions == "query" else None

    def record(
        self, results: Mapping[str, Measured], unmeasured: Mapping[str, str], nulls: int, facts: Mapping[str, Any]
    ) -> Record:
        """The record of what was measured on the evaluation half."""
        return self.recorded(self.entropy["evaluation"], results, unmeasured, nulls, facts)


@dataclass(frozen=True, eq=False)
class TaskSplit(EstimationSplit):
    """The halves of whole sequences of a task, in all of which a position means the same."""

    task: Task

    @classmethod
    def of(cls, subject: Subject, batch: Batch, task: Task, seed: int, batch_tokens: int) -> TaskSplit:
        """Split by seed.

        Raises:
            UserError: the answers are real numbers; the model has too few outputs; fewer than 5 sequences in a half.
        """
        if not isinstance(task.answers, Categorical):
            raise UserError(
                f"{task.title} asks for real numbers: ablations compare next-token distributions, "
                "which such a task lacks"
            )
        if (outputs := subject.facts["vocabulary"]) < task.vocabulary:
            raise UserError(
                f"{subject.name} has {outputs} outputs; {task.title} needs {task.vocabulary}: give --task with the "
                "fields that it was trained with"
            )
        return cls(subject, *cls.halves(subject, batch, seed), seed, batch_tokens, task)

    def ablation(self, locations: tuple[Location, ...], positions: Positions) -> PatchingRun:
        """The run in which components are ablated."""
        return TaskRun(self.subject, self.evaluation, locations, self.task, positions, self.batch_tokens)

    def _capture(self, half: Batch, points: Sequence[Point], positions: Positions) -> dict[Location, Tensor]:
        sites = set(map(Site, points))
        capture = self.subject.capture(half, sites, positions=positions, batch_tokens=self.batch_tokens)
        return by_location(capture, points)

    def means(self, points: Sequence[Point], positions: Positions) -> dict[Location, Tensor]:
        """[position coordinate] means over the estimation half, position by position, so that position stays known."""
        n = len(self.estimation)
        activations = self._capture(self.estimation, points, positions).items()
        return {at: x.unflatten(0, (n, -1)).mean(0) for at, x in activations}

    def activations(self, points: Sequence[Point], positions: Positions) -> dict[Location, Tensor]:
        """[row coordinate] of the evaluation half at the edited positions, sequence after sequence."""
        return self._capture(self.evaluation, points, positions)

    def record(
        self, results: Mapping[str, Measured], unmeasured: Mapping[str, str], nulls: int, facts: Mapping[str, Any]
    ) -> Record:
        """The record of what was measured on the evaluation half; a sequence's entropy is the mean over its queries."""
        nats = self.subject.capture(self.evaluation, {Site.ENTROPY}, batch_tokens=self.batch_tokens).entropy
        entropy = bits(nats.double().numpy()).reshape(len(self.evaluation), -1).mean(1)
        return self.recorded(entropy, results, unmeasured, nulls, facts)


def by_location(capture: Capture, points: Sequence[Point]) -> dict[Location, Tensor]:
    """[row coordinate] float64 at these points of each layer."""
    return {(point, n): x.flatten(1).double() for point in points for n, x in enumerate(capture.layers(Site(point)))}
