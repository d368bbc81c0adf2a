"""Division of a scan's captures among the processes of a launcher, which share a disk."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from llmgeom.errors import UserError
from llmgeom.model import running
from llmgeom.model.passes import Pass
from llmgeom.plan import Plan
from llmgeom.probe import NO_CONTEXT, PERMUTED, UNTRAINED
from llmgeom.progress import tell

PATIENCE = 1800.0  # seconds without a new shard after which a process counts as lost
LOOK = 0.2


@dataclass
class Share:
    """One process of `count` that accelerate or torchrun started: shards are assigned round-robin across all captures
    of the run. The first process continues when all shards are stored.
    """

    index: int
    count: int
    works: list[Pass] = field(default_factory=list, repr=False)
    _turn: int = 0

    @classmethod
    def given(cls) -> Share | None:
        """From a launcher's environment variables; None for a single process."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world < 2:
            return None
        if not (rank := os.environ.get("RANK", "")).isdecimal() or not int(rank) < world:
            raise UserError(
                f"WORLD_SIZE is {world} and RANK {rank!r}: expected 0 to {world - 1}, as a launcher sets it"
            )
        return cls(int(rank), world)

    def take(self, shards: int, whole: bool = False) -> list[int]:
        """The shards of this worker among the next `shards`; all or none of them if `whole`."""
        mine = [i for i in range(shards) if (self._turn + i * (not whole)) % self.count == self.index]
        self._turn += 0 if whole else shards
        return mine

    def fill(self, plan: Plan, store: str) -> None:
        """Capture the shards of this worker. An untrained control is built only if this worker has one of its shards.

        The control without context is left to the process that measures: it takes means over all shards of the model.
        """
        subject, controls, built = plan.subject, len(plan.draws.get(UNTRAINED, ())), None
        works = [work for work in plan.every(store) if work[0] != NO_CONTEXT]
        with subject.controls(store) as control:
            for done, (kind, seed, work) in enumerate(works, 1):
                # Building a control costs more than a few prompts: if there are enough, each stays with one process.
                drawn = kind in (UNTRAINED, PERMUTED)
                whole = drawn and controls >= self.count
                self.works.append(work)
                if missing := work.missing(self.take(len(work.groups), whole)):
                    if seed is not None and drawn and (not built or built.facts["untrained"] != seed):
                        built = None  # released before the next one is made
                        built = control(seed)
                    running.fill(built or subject, work, missing)
                last = done == len(works) or works[done][:2] != (kind, seed)
                self._turn += whole and last
                tell(f"process {self.index} of {self.count}: captures", done, len(works))

    def made(self, plans: Iterable[Callable[[], Plan]], store: str) -> bool:
        """Make this process's share of the captures of some plans; returns whether it then goes on with the run, when
        the others have made theirs."""
        with self.watched():
            for make in plans:
                plan = make()
                plan.check_room(store)
                self.fill(plan, store)
            if self.index == 0:
                self.wait()
        return self.index == 0

    def wait(self) -> None:
        """Wait until the other workers have stored their shards.

        Raises UserError with the number of missing shards if no shard was stored for half an hour.
        """
        total = sum(len(work.groups) for work in self.works)
        last, since = -1, time.monotonic()
        while (stored := self.stored()) < total:
            if stored != last:
                last, since = stored, time.monotonic()
            elif time.monotonic() - since > PATIENCE:
                raise UserError(
                    f"{self._lacking()} and none has come for {PATIENCE / 60:.0f} minutes: a process is lost, or its "
                    "LLMGEOM_CACHE is another folder. What is there is kept; the same command goes on"
                )
            tell("shards of all processes", stored, total)
            time.sleep(LOOK)

    def stored(self) -> int:
        """Number of stored shards of the run."""
        count = 0
        for work in self.works:
            if work.store is not None:
                work.store.refresh()
            count += len(work.groups) - len(work.missing(range(len(work.groups))))
        return count

    def _lacking(self) -> str:
        total = sum(len(work.groups) for work in self.works)
        return f"{total - self.stored()} of {total} shards are missing"

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """In this context, a launcher's SIGTERM raises UserError with the missing shards and how to continue.

        A launcher ends all processes when one is lost. The first process reports; the second, if the first was lost.
        """

        def ended(*_: Any) -> None:
            raise UserError(
                f"another of the {self.count} processes of this run was lost, and the launcher ended this one. So far "
                f"{self._lacking()}; what is there is kept, and the same command goes on"
            )

        before = signal.signal(signal.SIGTERM, ended) if self.index < 2 else None
        try:
            yield
        finally:
            if before is not None:
                signal.signal(signal.SIGTERM, before)
