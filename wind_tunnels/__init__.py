"""Wind tunnels: worlds whose posterior is known in closed form. Each file of worlds/ is a world."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmgeom.errors import UserError, unknown
from llmgeom.files import import_file, sha256
from llmgeom.flags import read_fields

if TYPE_CHECKING:
    from llmgeom.world import World


def names(text: bool = False) -> tuple[str, ...]:
    """The worlds by name, without importing any; with `text` those that can be written with words."""
    files = pkgutil.iter_modules([str(Path(__path__[0]) / "worlds")])
    every = sorted(m.name.replace("_", "-") for m in files)
    return tuple(name for name in every if not text or shipped(name).has_text())


PROCESSES = {"mess3": "edge-hmm", "rrxor": "edge-hmm:process=rrxor"}  # as papers call them (Shai et al. 2024)


def load_world(spec: str, text: bool = False) -> World:
    """A world from `NAME`, `NAME:field=value,field=value`, or a user's `path/to/file.py:CLASS[:field=value,...]`; NAME
    may be that of a published process (`PROCESSES`).

    Args:
        spec: The world.
        text: With the defaults that it has as prompts (`World.TEXT`).

    Raises:
        UserError: An unknown world, file or field; a value that does not fit its field; a world without text.
    """
    name, _, rest = spec.partition(":")
    if name in PROCESSES:
        name, _, given = PROCESSES[name].partition(":")
        rest = ",".join(filter(None, (given, rest)))
    if name.endswith(".py"):
        own, _, rest = rest.partition(":")
        kind, spelt = _of_file(name, own), f"{name}:{own}"
    else:
        kind, spelt = shipped(name), name
    if text and not kind.has_text():
        raise UserError(f"{spelt}: this world has no form as text; {', '.join(names(text=True))} have one")
    return kind(**{**(kind.TEXT if text else {}), **read_fields(kind, spelt, rest)})


def shipped(name: str) -> type[World]:
    """The world that a file of worlds/ defines."""
    if name.replace("_", "-") not in names():
        raise unknown("world", name, names(), ", or path/to/file.py:CLASS")
    module = importlib.import_module(f"{__name__}.worlds.{name.replace('-', '_')}")
    from llmgeom.world import World

    own = [v for v in vars(module).values() if isinstance(v, type) and issubclass(v, World)]
    (kind,) = [v for v in own if v.__module__ == module.__name__]
    return kind


def _of_file(path: str, name: str) -> type[World]:
    from llmgeom.world import World

    place = Path(path)
    module = import_file(place, "world", path)
    own: dict[str, Any] = {
        k: v for k, v in vars(module).items() if isinstance(v, type) and issubclass(v, World) and v is not World
    }
    if name not in own:
        raise UserError(f"{path} has no world {name!r}; found {', '.join(own) or 'none'}")
    kind = own[name]
    if not getattr(getattr(kind, "__dataclass_params__", None), "frozen", False):
        raise UserError(f"{path}: {name} is not a frozen dataclass; write @dataclass(frozen=True) above it")
    if kind.__abstractmethods__:
        raise UserError(f"{path}: {name} does not say {', '.join(sorted(kind.__abstractmethods__))}")
    kind.FILE_SPEC, kind.FILE_HASH = f"{place.resolve()}:{name}", sha256(place.read_bytes())
    return kind
