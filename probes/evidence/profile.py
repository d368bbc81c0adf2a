"""The profile of a model: accuracy, weight of evidence and resolution in every process, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from llmgeom.probes.evidence.answers import PROCESS, RESOLUTION, WEIGHT
from llmgeom.record import Record
from llmgeom.result import SENTENCE, Curve, Estimate, Result, curve, quantity

PROFILE = "profile"


@dataclass(frozen=True, kw_only=True)
class Profile(Result):
    """What the model makes of the evidence of each process. Its claims are those of the processes."""

    TITLE = "Profile"

    accuracy: Curve = curve(
        "process", "fraction", "accuracy with the most observations; dashed: the exact observer's",
        interval="clusters", beside="accuracy_exact",
    )  # fmt: skip
    accuracy_exact: np.ndarray = quantity("process", "fraction", "accuracy of the exact observer there")
    resolution: Curve = curve(
        "process",
        "fraction",
        "resolution: share of what the evidence says",
        interval="clusters",
        null="hardest control",
    )
    weight: Curve = curve("process", "of Bayes' rule", "weight of evidence; 1 is Bayes' rule", interval="clusters")


def profile(records: Sequence[Record], facts: Mapping[str, object] | None = None) -> Record | None:
    """The profile of a model, as a record, from its records of single processes (`Answers`); None of fewer than two.

    Args:
        records: Records of one model, one per process.
        facts: Provenance to add to that of the records.
    """
    some = [record for record in records if PROCESS in record.results]
    if len(some) < 2:
        return None
    names, first = tuple(str(record.source["name"]) for record in some), some[0]
    arrays = [record.results[PROCESS].arrays for record in some]
    used, weighed = ([found(record, name) for record in some] for name in (RESOLUTION, WEIGHT))
    result = Profile(
        accuracy=Curve(np.array([one["accuracy"][-1] for one in arrays]),
                       interval=np.array([one["accuracy_interval"][-1] for one in arrays])),
        accuracy_exact=np.array([one["accuracy_exact"][-1] for one in arrays]),
        resolution=Curve(np.array([h.value for h in used]), interval=np.array([(h.low, h.high) for h in used]),
                         null=np.array([h.control_range for h in used])),
        weight=Curve(np.array([h.value for h in weighed]), interval=np.array([(h.low, h.high) for h in weighed])),
        ticks={"process": names},
    )  # fmt: skip
    about = {"kind": "processes", "name": PROFILE, "processes": list(names)}
    return Record(
        results={PROFILE: replace(result, facts={SENTENCE: sentence(some)}).lowered()},
        unmeasured={},
        prompts={},
        subject=first.subject,
        source=about | {"n": first.source["n"], "seed": first.source["seed"]},
        facts={**first.facts, **(facts or {})},
    )


def found(record: Record, name: str) -> Estimate:
    """A number of the answers of one process."""
    return next(h for h in record.results[PROCESS].estimates if h.name == name)


def sentence(records: Sequence[Record]) -> str:
    """In which processes the model uses the evidence, and how much it weighs it there."""
    used = [record for record in records if found(record, RESOLUTION).verdict in ("holds", "small")]
    names = ", ".join(str(record.source["name"]) for record in used)
    if not used:
        return f"In none of {len(records)} processes the model is shown to use the evidence."
    weights = [found(record, WEIGHT).value for record in used]
    span = f"{min(weights):.2g}" if len(used) == 1 else f"{min(weights):.2g} to {max(weights):.2g}"
    return (
        f"It uses the evidence in {len(used)} of {len(records)} processes ({names}), and weighs it there {span} times "
        "as much as Bayes' rule."
    )
