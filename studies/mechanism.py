"""Five trainings of each of five tunnels, read by every instrument of docs/findings.md.

    python -m studies.mechanism [FOLDER]     a training of each core at a time; a stopped run continues

Prints the table of docs/findings.md and stores it, with every value, in studies/mechanism.json. A cell is the median
over the trainings, the least and the largest of them, and of a claim how often each word was given.
"""

import json
import os
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import llmgeom
from llmgeom import claims
from llmgeom.commands import ablate, grade, patch
from llmgeom.dynamics.processes import spread
from llmgeom.errors import UserError
from llmgeom.record import Record
from llmgeom.wind_tunnels.training import train
from llmgeom.wind_tunnels.training_config import Training
from studies.trainings import computed

STORED = Path(__file__).with_suffix(".json")
SEEDS = 5
TUNNELS = {
    "bijection": Training("bijection", arch="gpt2", width=32, layers=1, steps=1500, lr="1e-2"),
    "replacement": Training("bijection:replacement=true,pairs=12", steps=800, lr="3e-3"),
    "recall": Training("recall", arch="gpt2", steps=500, lr="3e-3"),
    "hmm": Training("hmm", arch="gpt2", layers=3, steps=3000, lr="3e-3", targets="soft"),
    "hmm-lstm": Training("hmm", arch="lstm", steps=2000, lr="5e-3", targets="soft"),
}
SCAN = ("attention_focus", "belief_clusters", "belief_readout", "qk_alignment")
LONGER = {"hmm": "hmm:steps=24"}  # sequences of twice the length that a loss was on
SAME = ", same places in every sequence"  # what the number is called where position alone tells; it has no word then
Value = dict[str, Any]  # value, word; or why it was not measured

# Row of the table -> the command that reads it, the probe and the metric.
ROWS: dict[str, tuple[str, str, str]] = {
    "[KL to the posterior](tunnels.md), bits": ("grade", "posterior", "KL to the posterior"),
    "the FFN applies Bayes' rule: its share of the fall in KL of a [linear read-out](scan.md#belief_readout) > .5": (
        "scan",
        "belief_readout",
        "MLPs' share of the fall",
    ),
    "the FFN performs the update: its share of the [ablation effects](interventions.md) > .5": (
        "blocks",
        "blocks_mean",
        "MLPs' share of the effects",
    ),
    "evidence accumulates: fall of the [read-out](scan.md#belief_readout) outside the largest step > .5": (
        "scan",
        "belief_readout",
        "fall outside the largest step",
    ),
    "keys are matched: [attention on positions that bear on the answer](scan.md#qk_alignment), less even attention": (
        "scan",
        "qk_alignment",
        "attention on bearing positions, last layer",
    ),
    "elimination is progressive: the same, last layer less first": (
        "scan",
        "qk_alignment",
        "attention on bearing positions, last less first",
    ),
    "[attention focuses](scan.md#attention_focus) with depth > .3": ("scan", "attention_focus", "focusing"),
    "final states cluster by belief: [silhouette beyond the read-out](scan.md#belief_clusters)": (
        "scan",
        "belief_clusters",
        "silhouette beyond the read-out",
    ),
    "[past the horizon](scan.md#length_generalisation): error ratio < 2": (
        "horizon",
        "length_generalisation",
        "first query past the horizon, over those within",
    ),
    "a frame holds the evidence: [bits moved by patching it](interventions.md)": (
        "patch",
        "interchange",
        "frame at the embedding",
    ),
    "one [head](interventions.md) holds it: second over largest < .5": (
        "heads",
        "heads_zero",
        "second head over the largest",
    ),
    "each [middle block](interventions.md) is needed: error > 10-fold without it": (
        "blocks",
        "blocks_zero",
        "error without the weakest middle block",
    ),
}


def commands(model: str, training: Training) -> dict[str, Callable[[], Record]]:
    """The measurements of a trained model by name."""

    def record_of(command: Any, name: str, **options: Any) -> Record:
        settings = command.RunConfig(model=model, seed=training.seed, out=f"{model}-{name}", **options)
        return command.prepare(settings).perform()[1]

    runs: dict[str, Callable[[], Record]] = {
        "grade": lambda: record_of(grade, "grade"),
        "scan": lambda: llmgeom.scan(model, seed=training.seed, probes=SCAN),
        "blocks": lambda: record_of(ablate, "blocks", what="blocks"),
        "heads": lambda: record_of(ablate, "heads", what="heads"),
        "patch": lambda: record_of(patch, "patch"),
    }
    if longer := LONGER.get(training.task):
        runs["horizon"] = lambda: llmgeom.scan(
            model, seed=training.seed, probes=("length_generalisation",), tasks=longer
        )
    return runs


def read(folder: str, training: Training) -> dict[str, dict[str, Value]]:
    """command -> "probe: metric" -> its value and word, and under "" why something was not measured."""
    os.environ["LLMGEOM_CACHE"] = f"{folder}/cache"
    model = f"{folder}/model"
    train(training, model, device="cpu")
    found: dict[str, dict[str, Value]] = {}
    for name, run in commands(model, training).items():
        spec = {**asdict(training), "command": name, "claims": claims.digest()}
        found[name] = computed(Path(folder, f"{name}.json"), spec, lambda run=run: _values(run))
    return found


def _values(run: Callable[[], Record]) -> dict[str, Value]:
    try:
        record = run()
    except UserError as refusal:
        return {"": {"why": str(refusal)}}
    values: dict[str, Value] = {
        f"{probe}: {one.name}": {"value": one.value, "low": one.low, "high": one.high, "word": one.verdict}
        for probe, measured in record.results.items()
        for one in measured.estimates
    }
    return values | {name: {"why": why} for name, why in record.unmeasured.items()}


def cell(values: Sequence[Value]) -> str:
    """Median, range and words of one row in one tunnel; "–" where no training has the number."""
    numbers = [one["value"] for one in values if "value" in one]
    if not numbers:
        return "–"
    text = f"{_short(statistics.median(numbers))} ({_short(min(numbers))} to {_short(max(numbers))})"
    words = Counter(one["word"] for one in values if one.get("word"))
    said = ", ".join(f"{word} {count}" for word, count in words.most_common())
    return f"{text}: {said}" if said else text


def _short(number: float) -> str:
    """Two digits that count: .0013, .44, 8.2, 74."""
    text = f"{number:.0f}" if abs(number) >= 10 else f"{float(f'{number:.2g}'):.4f}".rstrip("0").rstrip(".")
    return re.sub(r"^(-?)0\.", r"\1.", text)


def _named(values: Mapping[str, Value], names: Sequence[str]) -> Value:
    """The first of these that was measured."""
    return next((values[name] for name in names if name in values), {})


def table(found: Mapping[str, Sequence[Mapping[str, Mapping[str, Value]]]]) -> list[str]:
    """The rows of the table in Markdown. found: by tunnel, what `read` returned of each training."""
    lines = ["| sentence | " + " | ".join(TUNNELS) + " |", "|---" * (len(TUNNELS) + 1) + "|"]
    for sentence, (command, probe, metric) in ROWS.items():
        names = (f"{probe}: {metric}", f"{probe}: {metric}{SAME}")
        cells = [cell([_named(one.get(command, {}), names) for one in found[tunnel]]) for tunnel in TUNNELS]
        lines.append(f"| {sentence} | " + " | ".join(cells) + " |")
    return lines


def main(folder: Path) -> None:
    """Train and read what is missing, store the values, print the table."""
    jobs = {
        f"{name}/{seed}": (str(folder / name / str(seed)), replace(training, seed=seed))
        for seed in range(SEEDS)
        for name, training in TUNNELS.items()
    }
    results = spread(
        read, jobs, lambda done, name: print(f"{done} of {len(jobs)}: {name}", file=sys.stderr, flush=True)
    )
    by_tunnel = {name: [results[f"{name}/{seed}"] for seed in range(SEEDS)] for name in TUNNELS}
    lines = table(by_tunnel)
    wanted = {(command, f"{probe}: {metric}{kind}") for command, probe, metric in ROWS.values() for kind in ("", SAME)}
    values = {
        name: [
            {metric: run[command][metric] for command, metric in sorted(wanted) if metric in run.get(command, {})}
            for run in trainings
        ]
        for name, trainings in by_tunnel.items()
    }
    STORED.write_text(json.dumps({"table": lines, "values": values}, indent=1, ensure_ascii=False) + "\n", "utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "mechanism"))
