"""The runs of one model that Paper III's tables and the trilogy's predictions rest on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from llmgeom import probes
from llmgeom.errors import bounded
from llmgeom.experiments import ablation, request, scanning, sula
from llmgeom.progress import Progress
from llmgeom.record import Record, write_whole
from llmgeom.result import Headline, Measured

MIXED, MATH, SULA, SULA_PUBLISHED, ABLATE = "mixed", "math", "sula", "sula-published", "ablate"


@dataclass(frozen=True)
class Request(request.Request):
    """What is asked for; its fields are the flags of `llmgeom audit` and `llmgeom reproduce`.

    n    prompts a domain; nulls, draws of each null; controls, draws of each control of the ablation.
    """

    WHAT: ClassVar[str] = ""  # in the run folder's name

    n: int | None = None
    nulls: int = 20
    controls: int = 199
    limit: int | None = None
    seed: int = 0
    out: str | None = None


def perform(asked: Request, published: bool, progress: Progress | None = None) -> tuple[Path, dict[str, Record]]:
    """Scan mixed and math prompts, ask for in-context evidence, edit the entropy axis; (folder, records by name).

    published   the published definitions as well. Each run is saved in a folder of its own under the run folder, as
                the command on its record would save it.
    Raises Refused before anything is loaded where something cannot be.
    """
    bounded(("--controls", asked.controls, 1))
    located = asked.locate()
    spec = asked.spec(located, what=asked.WHAT)
    out = Path(asked.out) if asked.out else request.run_folder(asked.model, located, asked.WHAT, spec)
    if (out / "record.json").exists():  # the scans' page alone is what an interrupted run leaves there
        request.check_folder(out, spec)
    common: dict[str, Any] = {f.name: getattr(asked, f.name) for f in fields(request.Request)}
    common |= {"seed": asked.seed}
    names = (*probes.names(), *(probes.names(probes.PUBLISHED) if published else ()))
    scans = scanning.Request(
        **common, domains=(MIXED, MATH), n=asked.n, limit=asked.limit, nulls=asked.nulls, probes=names, out=str(out)
    )
    plan = scanning.prepare(scans)
    subject, records = asked.load(), {}

    def told(name: str) -> Progress | None:
        return (lambda stage, done, total: progress(f"{name}: {stage}", done, total)) if progress else None

    for folder, record in scanning.perform(plan, progress, subject):
        records[folder.name] = record
    for name, protocol in ((SULA, "sound"), (SULA_PUBLISHED, "published"))[: 1 + published]:
        given = sula.Request(**common, nulls=asked.nulls, protocol=protocol, out=str(out / name))
        records[name] = sula.perform(given, told(name), subject)[1]
    # All positions: at the final token of the last layer alone little passes through its values.
    edits = ablation.Request(**common, sula=True, positions="all", controls=asked.controls, out=str(out / ABLATE))
    records[ABLATE] = ablation.perform(edits, told(ABLATE), subject)[1]
    return out, records


def find(records: Mapping[str, Record], record: str, probe: str, name: str) -> tuple[Headline | None, str]:
    """A headline of one of the records; None and why it was not measured."""
    held = records[record]
    if probe in held.unmeasured:
        return None, held.unmeasured[probe]
    for h in held.results[probe].headlines if probe in held.results else ():
        if h.name == name:
            return h, ""
    return None, f"the run {record} has no '{name}': its page says why"


def save(out: Path, asked: Request, records: Mapping[str, Record], name: str, section: Measured) -> None:
    """A record of one section beside the runs it is taken from, and its page."""
    from llmgeom.reports import page

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
    record.save(out)
    write_whole(out / "report.html", page([record]).encode())
