"""Exact sources: tasks whose posterior is known in closed form, one a file; a file that is there is a task."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pkgutil
import re
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from llmgeom.errors import UserError

if TYPE_CHECKING:
    from llmgeom.task import Task

LARGEST = 2**31  # a number in a task's spec


def names() -> tuple[str, ...]:
    """The tasks by name, without importing any."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules([str(Path(__path__[0]) / "tasks")])))


def load_task(spec: str) -> Task:
    """`NAME`, `NAME:field=value,field=value`, or of a file of yours `path/to/file.py:CLASS[:field=value,...]`.

    Raises UserError for what is not there, a field that the task does not have, and a value that does not fit it.
    """
    name, _, rest = spec.partition(":")
    if name.endswith(".py"):
        own, _, rest = rest.partition(":")
        kind, spelt = _of_file(name, own), f"{name}:{own}"
    elif name in names():
        kind, spelt = _only(importlib.import_module(f"llmgeom.wind_tunnels.tasks.{name}")), name
    else:
        near = difflib.get_close_matches(name, names(), 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"unknown task {name!r}: {hint}known: {', '.join(names())}, or path/to/file.py:CLASS")
    return kind(**_values(kind, spelt, rest))


def describe(name: str) -> list[str]:
    """A task in words: its first line, and its fields with their defaults."""
    kind = _only(importlib.import_module(f"llmgeom.wind_tunnels.tasks.{name}"))
    given = ", ".join(f"{f.name}={f.default}" for f in fields(kind))
    return [f"{name:12} {str(kind.__doc__).strip().splitlines()[0]}", f"{'':12} {given}"]


def _values(kind: type, spelt: str, text: str) -> dict[str, Any]:
    """field=value pairs with commas between; a value may hold commas itself."""
    hints, known = get_type_hints(kind), {f.name: f for f in fields(kind)}
    found: dict[str, Any] = {}
    for part in re.split(r",(?=\w+=)", text) if text else ():
        key, equals, value = part.partition("=")
        if not equals or key not in known:
            flags = ", ".join(f"{f.name} ({hints[f.name].__name__}, {_default(f)})" for f in known.values())
            raise UserError(f"{spelt}: no field {part!r}; it has {flags}")
        try:
            found[key] = _boolean(value) if hints[key] is bool else hints[key](value)
            if hints[key] in (int, float) and not abs(found[key]) < LARGEST:
                raise ValueError
        except ValueError:
            below = f" below {LARGEST:,}" if hints[key] in (int, float) else ""
            raise UserError(f"{spelt}: {key}={value!r}; expected {hints[key].__name__}{below}") from None
    if missing := [f.name for f in known.values() if f.default is MISSING and f.name not in found]:
        raise UserError(f"{spelt}: no value for {', '.join(missing)}; give {spelt}:{missing[0]}=...")
    return found


def _default(field: Any) -> str:
    return "no default" if field.default is MISSING else f"default {field.default}"


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError
    return text.lower() == "true"


def _only(module: Any) -> type[Task]:
    """The task that a file of ours defines."""
    from llmgeom.task import Task

    own = [v for v in vars(module).values() if isinstance(v, type) and issubclass(v, Task)]
    (kind,) = [v for v in own if v.__module__ == module.__name__]
    return kind


def _of_file(path: str, name: str) -> type[Task]:
    from llmgeom.task import Task

    place = Path(path)
    module_spec = importlib.util.spec_from_file_location(f"llmgeom_task_{place.stem}", place)
    if module_spec is None or module_spec.loader is None or not place.is_file():
        raise UserError(f"{path} is not a file that exists; a task of your own is given as path/to/file.py:CLASS")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # where dataclasses look their module up
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"{path} cannot be imported ({type(error).__name__}: {error}); mend it") from error
    own = {k: v for k, v in vars(module).items() if isinstance(v, type) and issubclass(v, Task) and v is not Task}
    if name not in own:
        raise UserError(f"{path} has no task {name!r}; found {', '.join(own) or 'none'}")
    kind = own[name]
    if not getattr(getattr(kind, "__dataclass_params__", None), "frozen", False):
        raise UserError(f"{path}: {name} is no frozen dataclass; write @dataclass(frozen=True) above it")
    if kind.__abstractmethods__:
        raise UserError(f"{path}: {name} does not say {', '.join(sorted(kind.__abstractmethods__))}")
    kind.FILE_SPEC = f"{place.resolve()}:{name}"
    return kind
