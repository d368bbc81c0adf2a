"""One capture as it is divided: what is read and kept of it, which prompts run together, and where it goes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from llmgeom.batch import Batch, Rows, Tokens
from llmgeom.cache.shards import Store, room
from llmgeom.model.capture import Site
from llmgeom.model.edits import Edit


@dataclass(frozen=True)
class Work:
    """All there is to do for one capture.

    where    [batch seq] bool: the rows to keep.
    batches  the plan; sizes, bytes of what each gives (about, of models whose layers differ); groups, the batches that
             share a shard.
    store    where shards are kept; None for nowhere.
    """

    batch: Batch
    tokens: Tokens | Rows
    where: Tensor
    sites: frozenset[Site]
    edits: tuple[Edit, ...]
    batches: tuple[tuple[int, ...], ...]
    sizes: list[int]
    groups: tuple[range, ...]
    store: Store | None = None

    @cached_property
    def order(self) -> Tensor:
        """[row]: which row of the batches, one after another, each row of the capture is, whatever the plan was."""
        members = torch.tensor([i for batch in self.batches for i in batch])
        return torch.argsort(members.repeat_interleave(self.where.sum(1)[members]), stable=True)

    def missing(self, shards: Iterable[int]) -> list[int]:
        """Those of these shards that are not kept."""
        return [i for i in shards if self.store is None or i not in self.store]

    @contextmanager
    def writing(self, shards: Sequence[int], shared: bool = False) -> Iterator[None]:
        """While these shards are made, in a store with room for them; see `Store.writing`."""
        if self.store is None:
            yield
            return
        with self.store.writing(shared):
            room(self.store.folder, sum(self.sizes[i] for n in self.missing(shards) for i in self.groups[n]))
            yield
