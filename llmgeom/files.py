"""Files that appear whole or not at all, and hashes of plain data (no torch, no numpy)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmgeom.errors import UserError

REMEDY = "free space, or choose a folder that can be written (--out, LLMGEOM_CACHE)"


def write_whole(path: Path, data: bytes, remedy: str = REMEDY) -> None:
    """Writes a file so that a crash leaves the old file or the new one, never a part: temporary name, fsync, rename.

    Args:
        path: The file. Its folder must exist.
        data: The whole content.
        remedy: The end of the error sentence: what the user can do about a full disk or a missing permission.

    Raises:
        UserError: The file could not be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as handle:
            handle.write(data)
            handle.flush()
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
    """Creates a folder and its parents.

    Raises:
        UserError: The folder could not be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritten(folder, error) from error


def unwritten(path: Path, error: OSError, remedy: str = REMEDY) -> UserError:
    """The error for a path that the system would not let us write."""
    return UserError(f"{path} could not be written ({error.strerror}); {remedy}")


def remove_unfinished(folder: Path, name: str = "") -> None:
    """Removes the temporary files that killed processes left in a folder; those of running processes stay.

    Args:
        folder: Where to look.
        name: Restricts the search to files that would have got this name.
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
