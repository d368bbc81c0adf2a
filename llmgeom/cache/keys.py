"""Cache keys: everything that determines the bytes of a capture, as plain data and hashes."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import inspect
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmgeom.cache.shards import SCHEMA, cache_folder
from llmgeom.errors import UserError
from llmgeom.files import digest, remove_unfinished, sha256, write_whole

if TYPE_CHECKING:
    from llmgeom.batch import Rows, Tokens

# Raised by hand when the same model and prompts give other numbers than before, or numbers in another form.
# tests/test_keys.py fails when the code of a capturing module changes and asks whether they do.
CAPTURE_VERSION = 1
FRESH = 2.0  # seconds in which a file may change again and keep its time


def run_spec(facts: Mapping[str, Any], weights: str, model: Any, tokenizer: Any) -> dict[str, Any]:
    """What all captures of one model, and of its untrained controls, have in common.

    Args:
        facts: Of the model.
        weights: A hash of its weights, or of the files that they were read from.
        model: Its config and its class count, its weights do not.
        tokenizer: Its rules count; None for none.
    """
    import torch
    import transformers

    return {
        **{name: facts[name] for name in ("model_type", "dtype", "attention")},
        "weights": weights,
        "config": sha256(_settings(model.config)),
        "tokenizer": _tokenizer(tokenizer),
        # Which of several cards the model is on decides nothing.
        "device": sorted({place.split(":")[0] for place in facts["device"].split("+")}),
        "code": [CAPTURE_VERSION, SCHEMA, _source(model.__class__)],
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "threads": torch.get_num_threads(),
    }


@lru_cache
def of_code(function: Callable[..., Any]) -> str:
    """sha256 of the code of the module that defines a function; the function's name where there is no source."""
    module = inspect.getmodule(function)
    try:
        return code_hash(inspect.getsource(module if module is not None else function))
    except (OSError, TypeError, SyntaxError):  # typed into a notebook
        return f"{function.__module__}.{function.__qualname__}"


def code_hash(source: str) -> str:
    """sha256 of the syntax tree of Python code, without docstrings; the same in every Python version."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        match body := getattr(node, "body", None):
            case [ast.Expr(value=ast.Constant(value=str())), *_]:
                body.pop(0)
    return sha256(repr(_without_empty(tree)).encode())


def _without_empty(node: Any) -> Any:
    """A syntax tree as lists and strings. Empty fields are left out: Python versions differ in them."""
    if isinstance(node, list):
        return [_without_empty(item) for item in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    return [type(node).__name__, {k: _without_empty(v) for k, v in ast.iter_fields(node) if v not in (None, [])}]


def of_tokens(tokens: Tokens | Rows) -> str:
    """sha256 of the inputs and their lengths: two runs on the same prompts have the same hash."""
    return sha256(tokens.data.numpy().tobytes() + tokens.lengths.numpy().tobytes())


def of_files(folder: str | os.PathLike) -> str:
    """sha256 over the config and the weights in a folder, each by name and hash; 64 hex digits.

    A large file of the hub's cache is a link to a blob that is named by its hash. Any other file is read once, and
    again when its path, size, times or inode differ from those noted in hashes.json in the cache folder.
    """
    paths = sorted(p for p in Path(folder).iterdir() if p.name == "config.json" or ".safetensors" in p.name)
    note = cache_folder() / "hashes.json"
    try:
        known = dict(json.loads(note.read_bytes()))
    except (OSError, ValueError, TypeError):
        known = {}
    before = dict(known)
    hashes = {path.name: _named_by_hash(path) or _noted(path, known) for path in paths}
    if known != before:
        with contextlib.suppress(OSError, UserError):  # a cache that cannot be written costs time only
            note.parent.mkdir(parents=True, exist_ok=True)
            remove_unfinished(note.parent, note.name)
            write_whole(note, json.dumps(known, sort_keys=True).encode())
    return digest(hashes)


def _named_by_hash(path: Path) -> str:
    """Large files of the hub are named by their sha256 in its cache; empty for any other."""
    name = os.path.basename(os.readlink(path)) if path.is_symlink() else ""
    return name if re.fullmatch("[0-9a-f]{64}", name) else ""


def _noted(path: Path, known: dict) -> str:
    """The hash of a file, from the notes while its stamp is the same; a file just written is not noted."""
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


def _settings(config: Any) -> bytes:
    """A config as bytes, without the folder that it came from."""
    settings = json.loads(config.to_json_string(use_diff=False))
    settings.pop("_name_or_path", None)
    return json.dumps(settings, sort_keys=True).encode()


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
    """sha256 of the folder of a model class that is not in transformers (a wind tunnel's, a repository's)."""
    if kind.__module__.split(".")[0] == "transformers":
        return ""
    try:
        folder = Path(inspect.getsourcefile(kind) or "").resolve().parent
    except (TypeError, OSError):  # typed into a notebook
        return kind.__qualname__
    return digest({path.name: sha256(path.read_bytes()) for path in folder.glob("*.py")})
