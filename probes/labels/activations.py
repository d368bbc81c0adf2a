"""Activations that another program stored: a file of them with labels, measured as `llmgeom probe` measures a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from llmgeom import __version__, claims, columns
from llmgeom.batch import Batch, Rows, Text, recorded
from llmgeom.errors import UserError, in_float64
from llmgeom.files import sha256
from llmgeom.probe import Capture, ProbeInput
from llmgeom.probes.labels.inputs import FINAL, LENGTH, pooled
from llmgeom.probes.labels.probe import PROBE, LabelProbe, Place
from llmgeom.record import Record

ACTIVATIONS, UNTRAINED = "activations", "untrained"
ENDINGS = ("safetensors", "npz", "parquet")
Layers = Float[np.ndarray, "row layer coordinate"]


@dataclass(frozen=True)
class ArrayProbe(LabelProbe):
    """The label probe of stored activations; they have layers, and no site or position."""

    def places(self, capture: Capture) -> dict[tuple[str, int], Place]:
        """(activations, layer) -> loader of its activations. Raises UserError: a layer does not exist."""
        layers = capture.layers(ACTIVATIONS)
        for layer in self.layers or ():
            if not 0 <= layer < len(layers):
                raise UserError(f"--layers {layer}: the activations have layers 0 to {len(layers) - 1}")
        chosen = range(len(layers)) if self.layers is None else self.layers
        return {(ACTIVATIONS, i): partial(pooled, capture, layers, i, "last") for i in chosen}


def read(path: str, cluster: str | None = None, texts: Batch | None = None) -> tuple[Layers, list[Layers], Batch]:
    """The activations of a file, those of untrained copies, and the rows with their labels.

    Of a .safetensors or .npz file, or a Parquet table of lists: the array `activations` (or the only one with more than
    one axis), [row coordinate] or [row layer coordinate]; arrays whose names begin with `untrained`, of the same shape,
    each a draw of that control; arrays of one axis are columns. Nothing is unpickled.

    Args:
        cluster: The column whose equal values stay in one fold; by default each row is its own cluster.
        texts: A prompt for each row of the activations, with further columns.

    Raises:
        UserError: The file is missing, of another format or holds pickled objects; no activations, or several; shapes
            that do not fit; numbers that are not finite.
    """
    name = f"--activations {path}"
    arrays = _arrays(path, name)
    wide = {key: array for key, array in arrays.items() if array.ndim > 1}
    own = [key for key in wide if not key.startswith(UNTRAINED)]
    key = ACTIVATIONS if ACTIVATIONS in wide else own[0] if len(own) == 1 else ""
    if not key:
        found = ", ".join(f"{k} {list(a.shape)}" for k, a in arrays.items()) or "nothing"
        raise UserError(
            f"{name} holds {found}: expected one array `{ACTIVATIONS}`, [row, coordinate] or [row, layer, coordinate]"
        )
    x = checked(wide[key], f"{name}, {key}")
    controls = [checked(a, f"{name}, {k}") for k, a in wide.items() if k.startswith(UNTRAINED)]
    if odd := next((control.shape for control in controls if control.shape != x.shape), None):
        raise UserError(f"{name}: {UNTRAINED} has shape {list(odd)}, {key} {list(x.shape)}: expected the same")
    table = {k: a for k, a in arrays.items() if a.ndim == 1}
    if short := next((k for k, a in table.items() if len(a) != len(x)), None):
        raise UserError(f"{name}: {short} has {len(table[short])} entries for {len(x)} rows: expected one for each")
    cells = {k: [c.decode() if isinstance(c, bytes) else c for c in a.tolist()] for k, a in table.items()}
    rows = [dict(zip(cells, row, strict=True)) for row in zip(*cells.values(), strict=True)]
    further, _ = columns.kept(rows, frozenset())
    batch = batch_of(len(x), further, Path(path).name)
    if texts is not None:
        if len(texts) != len(x):
            raise UserError(f"--prompts has {len(texts)} rows, {name} {len(x)}: expected one for each")
        batch = replace(batch, inputs=texts.inputs, cluster=texts.cluster, columns={**texts.columns, **batch.columns})
    if cluster:
        batch = replace(batch, cluster=tuple(map(str, batch.column(cluster))))
    return x, controls, batch


def batch_of(n: int, table: Mapping[str, Sequence[Any]], name: str, clusters: Sequence[Any] | None = None) -> Batch:
    """Rows without a text."""
    text = tuple(f"row {i}" for i in range(n))
    cluster = text if clusters is None else tuple(map(str, clusters))
    further = {key: tuple(cells) for key, cells in table.items()}
    return Batch(Text(text), cluster, {"kind": ACTIVATIONS, "name": name, "n": n}, columns=further)


def checked(array: Any, name: str) -> Layers:
    """Activations as [row layer coordinate]. Raises UserError: another shape, or numbers that are not finite."""
    x = np.asarray(array)
    if x.ndim not in (2, 3) or 0 in x.shape or x.dtype.kind not in "fiu":
        raise UserError(
            f"{name}: {x.dtype} of shape {list(x.shape)}; expected numbers, [row, coordinate] or "
            "[row, layer, coordinate]"
        )
    x = x[:, None] if x.ndim == 2 else x
    if not np.isfinite(x).all():
        row, layer, _ = np.argwhere(~np.isfinite(x))[0].tolist()
        raise UserError(f"{name}: row {row}, layer {layer} is not finite: leave the row out, or store more digits")
    return x


def measure(x: Layers, untrained: Sequence[Layers], batch: Batch, probe: LabelProbe, seed: int, **facts: Any) -> Record:
    """The record of a label probe of stored activations. Raises UserError as `LabelProbe.measure`."""
    given = tuple(n for n in probe.given if n in batch.columns or n not in (LENGTH, FINAL))
    mine = ArrayProbe(probe.target, probe.kind, (), probe.layers, given, probe.transfer)
    mine.check(batch, seed)
    n, one = len(x), torch.ones(len(x), dtype=torch.int64)
    # No tokens: the bag of tokens, and what shuffles or cuts them, is not there to be tested.
    rows = replace(batch, inputs=Rows(torch.zeros(n, 1, 1), one))

    def capture(of: Layers) -> Capture:
        tensors = {(ACTIVATIONS, i): torch.from_numpy(np.ascontiguousarray(of[:, i])) for i in range(of.shape[1])}
        return Capture(rows, torch.arange(n), one - 1, one, tensors)

    data = ProbeInput(capture(x), np.zeros(n), untrained=tuple(map(capture, untrained)), seed=seed)
    with in_float64("label probe"):
        measured = mine.measure(data)
    stated = {"llmgeom": __version__, "claims_hash": claims.digest(), "seed": seed, "nulls": len(untrained)}
    stated |= {"target": probe.target, "given": ",".join(given) or "none", "prompts_hash": sha256(x.tobytes())}
    prediction = tuple(round(float(v), 6) for v in measured.arrays["probe_prediction"])
    return Record(
        results=claims.judge({PROBE: measured}),
        unmeasured={},
        prompts={
            "tags": ("",) * n,
            "domain": (str(batch.source["name"]),) * n,
            **{name: recorded(column) for name, column in batch.columns.items()},
            "template": batch.cluster,
            "text": batch.text,
            "entropy": (0.0,) * n,
            "tokens": (0,) * n,
            "held-out prediction": prediction,
        },
        subject={"name": f"the model of {batch.source['name']}"},
        source=dict(batch.source),
        facts=stated | facts,
    )


def _arrays(path: str, name: str) -> dict[str, np.ndarray]:
    """The arrays of a file by name; columns of a Parquet table that hold lists are arrays, too."""
    kind = Path(path).suffix.lower().lstrip(".")
    if kind not in ENDINGS:
        raise UserError(f"{name} ends in .{kind or '?'}: expected {', '.join(f'.{e}' for e in ENDINGS)}")
    if not Path(path).is_file():
        raise UserError(f"{name} is no file: give a {', '.join(f'.{e}' for e in ENDINGS)} file of activations")
    try:
        if kind == "npz":
            with np.load(path, allow_pickle=False) as file:
                return {key: file[key] for key in file.files}
        if kind == "safetensors":
            from safetensors.torch import load_file

            return {
                key: (t.float() if t.is_floating_point() and t.dtype != torch.float64 else t).numpy()
                for key, t in load_file(path).items()
            }
        import pyarrow
        from pyarrow import compute, parquet

        made: Any = compute  # its functions are made when it is imported
        table, found = parquet.read_table(path), {}
        for key in table.column_names:
            column, shape = pyarrow.concat_arrays(table[key].chunks), [table.num_rows]
            while pyarrow.types.is_list(column.type) or "list" in str(column.type):
                lengths = made.unique(made.list_value_length(column)).to_pylist()
                if len(lengths) != 1 or lengths[0] is None:
                    raise ValueError(f"the lists of column {key!r} have {len(lengths)} lengths")
                shape.append(lengths[0])
                column = column.flatten()
            found[key] = column.to_numpy(zero_copy_only=False).reshape(shape)
        return found
    except Exception as error:  # three libraries, each with errors of its own
        if "allow_pickle" in str(error) or "Pickled" in str(error):
            raise UserError(
                f"{name} holds Python objects (pickle), which may run code and are never read: save arrays of numbers, "
                "and labels as numbers or text of one length (np.array(labels, dtype=str))"
            ) from None
        raise UserError(f"{name} cannot be read as .{kind} ({str(error)[:120]}): write it again") from None
