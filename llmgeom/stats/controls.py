"""Controls that a value is compared with, and the excess of the value over the control that is hardest to beat.

The excess is counted from the centre of a control. Its standard error has two parts: the sampling noise of the value,
from its interval over clusters, and the spread between draws of the control, since a further untrained model would lie
elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from llmgeom.stats.resampling import TIE, Interval, band, student_quantile
from llmgeom.stats.tests import LEAST_P, SCALES, Scale, Side, equivalence_p, on_scale, outside_p
from llmgeom.stats.verdict import ALPHA, LEAST_DRAWS, NO_END, Claim, Setting, number_of_draws

FINE = 1000  # with at least so many permutations, p = 1 / (1 + draws) only says that p is small
FAR = 1e9  # a hurdle that no value clears; finite, since an Estimate holds finite numbers


@dataclass(frozen=True)
class Null:
    """A control that a value is compared with.

    Attributes:
        name: What a reader calls it.
        low, high: Its 95 % band.
        centre: Its middle, the origin of the declared effect; for a sample, the middle on the claim's scale.
        p: One-sided p-value of the value if the control computes one (a permutation's rank p); else None.
        draws: Number of draws; 0 for a number.
        sample: The draws, if they are the same statistic computed by the same pipeline.
        side: The side on which the draws were compared.
        noisy: The draws contain the value's sampling noise too, so it is not counted a second time.
        mean: The value is a mean over trainings, compared with the mean of the draws and not with a further draw.
        difference: Interval of value minus control, for one deterministic control; see `paired`.
    """

    name: str
    low: float
    high: float
    centre: float
    p: float | None = None
    draws: int = 0
    sample: tuple[float, ...] = ()
    side: Side | None = None
    noisy: bool = False
    mean: bool = False
    difference: Interval | None = None

    @classmethod
    def of(cls, name: str, draws: np.ndarray, side: Side = "upper", noisy: bool = False) -> Null:
        """A control from draws: the same statistic of further models, computed by the same pipeline.

        Args:
            name: What a reader calls it.
            draws: The statistic of each draw.
            side: The side on which the claim expects the value.
            noisy: See the attribute.

        Returns:
            The control. Without draws it has no name, and `claims.estimate` leaves it out.
        """
        if not len(draws):
            return cls("", 0.0, 0.0, 0.0)
        sample, centre = tuple(map(float, draws)), float(np.median(draws))
        return cls(name, *band(draws), centre, draws=len(draws), sample=sample, side=side, noisy=noisy)

    @classmethod
    def number(cls, name: str, at: float, p: float | None = None) -> Null:
        """A fixed number as control, such as one half for the share of a majority; p, if a test of its own gives it."""
        return cls(name, at, at, at, p)

    @classmethod
    def half(cls) -> Null:
        """The number one half."""
        return cls.number("one half", 0.5)

    @classmethod
    def paired(cls, name: str, value: float, centre: float, difference: Interval) -> Null:
        """One deterministic control, e.g. the same weights without context, read on the same prompts as the value.

        Args:
            name: What a reader calls it.
            value: The statistic of the model.
            centre: The statistic of the control.
            difference: Interval of value minus centre, with both recomputed for each cluster left out.
        """
        low, high = value - difference.high, value - difference.low
        return cls(name, low, high, centre, difference=difference)


class Control(NamedTuple):
    """One control of a number.

    Attributes:
        name, draws: What a reader calls it, and how many draws of it there are; 0 of one that is not drawn.
        centre, low, high: Its middle in the metric's unit, and its 95 % band. Of one control on the same prompts, such
            as the same weights without context, the band is the value less the interval of the difference.
        p: One-sided, against it.
        difference: Of a control on the same prompts: the 95 % interval of value less centre.
    """

    name: str
    draws: int
    centre: float
    low: float
    high: float
    p: float = 1.0
    difference: tuple[float, float] | None = None

    @property
    def said(self) -> str:
        """The name with the number of draws."""
        return f"{self.name} ({number_of_draws(self.draws)})" if self.draws else self.name


@dataclass(frozen=True)
class Excess:
    """A value minus a control's centre, compared with its standard error.

    Attributes:
        p: One-sided p that the value is not beyond the control; of a claim of no effect, that it is not within.
        p_excluded: One-sided p that the value is as far beyond the centre as the declared effect; without room for it,
            that it is beyond the centre at all; of a claim of no effect, that it is within.
        p_opposite: One-sided p that the value is not beyond the control on the other side.
        hurdle: The value whose p against this control is .025, before correction; the end of what a claim of no effect
            allows, and `least` its lower end.
        room: Whether centre plus effect is a value that the metric can have.
        averaged: Whether the value is compared with the mean of the draws, and not with a further one.
        setting: Noise of the value and spread of the draws in units of the effect, for the number of clusters needed.
    """

    p: float
    p_excluded: float
    p_opposite: float
    hurdle: float
    least: float = 0.0
    room: bool = True
    averaged: bool = False
    setting: Setting = Setting(0.0, 0.0, 0)


def compared(
    rule: Claim, value: float, interval: Interval, nulls: Sequence[Null], clusters: int
) -> tuple[tuple[Control, ...], Excess]:
    """The controls, that which is hardest to beat first, and the excess over it.

    p is the largest of all controls, since a claim asks that every one is beaten. So is p_opposite: a value between two
    controls is not beyond both on the other side.
    """
    every = sorted((excess(rule, value, interval, null, clusters) for null in nulls), key=lambda one: one[2])
    controls, found, _ = zip(*every, strict=True)
    if rule.equivalence:
        return controls, _equivalence(rule, value, interval, nulls, clusters)
    return controls, replace(found[0], p=max(x.p for x in found), p_opposite=max(x.p_opposite for x in found))


def excess(
    rule: Claim, value: float, interval: Interval, null: Null, clusters: int
) -> tuple[Control, Excess, tuple[float, float]]:
    """Compare the value with one control.

    On the rule's scale g, with e the standard error of g(value) from its interval (with the interval's degrees of
    freedom) and m draws of mean c and standard deviation s,

        t = (g(value) - c) / sqrt(e^2 + s^2 (1 + 1 / m)),

    which has Student's distribution if the value is a further draw, measured with error e; degrees of freedom by Welch
    (1947) and Satterthwaite (1946). For `noisy` draws s^2 contains e^2 already, so the variance is max(e^2, s^2) + s^2
    / m. A control without draws has s = 0. If the control is the `mean` of m trainings, s^2 / m replaces s^2 (1 + 1 /
    m): Welch's test. The same error applies to the distance from c to the declared effect. An interval that is not
    symmetric on g has two errors; each comparison takes the one on its side.

    Returns:
        The control, the excess over it, and the key that sorts the control that is hardest to beat first: minus p, then
        t. Of a permutation at the floor of its p (no order reaches the value) it is the p of the distance where that is
        smaller: 199 orders give no p below .005, which says nothing of how near they come.

    Raises:
        UserError: a value or a draw has no logarithm, on the scale "log".
    """
    from scipy.special import stdtrit

    scale: Scale = "identity" if null.difference else rule.scale
    if scale == "log" and not null.sample and null.centre <= 0:
        scale = "identity"  # a control number without a logarithm is compared untransformed
    back = SCALES[scale][1]
    sign = rule.sign
    at = float(on_scale(value, scale))
    drawn = on_scale(np.array(null.sample), scale) if null.sample else np.array([])
    middle = float(drawn.mean()) if len(drawn) else float(on_scale(null.centre, scale))
    centre, spread = float(back(middle)), _spread(drawn)
    span = null.difference or interval
    units = span.units or clusters
    below, above = _errors(value, null, span, units, scale)
    near, far = (below, above) if sign > 0 else (above, below)  # on the side of the control, and beyond the value
    error, far_error = (_Error.of(noise, spread, null, units) for noise in (near, far))
    rounding = TIE * max(1.0, abs(at))
    distance = sign * (at - middle)

    p = rank = error.tail(distance, rounding)
    hurdle = sign * FAR
    if math.isfinite(error.size):
        hurdle = float(back(middle + sign * stdtrit(error.degrees, 1 - ALPHA) * error.size))
    if null.p is not None:
        floor = null.draws and null.p <= 1 / (1 + null.draws) + TIE
        rank = min(null.p, p) if floor else null.p
        p = rank if floor and null.draws >= FINE else null.p
        hurdle = null.high if sign > 0 else null.low
    room = rule.room(centre)
    step = sign * (float(on_scale(rule.end(centre), scale)) - middle) if room else 0.0
    difference = (null.difference.low, null.difference.high) if null.difference else None
    control = Control(null.name, null.draws, centre, null.low, null.high, max(p, LEAST_P), difference)
    found = Excess(
        p=max(p, LEAST_P),
        p_excluded=max(far_error.tail(step - distance, rounding), LEAST_P),
        p_opposite=max(far_error.tail(-distance, rounding), LEAST_P),
        hurdle=hurdle,
        room=room,
        averaged=null.mean,
        setting=_setting(rule, value, span, null, clusters, step, (near, far), spread),
    )
    relative = distance / error.size if error.size else math.copysign(math.inf, distance) if distance else 0.0
    return control, found, (-rank, relative)


@dataclass(frozen=True)
class _Error:
    """Standard error of a value minus a control's centre, and its degrees of freedom; formulas in `excess`."""

    size: float
    degrees: float

    @classmethod
    def of(cls, noise: float, spread: float, null: Null, units: float) -> _Error:
        """From the value's own error, `noise` with `units` clusters, and the spread of the control's draws."""
        m = len(null.sample)
        of_value, of_draws = noise**2, spread**2 * ((not null.mean) + 1 / m) if m else 0.0
        if null.noisy and m:
            of_value, of_draws = (0.0, of_draws) if spread >= noise else (of_value, spread**2 / m)
        variance = of_value + of_draws
        if 0 < m < LEAST_DRAWS or not math.isfinite(variance):
            return cls(math.inf, 1.0)  # few draws, or one cluster, say nothing about a tail
        if not variance:
            return cls(0.0, 1.0)
        parts = ((of_value, max(units - 1, 1)), (of_draws, m - 1))
        return cls(math.sqrt(variance), variance**2 / sum(part**2 / d for part, d in parts if part))

    def tail(self, distance: float, rounding: float) -> float:
        """One-sided p of this distance; without an error, a distance within `rounding` is none."""
        from scipy.special import stdtr

        if not self.size:
            return LEAST_P / 10 if distance > rounding else 1.0
        return float(stdtr(self.degrees, -distance / self.size))


def _spread(drawn: np.ndarray) -> float:
    """Standard deviation of draws; 0 if they differ only by rounding."""
    spread = float(drawn.std(ddof=1)) if len(drawn) > 1 else 0.0
    return spread if spread > TIE * max(1.0, abs(drawn).max(initial=0.0)) else 0.0


def centre_error(null: Null, further: bool = False) -> float:
    """Standard error of a control's mean of m draws with standard deviation s, or of one `further` draw from it.

    s / sqrt(m), or s sqrt(1 + 1 / m); 0 for a number; infinite for too few draws to estimate s.
    """
    if not (m := len(null.sample)):
        return 0.0
    further &= not null.mean
    return _spread(np.array(null.sample)) * math.sqrt(further + 1 / m) if m >= LEAST_DRAWS else math.inf


def widened(value: float, interval: Interval, null: Null, clusters: int, further: bool) -> Interval:
    """Interval of the value widened by `centre_error`, with Welch's degrees of freedom, the fewer of its two sides."""
    other = centre_error(null, further)
    if not other:
        return interval
    if math.isinf(other):
        return replace(interval, low=-math.inf, high=math.inf)
    units, m = interval.units or clusters, len(null.sample)
    quantile = student_quantile(units, interval.level)
    below, above = (
        math.hypot(end, other) for end in ((value - interval.low) / quantile, (interval.high - value) / quantile)
    )
    degrees = min(
        whole**4 / ((whole**2 - other**2) ** 2 / max(units - 1, 1) + other**4 / (m - 1)) for whole in (below, above)
    )
    reach = student_quantile(degrees + 1, interval.level)
    return replace(interval, low=value - reach * below, high=value + reach * above, units=degrees + 1)


def _errors(value: float, null: Null, span: Interval, units: int | float, scale: Scale) -> tuple[float, float]:
    """Standard errors below and above the value (or difference), on a scale; infinite for a single cluster.

    Where an end has no value on the scale (log 0), the slope of the scale at the value gives the error.
    """
    if units <= 1:
        return math.inf, math.inf
    point = value - null.centre if null.difference else value
    quantile = student_quantile(units, span.level)
    forward = SCALES[scale][0]

    def reach(end: float) -> float:
        size = abs(end - point)
        if scale == "log" and end <= 0:
            return size / point / quantile
        return abs(float(forward(np.float64(end))) - float(forward(np.float64(point)))) / quantile

    return reach(span.low), reach(span.high)


def _setting(
    rule: Claim,
    value: float,
    span: Interval,
    null: Null,
    clusters: int,
    step: float,
    errors: tuple[float, float],
    spread: float,
) -> Setting:
    """Noise of one cluster and spread of the draws in units of the effect's step on the scale.

    |rho| near 0 has no room below it: the error on that side is not that of other samples; the longer side is taken.
    A control without draws, as of permutations, is compared on Fisher's scale, since the folded scale is steep at 0.

    A `Setting` takes spread sqrt(1 + 1 / m) as the error of a control of m draws. If the control is their mean, the
    spread is divided by sqrt(m + 1), which makes that error spread / sqrt(m).
    """
    noise, m = errors[0], len(null.sample)
    if rule.scale == "folded" and not null.difference:
        noise = max(errors)
        if not m and step:
            centre, end = (float(on_scale(x, "fisher")) for x in (null.centre, rule.end(null.centre)))
            step, noise = abs(end - centre), max(_errors(value, null, span, span.units or clusters, "fisher"))
    if step <= 0 or not math.isfinite(noise):
        return Setting(0.0, 0.0, 0)
    of_cluster = noise * clusters**0.5 / step
    if null.noisy and m:
        return Setting(of_cluster, max(spread**2 - noise**2, 0.0) ** 0.5 / step, null.draws, True)
    return Setting(of_cluster, spread / step / (math.sqrt(m + 1) if null.mean else 1), m)


def _equivalence(rule: Claim, value: float, interval: Interval, nulls: Sequence[Null], clusters: int) -> Excess:
    """Two one-sided tests: within the effect of every control's centre, hence within the overlap of those ranges.

    With e the standard error of the value, and m draws of a control with standard deviation s, the claim holds by
    sqrt(e^2 + s^2 / m), as a fixed value is compared with their mean. It is ruled out by sqrt(e^2 + s^2 (1 + 1 / m)),
    as one more draw lies outside the range by chance. A control's own p of "holds" counts where it is larger.

    Simulated, 800 random directions as the value and 39 others as draws, 37 prompts, margin .01 bits, s of .005 to .05:
    0 to 2.6 % are ruled out, and 0 to 25 % by e alone. Of values above by .05 bits where s is .02 still 24 % are
    ruled out, by .1 bits 98 %. A value at the margin holds in 2 to 3 %.
    """
    open_ended = rule.equivalence == "at most"
    centres = [float(np.mean(null.sample)) if null.sample else null.centre for null in nulls]
    highest, lowest = nulls[int(np.argmax(centres))], nulls[int(np.argmin(centres))]
    least, most = NO_END if open_ended else max(centres) - rule.effect, min(centres) + rule.effect
    units = interval.units or clusters
    error = (interval.high - interval.low) / 2 / student_quantile(units) if clusters > 1 else 0.0

    def within(null: Null, centre: float) -> float:
        span = widened(value, interval, null, clusters, further=False)
        low = NO_END if open_ended else centre - rule.effect
        return max(equivalence_p(value, span, low, centre + rule.effect, clusters), null.p or 0.0)

    def outside(null: Null, low: float, high: float) -> float:
        return outside_p(value, widened(value, interval, null, clusters, further=True), low, high, clusters)

    each = [within(null, centre) for null, centre in zip(nulls, centres, strict=True)]
    hardest = nulls[int(np.argmax(each))]
    known = centre_error(hardest)
    # A Setting takes the spread of draws, s sqrt(1 + 1 / m), where the mean of them is known to s / sqrt(m).
    spread = known / math.sqrt(1 + 1 / hardest.draws) if 0 < known < math.inf else 0.0
    return Excess(
        p=max(max(each), LEAST_P),
        p_excluded=max(min(outside(lowest, NO_END, most), outside(highest, least, -NO_END)), LEAST_P),
        p_opposite=1.0,
        hurdle=most,
        least=least,
        averaged=True,
        setting=Setting(error * clusters**0.5 / rule.effect, spread / rule.effect, len(hardest.sample)),
    )
