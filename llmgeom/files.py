"""Files: atomic writes, reading of a user's code, and hashes of plain data (no torch)."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from llmgeom.errors import UserError, first_line

REMEDY = "free space, or choose a folder that can be written (--out, LLMGEOM_CACHE)"


def write_whole(path: Path, data: bytes, remedy: str = REMEDY, *, durable: bool = True) -> None:
    """Writes a file so that a crash leaves the old or the new file, never a part: temporary name, fsync, rename.

    Args:
        path: The file. Its folder must exist.
        remedy: The end of the error sentence: the user's remedy for a full disk or a missing permission.
        durable: Wait until the disk has stored it. Without, a loss of power can leave an empty file; a cache can accept
            that, since it checks its files by their hash. Waiting for the 600 files of a default scan takes a second.

    Raises:
        UserError: The file could not be written, or is a device or a pipe, which the new file would replace.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise UserError(f"{path} is no file but a device or a pipe: give the name of a file")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as handle:
            handle.write(data)
            handle.flush()
            if durable:
                os.fsync(handle.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise unwritten(path, error, remedy) from error


def write_json(path: Path, body: Mapping[str, Any]) -> None:
    """Writes plain data as indented JSON with sorted keys, whole or not at all.

    Raises:
        UserError: The file could not be written.
        ValueError: A number is not finite.
    """
    text = json.dumps(body, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
    # A lone surrogate (a file name that is not UTF-8) becomes its \\u escape, which is valid JSON.
    write_whole(path, (text + "\n").encode(errors="backslashreplace"))


def make_folder(folder: Path) -> None:
    """Creates a folder and its parents. Raises UserError: the folder could not be created."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritten(folder, error) from error


def unwritten(path: Path, error: OSError, remedy: str = REMEDY) -> UserError:
    """The error for a path that the system would not let us write."""
    return UserError(f"{path} could not be written ({error.strerror}); {remedy}")


def remove_unfinished(folder: Path, name: str = "") -> None:
    """Removes the temporary files that killed processes left in a folder, but not those of running processes.

    Args:
        name: Restricts the search to temporary files of the file with this name.
    """
    from psutil import pid_exists

    for path in folder.glob(f".{name or '*'}.*.tmp"):
        process = path.name.split(".")[-2]
        if process.isdigit() and not pid_exists(int(process)):
            with contextlib.suppress(OSError):  # a read-only folder can still be read
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def sha256(data: bytes) -> str:
    """The SHA-256 of some bytes, 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def digest(spec: Mapping[str, Any] | list[Any]) -> str:
    """The SHA-256 of plain data, from its JSON with sorted keys; 64 hex digits."""
    return sha256(json.dumps(spec, sort_keys=True, allow_nan=False).encode())


def import_file(path: Path, kind: str, where: str) -> ModuleType:
    """The file as a module, under a name of its own.

    Args:
        kind: The kind of its content, e.g. "probe".
        where: The user's way to name it, with which the error begins.

    Raises:
        UserError: The file does not exist or cannot be imported.
    """
    spec = importlib.util.spec_from_file_location(f"llmgeom_{kind}_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        form = "path/to/file.py" + ":CLASS" * (kind == "world")
        raise UserError(f"{where} is not a file that exists; a {kind} of your own is given as {form}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module here
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{where} cannot be imported ({reason}); correct it") from error
    return module
