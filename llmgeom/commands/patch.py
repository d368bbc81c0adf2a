"""The whole of `llmgeom patch`: interchange interventions on sequences of a task, or on prompts of a process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from llmgeom.commands import config
from llmgeom.commands.job import Job, JobOutput
from llmgeom.errors import NO_TOKENIZER, UserError
from llmgeom.flags import LARGEST_SEED, flag

if TYPE_CHECKING:
    from llmgeom.model.subject import Subject
    from llmgeom.progress import Progress
    from llmgeom.prompts.process import Process
    from llmgeom.record import Record
    from llmgeom.run import Question

SUBSPACES, DIRECTIONS = 39, 5  # random controls of tasks and of text


@dataclass(frozen=True)
class RunConfig(config.ModelConfig):
    """What `llmgeom patch` is asked for."""

    VERB: ClassVar[str] = "patch"

    task: str | None = flag(None, "NAME or NAME:field=value,... [default: the task the model was trained on]")
    process: str | None = flag(None, "A process in text instead, e.g. two-point (`llmgeom list processes`).")
    ks: tuple[int, ...] = flag(
        (), "With --process: numbers of observations. [default: its own]", name="--k", listed=True
    )
    n: int = flag(200, "Sequences (half of them estimate the subspace that is patched), or prompts.", least=20)
    layers: str = flag("all", "Patch the input of these layers, one at a time: all, or e.g. 0,1.")
    controls: int | None = flag(None, "Random subspaces, or of text directions. [default: 39; of text 5]", least=1)
    nulls: int = flag(20, "Untrained controls.", least=1)
    batch_tokens: int = flag(4096, "Tokens in a batch.", least=1, most=LARGEST_SEED)
    seed: int = flag(0, "Fixes sequences, donors, halves and controls.", least=0, most=LARGEST_SEED)
    out: str | None = flag(None, "Run folder. [default: runs/MODEL-patch-TASK-HASH]", group="Output")


@config.command(
    RunConfig,
    JobOutput,
    examples=[
        "llmgeom patch --model runs/bijection --layers 0,1",
        "llmgeom patch --model EleutherAI/pythia-410m --process two-point",
    ],
)
def main(asked: RunConfig, output: JobOutput) -> int:
    """Exchange evidence inside a model, and compare its answer with the exact counterfactual.

    An interchange intervention: activations of one sequence replace those of another.
    """
    return prepare(asked).show(output)


def prepare(asked: RunConfig) -> Job:
    """Check what can be checked before weights load. Raises UserError."""
    layers = None if asked.layers == "all" else config.numbers("--layers", asked.layers, "all", "0,1")
    if asked.process is not None:
        return _prepare_text(asked, asked.process, layers)
    if asked.ks:
        raise UserError(f"--k {','.join(map(str, asked.ks))} is of --process; a task has sequences of its own length")
    from llmgeom.bench.grading import Origin
    from llmgeom.probes.interventions.interchange_probe import question

    located = asked.locate()
    origin = Origin.of(located.path)
    task = origin.load_task(asked.task, asked.model)

    def ask(subject: Subject, progress: Progress | None = None) -> Question:
        return question(
            subject,
            task,
            n=asked.n,
            layers=layers,
            controls=asked.controls or SUBSPACES,
            nulls=asked.nulls,
            seed=asked.seed,
            batch_tokens=asked.batch_tokens,
            progress=progress,
            warnings=tuple(origin.doubts(task)),
        )

    return Job(asked, located, f"patch-{type(task).__name__.lower()}", asked.spec(located), ask)


def _prepare_text(asked: RunConfig, spec: str, layers: Sequence[int] | None) -> Job:
    if asked.task:
        raise UserError(
            f"--task {asked.task} and --process {spec}: give one of them; evidence is patched in one source"
        )
    from llmgeom.prompts.processes import load_process

    process, located = load_process(spec), asked.locate()

    def ask(subject: Subject, progress: Progress | None = None) -> Question:
        return question_of_text(
            subject,
            process,
            n=asked.n,
            ks=asked.ks,
            layers=layers,
            directions=asked.controls or DIRECTIONS,
            nulls=asked.nulls,
            seed=asked.seed,
            batch_tokens=asked.batch_tokens,
            progress=progress,
        )

    return Job(asked, located, f"patch-{config.safe(process.title)}", asked.spec(located), ask)


def perform(asked: RunConfig, progress: Progress | None = None, subject: Subject | None = None) -> tuple[Path, Record]:
    """Check, load, ask, save the record and its page; (folder, record)."""
    return prepare(asked).perform(progress, subject)


def question_of_text(
    subject: Subject,
    process: Process,
    *,
    n: int = 200,
    ks: Sequence[int] = (),
    layers: Sequence[int] | None = None,
    directions: int = DIRECTIONS,
    nulls: int = 20,
    seed: int = 0,
    batch_tokens: int = 4096,
    progress: Progress | None = None,
) -> Question:
    """What interchange interventions in a model ask of it, on prompts of a process.

    Args:
        n: prompts, spread over the numbers of observations.
        ks: numbers of observations; by default those of the process above 0.
        directions: random directions.

    Raises:
        UserError: a layer that does not exist; no tokenizer; prompts that the model cannot read; too few pairs.
    """
    from llmgeom.batch import Tokens
    from llmgeom.probes.interventions.interchange_probe import chosen_layers
    from llmgeom.probes.interventions.text_pairs import TextPairs
    from llmgeom.probes.interventions.text_patching import PROBE, TextPatchingProbe
    from llmgeom.prompts.counterfactual import changes
    from llmgeom.run import Question

    if subject.tokenizer is None:
        raise UserError(f"{subject.name} {NO_TOKENIZER}")
    chosen = chosen_layers(subject, layers)
    ks = tuple(ks) or tuple(k for k in process.KS if k)
    each, positions = -(-n // len(ks)), subject.facts["positions"]
    batch = process.sample(each, seed, subject.tokenizer, ks=ks, positions=positions)
    tokens = subject.tokens(batch)
    assert isinstance(tokens, Tokens)  # text is read as tokens
    pairs = TextPairs.of(batch, tokens, changes(process, batch, seed))
    probe = TextPatchingProbe(process.title, pairs, chosen, directions, seed, batch_tokens, progress)
    facts = {"interchange": {"layers": list(chosen), "directions": directions, "pairs": len(pairs.x)}}
    return Question(pairs.x, {PROBE: probe}, nulls, seed, batch_tokens, facts=facts)
