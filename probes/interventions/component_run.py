"""A run of component ablation: every head or block of a model and of its untrained controls, in one record."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from llmgeom import claims
from llmgeom.batch import Batch
from llmgeom.errors import UserError
from llmgeom.model.batching import BATCH_TOKENS
from llmgeom.model.subject import Positions, Subject
from llmgeom.probes.interventions.component_ablation import DONORS, AblationEffects, Kind, Method, sites
from llmgeom.probes.interventions.component_metrics import UNTRAINED
from llmgeom.probes.interventions.component_results import measure_blocks, measure_heads, measure_trainings, titled
from llmgeom.probes.interventions.splits import PromptSplit, TaskSplit
from llmgeom.progress import Progress
from llmgeom.provenance import took
from llmgeom.record import Record
from llmgeom.result import Result
from llmgeom.run import CONTROLS, few_draws
from llmgeom.stats.ridge_probe import folds
from llmgeom.task import Task


def examine_components(
    subject: Subject,
    batch: Batch,
    kind: Kind,
    *,
    task: Task | None = None,
    also: Sequence[Subject] = (),
    positions: Positions = "query",
    nulls: int = CONTROLS,
    seed: int = 0,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Record:
    """Ablate every head, or every block, by each method, in the subject and in `nulls` untrained controls.

    Args:
        task: the task whose whole sequences the batch holds; None for prompts, which are read at their ends.
        also: other trainings of the same architecture.

    Raises:
        UserError: fewer than 5 clusters in a half; a batch with query positions of its own and no task; writes that are
            not known; models whose components are not those of the first.
    """
    started = time.time()

    def split_of(model: Subject) -> PromptSplit | TaskSplit:
        if task:
            return TaskSplit.of(model, batch, task, seed, batch_tokens)
        return PromptSplit.of(model, batch, sites(kind), seed, batch_tokens)

    def tell(done: int, total: int) -> None:
        if progress:
            progress(kind, done, total)

    def ablated(stage: str, model: Callable[[int], Subject], count: int) -> list[AblationEffects]:
        made = []
        for i in range(count):
            made.append(AblationEffects.of(split_of(model(i)), kind, positions))
            if progress:
                progress(stage, len(made), count)
        return made

    split = split_of(subject)
    own = AblationEffects.of(split, kind, positions, tell)
    others = ablated("other trainings", also.__getitem__, len(also))
    for model, other in zip(also, others, strict=True):
        if other.components != own.components:
            raise UserError(
                f"{model.name} has {len(other.components)} {kind}, {subject.name} "
                f"{len(own.components)}, so it is not another training of the same model"
            )
    untrained = ablated(UNTRAINED, lambda i: subject.untrained(seed + 1 + i), nulls)
    half, measure = folds(own.clusters, seed, 2), measure_heads if kind == "heads" else measure_blocks
    names = [model.name for model in (subject, *also)]

    def over_trainings(method: Method) -> Result:
        return measure_trainings(kind, method, [own, *others], names, untrained, half)

    results, unmeasured = {}, {}
    for method in own.effects:
        measures: dict[str, Callable[[], Result]] = {f"{kind}_{method}": partial(measure, own, method, untrained, half)}
        if also:
            measures[f"{kind}_{method}_trainings"] = partial(over_trainings, method)
        for name, make in measures.items():
            try:
                results[name] = titled(make(), method)
            except UserError as refusal:
                unmeasured[name] = str(refusal)
    ablation = {"kind": kind, "methods": list(own.effects), "positions": positions, "donors": DONORS}
    return replace(
        split.record(claims.judge(results), unmeasured, nulls, {"components": ablation, **(facts or {})}),
        warnings=(*few_draws(nulls), *filter(None, [subject.facts.get("note")])),
        run=took(started),
    )
