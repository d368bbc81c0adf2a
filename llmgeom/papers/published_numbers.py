"""The published numbers as data: papers/*.toml, with printed values and their comparison with a measurement."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from llmgeom.files import filled, is_number, read_entries
from llmgeom.stats.tests import Scale

FOLDER = Path(__file__).parent
Compare = Literal["within", "above", "below", "claim"]
Size = Literal["small", "full"]
Place = tuple[str, str, str]  # run, probe, metric


@dataclass(frozen=True, kw_only=True)
class Check:
    """The measurement and comparison of one entry.

    Attributes:
        measure: The measure of the paper's source; `of` has its arguments.
        compare: "within": in the range of `values`, extended by `tolerance` on both sides. "above", "below": beyond
            `bound` and beyond the null. "claim": the verdict of the measured claim (`llmgeom list claims`).
        values: Printed numbers in `unit`; by model if they were printed only for some models.
        tolerance: For a bound the smallest difference of interest: a smaller difference is "ruled out" or "small".
        scale: "log" for ratios: intervals and p are then those of the logarithm.
        quick: Whether --quick can decide it.
        nothing: The paper says that nothing was learnt: the range should contain the trivial predictor.
    """

    measure: str
    compare: Compare
    of: Mapping[str, Any] = field(default_factory=dict)
    values: Any = ()
    bound: float = 0.0
    tolerance: float = 0.0
    unit: str = ""
    scale: Scale = "identity"
    quick: bool = True
    nothing: bool = False

    def printed(self, model: str = "") -> tuple[float, ...]:
        """The values for a model; empty if none was printed for it."""
        if not isinstance(self.values, Mapping):
            return tuple(self.values)
        name = model.rsplit("/", 1)[-1].lower()
        return next((tuple(values) for key, values in self.values.items() if name.startswith(key)), ())

    def region(self, model: str = "") -> tuple[float, float]:
        """The two ends of the expected range."""
        if self.compare == "within":
            return min(self.printed(model)) - self.tolerance, max(self.printed(model)) + self.tolerance
        return (self.bound, math.inf) if self.compare == "above" else (-math.inf, self.bound)

    def text(self, model: str = "") -> str:
        """The range as a cell of a table; empty if no value was printed for the model."""
        if self.compare == "within":
            return "{:.3g} to {:.3g}".format(*self.region(model)) if self.printed(model) else ""
        return "its claim" if self.compare == "claim" else f"{self.compare} {self.bound:.3g}"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One published quantity; paper1.toml explains each field."""

    id: str
    rows: tuple[str, ...]
    quantity: str
    published: str
    source: str
    definition: str = ""
    trivial: str = ""
    contradiction: str = ""
    as_published: tuple[Place, ...] = ()
    sound: Place = ("", "", "")
    why: str = ""
    prediction: str = ""
    needs: str = ""
    small: Check | None = None
    full: Check | None = None
    not_tested: str = ""

    def test(self, size: Size) -> Check | None:
        return self.small if size == "small" else self.full


@cache
def table(paper: str, folder: Path = FOLDER) -> tuple[Entry, ...]:
    """The entries of a paper, in order.

    Raises ValueError: the file or an entry is malformed; the message names both.
    """
    entries: dict[str, Entry] = {}
    for where, plain in read_entries(folder / f"{paper}.toml", "entry", "id"):
        entry = _entry(plain, where)
        if entry.id in entries:
            raise ValueError(f"{where} is there twice; keep one")
        entries[entry.id] = entry
    return tuple(entries.values())


_ROW = re.compile(r"\d+(\.\d+)+")


def _entry(plain: Mapping[str, Any], where: str) -> Entry:
    plain = dict(plain)
    if both := plain.pop("test", None):  # the same test at both scales
        if plain.keys() & {"small", "full"}:
            raise ValueError(f"{where}: give test, or small and full; not both")
        plain |= {"small": both, "full": both}
    tests = {size: _check(plain.pop(size), f"{where}, {size}") for size in get_args(Size) if size in plain}
    rows = plain.pop("rows", [])
    if not (isinstance(rows, list) and rows and all(isinstance(r, str) and _ROW.fullmatch(r) for r in rows)):
        raise ValueError(f'{where}: rows is {rows!r}; expected row numbers as ["3.1", "6.9.2"]')
    published, sound = plain.pop("as_published", []), plain.pop("sound", ["", "", ""])
    if not all(isinstance(place, list) and len(place) == 3 for place in (*published, sound)):
        raise ValueError(f"{where}: sound is [run, probe, metric], and as_published a list of these")
    places = {"as_published": tuple(map(tuple, published)), "sound": tuple(sound)}
    entry = filled(Entry, plain | {"rows": tuple(rows)} | places | tests, where)
    if bool(entry.not_tested) != (len(tests) < 2):
        raise ValueError(f"{where}: give small and full (or test), or say in not_tested why one is missing")
    if tests and not entry.definition:
        raise ValueError(f"{where}: definition missing")
    return entry


def _check(plain: Any, where: str) -> Check:
    if not isinstance(plain, dict):
        raise ValueError(f"{where} is {plain!r}; expected a table")
    check = filled(Check, plain, where)
    bound = {"bound", "tolerance", "unit"}
    wanted = {"within": {"values", "tolerance", "unit"}, "claim": set()}.get(check.compare, bound)
    if (bound | {"values"}) & set(plain) != wanted:
        raise ValueError(f"{where}: {check.compare} goes with {', '.join(sorted(wanted)) or 'no number'}")
    if check.compare == "within":
        lists = list(check.values.values()) if isinstance(check.values, dict) else [check.values]
        if not lists or not all(
            isinstance(values, list) and values and all(map(is_number, values)) for values in lists
        ):
            raise ValueError(f"{where}: values is {check.values!r}; expected [numbers], or {{model = [numbers]}}")
    if check.compare != "claim" and not 0 < check.tolerance < math.inf:
        raise ValueError(f"{where}: tolerance is {check.tolerance!r}; expected a number above 0")
    return check
