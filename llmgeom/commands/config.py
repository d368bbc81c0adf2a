"""What commands share: which model, where the run goes, and the command that repeats it."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar

from llmgeom.errors import UserError, redact
from llmgeom.files import digest, remove_unfinished, write_whole
from llmgeom.model import hub
from llmgeom.record import Record

if TYPE_CHECKING:
    from llmgeom.model.subject import Backend, Subject

Word = TypeVar("Word", bound=str)


@dataclass(frozen=True)
class Request:
    """What is asked of a command that reads one model; its fields are the command's flags.

    VERB    the command, one word or two; FLAGS, the flag of a field that is not called as its field; LISTED, fields
            whose flag takes several values at once, with commas between.
    """

    VERB: ClassVar[str] = ""
    FLAGS: ClassVar[dict[str, str]] = {}
    LISTED: ClassVar[tuple[str, ...]] = ()

    model: str = "pocket:pythia"
    revision: str | None = None
    dtype: str | None = None
    quantize: str | None = None
    device: str | None = None
    device_map: str | None = None
    backend: Backend = "transformers"
    offline: bool = False
    trust_remote_code: bool = False

    def command(self) -> str:
        """The command that repeats this: what differs from the defaults, less where the output goes."""
        words = ["llmgeom", *self.VERB.split()]
        for field in fields(self):
            value = getattr(self, field.name)
            if value == field.default or field.name == "out":
                continue
            flag = self.FLAGS.get(field.name, "--" + field.name.replace("_", "-"))
            if field.name in self.LISTED:
                words += [flag, ",".join(map(str, value))]
            elif value is True:
                words.append(flag)
            else:
                for one in value if isinstance(value, tuple) else (value,):
                    words += [flag, str(one)]
        return redact(shlex.join(words))

    def spec(self, located: hub.Located, without: tuple[str, ...] = (), **more: str) -> str:
        """Hash of what decides the bytes of a run: every flag but `without`, where the output goes, what it runs on and
        whether the hub may be asked; the commit that was found; and what else is named."""
        left_out = {"out", "offline", "device", *without}
        asked = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in left_out}
        return digest(asked | {"revision": located.revision} | more)

    def locate(self) -> hub.Located:
        """Where the model is. Raises UserError where it is not."""
        return hub.locate(self.model, self.revision, offline=self.offline, trust_remote_code=self.trust_remote_code)

    def load(self) -> Subject:
        """The model, checked."""
        from llmgeom.model.subject import Subject

        return Subject.load(
            self.model,
            self.revision,
            dtype=self.dtype,
            quantize=self.quantize,
            device=self.device,
            device_map=self.device_map,
            backend=self.backend,
            offline=self.offline,
            trust_remote_code=self.trust_remote_code,
        )


def run_folder(model: str, located: hub.Located, what: str, spec: str) -> Path:
    """Where a run goes by default: runs/MODEL-WHAT-HASH."""
    called = Path(located.path).resolve().name if located.kind == "local" else model
    return Path("runs") / f"{safe(called)}-{what}-{spec[:8]}"


def safe(name: str) -> str:
    """A name that every file system takes."""
    return "".join(c if c.isalnum() or c in "._" else "-" for c in name)


def numbers(flag: str, given: str, otherwise: str, example: str) -> tuple[int, ...]:
    """Whole numbers with commas between. Raises UserError, with what else the flag takes."""
    if not all(part.strip().isdecimal() for part in given.split(",")):
        raise UserError(f"{flag} {given}: expected {otherwise}, or numbers with commas between, e.g. {example}")
    return tuple(int(part) for part in given.split(","))


def one_of(flag: str, given: str, known: Sequence[Word]) -> Word:
    """The one that was given. Raises UserError where it is none of them."""
    for one in known:
        if one == given:
            return one
    raise UserError(f"{flag} {given}: expected {' or '.join(known)}")


def keep(record: Record, out: Path) -> None:
    """Save the record and its page."""
    from llmgeom.reports import page

    record.save(out)
    write_whole(out / "report.html", page([record]).encode())


def check_folder(folder: Path, spec: str) -> None:
    """Make the run folder. Raises UserError where it cannot be written or holds another run."""
    existing = folder / "record.json"
    if existing.exists():
        try:
            other = json.loads(existing.read_text(encoding="utf-8")).get("facts", {}).get("spec")
        except (ValueError, OSError, AttributeError, RecursionError):
            other = "unreadable"
        if other != spec:
            raise UserError(f"{folder} holds another run; choose another --out, or remove it first")
    elif (folder / "report.html").exists():
        raise UserError(f"{folder} holds a report.html that is not this run's; choose another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(folder)
        probe = folder / f".writable.{os.getpid()}.tmp"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}); choose another --out") from error
