"""The declared claims, and how a value with its interval and its nulls becomes a verdict.

The declarations are data, in claims/*.toml: side, smallest effect of interest, scale, and for a claim its sentence.
"""

from __future__ import annotations

import hashlib
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path

import numpy as np

from llmgeom.files import filled, read_entries
from llmgeom.result import Estimate, Measured
from llmgeom.stats import power
from llmgeom.stats.controls import Comparison, Control, Excess, Null, centre_error, compared as compared_with, widened
from llmgeom.stats.resampling import Interval, band, student_quantile
from llmgeom.stats.tests import LEAST_P, Side, equivalence_p, holm, outside_p
from llmgeom.stats.verdict import NO_END, Rule, number_of_draws, word

FOLDER = Path(__file__).parent / "claims"
# The p of each question that a claim answers -> the same after Holm's correction.
QUESTIONS = {"p": "adjusted", "p_excluded": "adjusted_excluded", "p_opposite": "adjusted_opposite"}
CORRELATIONS = {"folded": (0.0, 1.0), "fisher": (-1.0, 1.0)}  # scale -> the values that a metric on it can have


@dataclass(frozen=True, kw_only=True)
class Claim(Rule):
    """One entry of claims/*.toml: a metric of a probe, the rule of its verdict, and where it is a claim its sentence.

    Attributes:
        unit: of the value, the effect and the margin.
        noun: what a sentence calls the number; empty where its name says enough.
        claim: what "holds" says, in one sentence; empty for a metric that is no claim.
        null: the control and what is replicated, in words; the probe computes it.
        source: where the claim is printed.
        published: what was printed.
        counts: what n counts.
        within: the values that the number can have, where it is no claim. Its interval is cut to them; for a claim
            `least` and `most` do that, which also bound the effect.
    """

    probe: str
    name: str
    unit: str
    noun: str = ""
    claim: str = ""
    null: str = ""
    source: str = ""
    published: str = ""
    counts: str = "prompts"
    within: Sequence[float] = (-math.inf, math.inf)

    def lines(self) -> list[str]:
        """The entry as text: the metric, its claim, how it is decided, and its source."""
        if self.equivalence:
            near = "at most {} above" if self.one_sided else "within {} of"
            rule = f"holds {near.format(f'{self.margin:g} {self.unit}')} the centre of every control"
        else:
            way = "above" if self.side == "upper" else "below"
            end = f"{self.effect:g} {self.unit} {way} the control's centre"
            rule = f"holds {way} every control; small or ruled out if the data exclude {end}"
        parts = (self.claim, rule, f"control: {self.null}", f"source: {self.source}", f"published: {self.published}")
        wrapped = [f"    {line}" for part in parts for line in textwrap.wrap(part, 92)]
        return [f"{self.probe}: {self.name}", *wrapped]


def entries(folder: Path = FOLDER) -> tuple[Claim, ...]:
    """Every entry of every file, in order.

    Raises:
        ValueError: an entry is malformed; the text names file and entry.
    """
    return _read(folder)


@cache  # 33 probes ask for their entries when they are imported; parsing each time took 1.2 s
def _read(folder: Path) -> tuple[Claim, ...]:
    every: dict[tuple[str, str], Claim] = {}
    for path in _files(folder):
        for where, entry in read_entries(path, "metric", "probe", "name"):
            claim = _entry(entry, where)
            if (claim.probe, claim.name) in every:
                raise ValueError(f"{where} is declared twice; keep one")
            every[claim.probe, claim.name] = claim
    return tuple(every.values())


def declared(probe: str, folder: Path = FOLDER) -> Mapping[str, Claim]:
    """The entries of one probe by metric name.

    Raises:
        ValueError: the probe has no entry, or an entry is malformed.
    """
    by_name = {entry.name: entry for entry in entries(folder) if entry.probe == probe}
    if not by_name:
        known = ", ".join(sorted({entry.probe for entry in entries(folder)}))
        raise ValueError(f"{folder.name}/*.toml declares no metric of probe {probe!r}; it has {known}")
    return by_name


def digest(probes: Iterable[str] | None = None, folder: Path = FOLDER) -> str:
    """sha256 of the rules of these probes' metrics, by default of all: equal where numbers were judged alike, whatever
    the prose of the claims files says.
    """
    chosen = None if probes is None else set(probes)
    rules = sorted(
        (entry.probe, entry.name, *(getattr(entry, name) for name in sorted(f.name for f in fields(Rule))))
        for entry in entries(folder)
        if chosen is None or entry.probe in chosen
    )
    return hashlib.sha256(repr(rules).encode()).hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.toml"))


def _entry(entry: Mapping, where: str) -> Claim:
    claim = filled(Claim, entry, where)
    if "claim" in entry:
        missing = [key for key in ("claim", "null", "source", "published", "scale") if not entry.get(key)]
        if missing:
            raise ValueError(f"{where}: {', '.join(missing)} missing")
    if not claim.least < claim.most:
        raise ValueError(f"{where}: least {claim.least:g} and most {claim.most:g}; give the smaller end as least")
    amount, other = ("margin", "effect") if claim.equivalence else ("effect", "margin")
    if not getattr(claim, amount) > 0 or other in entry or claim.smallest == float("inf"):
        raise ValueError(f"{where}: give {amount}, a number above 0, and no {other}")
    ends = claim.within if isinstance(claim.within, list | tuple) else ()
    if [type(end) for end in ends] != [float, float] or not ends[0] < ends[1] or ("within" in entry and claim.claim):
        raise ValueError(f"{where}: within is {claim.within!r}; expected [0.0, 1.0], say; a claim has least and most")
    if claim.one_sided and not claim.equivalence:
        raise ValueError(f"{where}: one_sided needs an equivalence claim; give equivalence = true, or leave it out")
    if claim.equivalence and not claim.claim:
        raise ValueError(f"{where}: equivalence is a claim; give its sentence")
    return claim


def estimate(
    claim: Claim, value: float, interval: Interval, nulls: Sequence[Null], *, n: int, clusters: int
) -> Estimate:
    """The value with its interval, compared with the control that is hardest to beat (`stats.controls.compared`).

    Name, centre, band, p and hurdle are those of that control. The estimate has no word yet: `judge` gives one to each
    claim of a record. Without any control, or with one that was not drawn, it is a value with its interval, and no
    claim: the control that is absent could be the hardest to beat.

    Raises:
        ValueError: A control's draws were compared on the other side.
    """
    turned = [null.name for null in nulls if null.side not in (None, claim.side)]
    if turned:
        raise ValueError(f"{claim.name} is declared {claim.side!r}, but null {turned[0]!r} was made for the other side")
    alone = Estimate(
        name=claim.name,
        value=float(value),
        unit=claim.unit,
        low=max(interval.low, claim.within[0]),
        high=min(interval.high, claim.within[1]),
        method=interval.method,
        null_low=0.0,
        null_high=0.0,
        null="",
        p=1.0,
        n=n,
        clusters=clusters,
        noun=claim.noun,
        claim=claim.claim,
        source=claim.source,
        published=claim.published,
        side=claim.side,
        effect=claim.smallest,
        equivalence=claim.equivalence,
        counts=claim.counts,
    )
    drawn = [null for null in nulls if null.name]
    if len(drawn) < len(nulls) or not drawn:  # a preview, or a run without controls
        alone = replace(alone, claim="")
    compared = Comparison(claim, float(value), interval, tuple(drawn), clusters)
    least, most = CORRELATIONS.get(claim.scale, (claim.least, claim.most))
    found = cut(_against(alone, compared) if drawn else alone, least, most)
    return _differences_within(found, *claim.within)


def _against(alone: Estimate, compared: Comparison) -> Estimate:
    """A value with its interval, compared with its controls.

    p is the largest of all controls, since a claim asks that every one is beaten. So is p_opposite: a value between two
    controls is not beyond both on the other side.
    """
    rule, value, interval, nulls, clusters = (getattr(compared, f.name) for f in fields(Comparison))
    every = compared_with(rule, value, interval, nulls, clusters)
    decisive = every[0]
    null = decisive.null
    common = replace(
        alone,
        null_low=null.low,
        null_high=null.high,
        null=f"{null.name} ({number_of_draws(null.draws)})" if null.draws else null.name,
        control=null.name,
        control_draws=null.draws,
        p=max(LEAST_P, *(x.p for x in every)),
        centre=decisive.centre,
        margin=decisive.hurdle,
        room=decisive.room,
        p_excluded=max(decisive.p_excluded, LEAST_P),
        p_opposite=max(LEAST_P, *(x.p_opposite for x in every)),
        noise=decisive.setting.noise,
        null_spread=decisive.setting.spread,
        draws=decisive.setting.draws,
        noisy=decisive.setting.noisy,
        averaged=null.mean,
        deletions=interval.deletions,
        compared=compared,
        units=interval.units,
        paired=null.difference is not None,
        difference_low=null.difference.low if null.difference else 0.0,
        difference_high=null.difference.high if null.difference else 0.0,
        controls=tuple(map(_control, every)),
    )
    return _equivalent(common, interval, nulls, rule.one_sided) if rule.equivalence else common


def _control(x: Excess) -> Control:
    null, p = x.null, max(x.p, LEAST_P)
    if null.difference is None:
        return Control(null.name, null.draws, x.centre, null.low, null.high, p)
    return Control(null.name, 0, x.centre, x.centre, x.centre, p, (null.difference.low, null.difference.high))


def cut(h: Estimate, least: float, most: float) -> Estimate:
    """The estimate with its intervals, its control's range and its hurdle cut to the values that the metric can have.

    An interval of a jackknife is symmetric, and that of a difference from a control too: of few clusters they pass the
    ends of a bounded score. The values that are left out are none, so the interval covers as often. p and deletions
    stay: they come from the error. A hurdle at an end is one that no value passes; the range that a claim of no effect
    allows stays as declared.
    """
    of_control = ("null_low", "null_high", *(() if h.equivalence else ("margin",)))
    names = ("low", "high", *(of_control if h.null else ()))
    ends = {name: min(max(getattr(h, name), least), most) for name in names}
    return _differences_within(replace(h, **ends), least, most)


def _differences_within(h: Estimate, least: float, most: float) -> Estimate:
    """The interval of a difference ends at the largest difference of two values between `least` and `most`."""
    if (widest := most - least) == math.inf:
        return h
    ends = {name: min(max(getattr(h, name), -widest), widest) for name in ("difference_low", "difference_high")}
    return replace(h, **ends, widest=widest)


def _equivalent(h: Estimate, interval: Interval, nulls: Sequence[Null], one_sided: bool) -> Estimate:
    """Two one-sided tests: within the margin of every control's centre, hence within the overlap of those ranges.

    With e the standard error of the value, and m draws of a control with standard deviation s, the claim holds by
    sqrt(e^2 + s^2 / m), as a fixed value is compared with their mean. It is ruled out by sqrt(e^2 + s^2 (1 + 1 / m)),
    as one more draw lies outside the margin by chance. A control's own p of "holds" counts where it is larger.

    Simulated, 800 random directions as the value and 39 others as draws, 37 prompts, margin .01 bits, s of .005 to .05:
    0 to 2.6 % are ruled out, and 0 to 25 % by e alone. Of values above by .05 bits where s is .02 still 24 % are
    ruled out, by .1 bits 98 %. A value at the margin holds in 2 to 3 %.
    """
    centres = [float(np.mean(null.sample)) if null.sample else null.centre for null in nulls]
    highest, lowest = nulls[int(np.argmax(centres))], nulls[int(np.argmin(centres))]
    near, far = NO_END if one_sided else max(centres) - h.effect, min(centres) + h.effect
    error = (h.high - h.low) / 2 / student_quantile(h.units or h.clusters) if h.clusters > 1 else 0.0

    def within(null: Null, centre: float) -> float:
        low = NO_END if one_sided else centre - h.effect
        span = widened(h.value, interval, null, h.clusters, further=False)
        return max(equivalence_p(h.value, span, low, centre + h.effect, h.clusters), null.p or 0.0)

    def outside(null: Null, low: float, high: float) -> float:
        span = widened(h.value, interval, null, h.clusters, further=True)
        return outside_p(h.value, span, low, high, h.clusters)

    p, hardest_null = max(
        ((within(*each), each[0]) for each in zip(nulls, centres, strict=True)), key=lambda each: each[0]
    )
    known = centre_error(hardest_null)
    return replace(
        h,
        margin_low=near,
        margin=far,
        room=True,
        p=p,
        p_excluded=min(outside(lowest, NO_END, far), outside(highest, near, -NO_END)),
        p_opposite=1.0,
        noise=error * h.clusters**0.5 / h.effect,
        # power.Setting takes the spread of draws, s sqrt(1 + 1 / m), where the mean of them is known to s / sqrt(m).
        null_spread=known / math.sqrt(1 + 1 / hardest_null.draws) / h.effect if 0 < known < math.inf else 0.0,
        draws=len(hardest_null.sample),
        noisy=False,
        averaged=True,
    )


def judge(results: Mapping[str, Measured], available: int = 0) -> dict[str, Measured]:
    """The results with one of the five words for each claim; see `judge_estimates`.

    Args:
        available: how many clusters of prompts the source has, if that is known: no larger n is asked for.
    """

    def known(h: Estimate) -> Estimate:
        return replace(h, available=available if h.counts == "prompts" else 0) if h.claim else h

    estimates = [h for measured in results.values() for h in measured.estimates]
    words = iter(judge_estimates([*map(known, estimates)]))
    return {
        probe: replace(measured, estimates=tuple(next(words) for _ in measured.estimates))
        for probe, measured in results.items()
    }


def unjudged(results: Mapping[str, Measured]) -> dict[str, Measured]:
    """The results with claims as plain measurements: their values are there, the controls that judge them are not."""
    return {
        name: replace(measured, estimates=tuple(replace(h, claim="") for h in measured.estimates))
        for name, measured in results.items()
    }


def judged_together(records: Sequence[Mapping[str, Measured]]) -> list[dict[str, Measured]]:
    """The results of several records of one run with one correction over all their claims, since they are read as one.

    A number of the weights alone is the same in each record: it is one test.
    """
    posed: dict[tuple, Estimate] = {}
    for results in records:
        for probe, measured in results.items():
            for h in measured.estimates:
                if h.claim:
                    posed.setdefault(_test(probe, h), h)
    judged = dict(zip(posed, judge_estimates([*posed.values()]), strict=True))
    return [
        {
            probe: replace(measured, estimates=tuple(judged.get(_test(probe, h), h) for h in measured.estimates))
            for probe, measured in results.items()
        }
        for results in records
    ]


def _test(probe: str, h: Estimate) -> tuple:
    """What tells one test from another: the claim and its numbers."""
    return probe, h.name, h.value, h.low, h.high, h.p, h.n


def judge_estimates(estimates: Sequence[Estimate]) -> tuple[Estimate, ...]:
    """The numbers of one record with a word for each claim (`word`); others stay as they are.

    Holm's correction runs over all claims among them, for each of three questions by itself: is the control beaten, is
    the declared effect excluded, does the value lie on the other side. Judged again, they stay the same.
    """
    posed = [h for h in estimates if h.claim]
    adjusted = zip(*(holm([getattr(h, name) for h in posed]).tolist() for name in QUESTIONS), strict=True)
    return tuple(_judged(h, next(adjusted), len(posed)) if h.claim else h for h in estimates)


def _judged(h: Estimate, adjusted: tuple[float, float, float], claims: int) -> Estimate:
    beaten, excluded, opposite = adjusted
    h = replace(h, adjusted=beaten, adjusted_excluded=excluded, adjusted_opposite=opposite, among=claims)
    if word(h, claims)[0] == "open":
        h = replace(h, needed=_needed(h, claims))
    if h.lacks:
        return replace(h, verdict="open", why="; ".join(map(str, h.lacks)))
    verdict, why = word(h, claims)
    return replace(h, verdict=verdict, why=why)


def layer_band(draws: Mapping[str, np.ndarray], side: Side = "upper") -> np.ndarray | None:
    """The band at every layer, [layer bound], of the null that decides there, from name -> [draw layer]: of that whose
    end on the claimed side lies farthest out. None where no null has a draw."""
    some = [each for each in draws.values() if len(each)]
    if not some:
        return None
    bands = zip(*([band(layer) for layer in each.T] for each in some), strict=True)
    return np.array([max(found, key=lambda ends: ends[1] if side == "upper" else -ends[0]) for found in bands])


def _needed(h: Estimate, claims: int) -> int:
    """Clusters at which the declared effect, where it is there, holds with 90 % power; 0 where no number does."""
    if not h.noise:
        return h.needed
    sides = 2 if h.equivalence and h.margin_low != NO_END else 1
    spread, draws = h.null_spread, h.draws
    if h.averaged and h.draws:  # the spread stands for the error of a mean, which falls with the number of draws
        spread *= math.sqrt((h.draws + 1) / (draws + 1))
    return power.needed(power.Setting(h.noise, spread, draws, h.noisy, claims, sides)) or 0
