"""Stores activations on disk as content-hashed shards. Stale, truncated or misplaced shards are never read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmgeom.errors import UserError
from llmgeom.files import digest, remove_unfinished, write_whole

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA = 2  # of the shards; schema 1 had its hashes in a separate manifest
NAME = re.compile(r"(\d{5,})-([0-9a-f]{32})\.safetensors")
ASIDE = "set-aside"
FREE = "free space (`llmgeom cache rm`), or set LLMGEOM_CACHE to a folder elsewhere"
RUN, SPEC, LOCK = "run.json", "spec.json", ".lock"

_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """LLMGEOM_CACHE, else XDG_CACHE_HOME/llmgeom, else ~/.cache/llmgeom. An empty variable counts as not set."""
    if chosen := os.environ.get("LLMGEOM_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmgeom"


def captures_folder() -> Path:
    """The folder of captures, which contains RUN/CAPTURE/SHARD."""
    return cache_folder() / "captures"


def run_key(run: Mapping[str, Any]) -> str:
    """The name of a run's folder, which contains its captures."""
    return digest(run)[:16]


def size_text(size: float) -> str:
    """A number of bytes as text: "3.2 GB"."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def files(folder: Path) -> Iterator[os.stat_result]:
    """The `stat` of every file in a folder tree, if there is one, without those renamed or removed meanwhile."""
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISREG((found := path.stat()).st_mode):
                yield found


def room(folder: str | os.PathLike, needed: float, what: str = "the captures take") -> None:
    """Raises UserError if the disk of `folder` has fewer than `needed` bytes free."""
    folder = Path(folder)
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise UserError(
            f"{what} about {size_text(needed)} and {folder} has {size_text(free)} free: free space "
            "(`llmgeom cache rm`), set LLMGEOM_CACHE to a folder on a larger disk"
            + ", or ask for fewer prompts or probes"
            * (what == "the captures take")
        )


def header(data: bytes) -> dict[str, Any]:
    """A shard's description of itself: schema, of (RUN/CAPTURE), shard, and the `about` of `Store.write`.

    Raises ValueError, KeyError or TypeError: the data have none.
    """
    length = int.from_bytes(data[:8], "little")
    return dict(json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["llmgeom"]))


def flaw(name: str, data: bytes, of: str) -> str:
    """Why a file is not a readable shard of the capture `of` (RUN/CAPTURE); empty if it is."""
    known = NAME.fullmatch(name)
    if known is None:
        return f"its name is not that of a shard of schema {SCHEMA}"
    if hashlib.sha256(data).hexdigest()[:32] != known[2]:
        return "it was cut or changed: its bytes do not have the hash in its name"
    try:
        about = header(data)
    except (ValueError, KeyError, TypeError):
        return "it does not say which capture it is of"
    if about.get("schema") != SCHEMA:
        return f"it has schema {about.get('schema')!r} and this version reads {SCHEMA}"
    if (about.get("of"), about.get("shard")) != (of, int(known[1])):
        return f"it is shard {about.get('shard')} of {about.get('of')}"
    return ""


def is_being_made(folder: Path) -> bool:
    """Whether another process holds the lock of a capture's folder."""
    from filelock import FileLock, Timeout

    try:
        with FileLock(folder / LOCK, timeout=0):
            return False
    except Timeout:
        return True
    except OSError:  # a file system without locks
        return False


class Store:
    """The shards of one capture, in a folder named by the hash of everything that determines its bytes.

    Other weights, prompts, sites or versions give another folder, so nothing stale is read, and the same command
    continues after a kill. A file whose bytes do not have the hash in its name, or that belongs to another capture, is
    moved to `set-aside` with a warning and captured again.

    Args:
        root: The folder of all captures.
        run: The facts that all captures of one model share: weights, dtype ... Their folders lie in one folder.
        spec: The facts that distinguish this capture from others of its run: prompts, positions, plan, sites, edits.
        about: Descriptions of run and capture for `llmgeom cache ls`; they are not in the hash.
    """

    def __init__(
        self,
        root: str | os.PathLike,
        run: Mapping[str, Any],
        spec: Mapping[str, Any],
        about: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {}),
    ) -> None:
        self.of = f"{run_key(run)}/{digest(spec)[:24]}"
        self.folder = Path(root) / self.of
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path, what, told in ((self.folder.parent / RUN, run, about[0]), (self.folder / SPEC, spec, about[1])):
                remove_unfinished(path.parent, path.name)
                body = {"schema": SCHEMA, "spec": what, "about": told}
                text = json.dumps(body, sort_keys=True, indent=1).encode() + b"\n"
                if not path.exists() or path.read_bytes() != text:
                    write_whole(path, text, FREE, durable=False)
        except OSError as error:
            raise UserError(
                f"{self.folder} cannot be made ({error.strerror}); set LLMGEOM_CACHE to a folder that can be written"
            ) from error
        self.refresh()

    def refresh(self) -> None:
        """List the shards again."""
        self._there: dict[int, Path] = {}
        self._contents: dict[int, tuple[int, dict[str, Any]]] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            known = NAME.fullmatch(path.name)
            if known is None:
                self._set_aside(path, flaw(path.name, b"", self.of))
            else:
                self._there.setdefault(int(known[1]), path)

    def __contains__(self, index: int) -> bool:
        """Whether shard `index` is listed; `read` checks that it is intact."""
        return index in self._there

    def read(self, index: int) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The tensors of shard `index` and its header; None if it is absent or damaged (it is then set aside)."""
        from safetensors.torch import load

        if (path := self._there.get(index)) is None:
            return None
        try:
            data = path.read_bytes()
        except OSError:
            del self._there[index]
            return None
        if why := flaw(path.name, data, self.of):
            del self._there[index]
            self._set_aside(path, why)
            return None
        return load(data), header(data)

    def names(self, index: int) -> tuple[str, ...]:
        """The names of the tensors in a shard that `read` found intact."""
        return tuple(sorted(self._listed(index)[1]))

    def rows(self, name: str, shards: int, source: Tensor) -> Tensor:
        """One tensor across all shards that `read` found intact; the other tensors stay on disk.

        Args:
            name: The tensor.
            shards: Number of shards.
            source: [row] the number of each row, counted through the shards in order.

        Returns:
            [row ...], in the stored dtype.

        Raises:
            UserError: A shard was removed or truncated meanwhile.
        """
        import torch

        ordered, place = source.sort()
        end, whole = 0, None
        for index in range(shards):
            part = self._tensor(index, name)
            if whole is None:  # the longest prompts come first: no later attention row is wider
                whole = part.new_zeros(len(source), *part.shape[1:])
            begin, end = end, end + len(part)
            first, last = torch.searchsorted(ordered, torch.tensor([begin, end])).tolist()
            columns = (..., slice(part.shape[-1])) if part.dim() > 1 else ()
            whole[(place[first:last], *columns)] = part[ordered[first:last] - begin]
        assert whole is not None
        return whole

    def _tensor(self, index: int, name: str) -> Tensor:
        """One tensor of a shard, which the library reads as a separate file.

        The library can map the whole file instead, but opening and listing it for every tensor takes three times as
        long, and the mapped part counts as memory.
        """
        from safetensors.torch import load

        begin, entries = self._listed(index)
        first, last = entries[name]["data_offsets"]
        alone = json.dumps({name: {**entries[name], "data_offsets": [0, last - first]}}).encode()
        with self._reading(index) as file:
            file.seek(begin + first)
            data = file.read(last - first)
            if len(data) < last - first:
                raise OSError("it was cut")
        return load(b"".join((len(alone).to_bytes(8, "little"), alone, data)))[name]

    def _listed(self, index: int) -> tuple[int, dict[str, Any]]:
        """The offset of a shard's numbers, and its tensors: dtype, shape, offsets."""
        if index not in self._contents:
            with self._reading(index) as file:
                length = int.from_bytes(file.read(8), "little")
                entries = json.loads(file.read(length))
            del entries["__metadata__"]
            self._contents[index] = 8 + length, entries
        return self._contents[index]

    @contextlib.contextmanager
    def _reading(self, index: int) -> Iterator[Any]:
        path = self._there[index]
        try:
            with path.open("rb") as file:
                yield file
        except (OSError, ValueError) as error:
            raise UserError(f"{path} was there and cannot be read any more ({error}); run the command again") from error

    def write(self, index: int, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Write shard `index` whole or not at all, with `about` in its header."""
        from safetensors.torch import save

        told = {"schema": SCHEMA, "of": self.of, "shard": index, **about}
        metadata = {"llmgeom": json.dumps(told, sort_keys=True)}
        data = save({key: tensor.contiguous() for key, tensor in tensors.items()}, metadata)
        path = self.folder / f"{index:05d}-{hashlib.sha256(data).hexdigest()[:32]}.safetensors"
        write_whole(path, data, FREE, durable=False)
        self._there[index] = path
        self._contents.pop(index, None)

    @contextlib.contextmanager
    def writing(self, shared: bool = False) -> Iterator[None]:
        """Hold the capture's lock while shards are written; a second process waits for it and then finds them stored.

        Args:
            shared: For processes that divide the shards: they do not wait for each other.
        """
        from filelock import FileLock, Timeout

        lock = FileLock(self.folder / LOCK)
        with contextlib.ExitStack() as stack:
            stack.callback(lock.release)
            with contextlib.suppress(OSError):  # without locks two processes may write the same shard with equal bytes
                try:
                    lock.acquire(timeout=0)
                except Timeout:
                    if not shared:
                        _log.warning("another process is making %s: waiting for it", self.folder)
                        lock.acquire()
            if not shared:
                remove_unfinished(self.folder, "*.safetensors")
            self.refresh()
            yield

    def _set_aside(self, path: Path, why: str) -> None:
        place = self.folder / ASIDE / path.name
        try:
            place.parent.mkdir(exist_ok=True)
            os.replace(path, place)
        except OSError as error:
            raise UserError(f"{path}: {why}, and it cannot be set aside ({error.strerror}); remove it") from error
        _log.warning("%s: %s. It was set aside in %s and is captured again", path, why, place.parent)
