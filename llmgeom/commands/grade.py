"""The whole of `llmgeom grade`: how near are a model's answers in a wind tunnel to the exact posterior?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from llmgeom.commands import config
from llmgeom.commands.job import Job, JobOutput
from llmgeom.flags import LARGEST_SEED, flag, output_flag

if TYPE_CHECKING:
    from llmgeom.record import Record


LEGEND = (
    "H error: entropy of the answers less that of the exact ones, in bits; published as mae_abs and",
    "mae_mean. The rows below this model are predictors that do not infer: they use the last observation",
    "at most (memoryless), the values without their order, the position, nothing, or a table of training",
    "sequences with the same evidence (seen).",
)


@dataclass(frozen=True)
class RunConfig(config.ModelConfig):
    """The options of `llmgeom grade`."""

    VERB: ClassVar[str] = "grade"

    task: str | None = flag(None, "NAME or NAME:field=value,... [default: the task the model was trained on]")
    n: int = flag(10_000, "Held-out sequences, and as many seen ones.", least=10)
    nulls: int = config.draws_flag("Untrained copies")
    batch_tokens: int = flag(4096, "Tokens that run at the same time.", least=1, most=LARGEST_SEED)
    seed: int = flag(0, "Fixes sequences and controls.", least=0, most=LARGEST_SEED)
    out: str | None = output_flag(None, "Run folder. [default: runs/MODEL-grade-TASK-HASH]")


@config.command(RunConfig, JobOutput, examples=["llmgeom grade --model runs/tunnel --n 1000"])
def main(settings: RunConfig, output: JobOutput) -> int:
    """Compare a wind-tunnel model's answers with the exact posterior, and with predictors that do not infer."""
    return prepare(settings).show(output, table)


def prepare(settings: RunConfig) -> Job:
    """Check what can be checked before weights load. Raises UserError."""
    from llmgeom import grading

    located = settings.locate()
    origin = grading.Origin.of(located.path)
    task = origin.load_world(settings.task, settings.model)
    draws = settings.values("n", "seed", "nulls", "batch_tokens")
    ask = partial(grading.question, task=task, origin=origin, **draws)
    return Job(settings, located, f"grade-{type(task).__name__.lower()}", ask)


def table(record: Record) -> Iterator[str]:
    """KL and errors of entropy of the model and of every trivial predictor, as lines for a terminal."""
    from llmgeom.reports.text import grid

    for probe, measured in record.results.items():
        if "predictor_mae_abs" not in measured.arrays:
            continue
        columns = [measured.arrays[f"predictor{suffix}"] for suffix in ("", "_mae_abs", "_mae_mean")]
        rows = [
            (name, *(f"{x:z.4f}" for x in row))
            for name, row in zip(measured.ticks["predictor"], zip(*columns, strict=True), strict=True)
        ]
        yield from grid(probe, ("KL [bits]", "mean |H error|", "|mean H error|"), rows)
    yield from LEGEND
