"""Results of probes and arrays of their examinations on disk, so that a repeated run computes nothing twice.

Each entry is one file, `results/RUN/KEY.safetensors` under the cache folder, written whole or not at all. An entry that
cannot be read counts as absent.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from llmgeom.cache.shards import FREE, cache_folder
from llmgeom.errors import UserError
from llmgeom.files import remove_unfinished, write_whole

SCHEMA = 1


def results_folder() -> Path:
    """Where results lie: RUN/KEY.safetensors below it."""
    return cache_folder() / "results"


def load(run: str, key: str) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """The plain data and arrays of an entry; None where there is none that can be read."""
    from safetensors import SafetensorError, safe_open

    path = results_folder() / run / f"{key}.safetensors"
    try:
        with safe_open(path, "numpy") as file:
            body = json.loads(file.metadata()["llmgeom"])
            if body["schema"] != SCHEMA or body["key"] != key:
                return None
            return body["plain"], {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        return None


def save(run: str, key: str, plain: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Write an entry; a cache that cannot be written costs time only."""
    from safetensors.numpy import save as to_bytes

    body = {"schema": SCHEMA, "key": key, "plain": plain}
    text = json.dumps(body, sort_keys=True, allow_nan=False)
    data = to_bytes({name: np.array(array, order="C") for name, array in arrays.items()}, {"llmgeom": text})
    path = results_folder() / run / f"{key}.safetensors"
    with contextlib.suppress(OSError, UserError):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_unfinished(path.parent, path.name)
        write_whole(path, data, FREE)
