"""A probe's direction as a file: a unit vector with the place that it belongs to and what it was fitted to."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from llmgeom.errors import UserError
from llmgeom.files import write_whole
from llmgeom.model.capture import Site
from llmgeom.record import Record

FORMAT = "llmgeom direction 1"


@dataclass(frozen=True)
class SavedDirection:
    """A direction in the activations of one site and layer, at the final token.

    Attributes:
        vector: [coordinate] of length 1; heads side by side.
        site, layer: where it was fitted.
        scale: standard deviation of the activations along it, over the prompts that it was fitted to.
        target: the column that grows along it.
        model: sha256 of the weights. prompts: sha256 of the tokens.
    """

    vector: np.ndarray
    site: Site
    layer: int
    scale: float
    target: str
    model: str
    prompts: str

    @classmethod
    def of(cls, record: Record, probe: str) -> SavedDirection | None:
        """The direction of a label probe's record; None where it has none (several classes, or nothing measured)."""
        measured = record.results.get(probe)
        if measured is None or "direction" not in measured.arrays:
            return None
        place = measured.ticks["place"]
        arrays = measured.arrays
        return cls(
            vector=np.asarray(arrays["direction"], dtype=np.float64),
            site=Site(place[0]),
            layer=int(place[1]),
            scale=float(arrays["spread"]),
            target=str(record.facts["target"]),
            model=str(record.subject["weights"]),
            prompts=str(record.facts["prompts_hash"]),
        )

    def save(self, path: str | os.PathLike) -> None:
        """Write a safetensors file: the vector, and the rest as metadata."""
        from safetensors.numpy import save

        about = {name: value for name, value in asdict(self).items() if name != "vector"}
        blob = save({"direction": self.vector}, {"format": FORMAT, "about": json.dumps(about, sort_keys=True)})
        write_whole(Path(path), blob)

    @classmethod
    def load(cls, path: str | os.PathLike) -> SavedDirection:
        """Read the file back.

        Raises:
            UserError: no such file, or one that holds no direction of length 1.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "numpy") as file:
                about = json.loads((file.metadata() or {}).get("about", "null"))
                found = cls(vector=file.get_tensor("direction"), **about)
                found = cls(**{**vars(found), "site": Site(found.site)})
        except (OSError, SafetensorError, TypeError, ValueError) as error:
            raise UserError(
                f"{path} holds no direction of `llmgeom probe` ({str(error)[:120]}): give its direction.safetensors"
            ) from None
        length = float(np.linalg.norm(found.vector))
        if found.vector.ndim != 1 or not math.isclose(length, 1, rel_tol=1e-6):
            raise UserError(f"{path} holds a vector of length {length:.4g}: expected a direction of length 1")
        return found
