"""A probe's direction as a file: a unit vector with its place in the model and the data that it was fitted to."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmgeom.files import write_whole
from llmgeom.probe import Model, Site, UserError
from llmgeom.record import Record

FORMAT = "llmgeom direction 1"
LAST = "last"  # the position that edits change


@dataclass(frozen=True)
class SavedDirection:
    """A direction in the activations of one site and layer.

    Attributes:
        vector: [coordinate] of length 1; heads are concatenated.
        site, layer: the place at which it was fitted.
        scale: standard deviation of the activations along it, over the prompts that it was fitted to.
        target: the column that increases along it. position: the prompt position at which it was fitted.
        model: sha256 of the weights. prompts: sha256 of the tokens.
        claim: the probe's claim, as `Estimate.plain` gives it. score: the probe's score at this place.
    """

    vector: np.ndarray
    site: Site
    layer: int
    scale: float
    target: str
    model: str
    prompts: str
    position: str = LAST
    claim: dict[str, Any] | None = None
    score: float | None = None

    @classmethod
    def of(cls, record: Record, probe: str) -> SavedDirection | None:
        """The direction of a label probe's record; None if it has none (several classes, or nothing measured)."""
        measured = record.results.get(probe)
        if measured is None or "direction" not in measured.arrays:
            return None
        place, position = measured.ticks["place"], str(measured.ticks.get("position", (LAST,))[0])
        arrays, layers = measured.arrays, [int(layer) for layer in measured.ticks.get("layer", ())]
        curve = arrays[f"{place[0]}_score" if position == LAST else f"{place[0]}_{position}_score"]
        return cls(
            vector=np.asarray(arrays["direction"], dtype=np.float64),
            site=Site(place[0]),
            layer=int(place[1]),
            scale=float(arrays["spread"]),
            target=str(record.facts["target"]),
            model=str(record.subject["weights"]),
            prompts=str(record.facts["prompts_hash"]),
            position=position,
            claim=next((h.plain() for h in measured.estimates if h.verdict), None),
            score=float(curve[layers.index(int(place[1])) if layers else int(place[1])]),
        )

    def check(self, subject: Model, points: Sequence[str]) -> None:
        """Raises UserError for a direction of other weights, or at a place that no edit reaches.

        Args:
            subject: the model to edit.
            points: the points of a layer that can be edited.
        """
        if self.model != subject.facts["weights"]:
            raise UserError(
                f"--axis: the direction was fitted to weights {self.model[:12]}, and {subject.name} has "
                f"{str(subject.facts['weights'])[:12]}; run llmgeom probe on this model"
            )
        if self.site.value not in points or self.layer >= len(subject.blocks):
            raise UserError(
                f"--axis: the direction lies at {self.site.value} {self.layer}; edits act on {', '.join(points)} of "
                f"layers 0 to {len(subject.blocks) - 1} (residual: their input). Run llmgeom probe with such --sites "
                "and --layers"
            )

    @property
    def read(self) -> dict[str, Any]:
        """The probe's claim and score at this place, for the record of an edit."""
        return {} if self.claim is None else {"read": {"claim": self.claim, "score": self.score}}

    @property
    def plain(self) -> dict[str, Any]:
        """The direction as plain data."""
        return asdict(self) | {"vector": self.vector.tolist()}

    def save(self, path: str | os.PathLike) -> None:
        """Write a safetensors file: the vector, and the rest as metadata."""
        from safetensors.numpy import save

        about = {"format": FORMAT} | {name: value for name, value in self.plain.items() if name != "vector"}
        # safetensors writes its metadata in no fixed order: one entry, so that equal directions give equal bytes.
        blob = save({"direction": self.vector}, {"llmgeom": json.dumps(about, sort_keys=True)})
        write_whole(Path(path), blob)

    @classmethod
    def load(cls, path: str | os.PathLike) -> SavedDirection:
        """Read a saved direction. Raises UserError: no such file, or it contains no direction of length 1."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "numpy") as file:
                about = dict(json.loads((file.metadata() or {}).get("llmgeom", "{}")))
                if about.pop("format", "") != FORMAT:
                    raise ValueError(f"it is no {FORMAT!r}")
                saved = cls(vector=file.get_tensor("direction"), **about)
                saved = cls(**{**vars(saved), "site": Site(saved.site)})
        except (OSError, SafetensorError, TypeError, ValueError) as error:
            raise UserError(
                f"{path} holds no direction of `llmgeom probe` ({str(error)[:120]}): give its direction.safetensors"
            ) from None
        length = float(np.linalg.norm(saved.vector))
        if saved.vector.ndim != 1 or not math.isclose(length, 1, rel_tol=1e-6):
            raise UserError(f"{path} holds a vector of length {length:.4g}: expected a direction of length 1")
        return saved
