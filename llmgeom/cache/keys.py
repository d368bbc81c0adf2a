"""Cache keys: everything that determines the bytes of a capture, as plain data and hashes."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmgeom.cache.shards import SCHEMA, cache_folder
from llmgeom.errors import UserError
from llmgeom.files import digest, remove_unfinished, sha256, write_whole

if TYPE_CHECKING:
    from llmgeom.batch import Batch, Rows, Tokens

# Raised by hand when the same model and prompts give other numbers than before, or numbers in another form.
CAPTURE_VERSION = 6
# Files that loading reads: the model's own, its adapter's, its tokenizer's, and code of the repository.
READ = re.compile(
    r"^(config|adapter_config|special_tokens_map|added_tokens|vocab)\.json$|\.safetensors|^tokenizer|^merges\.txt$"
    r"|^vocab\.txt$|^chat_template|\.model$|\.py$"
)
FRESH = 2.0  # seconds within which a file may change again without a new time stamp


def run_spec(facts: Mapping[str, Any], weights: str, model: Any, tokenizer: Any) -> dict[str, Any]:
    """The facts that all captures of one model, and of its untrained controls, have in common.

    Args:
        facts: Facts of the model.
        weights: A hash of its weights, or of the files from which they were read.
        model: The model, of which config and class enter.
        tokenizer: The tokenizer, of which the rules enter; None for none.
    """
    import torch
    import transformers

    places = [place.split(":")[0] for place in facts["device"].split("+")]
    config = json.loads(model.config.to_json_string(use_diff=False))
    config.pop("_name_or_path", None)
    return {
        **{name: facts[name] for name in ("model_type", "dtype", "attention")},
        "weights": weights,
        "config": sha256(json.dumps(config, sort_keys=True).encode()),
        "tokenizer": _tokenizer(tokenizer),
        "adapters": adapters(model),
        # What `set_experts_implementation` chose; the config's JSON leaves it out.
        "experts": getattr(model.config.get_text_config(), "_experts_implementation", None),
        # The number of the card changes nothing; only the way in which tied weights are redrawn does.
        "device": sorted(places if getattr(model, "all_tied_weights_keys", None) else {*places}),
        "code": [CAPTURE_VERSION, SCHEMA, _source(model.__class__)],
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "threads": torch.get_num_threads(),
    }


def adapters(model: Any) -> list[Any]:
    """The active PEFT adapters of each layer that has some, and their scales; empty for none.

    Their weights are part of the model's weights.
    """
    layers = {path: m for path, m in model.named_modules() if isinstance(getattr(m, "active_adapters", None), list)}
    scales = {path: dict(getattr(layer, "scaling", {})) for path, layer in layers.items()}
    return [
        [path, bool(layer.disable_adapters), [[name, scales[path].get(name)] for name in layer.active_adapters]]
        for path, layer in layers.items()
    ]


def named(value: Any) -> Any:
    """A value as plain data for a cache key, equal only for equal values; a class by its name.

    Fields of a dataclass that are excluded from comparison are excluded here. Raises UserError: an object is not a
    number, text, collection, array or dataclass of these.
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return ["float", repr(value)]
        case list() | tuple():
            return [named(item) for item in value]
        case set() | frozenset():
            return ["set", *sorted(map(named, value), key=repr)]
        case Mapping():
            return ["mapping", *([named(key), named(item)] for key, item in value.items())]
        case type():
            return ["class", value.__module__, value.__qualname__]
    if hasattr(value, "detach"):
        value = value.detach().cpu().float().numpy() if value.is_floating_point() else value.cpu().numpy()
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        return ["array", str(value.dtype), list(value.shape), sha256(np.ascontiguousarray(value).tobytes())]
    if dataclasses.is_dataclass(value):
        compared = [field.name for field in dataclasses.fields(value) if field.compare]
        return [named(type(value)), *([name, named(getattr(value, name))] for name in compared)]
    raise UserError(f"a {type(value).__qualname__} cannot be part of a cache key")


def of_tokens(tokens: Tokens | Rows) -> str:
    """sha256 of the inputs and their lengths: two runs on the same prompts have the same hash."""
    return sha256(tokens.data.numpy().tobytes() + tokens.lengths.numpy().tobytes())


def of_facts(batch: Batch) -> str:
    """Clusters, columns, targets and posterior of a batch: the facts that a probe may read besides tokens."""
    columns = {name: list(map(str, column)) for name, column in batch.columns.items()}
    facts: dict[str, Any] = {"cluster": batch.cluster, "columns": columns}
    tensors = {"query": batch.query, "target": batch.target}
    facts |= {name: sha256(x.numpy().tobytes()) for name, x in tensors.items() if x is not None}
    answers = ""
    if (posterior := batch.posterior) is not None:
        exact = {name: x for name, x in vars(posterior).items() if hasattr(x, "numpy")}
        exact |= {f"trivial: {name}": each for name, each in posterior.trivial.items()}
        hashes = {name: sha256(x.numpy().tobytes()) for name, x in exact.items()}
        answers = digest({**hashes, "outcomes": list(posterior.outcomes)})
    return digest({**facts, "posterior": answers, "source": dict(batch.source)})


def of_pool(pool: Batch) -> str:
    """A hash of the source of a pool's prompts: a task's spec, or the texts themselves, with a process's spec."""
    if pool.source.get("kind") == "task":
        return digest(pool.source)
    spec = {"process": pool.source} if pool.source.get("kind") == "process" else {}
    return digest({"text": pool.text, "cluster": pool.cluster, **spec})


def of_files(folder: str | os.PathLike) -> str:
    """sha256 over config, weights, adapter, tokenizer and code in a folder, each by name and hash; 64 hex digits."""
    paths = sorted(p for p in Path(folder).iterdir() if READ.search(p.name))
    return digest(dict(zip([path.name for path in paths], hashes(paths), strict=True)))


def hashes(paths: Sequence[Path]) -> list[str]:
    """sha256 of each file; 64 hex digits.

    A large file of the hub's cache is a link to a blob that is named by its hash. Any other file is read once, and
    again if its path, size, times or inode differ from the entry of hashes.json in the cache folder. A file just
    written has no entry.
    """
    note = cache_folder() / "hashes.json"
    try:
        known = dict(json.loads(note.read_bytes()))
    except (OSError, ValueError, TypeError):
        known = {}
    before = dict(known)

    def one(path: Path) -> str:
        blob = os.path.basename(os.readlink(path)) if path.is_symlink() else ""
        if re.fullmatch("[0-9a-f]{64}", blob):
            return blob
        now = path.stat()
        stamp = [now.st_size, now.st_mtime_ns, now.st_ctime_ns, now.st_ino]
        where = str(path.resolve())
        match known.get(where):
            case [noted, str(hexdigest)] if noted == stamp:
                return hexdigest
        with open(path, "rb") as file:
            hexdigest = hashlib.file_digest(file, "sha256").hexdigest()
        if time.time() - now.st_ctime > FRESH:
            known[where] = [stamp, hexdigest]
        return hexdigest

    with ThreadPoolExecutor() as pool:  # the files of 7e9 parameters take one core 13 s
        found = [*pool.map(one, paths)]
    if known != before:
        with contextlib.suppress(OSError, UserError):  # a cache that cannot be written only costs time
            note.parent.mkdir(parents=True, exist_ok=True)
            remove_unfinished(note.parent, note.name)
            write_whole(note, json.dumps(known, sort_keys=True).encode())
    return found


@lru_cache(maxsize=8)
def _tokenizer(tokenizer: Any) -> str:
    """sha256 of a tokenizer's rules; empty for none."""
    if tokenizer is None:
        return ""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    rules = fast.to_str() if fast is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return sha256(rules.encode())


@lru_cache
def _source(kind: type) -> str:
    """sha256 of the folder of a model class outside transformers (of a wind tunnel or a repository)."""
    if kind.__module__.split(".")[0] == "transformers":
        return ""
    try:
        folder = Path(inspect.getsourcefile(kind) or "").resolve().parent
    except (TypeError, OSError):  # typed into a notebook
        return kind.__qualname__
    return digest({path.name: sha256(path.read_bytes()) for path in folder.glob("*.py")})


@lru_cache
def of_program() -> str:
    """sha256 of llmgeom's sources and of the versions of the libraries that influence numbers; imports none of them."""
    wings = [find_spec(name) for name in ("llmgeom", "llmgeom.probes", "llmgeom.prompts", "llmgeom.wind_tunnels")]
    folders = [Path(folder) for wing in wings if wing for folder in wing.submodule_search_locations or ()]
    paths = {
        path for folder in folders for path in folder.rglob("*.*") if path.suffix in (".py", ".toml", ".md", ".txt")
    }
    sources = sorted([path.name, sha256(path.read_bytes())] for path in paths)
    return digest([sources, [version(name) for name in ("torch", "transformers", "numpy", "scipy", "scikit-learn")]])
