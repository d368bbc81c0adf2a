"""Writes the direction of a label probe as a file of its own, which `ablate --axis` and `patch --axis` read."""

from __future__ import annotations

from pathlib import Path

from llmgeom.errors import UserError
from llmgeom.probes.labels.directions import SavedDirection
from llmgeom.record import Record


def of_label(record: Record) -> SavedDirection:
    """The direction of the record's label. Raises UserError: it has none."""
    saved = SavedDirection.of(record, "label")
    if saved is None:
        raise UserError(
            f"{record.title} holds no direction of a label: run llmgeom probe with a binary label or a number"
        )
    return saved


def write(record: Record, _form: str, out: Path) -> list[str]:
    """A safetensors file: `direction` [coordinate] of length 1; site, layer, scale and hashes as metadata."""
    saved = of_label(record)
    saved.save(out)
    return [f"{saved.target} at {saved.site.value} {saved.layer}, {saved.position} position; spread {saved.scale:.4g}"]
