"""Prompts from a data set of the hub or of a local folder: the opening of each document."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from random import Random
from typing import Any

from llmgeom import columns
from llmgeom.batch import Batch, Text
from llmgeom.errors import UserError
from llmgeom.optional import silence
from llmgeom.prompts.domains import Distinct
from llmgeom.prompts.files import LONGEST

PREFIX = "hf:"
WORDS = (8, 48)
BUFFER = 5000
_SPLITS = ("train", "test", "validation")


def read(spec: str, n: int, seed: int = 0, *, offline: bool = False) -> Batch:
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
    settings: Any = datasets.config
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
    rows = found[split]
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
