"""Prompts of your own, read from a file; they are hostile data and never interpreted."""

from __future__ import annotations

import json
import os
import sys

from llmgeom.batch import Batch, Text
from llmgeom.errors import UserError

LONGEST = 100_000
MOST = 2**28  # bytes of a file
_OPTIONAL = ("template", "domain", "tags")


def read(path: str) -> Batch:
    """The prompts of a file: .jsonl, an object a line; any other name, a prompt a line; `-` is standard input.

    In JSONL "text" is required; "template" (the unit; by default each line is its own), "domain" and "tags" are
    optional strings and other keys are ignored. Blank lines at the end are ignored. Standard input is JSONL where its
    first non-blank character is {. Raises UserError with file, line, what was found and the remedy.
    """
    name = "standard input" if path == "-" else str(path)
    whole = _decoded(_bytes(path, name), name)
    if not whole.strip():
        raise UserError(f"{name} is empty: expected a prompt a line, or one JSON object a line")
    as_json = whole.lstrip()[0] == "{" if path == "-" else name.lower().endswith(".jsonl")
    # str.splitlines would also break at U+2028 and the like, which a prompt may hold.
    lines = [line.removesuffix("\r") for line in whole.split("\n")]
    while not lines[-1].strip():
        lines.pop()
    rows: list[dict[str, str]] = []
    first: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        where = f"{name}, line {number}"
        if len(line) > LONGEST:
            raise UserError(f"{where} has {len(line)} characters: expected at most {LONGEST}; shorten it or split it")
        row = _object(line, where) if as_json else {"text": line}
        text = row["text"]
        if not text.strip():
            raise UserError(f"{where} is a blank prompt: give it a text or remove the line")
        if "\0" in text:
            raise UserError(f"{where} holds a NUL character at position {text.index(chr(0)) + 1}: remove it")
        if text in first:
            raise UserError(f"{name}, lines {first[text]} and {number} are the same prompt: remove one of them")
        first[text] = number
        rows.append({"template": f"line-{number}", "domain": "", "tags": "", **row})
    return Batch(
        inputs=Text(tuple(row["text"] for row in rows)),
        cluster=tuple(row["template"] for row in rows),
        source={"kind": "file", "name": "stdin" if path == "-" else os.path.basename(name), "n": len(rows)},
        columns={key: tuple(row[key] for row in rows) for key in ("domain", "template", "tags")},
    )


def _bytes(path: str, name: str) -> bytes:
    try:
        if path == "-":
            blob = sys.stdin.buffer.read(MOST + 1)
        else:
            with open(path, "rb") as file:
                blob = file.read(MOST + 1)  # a device may have no end
    except FileNotFoundError:
        raise UserError(f"{name} does not exist: give a .jsonl or .txt file, or - for standard input") from None
    except IsADirectoryError:
        raise UserError(
            f"{name} is a folder: give a .jsonl or .txt file in it, or use --prompts-from for a run"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{name!r} cannot be read ({error}): check its name and permissions") from None
    if len(blob) > MOST:
        raise UserError(f"{name} has more than {MOST >> 20} MiB: split it")
    return blob


def _decoded(blob: bytes, name: str) -> str:
    # A mark that some editors put first is no part of the first prompt.
    try:
        return blob.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        blob = error.object
        line = blob.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{name}, line {line} is not UTF-8 (byte 0x{blob[error.start]:02x}): save the file as UTF-8"
        ) from None


def _object(line: str, where: str) -> dict[str, str]:
    """The known keys of one line of JSONL, checked."""
    if not line.strip():
        raise UserError(f"{where} is a blank prompt: give it a text or remove the line")
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(
            f'{where} is not JSON ({error.msg} at column {error.colno}): expected {{"text": "..."}}'
        ) from None
    except (RecursionError, ValueError):
        raise UserError(
            f'{where} is JSON that is nested too deep or holds too long a number: expected {{"text": "..."}}'
        ) from None
    if not isinstance(found, dict):
        raise UserError(f'{where} is a JSON {type(found).__name__}, not an object: expected {{"text": "..."}}')
    if "text" not in found:
        raise UserError(f'{where} has no "text" (its keys: {", ".join(map(repr, found)) or "none"}): add it')
    for key in ("text", *_OPTIONAL):
        if key in found and not isinstance(found[key], str):
            raise UserError(f'{where} has a "{key}" of type {type(found[key]).__name__}: expected a string')
        # A lone surrogate is valid JSON but no text: it could neither be tokenized nor saved.
        if key in found and any("\ud800" <= c <= "\udfff" for c in found[key]):
            raise UserError(f'{where} has a lone surrogate in "{key}": write the character itself or remove it')
    if not found.get("template", "one").strip():
        raise UserError(f'{where} has a blank "template": name the unit, or leave the key out for a unit of its own')
    return {key: found[key] for key in ("text", *_OPTIONAL) if key in found}
