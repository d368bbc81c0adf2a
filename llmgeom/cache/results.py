"""Results of probes and arrays of their examinations on disk, so that a repeated run computes nothing twice.

Each entry is one file, `results/RUN/KEY.safetensors` under the cache folder, written whole or not at all. An entry that
cannot be read, or whose numbers do not have the hash in its header, counts as absent.
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
from llmgeom.files import digest, remove_unfinished, sha256, write_whole

SCHEMA = 2  # 1 had no hash


def results_folder() -> Path:
    """The folder of results, which contains RUN/KEY.safetensors."""
    return cache_folder() / "results"


def load(run: str, key: str) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """The plain data and arrays of an entry; None if it is absent or cannot be read."""
    try:
        return _read(results_folder() / run / f"{key}.safetensors")
    except ValueError:
        return None


def flaw(path: Path) -> str:
    """Why a file is not an entry that can be read; empty if it is."""
    try:
        _read(path)
    except ValueError as error:
        return str(error)
    return ""


def _read(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The plain data and arrays of an entry. Raises ValueError with the reason if it cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            body = json.loads(file.metadata()["llmgeom"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        schema, key = body["schema"], body["key"]
        whole = body == _body(key, body["plain"], arrays) | {"schema": schema}
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ValueError("it was cut or changed: it holds no result that can be read") from error
    if schema != SCHEMA:
        raise ValueError(f"it has schema {schema!r} and this version reads {SCHEMA}")
    if key != path.stem:
        raise ValueError(f"it is the result {key}")
    if not whole:
        raise ValueError("it was changed: its numbers do not have the hash in its header")
    return body["plain"], arrays


def _body(key: str, plain: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The content of an entry's header, with a hash of every number in the entry."""
    hashes = {name: [str(array.dtype), list(array.shape), sha256(array.tobytes())] for name, array in arrays.items()}
    return {"schema": SCHEMA, "key": key, "plain": plain, "hash": digest({"plain": plain, "arrays": hashes})}


def save(run: str, key: str, plain: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    """Write an entry; a cache that cannot be written only costs time."""
    from safetensors.numpy import save as to_bytes

    plain = json.loads(json.dumps(plain, allow_nan=False))  # as `load` reads it
    arrays = {name: np.array(array, order="C") for name, array in arrays.items()}
    text = json.dumps(_body(key, plain, arrays), sort_keys=True, allow_nan=False)
    data = to_bytes(arrays, {"llmgeom": text})
    path = results_folder() / run / f"{key}.safetensors"
    with contextlib.suppress(OSError, UserError):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_unfinished(path.parent, path.name)
        write_whole(path, data, FREE, durable=False)
