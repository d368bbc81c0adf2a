"""The whole of `llmgeom scan`: from a request to records and a page, checked as far as can be before weights load."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import click

from llmgeom import probes
from llmgeom.batch import Batch
from llmgeom.cache.shards import captures_folder
from llmgeom.commands import config
from llmgeom.commands.output import VerdictOutput, print_json, show
from llmgeom.errors import UserError
from llmgeom.files import digest
from llmgeom.flags import LARGEST_SEED, flag, flags, places_text
from llmgeom.model import hub
from llmgeom.progress import Progress, bar, first_word, prefixed
from llmgeom.record import Record, Records, finished

if TYPE_CHECKING:
    import numpy as np

    from llmgeom.cache.distributed import Share
    from llmgeom.model.subject import Subject
    from llmgeom.run import Look

POOL, SEQUENCES = 1000, 200  # of a domain; of a task, where they cost nothing
# Candidates of a further sample: of 500 mixed prompts, 75 as diverse as a domain's are chosen as exactly as of 1,000
# (math, code and news, two seeds each: the same counts of different tokens, final tokens and templates).
FURTHER = 500
FEWEST, DOCUMENTS = 10, "hf:"
Drawn = tuple[Batch, dict[str, Batch], list[str]]  # prompts, second samples by name, and why one could not be had
# Seconds of each stage of a scan of pocket:pythia, two cores, from an empty cache: each stage's share of the time.
STAGES = {"entropy of": 4.0, "prompts": 1.0, "untrained controls": 14.0, "shuffled prompts": 3.0, "measuring": 2.0}
FINAL = "the"  # the word that stands in the most templates of every domain


@dataclass(frozen=True)
class RunConfig(config.SelectionConfig, config.ModelConfig):
    """What `llmgeom scan` is asked for."""

    VERB: ClassVar[str] = "scan"

    domains: tuple[str, ...] = flag((), "Prompt domain. Repeat for several. [default: mixed and math]",
                                    name="--domain", group="Prompts")  # fmt: skip
    tasks: tuple[str, ...] = flag(
        (), "Task of a wind tunnel, e.g. bijection:vocab=20. Repeat for several. [default: the model's own]",
        name="--task", group="Prompts",
    )  # fmt: skip
    processes: tuple[str, ...] = flag(
        (), "Evidence in text with an exact answer, e.g. markov (`llmgeom list processes`). Repeat for several.",
        name="--process", group="Prompts",
    )  # fmt: skip
    prompts_file: str | None = flag(None, "Your own prompts: .jsonl, .csv, .parquet, .txt, hf:DATASET, or -.",
                                    name="--prompts", group="Prompts")  # fmt: skip
    prompts_from: str | None = flag(None, "Use the prompts of an earlier run folder.", group="Prompts")
    n: int | None = flag(
        None, "Prompts in each domain, spread evenly over entropy. [default: 75; fewer in small domains]",
        least=FEWEST, group="Prompts",
    )  # fmt: skip
    chat: bool = flag(False, "Give each prompt as a user's message, in the tokenizer's template.", group="Prompts")
    limit: int | None = flag(
        None, "Read only the first LIMIT of a file, or draw a pool of at most LIMIT.", least=FEWEST, group="Prompts"
    )
    seed: int = flag(0, "Fixes prompts and controls.", least=0, most=LARGEST_SEED, group="Prompts")
    probes: tuple[str, ...] | None = flag(
        None, "Names with commas between, or all. [default: all; on prompts all but the slowest]",
        listed=True, group="Measure",
    )  # fmt: skip
    protocol: Literal["sound", "published"] = flag(
        "sound", "published: the papers' own definitions, flaws included (`llmgeom reproduce`).", group="Measure"
    )
    batch_tokens: int = flag(4096, "Tokens in a batch.", least=1, most=LARGEST_SEED, group="Measure")
    shard: str | None = flag(None, "In a job array: i/n captures every n-th shard and stops (docs/store.md).",
                             group="Measure")  # fmt: skip
    nulls: int = flag(20, "Draws of each control: untrained copies, shuffled prompts.", least=1, group="Controls")
    stability: bool = flag(False, "Scan again in another precision, in smaller batches and with BOS toggled.",
                           group="Controls")  # fmt: skip
    out: str | None = flag(None, "Run folder. [default: runs/MODEL-DOMAINS-HASH]", group="Output")


@dataclass(frozen=True)
class ScanOutput(VerdictOutput):
    """What `llmgeom scan` prints."""

    dry_run: bool = flag(
        False, "Print the plan only: what each claim needs, tokens, memory, minutes. Reads no weights.", group="Output"
    )
    look: bool = flag(False, "Stop after the model's own pass: values, no control, no verdict.", group="Output")
    fail_on_flip: bool = flag(False, "With --stability: exit with 3 if a verdict changes.", group="Output")


@config.command(
    RunConfig,
    ScanOutput,
    examples=["llmgeom scan --model EleutherAI/pythia-410m --domain math --n 75 --out runs/410m-math"],
)
def main(settings: RunConfig, output: ScanOutput) -> int:
    """Measure how the geometry of a model's activations relates to its uncertainty, and draw a page."""
    if output.fail_on_flip and not settings.stability:
        raise UserError("--fail-on-flip needs --stability; give both")
    if output.look and (settings.stability or settings.shard is not None):
        raise UserError(f"--look with {'--stability' if settings.stability else '--shard'}: leave one of the two out")
    if settings.probes == ():
        raise UserError("--probes names no probe; leave it out for all of them, or see `llmgeom list probes`")
    first_word(f"scan of {settings.model}: reading prompts, then the model", output.silent or output.dry_run)
    plan = prepare(settings, write=not output.dry_run)
    if output.dry_run:
        from llmgeom.commands.dry_run import estimate, lines

        cost = estimate(plan)
        print_json(cost) if output.json else click.echo("\n".join(lines(cost)))
        return 0
    comparison = None
    with bar(output.silent, plan.shares) as progress:
        if settings.stability:
            from llmgeom.commands import stability

            records, comparison = stability.perform(plan, progress)
        else:
            records = [record for _, record in perform(plan, progress, only_look=output.look)]
    if not records:  # this is one of several processes: there is nothing to show yet
        click.echo(plan.shared, nl=False)
        return 0
    code = show(plan.out, records, output, {"stability": comparison.to_dict()} if comparison else None)
    if comparison and not output.json:
        click.echo("\n".join(comparison.lines()))
    return 3 if comparison and comparison.flipped and output.fail_on_flip else code


@dataclass(frozen=True)
class Plan:
    """A request that was found possible: where the model is, what is run on which prompts, and where it goes.

    pools    name -> candidates; stratified by entropy where `stratify` is true, else taken as they are.
    """

    request: RunConfig
    located: hub.Located
    probes: tuple[str, ...]
    pools: dict[str, Batch]
    stratify: bool
    out: Path

    def subject(self, given: Subject | None) -> Subject:
        """The model, unless it is given, as it reads prompts."""
        read = given or self.request.load(self.located)
        return read.chat() if self.request.chat else read

    def folder(self, name: str) -> Path:
        return self.out / re.sub(r"[^\w.+-]", "-", name) if len(self.pools) > 1 else self.out

    @property
    def finished(self) -> dict[Path, Record]:
        """Folder -> record where an earlier command finished this very run; empty where any is missing or differs."""
        from llmgeom.cache.keys import of_files, of_program

        asked = self.request
        here = self.located.kind != "hub" and not (asked.device or asked.device_map or asked.shard)
        ours = set(self.probes) <= set(probes.names()) and not any(".py" in task for task in asked.tasks)
        if not here or not ours or os.environ.get("WORLD_SIZE", "1") != "1":  # no spec holds the user's own code
            return {}
        specs = {self.folder(name): digest(self.spec(name)) for name in self.pools}
        return finished(specs, of_files(hub.folder(self.located)), of_program())

    def n(self, name: str) -> int:
        """How many prompts are scanned: 75 by default, as Paper III.

        In a small domain two thirds of what two a template allow, so that each fifth of the entropies gives its share.
        """
        if not self.stratify:
            return len(self.pools[name])
        return self.request.n or min(75, 4 * len(set(self.pools[name].cluster)) // 15 * 5)

    @property
    def shares(self) -> dict[str, float]:
        """How each stage of the scan starts -> its share of the time; none with --stability, which scans again."""
        if self.request.stability:
            return {}
        return {f"{name}: {stage}": share for name in self.pools for stage, share in STAGES.items()}

    @property
    def shared(self) -> str:
        """What one of several processes says when its share is made; a launcher's says nothing."""
        shard = self.request.shard
        done = f"share {shard} is stored in {captures_folder()}; when all {(shard or '').split('/')[-1]} are made, "
        then = "bring them together (`llmgeom cache merge`) and give the same command without --shard\n"
        return done + then if shard else ""

    def spec(self, name: str) -> dict[str, Any]:
        """What decides the bytes of one record, as plain data."""
        from llmgeom.cache.keys import of_pool

        settings = self.request
        return {
            "model": settings.model,
            "revision": self.located.revision,
            "dtype": settings.dtype,
            "quantize": settings.quantize,
            "backend": settings.backend,
            "prompts": of_pool(self.pools[name]),
            "n": self.n(name),
            "probes": self.probes,
            "nulls": settings.nulls,
            "batch_tokens": settings.batch_tokens,
            "seed": settings.seed,
            **({"chat": True} if settings.chat else {}),
            **settings.selected,
        }


def prepare(settings: RunConfig, write: bool = True) -> Plan:
    """Check everything that can be checked before torch is imported; with `write`, make the run folders too.

    Raises UserError.
    """
    files = (settings.prompts_file is not None, settings.prompts_from is not None)
    sources = (settings.domains, settings.tasks, settings.processes, *files)
    if sum(map(bool, sources)) > 1:
        raise UserError("--domain, --task, --process, --prompts and --prompts-from exclude each other; give one")
    documents_asked = (settings.prompts_file or "").startswith(DOCUMENTS)
    own_prompts = settings.prompts_file is not None or settings.prompts_from is not None
    if settings.n is not None and own_prompts and not documents_asked:
        raise UserError(
            f"--n {settings.n}: prompts of your own are taken as they are; --limit {settings.n} takes the first"
        )
    if settings.chat and (settings.processes or settings.tasks or settings.stability):
        raise UserError("--chat reads prompts as messages: leave out --process, --task and --stability")
    if settings.positions != "last" and (settings.processes or settings.tasks):
        raise UserError(f"--positions {settings.positions}: a task or process has queries of its own; leave it out")
    located = settings.locate()
    if not any(sources) and hub.tunnel(located.path):
        settings = replace(settings, tasks=(hub.tunnel_task(located.path),))
    chosen = probes.chosen(settings.probes, settings.protocol, prompts=not settings.tasks)
    if settings.protocol == probes.PUBLISHED and (sound := [one for one in chosen if one in probes.names()]):
        raise UserError(f"--protocol published with --probes {sound[0]}: that probe is sound; leave one of the two out")
    pools = _pools(settings, located)
    stratify = documents_asked or not (own_prompts or settings.tasks or settings.processes)
    plan = Plan(settings, located, chosen, pools, stratify, Path(settings.out or "."))
    if settings.out is None:
        spec = digest({name: plan.spec(name) for name in pools})
        plan = replace(plan, out=config.run_folder(settings.model, located, "+".join(pools), spec))
    for name in pools if write and settings.shard is None else ():
        config.check_folder(plan.folder(name), digest(plan.spec(name)))
    return plan


def _pools(settings: RunConfig, located: hub.Located) -> dict[str, Batch]:
    from llmgeom.prompts import documents, domains, files

    if settings.prompts_file is not None and settings.prompts_file.startswith(DOCUMENTS):
        size = min(POOL, settings.limit or POOL)
        pool = documents.read(settings.prompts_file, size, settings.seed, offline=settings.offline)
        if len(pool) < (least := max(settings.n or FEWEST, FEWEST)):
            raise UserError(f"{settings.prompts_file} gave {len(pool)} prompts; at least {least} are needed")
        return {"+".join(re.findall(r"[\w.-]+", settings.prompts_file.removeprefix(DOCUMENTS))): pool}
    if settings.processes:
        return _evidence(settings, located)
    if settings.tasks:
        from llmgeom import wind_tunnels

        tasks = [wind_tunnels.load_task(spec) for spec in settings.tasks]
        n = min(settings.n or SEQUENCES, settings.limit or sys.maxsize)
        return {task.title: task.truncated(n, settings.seed, task.test_split) for task in tasks}
    if settings.prompts_file is not None or settings.prompts_from is not None:
        if settings.prompts_from is not None:
            Record.load_one(settings.prompts_from)  # refuses what is no whole run
            name, path = "prompts", str(Path(settings.prompts_from) / "prompts.jsonl")
        else:
            path = str(settings.prompts_file)
            name = "stdin" if path == "-" else Path(path).stem
        batch = files.read(path)
        batch = batch.take(range(min(len(batch), settings.limit or len(batch))))
        if len(batch) < FEWEST:
            raise UserError(f"{path} holds {len(batch)} prompts; a scan needs at least {FEWEST}")
        return {name: batch}
    pools = {}
    for name in dict.fromkeys(settings.domains or ("mixed", "math")):
        domain = domains.Domain(name)
        size = min(POOL, settings.limit or POOL, domain.size())
        if settings.n is not None and settings.n > size:
            raise UserError(f"--n {settings.n}: {name} gives a pool of {size} prompts; ask for at most that")
        pools[name] = domain.sample(size, settings.seed)
    return pools


def _evidence(settings: RunConfig, located: hub.Located) -> dict[str, Batch]:
    """Prompts of each process, in words that are single tokens of the model's tokenizer."""
    from llmgeom.prompts.processes import load_process

    processes = [load_process(spec) for spec in settings.processes]
    tokenizer, positions = settings.tokenizer(located)
    n = min(settings.n or SEQUENCES, settings.limit or sys.maxsize)
    return {
        process.title: process.sample(max(n // len(process.KS), 1), settings.seed, tokenizer, positions=positions)
        for process in processes
    }


def perform(
    plan: Plan, progress: Progress | None = None, subject: Subject | None = None, only_look: bool = False
) -> Iterator[tuple[Path, Record]]:
    """Load the model unless given, scan each pool, save each record, then write the page. Yields (folder, record).

    A page of what is there so far is written on the way (`FirstLook`); with `only_look` no control is read, and the
    page is all that is written.
    One of several processes makes its share of the captures; the first of a launcher's then waits for the others and
    goes on, any other, and one of a job array, yields nothing.
    """
    from llmgeom.reports.first_look import FirstLook, write_page

    if subject is None and not only_look and (earlier := plan.finished):
        first_word(f"{plan.out} holds this run; remove it to measure again", progress is None)
        write_page(plan.out / "report.html", list(earlier.values()))
        yield from earlier.items()
        return
    from llmgeom.cache.distributed import Share  # takes seconds to import

    share = Share.given(plan.request.shard)
    subject = plan.subject(subject)
    if share is not None and not _shared(share, plan, subject, progress):
        return
    records: list[Record] = []
    look = FirstLook(plan.out / "report.html", records, only_look, lambda text: first_word(text, progress is None))
    for name in plan.pools:
        records.append(scanned(plan, subject, name, sampled(plan, subject, name, progress), progress, look=look))
        if "first_look" not in records[-1].facts:
            records[-1].save(plan.folder(name))
        yield plan.folder(name), records[-1]
    write_page(plan.out / "report.html", records)


def scan(
    subject: Subject | str, *domains: str, out: str | Path | None = None, quiet: bool = True, **options: Any
) -> Record | Records:
    """The scan of `llmgeom scan`: the same record, byte for byte, but for the time that it took.

    Args:
        subject: A model that `load` returned, or its name.
        domains: Prompt domains; mixed and math where none is given.
        out: A folder for the run: records and page, as the command writes them. Nothing is written without it.
        quiet: Show no progress.
        options: Fields of the command's configuration: n, probes, nulls, seed, tasks, prompts_file, batch_tokens ...

    Returns:
        The record; of several sets of prompts all of them, by place or name.

    Raises:
        UserError: A flag's value is refused, with the remedy; or the model was made in memory and has no place on the
            disk, so that no command repeats the scan: `llmgeom.run.run_probes` measures it.
    """
    name = subject if isinstance(subject, str) else subject.name
    options |= {} if isinstance(subject, str) or not subject.facts.get("chat") else {"chat": True}
    known = {field.field for field in flags(RunConfig)}
    if unknown := sorted(set(options) - known):
        raise UserError(f"scan has no option {unknown[0]!r}; it has {', '.join(sorted(known))}")
    options |= {key: (options[key],) for key in ("probes", "tasks", "sites") if isinstance(options.get(key), str)}
    options |= {key: places_text(options[key]) for key in ("layers", "positions") if key in options}
    settings = RunConfig(model=name, domains=domains, out=None if out is None else str(out), **options)
    try:
        plan = prepare(settings, write=out is not None)
    except UserError as refusal:
        if isinstance(subject, str) or "files" in subject.facts:
            raise
        raise UserError(f"{name} is a model in memory: measure it with llmgeom.run.run_probes ({refusal})") from refusal
    with bar(quiet, plan.shares) as progress:
        read = None if isinstance(subject, str) else subject
        if out is not None:
            records = dict(zip(plan.pools, (record for _, record in perform(plan, progress, read)), strict=True))
        else:
            read = plan.subject(read)
            drawn = {name: sampled(plan, read, name, progress) for name in plan.pools}
            records = {name: scanned(plan, read, name, drawn[name], progress) for name in plan.pools}
    return next(iter(records.values())) if len(records) == 1 else Records(records)


def scanned(
    plan: Plan,
    subject: Subject,
    name: str,
    drawn: Drawn,
    progress: Progress | None = None,
    batch_tokens: int | None = None,
    look: Look | None = None,
    **facts: Any,
) -> Record:
    """The record of one pool, whose prompts were `drawn` before, by this subject or by another."""
    from llmgeom.plan import Selection
    from llmgeom.run import Question

    settings, (batch, samples, notes) = plan.request, drawn
    facts = {"spec": digest(plan.spec(name) | facts), "command": settings.command(), **facts}
    draws = settings.nulls, settings.seed, batch_tokens or settings.batch_tokens
    part = Selection(**settings.selected)
    question = Question(batch, probes.known(plan.probes), *draws, samples, facts, notes, whole=False, selection=part)
    return question.record(subject, store=str(captures_folder()), progress=prefixed(progress, name), look=look)


def _shared(share: Share, plan: Plan, subject: Subject, progress: Progress | None) -> bool:
    """Make one process's share of the captures; whether it is then to go on with the scan."""
    from llmgeom.plan import PassPlan, Selection, measurable

    settings, store, part = plan.request, str(captures_folder()), Selection(**plan.request.selected)
    with share.watched():
        for name in plan.pools:
            batch, samples, _ = sampled(plan, subject, name, progress)
            measured, _ = measurable(subject, batch, probes.known(plan.probes), part)
            draws = settings.nulls, settings.seed
            passes = PassPlan.of(subject, batch, measured, *draws, samples=samples, selection=part)
            passes.check_room(subject, store, settings.batch_tokens)
            share.fill(subject, passes, batch_tokens=settings.batch_tokens, store=store, progress=progress)
        goes_on = share.launched and share.index == 0
        if goes_on:
            share.wait(progress)
    return goes_on


def sampled(plan: Plan, subject: Subject, name: str, progress: Progress | None = None) -> Drawn:
    """The prompts to scan, by name the second samples that a probe wants, and why one could not be had.

    A pool is spread over entropy, and a plain sample of it stands beside. A domain also has prompts that all end in
    one token; and one other than mixed is compared with mixed prompts, and with mixed prompts as diverse as its own.
    """
    from llmgeom.model.tokenizing import fitting
    from llmgeom.probe import LENGTH, MATCHED, MIXED, ONE_TOKEN, UNSTRATIFIED, WHOLE
    from llmgeom.prompts import pool as pools
    from llmgeom.prompts.domains import Domain

    pool, seed, n = plan.pools[name], plan.request.seed, plan.n(name)
    if pool.source["kind"] == "task":
        from llmgeom import wind_tunnels

        of = pool.source
        return pool, {WHOLE: wind_tunnels.load_task(of["name"]).sample(of["n"], of["seed"], of["split"])}, []
    if not plan.stratify:
        return pool, {}, []

    def readable(of: Batch, what: str) -> Batch:
        kept = fitting(subject, of)
        if len(kept) < len(of):
            longer = f"have more than {subject.facts['positions']} tokens"
            notes.append(f"{len(of) - len(kept)} of {len(of)} {what} {longer}: left out")
        return kept

    def entropy(of: Batch, what: str) -> np.ndarray:
        return subject.entropy(
            of,
            batch_tokens=plan.request.batch_tokens,
            store=str(captures_folder()),
            progress=(lambda done, total: progress(f"{name}: entropy of {what}", done, total)) if progress else None,
        )

    def ids(of: Batch) -> list[list[int]]:
        tokens = subject.tokens(of)
        return [row[:length] for row, length in zip(tokens.data.tolist(), tokens.lengths.tolist(), strict=True)]

    def same_end() -> Batch:
        ending = fitting(subject, Domain(name).sample(min(len(plan.pools[name]), further), seed, final=FINAL))
        ends = [row[-1] for row in ids(ending)]
        last = max(set(ends), key=ends.count)
        ending = ending.take([i for i, end in enumerate(ends) if end == last])
        return pools.stratify(ending, entropy(ending, f"prompts that end in '{FINAL}'"), n, seed=seed)

    further = min(POOL, max(FURTHER, 7 * n))
    asked_for = frozenset().union(*(module.NEEDS.samples for module in probes.known(plan.probes).values()))
    notes: list[str] = []
    pool = readable(pool, "prompts of the pool")
    found = entropy(pool, "the pool")
    batch = pools.stratify(pool, found, n, seed=seed)
    possible: dict[str, Callable[[], Batch]] = {
        UNSTRATIFIED: lambda: pools.plain(pool, n, seed=seed),
        LENGTH: lambda: pools.length_matched(pool, found, [len(row) for row in ids(pool)], n, seed=seed),
    }
    if pool.source["kind"] == "domain":
        possible[ONE_TOKEN] = same_end
        if name != MIXED and asked_for & {MIXED, MATCHED}:
            # Another seed than the mixed scan's own: the two samples are independent.
            size = min(further, plan.request.limit or POOL, Domain(MIXED).size())
            mixed = readable(Domain(MIXED).sample(size, seed + 1), "mixed prompts to compare with")
            theirs = entropy(mixed, "mixed prompts")
            possible[MIXED] = lambda: pools.stratify(mixed, theirs, n, seed=seed)
            wanted = pools.diversity(ids(batch), batch.cluster)
            possible[MATCHED] = lambda: pools.as_diverse(mixed, theirs, ids(mixed), wanted, n, seed)
    samples = {}
    for what in sorted(asked_for & possible.keys()):
        try:
            samples[what] = possible[what]()
        except UserError as refusal:  # a small pool cannot give each
            notes.append(f"no sample of prompts '{what}': {refusal}")
    return batch, samples, notes
