"""Where a model breaks: the shortest evidence at which it is far from the exact answer (`--fuzz`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmgeom.commands.job import JobOutput
from llmgeom.commands.output import print_json
from llmgeom.commands.processes.request import RunConfig
from llmgeom.commands.processes.several import Place
from llmgeom.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from llmgeom.model.subject import Subject
    from llmgeom.prompts.process import Draw, Process
    from llmgeom.record import Record


def show_search(settings: RunConfig, processes: Sequence[Process], output: JobOutput) -> int:
    """Search every process, keep a record of each search, and print the prompts; the exit code.

    Raises:
        UserError: no process or no bound; the run folder holds another run.
    """
    if not processes:
        raise UserError("--fuzz searches the evidence of a process: give --process NAME, e.g. --process two-point")
    if not settings.bound > 0:
        raise UserError(f"--bound {settings.bound:g}: expected bits above 0, since every answer is at least 0 bits off")
    out, records = perform_search(settings, processes)
    if output.json:
        searches = [search_facts(record) for record in records]
        print_json({"schema_version": 1, "run_dir": str(out), "report": str(out / "report.html"), "searches": searches})
    else:
        click.echo("\n\n".join("\n".join(search_lines(record)) for record in records))
        click.echo(f"\npage: {out / 'report.html'}")
    return 0


def perform_search(
    settings: RunConfig, processes: Sequence[Process], subject: Subject | None = None
) -> tuple[Path, list[Record]]:
    """Search, save a record for each process and one page. (folder, records). Raises UserError as `show_search`."""
    from llmgeom.reports.first_look import write_page

    place = Place.of(settings, processes, "fuzz-")
    records = place.records(settings, processes, "fuzz", partial(fuzz, settings), subject)
    write_page(place.out / "report.html", records)
    return place.out, records


def fuzz(settings: RunConfig, subject: Subject, process: Process, facts: Mapping[str, Any]) -> Record:
    """The shortest evidence found at which a model misses the exact answer by more than a bound.

    Args:
        facts: further provenance.

    Raises:
        UserError: the model has no tokenizer, or none with enough single-token labels; the prompts are too long.
    """
    import numpy as np

    from llmgeom.probes.evidence import answers, questions
    from llmgeom.probes.evidence.answers import BREAKING, Breaking
    from llmgeom.prompt_table import prompt_table
    from llmgeom.prompts.shrink import search
    from llmgeom.provenance import provenance
    from llmgeom.record import Record
    from llmgeom.run import observe
    from llmgeom.stats.information import bits, kl

    questions.check_tokenizer(subject)
    surface, positions = (settings.surfaces or ("list",))[0], subject.facts["positions"]

    def written(draws: Sequence[Draw]) -> tuple[Any, Any]:
        batch = process.write(draws, surface, subject.tokenizer, positions)
        return batch, observe(subject, batch, answers.NEEDS)

    def distance(draws: Sequence[Draw]) -> np.ndarray:
        batch, predictions = written(draws)
        return bits(kl(batch.exact.predictive[:, -1].numpy(), predictions.log_p))

    most = max(settings.ks or process.usual)
    hit = search(process, distance, settings.bound, n=settings.n, most=most, seed=settings.seed)
    about = {"bound": settings.bound, "seed": settings.seed, "tried": hit.tried, "longest": most, "surface": surface}
    source = {"kind": "search", "name": process.title, "n": settings.n, "seed": settings.seed, "search": about}
    known = subject.facts_now
    if hit.draw is None:
        why = f"none found in {_searched(about)}, more than {settings.bound:g} bits from the exact answer"
        return Record({}, {BREAKING: why}, {}, known, source, facts)
    batch, predictions = written([hit.draw])
    tokens = subject.tokens(batch)
    result = Breaking(
        exact=batch.exact.predictive[0, -1].exp().numpy(),
        model=np.exp(predictions.log_p[0]),
        distance=hit.bits,
        bound=settings.bound,
        observations=len(hit.draw.seen),
        tried=hit.tried,
        ticks={"answer": tuple(batch.columns["marks"][0].split())},
        notes=(f"the prompt: {batch.text[0]}", _searched(about)),
    )
    return Record(
        {BREAKING: result.lowered()},
        {},
        prompt_table(subject, batch, tokens, predictions.h_vocab),
        known,
        {**batch.source, **source},
        {**provenance(batch, tokens, settings.seed, 0), **facts},
    )


def search_facts(record: Record) -> dict[str, Any]:
    """A search as plain data."""
    about = {"model": record.subject["name"], "process": record.source["name"], **record.source["search"]}
    if not record.results:
        return about | {"prompt": None}
    (measured,) = record.results.values()
    shares = zip(
        measured.ticks["answer"], *(measured.arrays[name].tolist() for name in ("exact", "model")), strict=True
    )
    return about | {
        "prompt": record.prompts["text"][0],
        "observations": int(measured.arrays["observations"]),
        "bits": float(measured.arrays["distance"]),
        "answers": [{"label": label, "exact": p, "model": q} for label, p, q in shares],
    }


def search_lines(record: Record) -> Iterator[str]:
    """A search as text: the prompt on a line of its own, then the exact answer and the model's."""
    search = search_facts(record)
    where = f"{search['model']} on {search['process']}"
    if search["prompt"] is None:
        yield f"{where}: {next(iter(record.unmeasured.values()))}"
        return
    yield f"{where}: {search['bits']:.2f} bits from the exact answer after {search['observations']} observations"
    yield f"({_searched(search)}, bound {search['bound']:g} bits)"
    yield ""
    yield search["prompt"]
    yield ""
    for row in search["answers"]:
        yield f"  {row['label']:8} exact {row['exact']:.3f}   model {row['model']:.3f}"


def _searched(about: dict[str, Any]) -> str:
    return f"{about['tried']} sequences of at most {about['longest']} observations, seed {about['seed']}"
