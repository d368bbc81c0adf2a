"""Whether the files of a model are whole and safe to open, from their names and headers."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llmgeom.errors import UserError

SAFE = ("model.safetensors", "model.safetensors.index.json")  # in the order transformers prefers them


class Incomplete(UserError):
    """Files are missing: final for a folder, while a snapshot in the cache can still be completed from the hub."""


def read_json(path: str) -> dict[str, Any]:
    """A JSON object from a file. Raises UserError: it is damaged, or something else."""
    try:
        found = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise corrupt(path, f"not a JSON object: {error}") from error
    if not isinstance(found, dict):
        raise corrupt(path, f"not a JSON object: {type(found).__name__}")
    return found


def weights_file(names: Iterable[str], name: str) -> str:
    """The weight file that transformers will choose. A pickle is refused: opening it runs the code inside."""
    names = sorted(names)
    if chosen := next((safe for safe in SAFE if safe in names), None):
        return chosen
    training = ("training_args", "optimizer", "scheduler", "rng_state")
    if pickles := [n for n in names if n.endswith((".bin", ".pt", ".pth", ".ckpt")) and not n.startswith(training)]:
        raise Incomplete(
            f"{name}: weights only as pickle ({pickles[0]}), which can run code when opened; convert once with "
            "save_pretrained, which writes safetensors, or name a revision that has them (--revision refs/pr/N)"
        )
    other = [f", found {n}" for n in names if n.endswith((".safetensors", ".gguf", ".h5", ".msgpack"))]
    raise Incomplete(f"{name}: no weights; expected {SAFE[0]} or {SAFE[1]}{(other or [''])[0]}")


def plausible(config: dict[str, Any], tensors: int, path: str) -> None:
    """Refuse a config.json with more layers than there are tensors: transformers would build them all."""
    inner = config.get("text_config")
    for body in (config, inner if isinstance(inner, dict) else {}):
        for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
            if isinstance(layers := body.get(name), int | float) and not layers <= tensors:
                raise corrupt(path, f"{name} is {layers}, and its weights hold {tensors} tensors")


def intact(path: str) -> int:
    """Number of tensors in a safetensors file, from its header. Refuse a file of any other length than it says."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        head = file.read(8)
        if head == b"version ":
            raise corrupt(path, "a git-lfs pointer in place of weights: run `git lfs pull`")
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > min(size - 8, 100_000_000):
            raise corrupt(path, f"its {size} bytes do not hold its header")
        try:
            header = json.loads(file.read(length))
            end = max(int(entry["data_offsets"][1]) for key, entry in header.items() if key != "__metadata__")
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise corrupt(path, "its header is not that of a safetensors file") from error
    if size != 8 + length + end:
        raise corrupt(path, f"{size} bytes where its header says {8 + length + end}")
    return len(header.keys() - {"__metadata__"})


def native(model_type: object) -> bool:
    """Whether the installed transformers implements this causal LM. Read from its source: an import takes seconds.

    Many models with an `auto_map` (such as Phi-3) are native by now; their own code is then not run.
    """
    spec = importlib.util.find_spec("transformers")
    table = Path(spec.origin if spec and spec.origin else "").parent / "models" / "auto" / "modeling_auto.py"
    text = table.read_text(encoding="utf-8") if table.is_file() else ""
    found = re.search(r"MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = OrderedDict\((.*?)\n\)", text, re.S)
    return found is None or f'"{model_type}"' in found[1]  # no table: from_pretrained decides, before the weights


def corrupt(path: str, why: str) -> UserError:
    return UserError(f"{path} is corrupt ({why}); delete it and save or download it again")
