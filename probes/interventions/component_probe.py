"""Probes of component ablation: one method applied to every head or block of a model and its untrained controls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from llmgeom.probe import Batch, Capture, Measured, Needs, Probe, ProbeInput, Subject, Unavailable, UserError
from llmgeom.probes.interventions.component_ablation import (
    DONORS,
    METHODS,
    AblationEffects,
    Kind,
    Method,
    sites,
)
from llmgeom.probes.interventions.component_results import (
    check_trainings,
    measure_blocks,
    measure_heads,
    measure_trainings,
    titled,
)
from llmgeom.probes.interventions.patching import flat, nested
from llmgeom.probes.interventions.splits import (
    ESTIMATION,
    EVALUATION,
    PROMPT_SITES,
    Positions,
    PromptSplit,
    TaskSplit,
    check_prompts,
    check_task,
    halves,
)
from llmgeom.progress import tell
from llmgeom.run import BATCH_TOKENS, CONTROLS, Question
from llmgeom.stats.ridge_probe import folds
from llmgeom.task import Task

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class OtherTraining:
    """Another training of the same architecture; `weights` is their hash, and `load` is called at most once."""

    name: str
    weights: str
    load: Callable[[], Subject] = field(compare=False)

    @classmethod
    def of(cls, subject: Subject) -> OtherTraining:
        """From a model in memory."""
        return cls(subject.name, subject.weight_hash, lambda: subject)

    @cached_property
    def subject(self) -> Subject:
        """The model."""
        return self.load()


@dataclass(frozen=True)
class ComponentAblation:
    """The ablation of every component by every method, computed once for each model.

    Attributes:
        task: the task of whole sequences; None for prompts, which are read at their final tokens.
        estimation: the half that gives the means.
    """

    kind: Kind
    positions: Positions
    estimation: Batch = field(compare=False)  # its captures are in the key
    seed: int
    batch_tokens: int
    task: Task | None = None

    @cached_property
    def methods(self) -> tuple[Method, ...]:
        """The methods; without resampling at all positions of prompts, which differ in length."""
        left_out = {"resample"} if self.task is None and self.positions == "all" else set()
        return tuple(method for method in METHODS[self.kind] if method not in left_out)

    @property
    def needs(self) -> Needs:
        """Needs of the clean model and of every untrained control."""
        here = sites(self.kind) if self.task is None or self.positions == "query" else set()
        return Needs(
            sites=frozenset(here) | (PROMPT_SITES if self.task is None else frozenset()),
            shuffled=False,
            no_context=False,
            samples=frozenset({ESTIMATION}),
        )

    def split(self, subject: Subject, captures: Mapping[str, Capture]) -> PromptSplit | TaskSplit:
        """The halves of the batch, from captures of both."""
        if self.task is None:
            return PromptSplit.of(subject, captures, self.seed, self.batch_tokens)
        return TaskSplit(subject, captures, self.seed, self.batch_tokens, self.task)

    @cached_property
    def _effects_by_model(self) -> WeakKeyDictionary[Subject, AblationEffects]:
        return WeakKeyDictionary()

    def effects(self, subject: Subject, captures: Mapping[str, Capture]) -> AblationEffects:
        """Effects of each ablation in one model. Raises Unavailable for layers whose heads differ in size."""
        if subject not in self._effects_by_model:
            split = self.split(subject, captures)
            self._effects_by_model[subject] = AblationEffects.of(split, self.kind, self.positions)
        return self._effects_by_model[subject]

    def effects_of(self, other: OtherTraining, captures: Mapping[str, Capture]) -> AblationEffects:
        """`effects` in another training, which reads both halves here."""
        model, sites = other.subject, self.needs.sites | {"entropy"}
        read = partial(model.capture, sites=sites, batch_tokens=self.batch_tokens)
        return self.effects(model, {half: read(captures[half].batch) for half in (ESTIMATION, EVALUATION)})


@dataclass(frozen=True)
class ComponentProbe:
    """A probe for one method of an ablation."""

    ablation: ComponentAblation
    method: Method

    @cached_property
    def NEEDS(self) -> Needs:
        return replace(self.ablation.needs, examine=self._examine)

    def _examine(self, subject: Subject, captures: Mapping[str, Capture]) -> Arrays:
        return self.ablation.effects(subject, captures).arrays(self.method)

    def measure(self, data: ProbeInput) -> Measured:
        """Raises UserError if no ablated component reaches the answers."""
        own, *untrained = (self._effects(data, arrays) for arrays in (data.observations, *data.control_observations))
        measure = measure_heads if self.ablation.kind == "heads" else measure_blocks
        return titled(measure(own, self.method, untrained, self._half(data)), self.method)

    def _effects(self, data: ProbeInput, arrays: Mapping[str, Any]) -> AblationEffects:
        ablation, clusters = self.ablation, np.array(data.capture.batch.cluster)
        return AblationEffects.of_arrays(ablation.kind, ablation.positions, self.method, clusters, nested(arrays))

    def _half(self, data: ProbeInput) -> np.ndarray:
        return folds(data.capture.batch.cluster, self.ablation.seed, 2)


@dataclass(frozen=True)
class TrainingsProbe(ComponentProbe):
    """A probe over several trainings of one architecture; each training counts once."""

    others: tuple[OtherTraining, ...]
    name: str

    @cached_property
    def NEEDS(self) -> Needs:
        return replace(
            self.ablation.needs,
            check=lambda _: check_trainings(1 + len(self.others)),
            examine=self._trainings,
            examine_control=self._examine,
        )

    def _trainings(self, subject: Subject, captures: Mapping[str, Capture]) -> Arrays:
        every = [self.ablation.effects(subject, captures)]
        for done, other in enumerate(self.others, 1):
            self._check(other, subject, done)
            every.append(self.ablation.effects_of(other, captures))
            if every[-1].components != every[0].components:
                raise UserError(
                    f"{other.name} has {len(every[-1].components)} {self.ablation.kind}, {subject.name} "
                    f"{len(every[0].components)}, so it is not another training of the same model"
                )
            tell("other trainings", done, len(self.others))
        return flat({str(i): model.arrays(self.method) for i, model in enumerate(every)})

    def _check(self, other: OtherTraining, subject: Subject, number: int) -> None:
        """Raise UserError if the other model, of this number, learnt another task or was given before: each training is
        one draw, and the interval over them is that of independent ones."""
        tasks = [model.facts.get("trained_on") for model in (other.subject, subject)]
        if tasks[0] != tasks[1]:
            what, ours = (task or "no task" for task in tasks)
            raise UserError(
                f"{other.name} was trained on {what}, {subject.name} on {ours}, so it is not another training of the "
                "same model"
            )
        for name, model in [(subject.name, subject), *((x.name, x.subject) for x in self.others[: number - 1])]:
            if other.subject.same_weights(model):
                raise UserError(
                    f"{name} and {other.name} hold the same weights, so they are one training and not two: give it once"
                )

    def measure(self, data: ProbeInput) -> Measured:
        """Raises UserError if no ablation of a model reaches its output."""
        ablation, names = self.ablation, (self.name, *(other.name for other in self.others))
        observed = nested(data.observations)
        every = [self._effects(data, observed[str(i)]) for i in range(len(names))]
        untrained = [self._effects(data, arrays) for arrays in data.control_observations]
        result = measure_trainings(ablation.kind, self.method, every, names, untrained, self._half(data))
        return titled(result, self.method)


def question(
    subject: Subject,
    batch: Batch,
    kind: Kind,
    *,
    task: Task | None = None,
    also: Sequence[OtherTraining] = (),
    positions: Positions = "all",
    nulls: int = CONTROLS,
    seed: int = 0,
    batch_tokens: int = BATCH_TOKENS,
) -> Question:
    """The question that ablates every head, or every block, by each method, in the model and in `nulls` controls.

    Args:
        task: the task of the batch's whole sequences; None for prompts, which are read at their final tokens.
        also: other trainings of the same architecture.
        nulls: None for as many as the claims need, at most 20.

    Raises:
        UserError: fewer than 5 clusters in a half; a batch that has query positions but no task; a task of real
            numbers, or with more tokens than the model has outputs; a model without such components.
    """
    check_task(subject, task) if task else check_prompts(batch)
    if why := subject.partial(sites(kind)):
        raise Unavailable(f"{subject.name}: {why}")
    estimation, evaluation = halves(batch, seed)
    ablation = ComponentAblation(kind, positions, estimation, seed, batch_tokens, task)
    probes: dict[str, Probe] = {}
    for method in ablation.methods:
        probes[f"{kind}_{method}"] = ComponentProbe(ablation, method)
        if also:
            probes[f"{kind}_{method}_trainings"] = TrainingsProbe(ablation, method, tuple(also), subject.name)
    about = {"kind": kind, "methods": list(ablation.methods), "positions": positions, "donors": DONORS}
    facts = {"estimated on": len(estimation), "components": about}
    return Question(evaluation, probes, nulls, seed, batch_tokens, {ESTIMATION: estimation}, facts)
