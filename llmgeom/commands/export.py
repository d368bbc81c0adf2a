"""`llmgeom export`: write a run in another format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import click

from llmgeom.commands.config import Config, command
from llmgeom.flags import argument, flag

Format = Literal[
    "parquet", "csv", "latex", "safetensors", "activations", "direction", "card", "live", "png", "svg", "pdf",
    "gguf", "steered",
]  # fmt: skip


@dataclass(frozen=True)
class RunConfig(Config):
    """The options of `llmgeom export`."""

    run: str = argument()
    form: Format = argument(metavar="FORMAT")
    out: str | None = flag(None, "File or folder. [default: inside the run folder]")
    direction: Literal["pc1", "ridge"] | None = flag(None, "gguf and steered: which axis of the run.")
    dose: float | None = flag(None, "gguf and steered: length of the shift, in spreads of the axis. [default: 1]")
    sites: tuple[str, ...] = flag((), "activations: which sites, e.g. residual,value. [default: residual]", listed=True)
    approximate: bool = flag(False, "gguf: export even if llama.cpp can only approximate the shift.")


@command(
    RunConfig,
    examples=[
        "llmgeom export runs/410m-math latex --out paper/verdicts.tex",
        "llmgeom export runs/shift gguf --direction ridge --dose 2",
    ],
)
def main(config: RunConfig) -> None:
    """Export a run as tables, a model card, arrays or images, or its steering vector for llama.cpp and PEFT.

    FORMAT: parquet, csv, latex, safetensors, activations (of each prompt, for pandas and datasets), direction, card,
    live (the page with a wind-tunnel model to play with), png, svg, pdf, gguf (a control vector), steered (an adapter).
    """
    from llmgeom.exports import export

    options = {
        "direction": config.direction, "dose": config.dose, "approximate": config.approximate or None,
        "sites": config.sites or None,
    }  # fmt: skip
    click.echo("\n".join(export(config.run, config.form, config.out, **options)))
