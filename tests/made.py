"""Estimates by hand: from flat names of what a reader knows of a number."""

from dataclasses import fields, replace

from llmgeom.result import Estimate
from llmgeom.stats.controls import Control, Excess
from llmgeom.stats.verdict import Claim, Setting

OF = {name: {f.name for f in fields(cls)} for name, cls in (("rule", Claim), ("setting", Setting), ("h", Estimate))}
OF["rule"] -= {"null"}
OF["excess"] = {f.name for f in fields(Excess)} - {"setting"}
OF["control"] = {"null", "draws_of", "centre", "null_low", "null_high", "difference", "p"}


def made(name: str, value: float, **flat) -> Estimate:
    """An estimate with one control, `null`, if that is named; p is both of the control and of the excess over it."""
    rule = Claim(**{"name": name, "unit": "fraction", "side": "upper", "effect": 0.1} | _of("rule", flat))
    given = {"low": value - 0.1, "high": value + 0.1, "method": "jackknife", "n": 75, "clusters": 70} | _of("h", flat)
    return changed(Estimate(rule, value, **given), **{k: v for k, v in flat.items() if k not in OF["h"] | OF["rule"]})


def changed(h: Estimate, **flat) -> Estimate:
    """The estimate with these changes, by flat names."""
    unknown = flat.keys() - set().union(*OF.values())
    assert not unknown, unknown
    excess, control = _of("excess", flat), _of("control", flat)
    setting = replace(h.excess.setting, **_of("setting", flat))
    controls = h.controls
    if control.keys() - {"p"} or (control and controls):
        first = controls[0] if controls else Control("", 0, 0.0, 0.0, 0.0)
        names = {"null": "name", "draws_of": "draws", "null_low": "low", "null_high": "high"}
        first = first._replace(**{names.get(key, key): value for key, value in control.items()})
        controls = (first, *controls[1:]) if first.name else ()
    rule, excess = replace(h.rule, **_of("rule", flat)), replace(h.excess, setting=setting, **excess)
    return replace(h, **{"rule": rule, "excess": excess, "controls": controls} | _of("h", flat))


def _of(part: str, flat: dict) -> dict:
    return {key: value for key, value in flat.items() if key in OF[part]}
