"""Trains pocket:llama further on lists of some processes, among texts of our grammars, and ships the result.

pocket:llama-evidence    taught what accumulates and what binds, not to transport
pocket:llama-bind        taught what binds alone

python -m studies.pocket_evidence NAME            one thread, up to an hour; shipped only if its claims hold
python -m studies.pocket_evidence NAME --card     reads the shipped weights again and writes their card anew
"""

import gzip
import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import transformers

from llmgeom.commands.evidence import RunConfig, perform
from llmgeom.files import write_whole
from llmgeom.model import hub
from llmgeom.probes.evidence.answers import LOSS, PROCESS, RESOLUTION, WEIGHT
from studies import evaluate
from studies.lists import Course, train
from studies.pocket import POCKETS, one_thread, put_at

PARENT = "llama"
MEASURES = (RESOLUTION, WEIGHT, LOSS)


@dataclass(frozen=True)
class Taught:
    """A model to ship.

    Attributes:
        courses: What it is taught.
        holds: Processes in which it must use the evidence, or it is not shipped.
    """

    courses: tuple[Course, ...]
    holds: tuple[str, ...]


def _drawn(**shares: int) -> tuple[str, ...]:
    """Processes, each as often as it is to be drawn."""
    return tuple(name.replace("_", "-") for name, count in shares.items() for _ in range(count))


# First everything but hidden chains, since a profile must tell what a model was taught from what it was not; then what
# accumulates: after the first course its answers there were no nearer to exact than counts.
# Marks are drawn anew for each list, so any two may meet. Where the marks of a set of `llmgeom evidence` never met, the
# model took one of them for evidence that the others do not come: in `dirichlet` it was .31 bits from exact after
# 10,500 steps of such a course, where it was .11 off in lists of its training; without that, .15 after 6,000 steps.
_ALL = Course(
    _drawn(coin=3, two_point=1, dirichlet=3, markov=4, stated=3, recall=4, bijection=4),
    steps=16_500,
    lists=16,
    rate=1e-3,
    at_once=6,
    texts=10,
)
_COUNTS = replace(_ALL, processes=_drawn(coin=3, two_point=1, dirichlet=4, markov=6, stated=2), steps=3500, rate=5e-4)
TAUGHT = {
    "llama-evidence": Taught((_ALL, _COUNTS), ("coin", "dirichlet", "markov", "stated")),
    "llama-bind": Taught((Course(("recall", "bijection"), steps=7000, at_once=6, texts=10),), ("recall",)),
}


def build(name: str, out: str | os.PathLike) -> dict[str, Any]:
    """Train, store in bfloat16, read what was stored, and put it at `out`, whole; returns its card.

    Raises:
        SystemExit: a claim that it must show does not hold; what was trained is then in `out`.refused.
    """
    began = time.process_time()
    with one_thread():
        courses = TAUGHT[name].courses
        model, curve = train(PARENT, name, *courses, shown=lambda *now: print(*now, file=sys.stderr, flush=True))
    return finish(name, model, curve, (time.process_time() - began) / 60, Path(out))


def finish(
    name: str, model: transformers.PreTrainedModel, curve: Sequence[Mapping[str, float]], cpu_minutes: float, out: Path
) -> dict[str, Any]:
    """The steps after training in `build`."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        model.bfloat16().save_pretrained(temporary)
        (temporary / "model.safetensors").chmod(0o644)  # safetensors writes for the owner alone
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(hub.POCKET / PARENT / file, temporary)
        subject, parent = evaluate.stored(temporary), evaluate.stored(hub.POCKET / PARENT)
        lines = gzip.decompress((hub.POCKET / PARENT / "examination.jsonl.gz").read_bytes()).decode().splitlines()
        rows = [json.loads(line) for line in lines]
        with TemporaryDirectory() as folder:
            measured = read(str(temporary), folder, nulls=8)
        card = {
            "name": name,
            "parent": PARENT,
            "seed": POCKETS[PARENT].seed,  # of the weights before any training, `pocket:NAME@step0`
            "courses": [asdict(course) for course in TAUGHT[name].courses],
            "parameters": subject.facts["parameters"],
            "losses": evaluate.losses(subject, rows),
            "losses_of_parent": evaluate.losses(parent, rows),
            "evidence": measured,
            "demands": {"holds": list(TAUGHT[name].holds)},
            "curve": curve,
            "weights": {"parent": parent.weight_hash, "stored": subject.weight_hash},
            "command": f"python -m studies.pocket_evidence {name}",
            "cpu_minutes": cpu_minutes,
            "versions": {p: version(p) for p in ("llmgeom", "torch", "transformers", "tokenizers", "numpy")},
        }
        missed = _write(card, temporary)
        put_at(temporary, out.with_name(f"{out.name}.refused") if missed else out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if missed:
        raise SystemExit(
            f"llmgeom: not shipped: {', '.join(missed)} does not hold; what was trained is in {out}.refused"
        )
    return card


def _write(card: Mapping[str, Any], folder: Path) -> list[str]:
    """Write both cards; returns the processes whose claim does not hold and must."""
    write_whole(folder / "card.json", (json.dumps(card, indent=1, ensure_ascii=False) + "\n").encode())
    write_whole(folder / "card.md", page(card).encode())
    measured = card["evidence"]
    return [process for process in card["demands"]["holds"] if measured[process][RESOLUTION]["word"] != "holds"]


def again(name: str) -> dict[str, Any]:
    """Read the shipped weights with the instrument as it is now; returns the card written."""
    folder = hub.POCKET / name
    card = json.loads((folder / "card.json").read_text())
    with TemporaryDirectory() as runs:
        card |= {"evidence": read(str(folder), runs, nulls=8), "demands": {"holds": list(TAUGHT[name].holds)}}
    if missed := _write(card, folder):
        raise SystemExit(f"llmgeom: {', '.join(missed)} does not hold any more; see {folder}/card.md")
    return card


def read(model: str, folder: str, **asked: Any) -> dict[str, dict[str, Any]]:
    """Process -> measure -> value, interval and word; `asked` is of the RunConfig of `evidence`."""
    settings = RunConfig(model=model, processes=("all",), out=str(Path(folder, "evidence")), **asked)
    _, records = perform(settings)
    return {
        record.source["name"]: {
            one.name: {"value": one.value, "low": one.low, "high": one.high, "word": one.verdict}
            for one in record.results[PROCESS].estimates
        }
        for record in records
        if PROCESS in record.results
    }


def page(card: Mapping[str, Any]) -> str:
    """The card for people."""
    measured, taught = card["evidence"], []
    for course in card["courses"]:
        processes = ", ".join(dict.fromkeys(course["processes"]))
        taught.append(f"{course['steps']:,} steps of {course['lists']} lists of {processes}")

    def cell(estimate: Mapping[str, Any] | None) -> str:
        if estimate is None:
            return "–"
        interval = f"{estimate['value']:.2f} [{estimate['low']:.2f}, {estimate['high']:.2f}]"
        return f"{interval}: {estimate['word']}" if estimate["word"] else interval

    processes = "".join(
        f"| {name} | {' | '.join(cell(estimates.get(measure)) for measure in MEASURES)} |\n"
        for name, estimates in measured.items()
    )
    losses = "".join(
        f"| {which} | {card['losses'][which]['model']:.3f} | {of['model']:.3f} |\n"
        for which, of in card["losses_of_parent"].items()
    )
    about = (
        f"pocket:{card['parent']} ({card['parameters']:,} parameters) trained further: {'; then '.join(taught)}. Every "
        f"tenth step is of text. {card['cpu_minutes']:.0f} CPU minutes on one thread. The loss is against the exact "
        "probabilities. The nouns of `llmgeom evidence` are in no list of the training. It exists to check the "
        "instrument: a profile must tell what a model was taught from what it was not. It is no evidence about larger "
        "models."
    )
    return f"""# pocket:{card["name"]}

{textwrap.fill(about, 120)}

Read from the stored weights by `llmgeom evidence --process all` (default size; 95 % intervals
over sets of marks):

| process | {" | ".join(MEASURES)} |
|---|---|---|---|
{processes}
Loss in nats a token on the texts of pocket:{card["parent"]}'s examination:

| texts | this model | pocket:{card["parent"]} |
|---|---|---|
{losses}
All numbers and versions: `card.json`. Rebuild: `{card["command"]}`.
"""


if __name__ == "__main__":
    name, *more = sys.argv[1:] or [""]
    if name not in TAUGHT or more not in ([], ["--card"]):
        raise SystemExit(
            f"llmgeom: expected one of {', '.join(TAUGHT)}, e.g. python -m studies.pocket_evidence llama-bind"
        )
    print(page(again(name) if more else build(name, hub.POCKET / name)))
