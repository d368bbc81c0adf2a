"""Whether two records answer one question about the same prompts: the first thing that differs, in words."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from llmgeom.errors import UserError
from llmgeom.record import Record

LABEL_FACTS = ("target", "answers", "given", "estimator", "positions")  # flags of `llmgeom probe`


def check(reference: str, first: Record, label: str, other: Record, placed: bool) -> None:
    """Raise UserError for the first thing in which two records of one question differ; placed: both are folders."""

    def fact(name: str) -> Callable[[Record], Any]:
        return lambda record: record.facts.get(name)

    again = _again(first, other, reference if placed else f"RUN (the folder of {reference})")
    for read, describe, remedy in (
        (lambda r: digest(r.prompts["text"]), _other_texts, again),
        (lambda r: digest(r.prompts["template"]), _other_clusters, again),
        (fact("claims_hash"), _other_claims, "run both in one version of llmgeom"),
        (fact("nulls"), _other_fact("nulls", "it has", " draws of each control"), again),
        (fact("seed"), _other_fact("seed", "its seed is"), again),
        *((fact(name), _other_fact(name), _same_flag(name, first, other)) for name in LABEL_FACTS),
        (fact("weight"), _other_fact("weight"), "run both with the same --weight"),
        (_label_hash, _other_labels, "run both with the labels of one file"),
    ):
        if read(first) != read(other):
            verbs = [_verb(r) for r in (other, first)]
            if all(verbs) and verbs[0] != verbs[1]:
                kinds = f"it is a run of `llmgeom {verbs[0]}`, not of `llmgeom {verbs[1]}`, and "
                remedy = "differences need two runs of one command on the same prompts"
            else:
                kinds = ""
            raise UserError(f"{label} cannot be compared with {reference}: {kinds}{describe(first, other)}; {remedy}")
    ours, theirs = first.subject, other.subject
    another_name = ours["name"] == theirs["name"] and ours.get("revision") != theirs.get("revision")
    if another_name and ours.get("weights") and ours["weights"] == theirs.get("weights"):
        raise UserError(
            f"{reference} and {label} hold the same weights (sha256 {ours['weights'][:12]}): one of the two revisions "
            "is not what its name says; give another one"
        )


def _verb(record: Record) -> str:
    """The command that made a record; "" where Python did."""
    return str(record.facts.get("command", "")).removeprefix("llmgeom ").partition(" ")[0]


def _again(first: Record, other: Record, folder: str) -> str:
    """How the other run is made on the prompts of the first, with as many controls and the same seed."""
    flags = "".join(
        f" --{name} {first.facts[name]}"
        for name in ("nulls", "seed")
        if name in first.facts and first.facts[name] != other.facts.get(name)
    )
    kind, verb = first.source.get("kind"), _verb(other)
    if kind in ("task", "process"):
        return f"run both with the same --{kind}" + (f" and{flags}" if flags else "")
    if verb in ("scan", ""):
        return f"scan it again with --prompts-from {folder}{flags}"
    return f"run `llmgeom {verb}` again with --prompts {folder}/prompts.jsonl{flags}"


def _other_texts(first: Record, other: Record) -> str:
    ours, theirs = first.prompts["text"], other.prompts["text"]
    if sorted(ours) == sorted(theirs):
        return "it holds the same prompts in another order"
    of = [f"{len(r.prompts['text'])} of {r.source.get('name', 'its own')}" for r in (other, first)]
    return f"it holds other prompts ({of[0]}, not {of[1]}; {len({*ours} & {*theirs})} texts are in both)"


def _other_clusters(first: Record, other: Record) -> str:
    ours, theirs = (len(set(r.prompts["template"])) for r in (first, other))
    counts = f"{theirs} clusters, not {ours}" if ours != theirs else f"{ours} clusters in both, but other ones"
    return f"it groups the prompts differently ({counts})"


def _other_claims(first: Record, other: Record) -> str:
    ours, theirs = (r.facts.get("llmgeom") for r in (first, other))
    versions = f" (llmgeom {theirs}, not {ours})" if ours != theirs else ""
    return f"it was judged by another list of claims{versions}"


def _other_labels(first: Record, other: Record) -> str:
    name = str(first.facts.get("target") or first.facts.get("answers"))
    pairs = zip(first.prompts.get(name, ()), other.prompts.get(name, ()), strict=False)
    return f"{sum(str(a) != str(b) for a, b in pairs)} prompts have another value of the label {name}"


def _other_fact(name: str, opening: str = "", unit: str = "") -> Callable[[Record, Record], str]:
    def describe(first: Record, other: Record) -> str:
        ours, theirs = ("none" if (x := r.facts.get(name)) is None else x for r in (first, other))
        return f"{opening or f'its --{name} is'} {theirs}{unit}, not {ours}"

    return describe


def _same_flag(name: str, first: Record, other: Record) -> str:
    ours, theirs = (r.facts.get(name) for r in (first, other))
    return f"run both with --{name} {theirs if ours is None else ours}"


def _label_hash(record: Record) -> str:
    name = record.facts.get("target") or record.facts.get("answers")
    return digest(tuple(map(str, record.prompts.get(name, ())))) if name else ""


def digest(column: Sequence[str]) -> str:
    """SHA-256 of a column of text."""
    return hashlib.sha256(json.dumps(list(column)).encode()).hexdigest()
