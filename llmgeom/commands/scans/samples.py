"""The prompts of a scan, and the further samples that probes compare them with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

from llmgeom import probes
from llmgeom.cache.shards import captures_folder
from llmgeom.commands.scans.plan import Plan
from llmgeom.model.tokenizing import fitting
from llmgeom.probe import LENGTH, MATCHED, MIXED, ONE_TOKEN, UNSTRATIFIED, WHOLE, Batch, UserError
from llmgeom.progress import tell
from llmgeom.prompts import pool as pools
from llmgeom.prompts.domains import Domain

if TYPE_CHECKING:
    import numpy as np

    from llmgeom.model.subject import Subject

FINAL = "the"  # the word that stands in the most templates of every domain
NOT_YET = "what some metrics compare with is not read yet: other prompts, prompts of one final token or of one length"
Drawn = tuple[Batch, dict[str, Batch], list[str]]  # prompts, second samples by name, and why one could not be drawn


def sampled(plan: Plan, subject: Subject, name: str) -> Drawn:
    """The prompts to scan with all further samples; see `Drawing`."""
    return Drawing(plan, subject, name).whole()


@dataclass
class Drawing:
    """The prompts of one scan, and by name the further samples that a probe wants.

    A pool is spread over entropy, and a plain sample of it is drawn too. A domain also has prompts that all end in one
    token; and one other than mixed is compared with mixed prompts, and with mixed prompts as diverse as its own.

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
            every = wind_tunnels.load_task(of["name"]).sample(of["n"], of["seed"], of["split"])
            return pool, {WHOLE: every}, plan.doubts(self.name)
        if not plan.stratify:
            return pool, {}, []
        possible = self._possible()
        samples = {}
        for what in sorted(self.wanted & possible.keys()):
            try:
                samples[what] = possible[what]()
            except UserError as refusal:  # a small pool cannot give each
                self.notes.append(f"no sample of prompts '{what}': {refusal}")
        return self.prompts, samples, self.notes

    def first(self) -> Drawn:
        """The prompts alone: pools of the further samples are most of what a model reads before its first page."""
        return self.prompts, {}, [*self.notes, *([NOT_YET] if self.wanted else [])]

    @property
    def wanted(self) -> frozenset[str]:
        """Names of the further samples that the probes of this scan read."""
        return frozenset().union(*(module.NEEDS.samples for module in probes.known(self.plan.probes).values()))

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

    def _possible(self) -> dict[str, Callable[[], Batch]]:
        """Each further sample that this pool may give, and how it is drawn."""
        (pool, entropy), n, seed = self._pool, self.n, self.seed
        possible: dict[str, Callable[[], Batch]] = {
            UNSTRATIFIED: lambda: pools.plain(pool, n, seed=seed),
            LENGTH: lambda: pools.length_matched(pool, entropy, [len(row) for row in self._ids(pool)], n, seed=seed),
        }
        if pool.source["kind"] != "domain":
            return possible
        possible[ONE_TOKEN] = self._same_end
        if self.name != MIXED and self.wanted & {MIXED, MATCHED}:
            # Another seed than the mixed scan's own: the two samples are independent.
            asked = self.plan.request
            size = min(pools.candidates(asked.n, asked.limit), Domain(MIXED).size())
            mixed = self._readable(Domain(MIXED).sample(size, seed + 1), "mixed prompts to compare with")
            theirs = self._entropy(mixed, "mixed prompts")
            wanted = pools.diversity(*self._read(self.prompts), self.prompts.cluster)
            possible[MIXED] = lambda: pools.stratify(mixed, theirs, n, seed=seed)
            possible[MATCHED] = lambda: pools.as_diverse(mixed, theirs, *self._read(mixed), wanted, n, seed)
        return possible

    def _same_end(self) -> Batch:
        """Prompts of the domain that all end in one token."""
        drawn = Domain(self.name).sample(len(self.plan.pools[self.name]), self.seed, final=FINAL)
        ending = fitting(self.subject, drawn)
        ends = [row[-1] for row in self._ids(ending)]
        last = max(set(ends), key=ends.count)
        ending = ending.take([i for i, end in enumerate(ends) if end == last])
        return pools.stratify(ending, self._entropy(ending, f"prompts that end in '{FINAL}'"), self.n, seed=self.seed)
