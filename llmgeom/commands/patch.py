"""The whole of `llmgeom patch`: interchange interventions between a task's sequences and their counterfactuals."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from llmgeom import claims
from llmgeom.commands import config
from llmgeom.commands.grade import Told
from llmgeom.commands.output import VerdictOutput, show_record
from llmgeom.errors import UserError
from llmgeom.flags import LARGEST_SEED, flag
from llmgeom.model.batching import BATCH_TOKENS
from llmgeom.model.capture import Site
from llmgeom.model.subject import Subject
from llmgeom.probes.interventions import hypothesis_frame
from llmgeom.probes.interventions.hypothesis_frame import HypothesisFrames, measure_frames, read_frames
from llmgeom.probes.interventions.interchange import InterchangeEffects, Pairs
from llmgeom.probes.interventions.interchange_results import PROBE, UNTRAINED, measure_interchange
from llmgeom.probes.interventions.splits import EstimationSplit
from llmgeom.progress import Progress
from llmgeom.provenance import took
from llmgeom.record import Record
from llmgeom.result import Result
from llmgeom.run import CONTROLS, few_draws
from llmgeom.stats.information import bits
from llmgeom.task import Task

SUBSPACES = 39


def examine(
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
    facts: Mapping[str, Any] | None = None,
) -> Record:
    """Interchange interventions in a model, on a task.

    Args:
        layers: whose inputs are patched, one at a time; all by default.
        controls: random subspaces.

    Raises:
        UserError: a layer that does not exist; a task without counterfactuals; fewer than 5 sequences in a half whose
            answers change.
    """
    started, last = time.time(), len(subject.blocks) - 1
    chosen = tuple(sorted(set(range(last + 1) if layers is None else layers)))
    if wrong := [layer for layer in chosen if not 0 <= layer <= last]:
        raise UserError(f"--layers {wrong[0]}: {subject.name} has layers 0 to {last}; nothing was patched")
    split = task.test_split
    pairs = Pairs.of(task, n, seed, split)
    estimation, evaluation = pairs.halves(seed)
    effects = partial(
        InterchangeEffects.of,
        estimation=estimation,
        evaluation=evaluation,
        layers=chosen,
        seed=seed,
        batch_tokens=batch_tokens,
    )
    own = effects(subject, controls=controls, donors=evaluation.donors(seed, split), progress=progress)
    untrained, frames, unmeasured = [], [], {}

    def read(model: Subject) -> None:
        try:
            frames.append(read_frames(model, pairs.x))
        except UserError as refusal:
            unmeasured[hypothesis_frame.PROBE] = str(refusal)

    read(subject)
    for i in range(nulls):
        control = subject.untrained(seed + 1 + i)
        untrained.append(effects(control))
        if not unmeasured:
            read(control)
        if progress:
            progress(UNTRAINED, i + 1, nulls)
    measures: dict[str, Callable[[], Result]] = {
        PROBE: lambda: measure_interchange(own, untrained, chosen, np.array(evaluation.x.cluster))
    }
    if not unmeasured:
        measures[hypothesis_frame.PROBE] = lambda: _frames(frames)
    results = {}
    for name, measure in measures.items():
        try:
            results[name] = measure().lowered()
        except UserError as refusal:
            unmeasured[name] = str(refusal)
    nats = subject.capture(evaluation.x, {Site.ENTROPY}, batch_tokens=batch_tokens).entropy
    entropy = bits(nats.double().numpy()).reshape(len(evaluation.x), -1).mean(1)
    halves = EstimationSplit(subject, evaluation.x, pairs.x, estimation.x, evaluation.x, seed, batch_tokens)
    patched = {"layers": list(chosen), "controls": controls, "positions": float(evaluation.at.sum(1).double().mean())}
    return replace(
        halves.recorded(entropy, claims.judge(results), unmeasured, nulls, {"interchange": patched, **(facts or {})}),
        warnings=(*warnings, *few_draws(nulls), *few_draws(controls)),
        run=took(started),
    )


def _frames(frames: Sequence[HypothesisFrames]) -> Result:
    return measure_frames(frames[0], frames[1:])


@dataclass(frozen=True)
class RunConfig(config.ModelConfig):
    """What `llmgeom patch` is asked for."""

    VERB: ClassVar[str] = "patch"

    task: str | None = flag(None, "NAME or NAME:field=value,... [default: the task the model was trained on]")
    n: int = flag(200, "Sequences; half of them estimate the subspace that is patched.", least=20)
    layers: str = flag("all", "Patch the input of these layers, one at a time: all, or e.g. 0,1.")
    controls: int = flag(39, "Random subspaces.", least=1)
    nulls: int = flag(20, "Untrained controls.", least=1)
    batch_tokens: int = flag(4096, "Tokens in a batch.", least=1, most=LARGEST_SEED)
    seed: int = flag(0, "Fixes sequences, donors, halves and controls.", least=0, most=LARGEST_SEED)
    out: str | None = flag(None, "Run folder. [default: runs/MODEL-patch-TASK-HASH]", group="Output")


@config.command(RunConfig, VerdictOutput, examples=["llmgeom patch --model runs/bijection --layers 0,1"])
def main(asked: RunConfig, output: VerdictOutput) -> int:
    """Exchange evidence inside a model, and compare its answer with the exact counterfactual.

    An interchange intervention: activations of one sequence replace those of another.
    """
    return show_record(perform, asked, output)


def perform(asked: RunConfig, progress: Progress | None = None, subject: Subject | None = None) -> tuple[Path, Record]:
    """The whole of `llmgeom swap`: check, load, examine, save the record and its page; (folder, record)."""
    layers = None
    if asked.layers != "all":
        layers = config.numbers("--layers", asked.layers, "all", "0,1")
    located = asked.locate()
    told = Told.of(located.path)
    task = told.asked(asked.task, asked.model)
    spec = asked.spec(located)
    what = f"patch-{type(task).__name__.lower()}"
    out = Path(asked.out) if asked.out else config.run_folder(asked.model, located, what, spec)
    config.check_folder(out, spec)
    record = examine(
        subject or asked.load(located),
        task,
        n=asked.n,
        layers=layers,
        controls=asked.controls,
        nulls=asked.nulls,
        seed=asked.seed,
        batch_tokens=asked.batch_tokens,
        progress=progress,
        warnings=tuple(told.doubts(task)),
        facts={"spec": spec, "command": asked.command()},
    )
    config.keep(record, out)
    return out, record
