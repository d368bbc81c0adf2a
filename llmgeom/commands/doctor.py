"""Is this machine ready: versions, devices, cache, hub, pocket models, and what each feature lacks."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
import textwrap
from collections.abc import Iterator

import click

from llmgeom.cache.shards import cache_folder
from llmgeom.commands.config import command
from llmgeom.errors import UserError
from llmgeom.model import gguf, hub
from llmgeom.optional import NO_BROWSER, OPTIONAL, browser, installed

NEEDED = {"torch": (2, 11), "transformers": (5, 17), "safetensors": (0, 6), "plotly": (6, 5), "scikit-learn": (1, 6)}


def findings() -> Iterator[tuple[str, str]]:
    """("ok" | "note" | "BAD", sentence) one after another."""
    yield ("ok" if sys.version_info >= (3, 11) else "BAD"), f"Python {sys.version.split()[0]} (needs 3.11 or later)"
    for name, least in NEEDED.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield "BAD", f"{name} is not installed; pip install {name}"
            continue
        good = tuple(map(int, re.findall(r"\d+", found)[:2])) >= least
        yield ("ok" if good else "BAD"), f"{name} {found} (needs {least[0]}.{least[1]} or later)"
    if installed("torch"):
        import torch

        if torch.cuda.is_available():
            yield "ok", f"GPU: {torch.cuda.get_device_name(0)}, {torch.cuda.mem_get_info()[1] / 2**30:.0f} GiB"
        elif torch.backends.mps.is_available():
            yield "ok", "GPU: Apple's (mps), without float64"
        else:
            threads = torch.get_num_threads()
            yield "note", f"no GPU; {threads} CPU thread{'s' * (threads != 1)}"
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield ("ok" if os.access(folder, os.W_OK) else "BAD"), f"cache {folder} (set LLMGEOM_CACHE to move it)"
    except OSError as error:
        yield (
            "BAD",
            f"cache {folder} cannot be made ({error.strerror}); set LLMGEOM_CACHE to a folder that can be written",
        )
    real = gguf.packaged()
    yield ("ok" if real else "note"), f"{gguf.SMOLLM2}: {real or f'not installed, {gguf.INSTALL}'}"
    names = hub.pockets()
    yield ("ok" if names else "BAD"), f"pocket models: {', '.join(names) or 'none shipped with this installation'}"
    try:
        place = hub.locate("EleutherAI/pythia-14m")
        yield ("ok", "the model hub answers") if place.kind == "hub" else ("note", f"hub models: {place.note}")
    except UserError as refusal:
        yield "note", f"hub models: {refusal}"
    for package, (feature, install) in OPTIONAL.items():
        if installed(package):
            yield "ok", f"{feature}: {package} is installed"
        else:
            yield "note", f"{feature}: {package} is not installed; {install}"
    drawing = browser()
    yield (
        ("ok", f"a browser draws images: {drawing}")
        if drawing
        else ("note", f"export RUN png, svg or pdf: {NO_BROWSER}")
    )


@command(examples=["llmgeom doctor"])
def main() -> int:
    """Check this machine: versions, devices, cache, hub, pocket models, and packages that single features need."""
    marks = []
    for mark, sentence in findings():
        click.echo(textwrap.fill(f"{mark:4} {sentence}", 100, subsequent_indent=" " * 5, break_on_hyphens=False))
        marks.append(mark)
    return int("BAD" in marks)
