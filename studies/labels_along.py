"""How well the read-out of log odds along the labels tells models that learnt from labels from others, layer by layer.

    python -m studies.labels_along [FOLDER]     `llmgeom evidence` of nine models; a stopped run continues

Stores each model's R2 after every layer, with interval and word, in studies/labels_along.json. docs/evidence.md
shows them (`python docs/results.py`).
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmgeom import claims
from llmgeom.commands.evidence import RunConfig, perform
from llmgeom.probes.evidence.belief import BELIEF, LAST
from studies.trainings import computed

STORED = Path(__file__).with_suffix(".json")
LEARNT = ("llama", "pythia", "phi", "mistral")
# llama-noicl has llama's shape and so its step 0.
OTHERS = ("llama-noicl", *(f"{name}@step0" for name in LEARNT))
CONTROLS = ("along_null", "shuffled", "without_context")
NULLS = 5  # R2 and its interval need none
Read = dict[str, Any]


def read(model: str, folder: Path) -> Read:
    """R2 after every layer with its interval, label pairs, and the word of the claim."""
    _, (record,) = perform(RunConfig(model=f"pocket:{model}", surfaces=("list",), nulls=NULLS, out=str(folder / model)))
    along = record.results[BELIEF].arrays
    (claim,) = (one for one in record.results[BELIEF].estimates if one.name == LAST)
    return {
        "R2": along["along"][1:].tolist(),
        "interval": along["along_interval"][1:].tolist(),
        "controls": max(float(np.max(band[1:])) for name in CONTROLS if (band := along.get(name)) is not None),
        "clusters": claim.clusters,
        "word": claim.verdict,
    }


def area(positive: Sequence[float], negative: Sequence[float]) -> float:
    """AUC: the share of pairs in which the positive one is larger; ties count one half."""
    pairs = np.subtract.outer(positive, negative)
    return float(((pairs > 0) + 0.5 * (pairs == 0)).mean())


def areas(found: dict[str, Read]) -> dict[str, list[float]]:
    """AUC after every layer: against all others, and against each kind of them."""
    kinds = {"all": OTHERS, "llama-noicl": OTHERS[:1], "step 0": OTHERS[1:]}
    layers = range(len(found[LEARNT[0]]["R2"]))
    return {
        kind: [area([found[m]["R2"][at] for m in LEARNT], [found[m]["R2"][at] for m in names]) for at in layers]
        for kind, names in kinds.items()
    }


def main(folder: Path) -> None:
    found = {}
    for model in (*LEARNT, *OTHERS):
        spec = {"model": model, "nulls": NULLS, "claims": claims.digest()}
        found[model] = computed(folder / f"{model}.json", spec, lambda model=model: read(model, folder))
        print(model, found[model], file=sys.stderr, flush=True)
    STORED.write_text(json.dumps({"models": found, "AUC": areas(found)}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "labels_along"))
