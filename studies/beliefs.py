"""Beliefs in long contexts: six processes, five renderings, mixtures and a wind tunnel, for docs/findings.md.

    python -m studies.beliefs MODEL NAME DTYPE COPIES [RUN ...]    # measures, and stores in docs/results/beliefs.json

MODEL is what `llmgeom.load` takes and NAME what the store calls it; DTYPE is bfloat16 or float32; COPIES is the number
of untrained copies, 0 for no controls at all. RUN is a name in RUNS, by default all. The wind tunnels:
`llmgeom train edge_hmm:steps=64 --layers 3 --steps 800 --batch 64 --lr 2e-3 --out runs/mess3` and
`llmgeom train edge_hmm:steps=64,stay=0.97,emit=0.6 --layers 3 --steps 700 --batch 64 --lr 2e-3 --out runs/slow`, then
`python -m studies.beliefs runs/mess3 tunnel float32 2 tunnel`, and of runs/slow `"tunnel, slow"`.

Layout of the store: {"runs": [run, ...]}, where a run has
    model, dtype, run, worlds, rendering, seed, sequences, symbols, controls, cpu_seconds, command
    numbers: name -> [value, low, high]: "R2" and "beyond best rival", "beyond all rivals" at the layer where each is
        largest ("layer" -> name -> its number), "untrained" and "shuffled", "ablated" (value alone, three times) at the
        best layer of theirs; "resolution", "weight" over the second half; "KL" in bits and "mass" in the last bin
    rivals: reader -> R2;  best rival: its name
    layers: name -> [layer];  positions: name -> [bin], with "symbols seen", the end of each bin
    used: edit -> {"moved": [value, low, high], "size": [value, low, high]} ({} where the last symbol says everything)
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import llmgeom
from llmgeom.verbs.beliefs import ABLATED, ALL, BEST, KL, MIXED, SHUFFLED, Beliefs

STORE = Path(__file__).parents[1] / "docs" / "results" / "beliefs.json"
MESS3, SLOW = "edge-hmm", "edge-hmm:stay=0.97,emit=0.6"
MIXTURE = ["edge-hmm", "edge-hmm:stay=0.05", "edge-hmm:stay=0.6,emit=0.95"]
RUNS: dict[str, dict[str, Any]] = {
    "mess3": {"world": MESS3},
    "slow": {"world": SLOW},
    "rrxor": {"world": "edge-hmm:process=rrxor"},
    "mess3, other numbers": {"world": "edge-hmm:stay=0.7,emit=0.95"},
    "hmm": {"world": "edge-hmm:process=hmm"},
    "hmm-mixture": {"world": "hmm-mixture:symbols=3"},
    "markov": {"world": "markov:symbols=3"},
    "mixture": {"world": MIXTURE, "sequences": 24},
    "mess3, commas": {"world": MESS3, "rendering": "commas"},
    "mess3, lines": {"world": MESS3, "rendering": "lines"},
    "mess3, words": {"world": MESS3, "rendering": "words"},
    "mess3, anew": {"world": MESS3, "rendering": "anew"},
    "slow, commas": {"world": SLOW, "rendering": "commas"},
    "slow, words": {"world": SLOW, "rendering": "words"},
    "mess3, seed 1": {"world": MESS3, "seed": 1},
    "slow, seed 1": {"world": SLOW, "seed": 1},
    "tunnel": {"world": MESS3, "length": 64, "sequences": 64},
    "tunnel, slow": {"world": SLOW, "length": 64, "sequences": 64},
}


def stored(found: Beliefs) -> dict[str, Any]:
    """What the store keeps of a run."""

    def spans(reading: Any, name: str, at: int) -> list[float]:
        return [float(reading[f"{name}{end}"][at]) for end in ("", ", low", ", high")]

    best = {name: int(found[name].argmax()) for name in ("R2", BEST, ALL)}
    numbers = {name.removeprefix("R2 "): spans(found, name, at) for name, at in best.items()}
    most = {"shuffled": SHUFFLED, "ablated": ABLATED, "mixture": MIXED, "untrained": "R2, highest of untrained copies",
            "untrained beyond all rivals": f"{ALL}, highest of untrained copies"}  # fmt: skip
    numbers |= {name: [float(found[of].max())] * 3 for name, of in most.items() if of in found.values}
    numbers |= {"resolution": [*found.attrs["resolution"]], "weight": [*found.attrs["weight of evidence"]]}
    numbers |= {"KL": spans(found.answers, KL, -1), "mass": [found.attrs["mass of the symbols"]] * 3}
    used = {} if found.used is None else {
        edit: {name: spans(found.used, name, i) for name in ("moved", "size")}
        for i, edit in enumerate(found.used.ticks["edit"])
    }  # fmt: skip
    positions = {"symbols seen": [*found.answers.coords["symbols seen"]]}
    return {"numbers": numbers, "layer": {name.removeprefix("R2 "): at for name, at in best.items()},
            "rivals": dict(found.rivals), "best rival": found.attrs["best rival"],
            "layers": {name: of.tolist() for name, of in found.values.items()},
            "positions": positions | {name: of.tolist() for name, of in found.answers.values.items()},
            "used": used}  # fmt: skip


def rounded(x: Any) -> Any:
    """Five significant digits of every number."""
    if isinstance(x, dict):
        return {name: rounded(of) for name, of in x.items()}
    if isinstance(x, list):
        return [rounded(of) for of in x]
    return float(f"{x:.5g}") if isinstance(x, float | np.floating) else x


def keep(run: dict[str, Any]) -> None:
    """Put a run into the store, in the place of an earlier one of the same name."""
    runs = json.loads(STORE.read_text(encoding="utf-8"))["runs"] if STORE.exists() else []
    same = ("model", "dtype", "run")
    runs = [old for old in runs if [old[key] for key in same] != [run[key] for key in same]] + [rounded(run)]
    lines = ",\n".join(json.dumps(one, ensure_ascii=False) for one in runs)
    STORE.write_text(f'{{"runs": [\n{lines}\n]}}\n', encoding="utf-8")


def main(model: str, name: str, dtype: str, copies: str, *chosen: str) -> None:
    """Measure and store."""
    subject = llmgeom.load(model, dtype=dtype, device="cpu")
    for run in chosen or [run for run in RUNS if not run.startswith("tunnel")]:
        usual: dict[str, Any] = {
            "sequences": 16,
            "length": 512,
            "rendering": "spaces",
            "seed": 0,
            "controls": int(copies),
        }
        options, begun = usual | RUNS[run], time.process_time()
        found = subject.beliefs(**options)
        spent, worlds = time.process_time() - begun, options.pop("world")
        about = {"model": name, "dtype": dtype, "run": run, "worlds": [worlds] if isinstance(worlds, str) else worlds}
        command = f"python -m studies.beliefs MODEL {name} {dtype} {copies} '{run}'"
        keep({**about, **options, "symbols": options["length"], "cpu_seconds": round(spent),
              "command": command, **stored(found)})  # fmt: skip
        print(f"{name}, {run}: {spent:.0f} CPU s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
