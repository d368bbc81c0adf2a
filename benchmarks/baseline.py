"""Every number of a fixed set of runs, kept and compared: a redesign that only moves code must not change any.

    python benchmarks/baseline.py keep FOLDER [NAME ...]      run the commands (each once), keep their numbers
    python benchmarks/baseline.py compare OLD NEW             numbers of two such folders, 1e-9 relative unless --rel

Numbers are matched by run, probe, metric and field; names that changed are matched by value within a run. This file is
deleted when the redesign is done.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

PYTHIA = ["--model", "pocket:pythia"]
WITH = [sys.executable, "-m", "llmgeom"]
SMALL = ["--nulls", "4", "--limit", "400"]
RUNS: dict[str, list[str]] = {
    "train": ["train", "bijection", "--width", "32", "--layers", "1", "--lr", "1e-2", "--seed", "0"],
    "math": ["scan", *PYTHIA, "--domain", "math", "--probes", "all", *SMALL],
    "mixed": ["scan", *PYTHIA, "--domain", "mixed", *SMALL],
    "llama": ["scan", "--model", "pocket:llama", "--prompts-from", "{math}", "--nulls", "4"],
    "published": ["scan", *PYTHIA, "--domain", "math", "--protocol", "published", *SMALL],
    "task": ["scan", "--model", "{train}", "--probes", "all", "--nulls", "4"],
    "sula": ["sula", "--model", "pocket:llama", "--nulls", "4", "--n", "20"],
    "sula-published": ["sula", *PYTHIA, "--protocol", "published", "--nulls", "4", "--n", "20"],
    "axis": ["ablate", "--model", "pocket:llama", "--controls", "40", "--n", "40", "--limit", "300"],
    "heads": ["ablate", *PYTHIA, "--what", "heads", "--nulls", "3", "--n", "40", "--limit", "300"],
    "blocks": ["ablate", *PYTHIA, "--what", "blocks", "--nulls", "3", "--n", "40", "--limit", "300"],
    "swap": ["swap", "--model", "{train}", "--nulls", "4"],
    "grade": ["grade", "--model", "{train}", "--nulls", "4"],
    "dynamics": ["dynamics", "--model", "{train}", "--nulls", "2"],
    "compare": ["compare", "{math}", "{llama}", "--json"],
    "latex": ["export", "{math}", "latex", "--out", "{out}/verdicts.tex"],
}
# Commands whose words changed in the redesign: tried in this order.
NEW_WORDS = {"sula": ["evidence"], "swap": ["patch"], "compare": ["report"]}


def run(name: str, folder: Path) -> None:
    out = folder / name
    if (out / "done").exists():
        return
    words = [word.format(out=out, **{k: folder / k for k in RUNS}) for word in RUNS[name]]
    out.mkdir(parents=True, exist_ok=True)
    if not {"--json", "--out"} & set(words):
        words += ["--out", str(out)]
    env = os.environ | {"LLMGEOM_CACHE": str(folder / "cache")}
    for verb in (words[0], *NEW_WORDS.get(words[0], [])):
        got = subprocess.run([*WITH, verb, *words[1:]], capture_output=True, text=True, env=env)
        (out / "stdout").write_text(got.stdout)
        if got.returncode == 0:
            break
    if got.returncode:
        sys.exit(f"{name}: {got.stderr[-2000:]}")
    (out / "done").touch()


def numbers(folder: Path) -> dict[str, float]:
    """Every number of every run: of metrics, of arrays (all entries), of what was printed as JSON."""
    from safetensors.numpy import load_file

    found: dict[str, float] = {}

    def walk(at: str, value: object) -> None:
        if isinstance(value, dict):
            name = value.get("name")
            for key, one in value.items():
                if key not in ("run", "facts", "files", "subject", "seconds", "finished"):
                    walk(f"{at}/{name}.{key}" if name else f"{at}/{key}", one)
        elif isinstance(value, list):
            for i, one in enumerate(value):
                walk(at if isinstance(one, dict) and "name" in one else f"{at}[{i}]", one)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found[at] = float(value)

    for record in sorted(folder.glob("*/**/record.json")):
        where = str(record.parent.relative_to(folder))
        if where.startswith(("cache", "train")):
            continue
        walk(where, json.loads(record.read_text())["results"])
        for name, array in load_file(record.parent / "arrays.safetensors").items():
            flat = np.asarray(array, dtype=np.float64).ravel()
            found |= {f"{where}/{name}[{i}]": float(x) for i, x in enumerate(flat)}
    for name in ("compare",):
        text = (folder / name / "stdout").read_text() if (folder / name / "stdout").exists() else ""
        if text.strip().startswith("{"):
            walk(name, json.loads(text))
    return found


def compare(old: Path, new: Path, rel: float) -> None:
    a, b = numbers(old), numbers(new)
    same = lambda x, y: x == y or math.isclose(x, y, rel_tol=rel, abs_tol=rel)  # noqa: E731
    equal = {k for k in a.keys() & b.keys() if same(a[k], b[k])}
    changed = sorted((a.keys() & b.keys()) - equal)
    gone, come = sorted(a.keys() - b.keys()), sorted(b.keys() - a.keys())
    # What is called something else now: the same value in the same run.
    values: dict[str, list[float]] = {}
    for key in come:
        values.setdefault(key.split("/")[0], []).append(b[key])
    lost = [k for k in gone if not any(same(a[k], v) for v in values.get(k.split("/")[0], []))]
    print(
        f"{len(equal)} equal, {len(changed)} changed, {len(gone)} under another name or gone, of these "
        f"{len(lost)} without an equal value; {len(come)} new"
    )
    for key in changed[:60]:
        print(f"changed  {key}: {a[key]!r} -> {b[key]!r}")
    for key in lost[:60]:
        print(f"gone     {key}: {a[key]!r}")


if __name__ == "__main__":
    verb, *rest = sys.argv[1:]
    if verb == "keep":
        for one in rest[1:] or RUNS:
            run(one, Path(rest[0]))
            print(one, flush=True)
    else:
        compare(Path(rest[0]), Path(rest[1]), float(rest[rest.index("--rel") + 1]) if "--rel" in rest else 1e-9)
