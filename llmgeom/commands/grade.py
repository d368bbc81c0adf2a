"""The whole of `llmgeom grade`: how near are a model's answers in a wind tunnel to the exact posterior?"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from llmgeom import claims, wind_tunnels
from llmgeom.commands import config
from llmgeom.commands.output import VerdictOutput, show_record
from llmgeom.errors import UserError
from llmgeom.flags import LARGEST_SEED, flag
from llmgeom.model import hub
from llmgeom.model.subject import Subject
from llmgeom.probes.posterior.answers import grade, score_model
from llmgeom.probes.posterior.memory import STATES, measure_states, require_skill, require_useless
from llmgeom.probes.posterior.results import (
    CALIBRATION,
    HORIZON,
    MEMORY,
    MIXTURE,
    POSTERIOR,
    measure_calibration,
    measure_distance,
    measure_horizon,
    measure_memory,
)
from llmgeom.probes.posterior.scores import Scores, evaluation_batch, score
from llmgeom.probes.posterior.state_table import MOST, StateTable
from llmgeom.progress import Progress
from llmgeom.prompt_table import prompt_table
from llmgeom.provenance import provenance, took
from llmgeom.record import Record
from llmgeom.reports.text import grid
from llmgeom.result import Result
from llmgeom.run import CONTROLS, few_draws
from llmgeom.task import Task
from llmgeom.wind_tunnels.checkpoint import TRAINING, read_facts
from llmgeom.wind_tunnels.exactness import require_exact

__all__ = ["RunConfig", "examine", "grade", "perform", "table"]


@dataclass(frozen=True)
class Told:
    """What a folder says of how its model was trained: task.json and training.json; empty where they are not there."""

    task: str = ""
    trained: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    folder: str = ""

    @classmethod
    def of(cls, folder: str) -> Told:
        if not hub.tunnel(folder):
            return cls()
        found, beside = hub.tunnel_facts(folder), Path(folder) / TRAINING
        return cls(found["trained_on"], found["trained_queries"], read_facts(beside) if beside.exists() else {}, folder)

    def asked(self, spec: str | None, model: str) -> Task:
        """The task of a spec, or else the model's own. Raises UserError where there is neither, and for one that breaks
        its laws, or is code that came with the model."""
        if not (spec or self.task):
            raise UserError(
                f"{model} was trained on no task (no {hub.TUNNEL} next to its weights); name one with --task"
            )
        try:
            task = wind_tunnels.load_task(spec or hub.trusted(self.task, self.folder))
        except UserError as refusal:
            raise refusal if spec else UserError(f"{self.folder}/{hub.TUNNEL}: {refusal}") from refusal
        require_exact(task)
        return task

    @property
    def corrupt(self) -> float:
        return float(self.facts.get("training", {}).get("corrupt", 0.0))

    def doubts(self, task: Task) -> Iterator[str]:
        """What could overturn a verdict about this task."""
        if not self.task:
            yield "never trained on this task: it has no task.json"
        elif self.task.partition(":")[0] != task.title.partition(":")[0]:
            yield f"never trained on this task, but on {self.task}"
        if self.facts.get("step") == 0:
            yield "untrained: the weights of step 0"

    def sizes(self, task: Task, parameters: int) -> str:
        """Could a table have been learnt? One sentence."""
        prior = f"2^{task.log2_hypotheses:.1f} hypotheses"
        if math.isinf(task.log2_hypotheses):
            prior = "a continuum of hypotheses"
        drew = "how many sequences training drew is not known"
        if "sequences" in self.facts:
            drew = f"training drew {self.facts['sequences']:,} sequences"
        return f"the prior is over {prior}; {drew}; the model has {parameters:,} parameters"


def examine(
    subject: Subject,
    task: Task,
    told: Told,
    *,
    n: int = 1000,
    seed: int = 0,
    nulls: int = CONTROLS,
    progress: Progress | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Record:
    """Score the model and `nulls` untrained controls on n held-out sequences and as many seen ones."""
    started, corrupt = time.time(), told.corrupt
    trained = min(task.trained_queries, told.trained or task.trained_queries)
    found = {POSTERIOR: grade(subject, task, n, seed, trained=trained)}
    if corrupt:
        found[MIXTURE] = grade(subject, task, n, seed, trained=trained, corrupt=corrupt)
    own = found[MIXTURE if corrupt else POSTERIOR]
    batches = {name: one.batch for name, one in found.items()}
    if not task.memorisable:
        batches[MEMORY] = evaluation_batch(task, n, seed, "seen", corrupt)
    untrained: dict[str, list[Scores]] = {name: [] for name in batches}
    for i in range(nulls):
        control = subject.untrained(seed + 1 + i)
        for name, batch in batches.items():
            untrained[name].append(score_model(control, task, batch))
        if progress:
            progress("untrained controls", i + 1, nulls)
    same = untrained[MIXTURE if corrupt else POSTERIOR]
    sizes = told.sizes(task, subject.facts["parameters"])
    table = StateTable.filled(task, int(told.facts.get("sequences") or MOST), seed)
    rivals = {}
    if table:
        rivals[f"table of {table.sequences:,} seen"] = score(task, own.batch, table.answers(own.batch.tokens.data))
    asked = "any hypothesis" if task.memorisable else "hypotheses held out of training"
    drawn_from = [f"{n} sequences of {asked}", *[f"trained on {told.task}"] * (told.task not in ("", task.title))]
    measures: dict[str, Callable[[], Result]] = {
        name: partial(measure_distance, name, one, untrained[name], (*drawn_from, sizes), rivals)
        for name, one in found.items()
    }
    measures[CALIBRATION] = lambda: measure_calibration(own, same)
    unmeasured = {}
    if task.memorisable:
        unmeasured[MEMORY] = f"memorisable: {task.memorisable}"
    else:
        seen = score_model(subject, task, batches[MEMORY])
        measures[MEMORY] = lambda: measure_memory(own, seen, untrained[MEMORY], (sizes,))
        try:
            require_skill(seen.kl[:, own.within], own)
            for rival in rivals.values():
                require_useless(table, rival.kl, own)
        except UserError as refusal:
            unmeasured[MEMORY] = str(refusal)
            del measures[MEMORY]
    if told.facts.get("training", {}).get("hold_out") == "states":
        measures[STATES] = lambda: measure_states(own, task.held_out_states(own.batch.tokens.data).numpy(), (sizes,))
    if trained < len(task.query):
        measures[HORIZON] = lambda: measure_horizon(own, same)
    results = {}
    for done, (name, measure) in enumerate(measures.items(), 1):
        try:
            results[name] = measure().lowered()
        except UserError as refusal:
            unmeasured[name] = str(refusal)
        if progress:
            progress("measuring", done, len(measures))
    batch, tokens = own.batch, subject.tokens(own.batch)
    within = own.own.at(own.within)
    prompts = prompt_table(subject, batch, tokens, within.entropy.mean(1))
    return Record(
        results=claims.judge(results),
        unmeasured=unmeasured,
        prompts={
            **prompts,
            "exact entropy": tuple(within.exact.mean(1).round(6).tolist()),
            "KL": tuple(within.kl.mean(1).round(6).tolist()),
        },
        subject={k: v for k, v in subject.facts.items() if v is not None},
        source=dict(batch.source),
        facts={
            **provenance(batch, tokens, seed, nulls),
            "trained on": told.task,
            "horizon": trained,
            "corrupt": corrupt,
            "sizes": sizes,
            **(facts or {}),
        },
        warnings=(
            *told.doubts(task),
            *[f"memorisable: {task.memorisable}"] * bool(task.memorisable),
            *(
                f"{name} is exact here: this task does not ask for what it leaves out; skill is against another"
                for name in found[POSTERIOR].as_exact
            ),
            *few_draws(nulls),
        ),
        run=took(started),
    )


def table(record: Record) -> Iterator[str]:
    """KL and errors of entropy of the model and of every trivial predictor, as lines for a terminal."""
    for probe in (POSTERIOR, MIXTURE):
        if probe in record.results:
            measured = record.results[probe]
            columns = [measured.arrays[f"predictor{of}"] for of in ("", "_mae_abs", "_mae_mean")]
            rows = [
                (name, *(f"{x:.4f}" for x in row))
                for name, row in zip(measured.ticks["predictor"], zip(*columns, strict=True), strict=True)
            ]
            yield from grid(probe, ("KL [bits]", "mae_abs [bits]", "mae_mean [bits]"), rows)


@dataclass(frozen=True)
class RunConfig(config.ModelConfig):
    """What `llmgeom grade` is asked for."""

    VERB: ClassVar[str] = "grade"

    task: str | None = flag(None, "NAME or NAME:field=value,... [default: the task the model was trained on]")
    n: int = flag(1000, "Held-out sequences, and as many seen ones.", least=10)
    nulls: int = flag(20, "Untrained controls.", least=1)
    seed: int = flag(0, "Fixes sequences and nulls.", least=0, most=LARGEST_SEED)
    out: str | None = flag(None, "Run folder. [default: runs/MODEL-grade-TASK-HASH]", group="Output")


@config.command(RunConfig, VerdictOutput, examples=["llmgeom grade --model runs/tunnel --n 1000"])
def main(asked: RunConfig, output: VerdictOutput) -> int:
    """Compare a wind-tunnel model's answers with the exact posterior, and with predictors that do not infer."""
    return show_record(perform, asked, output, table)


def perform(asked: RunConfig, progress: Progress | None = None, subject: Subject | None = None) -> tuple[Path, Record]:
    """The whole of `llmgeom grade`: check, load, grade, save the record and its page; (folder, record)."""
    if asked.backend != "transformers":
        raise UserError(f"--backend {asked.backend}: a model is graded through its own forward pass; leave it out")
    located = asked.locate()
    told = Told.of(located.path)
    task = told.asked(asked.task, asked.model)
    spec = asked.spec(located)
    what = f"grade-{type(task).__name__.lower()}"
    out = Path(asked.out) if asked.out else config.run_folder(asked.model, located, what, spec)
    config.check_folder(out, spec)
    subject = subject or asked.load(located)
    own = {"spec": spec, "command": asked.command()}
    record = examine(subject, task, told, n=asked.n, seed=asked.seed, nulls=asked.nulls, progress=progress, facts=own)
    config.keep(record, out)
    return out, record
