"""Put stored results into README and docs: `python docs/results.py`; with `--run [NAME ...]` measure them again first.

`results/commands.toml` lists the commands. `results/NAME.json` stores the metrics of its run, and what it printed where
that is shown. In Markdown, what stands between two comments is replaced:

    <!-- table NAME --> ... <!-- end -->                   a table of `tables.py`, from the file that a study stored
    <!-- output NAME --> ... <!-- end -->                  everything that the command printed, as a code block
    <!-- NAME: metric | field | format -->...<!-- end -->  one number of a metric, e.g. value | .2f or clusters | d
    <!-- NAME: metric | interval | .2f -->...<!-- end -->  low to high; control: the control's range; difference: of
                                                           the value from a control on the same prompts

A metric of one of several records is written as [record]metric. A study's run has its numbers in metrics.json; other
studies run for hours and are not run from here. Where a command says GEMMA, the environment variable of that name says
which folder or GGUF file of Gemma-3-270M is read.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from pathlib import Path

from tables import TABLES

DOCS = Path(__file__).parent
STORE = DOCS / "results"
COMMANDS: dict[str, str] = tomllib.loads((STORE / "commands.toml").read_text(encoding="utf-8"))
FIELDS = (
    *("value", "unit", "low", "high", "control", "control_low", "control_high", "control_centre", "difference_low"),
    *("difference_high", "p", "n", "clusters", "verdict"),
)
CURVES = {  # probe -> arrays [layer] that are stored, too
    "interchange": ("whole", "frame", "random", "placebo"),
    "value_manifold": ("pc12",),
}
RANGES = {
    "interval": ("low", "high"),
    "control": ("control_low", "control_high"),
    "difference": ("difference_low", "difference_high"),
}
MARK = re.compile(
    r"(<!-- (?:output (?P<name>\w+)|table (?P<table>\w+)|(?P<of>\w+): (?P<what>[^>]+?)) -->)(?P<old>.*?)"
    r"(?P<end><!-- end -->)",
    re.S,
)


def pages() -> list[Path]:
    """The files with marks."""
    return [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]


def stored(name: str) -> dict:
    """The stored result of a command."""
    return json.loads((STORE / f"{name}.json").read_text(encoding="utf-8"))


def printed() -> set[str]:
    """The commands whose output is stored: those that a page shows."""
    marks = (mark["name"] for path in pages() for mark in MARK.finditer(path.read_text(encoding="utf-8")))
    return {name for name in marks if name}


def shown(what: str, result: dict) -> str:
    """One number as the mark asks for it. Raises KeyError where the run has no such metric or field."""
    metric, field, form = (part.strip() for part in what.rsplit("|", 2))
    values = [result["metrics"][metric][end] for end in RANGES.get(field, (field,))]
    return " to ".join(format(value if isinstance(value, str) else value + 0, form) for value in values)  # no -0.00


def updated(text: str) -> str:
    """The page with every marked number and output taken from the store."""

    def fill(mark: re.Match) -> str:
        if mark["name"]:
            lines = "\n".join(stored(mark["name"])["output"])
            return f"{mark[1]}\n\n```\n{lines}\n```\n\n{mark['end']}"
        if mark["table"]:
            return "\n\n".join((mark[1], "\n".join(TABLES[mark["table"]]()), mark["end"]))
        return mark[1] + shown(mark["what"], stored(mark["of"])) + mark["end"]

    return MARK.sub(fill, text)


def metrics(folder: Path) -> dict[str, dict]:
    """The metrics of a run folder by name, each with its interval, control and n; of `CURVES` e.g. "whole, layer 0"."""
    from llmgeom.record import Record
    from llmgeom.reports import rows

    if (study := folder / "metrics.json").exists():
        return json.loads(study.read_text(encoding="utf-8"))
    found: dict[str, dict] = {}
    for place, record in Record.load_all(folder).items():
        of = f"[{place}]" if place else ""
        every = [row for row in rows([record]) if row.h]
        names = Counter(row.name for row in every)
        for row in every:  # two probes of one record may have a metric of one name
            name = f"{row.probe}: {row.name}" if names[row.name] > 1 else row.name
            cells = row.numbers().items()
            found[of + name] = {field: cell for field, cell in cells if field in FIELDS and cell is not None}
        for probe, name in ((probe, name) for probe, names in CURVES.items() for name in names):
            arrays = record.results[probe].arrays if probe in record.results else {}
            for layer, value in enumerate(arrays.get(name, ())):
                ends = arrays[f"{name}_null"][layer] if f"{name}_null" in arrays else ()
                band = {f"control_{end}": float(x) for end, x in zip(("low", "high"), ends, strict=False)}
                found[f"{of}{name}, layer {layer}"] = {"value": float(value)} | band
    return found


def previewed(found: dict) -> dict[str, dict]:
    """The metrics of what a scan printed with `--json`, as `metrics` has those of its folder."""
    return {
        f"[{row['record'].rpartition(' on ')[2]}]{row['metric']}": {
            field: row[field] for field in FIELDS if row.get(field) is not None
        }
        for row in found["verdicts"]
    }


def measure(place: str, names: list[str]) -> None:
    """Run these commands in the folder, by default all, and store what they printed and measured."""
    kept = printed()
    for name, command in COMMANDS.items():
        if names and name not in names:
            continue
        words = shlex.split(command)
        if "GEMMA" in words and "GEMMA" not in os.environ:
            print(f"{name} left out: set GEMMA to a folder or GGUF file of Gemma-3-270M", flush=True)
            continue
        words = [os.environ["GEMMA"] if word == "GEMMA" else word for word in words]
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=place,
            env=os.environ | {"COLUMNS": "100", "PYTHONPATH": str(DOCS.parent)},
            text=True,
            capture_output=True,
        )
        if done.returncode:
            raise SystemExit(f"{command}\n{done.stderr}")
        out = Path(place, words[words.index("--out") + 1]) if "--out" in words else None
        measured = metrics(out) if out and any([*out.rglob("record.json"), *out.rglob("metrics.json")]) else {}
        if "--json" in words:  # a preview, which leaves no record
            measured = previewed(json.loads(done.stdout))
        as_printed = name in kept or not measured  # what has no record is kept as it prints
        lines = [line.rstrip() for line in done.stdout.strip("\n").splitlines()] if as_printed else []
        if lines or measured:
            text = json.dumps({"command": command, "output": lines, "metrics": measured}, indent=1, ensure_ascii=False)
            (STORE / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        print(name, flush=True)


if __name__ == "__main__":
    if "--run" in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as place:
            measure(place, sys.argv[sys.argv.index("--run") + 1 :])
    for path in pages():
        text = path.read_text(encoding="utf-8")
        if (new := updated(text)) != text:
            path.write_text(new, encoding="utf-8")
            print(path)
