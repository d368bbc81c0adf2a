"""A scan as it runs: each set of prompts to its record, and the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmgeom import claims, probes
from llmgeom.cache.shards import captures_folder
from llmgeom.commands.scans.plan import Plan
from llmgeom.files import digest
from llmgeom.progress import first_word, unseen, within
from llmgeom.record import Record

if TYPE_CHECKING:
    from llmgeom.cache.distributed import Share
    from llmgeom.commands.scans.samples import Drawn
    from llmgeom.model.subject import Subject
    from llmgeom.run import Question


def perform(plan: Plan, subject: Subject | None = None, preview: bool = False) -> Iterator[tuple[Path, Record]]:
    """Load the model unless given, scan each pool, save each record, then write the page. Yields (folder, record).

    Records of several pools are judged together at the end, as the terminal and the page count their claims together.
    Where controls are still to be read, the page is written once after the model's own pass as a preview; with
    `preview` nothing else is read, and that page is all that is written.
    One of several processes makes its share of the captures; the first of a launcher's then waits for the others and
    goes on, any other, and one of a job array, yields nothing.
    """
    from llmgeom.reports.preview import write_page

    if subject is None and not preview and (earlier := plan.finished):
        first_word(f"{plan.out} holds this run; remove it to measure again", unseen())
        write_page(plan.out / "report.html", list(earlier.values()))
        yield from earlier.items()
        return
    records: list[Record] = []
    from llmgeom.cache.distributed import Share  # torch: takes seconds to import
    from llmgeom.commands.scans.samples import Drawing

    share = Share.given()
    subject = plan.subject(subject)
    if share is not None and not _shared(share, plan, subject):
        return
    page, store = plan.out / "report.html", str(captures_folder())
    for name in plan.pools:
        drawing = Drawing(plan, subject, name)
        early = question(plan, drawing.first() if plan.stratify else drawing.whole(), facts=_facts(plan, name))
        if preview or early.waits(subject, store):
            with within(name):
                seen = early.preview(subject, store=store)
            if preview:
                records.append(seen)
                yield plan.folder(name), seen
                continue
            write_page(page, [*records, seen])
            first_word(f"preview, values without controls: {page}", unseen())
        records.append(scanned(plan, subject, name, drawing.whole()))
        plan.save(name, records[-1])
    if preview:
        write_page(page, records)
        return
    records = together(records)
    for name, record in zip(plan.pools, records, strict=True):
        if len(records) > 1:
            plan.save(name, record)
        yield plan.folder(name), record
    write_page(page, records)


def together(records: Sequence[Record]) -> list[Record]:
    """The records with one correction over all their claims (`claims.judged_together`)."""
    judged = claims.judged_together([record.results for record in records])
    return [replace(record, results=results) for record, results in zip(records, judged, strict=True)]


def scanned(plan: Plan, subject: Subject, name: str, drawn: Drawn) -> Record:
    """The record of one pool, whose prompts were `drawn` before."""
    with within(name):
        return question(plan, drawn, _facts(plan, name)).record(subject, store=str(captures_folder()))


def _facts(plan: Plan, name: str) -> dict[str, Any]:
    return {"spec": digest(plan.spec(name)), "command": plan.request.command()}


def question(plan: Plan, drawn: Drawn, facts: Mapping[str, Any] = {}) -> Question:
    """The question of a scan on one set of prompts."""
    from llmgeom.plan import Selection
    from llmgeom.run import Question

    request, (batch, samples, notes) = plan.request, drawn
    return Question(
        batch,
        probes.known(plan.probes),
        request.nulls,
        request.seed,
        request.batch_tokens,
        samples,
        facts,
        notes,
        whole=False,
        selection=Selection(**request.selected),
    )


def _shared(share: Share, plan: Plan, subject: Subject) -> bool:
    """Make one process's share of the captures; returns whether this process then continues with the scan."""
    from llmgeom.commands.scans.samples import sampled

    asked, store = plan.request, str(captures_folder())
    with share.watched():
        for name in plan.pools:
            passes, _, _ = question(plan, sampled(plan, subject, name)).plan(subject)
            passes.check_room(subject, store, asked.batch_tokens)
            share.fill(subject, passes, batch_tokens=asked.batch_tokens, store=store)
        goes_on = share.index == 0
        if goes_on:
            share.wait()
    return goes_on
