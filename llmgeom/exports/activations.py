"""Activations of a run's prompts at their final token, as a folder that `datasets`, pandas and safetensors read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from llmgeom.batch import Batch, Text, Tokens
from llmgeom.cache.keys import of_tokens
from llmgeom.cache.shards import captures_folder
from llmgeom.errors import Unavailable, UserError
from llmgeom.exports.tables import about
from llmgeom.files import write_whole
from llmgeom.model.model import Model
from llmgeom.record import Record
from llmgeom.reports.table import plain, tables

SITES = ("residual", "query", "key", "value", "z", "attn_out", "mlp_out")
ROWS = 1000  # of a row group: what a reader holds at once


def write(record: Record, _form: str, out: Path, sites: Sequence[str] = ("residual",)) -> list[str]:
    """train.parquet (a row for each prompt) and activations.safetensors in the folder `out`.

    The table has the columns of the prompts, `ids` (the tokens) and SITE.LAYER, a list of float32 with heads side by
    side. The safetensors file holds SITE.LAYER [prompt coordinate] and every column of numbers as prompts.COLUMN.

    Args:
        record: The model is loaded again and reads the prompts, from the cache where they are there.
        out: The folder.
        sites: Which activations.

    Raises:
        UserError: an unknown site or one that this model lacks; prompts that the model does not read as it did.
    """
    import pyarrow
    from pyarrow import parquet
    from safetensors.numpy import save

    if unknown := [site for site in sites if site not in SITES]:
        raise UserError(f"--sites {unknown[0]}: expected some of {', '.join(SITES)}, with commas between")
    arrays, ids = _captured(record, list(dict.fromkeys(sites)))
    table = tables(record)["prompts"]
    own = {"ids", *arrays}
    names = {name: f"prompts.{name}" if name in own else name for name in record.prompts if name != "attention"}
    columns = {new: pyarrow.array(table[name]) for name, new in names.items()}
    columns["ids"] = pyarrow.array(ids)
    for name, x in arrays.items():
        flat = pyarrow.array(np.ascontiguousarray(x).reshape(-1))
        columns[name] = pyarrow.FixedSizeListArray.from_arrays(flat, x.shape[1])
    out.mkdir(parents=True, exist_ok=True)
    metadata = plain(about(record) | {"position": "final token"})
    sink = pyarrow.BufferOutputStream()
    written = pyarrow.table(columns).replace_schema_metadata({"llmgeom": metadata})
    parquet.write_table(written, sink, row_group_size=ROWS)
    write_whole(out / "train.parquet", sink.getvalue())
    cells = {name: np.array(table[name]) for name in record.prompts}
    numbers = {f"prompts.{name}": column for name, column in cells.items() if column.dtype.kind in "bif"}
    write_whole(out / "activations.safetensors", save(arrays | numbers, {"llmgeom": metadata}))
    part = f" of the {whole} that were measured" if (whole := record.facts.get("prompts", 0)) > len(ids) else ""
    renamed = [f"column {name!r} of the prompts is {new!r} there" for name, new in names.items() if name != new]
    return [f"{len(ids)} prompts{part}, {len(arrays)} arrays: {', '.join(dict.fromkeys(sites))}", *renamed]


def _captured(record: Record, sites: Sequence[str]) -> tuple[dict[str, np.ndarray], list[list[int]]]:
    """SITE.LAYER [prompt coordinate] of the prompts of the record's table, which are read again; and their tokens.

    Raises UserError: they are not text, or their tokens are not the measured ones.
    """
    subject = measured(record)
    if subject.tokenizer is None:
        raise UserError(f"{record.title} has no prompts in text: its activations are not exported")
    text = record.prompts["text"]
    batch = Batch(Text(tuple(text)), tuple(record.prompts["template"]), {"kind": "record", "name": record.title})
    tokens = subject.tokens(batch)
    assert isinstance(tokens, Tokens)  # text is read as tokens
    alike = tokens.lengths.tolist() == list(record.prompts["tokens"])
    # Some of the prompts have no hash of their own; for answers the hash covers each prompt with each answer.
    hashed = record.facts.get("prompts") == len(text) and "answers" not in record.facts
    if not alike or (hashed and record.facts["prompts_hash"] != of_tokens(tokens)):
        raise UserError(
            f"{record.title}: the model reads its prompts as other tokens than when they were measured (a chat "
            "template, or sequences without text); measure plain prompts, e.g. llmgeom probe --prompts FILE"
        )
    try:
        capture = subject.capture(batch, sites, store=str(captures_folder()))
    except Unavailable as reason:
        raise UserError(f"--sites {','.join(sites)}: {reason}") from None
    keys = sorted((key for key in capture.tensors if key[0] in sites), key=lambda key: (sites.index(key[0]), key[1]))
    arrays = {f"{site}.{layer}": capture.tensors[site, layer].float().flatten(1).numpy() for site, layer in keys}
    return arrays, tokens.real


def measured(record: Record) -> Model:
    """The model of a record. Raises UserError: no model was loaded; the model is gone, or its weights have changed."""
    facts = record.subject
    if "weights" not in facts:
        raise UserError(
            f"{record.title}: these answers were read from a log, without a model; measure the model itself, e.g. "
            "llmgeom probe --prompts FILE --answers COLUMN"
        )
    if how := facts.get("quantised"):
        raise UserError(
            f"{facts['name']} was measured quantised ({how}), and the quantised weights were not "
            "stored: measure it unquantised"
        )
    subject = Model.load(facts["name"], facts.get("revision"), dtype=facts["dtype"])
    if subject.facts["weights"] != facts["weights"]:
        raise UserError(
            f"{facts['name']} has other weights than when it was measured ({str(subject.facts['weights'])[:12]}, the "
            f"record says {str(facts['weights'])[:12]}): measure it again"
        )
    return subject
