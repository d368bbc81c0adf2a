"""The profile of a model: does it accumulate, transport and bind? One claim per primitive, pooled over processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from llmgeom.claims import declared, judge
from llmgeom.probes.evidence.answers import INFERENCE, PROCESS
from llmgeom.probes.evidence.estimates import Losses, skill_estimate
from llmgeom.record import Record
from llmgeom.result import Estimate, Figure, Result, quantity

PROFILE = "profile"
# Processes of each primitive. two-point is left out: majority is exact there to .001 bits at the default sizes.
PROCESSES = {
    "accumulates": ("beta", "dirichlet", "markov", "stated"),
    "transports": ("hmm",),
    "binds": ("recall", "bijection"),
}
FLOOR = -1.0  # skill has no lower bound; the picture ends here
CLAIMS = declared(PROFILE)


@dataclass(frozen=True, kw_only=True)
class Profile(Result):
    """Skill over the best observers that do not infer, for each primitive and each of its processes."""

    TITLE = "Profile"

    shown: np.ndarray = quantity(
        "part",
        "skill",
        "skill over the best observer that does not infer, drawn at -1 where it is lower",
        Figure("curve", band="shown_control", interval="shown_interval"),
    )
    shown_interval: np.ndarray = quantity(
        "part bound", "skill", "95 % interval; where the control is of the same prompts, of the difference; cut at -1"
    )
    shown_control: np.ndarray = quantity(
        "part bound", "skill", "band of the decisive control, or the one number that it is; cut at -1"
    )
    skill: np.ndarray = quantity("part", "skill", "the same skill as it is")


def profile(records: Sequence[Record], facts: Mapping[str, object] | None = None) -> Record:
    """The profile of a model, as a record, from its records of single processes (`Answers`).

    Args:
        records: records of one model, one per process; the three claims concern processes with their default fields.
        facts: provenance to add to that of the records.

    Raises:
        KeyError: a record is not of a process in text.
    """
    measured = {record.source["name"]: record for record in records}
    parts: dict[str, Estimate] = {}
    estimates, unmeasured = [], {}
    for primitive, names in PROCESSES.items():
        lacking = [name for name in names if name not in measured or not _inference(measured[name])]
        if lacking:
            unmeasured[primitive] = f"{primitive} asks for {', '.join(names)}; not measured here: {', '.join(lacking)}"
            continue
        found = skill_estimate(CLAIMS[primitive], [losses(measured[name]) for name in names])
        estimates.append(found)
        parts[primitive] = found
        if len(names) > 1:
            parts |= {f"{primitive}: {name}": _inference(measured[name])[0] for name in names}
    first = records[0]
    results = {PROFILE: _result(parts, estimates, unmeasured).lowered()} if parts else {}
    drawn = [record.facts["nulls"] for record in records if "nulls" in record.facts]
    fewest = {"nulls": min(drawn)} if drawn else {}  # a draw that a process lacks enters no claim
    about = {"kind": "processes", "name": PROFILE, "processes": [record.source["name"] for record in records]}
    return Record(
        results=judge(results),
        unmeasured={f"{PROFILE}: {name}": why for name, why in unmeasured.items()},
        prompts={},
        subject=first.subject,
        source=about | {"n": first.source["n"], "seed": first.source["seed"]},
        facts={**first.facts, **fewest, **(facts or {})},
    )


def losses(record: Record) -> Losses:
    """Losses from the record of one process, in its prompts with evidence; the baseline is the best simple observer."""
    arrays = record.results[PROCESS].arrays
    shows = np.array(record.prompts["k"]) > 0
    return Losses(
        own=arrays["lost"],
        baseline=arrays["lost_by_best"],
        without_context=arrays.get("lost_without_context"),
        untrained=arrays["lost_untrained"],
        exchanged=arrays["lost_exchanged"],
        cluster=np.array(record.prompts["template"])[shows],
    )


def _inference(record: Record) -> list[Estimate]:
    """The estimate of skill over the best trivial observer, if the process could measure it."""
    measured = record.results.get(PROCESS)
    return [] if measured is None else [h for h in measured.estimates if h.name == INFERENCE]


def _result(parts: Mapping[str, Estimate], estimates: Sequence[Estimate], unmeasured: Mapping[str, str]) -> Profile:
    def cut(name: str) -> np.ndarray:
        return np.array([getattr(h, name) for h in parts.values()]).clip(FLOOR, 1.0)

    return Profile(
        shown=cut("value"),
        shown_interval=cut("deciding_interval"),
        shown_control=cut("control_range"),
        skill=np.array([h.value for h in parts.values()]),
        estimates=tuple(replace(h, verdict="", why="") for h in estimates),
        ticks={"part": tuple(parts)},
        unmeasured=dict(unmeasured),
    )
