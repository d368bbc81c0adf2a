"""One probe a file: NEEDS, a Result, measure(view). A file that is there is a probe that is there."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Iterable
from types import ModuleType

from llmgeom.errors import Refused


def names() -> tuple[str, ...]:
    """The probes by name, without importing any."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def check(only: Iterable[str]) -> tuple[str, ...]:
    """The names, each known. Raises Refused with the nearest name."""
    only = tuple(only)
    for name in only:
        if name not in names():
            near = difflib.get_close_matches(name, names(), 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise Refused(f"unknown probe {name!r}: {hint}known: {', '.join(names())}")
    return only


def known(only: Iterable[str] | None = None) -> dict[str, ModuleType]:
    """Probe modules by name: all, or `only` these."""
    chosen = names() if only is None else check(only)
    return {name: importlib.import_module(f"llmgeom.probes.{name}") for name in chosen}
