"""A record: results, unmeasured metrics with reasons, prompts and provenance of a run (numpy only)."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llmgeom.errors import UserError
from llmgeom.files import make_folder, sha256, write_json, write_whole
from llmgeom.result import Estimate, Figure, Quantity, Result
from llmgeom.stats.resampling import Deletions

SCHEMA = 3
_PARTS = ("results", "unmeasured", "subject", "source", "facts", "files", "run")  # of record.json, each a table


@dataclass(frozen=True)
class Record:
    """One scan of one subject on one batch.

    Attributes:
        results: probe name -> Result.
        unmeasured: probe name, or "probe: metric" -> why not, in one sentence.
        prompts: column name -> one value per prompt; always "text", "template", "domain", "tags", "entropy" (bits),
            "tokens" (count).
        subject: model, revision, weight hash, dtype, device, family, layers, heads, attention path, self-check ...
        source: the spec of the prompts, seed included.
        facts: other provenance: versions, claims hash, the command, the seed.
        warnings: the same as those of a `Result`, for the run as a whole.
        run: facts that vary between equal runs (end, duration); they never reach arrays or page.
    """

    results: Mapping[str, Result]
    unmeasured: Mapping[str, str]
    prompts: Mapping[str, tuple]
    subject: Mapping[str, Any]
    source: Mapping[str, Any]
    facts: Mapping[str, Any]
    warnings: tuple[str, ...] = ()
    run: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        edited = ", edited" if self.facts.get("edits") else ""
        return f"{self.subject['name']}{edited} on {self.source.get('name', 'prompts')}"

    def frame(self, kind: str = "metrics") -> Any:
        """A pandas table: "prompts" (a row per prompt), "layers" (a row per number of a layer) or "metrics".

        Raises:
            UserError: the kind is unknown, or pandas is not installed.
        """
        from llmgeom.reports import frame

        return frame(self, kind)

    def plot(self, name: str) -> Any:
        """One figure of the page as a Plotly figure: `record.plot("value_manifold.scores")`.

        Raises:
            UserError: the record has no such figure; the text lists those that it has.
        """
        from llmgeom.reports import plot

        return plot(self, name)

    def __repr__(self) -> str:
        probes = dict.fromkeys(name.partition(":")[0] for name in (*self.results, *self.unmeasured))
        return f"<Record {self.title!r}: {', '.join(probes)}>"

    def _repr_html_(self) -> str:
        """HTML for a notebook: the run line, warnings and verdicts of the page. `reports.figures` has its figures."""
        from llmgeom.reports import panel

        return panel(self)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Every array as PROBE.QUANTITY, as safetensors writes them."""
        return {
            f"{probe}.{name}": np.array(array, order="C")
            for probe, measured in self.results.items()
            for name, array in measured.arrays.items()
        }

    def save(self, folder: str | os.PathLike) -> None:
        """Write record.json, arrays.safetensors and prompts.jsonl; each appears whole or not at all.

        record.json is written last and names the hashes of the other two, so a folder with a record is complete.
        """
        from safetensors.numpy import save

        folder = Path(folder)
        make_folder(folder)
        arrays = self.arrays
        for probe, measured in self.results.items():
            without = {DELETIONS + h.name: h.deletions.without for h in measured.estimates if h.deletions}
            arrays |= {f"{probe}.{name}": np.array(array, order="C") for name, array in without.items()}
        names = sorted(self.prompts)
        rows = (dict(zip(names, row, strict=True)) for row in zip(*(self.prompts[name] for name in names), strict=True))
        lines = (json.dumps(row, sort_keys=True, ensure_ascii=False) + "\n" for row in rows)
        blobs = {"arrays.safetensors": save(arrays), "prompts.jsonl": "".join(lines).encode()}
        for name, blob in blobs.items():
            write_whole(folder / name, blob)
        body = {
            "schema": SCHEMA,
            "results": {probe: plain_of(measured) for probe, measured in self.results.items()},
            **{name: dict(getattr(self, name)) for name in ("unmeasured", "subject", "source", "facts", "run")},
            "warnings": list(self.warnings),
            "files": {name: sha256(blob) for name, blob in blobs.items()},
        }
        write_json(folder / "record.json", body)

    @classmethod
    def load(cls, folder: str | os.PathLike) -> Record | Records:
        """Read a run folder: one record, or all of them if the command wrote one for each set of prompts.

        Args:
            folder: the folder that the command printed.

        Returns:
            The record; for a folder with several, a tuple of them, also indexed by their names: `runs["math"]`.

        Raises:
            UserError: the folder is missing, unfinished, damaged, or of another schema.
        """
        every = cls.load_all(folder)
        return next(iter(every.values())) if len(every) == 1 else Records(every)

    @classmethod
    def load_all(cls, folder: str | os.PathLike) -> dict[str, Record]:
        """Name -> record of a run folder, in the order in which they were measured.

        The name is empty if the folder itself is the record. Raises UserError as `load` does.
        """
        if not isinstance(folder, str | os.PathLike):
            raise UserError(f"{folder!r} is no run folder: expected the folder that the command printed")
        folder = Path(folder)
        inside = sorted(path.parent for path in folder.glob("*/record.json"))
        if (folder / "record.json").exists() or not inside:
            return {"": cls.load_one(folder)}
        inside.sort(key=lambda path: (path / "record.json").stat().st_mtime_ns)
        found = {path.name: cls.load_one(path) for path in inside}
        return dict(sorted(found.items(), key=lambda pair: str(pair[1].run.get("finished", ""))))

    @classmethod
    def load_one(cls, folder: str | os.PathLike) -> Record:
        """Read the single record of a folder. Raises UserError as `load` does, and for a folder with several."""
        folder = Path(folder)
        if folder.is_file():
            raise UserError(f"{folder} is a file, not a run folder: expected the folder that the command printed")
        inside = sorted(path.parent.name for path in folder.glob("*/record.json"))
        if inside and not (folder / "record.json").exists():
            raise UserError(
                f"{folder} holds {len(inside)} runs, {', '.join(inside)}: give one, e.g. {folder / inside[0]}"
            )
        try:
            return cls._loaded(folder)
        except (KeyError, TypeError, AttributeError, IndexError, ValueError, RecursionError) as error:
            cause = f"{type(error).__name__}: {error}"[:200]
            raise UserError(f"{folder}/record.json is no record of llmgeom ({cause}); run the scan again") from error

    @classmethod
    def _loaded(cls, folder: Path) -> Record:
        from safetensors import SafetensorError
        from safetensors.numpy import load

        try:
            body = json.loads((folder / "record.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(
                f"{folder} holds no record.json: give the folder that `llmgeom scan` printed; --preview keeps no record"
            ) from None
        except (ValueError, OSError, RecursionError) as error:
            raise UserError(f"{folder}/record.json cannot be read ({error}); run the scan again") from error
        if body.get("schema") != SCHEMA:
            raise UserError(f"{folder}/record.json has schema {body.get('schema')!r}; this version reads {SCHEMA}")
        for name in (*_PARTS, "warnings"):
            if not isinstance(body[name], list if name == "warnings" else dict):
                raise TypeError(f"{name} is {body[name]!r}")
        if not isinstance(body["subject"]["name"], str):
            raise TypeError(f"the subject's name is {body['subject']['name']!r}")
        blobs = {}
        for name, expected in body["files"].items():
            try:
                blobs[name] = (folder / name).read_bytes()
            except OSError as error:
                raise UserError(
                    f"{folder}/{name} is missing: copy the whole run folder, or run its command again"
                ) from error
            if sha256(blobs[name]) != expected:
                raise UserError(f"{folder}/{name} was changed after the run (its hash differs from the record's)")
        try:
            arrays = load(blobs["arrays.safetensors"])
        except SafetensorError as error:
            raise UserError(f"{folder}/arrays.safetensors cannot be read ({error}); run the scan again") from error
        of_probe: dict[str, dict[str, np.ndarray]] = {probe: {} for probe in body["results"]}
        for name, array in arrays.items():
            probe, _, own = name.partition(".")
            of_probe.setdefault(probe, {})[own] = array
        rows = [json.loads(line) for line in blobs["prompts.jsonl"].decode().split("\n") if line]
        return cls(
            results={probe: measured_from(plain, of_probe[probe]) for probe, plain in body["results"].items()},
            prompts={name: tuple(row[name] for row in rows) for name in (rows[0] if rows else ())},
            warnings=tuple(body["warnings"]),
            **{name: body[name] for name in ("unmeasured", "subject", "source", "facts", "run")},
        )


class Records(tuple[Record, ...]):
    """The records of one run folder, in the order in which they were measured, indexed by place or name."""

    names: tuple[str, ...]

    def __new__(cls, every: Mapping[str, Record]) -> Records:
        """The records, from name -> record."""
        records = super().__new__(cls, every.values())
        records.names = tuple(every)
        return records

    def __getitem__(self, place: Any) -> Any:
        """A record by place or by name. Raises LookupError for an unknown name."""
        if not isinstance(place, str):
            return super().__getitem__(place)
        if place not in self.names:
            raise LookupError(f"this run has no record {place!r}; it has {', '.join(self.names)}")
        return super().__getitem__(self.names.index(place))

    def __getattr__(self, name: str) -> Any:
        if name in ("frame", "plot", "results"):
            raise AttributeError(
                f"{name} is of one record: take one by its name, e.g. records[{self.names[0]!r}].{name}"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"<{len(self)} records: {', '.join(self.names)}>"

    def _repr_html_(self) -> str:
        return "".join(record._repr_html_() for record in self)


DELETIONS = "without each cluster: "  # prefix of an estimate's name in the name of the array of these values


def plain_of(measured: Result) -> dict[str, Any]:
    """A result without its arrays, as plain data."""
    estimates = [{**h.plain(), "groups": h.deletions.groups if h.deletions else ""} for h in measured.estimates]
    plain = dataclasses.asdict(dataclasses.replace(measured, arrays={}, estimates=()))
    del plain["arrays"]
    if not plain["facts"]:
        del plain["facts"]
    # A list preserves the order of figures; the keys of a file are sorted.
    return plain | {
        "estimates": estimates,
        "quantities": [{"name": name, **declared} for name, declared in plain["quantities"].items()],
    }


def measured_from(plain: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Result:
    """A result from its plain data and its arrays by name."""
    quantities = {
        q["name"]: Quantity(tuple(q["axes"]), q["unit"], q["meaning"], Figure(**q["figure"]) if q["figure"] else None)
        for q in plain["quantities"]
    }
    estimates = []
    for h in plain["estimates"]:
        groups, own = h["groups"], {name: value for name, value in h.items() if name != "groups"}
        without = Deletions(groups, arrays[DELETIONS + h["rule"]["name"]], h["units"]) if groups else None
        estimates.append(Estimate.of(own, without))
    nested: dict[str, Any] = {"estimates": tuple(estimates), "quantities": quantities}
    nested |= {"arrays": {name: arrays[name] for name in quantities}}
    nested |= {"warnings": tuple(plain["warnings"]), "notes": tuple(plain.get("notes", ()))}
    nested |= {"ticks": {axis: tuple(names) for axis, names in plain.get("ticks", {}).items()}}
    return Result(**{**plain, **nested})


def finished(specs: Mapping[Path, str], files: str, program: str) -> dict[Path, Record]:
    """The records of run folders, if the same program made all of them from the same files; else none.

    Args:
        specs: the requested content: folder -> hash of the request.
        files: hash of the model's files.
        program: hash of the code and its libraries.
    """
    records = {}
    for folder, spec in specs.items():
        try:
            records[folder] = record = Record.load_one(folder)
        except UserError:  # missing, damaged or of another schema: it must be measured
            return {}
        own = record.facts.get("spec"), record.subject.get("files"), record.run.get("program")
        if own != (spec, files, program):
            return {}
    return records
