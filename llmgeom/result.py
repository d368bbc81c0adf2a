"""A probe's answer: every number declared once with its axes, unit, meaning and figure (numpy only)."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np

from llmgeom.stats.controls import Control, Excess
from llmgeom.stats.resampling import Deletions
from llmgeom.stats.verdict import Claim, Setting

Verdict = Literal["", "holds", "small", "ruled out", "opposite", "open"]
WORDS = get_args(Verdict)[1:]
FIGURE = "figure"  # fact: a Plotly figure as JSON, of a probe that drew its own
# Facts of a result that a report puts into a sentence.
SENTENCE = "sentence"  # what is the case, in one sentence, before any verdict


@dataclass(frozen=True)
class Figure:
    """How a quantity is drawn.

    Attributes:
        kind: "curve", one axis, e.g. "layer": a line over depth, or points where the axis has names (`Result.ticks`).
            "scatter", axes "prompt component": the first two components (named by `Result.ticks`).
            "heatmap", two axes, e.g. "layer head": a cell each.
        band, interval: of a curve: the quantities, with one axis more, "bound", that are its null and its confidence
            interval.
        beside: of a curve: a quantity with the same axis, drawn dashed.
        colour: of a scatter: the column of prompts that colours the points.
        layers: of a scatter: a quantity with "layer" before these axes: the same at every layer, of which this is the
            last.
    """

    kind: Literal["curve", "scatter", "heatmap"]
    band: str = ""
    interval: str = ""
    beside: str = ""
    colour: str = "entropy"
    layers: str = ""


OTHERS = ("band", "interval", "beside", "layers")  # elements of a figure that name other quantities


@dataclass(frozen=True)
class Quantity:
    """The declaration of one field: axis names, unit, meaning in one phrase, and its figure if it has one."""

    axes: tuple[str, ...]
    unit: str
    meaning: str
    figure: Figure | None = None

    def without(self, absent: Collection[str]) -> Quantity:
        """The same with no figure element that names one of these quantities."""
        if not self.figure:
            return self
        gone: dict[str, Any] = {name: "" for name in OTHERS if getattr(self.figure, name) in absent}
        return replace(self, figure=replace(self.figure, **gone)) if gone else self


Labelled = tuple[Quantity, np.ndarray]


def labelled(
    array: Any, axes: str | tuple[str, ...], unit: str, meaning: str, figure: Figure | None = None
) -> Labelled | None:
    """An array with what it is: `labelled(x, "layer head", "bits", "entropy of the final query's attention row")`.

    None stays None: a quantity that is not measured.
    """
    names = tuple(axes.split()) if isinstance(axes, str) else axes
    return None if array is None else (Quantity(names, unit, meaning, figure), np.asarray(array))


def line(
    name: str,
    values: Any,
    axis: str,
    unit: str,
    meaning: str,
    *,
    interval: tuple[str, Any] = ("", None),
    null: tuple[str, Any] = ("", None),
    beside: str = "",
) -> dict[str, Labelled | None]:
    """A curve over one axis, as quantities NAME, NAME_interval and NAME_null.

    Args:
        interval: What its interval of 95 % is over, e.g. "clusters"; and its ends [place bound].
        null: What its band is, e.g. "band of untrained copies"; and its ends [place bound].
        beside: As in `Figure`.
    """
    around = {"interval": (f"95 % interval over {interval[0]}", interval[1]), "null": null}
    bounds = {f"{name}_{part}": labelled(ends, (axis, "bound"), unit, says) for part, (says, ends) in around.items()}
    ends = {part: f"{name}_{part}" * (bounds[f"{name}_{part}"] is not None) for part in around}
    figure = Figure("curve", band=ends["null"], interval=ends["interval"], beside=beside)
    return {name: labelled(values, (axis,), unit, meaning, figure), **bounds}


@dataclass(frozen=True)
class Estimate:
    """One number people will quote, with what it takes to believe it.

    Attributes:
        rule: what is declared of the metric: its name, unit, side, effect of interest, and where it is a claim its
            sentence. A number that is no claim has no verdict.
        value: the number. low, high: its interval; `method` says which (e.g. "jackknife over templates, 95 %").
        n, clusters: how many prompts (or what `counts` names), and how many clusters (templates, documents).
        units: Student's quantile in the interval has this number less 1 degrees of freedom; 0 stands for `clusters`.
        controls: all, the hardest to beat first: with its band, its centre and p.
        excess: the value less that control: p, hurdle, and p of the other questions that a claim answers.
        adjusted: p, p_excluded and p_opposite after Holm over the claims of the record; 1 before.
        among: how many claims these are; 0 before.
        needed: of an open claim: how many clusters find the declared effect with 90 % power; 0 where none does.
        available: clusters that the source of the prompts has; 0: unknown.
        lacks: why a claim is open whatever its p, each a few words, a colon and the figures; mostly empty.
        verdict, why: one of the five words, and one sentence of reason.
        deletions: the value without each cluster, where the interval is a jackknife's: pairs two runs.
    """

    rule: Claim
    value: float
    low: float
    high: float
    method: str
    n: int
    clusters: int
    units: float = 0.0
    controls: tuple[Control, ...] = ()
    excess: Excess = Excess(1.0, 1.0, 1.0, 0.0)
    adjusted: tuple[float, float, float] = (1.0, 1.0, 1.0)
    among: int = 0
    needed: int = 0
    available: int = 0
    lacks: tuple[str, ...] = ()
    verdict: Verdict = ""
    why: str = ""
    deletions: Deletions | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        numbers = {name: getattr(self, name) for name in ("value", "low", "high", "units", "adjusted")}
        numbers |= vars(self.excess) | {"effect": self.rule.effect}
        numbers |= {f"{key} of {one.name}": of for one in self.controls for key, of in one._asdict().items()}
        for name, number in numbers.items():
            for each in number if isinstance(number, tuple) else (number,):
                if isinstance(each, float) and not math.isfinite(each):
                    raise ValueError(f"metric {self.name!r}: {name} is {each}; a number or nothing")
        if self.verdict and not self.claim:
            raise ValueError(
                f"metric {self.name!r} is no claim, and has the verdict {self.verdict!r}; only claims have one"
            )

    @property
    def name(self) -> str:
        """The metric's name."""
        return self.rule.name

    @property
    def unit(self) -> str:
        """The metric's unit."""
        return self.rule.unit

    @property
    def claim(self) -> str:
        """The sentence that is judged; empty of a number that is no claim."""
        return self.rule.claim

    @property
    def p(self) -> float:
        """One-sided p against the control that is hardest to beat; 1 without one."""
        return self.excess.p

    @property
    def null(self) -> str:
        """The control that is hardest to beat, in words; "" where there is none."""
        return self.controls[0].said if self.controls else ""

    @property
    def centre(self) -> float:
        """That control's middle; 0 where there is none."""
        return self.controls[0].centre if self.controls else 0.0

    @property
    def null_low(self) -> float:
        """The lower end of its 95 % band; 0 where there is none."""
        return self.controls[0].low if self.controls else 0.0

    @property
    def null_high(self) -> float:
        """The upper end of its 95 % band; 0 where there is none."""
        return self.controls[0].high if self.controls else 0.0

    @property
    def difference(self) -> tuple[float, float]:
        """Of a control on the same prompts: the 95 % interval of value less centre; else (0, 0)."""
        return (self.controls[0].difference if self.controls else None) or (0.0, 0.0)

    @property
    def paired(self) -> bool:
        """Whether it is one control on the same prompts."""
        return bool(self.controls) and self.controls[0].difference is not None

    @property
    def control_range(self) -> tuple[float, float]:
        """The ends of the control's 95 % band; of a control on the same prompts, which is one number, that number."""
        return (self.centre, self.centre) if self.paired else (self.null_low, self.null_high)

    @property
    def deciding_interval(self) -> tuple[float, float]:
        """The 95 % interval that lies beyond the control or not: the value's; of a control on the same prompts that of
        the difference, counted from the control."""
        if not self.paired:
            return self.low, self.high
        return self.centre + self.difference[0], self.centre + self.difference[1]

    def saying(self, claim: str) -> Estimate:
        """The same with another sentence that is judged; "" makes it a measurement."""
        return replace(self, rule=replace(self.rule, claim=claim))

    def plain(self) -> dict[str, Any]:
        """All fields but deletions, as plain data for JSON, which has no infinity."""
        plain = dataclasses.asdict(replace(self, deletions=None))
        del plain["deletions"]
        plain["rule"]["range"] = [str(end) if math.isinf(end) else end for end in self.rule.range]
        plain["controls"] = [one._asdict() for one in self.controls]
        return plain

    @classmethod
    def of(cls, plain: Mapping[str, Any], deletions: Deletions | None = None) -> Self:
        """The estimate that `plain` gave. Raises KeyError, TypeError or ValueError for other data."""
        rule = plain["rule"] | {"range": tuple(map(float, plain["rule"]["range"]))}
        excess = plain["excess"] | {"setting": Setting(**plain["excess"]["setting"])}
        controls = (
            Control(**one | {"difference": one["difference"] and tuple(one["difference"])}) for one in plain["controls"]
        )
        nested = {"rule": Claim(**rule), "excess": Excess(**excess), "controls": tuple(controls)}
        nested |= {"adjusted": tuple(plain["adjusted"]), "lacks": tuple(plain["lacks"]), "deletions": deletions}
        return cls(**{**plain, **nested})


@dataclass(frozen=True)
class Result:
    """What a probe answers: labelled arrays and estimates, and how a page explains them; a Record stores it.

    Attributes:
        title: The heading of its section.
        estimates: The metrics.
        quantities, arrays: By name, what each array is, and the array.
        warnings: Doubts about a number, and what was left out.
        notes: What a reader of the section should know.
        ticks: The names or numbers along an axis, where they are not 0, 1, 2 ...
        unmeasured: Metric -> why it is not measured.
        facts: What a report puts into a sentence, by name, e.g. SENTENCE.
        meaning, computed, null, failure_modes: The prose of the section: what the numbers mean, the estimator, what it
            is compared with, and how it can mislead.
    """

    title: str
    estimates: tuple[Estimate, ...] = ()
    quantities: Mapping[str, Quantity] = field(default_factory=dict)
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    ticks: Mapping[str, tuple] = field(default_factory=dict)
    unmeasured: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    meaning: str = ""
    computed: str = ""
    null: str = ""
    failure_modes: str = ""

    @classmethod
    def of(cls, title: str, labelled: Mapping[str, Labelled | None], texts: str = "", **said: Any) -> Self:
        """A result from labelled arrays; what is None is not measured, and is left out.

        Args:
            title: The heading of its section.
            labelled: Name -> what `labelled` or `line` gave.
            texts: The module of the probe: the section's prose stands under `# TITLE` in a file of the folder texts/
                that is nearest above it (`read_prose`). By default there is none, unless `said` has it.
            said: Estimates, warnings, notes, ticks, unmeasured, facts; or meaning, computed, null, failure_modes.

        Raises:
            ValueError: where an array does not have the declared axes, two arrays disagree on the length of an axis, or
                a number is not finite: no NaN travels.
        """
        present = {name: one for name, one in labelled.items() if one is not None}
        lengths = {axis: ("its ticks", len(names)) for axis, names in said.get("ticks", {}).items()}
        for name, (declared, array) in present.items():
            where = f"{title}: {name}"
            if array.ndim != len(declared.axes):
                raise ValueError(f"{where} has shape {array.shape}, and {len(declared.axes)} axes, {declared.axes}")
            for axis, length in zip(declared.axes, array.shape, strict=True):
                other, expected = lengths.setdefault(axis, (name, length))
                if expected != length:
                    raise ValueError(f"{where} has {length} along {axis!r} but {other} has {expected}")
            if not np.isfinite(array).all():
                index = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
                at = ", ".join(f"{axis} {i}" for axis, i in zip(declared.axes, index, strict=True)) or "its only entry"
                raise ValueError(f"{where} is not finite at {at}; measure it, or say why it is not measured")
        prose: dict[str, Any] = read_texts(texts)[title] if texts else {}
        quantities = {name: declared.without(labelled.keys() - present) for name, (declared, _) in present.items()}
        arrays = {name: array for name, (_, array) in present.items()}
        return cls(title, quantities=quantities, arrays=arrays, **(prose | said))

    @classmethod
    def joined(cls, title: str, parts: Mapping[str, Result], texts: str = "", **further: Iterable[str]) -> Self:
        """Several results as one section of the page.

        Args:
            title, texts: As in `of`.
            parts: Prefix -> result. Quantities of the part "write_" are called write_NAME, and their meanings start
                with "write: "; a part "" keeps its names.
            further: Warnings and notes after those of the parts.
        """
        every = parts.values()
        texts_of: dict[str, Any] = {
            name: (*(text for part in every for text in getattr(part, name)), *further.get(name, ()))
            for name in ("warnings", "notes")
        }
        named: dict[str, Any] = {
            name: {key: one for part in every for key, one in getattr(part, name).items()}
            for name in ("ticks", "unmeasured", "facts")
        }
        quantities = {}
        for at, part in parts.items():
            for name, q in part.quantities.items():
                if at:  # the meaning, and the quantities that the figure names
                    others: dict[str, Any] = {k: at + of for k in OTHERS if (of := getattr(q.figure, k, ""))}
                    meaning = f"{at.replace('_', ' ').strip()}: {q.meaning}"
                    q = replace(q, meaning=meaning, figure=q.figure and replace(q.figure, **others))
                quantities[at + name] = q
        estimates = tuple(h for part in every for h in part.estimates)
        arrays = {at + name: array for at, part in parts.items() for name, array in part.arrays.items()}
        named |= read_texts(texts)[title] if texts else {}
        return cls(title, estimates, quantities, arrays, **texts_of, **named)

    def __getitem__(self, name: str) -> np.ndarray:
        """One of the arrays."""
        return self.arrays[name]

    def __repr__(self) -> str:
        return f"<Result {self.title!r}: {len(self.estimates)} metrics, {len(self.arrays)} arrays>"


PROSE = ("meaning", "computed", "null", "failure_modes")


@cache
def read_prose(path: Path) -> dict[str, dict[str, Any]]:
    """Title -> section (one of PROSE) -> text, of a Markdown file such as probes/texts/attention_focus.md.

    `# Title` starts a result; `## Meaning`, `## Computed`, `## Null` and `## Failure modes` follow, each once. Lines
    of a section are joined by spaces. Raises ValueError for a result that lacks a section or has one more.
    """
    prose: dict[str, dict[str, Any]] = {}
    for result in re.split(r"^# ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title, *sections = re.split(r"^## ", result, flags=re.MULTILINE)
        heads, bodies = zip(*(section.partition("\n")[::2] for section in sections), strict=True)
        keys = tuple(head.strip().lower().replace(" ", "_") for head in heads)
        if keys != PROSE:
            raise ValueError(f"{path.name}, {title.strip()}: the sections are {keys}; expected {PROSE}")
        prose[title.strip()] = dict(zip(PROSE, (" ".join(body.split()) for body in bodies), strict=True))
    return prose


@cache
def read_texts(module: str) -> dict[str, dict[str, Any]]:
    """Title -> prose, of every file in the folder texts/ that is nearest above a module; empty without a folder."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    folder = next(filter(Path.is_dir, (parent / "texts" for parent in Path(file).parents)), None)
    paths = sorted(folder.glob("*.md")) if folder else ()
    return {title: prose for path in paths for title, prose in read_prose(path).items()}
