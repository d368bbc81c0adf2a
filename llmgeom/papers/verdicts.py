"""Verdicts from a measurement and a printed number, with the n that would decide an open one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from llmgeom import claims
from llmgeom.errors import UserError
from llmgeom.papers.published_numbers import Check, Entry
from llmgeom.result import Estimate, Lack
from llmgeom.stats.controls import excess
from llmgeom.stats.resampling import Draws, Interval, student_quantile
from llmgeom.stats.tests import Scale, equivalence_p, needed_n_mean, outside_p
from llmgeom.stats.verdict import Rule

NO_NULL = "the number in the claim"  # name of the null of a value that is compared only with a printed number
AT_MOST_1 = ("fraction", "R2", "skill", "silhouette", "|cos|")  # units whose values, and so intervals, end at 1
LEAST_ERROR = 1e-12  # the smallest standard error, for values that are exactly equal


@dataclass(frozen=True)
class Row:
    """One entry for one subject.

    Attributes:
        estimate: Our metric with its verdict; None if there is none.
        why: The reason of the verdict, or why there is no metric.
        test: The comparison of the metric with the printed number; None without one.
        as_published: In an audit, the metric by the published definition.
    """

    entry: Entry
    estimate: Estimate | None
    why: str
    test: Check | None = None
    as_published: Estimate | None = None

    @property
    def verdict(self) -> str:
        return self.estimate.verdict if self.estimate else "NOT TESTED"


# ---- estimates over trainings ----------------------------------------------------------------------------------------


def over_seeds(
    values: Draws, unit: str, scale: Scale = "identity", null: tuple[str, float] | None = None, least: float = 0.0
) -> Estimate:
    """The mean of independent trainings with Student's 95 % interval; the geometric mean on the scale "log".

    Args:
        values: One value for each training.
        scale: Scale of the mean and the interval.
        null: Name and value of a predictor that does not infer.
        least: The smallest standard deviation between trainings that the measurement can resolve.

    Raises:
        UserError: Fewer than 2 trainings, or a value without a logarithm on the scale "log".
    """
    x = np.asarray(values, float)
    if len(x) < 2:
        raise UserError(f"{len(x)} training was finished; an interval over trainings needs at least 2")
    if scale == "log" and x.min() <= 0:
        raise UserError(f"a ratio of {x.min():.3g} has no logarithm: an error of 0 is no denominator")
    y = np.log(x) if scale == "log" else x
    error = max(max(y.std(ddof=1), least) / math.sqrt(len(y)), LEAST_ERROR)
    ends = y.mean() + error * student_quantile(len(y)) * np.array([0, -1, 1])
    value, low, high = np.exp(ends) if scale == "log" else ends
    name, at = null or ("", float(value))
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
        p=0.0,  # not yet compared with a control: see `pose`
        n=len(x),
        clusters=len(x),
        centre=at,
        margin=at,
        counts="trainings",
    )


def over_draws(h: Estimate, name: str, draws: Sequence[float]) -> Estimate:
    """The mean of trainings compared with draws of one control below it: with the control's band, the hurdle and p."""
    null, span = claims.Null.of(name, np.array(draws)), Interval(h.low, h.high, 0.95, h.method, h.units)
    compared = excess(Rule(side="upper", needed="mean"), h.value, span, null, h.clusters)
    return replace(
        h,
        null_low=null.low,
        null_high=null.high,
        null=f"{null.name} ({null.draws} draws)",
        control=null.name,
        control_draws=null.draws,
        centre=compared.centre,
        margin=compared.hurdle,
        p=compared.p,
    )


def combined(estimates: Sequence[Estimate]) -> Estimate:
    """The mean of one metric over several trainings, with the null that is hardest to beat."""
    mean = over_seeds([h.value for h in estimates], estimates[0].unit)
    hardest = max(estimates, key=lambda h: (h.p, h.centre if h.side == "upper" else -h.centre))
    least, most = hardest.control_range
    return replace(
        mean,
        null=f"{hardest.null}, the hardest of {len(estimates)} trainings",
        null_low=least,
        null_high=most,
        **{name: getattr(hardest, name) for name in ("control", "control_draws", "centre", "margin", "side", "p")},
    )


# ---- verdicts --------------------------------------------------------------------------------------------------------


def judged(rows: Sequence[Row], model: str = "") -> list[Row]:
    """The rows with verdicts of `llmgeom.claims.judge`, by Holm over all that were measured.

    A number whose control also lies in the printed range is open, whatever the number of seeds.
    """
    tests = sum(row.test is not None and row.estimate is not None for row in rows)
    posed = tuple(pose(row.entry, row.test, row.estimate, tests, model) for row in rows if row.test and row.estimate)
    verdicts = iter(claims.judge_estimates(posed))
    return [
        _final(row, row.test, row.estimate, next(verdicts), model) if row.test and row.estimate else row for row in rows
    ]


def judged_by_claims(rows: Sequence[Row]) -> list[Row]:
    """The rows with the verdicts of their own claims, by Holm over those of these rows."""
    estimates = iter(claims.judge_estimates([row.estimate for row in rows if row.estimate]))
    return [replace(row, estimate=(h := next(estimates)), why=h.why) if row.estimate else row for row in rows]


def pose(entry: Entry, test: Check, h: Estimate, tests: int, model: str = "") -> Estimate:
    """The metric as the entry tests it: the hurdle of its interval, its p, and the n for the declared tolerance.

    For the region (a, b) of the test, p is that of `equivalence_p`. With "above" and "below" the value must also beat
    its control: p is then the larger of the two, and a or b the control's centre if that is farther. The tolerance
    counts from there: a value past a by less is "small". A printed bound has one side: a value on its wrong side is
    "ruled out". n: `needed_n_mean` for a difference of `tolerance`, at a level divided by the number of tests.
    The value's own interval is compared with a printed number; a control on the same prompts then counts as one number.
    """
    h = replace(h, name=entry.quantity, published=entry.published, source=entry.source)
    if test.compare == "claim":
        return h
    least, most = h.control_range
    h = replace(h, paired=False, null_low=least, null_high=most)
    side: claims.Side = "lower" if test.compare == "below" else "upper"
    near, far = _region(entry, test, h, side, model)
    # From here on the scale of the test, on which a value without a logarithm is infinite.
    scaled = math.log if test.scale == "log" else float
    low, value, high, a, b = (
        scaled(x) if math.isfinite(x) and (test.scale != "log" or x > 0) else math.copysign(math.inf, x or -1)
        for x in (h.low, h.value, h.high, near, far)
    )
    span = Interval(low, high, 0.95, h.method, h.units)
    end = far if math.isfinite(far) else near
    tolerance = math.log1p(test.tolerance / end) if test.scale == "log" and end > 0 else test.tolerance
    sd = max((high - low) / 2 / student_quantile(h.units or h.clusters), LEAST_ERROR) * math.sqrt(h.clusters)
    p = equivalence_p(value, span, a, b, h.clusters)
    h = replace(
        h,
        claim=_claim(entry, test, model),
        side=side,
        effect=test.tolerance,
        unit=test.unit,
        needed=needed_n_mean(tolerance, sd, level=1 - 0.05 / max(tests, 1)),
        null=h.null or NO_NULL,
        equivalence=test.compare == "within",
    )
    if test.compare == "within":
        outside = outside_p(value, span, a, b, h.clusters)
        return _within_unit(replace(h, margin_low=near, margin=far, p=p, p_excluded=outside))
    bound, small = (near, (-math.inf, a + tolerance)) if side == "upper" else (far, (b - tolerance, math.inf))
    excluded = equivalence_p(value, span, *small, h.clusters)
    return _within_unit(replace(h, centre=bound, margin=bound, p=max(h.p, p), p_excluded=excluded))


def _region(entry: Entry, test: Check, h: Estimate, side: claims.Side, model: str) -> tuple[float, float]:
    """The region of the test; "above" and "below" begin at the control's centre if that is farther."""
    near, far = test.region(model)
    if test.compare == "within" or not h.null:
        return near, far
    if h.p and h.side != side:
        raise ValueError(f"{entry.id}: {test.compare}, but the null was made for the {h.side} side")
    return (max(near, h.centre), far) if side == "upper" else (near, min(far, h.centre))


def _within_unit(h: Estimate) -> Estimate:
    """The interval cut to possible values: Student's interval of three accuracies near 1 exceeds 1."""
    return claims.cut(h, -math.inf, 1.0) if h.unit in AT_MOST_1 else h


def _claim(entry: Entry, test: Check, model: str) -> str:
    """The sentence that the verdict "holds" confirms."""
    if test.compare == "within":
        return f"{entry.quantity}: {test.text(model)} {test.unit}, the printed range and its tolerance"
    return f"{entry.quantity}: {test.text(model)} {test.unit}, and beyond its null"


def _final(row: Row, test: Check, measured: Estimate, h: Estimate, model: str) -> Row:
    if test.compare == "claim" and measured.verdict == "open":
        h = replace(h, verdict="open", why=measured.why)  # e.g. of too few trainings, whatever their p
    if h.verdict == "holds" and test.compare == "within" and not test.nothing and h.null != NO_NULL:
        near, far = test.region(model)
        if near <= h.null_high and h.null_low <= far:
            lack = Lack("control", h.null)
            h = replace(h, verdict="open", why=str(lack), lacks=(lack,))
    return replace(row, estimate=h, why=h.why)
