"""Flags of a command, declared once as the fields of a frozen dataclass; and specs, which fill such fields."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from llmgeom.errors import UserError

LARGEST_COUNT = 10**6
LARGEST_SEED = 2**31 - 1
LARGEST = 2**31  # a number in a spec


def flag(
    default: Any,
    help: str,
    *,
    name: str = "",
    short: str = "",
    group: str = "",
    listed: bool = False,
    least: float | None = None,
    most: float = LARGEST_COUNT,
) -> Any:
    """A dataclass field that is also a flag; its type hint decides its kind.

    `bool` is a switch, `Literal[...]` a choice, `tuple[X, ...]` a flag that may be repeated.

    Args:
        default: The default of the field and the flag.
        help: One line for `--help`.
        name: The flag, if it differs from the field's name, e.g. `--domain` for `domains`.
        short: One letter, e.g. `-q`; an `int` field such as `-v` counts its repetitions.
        group: The heading of the flag in `--help`.
        listed: A tuple is one value separated by commas, instead of a repeated flag.
        least: The smallest number allowed; then `most` is the largest.
    """
    about = {"name": name, "short": short, "group": group, "listed": listed}
    return field(default=default, metadata={"help": help, **about, "least": least, "most": most})


# A flag under each heading of a command's help.
model_flag, prompt_flag, axis_flag, component_flag, measure_flag, control_flag, output_flag = (
    partial(flag, group=heading)
    for heading in ("Model", "Prompts", "Axis", "Heads and blocks", "Measure", "Controls", "Output")
)


def argument(default: Any = MISSING, *, metavar: str | None = None, kw_only: bool = False) -> Any:
    """A dataclass field that is a positional argument; a tuple takes all of them.

    With `kw_only` a required argument may follow inherited fields that have defaults.
    """
    metadata = {"help": "", "argument": True, "metavar": metavar}
    return field(default=default, kw_only=kw_only, metadata=metadata)


@dataclass(frozen=True)
class Flag:
    """A flag, from a field's declaration, type hint and default."""

    field: str
    name: str  # e.g. --domain; of an argument the field's name
    kind: type  # of one value
    choices: tuple[str, ...]
    several: bool
    default: Any  # MISSING if required
    help: str
    short: str = ""
    metavar: str | None = None
    group: str = ""
    argument: bool = False
    listed: bool = False
    least: float | None = None
    most: float = LARGEST_COUNT


def flags(config: type) -> tuple[Flag, ...]:
    """The flags of a configuration, in the order of its fields."""
    key: Any = config  # a dataclass type is hashable, but mypy checks its instances
    return _flags(key)


@cache
def _flags(config: Any) -> tuple[Flag, ...]:
    hints, found = get_type_hints(config), []
    for declared in fields(config):
        if "help" not in declared.metadata:
            continue
        hint = hints[declared.name]
        if get_origin(hint) in (Union, UnionType):
            (hint,) = (kind for kind in get_args(hint) if kind is not NoneType)
        several = get_origin(hint) is tuple
        item = get_args(hint)[0] if several else hint
        choices = get_args(item) if get_origin(item) is Literal else ()
        about: dict[str, Any] = dict(declared.metadata)
        given_name = about.pop("name", "")
        name = declared.name if about.get("argument") else given_name or "--" + declared.name.replace("_", "-")
        kind = str if choices else item
        found.append(Flag(declared.name, name, kind, choices, several, declared.default, **about))
    return tuple(found)


def check(config: Any) -> None:
    """Raises UserError for a value that is not one of its flag's choices, or out of its flag's range."""
    for option in flags(type(config)):
        value = getattr(config, option.field)
        if value is None or value == option.default:
            continue
        if option.several and not isinstance(value, tuple | list):
            raise UserError(f"{option.name} {value!r}: expected several values, as a tuple or a list")
        for item in value if option.several else (value,):
            if option.kind is str and not isinstance(item, str):
                expected = " or ".join(option.choices) or "a text (str)"
                raise UserError(f"{option.name} {item!r}: expected {expected}")
            wanted = {int: int, float: int | float}.get(option.kind)  # what a record can hold as JSON
            if wanted and (isinstance(item, bool) or not isinstance(item, wanted)):
                expected = "a whole number (int)" if option.kind is int else "a number (float)"
                raise UserError(f"{option.name} {item!r}: expected {expected}")
            if option.choices and item not in option.choices:
                raise UserError(f"{option.name} {item}: expected {' or '.join(option.choices)}")
            number: Any = item  # a flag with a range is one of numbers
            if option.least is not None and not option.least <= number <= option.most:
                bound = f"least {option.least:g}" if not number >= option.least else f"most {option.most:g}"
                raise UserError(f"{option.name} {item}: expected at {bound}")


def places(name: str, text: Any, n: int, strict: bool = True, also: str = "", after: int = 0) -> tuple[int, ...]:
    """The places among 0 .. n - 1 that a text names, ascending: "all", or numbers and slices separated by commas.

    Args:
        name: Name of the flag, for errors.
        text: E.g. "0,5,-1" or "0:12:2,-1"; negative numbers count from the end. Or a Python number, slice or sequence
            of numbers, or None for all.
        n: Number of places.
        strict: Refuse a number that is not a place, and a text that names none.
        also: Other words that the flag accepts; the caller handles them.
        after: Further places after the n, which only their own numbers name.

    Raises:
        UserError: The text is not such a list, or names a place that does not exist.
    """
    text = "all" if text is None else places_text(text)
    if text == "all":
        return tuple(range(n))
    chosen: set[int] = set()
    for part in text.replace(" ", "").split(","):
        if not re.fullmatch(r"-?\d+|(-?\d+)?:(-?\d+)?(:-?[1-9]\d*)?", part):
            known = f"{also}, all" if also else "all"
            raise UserError(
                f"{name} {text}: expected {known}, or numbers and slices with commas between, e.g. 0:12:2,-1"
            )
        if ":" in part:
            chosen |= {*range(n)[slice(*(int(end) if end else None for end in part.split(":")))]}
        elif -n <= (place := int(part)) < n + after:
            chosen.add(place + n * (place < 0))
        elif strict:
            raise UserError(f"{name} {part}: expected 0 to {n - 1 + after}, or -{n} to -1 from the end")
    if strict and not chosen:
        raise UserError(f"{name} {text} names none of 0 to {n - 1 + after}; leave it out for all")
    return tuple(sorted(chosen))


def positions(text: str, n: int) -> tuple[int, ...]:
    """The positions of a prompt of n tokens that --positions names: "last", or as `places`; none if there are none."""
    return (n - 1,) if text == "last" else places("--positions", text, n, strict=False, also="last")


def places_text(value: Any) -> str:
    """A Python number, slice or sequence of numbers as the text that `places` reads."""
    if isinstance(value, slice):
        ends = [value.start, value.stop, *([] if value.step is None else [value.step])]
        return ":".join("" if end is None else str(end) for end in ends)
    return value if isinstance(value, str) else ",".join(map(str, [value] if isinstance(value, int) else value))


def plain(value: Any) -> Any:
    """A Python value as the value of a flag: a torch.dtype by its name, a path as text, a NumPy number as Python's."""
    kind = type(value)
    if kind.__module__ == "numpy" and hasattr(value, "item") and not getattr(value, "shape", None):
        return value.item()
    if (kind.__module__, kind.__name__) == ("torch", "dtype"):  # compared by name, since a help loads no torch
        return str(value).removeprefix("torch.")
    return os.fspath(value) if isinstance(value, os.PathLike) else value


# ---- specs of worlds: NAME:field=value,field=value -----------------------------------------------------


def read_fields(kind: type, spelt: str, text: str) -> dict[str, Any]:
    """The field=value pairs of a spec, separated by commas; a value may contain commas.

    Args:
        kind: The dataclass, whose fields are int, float, bool or str.
        spelt: Its name, for errors.
        text: The text after the name.

    Raises:
        UserError: A field does not exist or has no value, or a value does not fit its field.
    """
    hints, known = get_type_hints(kind), {f.name: f for f in fields(kind)}
    values: dict[str, Any] = {}
    for part in re.split(r",(?=\w+=)", text) if text else ():
        key, equals, value = part.partition("=")
        if not equals or key not in known:
            usual = {
                name: "no default" if f.default is MISSING else f"default {f.default}" for name, f in known.items()
            }
            each = (f"{name} ({hints[name].__name__}, {said})" for name, said in usual.items())
            raise UserError(f"{spelt}: no field {part!r}; it has {', '.join(each)}")
        try:
            truth = {"true": True, "false": False}
            values[key] = truth[value.lower()] if hints[key] is bool else hints[key](value)
            if hints[key] in (int, float) and not abs(values[key]) < LARGEST:
                raise ValueError
        except (ValueError, KeyError):
            below = f" below {LARGEST:,}" if hints[key] in (int, float) else ""
            raise UserError(f"{spelt}: {key}={value!r}; expected {hints[key].__name__}{below}") from None
    if missing := [f.name for f in known.values() if f.default is MISSING and f.name not in values]:
        raise UserError(f"{spelt}: no value for {', '.join(missing)}; give {spelt}:{missing[0]}=...")
    return values


def changed_fields(value: Any, name: str, defaults: Mapping[str, Any] = {}) -> str:
    """NAME:field=value,... with the fields of a dataclass that differ from `defaults`, or else from their own."""
    each = {f.name: getattr(value, f.name) for f in fields(value)}
    usual = {f.name: f.default for f in fields(value)} | {**defaults}
    changed = [f"{name}={given}" for name, given in each.items() if given != usual[name]]
    return f"{name}:{','.join(changed)}" if changed else name
