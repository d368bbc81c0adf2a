"""What decides the bytes of a capture, as plain data: what a store knows it by."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import inspect
import json
import os
import re
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmgeom.cache.shards import SCHEMA, cache_folder
from llmgeom.errors import UserError
from llmgeom.files import digest, write_whole

if TYPE_CHECKING:
    from llmgeom.batch import Rows, Tokens
    from llmgeom.model.passes import Work
    from llmgeom.model.subject import Subject

# Raised by hand when the same model and prompts give other numbers than before, or numbers in another form.
# tests/test_keys.py fails when the code of a capturing module changes and asks whether they do.
CAPTURE_VERSION = 1
FRESH = 2.0  # seconds in which a file may change again and keep its time


def of(subject: Subject, work: Work) -> tuple[dict[str, Any], dict[str, Any], tuple[dict[str, Any], dict[str, Any]]]:
    """What a `Store` is made with: what all captures of the model have in common, what tells this one from them, and
    what is told of both. Raises UserError for an edit that does not say what it does."""
    if any(not edit.spec for edit in work.edits):
        raise UserError("an edit without a spec cannot be stored: give Edit(..., spec={...}) or capture without store")
    facts, source = subject.facts, work.batch.source
    spec = {
        "untrained": facts.get("untrained"),
        "tokens": of_tokens(work.tokens),
        "positions": hashlib.sha256(work.where.numpy().tobytes()).hexdigest(),
        "plan": digest({"batches": work.batches, "shards": [list(group) for group in work.groups]}),
        "sites": sorted(work.sites),
        **(
            {"observers": {one.name: one.version or of_code(one.function) for one in work.observers}}
            if work.observers
            else {}
        ),
        "edits": [{"point": e.point, "layers": e.layers, "at": e.positions, "spec": dict(e.spec)} for e in work.edits],
    }
    origin = facts.get("untrained_of") or {"name": facts["name"], "revision": facts.get("revision")}
    about = {
        "of": str(source.get("name", source.get("kind", "prompts"))),
        "prompts": len(work.batch),
        "shards": len(work.groups),
    }
    return of_run(subject), spec, (origin, about)


def of_run(subject: Subject) -> dict[str, Any]:
    """What all captures of a model, and of its untrained controls, have in common."""
    import torch
    import transformers

    facts = subject.facts
    return {
        **{name: facts[name] for name in ("model_type", "dtype", "attention")},
        "weights": subject.identity,
        "config": hashlib.sha256(_settings(subject.model.config)).hexdigest(),
        "tokenizer": _tokenizer(subject.tokenizer),
        # Which of several cards it is on decides nothing.
        "device": sorted({place.split(":")[0] for place in facts["device"].split("+")}),
        "code": [CAPTURE_VERSION, SCHEMA, _source(subject.model.__class__)],
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "threads": torch.get_num_threads(),
    }


def of_bytes(data: bytes) -> str:
    """sha256, 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def of_source(path: Path) -> str:
    """sha256 of a file."""
    return of_bytes(path.read_bytes())


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
    return hashlib.sha256(repr(_without_empty(tree)).encode()).hexdigest()


def _without_empty(node: Any) -> Any:
    """A syntax tree as lists and strings. Empty fields are left out: Python versions differ in them."""
    if isinstance(node, list):
        return [_without_empty(item) for item in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    return [type(node).__name__, {k: _without_empty(v) for k, v in ast.iter_fields(node) if v not in (None, [])}]


def of_tokens(tokens: Tokens | Rows) -> str:
    """sha256 of what is read and its lengths: two runs on the same prompts have the same hash."""
    return hashlib.sha256(tokens.data.numpy().tobytes() + tokens.lengths.numpy().tobytes()).hexdigest()


def of_files(folder: str | os.PathLike) -> str:
    """sha256 over config and weights in a folder, each by name and hash; 64 hex digits.

    A file of the hub's cache is a link to a blob that is named by its hash. Any other is read once, and again when its
    path, size, times or inode are not those that were noted (hashes.json in the cache folder).
    """
    paths = sorted(p for p in Path(folder).iterdir() if p.name == "config.json" or ".safetensors" in p.name)
    note = cache_folder() / "hashes.json"
    try:
        known = dict(json.loads(note.read_bytes()))
    except (OSError, ValueError, TypeError):
        known = {}
    before, found = dict(known), {}
    for path in paths:
        found[path.name] = _named_by_hash(path) or _noted(path, known)
    if known != before:
        with contextlib.suppress(OSError, UserError):  # a cache that cannot be written costs time only
            note.parent.mkdir(parents=True, exist_ok=True)
            write_whole(note, json.dumps(known, sort_keys=True).encode())
    return digest(found)


def _named_by_hash(path: Path) -> str:
    """Large files of the hub are named by their sha256 in its cache; empty for any other."""
    name = os.path.basename(os.readlink(path)) if path.is_symlink() else ""
    return name if re.fullmatch("[0-9a-f]{64}", name) else ""


def _noted(path: Path, known: dict) -> str:
    is_now = path.stat()
    stamp = [is_now.st_size, is_now.st_mtime_ns, is_now.st_ctime_ns, is_now.st_ino]
    where = str(path.resolve())
    match known.get(where):
        case [noted, str(found)] if noted == stamp:
            return found
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if time.time() - is_now.st_ctime > FRESH:
        known[where] = [stamp, found]
    return found


def _settings(config: Any) -> bytes:
    """A config as bytes, less the folder that it came from."""
    told = json.loads(config.to_json_string(use_diff=False))
    told.pop("_name_or_path", None)
    return json.dumps(told, sort_keys=True).encode()


@lru_cache(maxsize=8)
def _tokenizer(tokenizer: Any) -> str:
    """sha256 of a tokenizer's rules; empty for none."""
    if tokenizer is None:
        return ""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    told = fast.to_str() if fast is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()


@lru_cache
def _source(kind: type) -> str:
    """sha256 of the code of a model that is not transformers' own (a tunnel's, a repository's): of its folder."""
    if kind.__module__.split(".")[0] == "transformers":
        return ""
    try:
        folder = Path(inspect.getsourcefile(kind) or "").resolve().parent
    except (TypeError, OSError):  # typed into a notebook
        return kind.__qualname__
    total = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()
