"""A probe's answer: every number declared once with its axes, unit, meaning and figure (numpy only)."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np

FigureKind = Literal["curve", "scatter", "heatmap"]
Verdict = Literal[
    "above null",
    "not above null",
    "below null",
    "not below null",
    "undecided",
    "no null",
    "PASS",
    "FAIL",
    "INCONCLUSIVE",
]


@dataclass(frozen=True)
class Figure:
    """How a quantity is drawn.

    curve    one axis, e.g. "layer": a line over depth, or points where the axis has names (`Result.ticks`). `band` and
             `interval` name quantities with one axis more, "bound": its null, and its confidence interval, low and
             high; `beside` one with the same axis, drawn dashed.
    scatter  axes "prompt component": the first two components (named by `Result.ticks`), coloured by the prompt column
             `colour`. `layers` names a quantity with "layer" before these axes: the same at every layer, of which this
             is the last.
    heatmap  two axes, e.g. "layer head": a cell each.
    """

    kind: FigureKind
    band: str = ""
    interval: str = ""
    beside: str = ""
    colour: str = "entropy"
    layers: str = ""


@dataclass(frozen=True)
class Quantity:
    """The declaration of one field: axis names, unit, meaning in one phrase, and its figure if it has one."""

    axes: tuple[str, ...]
    unit: str
    meaning: str
    figure: Figure | None = None

    def prefixed(self, prefix: str) -> Quantity:
        """The same of one part of a `Combined` result: the meaning, and the quantities that the figure names."""
        if not prefix:
            return self
        names = {name: getattr(self.figure, name, "") for name in ("band", "interval", "beside", "layers")}
        changes: dict[str, Any] = {k: prefix + name for k, name in names.items() if name}
        figure = self.figure and replace(self.figure, **changes)
        return replace(self, meaning=f"{prefix.replace('_', ' ').strip()}: {self.meaning}", figure=figure)


def quantity(axes: str, unit: str, meaning: str, figure: Figure | None = None) -> Any:
    """Declare a Result field: `quantity("layer head", "bits", "entropy of the final query's attention row")`."""
    return field(metadata={"quantity": Quantity(tuple(axes.split()), unit, meaning, figure)})


@dataclass(frozen=True)
class Estimate:
    """One number people will quote, with what it takes to believe it.

    value, unit      the number and its unit.
    low, high        its interval; `method` says which (e.g. "jackknife over templates, 95 %").
    null_low/high    95 % band of the null that decides; `null` says which null and how many draws.
    p                p-value against that null with the +1 rule; NaN is refused.
    n, units         how many prompts (or what `counts` names), and how many independent units (templates, documents).
    verdict, why     the verdict in words and one sentence, e.g. "needs n >= 120 templates".

    What the verdict rests on; the defaults are those of a metric of which nothing was declared:
    claim            what PASS says, one sentence; empty for a measurement that is no claim. source, published: where it
                     is printed, and what was printed.
    side             whether the value is asked to lie above ("upper") or below ("lower") its nulls.
    margin           what the interval must clear. effect: the smallest difference from it that is of interest.
    equivalence      the claim is that there is no effect: the interval must lie between margin_low and margin.
    needed           how many units would decide for the declared effect.
    p_claim          the p that is corrected for the number of claims; adjusted: that p after Holm, 1 before.
    """

    name: str
    value: float
    unit: str
    low: float
    high: float
    method: str
    null_low: float
    null_high: float
    null: str
    p: float
    n: int
    clusters: int
    verdict: Verdict
    why: str = ""
    claim: str = ""
    source: str = ""
    published: str = ""
    side: Literal["upper", "lower"] = "upper"
    margin: float = 0.0
    margin_low: float = 0.0
    effect: float = 0.0
    equivalence: bool = False
    needed: int = 0
    p_claim: float = 1.0
    adjusted: float = 1.0
    counts: str = "prompts"

    def __post_init__(self) -> None:
        for name in (f.name for f in dataclasses.fields(self) if f.type == "float"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"metric {self.name!r}: {name} is {getattr(self, name)}; a number or nothing")


@dataclass(frozen=True)
class Measured:
    """A Result lowered to plain data: what a Record stores and a page draws without the probe that made it."""

    title: str
    meaning: str
    computed: str
    null: str
    failure_modes: str
    estimates: tuple[Estimate, ...]
    quantities: Mapping[str, Quantity]
    arrays: Mapping[str, np.ndarray]
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    ticks: Mapping[str, tuple] = field(default_factory=dict)


PROSE = ("meaning", "computed", "null", "failure_modes")


@cache
def read_prose(path: Path) -> dict[str, dict[str, str]]:
    """Prose of a probe's results, from a Markdown file.

    `# Title` starts a result; `## Meaning`, `## Computed`, `## Null` and `## Failure modes` follow, each once.

    Args:
        path: the file, e.g. probes/texts/attention_focus.md.

    Returns:
        Title -> section (one of PROSE) -> text, its lines joined by spaces.

    Raises:
        ValueError: for a result that lacks a section or has one more.
    """
    found = {}
    for result in re.split(r"^# ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title, *sections = re.split(r"^## ", result, flags=re.MULTILINE)
        heads, bodies = zip(*(section.partition("\n")[::2] for section in sections), strict=True)
        keys = tuple(head.strip().lower().replace(" ", "_") for head in heads)
        if keys != PROSE:
            raise ValueError(f"{path.name}, {title.strip()}: the sections are {keys}; expected {PROSE}")
        found[title.strip()] = dict(zip(keys, (" ".join(body.split()) for body in bodies), strict=True))
    return found


class Result:
    """Base of every probe's answer: a frozen dataclass of `quantity` fields and metrics, with `warnings`, which could
    overturn a verdict, and where it has any `notes`, which a reader of its section should know, and `ticks`: the names
    or numbers that stand along an axis, where they are not 0, 1, 2 ...

    A subclass has a TITLE and the prose of its section on the page: MEANING (what the numbers mean), COMPUTED (the
    estimator), NULL (what it is compared with) and FAILURE_MODES. The prose stands in the file TEXT under `# TITLE`
    (see `read_prose`), or in class variables of these names.
    Raises ValueError where an array does not have the declared axes, two fields disagree on the length of an axis, or a
    number is not finite: no NaN travels.
    """

    TITLE: ClassVar[str]
    TEXT: ClassVar[Path | None] = None
    MEANING: ClassVar[str]
    COMPUTED: ClassVar[str]
    NULL: ClassVar[str]
    FAILURE_MODES: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    estimates: tuple[Estimate, ...]
    warnings: tuple[str, ...]

    def __post_init__(self) -> None:
        lengths = {axis: ("its ticks", len(names)) for axis, names in getattr(self, "ticks", {}).items()}
        for name, declared in self.quantities().items():
            array = np.asarray(getattr(self, name))
            where = f"{type(self).__name__}.{name}"
            if array.ndim != len(declared.axes):
                raise ValueError(
                    f"{where} has shape {array.shape} but axes {declared.axes}: "
                    f"expected {len(declared.axes)} dimensions, got {array.ndim}"
                )
            for axis, length in zip(declared.axes, array.shape, strict=True):
                other, expected = lengths.setdefault(axis, (name, length))
                if expected != length:
                    raise ValueError(f"{where} has {length} along {axis!r} but {other} has {expected}")
            if not np.isfinite(array).all():
                index = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
                at = ", ".join(f"{axis} {i}" for axis, i in zip(declared.axes, index, strict=True)) or "its only entry"
                raise ValueError(f"{where} is not finite at {at}; measure it, or say why it is not measured")

    @classmethod
    def quantities(cls) -> dict[str, Quantity]:
        """The declared fields by name, in order."""
        return {f.name: f.metadata["quantity"] for f in dataclasses.fields(cls) if "quantity" in f.metadata}

    @classmethod
    def prose(cls) -> dict[str, str]:
        """The text of each section in PROSE. Raises KeyError where TEXT has no result of this TITLE."""
        return read_prose(cls.TEXT)[cls.TITLE] if cls.TEXT else {name: getattr(cls, name.upper()) for name in PROSE}

    def lowered(self) -> Measured:
        """This result as plain data."""
        return Measured(
            title=self.TITLE,
            **self.prose(),
            estimates=tuple(self.estimates),
            quantities=self.quantities(),
            arrays={name: np.asarray(getattr(self, name)) for name in self.quantities()},
            warnings=tuple(self.warnings),
            notes=tuple(getattr(self, "notes", ())),
            ticks=dict(getattr(self, "ticks", {})),
        )


@dataclass(frozen=True)
class Combined(Result):
    """Several results as one section of the page.

    Attributes:
        parts: prefix -> result. Quantities of the part "write_" are called write_NAME, and their meanings start with
            "write: "; a part "" keeps its names.
        estimates, warnings, notes: of all parts, in order.
    """

    parts: Mapping[str, Result]
    estimates: tuple[Estimate, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, parts: Mapping[str, Result], warnings: Iterable[str] = (), notes: Iterable[str] = ()) -> Self:
        """The parts with what each says, and further warnings and notes."""

        def joined(name: str) -> tuple:
            return tuple(chain.from_iterable(getattr(part, name, ()) for part in parts.values()))

        return cls(parts, joined("estimates"), (*joined("warnings"), *warnings), (*joined("notes"), *notes))

    def lowered(self) -> Measured:
        """All parts as plain data."""
        quantities = {
            prefix + name: declared.prefixed(prefix)
            for prefix, part in self.parts.items()
            for name, declared in part.quantities().items()
        }
        arrays = {
            prefix + name: np.asarray(getattr(part, name))
            for prefix, part in self.parts.items()
            for name in part.quantities()
        }
        return replace(super().lowered(), quantities=quantities, arrays=arrays)
