"""`llmgeom train`: train a small model in a wind tunnel."""

from __future__ import annotations

from dataclasses import dataclass

import click

from llmgeom.commands.config import command
from llmgeom.commands.output import Output, print_json
from llmgeom.flags import output_flag
from llmgeom.progress import bar
from llmgeom.wind_tunnels.training_config import Training, default_folder


@dataclass(frozen=True)
class TrainOutput(Output):
    """Where a model is trained, where it is saved, and what is printed."""

    device: str | None = output_flag(None, "cpu, cuda, cuda:1, mps ... [default: a GPU if there is one]")
    out: str | None = output_flag(None, "Folder of the model. [default: runs/TASK-ARCH-HASH]")


@command(
    Training,
    TrainOutput,
    examples=[
        "llmgeom train bijection:vocab=8 --arch llama --steps 600 --lr 1e-2 --out runs/bijection",
        "llmgeom train coin --arch lstm --lr auto",
        "llmgeom train path/to/file.py:MyTask --steps 2000",
    ],
)
def main(training: Training, output: TrainOutput) -> None:
    """Train a small model in a wind tunnel: a task whose exact posterior is known.

    TASK: see `llmgeom list worlds`; its fields follow a colon, as in hmm:states=5,steps=20. Run the same command again
    to continue a training that was stopped.
    """
    from llmgeom.wind_tunnels.training import train

    with bar(output.silent):
        trained = train(training, output.out or default_folder(training), output.device)
    if output.json:
        print_json({"out": str(trained.out), **trained.to_dict()})
    else:
        click.echo("\n".join(trained.lines()))
