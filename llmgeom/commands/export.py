"""`llmgeom export`: write a run in another format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import click

from llmgeom.commands.config import Config, command
from llmgeom.flags import argument, flag

Format = Literal[
    "parquet", "csv", "latex", "safetensors", "activations", "direction", "live", "png", "svg", "pdf",
]  # fmt: skip


@dataclass(frozen=True)
class RunConfig(Config):
    """The options of `llmgeom export`."""

    run: str = argument()
    form: Format = argument(metavar="FORMAT")
    out: str | None = flag(None, "File or folder. [default: inside the run folder]")
    sites: tuple[str, ...] = flag((), "activations: which sites, e.g. residual,value. [default: residual]", listed=True)


@command(RunConfig, examples=["llmgeom export runs/410m-math latex --out paper/verdicts.tex"])
def main(config: RunConfig) -> None:
    """Export a run as tables, arrays or images.

    FORMAT: parquet, csv, latex, safetensors, activations (of each prompt, for pandas and datasets), direction, live
    (the page with a wind-tunnel model to play with), png, svg, pdf.
    """
    from llmgeom.exports import export

    click.echo("\n".join(export(config.run, config.form, config.out, sites=config.sites or None)))
