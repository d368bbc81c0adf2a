"""A run's activations on disk: one shard a batch, a manifest, resume after a kill, integrity by hash."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmgeom.errors import Refused
from llmgeom.record import write_whole

if TYPE_CHECKING:
    from torch import Tensor


def cache_folder() -> Path:
    """LLMGEOM_CACHE, else XDG_CACHE_HOME/llmgeom, else ~/.cache/llmgeom."""
    if "LLMGEOM_CACHE" in os.environ:
        return Path(os.environ["LLMGEOM_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "llmgeom"


def digest(spec: Mapping[str, Any]) -> str:
    """sha256 of plain data, by its JSON with sorted keys; 64 hex digits."""
    return hashlib.sha256(json.dumps(spec, sort_keys=True, allow_nan=False).encode()).hexdigest()


class Store:
    """The shards of one capture, in a folder named by the hash of everything that decides its bytes.

    spec holds model, weights, dtype, tokenizer, prompts, plan, sites, edits and versions: another spec is another
    folder, so nothing stale is ever read, and the same command after a kill goes on where it stopped.
    """

    def __init__(self, root: str | os.PathLike, spec: Mapping[str, Any]) -> None:
        self.folder = Path(root) / digest(spec)[:24]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Refused(
                f"{self.folder} cannot be made ({error.strerror}); set LLMGEOM_CACHE to a folder that can be written"
            ) from error
        write_whole(self.folder / "spec.json", (json.dumps(spec, sort_keys=True, indent=1) + "\n").encode())
        self._known = self._manifest()

    def _manifest(self) -> dict[str, str]:
        known = {}
        path = self.folder / "manifest.jsonl"
        if path.exists():
            for line in path.read_text(encoding="utf-8").split("\n"):
                try:
                    entry = json.loads(line)
                    known[entry["shard"]] = entry["sha256"]
                except (ValueError, KeyError):
                    continue  # the last line of a killed run may be cut; its shard is simply made again
        return known

    def read(self, index: int) -> dict[str, Tensor] | None:
        """The tensors of shard `index`, or None where it is absent, unlisted or damaged (it is then made again)."""
        from safetensors.torch import load

        name = f"{index:05d}.safetensors"
        if name not in self._known:
            return None
        try:
            data = (self.folder / name).read_bytes()
        except OSError:
            return None
        return load(data) if hashlib.sha256(data).hexdigest() == self._known[name] else None

    def write(self, index: int, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Write shard `index` whole, then list it. `about` is kept as one sorted JSON string in the shard."""
        from safetensors.torch import save

        name = f"{index:05d}.safetensors"
        metadata = {"llmgeom": json.dumps(about, sort_keys=True)}
        data = save({key: tensor.contiguous() for key, tensor in tensors.items()}, metadata)
        write_whole(self.folder / name, data)
        sha256 = hashlib.sha256(data).hexdigest()
        line = json.dumps({"shard": name, "sha256": sha256, **about}, sort_keys=True)
        with open(self.folder / "manifest.jsonl", "a+b") as handle:
            # A kill may have cut the last line: never write onto its tail.
            handle.seek(0, os.SEEK_END)
            if handle.tell():
                handle.seek(-1, os.SEEK_END)
                if handle.read(1) != b"\n":
                    handle.write(b"\n")
            handle.write(line.encode() + b"\n")
            handle.flush()
            os.fsync(handle.fileno())
        self._known[name] = sha256
