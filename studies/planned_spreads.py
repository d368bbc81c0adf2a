"""What `llmgeom/planning.toml` assumes: `python -m studies.planned_spreads` measures it again and writes the file.

    python -m studies.planned_spreads              33 minutes on two cores that other work shared
    python -m studies.planned_spreads NAME ...     measure some of the scans, e.g. "pythia math", next to what is stored

What every scan measures is stored in studies/planned_spreads.json; a run that was stopped keeps the finished scans.

Scans of 75 prompts (four pocket models, two domains) and of 200 sequences (eleven tunnels, trained here), with 20 draws
of each control. Of each claim a scan measures

- s, the spread between clusters: the half width of the value's interval over Student's quantile, times sqrt(n);
- tau, the spread between draws: the standard deviation of the control with draws whose far end lies farthest. Of draws
  that are as noisy as the value, less the value's own error. Of a rank correlation both are on Fisher's scale: the
  median of draws of |rho| is tanh(.674 w), and w^2 is tau^2 and the sampling error 1 / (n - 3).

A plan assumes the upper quartile over scans, of what two scans or more measure. The interval of a rank correlation
follows from n, so that no s is stored.
"""

import json
import math
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

import llmgeom
from llmgeom.record import Record
from llmgeom.result import Estimate
from llmgeom.stats.controls import Comparison
from llmgeom.stats.power import HALF_MEDIAN
from llmgeom.stats.resampling import student_quantile
from llmgeom.wind_tunnels.training import train
from llmgeom.wind_tunnels.training_config import Training

STORE = Path(__file__).with_suffix(".json")
MODELS, DOMAINS, DRAWS = ("pythia", "phi", "llama", "mistral"), ("math", "mixed"), 20
# Task -> layers of its model, and the task that is read: beyond the lengths of a training, for `length_generalisation`.
TUNNELS = {
    "bijection": (1, "bijection"),
    "bijection:replacement=true": (2, "bijection:replacement=true"),
    "coin": (1, "coin"),
    "edge_hmm": (2, "edge_hmm"),
    "edge_hmm:process=rrxor": (3, "edge_hmm:process=rrxor"),
    "hmm": (2, "hmm"),
    "hmm:steps=8": (2, "hmm:steps=14"),
    "markov": (2, "markov"),
    "recall": (2, "recall"),
    "recurrence": (2, "recurrence"),
    "coin:flips=12": (2, "coin:flips=20"),
}
PLANNING = Path(llmgeom.__file__).parent / "planning.toml"
# What decides, where it is not draws of models: assumed.
CONTROLS = {
    "belief_readout: MLPs' share of the fall": "number",
    "belief_readout: fall outside the largest step": "number",
    "value_manifold: entropy decodability (held-out R2)": "noisy draws",
}
# Two numbers of one spread: in a task with the same bearing positions in every sequence it has a name of its own. And
# what is read from weights is the same in a scan of a task, but these tunnels have too few heads.
BEARING = "qk_alignment: attention on bearing positions, last less first"
SAME = {BEARING: f"{BEARING}, same places in every sequence"}
WEIGHTS = "key_orthogonality: columns of W_K"
PROMPTS, TASKS = "", "task_"  # before the names of planning.toml
Spreads = dict[str, dict[str, float]]  # "probe: metric" -> s and tau


def spreads(record: Record) -> Spreads:
    """s and tau of every claim of a scan."""
    judged = ((f"{probe}: {h.name}", h) for probe, m in record.results.items() for h in m.estimates if h.claim)
    return {key: found for key, h in judged if h.compared is not None and (found := _of(h, h.compared))}


def _of(h: Estimate, compared: Comparison) -> dict[str, float]:
    rule, interval = compared.rule, compared.interval
    units = interval.units or compared.clusters
    error = (interval.high - interval.low) / 2 / student_quantile(units, interval.level)
    both = {} if rule.needed == "correlation" else {"spread": error * math.sqrt(compared.clusters)}
    drawn = [null for null in compared.nulls if null.sample]
    if not drawn:
        return both
    farthest = max(drawn, key=lambda null: null.high if rule.side == "upper" else -null.low)
    sample = np.array(farthest.sample)
    if rule.needed == "correlation":
        whole = math.atanh(np.median(np.abs(sample))) / HALF_MEDIAN
        both["null_spread"] = math.sqrt(max(whole**2 - 1 / (compared.clusters - 3), 0.0))
    else:
        own = error**2 if farthest.noisy else 0.0
        both["null_spread"] = math.sqrt(max(sample.var(ddof=1) - own, 0.0))
    return both


def scans(names: list[str]) -> Iterator[tuple[str, Spreads]]:
    """Each scan by name, of all where no name is given."""
    for model in MODELS:
        for domain in DOMAINS:
            if not names or f"{model} {domain}" in names:
                yield f"{model} {domain}", spreads(llmgeom.scan(f"pocket:{model}", domain, nulls=DRAWS))
    for task, (layers, read) in TUNNELS.items():
        if not names or task in names:
            with tempfile.TemporaryDirectory() as folder:
                asked = Training(task, width=32, layers=layers, steps=800, lr="1e-2", snapshots=2)
                place = train(asked, Path(folder) / "tunnel").out
                yield task, spreads(llmgeom.scan(str(place), tasks=(read,), nulls=DRAWS))


def rows(stored: Mapping[str, Spreads]) -> dict[str, dict[str, float | str]]:
    """ "probe: metric" -> the entries of planning.toml: upper quartiles over scans, at two significant digits."""
    every: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for scan, claims in stored.items():
        before = TASKS if scan in TUNNELS else PROMPTS
        for key, values in claims.items():
            for name, value in values.items():
                every[key][before + name].append(value)
    every |= {other: every[key] for key, other in SAME.items()}
    every[WEIGHTS] |= {TASKS + name: values for name, values in every[WEIGHTS].items()}
    entries: dict[str, dict[str, float | str]] = {}
    for key, of in sorted(every.items()):
        control = CONTROLS.get(key)
        entry: dict[str, float | str] = {
            name: float(f"{np.quantile(values, 0.75):.2g}")
            for name, values in of.items()
            if len(values) > 1 and not (control == "number" and "null" in name)
        }
        if entry:
            entries[key] = entry | ({"control": control} if control else {})
    return entries


def written(entries: Mapping[str, Mapping[str, float | str]]) -> str:
    """The entries as TOML."""
    text = ""
    for key, entry in entries.items():
        probe, _, name = key.partition(": ")
        lines = (f"{field} = {json.dumps(value)}\n" for field, value in entry.items())
        text += f"\n[{probe}.{json.dumps(name)}]\n" + "".join(lines)
    return text


def main(names: list[str]) -> None:
    stored = json.loads(STORE.read_text(encoding="utf-8")) if STORE.exists() else {}
    for scan, claims in scans(names):
        for key, values in claims.items():
            before = stored.get(scan, {}).get(key, {})
            shown = (f"{name} {value:.3g} (stored {before.get(name, math.nan):.3g})" for name, value in values.items())
            print(f"{scan}: {key}: {', '.join(shown)}", flush=True)
        if not names:
            stored[scan] = {key: {name: float(f"{v:.4g}") for name, v in of.items()} for key, of in claims.items()}
            STORE.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    if not names:
        head, *_ = PLANNING.read_text(encoding="utf-8").partition("\n[")
        PLANNING.write_text(head + written(rows(stored)), encoding="utf-8")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        os.environ["LLMGEOM_CACHE"] = cache  # a result that is loaded has no draws of its controls
        main(sys.argv[1:])
