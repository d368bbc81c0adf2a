"""The papers' claims as data: papers/*.toml, what was printed and how it is held against a measurement of ours."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import llmgeom
from llmgeom.stats.tests import Scale

FOLDER = Path(llmgeom.__file__).parent / "papers"
PAPERS = tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))
Compare = Literal["within", "above", "below", "claim"]
Size = Literal["small", "full"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """How one entry is measured and judged.

    measure      the function of the paper's module that measures; of: what it is given.
    compare      within: in the range of `values`, each way wider by `tolerance`; above, below: beyond `bound` and
                 beyond the null; claim: the verdict of the claim that is measured (`llmgeom list claims`).
    values       printed numbers in `unit`; by model where they are of some models only.
    tolerance    of `within`, see there; else the smallest difference from the bound that is of interest: FAIL where one
                 as large is excluded.
    scale        "log" for ratios: intervals and p are then those of the logarithm.
    quick        whether --quick can decide it.
    nothing      it is said that nothing was learnt: the trivial predictor lies in the range too, as it should.
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
        """The values for a model; empty where nothing was printed for it."""
        if not isinstance(self.values, Mapping):
            return tuple(self.values)
        name = model.rsplit("/", 1)[-1].lower()
        return next((tuple(each) for key, each in self.values.items() if name.startswith(key)), ())

    def region(self, model: str = "") -> tuple[float, float]:
        """Between which numbers the value is asked to lie."""
        if self.compare == "within":
            return min(self.printed(model)) - self.tolerance, max(self.printed(model)) + self.tolerance
        return (self.bound, math.inf) if self.compare == "above" else (-math.inf, self.bound)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One published quantity.

    rows           the numbered rows of the notes on the papers that it answers (listed in tests/test_papers.py).
    published      what was printed, with its unit; source: where; definition: what is measured, and why it compares.
    trivial        what a predictor that does not infer has, where there is one.
    contradiction  where what was printed contradicts itself or its own baseline.
    small, full    how it is tested at either scale; `not_tested` says why it is not, where one is missing.
    """

    id: str
    rows: tuple[str, ...]
    quantity: str
    published: str
    source: str
    definition: str = ""
    trivial: str = ""
    contradiction: str = ""
    small: Check | None = None
    full: Check | None = None
    not_tested: str = ""

    def test(self, size: Size) -> Check | None:
        return getattr(self, size)


@cache
def table(paper: str, folder: Path = FOLDER) -> tuple[Entry, ...]:
    """The entries of a paper, in order. Raises ValueError that names file and entry for one that is malformed."""
    path = folder / f"{paper}.toml"
    try:
        body = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path.name} is not TOML: {error}") from None
    if set(body) != {"entry"} or not isinstance(body["entry"], list):
        raise ValueError(f"{path.name} holds {', '.join(sorted(body)) or 'nothing'}; it may hold [[entry]] alone")
    found: dict[str, Entry] = {}
    for place, entry in enumerate(body["entry"], 1):
        where = f"{path.name}, entry {place} ({entry.get('id')})"
        made = _entry(entry, where)
        if made.id in found:
            raise ValueError(f"{where} is there twice; keep one")
        found[made.id] = made
    return tuple(found.values())


def _entry(entry: Mapping[str, Any], where: str) -> Entry:
    entry = dict(entry)
    if both := entry.pop("test", None):  # the same at either scale
        if entry.keys() & {"small", "full"}:
            raise ValueError(f"{where}: give test, or small and full; not both")
        entry |= {"small": both, "full": both}
    tests = {size: _test(entry.pop(size), f"{where}, {size}") for size in get_args(Size) if size in entry}
    rows = entry.pop("rows", [])
    if not (isinstance(rows, list) and rows and all(isinstance(r, str) and _ROW.fullmatch(r) for r in rows)):
        raise ValueError(f'{where}: rows is {rows!r}; expected row numbers as ["3.1", "6.9.2"]')
    made = _checked(Entry, entry | {"rows": tuple(rows)} | tests, where)
    if bool(made.not_tested) != (len(tests) < 2):
        raise ValueError(f"{where}: give small and full (or test), or say in not_tested why one is missing")
    if tests and not made.definition:
        raise ValueError(f"{where}: definition missing")
    return made


_ROW = re.compile(r"\d+(\.\d+)+")


def _test(test: Any, where: str) -> Check:
    if not isinstance(test, dict):
        raise ValueError(f"{where} is {test!r}; expected a table")
    made = _checked(Check, test, where)
    given = {"values", "bound", "tolerance", "unit"} & set(test)
    wanted = {"within": {"values", "tolerance", "unit"}, "claim": set()}.get(
        made.compare, {"bound", "tolerance", "unit"}
    )
    if given != wanted:
        raise ValueError(f"{where}: {made.compare} goes with {', '.join(sorted(wanted)) or 'no number'}")
    if made.compare == "within":
        each = list(made.values.values()) if isinstance(made.values, dict) else [made.values]
        if not each or not all(isinstance(one, list) and one and all(map(_number, one)) for one in each):
            raise ValueError(f"{where}: values is {made.values!r}; expected [numbers], or {{model = [numbers]}}")
    if made.compare != "claim" and not 0 < made.tolerance < math.inf:
        raise ValueError(f"{where}: tolerance is {made.tolerance!r}; expected a number above 0")
    return made


def _number(x: Any) -> bool:
    return type(x) in (int, float) and math.isfinite(x)


def _checked(cls: type, given: Mapping[str, Any], where: str) -> Any:
    """The dataclass, where every key is one of its fields, of its type, and none without a default is missing."""
    hints = get_type_hints(cls)
    for key, value in given.items():
        if key not in hints:
            raise ValueError(f"{where}: unknown key {key!r}; known: {', '.join(hints)}")
        choices = get_args(hints[key]) if all(isinstance(c, str) for c in get_args(hints[key])) else ()
        if choices and value not in choices:
            raise ValueError(f"{where}: {key} is {value!r}; expected one of {', '.join(choices)}")
        kind = hints[key]
        if (kind in (str, bool) and type(value) is not kind) or (kind is float and not _number(value)):
            raise ValueError(f"{where}: {key} is {value!r}; expected a {kind.__name__}")
        if key == "of" and not isinstance(value, dict):
            raise ValueError(f"{where}: of is {value!r}; expected a table")
    lacking = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
    if missing := [name for name in lacking if not given.get(name)]:
        raise ValueError(f"{where}: {', '.join(missing)} missing")
    return cls(**given)
