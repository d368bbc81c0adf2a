"""Processes in text: evidence whose exact answer is known. Each file of this folder is a process."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from llmgeom.errors import unknown
from llmgeom.flags import read_fields

if TYPE_CHECKING:
    from llmgeom.prompts.process import Process


def names() -> tuple[str, ...]:
    """The processes by name, without importing any."""
    return tuple(sorted(m.name.replace("_", "-") for m in pkgutil.iter_modules([str(Path(__path__[0]))])))


def load_process(spec: str) -> Process:
    """`NAME` or `NAME:field=value,field=value`.

    Raises UserError: an unknown process or field, or an impossible value.
    """
    name, _, rest = spec.partition(":")
    if name not in names():
        raise unknown("process", name, names())
    kind = _class(name)
    return kind(**read_fields(kind, name, rest))


def describe(name: str) -> list[str]:
    """A process in words: its primitive and first line, its fields with their defaults, and an example with its exact
    answer."""
    process = load_process(name)
    batch = process.sample(1, 0, ks=(3,), surfaces=("list",))
    p = batch.exact.predictive[0, 0].exp().tolist()
    answers = ", ".join(f"{mark} {share:.2f}" for mark, share in zip(batch.columns["marks"][0].split(), p, strict=True))
    return [
        f"{name:10} {process.PRIMITIVE}: {str(type(process).__doc__).strip().splitlines()[0]}",
        f"{'':10} {', '.join(f'{field}={value}' for field, value in asdict(process).items())}",
        f"{'':10} {batch.text[0]}",
        f"{'':10} exact: {answers}",
    ]


def _class(name: str) -> type[Process]:
    """The process that a file defines."""
    from llmgeom.prompts.process import Process

    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    (kind,) = (
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Process) and value.__module__ == module.__name__
    )
    return kind
