"""The runs of one model that Paper III's tables and the trilogy's predictions rest on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

from llmgeom import probes
from llmgeom.commands import ablate as ablation
from llmgeom.commands import evidence as sula
from llmgeom.commands import scan as scanning
from llmgeom.commands.config import DrawsConfig, ModelConfig, check_folder, keep, run_folder
from llmgeom.files import write_whole
from llmgeom.progress import Progress, prefixed
from llmgeom.record import Record
from llmgeom.result import Estimate, Measured

MIXED, MATH, SULA, SULA_PUBLISHED, ABLATE = "mixed", "math", "sula", "sula-published", "ablate"
FINISHED = "finished"  # beside a record: the spec of the whole that it was run for


@dataclass(frozen=True)
class RunConfig(DrawsConfig, ModelConfig):
    """What the runs of one model are asked for."""

    WHAT: ClassVar[str] = ""  # in the run folder's name


def perform(asked: RunConfig, published: bool, progress: Progress | None = None) -> tuple[Path, dict[str, Record]]:
    """Scan mixed and math prompts, ask for in-context evidence, edit the entropy axis; (folder, records by name).

    published   the published definitions as well. Each run is saved in a folder of its own under the run folder, as
                the command on its record would save it; those that an earlier start finished are read.
    Raises UserError before anything is loaded where something cannot be.
    """
    located = asked.locate()
    spec = asked.spec(located, what=asked.WHAT)
    out = Path(asked.out) if asked.out else run_folder(asked.model, located, asked.WHAT, spec)
    if (out / "record.json").exists():  # the scans' page alone is what an interrupted run leaves there
        check_folder(out, spec)
    common: dict[str, Any] = {f.name: getattr(asked, f.name) for f in fields(ModelConfig)}
    common |= {"seed": asked.seed}
    names = (*probes.names(), *(probes.names(probes.PUBLISHED) if published else ()))
    scans = scanning.RunConfig(
        **common, domains=(MIXED, MATH), n=asked.n, limit=asked.limit, nulls=asked.nulls, probes=names, out=str(out)
    )
    plan = scanning.prepare(scans)
    records: dict[str, Record] = {}
    loaded = cache(partial(asked.load, located))

    def once(names: tuple[str, ...], make: Callable[[], Mapping[str, Record]]) -> None:
        marks = [out / name / FINISHED for name in names]
        if all(mark.exists() and mark.read_text() == spec for mark in marks):
            records.update({name: Record.load(out / name) for name in names})
            return
        records.update(make())
        for mark in marks:
            write_whole(mark, spec.encode())

    once((MIXED, MATH), lambda: {folder.name: one for folder, one in scanning.perform(plan, progress, loaded())})

    def listened(name: str, protocol: str) -> Mapping[str, Record]:
        given = sula.RunConfig(**common, nulls=asked.nulls, protocol=protocol, out=str(out / name))
        return {name: sula.perform(given, prefixed(progress, name), loaded())[1]}

    for name, protocol in ((SULA, "sound"), (SULA_PUBLISHED, "published"))[: 1 + published]:
        once((name,), partial(listened, name, protocol))
    # All positions: at the final token of the last layer alone little passes through its values.
    edits = ablation.RunConfig(**common, sula=True, positions="all", controls=asked.controls, out=str(out / ABLATE))
    once((ABLATE,), lambda: {ABLATE: ablation.perform(edits, prefixed(progress, ABLATE), loaded())[1]})
    return out, records


def find(records: Mapping[str, Record], record: str, probe: str, name: str) -> tuple[Estimate | None, str]:
    """A metric of one of the records; None and why it was not measured."""
    held = records[record]
    if probe in held.unmeasured:
        return None, held.unmeasured[probe]
    for h in held.results[probe].estimates if probe in held.results else ():
        if h.name == name:
            return h, ""
    return None, f"the run {record} has no '{name}': its page says why"


def save(out: Path, asked: RunConfig, records: Mapping[str, Record], name: str, section: Measured) -> None:
    """A record of one section beside the runs it is taken from, and its page."""
    first = records[MIXED]
    record = Record(
        results={name: section},
        unmeasured={},
        prompts=first.prompts,
        subject=first.subject,
        source={"kind": "runs", "name": ", ".join(records)},
        facts={**first.facts, "spec": asked.spec(asked.locate(), what=asked.WHAT), "command": asked.command()},
        warnings=tuple(dict.fromkeys(warning for one in records.values() for warning in one.warnings)),
        run=first.run,
    )
    keep(record, out)
