"""The prompts of a scan, and the further samples that probes compare them with."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

from llmgeom import probes
from llmgeom.cache.shards import captures_folder
from llmgeom.commands.scans.plan import Plan
from llmgeom.model.tokenizing import fitting
from llmgeom.probe import MATCHED, MIXED, WHOLE, Batch, UserError
from llmgeom.progress import tell
from llmgeom.prompts import pool as pools
from llmgeom.prompts.domains import Domain

if TYPE_CHECKING:
    import numpy as np

    from llmgeom.model.subject import Subject

NOT_YET = "the mixed prompts that a domain is compared with are not read yet"
Drawn = tuple[Batch, dict[str, Batch], list[str]]  # prompts, second samples by name, and why one could not be drawn


def sampled(plan: Plan, subject: Subject, name: str) -> Drawn:
    """The prompts to scan with all further samples; see `Drawing`."""
    return Drawing(plan, subject, name).whole()


@dataclass
class Drawing:
    """The prompts of one scan, and by name the further samples that a probe wants.

    A pool is spread over entropy. A domain other than mixed is compared with mixed prompts as diverse as its own.

    Attributes:
        notes: what was left out, and why.
    """

    plan: Plan
    subject: Subject
    name: str
    notes: list[str] = field(default_factory=list)

    def whole(self) -> Drawn:
        """The prompts and every further sample that a probe wants and this pool can give."""
        plan, pool = self.plan, self.plan.pools[self.name]
        if pool.source["kind"] == "task":
            from llmgeom import wind_tunnels

            of = pool.source
            every = wind_tunnels.load_world(of["name"]).sample(of["n"], of["seed"], of["split"])
            return pool, {WHOLE: every}, plan.doubts(self.name)
        if not plan.stratify:
            return pool, {}, []
        samples = {}
        if self.compared:
            try:
                samples[MATCHED] = self._as_diverse()
            except UserError as refusal:  # a small pool cannot give it
                self.notes.append(f"no sample of prompts '{MATCHED}': {refusal}")
        return self.prompts, samples, self.notes

    def first(self) -> Drawn:
        """The prompts alone, for a preview."""
        return self.prompts, {}, [*self.notes, *([NOT_YET] if self.compared else [])]

    @property
    def compared(self) -> bool:
        """Whether a probe of this scan compares these prompts with mixed ones."""
        wanted = frozenset().union(*(module.NEEDS.samples for module in probes.known(self.plan.probes).values()))
        return MATCHED in wanted and self.name != MIXED and self.plan.pools[self.name].source["kind"] == "domain"

    @cached_property
    def _pool(self) -> tuple[Batch, np.ndarray]:
        """The candidates that the model can read, and their entropies."""
        pool = self._readable(self.plan.pools[self.name], "prompts of the pool")
        return pool, self._entropy(pool, "the pool")

    @cached_property
    def prompts(self) -> Batch:
        """The prompts to scan, spread over the entropies of the pool."""
        return pools.stratify(*self._pool, self.n, seed=self.seed)

    @property
    def n(self) -> int:
        return self.plan.n(self.name)

    @property
    def seed(self) -> int:
        return self.plan.request.seed

    def _readable(self, of: Batch, what: str) -> Batch:
        """The prompts that the model has positions for."""
        kept = fitting(self.subject, of)
        if len(kept) < len(of):
            longer = f"have more than {self.subject.facts['positions']} tokens"
            self.notes.append(f"{len(of) - len(kept)} of {len(of)} {what} {longer}: left out")
        return kept

    def _entropy(self, of: Batch, what: str) -> np.ndarray:
        """[prompt] the model's next-token entropy, bits."""
        return self.subject.entropy(
            of,
            batch_tokens=self.plan.request.batch_tokens,
            store=str(captures_folder()),
            progress=partial(tell, f"{self.name}: entropy of {what}"),
        )

    def _ids(self, of: Batch) -> list[list[int]]:
        """The tokens of each prompt."""
        tokens = self.subject.tokens(of)
        return [row[:length] for row, length in zip(tokens.data.tolist(), tokens.lengths.tolist(), strict=True)]

    def _read(self, of: Batch) -> tuple[list[list[int]], list[list[int]]]:
        """The tokens of each prompt, and those at the positions that are measured."""
        ids = self._ids(of)
        return ids, [[row[at] for at in self.plan.request.read(len(row))] for row in ids]

    def _as_diverse(self) -> Batch:
        """Mixed prompts as diverse as these, from the pool that a scan of mixed prompts reads as well."""
        asked = self.plan.request
        size = min(pools.candidates(asked.n, asked.limit), Domain(MIXED).size())
        mixed = self._readable(Domain(MIXED).sample(size, self.seed), "mixed prompts to compare with")
        wanted = pools.diversity(*self._read(self.prompts), self.prompts.cluster)
        theirs = self._entropy(mixed, "mixed prompts")
        return pools.as_diverse(mixed, theirs, *self._read(mixed), wanted, self.n, self.seed)
