"""The place of a value: in units of its own null, and relative to values of models of known truth (numpy only).

`llmgeom calibrate` makes the table, which ships with the code. It describes only small models in wind tunnels: outside
the bench's range of width, depth, n and draws a value is "not calibrated here", and no likelihood ratio is ever applied
to a large model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from llmgeom.errors import UserError
from llmgeom.record import Record
from llmgeom.result import Estimate

TABLE = Path(__file__).parent / "calibrated.json"
VERSION = 3
OTHER_CLAIMS = "the shipped calibration was made with other claims"
Z95 = 1.959964  # a normal's 97.5 % point


@dataclass(frozen=True)
class Signature:
    """One metric on the bench.

    Attributes:
        area, low, high: AUC of models at the posterior against the kind of other models that is hardest to separate
            from them, and its 95 % interval. `word`: "yes" if the metric separates them from every kind, "no" if an
            area of 0.75 is excluded against some kind, "reversed", "undecided", or why it was not measured.
        trained, idle: 5 % and 95 % points of models at the posterior and of models that cannot infer, in units of each
            value's own null; None without such units.
        numbers: all other entries of the table: every kind's area, how often the metric is found, relation to KL.
    """

    probe: str
    name: str
    word: str
    area: float | None = None
    low: float | None = None
    high: float | None = None
    trained: tuple[float, float] | None = None
    idle: tuple[float, float] | None = None
    numbers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def deciding(self) -> str:
        """The kind whose area decided the word: for "no" and "reversed" the one with the lowest upper end, else the
        hardest to separate; empty without areas.

        The hardest kind may have so few tasks that its interval excludes nothing.
        """
        areas = self.numbers.get("areas", {})
        if self.word in ("no", "reversed") and areas:
            return min(areas, key=lambda kind: areas[kind]["high"])
        return self.numbers.get("hardest", "")


@dataclass(frozen=True)
class Calibration:
    """The table: its signatures, and the models that it describes.

    Attributes:
        bench: number of models of each kind, tasks, architectures, cells, draws of each control, the probes whose
            sequences all end in one query, CPU minutes, version, origin.
        width, depth, n: the ranges, ends included, of d_model, layers and sequences drawn.
    """

    signatures: tuple[Signature, ...]
    bench: Mapping[str, Any]
    width: tuple[int, int]
    depth: tuple[int, int]
    n: tuple[int, int]

    def find(self, probe: str, name: str) -> Signature | None:
        return next((entry for entry in self.signatures if (entry.probe, entry.name) == (probe, name)), None)

    def outside(self, record: Record, probe: str) -> str:
        """Why the values of a probe in this record are not calibrated here; empty if they are.

        n counts the drawn sequences: `ablate` and `patch` measure on half of them, on the bench and here. The width of
        a control's band, and so the unit of every value, depends on its number of draws.
        """
        if why := self.stale(record.facts.get("claims_hash")):
            return why
        if record.source.get("kind") != "task":
            return "no task of the bench's kind"
        subject, controls = record.subject, self.bench["controls"]
        for what, value, (least, most) in (
            ("width", subject.get("d_model"), self.width),
            ("depth", subject.get("layers"), self.depth),
            ("n", record.source.get("n"), self.n),
            ("draws of each control", record.facts.get("nulls"), (controls, controls)),
        ):
            if value is None or not least <= value <= most:
                return f"{what} {value}, the bench has {least} to {most}"
        if probe in self.bench["at_one_query"] and len(set(record.prompts.get("asked_at", ()))) > 1:
            return "the sequences end in several queries, those of the bench in one"
        return ""

    def stale(self, claims_hash: str | None) -> str:
        """Why the table does not apply to values that were judged by these claims; empty if it does."""
        return "" if self.bench.get("claims_hash") == claims_hash else OTHER_CLAIMS

    @property
    def partial(self) -> str:
        """A note if the table covers only a part of the bench; else empty."""
        cells, planned = len(self.bench["cells"]), self.bench["cells_planned"]
        return f"a part of the bench: {cells} of {planned} cells" if cells < planned else ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "version": VERSION,
            "bench": dict(self.bench),
            "width": list(self.width),
            "depth": list(self.depth),
            "n": list(self.n),
            "signatures": [{**vars(entry), "numbers": dict(entry.numbers)} for entry in self.signatures],
        }

    @classmethod
    def read(cls, path: Path) -> Calibration:
        """A calibration from a file. Raises UserError if the file does not exist or has another version."""
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
            if body["version"] != VERSION:
                raise UserError(f"{path} has version {body['version']}; this llmgeom reads {VERSION}: calibrate again")
            signatures = tuple(_signature(entry) for entry in body["signatures"])
            width, depth, n = (tuple(body[key]) for key in ("width", "depth", "n"))
            return cls(signatures, body["bench"], width, depth, n)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is no calibration ({error}); make one with llmgeom calibrate") from None


def _signature(entry: dict[str, Any]) -> Signature:
    return Signature(**entry | {key: tuple(entry[key]) for key in ("trained", "idle") if entry.get(key)})


@cache
def shipped() -> Calibration | None:
    """The table that ships with the code; None without one."""
    return Calibration.read(TABLE) if TABLE.exists() else None


def null_units(h: Estimate) -> float | None:
    """Distance of a value from the middle of its null's 95 % band, positive in the direction of the claim:

        z = s (value - (low + high) / 2) / ((high - low) / 2 / 1.96),   s = 1, or -1 if the claim expects low values;

    a normal null has a band of z from -1.96 to 1.96. With fewer than 39 draws the band is their range, which is
    narrower: three standard deviations are about 4.8 with 6 draws and 3.2 with 20. None if the band has no width, as
    for a null that is one number.
    Derived here.
    """
    half = (h.null_high - h.null_low) / 2
    if not h.null or half <= 0:
        return None
    return (1 if h.side == "upper" else -1) * (h.value - (h.null_high + h.null_low) / 2) / half * Z95


def placed(h: Estimate, probe: str, record: Record) -> str:
    """The place of a value in words: units of its own null, then the bench's range, or why it is not calibrated."""
    z, table = null_units(h), shipped()
    in_units = "" if z is None else f"{round(z, 1) + 0.0:+.1f} null units; "
    if table is None or (signature := table.find(probe, h.name)) is None:
        return f"{in_units}not calibrated"
    if why := table.outside(record, probe):
        return f"{in_units}not calibrated here: {why}"
    if signature.area is None:
        return f"{in_units}not calibrated: {signature.word}"
    if z is None or signature.trained is None or signature.idle is None:
        ranges = ""
    else:
        ends = (f"{name} {low:+.1f} to {high:+.1f}" for name, (low, high) in
                (("trained", signature.trained), ("no inference", signature.idle)))  # fmt: skip
        ranges = f"bench: {', '.join(ends)}; "
    words = {
        "yes": "tells them apart",
        "no": "does NOT tell them apart",
        "reversed": "tells them apart the WRONG way round",
        "undecided": "not shown to tell them apart",
    }[signature.word]
    area, low, high = signature.area, signature.low, signature.high
    against = ""
    if kind := signature.deciding:
        against = f"against {kind}: "
        area, low, high = (signature.numbers["areas"][kind][key] for key in ("value", "low", "high"))
    part = f"; {table.partial}" if table.partial else ""
    return f"{in_units}{ranges}{words} (AUC {against}{area:.2f}, {low:.2f} to {high:.2f}){part}"
