"""Interchange interventions as a probe of a task, and the question that a command or a bench asks with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from llmgeom.errors import UserError
from llmgeom.model.batching import BATCH_TOKENS
from llmgeom.model.capture import Capture
from llmgeom.model.subject import Subject
from llmgeom.probe import Needs, ProbeInput
from llmgeom.probes.interventions import hypothesis_frame
from llmgeom.probes.interventions.interchange import InterchangeEffects, Pairs
from llmgeom.probes.interventions.interchange_results import PROBE, Interchange, measure_interchange
from llmgeom.probes.interventions.patching import copies
from llmgeom.progress import Progress
from llmgeom.provenance import few_draws
from llmgeom.record import Record
from llmgeom.run import CONTROLS, Question
from llmgeom.task import Task

SUBSPACES = 39  # random controls


@dataclass(frozen=True)
class InterchangeProbe:
    """Interchange interventions on sequences of a task and their counterfactuals, at one layer's input at a time.

    Attributes:
        n: sequences drawn; those in which other evidence changes a later answer are used.
        layers: whose inputs are patched.
        controls: random subspaces, of the model itself only, as is the placebo.
        seed: of sequences, donors, halves and subspaces.
    """

    task: Task
    n: int
    layers: tuple[int, ...]
    controls: int
    seed: int
    batch_tokens: int
    progress: Progress | None = field(default=None, compare=False)

    @cached_property
    def halves(self) -> tuple[Pairs, Pairs]:
        """Estimation and evaluation half. Raises UserError as `Pairs.of` and `Pairs.halves`."""
        return Pairs.of(self.task, self.n, self.seed, self.task.test_split).halves(self.seed)

    @cached_property
    def NEEDS(self) -> Needs:
        return Needs(
            shuffled=False,
            no_context=False,
            examine=self._with_controls,
            examine_control=lambda subject, _: self._effects(subject),
            collect=lambda _, arrays: InterchangeEffects.of_arrays(arrays),
            cost=lambda _, batch: self._cost(4 + 2 * self.controls),
            control_cost=lambda _, batch: self._cost(3),
        )

    def measure(self, data: ProbeInput) -> Interchange:
        """Total and patched effects at every layer, with all controls."""
        clusters = np.array(self.halves[1].x.cluster)
        return measure_interchange(data.observations, data.control_observations, self.layers, clusters)

    def _with_controls(self, subject: Subject, _: Mapping[str, Capture]) -> dict[str, np.ndarray]:
        donors = self.halves[1].donors(self.seed, self.task.test_split)
        return self._effects(subject, controls=self.controls, donors=donors, progress=self.progress)

    def _effects(self, subject: Subject, **more: Any) -> dict[str, np.ndarray]:
        options = {"seed": self.seed, "batch_tokens": self.batch_tokens, **more}
        return InterchangeEffects.of(subject, *self.halves, self.layers, **options).arrays

    def _cost(self, patches: int) -> list[tuple[int, Any]]:
        """Residuals and answers of both sequences of a pair, donors, and every patch at every layer."""
        estimation, evaluation = (half.x.tokens.lengths.numpy() for half in self.halves)
        donors = np.full(int(self.halves[1].at.sum()) * (patches > 3), self.task.length)
        passes = 4 + len(self.layers) * copies(len(evaluation), patches)
        return [(2, estimation), (passes, evaluation), (1, donors)]


def examine(subject: Subject, task: Task, *, progress: Progress | None = None, **options: Any) -> Record:
    """Interchange interventions in a model, on a task, without a store; options as of `question`."""
    return question(subject, task, progress=progress, **options).record(subject, progress=progress)


def question(
    subject: Subject,
    task: Task,
    *,
    n: int = 200,
    layers: Sequence[int] | None = None,
    controls: int = SUBSPACES,
    nulls: int = CONTROLS,
    seed: int = 0,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress | None = None,
    warnings: Sequence[str] = (),
) -> Question:
    """What interchange interventions in a model ask of it, on a task.

    Args:
        layers: whose inputs are patched, one at a time; all by default.
        controls: random subspaces.

    Raises:
        UserError: a layer that does not exist; a task without counterfactuals; fewer than 5 sequences in a half whose
            answers change.
    """
    chosen = chosen_layers(subject, layers)
    probe = InterchangeProbe(task, n, chosen, controls, seed, batch_tokens, progress)
    estimation, evaluation = probe.halves
    patched = {"layers": list(chosen), "controls": controls, "positions": float(evaluation.at.sum(1).double().mean())}
    return Question(
        evaluation.x,
        {PROBE: probe, hypothesis_frame.PROBE: hypothesis_frame},
        nulls,
        seed,
        batch_tokens,
        facts={"estimated on": len(estimation.x), "interchange": patched},
        notes=(*warnings, *few_draws(controls)),
    )


def chosen_layers(subject: Subject, layers: Sequence[int] | None) -> tuple[int, ...]:
    """The layers that are patched, all by default. Raises UserError for one that does not exist."""
    last = len(subject.blocks) - 1
    chosen = tuple(sorted(set(range(last + 1) if layers is None else layers)))
    if wrong := [layer for layer in chosen if not 0 <= layer <= last]:
        raise UserError(f"--layers {wrong[0]}: {subject.name} has layers 0 to {last}; nothing was patched")
    return chosen
