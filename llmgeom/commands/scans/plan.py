"""A scan before it runs: everything that can be checked before weights are loaded, and where its records go."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmgeom import probes
from llmgeom.batch import Batch
from llmgeom.commands import config
from llmgeom.commands.scans.request import FEWEST, RunConfig
from llmgeom.errors import NO_TOKENIZER, UserError
from llmgeom.files import digest
from llmgeom.model import hub
from llmgeom.record import Record, finished

if TYPE_CHECKING:
    from llmgeom.model.subject import Subject

SEQUENCES = 200  # of a task, where they cost nothing
DOCUMENTS = "hf:"
# Seconds over ten of each stage of a scan of SmolLM2 (mixed, float32), two cores, from an empty cache: their shares.
STAGES = {
    "entropy of": 3.0, "prompts": 1.0, "shuffled prompts": 6.0, "control without context": 1.0,
    "untrained controls": 9.0, "permuted weights": 4.5, "measuring": 3.0,
}  # fmt: skip


def files_of(located: hub.Located) -> str:
    """Hash of a model's files, so that weights written later to the same folder are noticed."""
    from llmgeom.cache.keys import of_files

    return of_files(hub.folder(located))


@dataclass(frozen=True)
class Plan:
    """A request that passed the checks: the place of the model, the probes, the prompts and the run folder.

    Attributes:
        pools: name -> candidates; stratified by entropy where `stratify` is true, else taken as they are.
        edits: the identities of the edits of every pass; commands make none.
    """

    request: RunConfig
    located: hub.Located
    probes: tuple[str, ...]
    pools: dict[str, Batch]
    stratify: bool
    out: Path
    edits: tuple[Mapping[str, Any], ...] = ()

    def subject(self, given: Subject | None) -> Subject:
        """The model, unless it is given, as it reads prompts."""
        return self.request.subject(self.located, given)

    def folder(self, name: str) -> Path:
        return self.out / re.sub(r"[^\w.+-]", "-", name) if len(self.pools) > 1 else self.out

    def save(self, name: str, record: Record) -> None:
        """Save a record in its folder; raises UserError if that holds another run by now."""
        config.save(record, self.folder(name))

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
        from llmgeom.cache.keys import of_program

        asked = self.request
        here = self.located.kind != "hub" and not (asked.device or asked.device_map)
        ours = set(self.probes) <= set(probes.names()) and not any(".py" in task for task in asked.tasks)
        if not here or not ours or os.environ.get("WORLD_SIZE", "1") != "1":  # no spec holds the user's own code
            return {}
        specs = {self.folder(name): digest(self.spec(name)) for name in self.pools}
        return finished(specs, files_of(self.located), of_program())

    def n(self, name: str) -> int:
        """How many prompts are scanned: 75 by default, as Paper III.

        In a small domain two thirds of two prompts a template, so that each fifth of the entropies gives its share.
        """
        if not self.stratify:
            return len(self.pools[name])
        return self.request.n or min(75, 4 * len(set(self.pools[name].cluster)) // 15 * 5)

    @property
    def shares(self) -> dict[str, float]:
        """How each stage of the scan starts -> its share of the time."""
        return {f"{name}: {stage}": share for name in self.pools for stage, share in STAGES.items()}

    def spec(self, name: str) -> dict[str, Any]:
        """Everything that determines the bytes of one record, as plain data."""
        from llmgeom.cache.keys import of_pool

        settings = self.request
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


def prepare(settings: RunConfig, write: bool = True, subject: Subject | None = None) -> Plan:
    """Check everything that can be checked before torch is imported; with `write`, make the run folders too.

    Args:
        subject: The model, where it is loaded already.

    Raises:
        UserError: a request that cannot be met, with the remedy.
    """
    _refuse_prompts(settings)
    located = settings.locate()
    if subject is not None and (loaded := subject.facts.get("revision")) != located.revision:
        raise UserError(
            f"{settings.model} was loaded at commit {loaded} and is now at {located.revision}: load it again, or with "
            f"revision={loaded!r}"
        )
    if not _sources(settings) and hub.tunnel(located.path):
        settings = replace(settings, tasks=(hub.tunnel_task(located.path),))
    chosen = probes.chosen(settings.probes, prompts=not settings.tasks)
    candidates = pools(settings, located)
    stratify = not (settings.tasks or settings.processes or _own_prompts(settings))
    edits = tuple(edit.identity for edit in subject.edits) if subject is not None else ()
    plan = Plan(settings, located, chosen, candidates, stratify, Path(settings.out or "."), edits)
    if not settings.out:
        spec = digest({name: plan.spec(name) for name in candidates})
        plan = replace(plan, out=config.run_folder(settings.model, located, "+".join(candidates), spec))
    for name in candidates if write else ():
        config.check_folder(plan.folder(name), digest(plan.spec(name)))
    return plan


def _sources(settings: RunConfig) -> int:
    """How many sources of prompts the flags name."""
    files = (settings.prompts_file is not None, settings.prompts_from is not None)
    return sum(map(bool, (settings.domains, settings.tasks, settings.processes, *files)))


def _own_prompts(settings: RunConfig) -> bool:
    """Whether the prompts are the user's own, which are taken as they are."""
    file = settings.prompts_file
    return settings.prompts_from is not None or (file is not None and not file.startswith(DOCUMENTS))


def _refuse_prompts(settings: RunConfig) -> None:
    """Raises UserError for flags about prompts that exclude each other."""
    if _sources(settings) > 1:
        raise UserError("--domain, --task, --process, --prompts and --prompts-from exclude each other; give one")
    if settings.n is not None and _own_prompts(settings):
        raise UserError(
            f"--n {settings.n}: prompts of your own are taken as they are; --limit {settings.n} takes the first"
        )
    if settings.chat and (settings.processes or settings.tasks):
        raise UserError("--chat reads prompts as messages: leave out --process and --task")
    if settings.positions != "last" and (settings.processes or settings.tasks):
        raise UserError(f"--positions {settings.positions}: a task or process has queries of its own; leave it out")


# ---- the prompts that a scan chooses from, by the source that its flags name ----------------------------------------


def pools(settings: RunConfig, located: hub.Located) -> dict[str, Batch]:
    """Candidates by the name of their set. Raises UserError for a source that is not there, or gives too few."""
    if settings.processes:
        return _evidence(settings, located)
    if settings.tasks:
        return _sequences(settings)
    if settings.prompts_from is not None:
        return {"prompts": _earlier(settings.prompts_from, settings.limit)}
    path = settings.prompts_file
    if path is None:
        return {name: _domain(settings, name) for name in dict.fromkeys(settings.domains or ("mixed", "math"))}
    if path.startswith(DOCUMENTS):
        return {"+".join(re.findall(r"[\w.-]+", path.removeprefix(DOCUMENTS))): _documents(settings, path)}
    return {"stdin" if path == "-" else Path(path).stem: _file(path, settings.limit)}


def _evidence(settings: RunConfig, located: hub.Located) -> dict[str, Batch]:
    """Prompts of each process, in words that are single tokens of the model's tokenizer."""
    from llmgeom.prompts import text
    from llmgeom.wind_tunnels import load_world

    processes = [load_world(spec, text=True) for spec in settings.processes]
    tokenizer, described = settings.described(located)
    if tokenizer is None:
        raise UserError(f"{located.name} {NO_TOKENIZER}")
    positions = getattr(described.get_text_config(), "max_position_embeddings", None)
    n = min(settings.n or SEQUENCES, settings.limit or sys.maxsize)
    return {
        text.title(world): text.sample(world, max(n // len(world.KS), 1), settings.seed, tokenizer, positions=positions)
        for world in processes
    }


def _sequences(settings: RunConfig) -> dict[str, Batch]:
    """Sequences of each task."""
    from llmgeom import wind_tunnels

    tasks = [wind_tunnels.load_world(spec) for spec in settings.tasks]
    n = min(settings.n or SEQUENCES, settings.limit or sys.maxsize)
    return {task.title: task.truncated(n, settings.seed, task.test_split) for task in tasks}


def _domain(settings: RunConfig, name: str) -> Batch:
    """Prompts of a domain."""
    from llmgeom.prompts.domains import Domain
    from llmgeom.prompts.pool import candidates

    domain = Domain(name)
    size = min(candidates(settings.n, settings.limit), domain.size())
    if settings.n is not None and settings.n > size:
        raise UserError(f"--n {settings.n}: {name} gives a pool of {size} prompts; ask for at most that")
    return domain.sample(size, settings.seed)


def _documents(settings: RunConfig, path: str) -> Batch:
    """Documents of a data set of the hub."""
    from llmgeom.prompts import documents
    from llmgeom.prompts.pool import candidates

    pool = documents.read(path, candidates(settings.n, settings.limit), settings.seed, offline=settings.offline)
    if len(pool) < (least := max(settings.n or FEWEST, FEWEST)):
        raise UserError(f"{path} gave {_counted(pool)}; at least {least} are needed")
    return pool


def _earlier(folder: str, limit: int | None) -> Batch:
    """The prompts of an earlier run. They keep their name, so that pages do not name one set twice."""
    if Path(folder).is_file():
        raise UserError(f"--prompts-from {folder} is a file: give the folder of an earlier run, or --prompts {folder}")
    source = Record.load_one(folder).source  # refuses what is no whole run
    if source.get("kind") == "task":
        raise UserError(
            f"--prompts-from {folder}: a task's sequences are no text; give --task {source['name']}, and a model that "
            "was trained on it"
        )
    batch = _file(str(Path(folder) / "prompts.jsonl"), limit)
    return replace(batch, source={**batch.source, "name": str(source.get("name", "prompts"))})


def _file(path: str, limit: int | None) -> Batch:
    """The first prompts of a file."""
    from llmgeom.prompts import files

    batch = files.read(path)
    batch = batch.take(range(min(len(batch), limit or len(batch))))
    if len(batch) < FEWEST:
        raise UserError(f"{path} holds {_counted(batch)}; a scan needs at least {FEWEST}")
    return batch


def _counted(batch: Batch) -> str:
    return f"{len(batch)} prompt{'s' * (len(batch) != 1)}"
