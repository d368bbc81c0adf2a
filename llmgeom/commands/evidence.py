"""The whole of `llmgeom evidence`: does a model weigh evidence in its context as Bayes' rule does?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import click

from llmgeom.commands import config
from llmgeom.commands.job import Job, JobOutput, show_price
from llmgeom.commands.output import print_json, show
from llmgeom.errors import UserError
from llmgeom.flags import LARGEST_SEED, flag
from llmgeom.progress import Progress, bar, first_word, prefixed

if TYPE_CHECKING:
    import numpy as np

    from llmgeom.model import hub
    from llmgeom.model.subject import Subject
    from llmgeom.prompts.process import Draw, Process
    from llmgeom.prompts.sula import Sula
    from llmgeom.record import Record
    from llmgeom.run import Question

Protocol = Literal["sound", "published"]
KS = (0, 1, 2, 4, 8)


@dataclass(frozen=True)
class RunConfig(config.ModelConfig):
    """What `llmgeom evidence` is asked for."""

    VERB: ClassVar[str] = "evidence"

    processes: tuple[str, ...] = flag(
        (),
        "Draw the evidence from another process, e.g. markov:labels=3 (`llmgeom list processes`), or all. "
        "Repeat for several.",
        name="--process",
        group="Process",
    )
    surfaces: tuple[str, ...] = flag((), "With --process: list, sentences, code. [default: all]", listed=True,
                                     name="--surface", group="Process")  # fmt: skip
    fuzz: bool = flag(
        False,
        "With --process: find the shortest evidence at which the model differs from the exact answer, and save it.",
        group="Process",
    )
    bound: float = flag(
        0.5, "With --fuzz: the KL(exact || answer) in bits that counts as a failure.", least=0, group="Process"
    )
    prior: str = flag("two-point", "two-point, two-point:0.8, beta (uniform) or beta:2,1.")
    template: Literal["colon", "is", "plain", "instructed"] | None = flag(
        None,
        "colon: `w: label`. is: `w is label`. plain: no lead-in, as published. instructed: the prior is stated."
        " [default: colon; plain with --protocol published]",
    )
    protocol: Protocol = flag("sound", "published: the papers' own definitions, flaws included.")
    ks: tuple[int, ...] = flag(
        (),
        "Numbers of labelled words shown. [default: 0,1,2,4,8; a process has its own default]",
        name="--k",
        listed=True,
    )
    labels: tuple[str, ...] = flag((), "Labels. [default: syllables that are one token]", listed=True)
    n: int = flag(50, "Prompts for each number of labelled words.", least=10)
    nulls: int = flag(20, "Untrained copies, and shuffles of the prompts where used, as controls.", least=1)
    seed: int = flag(0, "Fixes prompts and controls.", least=0, most=LARGEST_SEED)
    batch_tokens: int = flag(4096, "Tokens in a batch.", least=1, most=LARGEST_SEED)
    out: str | None = flag(None, "Run folder. [default: runs/MODEL-sula-PRIOR-TEMPLATE-HASH]", group="Output")


@config.command(
    RunConfig,
    JobOutput,
    examples=["llmgeom evidence --model EleutherAI/pythia-410m --prior beta:2,2 --k 0,2,4,8,16"],
)
def main(settings: RunConfig, output: JobOutput) -> int:
    """Test whether a model weighs labelled words by Bayes' rule (the SULA protocol, or --process).

    The answers are compared with the exact posterior, with controls and with simpler observers.
    """
    if settings.fuzz:
        return show_search(settings, chosen_processes(settings), output)
    if settings.processes:
        return show_processes(settings, output)
    return prepare(settings).show(output)


def prepare(settings: RunConfig) -> Job:
    """The job of the SULA protocol: check what can be checked before weights load. Raises UserError."""
    from llmgeom.prompts import nonce
    from llmgeom.prompts.sula import Sula, available, prior

    if settings.surfaces:
        raise UserError(f"--surface {','.join(settings.surfaces)} needs --process; SULA has --template")
    believed, protocol = prior(settings.prior), settings.protocol
    template = settings.template or {"sound": "colon", "published": "plain"}[protocol]
    ks = settings.ks or KS
    Sula(settings.labels or nonce.LABELS[:16], believed, template, ks)  # refused before anything is loaded
    located = settings.locate()

    def ask(subject: Subject, _: Progress | None = None) -> Question:
        source = Sula(settings.labels or available(subject.tokenizer), believed, template, ks)
        draws = {"n": settings.n, "seed": settings.seed, "nulls": settings.nulls, "batch_tokens": settings.batch_tokens}
        return question(subject, source, protocol=protocol, **draws)

    what = f"sula-{settings.prior}-{template}{'-published' * (protocol == 'published')}"
    return Job(settings, located, what.replace(":", "-"), settings.spec(located), ask)


def perform(
    settings: RunConfig, progress: Progress | None = None, subject: Subject | None = None
) -> tuple[Path, Record]:
    """Check, load, ask, save the record and its page; (folder, record)."""
    return prepare(settings).perform(progress, subject)


def question(
    subject: Subject, source: Sula, *, n: int = 50, seed: int = 0, protocol: Protocol = "sound", **options: Any
) -> Question:
    """Ask the model, and untrained controls, `n` prompts a number of observations in every condition.

    Args:
        subject: the model.
        source: prior, labels, template and numbers of observations.
        n: prompts for each number of observations. seed: of prompts and controls.
        protocol: "published": by Paper III's definitions, flaws included.
        options: of `probes.evidence.questions.question`, e.g. nulls.

    Raises:
        UserError: a tokenizer in which a label is several tokens; too few pairs, numbers of observations or prompts.
    """
    from llmgeom.probes.evidence import questions
    from llmgeom.prompts.sula import CONDITIONS

    questions.check_tokenizer(subject)
    if max(source.ks) < 2:
        raise UserError(f"--k {','.join(map(str, source.ks))}: at least one number of observations above 1 is needed")
    wanted = questions.wanted_samples(protocol)
    samples = {name: replace(source, condition=name).sample(n, seed) for name in CONDITIONS if name in wanted}
    facts = {"conditions": {"main": CONDITIONS["main"], **{name: CONDITIONS[name] for name in samples}}}
    batch = source.sample(n, seed)
    return questions.question(subject, batch, samples, protocol=protocol, seed=seed, facts=facts, **options)


# ---- other processes: a record for each, and the profile -------------------------------------------------------------

OF_SULA = ("prior", "template", "protocol", "labels")  # flags that a process has no use for


def show_processes(settings: RunConfig, output: JobOutput) -> int:
    """Ask the model about every process, and print profile, words and page, or the price; the exit code."""
    if output.dry_run:
        from llmgeom.commands.dry_run.cost import price

        chosen, located, _, out = _processes(settings)
        asks = [partial(_question, settings, process) for process in chosen]
        return show_price(price(settings, located, asks, out), output)
    first_word(f"evidence of {settings.model}: drawing prompts, then the model", output.silent)
    with bar(output.silent) as progress:
        out, records = perform_processes(settings, progress)
    if len(records) > 1 and not output.json:
        click.echo("\n".join([*lines(records), ""]))
    return show(out, records, output)


def lines(records: Sequence[Record]) -> Iterator[str]:
    """The records of several processes as text: the profile where there is one, then every process by itself."""
    from llmgeom.probes.evidence import answers
    from llmgeom.probes.evidence.profile import PROFILE
    from llmgeom.reports.strips import strips

    whole = [record for record in records if PROFILE in record.results]
    for record in whole:
        measured = record.results[PROFILE]
        yield f"{record.subject['name']}: skill over the best observer that does not infer (1 is exact)"
        yield from strips(measured, "shown", measured.ticks["part"], measured.arrays["skill"].tolist())
        yield ""
    yield "skill over the best constant, which knows only how much was shown"
    for record in records:
        if found := [h for m in record.results.values() for h in m.estimates if h.name == answers.SKILL]:
            h = found[0]
            yield f"{record.source['name']:26}{h.value:6.2f} [{h.low:.2f}, {h.high:.2f}] {h.verdict}"


def perform_processes(
    settings: RunConfig, progress: Progress | None = None, subject: Subject | None = None
) -> tuple[Path, list[Record]]:
    """Check, load, ask and save: a record for each process, the profile of several, and one page; (folder, records).

    Args:
        settings: the RunConfig of `llmgeom evidence`, with processes.
        progress: called as progress(stage, done, total).
        subject: the model; loaded unless given.

    Raises:
        UserError: an unknown process or one that cannot be; a flag of the SULA protocol; prompts that the model's
            tokenizer or longest input cannot take.
    """
    from llmgeom.cache.shards import captures_folder
    from llmgeom.files import digest, write_whole
    from llmgeom.probes.evidence.profile import PROFILE, profile
    from llmgeom.reports import page

    chosen, located, spec, out = _processes(settings)
    specs = [digest({"run": spec, "process": process.title}) for process in chosen]
    folders = [out / config.safe(process.title) if len(chosen) > 1 else out for process in chosen]
    for folder, process_spec in zip(folders, specs, strict=True):
        config.check_folder(folder, process_spec)
    subject = subject or settings.load(located)
    records = []
    for process, folder, process_spec in zip(chosen, folders, specs, strict=True):
        record = _question(settings, process, subject).record(
            subject,
            store=str(captures_folder()),
            progress=prefixed(progress, process.title),
            facts={"spec": process_spec, "command": settings.command()},
        )
        records.append(record)
        records[-1].save(folder)
    if len(records) > 1:
        whole = profile(records, {"spec": digest({"run": spec, "process": PROFILE})})
        if whole.results:
            whole.save(out / PROFILE)
            records.insert(0, whole)
    write_whole(out / "report.html", page(records).encode())
    return out, records


def _processes(settings: RunConfig) -> tuple[list[Process], hub.Located, str, Path]:
    """The chosen processes, where the model is, the run's hash and its folder. Raises UserError."""
    from llmgeom.prompts.processes import names

    chosen, located = chosen_processes(settings), settings.locate()
    spec = settings.spec(located)
    what = "+".join(process.title for process in chosen)
    what = "all-processes" if len(chosen) == len(names()) else config.safe(what)
    folder = Path(settings.out or config.run_folder(settings.model, located, what, spec))
    return chosen, located, spec, folder


def chosen_processes(settings: RunConfig) -> list[Process]:
    """The processes of a configuration, `all` for every one. Raises UserError."""
    from llmgeom.prompts.processes import load_process, names

    defaults = {f.name: f.default for f in fields(settings)}
    for name in OF_SULA:
        if getattr(settings, name) != defaults[name]:
            raise UserError(
                f"--{name} belongs to the SULA protocol: with --process give the process's own fields, "
                "e.g. two-point:reliability=0.8"
            )
    specs = [spec for given in settings.processes for spec in (names() if given == "all" else (given,))]
    return [load_process(spec) for spec in dict.fromkeys(specs)]


def _question(settings: RunConfig, process: Process, subject: Subject) -> Question:
    """What a process asks of a model. Raises UserError: prompts that it cannot read."""
    from llmgeom.probes.evidence import questions

    questions.check_tokenizer(subject)
    options = {"ks": settings.ks, "surfaces": settings.surfaces, "positions": subject.facts["positions"]}
    sample = partial(process.sample, settings.n, settings.seed, subject.tokenizer, **options)
    batch, samples = sample(), {name: sample(condition=name) for name in process.conditions}
    draws = {"seed": settings.seed, "nulls": settings.nulls, "batch_tokens": settings.batch_tokens}
    return questions.question_of_process(batch, samples, **draws)


# ---- where it breaks ------------------------------------------------------------------------------------------------


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
    from llmgeom.files import digest, write_whole
    from llmgeom.reports import page

    located = settings.locate()
    spec, what = settings.spec(located), config.safe("+".join(process.title for process in processes))
    out = Path(settings.out) if settings.out else config.run_folder(settings.model, located, f"fuzz-{what}", spec)
    folders = [out / config.safe(process.title) if len(processes) > 1 else out for process in processes]
    specs = [digest({"run": spec, "fuzz": process.title}) for process in processes]
    for folder, own in zip(folders, specs, strict=True):
        config.check_folder(folder, own)
    subject = subject or settings.load(located)
    records = []
    for process, folder, own in zip(processes, folders, specs, strict=True):
        records.append(fuzz(subject, process, settings, {"spec": own, "command": settings.command()}))
        records[-1].save(folder)
    write_whole(out / "report.html", page(records).encode())
    return out, records


def fuzz(subject: Subject, process: Process, settings: RunConfig, more: dict[str, Any]) -> Record:
    """The shortest evidence found at which a model misses the exact answer by more than a bound.

    Args:
        more: further provenance.

    Raises:
        UserError: the model has no tokenizer, or none with enough single-token labels; the prompts are too long.
    """
    import numpy as np

    from llmgeom.probes.evidence import answers, questions
    from llmgeom.probes.evidence.breaking import BREAKING, Breaking
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

    most = min(process.most, max(settings.ks or process.KS))
    hit = search(process, distance, settings.bound, n=settings.n, most=most, seed=settings.seed)
    about = {"bound": settings.bound, "seed": settings.seed, "tried": hit.tried, "longest": most, "surface": surface}
    source = {"kind": "search", "name": process.title, "n": settings.n, "seed": settings.seed, "search": about}
    known = {name: value for name, value in subject.facts.items() if value is not None}
    if hit.draw is None:
        why = f"none found in {_searched(about)}, more than {settings.bound:g} bits from the exact answer"
        return Record({}, {BREAKING: why}, {}, known, source, more)
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
        {**provenance(batch, tokens, settings.seed, 0), **more},
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
