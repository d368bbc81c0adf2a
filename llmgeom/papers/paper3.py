"""Paper III's numbers on any list of language models: those of the audit's runs, model by model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from llmgeom.commands.config import safe
from llmgeom.errors import UserError
from llmgeom.files import digest
from llmgeom.papers import runs as trilogy
from llmgeom.papers.published_numbers import Check
from llmgeom.papers.verdicts import Bench
from llmgeom.progress import Progress, prefixed
from llmgeom.record import Record
from llmgeom.result import Estimate

if TYPE_CHECKING:
    from llmgeom.commands.reproduce import RunConfig

POCKETS = ("pocket:pythia", "pocket:phi", "pocket:llama", "pocket:mistral")
PUBLISHED = ("EleutherAI/pythia-410m", "microsoft/phi-2", "meta-llama/Llama-3.2-1B")
QUICK = {"n": 30, "limit": 150, "controls": 39}  # and 20 draws of each null, the fewest that decide


@dataclass(frozen=True)
class Runs(trilogy.RunConfig):
    """The runs of one model."""

    VERB: ClassVar[str] = "audit"
    WHAT: ClassVar[str] = "audit"


def runs(asked: RunConfig, out: Path) -> dict[str, Runs]:
    """What is asked of each model."""
    models = asked.models or (PUBLISHED if asked.size == "full" else POCKETS[:1] if asked.quick else POCKETS)
    given = {**(QUICK if asked.quick else {}), **asked.options, "device": asked.device}
    return {m: Runs(**given, model=m, out=str(out / f"{safe(m)}-{digest({'model': m})[:4]}")) for m in models}


def planned(asked: RunConfig, tests: Sequence[Check]) -> list[str]:
    """The runs that are asked for."""
    return [one.command() for one in runs(asked, asked.folder).values()]


def benches(asked: RunConfig, tests: Sequence[Check], out: Path, progress: Progress | None = None) -> Iterator[Model]:
    """One bench a model. Raises UserError before anything is loaded where a model is not to be had."""
    every = runs(asked, out)
    for one in every.values():
        one.locate()
    for place, (model, one) in enumerate(every.items(), 1):
        yield Model(model, trilogy.perform(one, True, prefixed(progress, f"{model}, {place} of {len(every)}"))[1])


@dataclass(frozen=True)
class Model(Bench):
    """The records of one model, by run."""

    label: str
    records: Mapping[str, Record]

    def warnings(self) -> tuple[str, ...]:
        return tuple(f"{self.label}: {w}" for record in self.records.values() for w in record.warnings)


def found(bench: Model, test: Check, at: Sequence[Sequence[str]]) -> Estimate:
    """The first of the metrics (run, probe, name) that the model has."""
    tried = [trilogy.find(bench.records, *place) for place in at]
    made = next((h for h, _ in tried if h is not None), None)
    if made is None:
        raise UserError(tried[-1][1])
    return made


Model.MEASURES = {"found": found}
