"""One probe a file: NEEDS, a Result, measure(view). A file that is there is a probe that is there.

Those of probes/published/ measure as the papers define it, flaws included; their names begin with `published_`.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from llmgeom.errors import UserError

PROTOCOLS = ("sound", "published")
# Edited passes and gradients, of every control too: more than the rest of a scan together, the more the deeper the model.
# In prompts, which large models read, they are measured where they are asked for; in a tunnel always.
ON_REQUEST = ("contribution",)
PUBLISHED = "published"


def names(protocol: str = "sound") -> tuple[str, ...]:
    """The probes of a protocol by name, without importing any. Raises UserError for another protocol."""
    if protocol not in PROTOCOLS:
        raise UserError(f"--protocol {protocol}: expected {' or '.join(PROTOCOLS)}")
    if protocol == PUBLISHED:
        return tuple(f"{PUBLISHED}_{name}" for name in _files(str(Path(__path__[0]) / PUBLISHED)))
    return _files(*__path__)


def _files(*folders: str) -> tuple[str, ...]:
    return tuple(sorted(module.name for module in pkgutil.iter_modules(folders) if not module.ispkg))


def check(only: Iterable[str]) -> tuple[str, ...]:
    """The names, each known in one protocol or the other. Raises UserError with the nearest name."""
    only, every = tuple(only), (*names(), *names(PUBLISHED))
    for name in only:
        if name not in every:
            near = difflib.get_close_matches(name, every, 1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UserError(f"unknown probe {name!r}: {hint}known: {', '.join(every)}")
    return only


def chosen(only: tuple[str, ...] | None, protocol: str = "sound", *, prompts: bool = True) -> tuple[str, ...]:
    """What a command measures: `only` these; with ("all",) all of the protocol; by default all of it, in prompts less
    those of ON_REQUEST. Raises UserError as `names` and `check`."""
    every = names(protocol)
    if only not in (None, ("all",)):
        return check(only)
    return tuple(name for name in every if only or not prompts or name not in ON_REQUEST)


def known(only: Iterable[str] | None = None) -> dict[str, ModuleType]:
    """Probe modules by name: all sound ones, or `only` these, of either protocol."""
    chosen = names() if only is None else check(only)
    place = {name: name.replace(f"{PUBLISHED}_", f"{PUBLISHED}.") for name in chosen}
    return {name: importlib.import_module(f"llmgeom.probes.{where}") for name, where in place.items()}
