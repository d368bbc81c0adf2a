"""A user's prompts from a file, a frame or a data set; they count as hostile data and are never interpreted."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from random import Random
from typing import Any

from llmgeom import columns
from llmgeom.batch import Batch, Text
from llmgeom.errors import UserError, unknown
from llmgeom.optional import silence
from llmgeom.prompts.domains import Distinct

LONGEST = 100_000
MOST = 2**28  # bytes of a file
_OPTIONAL = ("template", "domain", "tags")
_KNOWN = frozenset({"text", *_OPTIONAL})
# Endings of files whose lines are not prompts: a JSON array or a table would be scanned with its syntax.
_NO_LINES = (
    "json ndjson geojson ipynb yaml yml toml xml html htm rtf tsv xls xlsx ods doc docx odt ppt pptx pdf epub "
    "pkl pickle npy npz pth bin safetensors h5 hdf5 arrow feather avro orc db sqlite rds rdata mat "
    "zip gz bz2 xz zst tar tgz 7z png jpg jpeg gif"
)
NO_LINES = frozenset(_NO_LINES.split())
# Tensors of PyTorch, which contain NUL bytes, or text in Portuguese, such as questions.pt next to questions.en.
EITHER = frozenset({"pt"})
_PAIRS = 3  # pairs of equal prompts that an error names
PREFIX = "hf:"  # of a data set
WORDS = (8, 48)  # of a document, least and most
BUFFER = 5000  # documents that are shuffled at the same time
_SPLITS = ("train", "test", "validation")


def read(path: str, cluster: str | None = None) -> Batch:
    """The prompts of a file, with every further column of its table.

    .jsonl has one object per line, .csv and .parquet a table; .txt and any other text one prompt per line; `-` is
    standard input, which is JSONL if its first non-blank character is {. Endings of other formats, e.g. .json or .pdf
    (`NO_LINES`), are refused; .pt is refused if the file contains tensors. In a table "text" is required; "template",
    "domain" and "tags" are optional text. Chats have "messages" instead of "text", a list of objects with `role` and
    `content`; a column "conversation" is then their cluster. Every other column is kept in `Batch.columns` as numbers,
    truth values or text (see `llmgeom.columns`), except columns of lists or objects, which `source` names.
    Blank lines at the end are ignored.

    Args:
        cluster: The column whose equal values make a cluster; by default "template", or else each row is a cluster.

    Raises:
        UserError: The file cannot be used; the message has file, line, problem and remedy.
    """
    name = "standard input" if path == "-" else str(path)
    kind = _ending(path)
    if kind in NO_LINES:
        raise _not_read(name, kind)
    if kind == "parquet":
        return _batch(_parquet(path, name), name, path, "row", cluster)
    blob = whole_bytes(path, name)
    if kind in EITHER and b"\0" in blob:
        raise _not_read(name, kind)
    whole = decoded(blob, name)
    if kind == "csv":
        return _batch(_csv(whole, name), name, path, "row", cluster)
    if not whole.strip():
        raise UserError(f"{name} is empty: expected a prompt a line, or one JSON object a line")
    as_json = whole.lstrip()[0] == "{" if path == "-" else kind == "jsonl"
    # str.splitlines would also break at U+2028 and similar characters, which a prompt may contain.
    lines = [line.removesuffix("\r") for line in whole.split("\n")]
    while not lines[-1].strip():
        lines.pop()
    rows = []
    for number, line in enumerate(lines, start=1):
        rows.append(_object(line, f"{name}, line {number}") if as_json else {"text": line})
    return _batch(rows, name, path, "line", cluster)


def _not_read(name: str, kind: str) -> UserError:
    """The error for a file of another format, with the accepted formats."""
    return UserError(
        f"{name} ends in .{kind}, which is not read: expected a table (.jsonl, .csv or .parquet), or text with a "
        "prompt a line (.txt, or no ending); save it as one of these"
    )


def tabular(path: str) -> bool:
    """Whether a file may have columns, by its name as in `read`; standard input may."""
    return path == "-" or _ending(path) in ("jsonl", "csv", "parquet")


def _ending(path: str) -> str:
    """The ending of a file's name in lower case; empty without one."""
    return os.path.basename(path).lower().rpartition(".")[2] if "." in os.path.basename(path) else ""


def from_frame(frame: Any, text: str = "text", cluster: str | None = None) -> Batch:
    """The prompts of a pandas frame (or of a mapping of columns), with every further column kept as in `read`.

    Args:
        frame: The frame; a name that is no text, such as a number, counts as its text.
        text: The column of prompts.
        cluster: As in `read`.

    Raises:
        UserError: No frame, or one without rows; a column does not exist, two have one name or another length; or a
            prompt cannot be used, and the message names its row.
    """
    if not hasattr(frame, "keys"):
        raise UserError(f"a {type(frame).__name__} is no frame: give a pandas frame, or a mapping of columns")
    names, text = [str(name) for name in frame.keys()], str(text)  # noqa: SIM118 (a frame)
    if text not in names:
        raise unknown("column", text, names)
    if len(set(names)) < len(names):
        raise UserError(f"the frame has the columns {', '.join(map(repr, names))}: expected no name twice")
    table = {name: list(frame[key]) for name, key in zip(names, frame.keys(), strict=True)}
    table["text"] = prompts = table.pop(text)
    if odd := next((name for name, cells in table.items() if len(cells) != len(prompts)), None):
        raise UserError(
            f"the frame has {len(table[odd])} cells in {odd!r} and {len(prompts)} prompts: give one for each"
        )
    if not prompts:
        raise UserError("the frame has no rows: add a row for each prompt")
    rows = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
    return _batch(rows, "the frame", "frame", "row", cluster)


def _batch(rows: Sequence[dict[str, Any]], name: str, path: str, unit: str, cluster: str | None) -> Batch:
    """The rows of a table as a batch. `unit` is the file's name for a row."""
    first: dict[str, int] = {}
    repeated: list[tuple[int, int]] = []
    for number, row in enumerate(rows, start=1):
        where = f"{name}, {unit} {number}"
        if columns.MESSAGES in row and "text" not in row:
            row["text"] = columns.spoken(row[columns.MESSAGES], where)
        _check(row, where)
        text = row["text"]
        if not text.strip():
            raise UserError(f"{where} is a blank prompt: give it a text or remove the {unit}")
        if len(text) > LONGEST:
            raise UserError(f"{where} has {len(text)} characters: expected at most {LONGEST}; shorten it or split it")
        if "\0" in text:
            raise UserError(f"{where} holds a NUL character at position {text.index(chr(0)) + 1}: remove it")
        if text in first:
            repeated.append((first[text], number))
        first.setdefault(text, number)
    if repeated:
        pairs = [f"{earlier} and {later}" for earlier, later in repeated]
        if len(pairs) == 1:
            raise UserError(f"{name}, {unit}s {pairs[0]} are the same prompt: remove one of them")
        shown = "; ".join(pairs[:_PAIRS]) + f" and {len(pairs) - _PAIRS} more" * (len(pairs) > _PAIRS)
        raise UserError(f"{name}: {len(pairs)} prompts repeat an earlier one ({unit}s {shown}): remove them")
    usual = {
        "domain": tuple(row.get("domain") or "" for row in rows),
        "template": tuple(row.get("template") or f"{unit}-{number}" for number, row in enumerate(rows, start=1)),
        "tags": tuple(row.get("tags") or "" for row in rows),
    }
    further, left_out = columns.kept(rows, _KNOWN)

    source = {"kind": "file", "name": "stdin" if path == "-" else os.path.basename(name), "n": len(rows)}
    if left_out:
        source["columns left out"] = "; ".join(left_out)
    batch = Batch(Text(tuple(row["text"] for row in rows)), usual["template"], source, columns=usual | further)
    if cluster is None and columns.MESSAGES in further and "conversation" in further:
        cluster = "conversation"
    if cluster is None:
        return batch
    if cluster not in (found := dict.fromkeys(key for row in rows for key in row)):
        raise unknown("column of --cluster", cluster, found)
    source = source | {"cluster": cluster}
    return replace(batch, cluster=tuple(map(str, batch.column(cluster))), source=source)


def _csv(whole: str, name: str) -> list[dict[str, Any]]:
    """The rows of a CSV table with a header."""
    if not whole.strip():
        raise UserError(f'{name} is empty: expected a header with a column "text", then a row for each prompt')
    first = whole.lstrip().split("\n", 1)[0]
    if "," not in first and (other := next((mark for mark in ";\t|" if mark in first), None)):
        raise UserError(f"{name}: columns are separated by {other!r}: use commas, and quote cells that hold commas")
    usual = csv.field_size_limit(MOST)  # a longer prompt is refused with its row, as in other files
    try:
        head, *rows = [row for row in csv.reader(io.StringIO(whole, newline=""), strict=True) if row]
    except csv.Error as error:
        raise UserError(f"{name} is not a CSV table ({error}): quote cells that hold commas or line breaks") from None
    finally:
        csv.field_size_limit(usual)
    if "text" not in head or len(set(head)) < len(head):
        columns_of = ", ".join(map(repr, head))
        raise UserError(f'{name} has the columns {columns_of}: expected one called "text", and no name twice')
    for number, row in enumerate(rows, start=1):
        if len(row) != len(head):
            found = f"{len(row)} cell{'s' * (len(row) > 1)}, the header {len(head)}"
            remedy = "write every cell, an empty one too" if len(row) < len(head) else "quote cells that hold commas"
            raise UserError(f"{name}, row {number} has {found}: {remedy}")
    if not rows:
        raise UserError(f"{name} has a header and no rows: add a row for each prompt")
    table = {
        key: list(cells) if key in _KNOWN else columns.parsed(cells)
        for key, cells in zip(head, zip(*rows, strict=True), strict=True)
    }
    return [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]


def _parquet(path: str, name: str) -> list[dict[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        rows = parquet.read_table(path).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"{name} cannot be read as Parquet ({str(error)[:200]}): check its name") from None
    if not rows:
        raise UserError(f"{name} has no rows: add a row for each prompt")
    return rows


def whole_bytes(path: str, name: str) -> bytes:
    """The bytes of a file, or of standard input for "-". Raises UserError if it cannot be read, or is too large."""
    try:
        if path == "-":
            blob = sys.stdin.buffer.read(MOST + 1)
        else:
            with open(path, "rb") as file:
                blob = file.read(MOST + 1)  # a device may have no end
    except FileNotFoundError:
        raise UserError(
            f"{name} does not exist: give a .txt, .jsonl, .csv or .parquet file, or - for standard input"
        ) from None
    except IsADirectoryError:
        raise UserError(f"{name} is a folder: give a file in it, or use --prompts-from for a run") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{name!r} cannot be read ({error}): check its name and permissions") from None
    if len(blob) > MOST:
        raise UserError(f"{name} has more than {MOST >> 20} MiB: split it")
    return blob


def decoded(blob: bytes, name: str) -> str:
    """The text of UTF-8 bytes. Raises UserError that names the line of other bytes."""
    # A byte order mark, which some editors put first, is not part of the first prompt.
    try:
        return blob.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        blob = error.object
        line = blob.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{name}, line {line} is not UTF-8 (byte 0x{blob[error.start]:02x}): save the file as UTF-8"
        ) from None


def _object(line: str, where: str) -> dict[str, Any]:
    """One line of JSONL."""
    if not line.strip():
        raise UserError(f"{where} is a blank prompt: give it a text or remove the line")
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(
            f'{where} is not JSON ({error.msg} at column {error.colno}): expected {{"text": "..."}}'
        ) from None
    except (RecursionError, ValueError):
        raise UserError(
            f'{where} is JSON that is nested too deep or holds too long a number: expected {{"text": "..."}}'
        ) from None
    if not isinstance(value, dict):
        raise UserError(f'{where} is a JSON {type(value).__name__}, not an object: expected {{"text": "..."}}')
    return value


def _check(row: dict[str, Any], where: str) -> None:
    """Raises UserError if a known column is missing or not text, or a text cannot be saved."""
    if "text" not in row:
        raise UserError(f'{where} has no "text" (its keys: {", ".join(map(repr, row)) or "none"}): add it')
    for key in ("text", *_OPTIONAL):
        if key in row and not isinstance(row[key], str):
            raise UserError(f'{where} has a "{key}" of type {type(row[key]).__name__}: expected a string')
    for key, cell in row.items():
        # A lone surrogate is valid JSON but not text: it can be neither tokenized nor saved.
        if any("\ud800" <= c <= "\udfff" for part in (key, cell) if isinstance(part, str) for c in part):
            raise UserError(f'{where} has a lone surrogate in "{key}": write the character itself or remove it')
    if not row.get("template", "one").strip():
        raise UserError(
            f'{where} has a blank "template": name the template, or leave the key out and the prompt is its own cluster'
        )


# ---- data sets: the opening of each document -------------------------------------------------------------------------


def read_documents(spec: str, n: int, seed: int = 0, *, offline: bool = False) -> Batch:
    """Up to `n` prompts of `hf:NAME[:CONFIG[:COLUMN]]`; NAME is a hub id or a folder of parquet, JSON, CSV or text.

    Documents are streamed from the split "train" (or test, or validation) through a seeded shuffling buffer of 5,000; a
    prompt is the first 8 to 48 words of a document, the number drawn from the seed, never the whole of it. Documents
    without text, of fewer than 9 words, with NUL, or sharing more than 60 % of their word trigrams with an earlier
    prompt are skipped. Each document is a cluster; its other columns are kept, except lists and objects. COLUMN is
    "text" by default, else the only column of strings. Raises UserError: no network, no such data set, or a missing
    config or column; the message has the remedy.
    """
    parts = spec.removeprefix(PREFIX).split(":")
    if not parts[0] or len(parts) > 3:
        raise UserError(
            f"{spec}: expected {PREFIX}NAME[:CONFIG[:COLUMN]], e.g. {PREFIX}ag_news or {PREFIX}wikitext:raw"
        )
    name, config, column = (*parts, "", "")[:3]
    rows, facts = _open(spec, name, config or None, seed, offline)
    rng, distinct = Random(f"llmgeom/documents/{seed}"), Distinct()
    texts, clusters, taken = [], [], []
    for number, row in enumerate(_told(spec, islice(rows, 50 * n))):
        column = column or _column(spec, row)
        if column in row and row[column] is None:
            continue
        if not isinstance(row.get(column), str):
            raise UserError(
                f"{spec}: column {column!r} holds no text; its columns: {', '.join(map(repr, row))}; "
                f"give {PREFIX}NAME:CONFIG:COLUMN (CONFIG may be empty)"
            )
        prompt = _opening(row[column], rng)
        if prompt and distinct.add(prompt):
            texts.append(prompt)
            clusters.append(f"document-{number + 1}")
            taken.append({name: cell for name, cell in row.items() if name != column})
        if len(texts) == n:
            break
    if not texts:
        raise UserError(f"{spec} gave no document of 9 words or more in column {column!r}; name another column")
    usual = {"domain": (name,) * len(texts), "template": tuple(clusters), "tags": ("",) * len(texts)}
    further, left_out = columns.kept(taken, frozenset({"text", *usual}))
    left_out += [f"{name!r} is a name that llmgeom uses itself" for name in ("text", *usual) if name in taken[0]]
    source = {"kind": "documents", "name": spec, "n": len(texts), "seed": seed, "column": column, **facts}
    if left_out:
        source["columns left out"] = "; ".join(left_out)
    return Batch(Text(tuple(texts)), tuple(clusters), source, columns=usual | further)


def _open(spec: str, name: str, config: str | None, seed: int, offline: bool) -> tuple[Iterator[dict], dict[str, Any]]:
    import datasets

    from llmgeom.model import hub

    local = os.path.isdir(name)
    silent = offline or local or not hub.answers(name)
    # Otherwise datasets retries for half a minute; it has its own copy of the switch.
    library: Any = datasets
    settings = library.config
    before, settings.HF_HUB_OFFLINE = settings.HF_HUB_OFFLINE, settings.HF_HUB_OFFLINE or silent
    with silence() if silent else nullcontext():
        try:
            builder = datasets.load_dataset_builder(name, config)
            streaming = local or not silent
            found = datasets.load_dataset(name, config, streaming=streaming)
        except Exception as error:
            raise _explained(spec, error) from error
        finally:
            settings.HF_HUB_OFFLINE = before
    split = next((s for s in _SPLITS if s in found), next(iter(found)))
    facts = {"config": builder.config.name, "split": split, "version": str(builder.hash or builder.info.version)}
    rows: Any = found[split]
    # A cached set is no stream: it is shuffled whole.
    return iter(rows.shuffle(seed=seed, buffer_size=BUFFER) if streaming else rows.shuffle(seed=seed)), facts


def _told(spec: str, rows: Iterator[dict]) -> Iterator[dict]:
    """The rows; an error of the library becomes a UserError that explains it."""
    try:
        yield from rows
    except Exception as error:
        raise _explained(spec, error) from error


def _column(spec: str, row: dict) -> str:
    # A column whose value is missing here may have strings in later rows.
    strings = [key for key, value in row.items() if value is None or isinstance(value, str)]
    if "text" in strings or len(strings) == 1:
        return "text" if "text" in strings else strings[0]
    raise UserError(
        f"{spec}: which of its columns is the text is not clear ({', '.join(map(repr, row))}); "
        f"give {PREFIX}NAME:CONFIG:COLUMN (CONFIG may be empty)"
    )


def _opening(text: str, rng: Random) -> str | None:
    """The first words of a document, unchanged, but never the whole document."""
    least, most = WORDS
    words = list(islice(re.finditer(r"\S+", text[:LONGEST]), most + 1))
    if len(words) <= least or "\0" in text:
        return None
    last = least + int(rng.random() * (min(most, len(words) - 1) - least + 1))
    return text[words[0].start() : words[last - 1].end()]


def _explained(spec: str, error: Exception) -> UserError:
    """The library's error as an explanation for the user."""
    message = " ".join(str(error).split())
    kind = type(error).__name__
    if configs := re.search(r"(?:available configs|Available): \[(.*?)\]", message):
        what = "has several configs" if "missing" in message else "has no such config"
        return UserError(f"{spec} {what} (it has {configs[1]}); give {PREFIX}NAME:CONFIG")
    if kind in ("ConnectionError", "OfflineModeIsEnabled", "LocalEntryNotFoundError", "ConnectTimeout"):
        return UserError(
            f"{spec} is neither in the cache nor reachable without a network; use --prompts FILE or --domain"
        )
    if "gated" in message:
        return UserError(f"{spec} is gated: accept its terms on its page and run `hf auth login`")
    if kind in ("DatasetNotFoundError", "FileNotFoundError", "EmptyDatasetError", "DataFilesNotFoundError"):
        return UserError(f"{spec}: no such data set on the hub and no folder with data files; check the name")
    return UserError(f"{spec} cannot be read ({kind}: {message[:200]}); try another data set, or save it as .jsonl")
