"""llmgeom: how does a language model hold its uncertainty?

`import llmgeom` loads neither torch nor transformers; names are resolved where they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what a type checker reads; the interpreter asks __getattr__
    from llmgeom.batch import Batch
    from llmgeom.model.capture import Site
    from llmgeom.model.edits import Edit
    from llmgeom.model.subject import Subject
    from llmgeom.record import Record

__version__ = "0.1.0"

_WHERE = {
    "Batch": "llmgeom.batch",
    "Edit": "llmgeom.model.edits",
    "Record": "llmgeom.record",
    "Site": "llmgeom.model.capture",
    "Subject": "llmgeom.model.subject",
}
__all__ = ["Batch", "Edit", "Record", "Site", "Subject", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'llmgeom' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(importlib.import_module(_WHERE[name]), name)
