"""The whole of `llmgeom dynamics`: what settles first in training, and every probe's metric from step to step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from llmgeom.commands.config import Config, command
from llmgeom.commands.folders import check_folder, safe
from llmgeom.commands.output import VerdictOutput, show_record
from llmgeom.dynamics import SEEDS
from llmgeom.errors import UserError
from llmgeom.files import digest
from llmgeom.flags import LARGEST_SEED, argument, flag, output_flag
from llmgeom.record import Record


@dataclass(frozen=True)
class RunConfig(Config):
    """The options of `llmgeom dynamics`."""

    VERB: ClassVar[str] = "dynamics"

    runs: tuple[str, ...] = argument(())
    task: str | None = flag(None, "Train on this task at a constant rate, and equally often on random targets.")
    seeds: int = flag(SEEDS, "With --task: trainings of each kind.", least=1, most=1000)
    quick: bool = flag(False, "With --task: a quarter of the steps.")
    model: str | None = flag(None, "A hub id, instead of RUNS.")
    revisions: tuple[str, ...] = flag(
        (),
        "Revisions of --model, or of each hub id in RUNS: step0,step512,main=143000 in ascending order.",
        listed=True,
    )
    domain: str = flag("mixed", "For language models: the prompts that every snapshot reads.")
    probes: tuple[str, ...] | None = flag(
        None, "Names with commas between, or all; '' for none. [default: as `llmgeom scan`]", listed=True
    )
    n: int | None = flag(None, "Sequences, or prompts. [default: 200, or 75 prompts]", least=10)
    nulls: int = flag(20, "Draws of each control of the probes.", least=1, name="--control-models")
    seed: int = flag(0, "Fixes sequences, prompts and controls.", least=0, most=LARGEST_SEED)
    dtype: Literal["float32", "bfloat16", "float16"] | None = flag(None, "Precision of the weights.")
    device: str | None = flag(None, "cpu, cuda, cuda:1, mps ... [default: a GPU if there is one]")
    offline: bool = flag(False, "Never use the network.")
    out: str | None = output_flag(None, "Run folder; a stopped run continues in it. [default: runs/dynamics-WHAT-HASH]")

    def __post_init__(self) -> None:
        super().__post_init__()
        if sum(map(bool, (self.runs, self.model, self.task))) != 1:
            raise UserError("give folders of `llmgeom train`, or --model with --revisions, or --task; one of the three")
        if (self.model and not self.revisions) or (self.task and self.revisions):
            raise UserError(
                "--model and --revisions go together: --model EleutherAI/pythia-410m --revisions step0,step512"
            )
        if self.task:
            self.refuse_unread(("domain",), f"--task {self.task}")
        else:
            self.refuse_unread(("seeds", "quick"), "no --task")


@command(
    RunConfig,
    VerdictOutput,
    examples=[
        "llmgeom dynamics runs/seed0 runs/seed1 runs/seed2 runs/seed3 runs/seed4",
        "llmgeom dynamics --task bijection --seeds 5",
        "llmgeom dynamics --model EleutherAI/pythia-70m --revisions step0,step512,step8000,step143000",
    ],
)
def main(settings: RunConfig, output: VerdictOutput) -> int:
    """Follow training: what settles first, attention, values or the answers? Scan every snapshot, too.

    RUNS: folders of `llmgeom train --schedule constant`, one for each seed, and of `--corrupt 1` as their control; or
    folders with checkpoint-N inside, as trainers write them; or, with --revisions, hub models trained with other seeds.
    """
    return show_record(perform, settings, output, table)


def perform(settings: RunConfig) -> tuple[Path, Record]:
    """Train if --task was given, follow every run, scan the snapshots of the first; (folder, record).

    OUT/stepN holds the record of each snapshot; the same command continues after the last of them.
    """
    from llmgeom import probes
    from llmgeom.cache.shards import captures_folder
    from llmgeom.dynamics.runs import Run
    from llmgeom.dynamics.study import Inputs, comparable, recipe, study, study_spec, train_runs

    probes.chosen(settings.probes)  # an unknown name is refused before anything is trained
    if settings.model:
        runs = [Run.at(settings.model, settings.revisions)]
    elif settings.revisions:
        runs = [Run.at(model, settings.revisions) for model in settings.runs]
    elif settings.task:
        training = recipe(settings.task, settings.quick)
        runs = list(train_runs(training, _out(settings, "") / "runs", settings.seeds))
    else:
        runs = [Run.of(folder) for folder in settings.runs]
    runs = comparable(runs)
    if runs[0].task:
        settings.refuse_unread(("domain",), f"runs of {runs[0].task}")
    modules = probes.known(probes.chosen(settings.probes))
    inputs = Inputs(runs[0].task, settings.domain, settings.n, settings.seed)
    spec = study_spec(runs, inputs, list(modules), settings.nulls, settings.dtype)
    out = _out(settings, spec)
    check_folder(out, spec)
    record = study(
        runs,
        inputs,
        out,
        spec,
        probes=modules,
        controls=settings.nulls,
        options=settings.values("dtype", "device", "offline"),
        store=str(captures_folder()),
        notes=["quick: a quarter of the steps"] * settings.quick,
        command=settings.command(),
    )
    return out, record


def _out(settings: RunConfig, spec: str) -> Path:
    if settings.out:
        return Path(settings.out)
    what = settings.task or settings.model or Path(settings.runs[0]).resolve().name
    key = digest(dataclasses.asdict(settings) | {"out": None}) if settings.task else spec
    return Path("runs") / f"dynamics-{safe(what)}-{key[:8]}"


def table(record: Record) -> Iterator[str]:
    """The step at which each curve of each run settles, as lines for a terminal."""
    from llmgeom.reports.text import grid

    titles = {
        "drift": "step from which at most 5 % of the first value is left",
        "gradients": "step from which at most 5 % of the maximum is left",
    }
    for name, title in titles.items():
        measured = record.results.get(name)
        if measured is None:
            continue
        columns = sorted(key for key in measured.quantities if key.endswith("_settled"))
        steps = [measured.arrays[key] for key in columns]
        censored = [measured.arrays[key.replace("_settled", "_censored")] for key in columns]
        rows = [
            (str(run), *(f"{step[i]:.0f}{'+' * bool(late[i])}" for step, late in zip(steps, censored, strict=True)))
            for i, run in enumerate(measured.ticks["run"])
        ]
        heads = [key.removesuffix("_settled").replace("_", " ") for key in columns]
        yield from grid(title, ["total variation" if head == "tv" else head for head in heads], rows)
    if "drift" in record.results:
        yield "frame, value: distance of attention, or values, from the last snapshot; precision: KL of the answers"
    yield "+ between the last two snapshots, or never: a longer run would give a later step"
