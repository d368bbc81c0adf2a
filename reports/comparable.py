"""Whether two records answer one question about the same prompts, and what else than the model differs."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from llmgeom.errors import UserError
from llmgeom.record import Record

LABEL_FACTS = ("target", "answers", "given", "estimator", "positions")  # flags of `llmgeom probe`
# Flags that say which model is read, where, on which prompts and what of it is measured: a difference in these is the
# question, or it is refused or left out elsewhere. All others change what a number is.
NO_SETTING = {
    "--model", "--revision", "--device", "--device-map", "--offline", "--trust-remote-code", "--batch-tokens", "--also",
    "--domain", "--prompts", "--prompts-from", "--task", "--process", "--n", "--limit", "--labels",
    "--cluster", "--probes", "--axis", "--seed", "--nulls", "--controls",
}  # fmt: skip
OF_TRAINING = ("horizon", "corrupt")  # facts of `llmgeom grade`: which queries are scored, and against which targets


def check(reference: str, first: Record, label: str, other: Record, placed: bool) -> None:
    """Raise UserError for the first thing in which two records of one question differ; placed: both are folders."""
    for name, record in ((reference, first), (label, other)):
        if not record.prompts:  # a training that was followed, a search that found nothing
            raise UserError(f"{name} keeps no prompts, so that nothing can be paired; each run has a page of its own")
    again = _again(first, other, reference if placed else f"RUN (the folder of {reference})")
    for difference, remedy in _differences(first, other, again):
        verbs = [_verb(r) for r in (other, first)]
        if all(verbs) and verbs[0] != verbs[1]:
            difference = f"it is a run of `llmgeom {verbs[0]}`, not of `llmgeom {verbs[1]}`, and {difference}"
            remedy = "differences need two runs of one command on the same prompts"
        raise UserError(f"{label} cannot be compared with {reference}: {difference}; {remedy}")
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
    """How the other run is made on the prompts of the first, with the same seed."""
    verb = _verb(other)
    ours, theirs = (record.facts.get("seed") for record in (first, other))
    flags = f" --seed {ours}" if ours is not None and ours != theirs else ""
    kind = first.source.get("kind")
    if kind in ("task", "process"):
        return f"run both with the same --{kind}" + (f" and{flags}" if flags else "")
    if verb == "ablate":  # its record holds the half of its prompts that was edited, so they do not make it again
        same = first.prompts["text"] == other.prompts["text"]
        return f"run it again with{flags}" if same and flags else f"run both with the same file of --prompts{flags}"
    if verb in ("scan", ""):
        return f"scan it again with --prompts-from {folder}{flags}"
    return f"run `llmgeom {verb}` again with --prompts {folder}/prompts.jsonl{flags}"


def _differences(first: Record, other: Record, again: str) -> Iterator[tuple[str, str]]:
    """The differences of two records, the most informative first, and how to run both alike."""
    for difference in _of_prompts(first, other):
        yield difference, again

    def differ(name: str) -> bool:
        return first.facts.get(name) != other.facts.get(name)

    def stated(name: str, opening: str) -> str:
        ours, theirs = ("none" if fact is None else fact for fact in (first.facts.get(name), other.facts.get(name)))
        return f"{opening} {theirs}, not {ours}"

    if differ("claims_hash"):
        versions = f" ({stated('llmgeom', 'llmgeom')})" if differ("llmgeom") else ""
        yield f"it was judged by another list of claims{versions}", "run both in one version of llmgeom"
    for name in filter(differ, LABEL_FACTS):
        ours, theirs = first.facts.get(name), other.facts.get(name)
        yield stated(name, f"its --{name} is"), f"run both with --{name} {theirs if ours is None else ours}"
    if differ("seed"):
        yield stated("seed", "its seed is"), again
    if label := first.facts.get("target") or first.facts.get("answers"):
        values = [[str(cell) for cell in record.prompts.get(str(label), ())] for record in (first, other)]
        if values[0] != values[1]:
            count = sum(a != b for a, b in zip(*values, strict=False))
            yield f"{count} prompts have another value of the label {label}", "run both with the labels of one file"


def _of_prompts(first: Record, other: Record) -> Iterator[str]:
    """How the prompts of two records differ, and their clusters."""
    (texts, other_texts), (clusters, other_clusters) = (
        [tuple(record.prompts[column]) for record in (first, other)] for column in ("text", "template")
    )
    if texts != other_texts and sorted(texts) == sorted(other_texts):
        yield "it holds the same prompts in another order"
    elif texts != other_texts:
        ours, theirs = (record.source.get("name", "its own") for record in (first, other))
        shared = len({*texts} & {*other_texts})
        counts = f"{len(other_texts)} of {theirs}, not {len(texts)} of {ours}; {shared} texts are in both"
        yield f"it holds other prompts ({counts})"
    if clusters != other_clusters:
        ours, theirs = len(set(clusters)), len(set(other_clusters))
        counts = f"{theirs} clusters, not {ours}" if ours != theirs else f"{ours} clusters in both, but other ones"
        yield f"it groups the prompts differently ({counts})"


def settings(reference: str, first: Record, label: str, other: Record) -> Iterator[str]:
    """A caution if two runs had different options, e.g. two edits: then not only the model differs."""
    ours, theirs = map(_flags, (first, other))
    alone = [[flag for flag in mine if flag not in its] for mine, its in ((theirs, ours), (ours, theirs))]
    if any(alone):
        said = [f"{name}: {' '.join(some) or 'defaults'}" for name, some in zip((label, reference), alone, strict=True)]
        yield f"the runs have different settings ({'; '.join(said)}), and each difference may come from these"


def _flags(record: Record) -> list[str]:
    """Options that change the meaning of a number: flags of the record's command; how a graded model was trained."""
    return [*_of_command(record), *(f"{name} {record.facts[name]}" for name in OF_TRAINING if name in record.facts)]


def _of_command(record: Record) -> list[str]:
    try:
        words = shlex.split(str(record.facts.get("command", "")))
    except ValueError:  # no command that llmgeom wrote
        return []
    flags: list[str] = []
    for word in words:
        if word.startswith("--"):
            flags.append(word)
        elif flags:
            flags[-1] += f" {word}"
    return [flag for flag in flags if flag.split()[0] not in NO_SETTING]
