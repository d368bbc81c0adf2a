"""`llmgeom list`: what can be measured, on what, and what can be claimed."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

import click

from llmgeom.commands.config import Config, command
from llmgeom.flags import argument

WIDTH = 100  # characters of a line
Kind = Literal["models", "domains", "worlds", "architectures", "probes", "claims"]


@dataclass(frozen=True)
class RunConfig(Config):
    """The options of `llmgeom list`."""

    what: Kind | None = argument(None, metavar="[WHAT]")


def models() -> Iterator[str]:
    """Models that come with llmgeom."""
    from llmgeom.model import gguf, hub

    yield f"{gguf.SMOLLM2}  SmolLM2-135M-Instruct{'' if gguf.packaged() else f': {gguf.INSTALL}'}"
    for name in hub.pockets():
        yield f"pocket:{name}  (untrained: pocket:{name}@step0)"
    yield "or a folder written by save_pretrained, a GGUF file, a LoRA folder, a hub id, e.g. EleutherAI/pythia-410m"


def domains() -> Iterator[str]:
    """Prompt domains of a scan."""
    from llmgeom.prompts import domains

    for name in domains.known():
        yield f"{name:12} {domains.Domain(name).size()} prompts"


def worlds() -> Iterator[str]:
    """Worlds with exact answers: small models train in them, prompts show many."""
    from llmgeom import wind_tunnels
    from llmgeom.prompts import text

    for name in wind_tunnels.names():
        kind = wind_tunnels.shipped(name)
        yield f"{name:12} {str(kind.__doc__).strip().splitlines()[0]}"
        yield f"{'':12} {', '.join(f'{f.name}={f.default}' for f in fields(kind))}"
        if kind.has_text():
            batch = text.sample(wind_tunnels.load_world(name, text=True), 1, 0, ks=(3,), surfaces=("list",))
            p = batch.exact.predictive[0, 0].exp().tolist()
            pairs = zip(batch.columns["marks"][0].split(), p, strict=True)
            changed = ", ".join(f"{field}={value}" for field, value in kind.TEXT.items())
            yield f"{'':12} in text{f' with {changed}' * bool(changed)}: {batch.text[0]}"
            yield f"{'':12} exact: {', '.join(f'{mark} {share:.2f}' for mark, share in pairs)}"
        yield ""
    yield "or your own: path/to/file.py:CLASS (docs/tunnels.md)"


def architectures() -> Iterator[str]:
    """Architectures of `llmgeom train`."""
    from llmgeom.wind_tunnels.models import ARCHITECTURES

    for name, text in ARCHITECTURES.items():
        yield f"{name:10} {text}"


def probes() -> Iterator[str]:
    """Probes of a scan."""
    from llmgeom.probes import known

    every = known()
    width = max(map(len, every)) + 1
    for name, module in every.items():
        yield f"{name:{width}} {(module.__doc__ or '').strip().partition(chr(10))[0]}"


def claims() -> Iterator[str]:
    """Claims that a run can pass or fail."""
    from llmgeom.claims import described, entries

    for (probe, _), entry in entries().items():
        if entry.claim:
            yield from (*described(probe, entry), "")


LISTS = {show.__name__: show for show in (models, domains, worlds, architectures, probes, claims)}


def _folded(line: str) -> str:
    """The line within WIDTH; what follows the name, or the indent, goes on below itself."""
    start = re.match(r"\S*\s*", line)
    indent = " " * (start.end() if start else 0)
    return textwrap.fill(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False)


@command(RunConfig, examples=["llmgeom list probes"])
def main(config: RunConfig) -> None:
    """List models, domains, worlds, architectures, probes or claims; without an argument everything."""
    for name in (config.what,) if config.what else LISTS:
        if not config.what:
            click.echo(f"{LISTS[name].__doc__} (llmgeom list {name})\n")
        click.echo("\n".join(map(_folded, LISTS[name]())).rstrip("\n"))
        if not config.what:
            click.echo()
