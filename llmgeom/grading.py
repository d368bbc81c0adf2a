"""Grading: how a model was trained, and the probes that compare its answers with the exact posterior."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from llmgeom import wind_tunnels
from llmgeom.errors import UserError
from llmgeom.model import hub
from llmgeom.model.batching import BATCH_TOKENS
from llmgeom.model.model import Model
from llmgeom.plan import Plan
from llmgeom.probes.posterior import grading, results
from llmgeom.probes.posterior.grading import MOST, GradeProbe, answer_observer, check_readable
from llmgeom.probes.posterior.results import CALIBRATION, HORIZON, MEMORY, MIXTURE, POSTERIOR, STATES
from llmgeom.probes.posterior.scores import LAST, Evaluation, as_exact
from llmgeom.provenance import CONTROLS
from llmgeom.record import Record
from llmgeom.wind_tunnels.checkpoint import TRAINING, read_facts
from llmgeom.wind_tunnels.exactness import require_exact
from llmgeom.world import World


@dataclass(frozen=True)
class Origin:
    """How a model was trained, as its folder says: task.json and training.json; empty where they are missing."""

    task: str = ""
    trained: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    folder: str = ""

    @classmethod
    def of(cls, folder: str) -> Origin:
        """Read a model's folder. Raises UserError for a damaged one."""
        if not hub.tunnel(folder):
            return cls()
        about, path = hub.tunnel_facts(folder), Path(folder) / TRAINING
        return cls(about["trained_on"], about["trained_queries"], read_facts(path) if path.exists() else {}, folder)

    def load_world(self, spec: str | None, model: str) -> World:
        """The task of a spec, or else the model's own.

        Raises UserError: there is neither; the task breaks its laws; it is code that came with the model.
        """
        if not (spec or self.task):
            raise UserError(
                f"{model} was trained on no task (no {hub.TUNNEL} next to its weights): give the folder of an "
                "`llmgeom train` with --model, or a task with --task"
            )
        try:
            task = wind_tunnels.load_world(spec or hub.trusted(self.task, self.folder))
        except UserError as refusal:
            raise refusal if spec else UserError(f"{self.folder}/{hub.TUNNEL}: {refusal}") from refusal
        require_exact(task)
        return task

    def doubts(self, task: World) -> Iterator[str]:
        """Doubts about a verdict on this task."""
        if not self.task:
            yield "never trained on this task: it has no task.json"
        elif self.task.partition(":")[0] != task.title.partition(":")[0]:
            yield f"never trained on this task, but on {self.task}"
        elif self.facts.get("code") not in (None, task.FILE_HASH):
            yield "the file of the task has changed since the training"
        if self.facts.get("step") == 0:
            yield "untrained: the weights of step 0"

    def sizes(self, task: World, parameters: int) -> str:
        """Could a table have been learnt? One sentence."""
        prior = f"2^{task.log2_hypotheses:.1f} hypotheses"
        if math.isinf(task.log2_hypotheses):
            prior = "a continuum of hypotheses"
        drew = "how many sequences training drew is not known"
        if "sequences" in self.facts:
            drew = f"training drew {self.facts['sequences']:,} sequences"
        return f"the prior is over {prior}; {drew}; the model has {parameters:,} parameters"


def question(
    subject: Model,
    task: World,
    origin: Origin,
    *,
    n: int = 6000,
    seed: int = 0,
    nulls: int = CONTROLS,
    batch_tokens: int = BATCH_TOKENS,
) -> Plan:
    """Ask a model and `nulls` untrained controls n held-out sequences of a task and, where it has them, n seen ones.

    Raises UserError: the model is edited, or has too few outputs; targets were corrupted and the task asks for numbers.
    """
    check_readable(subject, task)
    training = origin.facts.get("training", {})
    corrupt = float(training.get("corrupt", 0.0))  # the probability with which it drew a target again
    trained = min(task.trained_queries, origin.trained or task.trained_queries)
    exact = Evaluation(task, n, seed, task.test_split, trained)
    trained_on = replace(exact, corrupt=corrupt) if corrupt else exact
    sizes = origin.sizes(task, subject.facts["parameters"])
    asked = "any hypothesis" if task.memorisable else "hypotheses held out of training"
    other = [f"trained on {origin.task}"] * (origin.task not in ("", task.title))
    drawn = (f"{n} sequences of {asked}", *other)
    held_out = training.get("hold_out") == "states"  # it had no loss in some of them
    drew, observer = int(origin.facts.get("sequences", MOST)), answer_observer(task, grading.SEEN)
    # Name -> what is measured, in the order of the page; `trained_on` has the targets as training drew them.
    asks: dict[str, tuple[Evaluation, grading.Ask]] = {
        POSTERIOR: (exact, partial(results.distance, POSTERIOR, (*drawn, sizes)))
    }
    if corrupt:
        asks[MIXTURE] = trained_on, partial(results.distance, MIXTURE, (*drawn, sizes))
    asks[CALIBRATION] = trained_on, results.calibration
    asks[MEMORY] = trained_on, partial(results.memory, (sizes,))
    if held_out:
        asks[STATES] = trained_on, partial(results.states, (sizes,))
    if trained_on.trained < len(task.query):
        asks[HORIZON] = trained_on, results.horizon
    probes = {
        name: GradeProbe(evaluation, drew, ask, observer, name == MEMORY and not task.memorisable, corrupt, held_out)
        for name, (evaluation, ask) in asks.items()
    }
    known = as_exact(exact.finite, trained)
    seen = {} if task.memorisable else {grading.SEEN: replace(trained_on, split="seen").batch}

    def with_scores(record: Record, observations: Mapping[str, Any]) -> Record:
        if CALIBRATION not in observations:
            return record
        scores = trained_on.scores(observations[CALIBRATION][grading.MAIN]).at(slice(trained))
        means = {"entropy": scores.entropy, "exact entropy": scores.exact, "KL": scores.kl}
        columns = {name: tuple(x.mean(1).round(6).tolist()) for name, x in means.items()}
        return replace(record, prompts={**record.prompts, **columns})

    return Plan.of(
        subject,
        trained_on.batch,
        probes,
        nulls,
        seed,
        batch_tokens,
        samples=seen,
        facts={"trained on": origin.task, "horizon": trained, "corrupt": corrupt, "sizes": sizes},
        notes=(
            *origin.doubts(task),
            *[f"memorisable: {task.memorisable}"] * bool(task.memorisable),
            *(
                f"{name} is already exact in this task, so skill is measured against the next best"
                for name in known
                if not {"position", LAST} & {*known}  # or no skill is measured: `results.distance`
            ),
        ),
        finish=with_scores,
    )
