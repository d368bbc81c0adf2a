"""Provenance: where a record's numbers come from, and what varies between equal runs."""

from __future__ import annotations

import time
from typing import Any

from llmgeom import __version__, claims
from llmgeom.batch import Batch, Rows, Tokens
from llmgeom.cache.keys import of_tokens


def provenance(batch: Batch, tokens: Tokens | Rows, seed: int, controls: int) -> dict[str, Any]:
    """The facts that every record carries, whatever was measured."""
    return {
        "llmgeom": __version__,
        "seed": seed,
        "nulls": controls,
        "prompts_hash": of_tokens(tokens),
        "claims_hash": claims.digest(),
        "prompts": len(batch),
        "clusters": len(set(batch.cluster)),
        "versions": versions(),
    }


def took(started: float) -> dict[str, Any]:
    """What varies between equal runs; `started` is a time.time()."""
    return {
        "seconds": round(time.time() - started, 3),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def versions() -> dict[str, str]:
    """Versions of the libraries that decide numbers."""
    import numpy as np
    import torch
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}
