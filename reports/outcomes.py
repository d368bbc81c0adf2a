"""The tests of a run's claims: each with its word, in the order in which they are shown, and what it is called.

A claim has one of five words: holds, small (the controls are beaten, and an effect of the claimed size is excluded),
ruled out, opposite, open. On the common scale 0 is the centre of the control, and 1 lies the claimed effect beyond it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from llmgeom.record import Record
from llmgeom.reports.text import control_of, independent, pretty, told_apart, value_of
from llmgeom.result import WORDS, Estimate

CHECKS = ("ablation_control",)  # probes whose claim is that the instrument works: no finding about the model
# What tells two edits of one axis apart -> how a sentence says it.
ALONG = {"pc1": "along PC1", "ridge": "along the ridge direction"}


@dataclass(frozen=True)
class Outcome:
    """One claim tested in one run: its label (empty if there is one run), the probe, the numbers, what n counts."""

    record: str
    probe: str
    estimate: Estimate
    counts: str = "prompts"

    @property
    def key(self) -> tuple[str, str]:
        """The key that tests of one claim in several runs share."""
        return self.probe, self.estimate.name

    @property
    def word(self) -> str:
        """One of WORDS. Raises ValueError for a verdict that is none of them."""
        if self.estimate.verdict not in WORDS:
            raise ValueError(
                f"the claim {self.estimate.name!r} has the verdict {self.estimate.verdict!r}; "
                f"expected one of {', '.join(WORDS)}"
            )
        return self.estimate.verdict

    @property
    def head(self) -> str:
        """The claim in a few words: its sentence up to the colon."""
        return pretty(self.estimate.claim.partition(":")[0].rstrip("."))

    @property
    def paper(self) -> str:
        """The paper that the claim is from, e.g. "Paper III"; empty for one that no paper makes."""
        found = re.match(r"Paper [IVX]+", self.estimate.source)
        return found[0] if found else ""

    def scaled(self, value: float) -> float:
        """A value on the common scale of all claims: 0 is the control's centre and 1 the claimed effect beyond it.

        For a claim of no effect 0 is the control, and the claim says that the value lies between -1 and 1. Raises
        ValueError where the claim declares no effect.
        """
        h = self.estimate
        if not h.effect > 0:
            raise ValueError(f"the claim {h.name!r} declares an effect of {h.effect}; expected a number above 0")
        if not h.equivalence:
            return (value - h.centre) / (h.effect if h.side == "upper" else -h.effect)
        # A range that is wider than twice the effect has no lower end: a claim that the value is not larger.
        two_sided = h.margin - h.margin_low <= 2.001 * h.effect
        return (value - ((h.margin_low + h.margin) / 2 if two_sided else h.margin - h.effect)) / h.effect

    @property
    def distance(self) -> float:
        """Effect over margin: where the value lies on the common scale."""
        return self.scaled(self.estimate.value)

    @property
    def value(self) -> str:
        """The value with its 95 % interval and its unit."""
        return value_of(self.estimate)

    @property
    def control(self) -> str:
        """The control's range (its middle 95 %), or the one number that it is, with the value's decimals."""
        return control_of(self.estimate)


def outcomes(records: Sequence[Record], labels: Sequence[str]) -> list[Outcome]:
    """Every claim of every record; tests of one claim follow each other, claims as they come."""
    several = len(records) > 1
    every = [
        Outcome(label if several else "", probe, h, independent(h, record.source, record.prompts))
        for label, record in zip(labels, records, strict=True)
        for probe in in_order(record.results)
        for h in record.results[probe].estimates
        if h.claim
    ]
    first = {key: place for place, key in reversed(list(enumerate(one.key for one in every)))}
    return sorted(every, key=lambda one: first[one.key])


def in_order(probes: Iterable[str], first: Sequence[str] = ()) -> list[str]:
    """Probes in the order in which they are shown: `first`, then by name, checks of the instrument last."""
    return sorted(probes, key=lambda probe: (probe not in first, probe in CHECKS, probe))


def distinct(every: Iterable[Outcome]) -> list[Outcome]:
    """The tests, each counted once: one of the weights alone gives the same number on every set of prompts."""
    first: dict[tuple, Outcome] = {}
    for one in every:
        h = one.estimate
        first.setdefault((*one.key, h.value, h.low, h.high, h.p, h.n), one)
    return list(first.values())


def claims(every: Iterable[Outcome]) -> list[list[Outcome]]:
    """The tests claim by claim."""
    return [list(group) for _, group in groupby(every, key=lambda one: one.key)]


def heads(groups: Sequence[Sequence[Outcome]]) -> dict[tuple[str, str], str]:
    """The name of each claim; claims with the same words also name their probe or metric."""
    short = {group[0].key: group[0].head for group in groups}
    names = list(short.values())
    titles = {}
    for (probe, name), head in short.items():
        alike = [key for key, other in short.items() if other == head]
        apart = told_apart([key[0] for key in alike])
        more = apart[probe] if len(apart) == len(alike) else pretty(name)
        named = f"{head} ({ALONG[more]})" if more in ALONG else f"{more}: {head}"
        titles[probe, name] = named if names.count(head) > 1 else head
    return titles
