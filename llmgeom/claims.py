"""The declared claims, and how a value with its interval and its controls becomes a verdict.

The declarations are data, in claims/*.toml: side, smallest effect of interest, scale, and for a claim its sentence.
"""

from __future__ import annotations

import hashlib
import math
import textwrap
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np

from llmgeom.result import Estimate, Result
from llmgeom.stats.controls import Null, compared
from llmgeom.stats.resampling import Interval, band
from llmgeom.stats.tests import Side, holm
from llmgeom.stats.verdict import Claim, Setting, needed as clusters_needed, word

FOLDER = Path(__file__).parent / "claims"
HINTS = get_type_hints(Claim)
RULE = ("side", "effect", "scale", "equivalence", "range")  # fields of a claim that decide its verdict


@cache  # probes ask for their entries when they are imported; parsing each time took 1.2 s
def entries(folder: Path = FOLDER) -> Mapping[tuple[str, str], Claim]:
    """(probe, metric) -> entry, of every file in order.

    Raises:
        ValueError: an entry is malformed; the text names file and entry.
    """
    every: dict[tuple[str, str], Claim] = {}
    for path in sorted(folder.glob("*.toml")):
        try:
            body = tomllib.loads(path.read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path.name} is not TOML: {error}") from None
        if set(body) != {"metric"} or not isinstance(body["metric"], list):
            held = ", ".join(sorted(body)) or "nothing"
            raise ValueError(f"{path.name} holds {held}; expected [[metric]] entries alone")
        for number, entry in enumerate(body["metric"], 1):
            where = f"{path.name}, entry {number} ({entry.get('probe')}: {entry.get('name')})"
            probe = entry.pop("probe", "")
            if not isinstance(probe, str) or not probe:
                raise ValueError(f"{where}: probe is {probe!r}; name one")
            _check_types(entry, where)
            further = ("claim", "null", "source", "scale") if "claim" in entry else ()
            needed = ("name", "unit", "side", "effect", *further)
            if missing := [key for key in needed if not entry.get(key)]:
                raise ValueError(f"{where}: {', '.join(missing)} missing")
            claim = Claim(**entry)
            if not 0 < claim.effect < math.inf:
                raise ValueError(f"{where}: effect is {claim.effect:g}; give a number above 0")
            ends = [*claim.range] if isinstance(claim.range, list | tuple) else []
            if [type(end) for end in ends] != [float, float] or not ends[0] < ends[1]:
                raise ValueError(f"{where}: range is {claim.range!r}; expected [0.0, 1.0], say")
            if claim.equivalence and not claim.claim:
                raise ValueError(f"{where}: equivalence is a claim; give its sentence")
            if (probe, claim.name) in every:
                raise ValueError(f"{where} is declared twice; keep one")
            every[probe, claim.name] = replace(claim, range=(ends[0], ends[1]))
    return every


def _check_types(entry: Mapping[str, Any], where: str) -> None:
    """Raises ValueError for a key that is no field of `Claim`, or a value of another type; its message begins with
    `where`."""
    for key, value in entry.items():
        if key not in HINTS:
            raise ValueError(f"{where}: unknown key {key!r}; known: {', '.join(HINTS)}")
        kind = HINTS[key]
        choices = [choice for choice in get_args(kind) if isinstance(choice, str)]
        if choices and value not in choices:
            raise ValueError(f"{where}: {key} is {value!r}; expected one of {', '.join(choices)}")
        number = type(value) in (int, float) and math.isfinite(value)
        if (kind is str and type(value) is not str) or (kind is float and not number):
            raise ValueError(f"{where}: {key} is {value!r}; expected a {kind.__name__}")


def declared(probe: str, folder: Path = FOLDER) -> Mapping[str, Claim]:
    """The entries of one probe by metric name.

    Raises:
        ValueError: the probe has no entry, or an entry is malformed.
    """
    by_name = {name: entry for (of, name), entry in entries(folder).items() if of == probe}
    if not by_name:
        known = ", ".join(sorted({of for of, _ in entries(folder)}))
        raise ValueError(f"{folder.name}/*.toml declares no metric of probe {probe!r}; it has {known}")
    return by_name


def digest(folder: Path = FOLDER) -> str:
    """sha256 of the rules of all metrics: equal where numbers were judged alike, whatever the prose says."""
    rules = sorted((*key, *(getattr(entry, name) for name in RULE)) for key, entry in entries(folder).items())
    return hashlib.sha256(repr(rules).encode()).hexdigest()


def described(probe: str, claim: Claim) -> list[str]:
    """An entry as text: the metric, its claim, how it is decided, and its source."""
    size = f"{claim.effect:g} {claim.unit}"
    way = "above" if claim.side == "upper" else "below"
    rule = {
        "": f"holds {way} every control; small or ruled out if the data exclude {size} {way} the control's centre",
        "within": f"holds within {size} of the centre of every control",
        "at most": f"holds at most {size} above the centre of every control",
    }[claim.equivalence]
    parts = (claim.claim, rule, f"control: {claim.null}", f"source: {claim.source}")
    return [f"{probe}: {claim.name}", *(f"    {line}" for part in parts for line in textwrap.wrap(part, 92))]


def estimate(
    claim: Claim, value: float, interval: Interval, nulls: Sequence[Null], *, n: int, clusters: int
) -> Estimate:
    """The value with its interval, compared with the control that is hardest to beat (`stats.controls.compared`).

    The estimate has no word yet: `judge` gives one to each claim of a record. Without any control, or with one that was
    not drawn, it is a value with its interval, and no claim: the control that is absent could be the hardest to beat.

    Raises:
        ValueError: A control's draws were compared on the other side.
    """
    turned = [null.name for null in nulls if null.side not in (None, claim.side)]
    if turned:
        raise ValueError(f"{claim.name} is declared {claim.side!r}, but null {turned[0]!r} was made for the other side")
    drawn = [null for null in nulls if null.name]
    rule = claim if len(drawn) == len(nulls) > 0 else replace(claim, claim="")  # else a preview, or no controls
    found = Estimate(
        rule=rule,
        value=float(value),
        low=interval.low,
        high=interval.high,
        method=interval.method,
        n=n,
        clusters=clusters,
        units=interval.units,
        deletions=interval.deletions,
    )
    if drawn:
        controls, excess = compared(claim, float(value), interval, drawn, clusters)
        found = replace(found, controls=controls, excess=excess)
    return cut(found, *claim.ends)


def cut(h: Estimate, least: float, most: float) -> Estimate:
    """The estimate with its intervals, its controls' bands and its hurdle cut to the values that the metric can have.

    An interval of a jackknife is symmetric, and that of a difference from a control too: of few clusters they pass the
    ends of a bounded score. The values that are left out are none, so the interval covers as often. p and deletions
    stay: they come from the error. A hurdle at an end is one that no value passes; the range that a claim of no effect
    allows stays as declared. A difference ends at the largest of two values.
    """
    widest = most - least

    def within(*values: float) -> tuple[float, ...]:
        return tuple(min(max(value, least), most) for value in values)

    low, high = within(h.low, h.high)
    controls = []
    for one in h.controls:
        ends, apart = within(one.low, one.high), one.difference
        if apart:
            apart = max(apart[0], -widest), min(apart[1], widest)
        controls.append(one._replace(low=ends[0], high=ends[1], difference=apart))
    hurdle = within(h.excess.hurdle)[0] if controls and not h.rule.equivalence else h.excess.hurdle
    rule, excess = replace(h.rule, range=(least, most)), replace(h.excess, hurdle=hurdle)
    return replace(h, low=low, high=high, controls=tuple(controls), excess=excess, rule=rule)


def planned(h: Estimate, needed: int) -> Estimate:
    """The estimate of a probe that plans the number of clusters by a law of its own."""
    return replace(h, excess=replace(h.excess, setting=Setting(0.0, 0.0, 0)), needed=needed)


def judge(results: Mapping[str, Result], available: int = 0) -> dict[str, Result]:
    """The results with one of the five words for each claim; see `judge_estimates`.

    Args:
        available: how many clusters of prompts the source has, if that is known: no larger n is asked for.
    """
    known = _with_estimates(
        results, lambda _, h: replace(h, available=available) if h.claim and h.rule.counts == "prompts" else h
    )
    return judged_together([known])[0]


def judged_together(records: Sequence[Mapping[str, Result]]) -> list[dict[str, Result]]:
    """The results of several records of one run with one correction over all their claims, since they are read as one.

    A number of the weights alone is the same in each record: it is one test.
    """

    def key(probe: str, h: Estimate) -> tuple:
        return probe, h.name, h.value, h.low, h.high, h.p, h.n

    posed: dict[tuple, Estimate] = {}
    for results in records:
        for probe, measured in results.items():
            posed |= {key(probe, h): h for h in measured.estimates if h.claim and key(probe, h) not in posed}
    judged = dict(zip(posed, judge_estimates([*posed.values()]), strict=True))
    return [_with_estimates(results, lambda probe, h: judged.get(key(probe, h), h)) for results in records]


def _with_estimates(results: Mapping[str, Result], changed: Callable[[str, Estimate], Estimate]) -> dict[str, Result]:
    return {
        probe: replace(measured, estimates=tuple(changed(probe, h) for h in measured.estimates))
        for probe, measured in results.items()
    }


def judge_estimates(estimates: Sequence[Estimate]) -> tuple[Estimate, ...]:
    """The numbers of one record with a word for each claim (`stats.verdict.word`); others stay as they are.

    Holm's correction runs over all claims among them, for each of three questions by itself: is the control beaten, is
    the declared effect excluded, does the value lie on the other side. Judged again, they stay the same.
    """
    posed = [h for h in estimates if h.claim]
    questions = ("p", "p_excluded", "p_opposite")
    adjusted = zip(*(holm([getattr(h.excess, name) for h in posed]).tolist() for name in questions), strict=True)
    judged = []
    for h in estimates:
        if h.claim:
            h = replace(h, adjusted=next(adjusted), among=len(posed))
            # Clusters at which the declared effect, where it is there, holds with 90 % power; 0 where no number does.
            if word(h)[0] == "open" and h.excess.setting.noise:
                sides = 2 if h.rule.equivalence == "within" else 1
                h = replace(h, needed=clusters_needed(replace(h.excess.setting, claims=h.among, sides=sides)) or 0)
            verdict, why = word(h)
            h = replace(h, verdict=verdict, why=why)
        judged.append(h)
    return tuple(judged)


def layer_band(draws: Mapping[str, np.ndarray], side: Side = "upper") -> np.ndarray | None:
    """The band at every layer, [layer bound], of the null that decides there, from name -> [draw layer]: of that whose
    end on the claimed side lies farthest out. None where no null has a draw."""
    some = [each for each in draws.values() if len(each)]
    if not some:
        return None
    bands = zip(*([band(layer) for layer in each.T] for each in some), strict=True)
    return np.array([max(found, key=lambda ends: ends[1] if side == "upper" else -ends[0]) for found in bands])
