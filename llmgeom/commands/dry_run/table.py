"""A price as lines for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmgeom.reports.text import SILENT_UNITS, clusters_of, grid

WIDTH = 100  # of a line, as of a digest
NONE = "-"


def lines(cost: Mapping[str, Any]) -> Iterator[str]:
    """For a terminal."""
    minutes = " to ".join(dict.fromkeys(f"{cost[name]:.2g}" for name in ("least_minutes", "minutes") if name in cost))
    first = f", first page after {cost['first_page_minutes']:.2g}" if "first_page_minutes" in cost else ""
    yield from _wrapped(
        f"{_counted(cost['parameters'])} parameters, {cost['weight_bytes'] / 2**20:.0f} MiB of weights; at most about "
        f"{cost['memory_bytes'] / 2**30:.1f} GiB of memory, {cost['disk_bytes'] / 2**20:.0f} MiB on disk, "
        f"{minutes} minutes on this machine ({cost['device']}){first}; out: {cost['out']}"
    )
    for name, row in cost["sources"].items():
        yield ""
        passes, tokens = (_span(row, name) for name in ("passes", "tokens"))
        noun = clusters_of(row, row["pool"], row["pool_clusters"])
        clusters = "" if noun == "prompts" else f", from about {row['clusters']} of {row['pool_clusters']} {noun}"
        yield from _wrapped(
            f"{name}: {row['prompts']} of {row['pool']} prompts{clusters}; "
            f"{passes} passes, {tokens} tokens, longest {row['longest']}"
        )
        yield from _planned(row["claims"])
        for why in dict.fromkeys(one["why"] for one in row["claims"] if one["why"]):
            yield from _wrapped(f"{'; '.join(one['name'] for one in row['claims'] if one['why'] == why)}: {why}")
    if "least_minutes" in cost:
        yield ""
        draws = f"{cost['least_nulls']} to {cost['nulls']} draws of each"
        yield f"Controls: {draws}, until no likely further draw changes a verdict."
    if "part" in cost:
        yield from ("", cost["part"])
    if any(row["claims"] for row in cost["sources"].values()):
        yield ""
        yield from textwrap.wrap(LEGEND, WIDTH)


LEGEND = (
    "Numbers of clusters. Interval: so many find the effect in 9 of 10 scans by the interval alone. Holds: so "
    "many let the claim hold, the control's draws and Holm's correction included; prompts: those that have so "
    "many clusters. Any layer: so many find it by the best layer's p, corrected for all layers. Found: the "
    "smallest effect that this scan finds. Spread, of draws: the standard deviations of clusters and of the "
    "control's draws that are assumed, as measured on pocket models and small tunnels (of a correlation: known, "
    "on Fisher's scale); docs/planning.md. Effects count from the control's centre. The scan uses its own spread: "
    "it may need more, or find that more data will not help."
)


def _planned(claims: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A row for each claim, without the columns that say nothing of any."""
    head = ("effect", "interval", "holds", "prompts", "any layer", "found", "spread", "of draws")
    if claims:
        names, *cells = zip(*map(_cells, claims), strict=True)
        said = [(title, column) for title, column in zip(head, cells, strict=True) if {*column} != {NONE}]
        titles, columns = zip(*said, strict=True)
        rows = list(zip(names, *columns, strict=True))
        yield from grid(f"claims ({len(rows)}, Holm)", titles, rows, WIDTH)


def _wrapped(text: str) -> list[str]:
    """A sentence in lines, in which a path stays whole."""
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _span(row: Mapping[str, Any], name: str) -> str:
    """A number of a plan, from the least to the most where draws may be fewer."""
    least = f"least_{name}"
    return f"{row[least]:,} to {row[name]:,}" if least in row else f"{row[name]:,}"


def _counted(parameters: int) -> str:
    return f"{parameters / 1e6:.1f}M" if parameters >= 1e5 else f"{parameters:,}"


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    def cell(key: str, form: str = "{}") -> str:
        return form.format(row[key]) if row.get(key) else NONE

    detectable = cell("detectable", "{:.2g}") if row.get("detectable") else "nothing"
    silent = row["unit"] in SILENT_UNITS or row["unit"] in row["name"]
    more = row.get("needed_prompts") != row.get("needed_clusters")
    return (
        row["name"],
        f"{row['effect']:g} {row['unit'] * (not silent)}".strip(),
        cell("interval_clusters"),
        cell("needed_clusters"),
        cell("needed_prompts") if more else NONE,
        cell("any_layer_clusters"),
        f"{detectable} at {row['clusters']}" if "detectable" in row else NONE,
        cell("spread", "{:g}"),
        cell("null_spread", "{:g}"),
    )
