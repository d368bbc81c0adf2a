"""From a measurement and what a paper printed to a verdict, with the n it would take where there is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from llmgeom import claims
from llmgeom.errors import UserError
from llmgeom.papers.published_numbers import Check, Entry
from llmgeom.result import Estimate, Measured
from llmgeom.stats.resampling import Draws, Interval, student_quantile
from llmgeom.stats.tests import Scale, equivalence_p, needed_n_mean

NONE = "the number in the claim"  # is all that a value without a null is held against
SURE = 1e-12  # the least standard error, where numbers are exactly equal


@dataclass(frozen=True)
class Judged:
    """One entry for one subject: a metric with its verdict, or None and why it was not tested."""

    entry: Entry
    test: Check | None
    estimate: Estimate | None
    why: str

    @property
    def verdict(self) -> str:
        return self.estimate.verdict if self.estimate else "NOT TESTED"


class Bench:
    """What a paper's module gives for one subject, whose name in tables is `label`, the model's where numbers were
    printed for some models only: its measures by name, and what a terminal and a page show beside the entries.
    """

    label: str
    MEASURES: ClassVar[Mapping[str, Callable[..., Estimate]]] = {}

    def measured(self, test: Check) -> Estimate:
        """Raises UserError where it cannot be."""
        return self.MEASURES[test.measure](self, test, **test.of)

    def sections(self) -> Mapping[str, Measured]:
        return {}

    def lines(self) -> list[str]:
        return []

    def warnings(self) -> tuple[str, ...]:
        return ()


# ---- measurements ----------------------------------------------------------------------------------------------------


def over_seeds(
    values: Draws,
    unit: str,
    scale: Scale = "identity",
    null: tuple[str, float] | None = None,
    least: float = 0.0,
) -> Estimate:
    """The mean of independent trainings (on the scale "log" the geometric one), with Student's interval.

    null     what a predictor that does not infer has, by name.
    least    the least standard deviation between trainings that their measurement could have seen.
    Raises UserError for fewer than 2 trainings, and for logarithms of what has none.
    """
    x = np.asarray(values, float)
    if len(x) < 2:
        raise UserError(f"{len(x)} training was finished; an interval over them needs at least 2")
    if scale == "log" and x.min() <= 0:
        raise UserError(f"a ratio of {x.min():.3g} has no logarithm: an error of 0 is no denominator")
    y = np.log(x) if scale == "log" else x
    error = max(max(y.std(ddof=1), least) / math.sqrt(len(y)), SURE)
    ends = y.mean() + error * student_quantile(len(y)) * np.array([0, -1, 1])
    value, low, high = np.exp(ends) if scale == "log" else ends
    name, at = null or (NONE, float(value))
    return Estimate(
        name="",
        value=float(value),
        unit=unit,
        low=float(low),
        high=float(high),
        method=f"Student's t over trainings, 95 %{', log scale' * (scale == 'log')}",
        null_low=at,
        null_high=at,
        null=name,
        p=0.0,
        n=len(x),
        clusters=len(x),
        verdict="no null",
        margin=at,
        p_claim=0.0,
        counts="trainings",
    )


def combined(found: Sequence[Estimate]) -> Estimate:
    """The same metric of several trainings: their mean, and of their nulls the one that is hardest to beat."""
    first = found[0]
    made = over_seeds([h.value for h in found], first.unit)
    hardest = max(found, key=lambda h: h.margin if h.side == "upper" else -h.margin)
    return replace(
        made,
        null=f"{hardest.null}, the hardest of {len(found)} trainings",
        **{name: getattr(hardest, name) for name in ("null_low", "null_high", "margin", "side", "verdict")},
        **{name: max(getattr(h, name) for h in found) for name in ("p", "p_claim")},
    )


# ---- verdicts --------------------------------------------------------------------------------------------------------


def judged(posed: Sequence[Judged], model: str = "") -> list[Judged]:
    """Verdicts by `llmgeom.claims.judge`, Holm over all that were measured; and a number whose null lies in the printed
    range as well is INCONCLUSIVE however many seeds there are."""
    tests = sum(one.estimate is not None for one in posed)
    estimates = tuple(
        pose(one.entry, one.test, one.estimate, tests, model) for one in posed if one.test and one.estimate
    )
    found = iter(claims.judge({"": Measured("", "", "", "", "", estimates, {}, {})})[""].estimates)
    return [
        _told(one, one.test, one.estimate, next(found), model) if one.test and one.estimate else one for one in posed
    ]


def pose(entry: Entry, test: Check, h: Estimate, tests: int, model: str = "") -> Estimate:
    """The metric as the entry asks it: what its interval must clear, its p, and the n for the tolerance declared.

    With the region (a, b) that is asked for, p is that of `equivalence_p`; above and below also ask the value to
    clear its null, so a or b is then the null's end where that is farther. n: `needed_n_mean` for a difference of
    `tolerance`, at a level divided by the number of tests.
    """
    h = replace(h, name=entry.quantity, published=entry.published, source=entry.source)
    if test.compare == "claim":
        return h
    near, far = test.region(model)
    side: claims.Side = "lower" if test.compare == "below" else "upper"
    if test.compare != "within" and h.null != NONE:
        if h.verdict != "no null" and h.side != side:
            raise ValueError(f"{entry.id}: {test.compare}, but the null was made for the {h.side} side")
        near, far = (max(near, h.margin), far) if side == "upper" else (near, min(far, h.margin))
    scaled = math.log if test.scale == "log" else float
    low, value, high, a, b = (
        scaled(x) if math.isfinite(x) and (test.scale != "log" or x > 0) else math.copysign(math.inf, x or -1)
        for x in (h.low, h.value, h.high, near, far)
    )
    p = equivalence_p(value, Interval(low, high, 0.95, h.method), a, b, h.clusters)
    sd = max((high - low) / 2 / student_quantile(h.clusters), SURE) * math.sqrt(h.clusters)
    end = far if math.isfinite(far) else near
    step = math.log1p(test.tolerance / end) if test.scale == "log" and end > 0 else test.tolerance
    h = replace(h, claim=claim(entry, test, model), side=side, effect=test.tolerance, unit=test.unit)
    h = replace(h, needed=needed_n_mean(step, sd, level=1 - 0.05 / max(tests, 1)))
    if test.compare == "within":
        return replace(h, equivalence=True, margin_low=near, margin=far, p=p, p_claim=p)
    margin = near if side == "upper" else far
    return replace(h, equivalence=False, margin=margin, p=max(h.p, p), p_claim=max(h.p_claim, p))


def claim(entry: Entry, test: Check, model: str = "") -> str:
    """What PASS says."""
    near, far = test.region(model)
    if test.compare == "within":
        return f"{entry.quantity}: {near:.3g} to {far:.3g} {test.unit}, the printed range and its tolerance"
    return f"{entry.quantity}: {test.compare} {test.bound:.3g} {test.unit}, and beyond its null"


def asked(test: Check | None, model: str = "") -> str:
    """The same in a cell of a table."""
    if test is None or (test.compare == "within" and not test.printed(model)):
        return ""
    near, far = test.region(model)
    said = {"within": f"{near:.3g} to {far:.3g}", "claim": "its claim"}
    return said.get(test.compare) or f"{test.compare} {test.bound:.3g}"


def _told(one: Judged, test: Check, measured: Estimate, h: Estimate, model: str) -> Judged:
    if test.compare == "claim" and measured.verdict == "INCONCLUSIVE":
        h = replace(h, verdict="INCONCLUSIVE", why=measured.why)  # of too few trainings, say, whatever their p
    if h.verdict == "PASS" and test.compare == "within" and not test.nothing and h.null != NONE:
        near, far = test.region(model)
        if near <= h.null_high and h.null_low <= far:
            why = f"{h.null} lies in the printed range too: that number cannot tell, however many there are"
            h = replace(h, verdict="INCONCLUSIVE", why=why)
    return replace(one, estimate=h, why=h.why)
