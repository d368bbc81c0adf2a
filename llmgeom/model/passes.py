"""What one capture runs and keeps: batches, sites, observers, and the shards that they are written to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from llmgeom.batch import Batch, Rows, Tokens
from llmgeom.cache.shards import Store, room
from llmgeom.errors import Unavailable
from llmgeom.model.capture import Key, Site
from llmgeom.model.edits import Edit


@dataclass(frozen=True)
class Step:
    """One batch of a pass while its tensors are in memory; what an observer reads.

    Attributes:
        batch: the inputs of this step, with their columns and posterior.
        tokens: the same as the model reads them, [input seq ...], padded.
        lengths: [input] real tokens of each input.
        prompt, position: [row] input and position of each queried row.
        all_prompt, all_position: [row] the same of every real position.
        log_probs: [row vocabulary] float32, nats: next-token log-probabilities at the queried rows.
        unembed: the logit lens, [row d_model] -> [row vocabulary] log-probabilities in nats.
        tokenizer: of the model; None for one that reads token ids.
    """

    batch: Batch
    tokens: Tensor
    lengths: Tensor
    prompt: Tensor
    position: Tensor
    all_prompt: Tensor
    all_position: Tensor
    log_probs: Tensor
    unembed: Callable[[Tensor], Tensor]
    tokenizer: Any
    _kept: Mapping[Key, Tensor]
    _everywhere: Mapping[Key, Tensor]

    def layers(self, site: Site) -> list[Tensor]:
        """[row ...] a layer, at the queried rows."""
        return _by_layer(self._kept, site)

    def everywhere(self, site: Site) -> list[Tensor]:
        """[row ...] a layer, at every real position."""
        return _by_layer(self._everywhere, site)


def _by_layer(tensors: Mapping[Key, Tensor], site: Site) -> list[Tensor]:
    return [tensors[key] for key in sorted((key for key in tensors if key[0] == site), key=lambda key: key[1])]


@dataclass(frozen=True)
class Observer:
    """Reduces the tensors of each step to small arrays, which are kept with the capture.

    Attributes:
        name: prefix of the arrays: `Capture.observed("NAME.ARRAY")`.
        function: Step -> name of an array -> [row ...], one entry a queried row.
        sites: read at the queried rows. everywhere: read at every real position.
        samples: names of the samples that it reads ("" is the main one).
        version: what tells this code from an earlier one in the cache; by default a hash of the function's module.
        row_bytes: about how many bytes a row takes, for the estimate of disk space.
    """

    name: str
    function: Callable[[Step], Mapping[str, Tensor]]
    sites: frozenset[Site] = frozenset()
    everywhere: frozenset[Site] = frozenset()
    samples: tuple[str, ...] = ("",)
    version: str = ""
    row_bytes: int = 1024

    @property
    def wanted(self) -> frozenset[Site]:
        """Sites that it reads anywhere."""
        return self.sites | self.everywhere

    def observe(self, step: Step) -> dict[Key, Tensor]:
        """The arrays of one step under their keys. Raises ValueError where one has not an entry a row."""
        arrays = self.function(step)
        for name, array in arrays.items():
            if len(array) != len(step.prompt):
                raise ValueError(
                    f"observer {self.name!r}: {name} has {len(array)} entries for {len(step.prompt)} queried rows; "
                    "return one entry a row"
                )
        return {(f"{self.name}.{name}", -1): array.detach().cpu().clone() for name, array in arrays.items()}


@dataclass(frozen=True)
class Work:
    """One capture before it runs: a pure function of model facts, batch and options.

    where     [batch seq] bool: the rows to keep.
    batches   the plan: which inputs run together; sizes: bytes that each gives (about); groups: batches that share a
              shard.
    store     where shards are written; None for nowhere.
    """

    batch: Batch
    tokens: Tokens | Rows
    where: Tensor
    sites: frozenset[Site]
    edits: tuple[Edit, ...]
    batches: tuple[tuple[int, ...], ...]
    sizes: list[int]
    groups: tuple[range, ...]
    observers: tuple[Observer, ...] = ()
    store: Store | None = field(default=None)

    @cached_property
    def order(self) -> Tensor:
        """[row]: which row of the batches, one after another, each row of the capture is, whatever the plan was."""
        members = torch.tensor([i for batch in self.batches for i in batch])
        return torch.argsort(members.repeat_interleave(self.where.sum(1)[members]), stable=True)

    @property
    def everywhere(self) -> frozenset[Site]:
        """Sites that observers read at every real position."""
        return frozenset().union(*(observer.everywhere for observer in self.observers))

    @property
    def step_sites(self) -> frozenset[Site]:
        """Sites at the queried rows: those to keep and those that observers read."""
        return self.sites.union(*(observer.sites for observer in self.observers))

    def missing(self, shards: Iterable[int]) -> list[int]:
        """Those of these shards that are not stored."""
        return [i for i in shards if self.store is None or i not in self.store]

    @contextmanager
    def writing(self, shards: Sequence[int], shared: bool = False) -> Iterator[None]:
        """Lock the store and check its disk space while these shards are made; see `Store.writing`."""
        if self.store is None:
            yield
            return
        with self.store.writing(shared):
            room(self.store.folder, sum(self.sizes[i] for n in self.missing(shards) for i in self.groups[n]))
            yield


def check_available(name: str, why: str) -> None:
    """Raise Unavailable where `why` says that a site cannot be captured."""
    if why:
        raise Unavailable(f"{name}: {why}")
