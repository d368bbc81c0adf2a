"""Wind tunnels: tasks whose posterior is known in closed form. Each file of tasks/ is a task."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmgeom.errors import UserError, unknown
from llmgeom.files import import_file, sha256
from llmgeom.flags import read_fields

if TYPE_CHECKING:
    from llmgeom.task import Task


def names() -> tuple[str, ...]:
    """The tasks by name, without importing any."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules([str(Path(__path__[0]) / "tasks")])))


def load_task(spec: str) -> Task:
    """A task from `NAME`, `NAME:field=value,field=value`, or a user's `path/to/file.py:CLASS[:field=value,...]`.

    Raises UserError: an unknown task, file or field, or a value that does not fit its field.
    """
    name, _, rest = spec.partition(":")
    if name.endswith(".py"):
        own, _, rest = rest.partition(":")
        kind, spelt = _of_file(name, own), f"{name}:{own}"
    elif name in names():
        kind, spelt = _only(importlib.import_module(f"llmgeom.wind_tunnels.tasks.{name}")), name
    else:
        raise unknown("task", name, names(), ", or path/to/file.py:CLASS")
    return kind(**read_fields(kind, spelt, rest))


def describe(name: str) -> list[str]:
    """A task in words: its first line, and its fields with their defaults."""
    kind = _only(importlib.import_module(f"llmgeom.wind_tunnels.tasks.{name}"))
    given = ", ".join(f"{f.name}={f.default}" for f in fields(kind))
    return [f"{name:12} {str(kind.__doc__).strip().splitlines()[0]}", f"{'':12} {given}"]


def _only(module: Any) -> type[Task]:
    """The task that a file of tasks/ defines."""
    from llmgeom.task import Task

    own = [v for v in vars(module).values() if isinstance(v, type) and issubclass(v, Task)]
    (kind,) = [v for v in own if v.__module__ == module.__name__]
    return kind


def _of_file(path: str, name: str) -> type[Task]:
    from llmgeom.task import Task

    place = Path(path)
    module = import_file(place, "task", path)
    own = {k: v for k, v in vars(module).items() if isinstance(v, type) and issubclass(v, Task) and v is not Task}
    if name not in own:
        raise UserError(f"{path} has no task {name!r}; found {', '.join(own) or 'none'}")
    kind = own[name]
    if not getattr(getattr(kind, "__dataclass_params__", None), "frozen", False):
        raise UserError(f"{path}: {name} is not a frozen dataclass; write @dataclass(frozen=True) above it")
    if kind.__abstractmethods__:
        raise UserError(f"{path}: {name} does not say {', '.join(sorted(kind.__abstractmethods__))}")
    kind.FILE_SPEC, kind.FILE_HASH = f"{place.resolve()}:{name}", sha256(place.read_bytes())
    return kind
