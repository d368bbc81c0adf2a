"""A scan before it runs: everything that can be checked before weights are loaded, and where its records go."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmgeom import probes
from llmgeom.batch import Batch
from llmgeom.cache.shards import captures_folder
from llmgeom.commands import config
from llmgeom.commands.scans.pools import DOCUMENTS, pools
from llmgeom.commands.scans.request import RunConfig
from llmgeom.errors import UserError
from llmgeom.files import digest
from llmgeom.model import hub
from llmgeom.record import Record, finished

if TYPE_CHECKING:
    from llmgeom.model.subject import Subject

# Seconds of each stage of a scan of pocket:pythia, two cores, from an empty cache: each stage's share of the time.
STAGES = {"entropy of": 4.0, "prompts": 1.0, "shuffled prompts": 3.0, "untrained controls": 14.0, "measuring": 2.0}


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
        from llmgeom.bench.grading import Origin

        return list(Origin.of(self.located.path).doubts(wind_tunnels.load_task(self.pools[name].source["name"])))

    @property
    def finished(self) -> dict[Path, Record]:
        """Folder -> record where an earlier command finished this very run; empty where any is missing or differs."""
        from llmgeom.cache.keys import of_program

        asked = self.request
        here = self.located.kind != "hub" and not (asked.device or asked.device_map or asked.shard)
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
        """How each stage of the scan starts -> its share of the time; none with --stability, which scans again."""
        if self.request.stability:
            return {}
        return {f"{name}: {stage}": share for name in self.pools for stage, share in STAGES.items()}

    @property
    def shared(self) -> str:
        """The message of one of several processes when its share is made; empty for a launcher's."""
        shard = self.request.shard
        done = f"share {shard} is stored in {captures_folder()}; when all {(shard or '').split('/')[-1]} are made, "
        then = "bring them together (`llmgeom cache merge`) and give the same command without --shard\n"
        return done + then if shard else ""

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
    if settings.stability and settings.nulls is None:  # a repetition changes one thing, and not how much is drawn
        settings = replace(settings, nulls=config.DRAWS)
    located = settings.locate()
    if subject is not None and (loaded := subject.facts.get("revision")) != located.revision:
        raise UserError(
            f"{settings.model} was loaded at commit {loaded} and is now at {located.revision}: load it again, or with "
            f"revision={loaded!r}"
        )
    if not _sources(settings) and hub.tunnel(located.path):
        settings = replace(settings, tasks=(hub.tunnel_task(located.path),))
    chosen = probes.chosen(settings.probes, settings.protocol, prompts=not settings.tasks)
    if settings.protocol == probes.PUBLISHED and (sound := [one for one in chosen if one in probes.names()]):
        raise UserError(f"--protocol published with --probes {sound[0]}: that probe is sound; leave one of the two out")
    candidates = pools(settings, located)
    stratify = not (settings.tasks or settings.processes or _own_prompts(settings))
    edits = tuple(edit.identity for edit in subject.edits) if subject is not None else ()
    plan = Plan(settings, located, chosen, candidates, stratify, Path(settings.out or "."), edits)
    if not settings.out:
        spec = digest({name: plan.spec(name) for name in candidates})
        plan = replace(plan, out=config.run_folder(settings.model, located, "+".join(candidates), spec))
    for name in candidates if write and settings.shard is None else ():
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
    if settings.chat and (settings.processes or settings.tasks or settings.stability):
        raise UserError("--chat reads prompts as messages: leave out --process, --task and --stability")
    if settings.positions != "last" and (settings.processes or settings.tasks):
        raise UserError(f"--positions {settings.positions}: a task or process has queries of its own; leave it out")
