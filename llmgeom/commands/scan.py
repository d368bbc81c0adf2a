"""The whole of `llmgeom scan`, from flags to pages, and the same from Python."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llmgeom import claims, probes
from llmgeom.batch import Batch
from llmgeom.cache.shards import captures_folder
from llmgeom.commands import config, folders
from llmgeom.commands.job import JobOutput, show_price
from llmgeom.commands.output import show
from llmgeom.commands.scan_prompts import DOCUMENTS, RunConfig, pools
from llmgeom.errors import UserError, brief, unknown
from llmgeom.files import digest
from llmgeom.flags import flags, output_flag, places_text, plain
from llmgeom.model import hub
from llmgeom.progress import bar, first_word, tell, unseen, within
from llmgeom.record import Record, Records, finished

if TYPE_CHECKING:
    import numpy as np

    from llmgeom.model.model import Model
    from llmgeom.plan import Plan

NOT_YET = "the mixed prompts that a domain is compared with are not read yet"


@dataclass(frozen=True)
class ScanOutput(JobOutput):
    """What `llmgeom scan` prints."""

    preview: bool = output_flag(False, "Read no control: show the values of the model's own pass, without verdicts.")


@config.command(
    RunConfig,
    ScanOutput,
    examples=["llmgeom scan --model EleutherAI/pythia-410m --domain math --n 75 --out runs/410m-math"],
)
def main(settings: RunConfig, output: ScanOutput) -> int:
    """Measure how the geometry of a model's activations relates to its uncertainty, and draw a page."""
    if settings.probes == ():
        raise UserError("--probes names no probe; leave it out for all of them, or see `llmgeom list probes`")
    first_word(f"scan of {settings.model}: reading prompts, then the model", output.silent or output.dry_run)
    asked = prepare(settings, write=not output.dry_run)
    # Before the run, which may take hours; it repeats them as warnings of the record.
    for name in asked.pools if not output.silent else ():
        for doubt in asked.doubts(name):
            remedy = f"`llmgeom train {name}` makes a model that was trained on it"
            click.echo(f"llmgeom: warning: {settings.model} on {name}: {doubt}; {remedy}", err=True)
    if output.dry_run:
        plans = [partial(asked.plan, name=name) for name in asked.pools]
        return show_price(settings, asked.located, plans, asked.out, output)
    if output.preview and all((asked.folder(name) / "record.json").exists() for name in asked.pools):
        raise UserError(
            f"--preview: {asked.out} holds the whole run, and a preview would replace its page; leave --preview out"
        )
    with bar(output.silent):
        records = [record for _, record in perform(asked, preview=output.preview)]
    if not records:  # another process of the launcher measures
        return 0
    return show(asked.out, records, output)


def scan(
    subject: Model | str, *domains: str, out: str | Path | None = None, quiet: bool = True, **options: Any
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
            disk, so that no command repeats the scan (`llmgeom.run.run_probes` measures it); or an edit has no spec.
    """
    from llmgeom.model.model import Model

    if not isinstance(subject, str | Model):
        raise UserError(f"scan({brief(subject)}): expected a model that llmgeom.load returned, or its name")
    for domain in domains:
        if not isinstance(domain, str) or Path(domain).is_file():
            raise UserError(
                f"scan({brief(domain)}): expected the names of domains; prompts of your own are a file, "
                f"prompts_file={(domain if isinstance(domain, str) else 'mine.csv')!r}"
            )
    name, read = (subject, None) if isinstance(subject, str) else (subject.name, subject)
    options = {key: plain(value) for key, value in options.items()}
    settings = RunConfig(model=name, domains=domains, out=str(out) if out else None, **_options(options, read))
    asked = prepare(settings, write=out is not None, subject=read)
    with bar(quiet):
        records = [record for _, record in perform(asked, read, write=out is not None)]
    return records[0] if len(records) == 1 else Records(dict(zip(asked.pools, records, strict=True)))


def _options(options: Mapping[str, Any], subject: Model | None) -> dict[str, Any]:
    """The options of `scan` as fields of its configuration, with those that a model brings: how it was loaded, and
    whether it reads messages.

    Raises UserError for an unknown keyword, for prompts that are not a file, if no record could say what the model is,
    or if an option says that it was loaded another way.
    """
    called = {option.name.removeprefix("--").replace("-", "_"): option.field for option in flags(RunConfig)}
    placed = {"model", "domains"}
    known = sorted({"out", "quiet", *called.values()} - placed)
    for name in sorted(options):
        if called.get(name, name) in placed:
            raise UserError(f"scan has no option {name!r}: give the model first, then domains, scan(model, 'math')")
        if name not in known:
            raise unknown("option of scan", name, known, near=[called[name]] if name in called else ())
    prompts = options.get("prompts_file")
    if not isinstance(prompts, str | None):
        raise UserError(
            f"scan(prompts_file={brief(prompts)}): expected the name of one file; save prompts of your own in a file, "
            "e.g. mine.txt with one a line, and give prompts_file='mine.txt'"
        )
    several = {option.field for option in flags(RunConfig) if option.several}  # one name may be given alone
    given = {key: (value,) if key in several and isinstance(value, str) else value for key, value in options.items()}
    given |= {key: places_text(given[key]) for key in ("layers", "positions") if key in given}
    if subject is None:
        return given
    if not subject.as_read:
        raise UserError(
            f"{subject.name} is a model in memory, or was written to after it was loaded, and no command repeats its "
            "scan: use llmgeom.run.run_probes"
        )
    for edit in subject.edits:
        if not edit.spec:
            raise UserError(
                f"the edit at {edit.point} of layers {edit.layers} is a function that no record can name: "
                "give subject.edit(..., spec={...}), what it does as plain data"
            )
    loading = {option.field: option.default for option in flags(config.ModelConfig) if option.field != "model"}
    for name in loading.keys() & options.keys():
        if options[name] != (loaded := subject.options.get(name, loading[name])):
            raise UserError(
                f"scan({name}={options[name]!r}) of a subject that was loaded with {name}={loaded!r}: "
                f"load it with {name}={options[name]!r}"
            )
    return {**given, **subject.options, **({"chat": True} if subject.facts.get("chat") else {})}


# ---- what is asked: checked before weights load ---------------------------------------------------------------------


@dataclass(frozen=True)
class Scan:
    """Flags that passed the checks: the place of the model, the probes, the prompts and the run folder.

    Attributes:
        pools: name -> candidates; stratified by entropy where `stratify` is true, else taken as they are.
        edits: the identities of the edits of every pass; commands make none.
    """

    settings: RunConfig
    located: hub.Located
    probes: tuple[str, ...]
    pools: dict[str, Batch]
    stratify: bool
    out: Path
    edits: tuple[Mapping[str, Any], ...] = ()

    def folder(self, name: str) -> Path:
        """Where the record of a pool goes."""
        return self.out / re.sub(r"[^\w.+-]", "-", name) if len(self.pools) > 1 else self.out

    def doubts(self, name: str) -> list[str]:
        """Doubts about every verdict on a task: its folder says that the model was not trained on it."""
        if self.pools[name].source["kind"] != "task":
            return []
        from llmgeom import wind_tunnels
        from llmgeom.grading import Origin

        return list(Origin.of(self.located.path).doubts(wind_tunnels.load_world(self.pools[name].source["name"])))

    @property
    def finished(self) -> dict[Path, Record]:
        """Folder -> record where an earlier command finished this very run; empty where any is missing or differs."""
        from llmgeom.cache.keys import of_files, of_program

        here = self.located.kind != "hub" and not (self.settings.device or self.settings.device_map)
        ours = set(self.probes) <= set(probes.names()) and not any(".py" in task for task in self.settings.tasks)
        if not here or not ours or os.environ.get("WORLD_SIZE", "1") != "1":  # no spec holds the user's own code
            return {}
        specs = {self.folder(name): digest(self.spec(name)) for name in self.pools}
        return finished(specs, of_files(hub.folder(self.located)), of_program())

    def n(self, name: str) -> int:
        """How many prompts are scanned: 75 by default, as Paper III.

        In a small domain two thirds of two prompts a template, so that each fifth of the entropies gives its share.
        """
        if not self.stratify:
            return len(self.pools[name])
        return self.settings.n or min(75, 4 * len(set(self.pools[name].cluster)) // 15 * 5)

    def spec(self, name: str) -> dict[str, Any]:
        """Everything that determines the bytes of one record, as plain data."""
        from llmgeom.cache.keys import of_pool

        settings = self.settings
        return {
            **settings.values("model", "dtype", "quantize", "backend", "nulls", "batch_tokens", "seed"),
            "revision": self.located.revision,
            "prompts": of_pool(self.pools[name]),
            "n": self.n(name),
            "probes": self.probes,
            **({"chat": True} if settings.chat else {}),
            **({"edits": self.edits} if self.edits else {}),
            **settings.selected,
        }

    def plan(self, subject: Model, name: str, first: bool = False, preview: bool = False) -> Plan:
        """What is read of one pool: its prompts, and unless `first` the further samples that probes compare them with.

        A pool is spread over entropy. A domain other than mixed is compared with mixed prompts as diverse as its own.
        A `preview` takes prompts at random, as the entropies of a pool cost more than all else that it reads, and
        leaves out probes that examine weights.
        """
        from llmgeom.plan import Plan
        from llmgeom.probe import MATCHED, MIXED, WHOLE

        settings, pool, notes = self.settings, self.pools[name], self.doubts(name)
        modules, samples = probes.known(self.probes), {}
        if pool.source["kind"] == "task":
            from llmgeom import wind_tunnels

            of = pool.source
            samples[WHOLE] = wind_tunnels.load_world(of["name"]).sample(of["n"], of["seed"], of["split"])
        elif self.stratify and preview:
            from llmgeom.prompts.pool import plain

            modules = {name: module for name, module in modules.items() if module.NEEDS.examine is None}
            pool = plain(self._readable(subject, pool, "prompts of the pool", notes), self.n(name), settings.seed)
            notes.append("prompts drawn at random, where the whole run spreads them over entropy: values will differ")
        elif self.stratify:
            from llmgeom.prompts.pool import stratify

            kind, pool = pool.source["kind"], self._readable(subject, pool, "prompts of the pool", notes)
            pool = stratify(pool, self._entropy(subject, pool, name, "the pool"), self.n(name), seed=settings.seed)
            wanted = {sample for module in modules.values() for sample in module.NEEDS.samples}
            if MATCHED in wanted and name != MIXED and kind == "domain":
                try:
                    samples |= {} if first else {MATCHED: self._as_diverse(subject, pool, name, notes)}
                    notes += [NOT_YET] * first
                except UserError as refusal:  # a small pool cannot give it
                    notes.append(f"no sample of prompts '{MATCHED}': {refusal}")
        facts = {"spec": digest(self.spec(name)), "command": settings.command()}
        options = (settings.nulls, settings.seed, settings.batch_tokens, samples, facts, notes)
        return Plan.of(subject, pool, modules, *options, whole=False, **settings.selected)

    def _readable(self, subject: Model, of: Batch, what: str, notes: list[str]) -> Batch:
        """The prompts that the model has positions for; a note where there are others."""
        from llmgeom.model.tokenizing import fitting

        kept = fitting(subject, of)
        if len(kept) < len(of):
            longer = f"have more than {subject.facts['positions']} tokens"
            notes.append(f"{len(of) - len(kept)} of {len(of)} {what} {longer}: left out")
        return kept

    def _entropy(self, subject: Model, of: Batch, name: str, what: str) -> np.ndarray:
        """[prompt] the model's next-token entropy, bits."""
        progress = partial(tell, f"{name}: entropy of {what}")
        store, tokens = str(captures_folder()), self.settings.batch_tokens
        return subject.entropy(of, batch_tokens=tokens, store=store, progress=progress)

    def _as_diverse(self, subject: Model, batch: Batch, name: str, notes: list[str]) -> Batch:
        """Mixed prompts as diverse as these, from the pool that a scan of mixed prompts reads as well."""
        from llmgeom.probe import MIXED
        from llmgeom.prompts.domains import Domain
        from llmgeom.prompts.pool import as_diverse, candidates, diversity

        def read(of: Batch) -> tuple[list[list[int]], list[list[int]]]:
            """The tokens of each prompt, and those at the positions that are measured."""
            tokens: Any = subject.tokens(of)  # of text, so no rows of numbers
            ids = tokens.real
            return ids, [[row[at] for at in self.settings.read(len(row))] for row in ids]

        settings, domain = self.settings, Domain(MIXED)
        size = min(candidates(settings.n, settings.limit), domain.size())
        what = "mixed prompts to compare with"
        mixed = self._readable(subject, domain.sample(size, settings.seed), what, notes)
        wanted = diversity(*read(batch), batch.cluster)
        theirs = self._entropy(subject, mixed, name, "mixed prompts")
        return as_diverse(mixed, theirs, *read(mixed), wanted, self.n(name), settings.seed)


def prepare(settings: RunConfig, write: bool = True, subject: Model | None = None) -> Scan:
    """Check everything that can be checked before torch is imported; with `write`, make the run folders too.

    Args:
        subject: The model, where it is loaded already.

    Raises:
        UserError: a request that cannot be met, with the remedy.
    """
    file, folder = settings.prompts_file, settings.prompts_from
    sources = [settings.domains, settings.tasks, settings.processes, file is not None, folder is not None]
    if sum(map(bool, sources)) > 1:
        raise UserError("--domain, --task, --process, --prompts and --prompts-from exclude each other; give one")
    own = folder is not None or (file is not None and not file.startswith(DOCUMENTS))  # taken as they are
    if settings.n is not None and own:
        raise UserError(
            f"--n {settings.n}: prompts of your own are taken as they are; --limit {settings.n} takes the first"
        )
    if settings.chat and (settings.processes or settings.tasks):
        raise UserError("--chat reads prompts as messages: leave out --process and --task")
    if settings.positions != "last" and (settings.processes or settings.tasks):
        raise UserError(f"--positions {settings.positions}: a task or process has queries of its own; leave it out")
    located = settings.locate()
    if subject is not None and (loaded := subject.facts.get("revision")) != located.revision:
        raise UserError(
            f"{settings.model} was loaded at commit {loaded} and is now at {located.revision}: load it again, or with "
            f"revision={loaded!r}"
        )
    if not any(sources) and hub.tunnel(located.path):
        settings = replace(settings, tasks=(hub.tunnel_task(located.path),))
    chosen = probes.chosen(settings.probes)
    found = pools(settings, located)
    stratify = not (settings.tasks or settings.processes or own)
    edits = tuple(edit.identity for edit in subject.edits) if subject is not None else ()
    asked = Scan(settings, located, chosen, found, stratify, Path(settings.out or "."), edits)
    if not settings.out:
        spec = digest({name: asked.spec(name) for name in found})
        asked = replace(asked, out=folders.run_folder(settings.model, located, "+".join(found), spec))
    for name in found if write else ():
        folders.check_folder(asked.folder(name), digest(asked.spec(name)))
    return asked


# ---- the scan as it runs --------------------------------------------------------------------------------------------


def perform(
    asked: Scan, subject: Model | None = None, preview: bool = False, write: bool = True
) -> Iterator[tuple[Path, Record]]:
    """Load the model unless given, scan each pool, save each record, then write the page. Yields (folder, record).

    Records of several pools are judged together, as the terminal and the page count their claims together. Where
    controls are still to be read, the page is written after the model's own pass of each pool, as a preview; with
    `preview` nothing else is read, and that page is all that is written. Without `write` no file is.
    One of several processes makes its share of the captures; the first of a launcher's then waits for the others and
    goes on, any other, and one of a job array, yields nothing.
    """
    page, store = asked.out / "report.html", str(captures_folder())
    if subject is None and write and not preview and (earlier := asked.finished):
        first_word(f"{asked.out} holds this run; remove it to measure again", unseen())
        folders.write_page(asked.out, list(earlier.values()))
        yield from earlier.items()
        return
    from llmgeom.commands.distributed import Share  # torch: takes seconds to import
    from llmgeom.run import Run, read_all

    subject = asked.settings.subject(asked.located, subject)
    share = Share.given() if write else None
    if share is not None and not share.made([partial(asked.plan, subject, name) for name in asked.pools], store):
        return
    runs: dict[str, Run] = {}
    seen: list[Record] = []
    for name in asked.pools:
        run = Run(asked.plan(subject, name, first=write, preview=preview), store)
        if write and (preview or run.waits):
            with within(name):
                seen.append(run.preview())
            folders.write_page(asked.out, seen)
            first_word(f"preview, values without controls: {page}", unseen())
        if not preview:
            runs[name] = Run(asked.plan(subject, name), store) if NOT_YET in run.plan.notes else run
    if preview:
        yield from zip(map(asked.folder, asked.pools), seen, strict=True)
        return
    read_all(runs)
    records = []
    for name, run in runs.items():
        with within(name):
            records.append(run.record())
    judged = claims.judged_together([record.results for record in records])
    records = [replace(record, results=results) for record, results in zip(records, judged, strict=True)]
    for name, record in zip(runs, records, strict=True):
        if write:
            folders.save(record, asked.folder(name))
        yield asked.folder(name), record
    if write:
        folders.write_page(asked.out, records)
