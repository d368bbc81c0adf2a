"""llmgeom: how does a language model represent its uncertainty?

`import llmgeom` loads neither torch nor transformers; names are resolved at their first use.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

# OpenMP reads this once, when torch or numpy loads it. By default its threads spin while they wait: when another
# process used one of two cores, a scan of 22 s took 145 s; with passive waiting it takes 34 s, and 23 s on idle cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# NumPy's OpenBLAS reads this once. The matrices of a scan have about 75 rows, for which threads cost more than they
# save: an eigendecomposition took 6 ms on two cores and 0.8 ms on one, and the default scan 146 CPU s instead of 61.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# oneDNN, which multiplies bfloat16 on a CPU, and the layer of torch above it each keep 1,024 compiled products, one for
# each shape. Batches differ in shape: 800 products as in a layer of Pythia-410m kept 870 MiB, and 70 with this limit.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
os.environ.setdefault("LRU_CACHE_CAPACITY", "64")

if TYPE_CHECKING:  # for type checkers; at run time __getattr__ resolves these names
    from llmgeom.batch import Batch
    from llmgeom.model.capture import Site
    from llmgeom.model.edits import Edit
    from llmgeom.model.model import Model
    from llmgeom.probes.labels.fitted import Probe
    from llmgeom.record import Record

    load = Model.load

__version__ = "0.1.0"

_WHERE = {
    "Batch": "llmgeom.batch",
    "Edit": "llmgeom.model.edits",
    "Probe": "llmgeom.probes.labels.fitted",
    "Record": "llmgeom.record",
    "Site": "llmgeom.model.capture",
    "Model": "llmgeom.model.model",
    "load": "llmgeom.model.model",
    "scan": "llmgeom.commands.scan",
}
__all__ = ["Batch", "Edit", "Model", "Probe", "Record", "Site", "__version__", "load", "scan"]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'llmgeom' has no attribute {name!r}; it offers {', '.join(__all__)}")
    module = importlib.import_module(_WHERE[name])
    return module.Model.load if name == "load" else getattr(module, name)
