"""A scan as it runs: each set of prompts to its record, and the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmgeom import probes
from llmgeom.cache.shards import captures_folder
from llmgeom.commands.scans.plan import Plan
from llmgeom.files import digest
from llmgeom.progress import first_word, unseen, within
from llmgeom.record import Record

if TYPE_CHECKING:
    from llmgeom.cache.distributed import Share
    from llmgeom.commands.scans.samples import Drawing, Drawn
    from llmgeom.model.subject import Subject
    from llmgeom.reports.first_look import FirstLook
    from llmgeom.run import Look, Question


def perform(plan: Plan, subject: Subject | None = None, only_look: bool = False) -> Iterator[tuple[Path, Record]]:
    """Load the model unless given, scan each pool, save each record, then write the page. Yields (folder, record).

    A page of what is there so far is written on the way (`FirstLook`), the first after the main sample alone; with
    `only_look` nothing else is read, and that page is all that is written.
    One of several processes makes its share of the captures; the first of a launcher's then waits for the others and
    goes on, any other, and one of a job array, yields nothing.
    """
    from llmgeom.reports.first_look import FirstLook, write_page

    if subject is None and not only_look and (earlier := plan.finished):
        first_word(f"{plan.out} holds this run; remove it to measure again", unseen())
        write_page(plan.out / "report.html", list(earlier.values()))
        yield from earlier.items()
        return
    records: list[Record] = []
    # A person waits for the first page from here: a model of 7e9 parameters takes half a minute to load.
    look = FirstLook(plan.out / "report.html", records, only_look, lambda text: first_word(text, unseen()))
    from llmgeom.cache.distributed import Share  # torch: takes seconds to import
    from llmgeom.commands.scans.samples import Drawing

    share = Share.given(plan.request.shard)
    subject = plan.subject(subject)
    if share is not None and not _shared(share, plan, subject):
        return
    for name in plan.pools:
        drawing = Drawing(plan, subject, name)
        record = _early(drawing, look) if plan.stratify else None
        if record is None or not only_look:
            record = scanned(plan, subject, name, drawing.whole(), look=look)
        records.append(record)
        if "first_look" not in records[-1].facts:
            plan.save(name, records[-1])
        yield plan.folder(name), records[-1]
    write_page(plan.out / "report.html", records)


def _early(drawing: Drawing, look: FirstLook) -> Record | None:
    """The record of the prompts alone, without controls, where a page is due once they are chosen; it is shown."""
    drawn = drawing.first()
    if not look.due:
        return None
    captured: list[float] = []

    def end(*_: Any) -> bool:
        captured.append(look.clock())
        return True

    record = scanned(drawing.plan, drawing.subject, drawing.name, drawn, look=end)
    if not captured:  # no probe can measure this model: there are no controls to wait for
        return None
    if not look.only:
        look.show(record, captured[0])
    return record


def scanned(
    plan: Plan,
    subject: Subject,
    name: str,
    drawn: Drawn,
    look: Look | None = None,
) -> Record:
    """The record of one pool, whose prompts were `drawn` before."""
    facts = {"spec": digest(plan.spec(name)), "command": plan.request.command()}
    with within(name):
        return question(plan, drawn, facts).record(subject, store=str(captures_folder()), look=look)


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
        goes_on = share.launched and share.index == 0
        if goes_on:
            share.wait()
    return goes_on
