"""The probes: each file of this folder with NEEDS, a Result and measure(data) is one.

A user's probe is a file with the same three names, or with functions under `@llmgeom.probe.probe`, given by its path.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from llmgeom.errors import UserError, unknown
from llmgeom.files import import_file


def names() -> tuple[str, ...]:
    """The probes by name, without importing any."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg))


def check(only: Iterable[str]) -> tuple[str, ...]:
    """`only`, if each is a probe or the path of a file. Raises UserError with the nearest name."""
    only = tuple(only)
    for name in only:
        if name.endswith(".py"):
            if not Path(name).is_file():
                raise UserError(f"--probes {name}: no such file")
        elif name not in names():
            raise unknown("probe", name, names(), ", or path/to/file.py")
    return only


def chosen(only: tuple[str, ...] | None) -> tuple[str, ...]:
    """The probes that a command measures: `only` these, or every one. Raises UserError as `check`."""
    return names() if only in (None, ("all",)) else check(only)


def known(only: Iterable[str] | None = None) -> dict[str, Any]:
    """Probes by name: all, or `only` these, some of them files."""
    chosen = names() if only is None else check(only)
    modules: dict[str, Any] = {}
    for name in chosen:
        modules |= _own(name) if name.endswith(".py") else {name: importlib.import_module(f"llmgeom.probes.{name}")}
    return modules


def _own(name: str) -> dict[str, Any]:
    """The probes of a user's file: the file itself, or each function in it that `llmgeom.probe.probe` made one."""
    path = Path(name)
    if path.stem in names():
        raise UserError(f"--probes {name}: a probe of that name comes with llmgeom; rename the file")
    module = import_file(path, "probe", f"--probes {name}")
    if hasattr(module, "NEEDS") and hasattr(module, "measure"):
        return {path.stem: module}
    made = {key: one for key, one in vars(module).items() if hasattr(one, "NEEDS") and hasattr(one, "measure")}
    made = {key: one for key, one in made.items() if not isinstance(one, type | ModuleType)}
    if not made:
        raise UserError(f"--probes {name}: it has no probe: write @llmgeom.probe.probe(SITE) above a function of it")
    return dict(zip([path.stem], made.values(), strict=True)) if len(made) == 1 else made
