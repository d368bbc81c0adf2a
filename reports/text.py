"""How strings and numbers are written where people read them: nothing invisible, no digit that means nothing."""

from __future__ import annotations

import html
import math
import textwrap
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile, zip_longest
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmgeom.result import Estimate

# Kind of a record's prompts -> their independent unit, which n counts.
CLUSTERS = {
    "domain": "templates",
    "file": "templates",
    "documents": "documents",
    "task": "sequences",
    "process": "sets of marks",
}
# The metric's name says these units.
SILENT_UNITS = ("fraction", "ratio", "ratio of steps", "skill", "R2", "AUROC", "|rho|", "rho", "|r|", "r", "score")
# Names of controls that stand next to their number.
BRIEF = {"1 (both at once)": "both at once"}
UNBOUNDED = 1e8  # an interval as wide as this says nothing, as of one training run
NO_INTERVAL = "no interval"
HEAD = 22  # characters of a head over a column, before it goes on in the next line
LEAST_NAME = 16  # characters of a name in a line, before it goes on in the next
SIGNS = (("|rho|", "|ρ|"), ("rho ", "ρ "), ("R2", "R²"), ("bits^2", "bits²"))


def clusters_of(source: Mapping[str, Any], prompts: int, clusters: int) -> str:
    """The name of the clusters of a record's prompts."""
    kind = str(source.get("kind"))
    if kind in ("file", "strings", "log") and clusters == prompts:
        return "prompts"
    return "clusters" if source.get("cluster") else CLUSTERS.get(kind, "clusters")


def number_of(n: int, noun: str) -> str:
    """A number with its noun in the plural, e.g. sets of marks, or in the singular: 1 set of marks, 1 training run."""
    head, of, rest = noun.partition(" of ")
    return f"{n:,} {head.removesuffix('s')}{of}{rest}" if n == 1 else f"{n:,} {noun}"


def visible(text: str) -> str:
    """The text with every control, bidirectional, zero-width and unpaired character spelt out: \\n and \\u202e."""
    if text.isprintable():  # nearly always; no such character is printable
        return text
    # Not the control pictures of Unicode (␊, ␛): many systems have no font for them.
    unseen = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return "".join(repr(c)[1:-1] if unicodedata.category(c) in unseen else c for c in text)


def plotly_text(text: str, width: int = 60, longest: int = 300) -> str:
    """The text for Plotly, which reads a few HTML tags in titles and hover labels: cut, wrapped, then escaped."""
    text = visible(text)
    if len(text) > longest:
        text = text[:longest] + " …"
    lines = textwrap.wrap(text, width, replace_whitespace=False)
    return "<br>".join(html.escape(line, quote=False) for line in lines)


def numbers(*values: float) -> list[str]:
    """Numbers that are read together, as `aligned` writes them."""
    return aligned(values, values)


def aligned(values: Sequence[float], like: Sequence[float]) -> list[str]:
    """Numbers with the decimals that give the range of others, which stand in the same row, two significant digits.

    The largest number has at most four: an interval of 0.00006 around 0.99425 tells a reader nothing more.
    """
    largest = max(abs(v) for v in (*values, *like))
    spread = (max(like) - min(like)) or max(map(abs, like)) / 10 or 1.0
    decimals = 1 - math.floor(math.log10(spread))
    decimals = min(decimals, 3 - math.floor(math.log10(largest or 1.0)))
    if largest >= 1e6 or decimals > 6:
        return [f"{v + 0.0:.6g}" for v in values]
    return [f"{round(v, max(decimals, 0)) + 0.0:.{max(decimals, 0)}f}" for v in values]


def written(value: Any) -> str:
    """Any value of a record's subject, source, facts or prompts in one line, whatever order its keys came in."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {written(value[key])}" for key in sorted(value))
    if isinstance(value, list | tuple):
        return ", ".join(map(written, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def weights_of(subject: Mapping[str, Any], width: int = 0) -> str:
    """The first 12 digits of the weights' hash; of several trainings those of each, or how many there are.

    Args:
        subject: Of a record.
        width: Where the hashes of several take more characters than this, only their number is given; 0 for no limit.
    """
    weights = subject.get("weights", "")
    if not isinstance(weights, Mapping):
        return str(weights)[:12]
    each = ", ".join(f"{name} {str(weights[name]).partition(':')[0][:12]}" for name in sorted(weights))
    return f"of {len(weights)} models, listed under provenance" if width and len(each) > width else each


def compact(values: Any) -> list[float]:
    """Numbers at six significant digits: what a picture can show, at half the bytes."""
    rounded = (float(f"{v:.6g}") + 0.0 for v in values)
    return [int(v) if v.is_integer() else v for v in rounded]


def titled(meaning: str, cluster: str) -> str:
    return f"{meaning} [{cluster}]" if cluster else meaning


def grid(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], width: int = 1000) -> Iterator[str]:
    """An empty line, then rows in `columns` under column heads, the first of them the title; a long one has a line of
    its own. Nothing where there are no rows."""
    if rows:
        alone = [visible(title)] if len(title) > HEAD else []
        blocks = columns([("" if alone else title, *head), *rows], 0, width)
        yield from ("", *alone, *(line for block in blocks for line in block))


def columns(rows: Sequence[Sequence[str]], at: int, width: int) -> list[list[str]]:
    """The lines of each row in columns, heads first; heads and the column `at` go on in further lines.

    A line has at most `width` characters, if the other columns leave LEAST_NAME for the column `at`.
    """
    heads = [wrapped(title, HEAD) for title in rows[0]]
    cells = [heads, *([[visible(cell)] for cell in row] for row in rows[1:])]
    widths = [max(len(line) for cell in column for line in cell) for column in zip(*cells, strict=True)]
    rest = sum(widths) - widths[at] + 2 * (len(widths) - 1)
    widths[at] = max(min(widths[at], width - rest), LEAST_NAME)
    whole = [[wrapped(cell[0], widths[at]) if i == at else cell for i, cell in enumerate(row)] for row in cells[1:]]
    return [
        ["  ".join(map(str.ljust, line, widths)).rstrip() for line in zip_longest(*row, fillvalue="")]
        for row in (heads, *whole)
    ]


def wrapped(text: str, width: int) -> list[str]:
    """The text in lines of at most `width` characters; one empty line of no text."""
    return textwrap.wrap(visible(text), width) or [""]


def why_not(reason: str) -> str:
    """Why a number was not measured, without these words, which some reasons start with and every report says."""
    return reason.removeprefix("not measured: ")


def pretty(text: str) -> str:
    """Metric names as they are printed: ρ, R², bits²."""
    for plain, sign in SIGNS:
        text = text.replace(plain, sign)
    return text


def told_apart(probes: Iterable[str]) -> dict[str, str]:
    """Probe -> what its name has after the words that all share: pc1, ridge of ablation_pc1, ablation_ridge."""
    words = {probe: probe.split("_") for probe in probes}
    shared = len(list(takewhile(lambda at: len({*at}) == 1, zip(*words.values(), strict=False))))
    return {probe: " ".join(of[shared:] or of) for probe, of in words.items()}


def names_of(numbers: Sequence[tuple[str, str]]) -> list[str]:
    """Names of numbers, each a probe and a metric; numbers that share a name also name their probe."""
    apart, times = told_apart(probe for probe, _ in numbers), Counter(name for _, name in numbers)
    return [pretty(name) if times[name] == 1 else f"{apart[probe]}: {pretty(name)}" for probe, name in numbers]


def value_of(h: Estimate) -> str:
    """A value with its 95 % interval, where it has one, and its unit."""
    value, span = value_and_interval(h)
    interval = f"({span})" if span == NO_INTERVAL else f"[{span.replace(' to ', ', ')}]"
    return f"{value} {interval}{unit(h)}"


def value_and_interval(h: Estimate) -> tuple[str, str]:
    """A value, and its 95 % interval by itself: "0.1 to 0.3", or NO_INTERVAL."""
    if h.high - h.low >= UNBOUNDED:
        return short(h.value), NO_INTERVAL
    value, low, high = numbers(h.value, h.low, h.high)
    return value, f"{low} to {high}"


def control_of(h: Estimate, ends: tuple[float, ...] | None = None) -> str:
    """The middle 95 % of the control that decides (or these `ends`), with the value's decimals.

    Empty where there is none yet, as in a preview. Of a control on the same prompts it is the control's value: the
    verdict is about the difference, see `difference_of`.
    """
    if not h.controls:
        return ""
    ends = ends or h.control_range
    unbounded = h.high - h.low >= UNBOUNDED
    said = map(short, ends) if unbounded else aligned(ends, (h.value, h.low, h.high))
    return " to ".join(dict.fromkeys(said))


def deciding(h: Estimate) -> str:
    """The name of the control that decides; empty where there is none."""
    name = h.controls[0].name if h.controls else ""
    return visible(BRIEF.get(name, name))


def difference_of(h: Estimate) -> str:
    """Value less a control on the same prompts, with its 95 % interval; empty for any other control."""
    if not h.paired:
        return ""
    return "{} [{}, {}]".format(*aligned((h.value - h.centre, *h.difference), (h.value, h.low, h.high)))


def unit(h: Estimate) -> str:
    """The unit as it follows a number; empty where the metric's name says it."""
    return "" if h.unit in SILENT_UNITS or h.unit == h.name else f" {pretty(h.unit)}"


def short(value: float) -> str:
    """A number that stands alone, with three significant digits."""
    return f"{value + 0.0:.3g}"


def sizes(prompts: Mapping[str, Any]) -> tuple[int, int]:
    """Prompts of a record, and their clusters."""
    return len(prompts.get("text", ())), len(set(prompts.get("template", ())))


def independent(h: Estimate, source: Mapping[str, Any], prompts: Mapping[str, Any]) -> str:
    """The noun for `h.clusters`: the clusters of a record's prompts, or another unit of the metric, e.g. tokens."""
    if h.rule.counts == "prompts":
        return clusters_of(source, h.n if h.n == h.clusters else sizes(prompts)[0], h.clusters)
    return h.rule.counts if h.n == h.clusters else clusters_of(source, *sizes(prompts))


def counted(h: Estimate, source: Mapping[str, Any], prompts: Mapping[str, Any]) -> str:
    """How many prompts, or what it counts, a metric is of, and from how many clusters of which kind."""
    clusters = independent(h, source, prompts)
    if h.n == h.clusters:
        return number_of(h.n, clusters if h.rule.counts == "prompts" else h.rule.counts)
    several = h.rule.counts == "prompts" and h.n > sizes(prompts)[0] > 0  # `--positions` reads some of each prompt
    return f"{h.n} {'positions' if several else h.rule.counts} from {number_of(h.clusters, clusters)}"
