"""The profile of a model: accuracy, weight of evidence and resolution in every process, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmgeom.probes.evidence.answers import PROCESS, RESOLUTION, WEIGHT
from llmgeom.record import Record
from llmgeom.result import SENTENCE, Estimate, Result, labelled, line

PROFILE = "profile"


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
    own, own_ends, exact = (
        [one[key][-1] for one in arrays] for key in ("accuracy", "accuracy_interval", "accuracy_exact")
    )
    (resolved, over_used), (weights, over_weighed) = (
        ([h.value for h in some], ("clusters", [(h.low, h.high) for h in some])) for some in (used, weighed)
    )
    of_accuracy = "accuracy with the most observations; dashed: the exact observer's"
    of_used, null = "resolution: share of what the evidence says", ("hardest control", [h.control_range for h in used])
    of_weight = "weight of evidence; 1 is Bayes' rule"
    result = Result.of(
        "Profile",
        {
            **line("accuracy", own, "process", "fraction", of_accuracy, interval=("clusters", own_ends),
                   beside="accuracy_exact"),
            "accuracy_exact": labelled(exact, "process", "fraction", "accuracy of the exact observer there"),
            **line("resolution", resolved, "process", "fraction", of_used, interval=over_used, null=null),
            **line("weight", weights, "process", "of Bayes' rule", of_weight, interval=over_weighed),
        },
        __name__,
        ticks={"process": names},
        facts={SENTENCE: sentence(some)},
    )  # fmt: skip
    about = {"kind": "processes", "name": PROFILE, "processes": list(names)}
    return Record(
        results={PROFILE: result},
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
