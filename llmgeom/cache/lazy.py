"""The tensors of a capture that is left on disk: one layer of one site is in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from llmgeom.cache.shards import Store
from llmgeom.model.capture import Key, OnDisk, Site


class Shelf(OnDisk):
    """(site, layer) -> tensor, read from the shards whenever it is asked for, rows in the order of the batch.

    shards  how many there are, found sound before.
    place   [row]: where in the batch's order each row of the shards belongs, one shard after another; -1 for nowhere.
    """

    def __init__(self, store: Store, shards: int, place: Tensor) -> None:
        self._store, self._shards, self._place = store, shards, place
        self._rows = int((place >= 0).sum())
        self._keys = tuple(key_of(name) for name in store.names(0)) if shards else ()

    def part(self, rows: Tensor) -> Shelf:
        number = torch.full((self._rows,), -1)
        number[rows] = torch.arange(len(rows))
        return Shelf(self._store, self._shards, number[self._place].where(self._place >= 0, -1))

    def __getitem__(self, key: Key) -> Tensor:
        if key not in self._keys:
            raise KeyError(key)
        at = 0
        for index in range(self._shards):
            part = self._store.tensor(index, name_of(key))
            if index == 0:  # the longest prompts come first: no later attention row is wider
                found = part.new_zeros(self._rows, *part.shape[1:])
            place = self._place[at : at + len(part)]
            at += len(part)
            kept = place >= 0
            if part.dim() > 1:
                found[place[kept], ..., : part.shape[-1]] = part[kept]
            else:
                found[place[kept]] = part[kept]
        return found

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def name_of(key: Key) -> str:
    """What a tensor is called in a shard."""
    return f"{key[0]}.{key[1]:03d}"


def key_of(name: str) -> Key:
    """The tensor of that name."""
    site, layer = name.rsplit(".", 1)
    return Site(site) if site in set(Site) else site, int(layer)
