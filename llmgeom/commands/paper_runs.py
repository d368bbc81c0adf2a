"""The runs of language models on which the tables of `llmgeom reproduce` rest: scans, evidence, ablation, one step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmgeom import probes
from llmgeom.commands import ablate, evidence
from llmgeom.commands.config import DrawsConfig, ModelConfig, safe
from llmgeom.commands.scans.perform import perform
from llmgeom.commands.scans.plan import Plan, files_of, prepare
from llmgeom.commands.scans.request import RunConfig
from llmgeom.dynamics.resume import recorded
from llmgeom.files import digest
from llmgeom.flags import flags
from llmgeom.model import hub
from llmgeom.papers import paper3
from llmgeom.papers.paper3 import ABLATE, MATH, MIXED, SULA, SULA_PUBLISHED, LanguageModel
from llmgeom.progress import within
from llmgeom.record import Record

if TYPE_CHECKING:
    from llmgeom.papers.paper2 import NextStep


@dataclass(frozen=True)
class ModelRuns(DrawsConfig, ModelConfig):
    """The options of the runs of one model."""


def configs(config: Any, out: Path) -> list[ModelRuns]:
    """The options for each model: those named; else the pocket models, or the papers' own at the papers' scale."""
    models = config.models or paper3.PUBLISHED
    if not config.models and config.size == "small":
        models = paper3.POCKETS[:1] if config.quick or config.paper != "paper3" else paper3.POCKETS
    shared = {flag.field for flag in flags(type(config))} & {flag.field for flag in flags(ModelRuns)} - {"out"}
    given = config.values(*shared)
    if config.quick:
        given |= {name: value for name, value in paper3.QUICK.items() if name not in config.changed}
    return [ModelRuns(**given, model=m, out=str(out / f"{safe(m)}-{digest({'model': m})[:4]}")) for m in models]


def _found(config: Any, out: Path) -> list[tuple[ModelRuns, hub.Located]]:
    """The same with the place of each model. Raises UserError if one is not there."""
    return [(run, run.locate()) for run in configs(config, out)]


def _spec(run: ModelRuns, located: hub.Located) -> str:
    """Hash of everything that determines a model's runs; without a commit of the hub also its files."""
    return run.spec(located, files="" if located.revision else files_of(located))


def planned(config: Any) -> list[str]:
    """The runs that a table needs, a line for each model."""
    what = "" if config.paper == "paper2" else "scans of mixed and math prompts, evidence, ablation; "
    return [f"{run.model}: {what}{run.nulls} draws of each control" for run in configs(config, config.folder)]


def language_models(config: Any, out: Path) -> Iterator[LanguageModel]:
    """The runs of each model. Raises UserError before anything is loaded if a model is not to be found."""
    runs = _found(config, out)
    for place, (run, located) in enumerate(runs, 1):
        with within(f"{run.model}, {place} of {len(runs)}"):
            made = records(run, config.paper == "paper3", located)
        yield LanguageModel(run.model, made)


def records(run: ModelRuns, published: bool, located: hub.Located | None = None) -> dict[str, Record]:
    """Scan mixed and math prompts, ask for in-context evidence, edit the entropy axis: the records by run.

    Args:
        run: The model, and how much is drawn. Each run has a folder of its own in `run.out`, as its command would make
            it; what an earlier start finished there is read.
        published: Whether the published definitions are measured too.

    Raises:
        UserError: Something that can be known before anything is loaded cannot be measured.
    """
    making = Making(run, located or run.locate(), published)
    _ = making.plan  # refused before anything is loaded
    out, spec = Path(str(run.out)), digest({"runs": _spec(run, making.located), "published": published})
    names = (MIXED, MATH, SULA, *((SULA_PUBLISHED,) if published else ()), ABLATE)
    return {name: recorded(out / name, spec, partial(making.record, name)) for name in names}


@dataclass(frozen=True)
class Making:
    """The runs of one model as they are made; the model is loaded, and prompts are scanned, when a run needs it."""

    run: ModelRuns
    located: hub.Located
    published: bool

    @property
    def common(self) -> dict[str, Any]:
        """The flags that every command here has."""
        return self.run.values(*(flag.field for flag in flags(ModelConfig)), "seed")

    @cached_property
    def plan(self) -> Plan:
        """The scan of mixed and math prompts. Raises UserError where it cannot be."""
        names = (*probes.names(), *(probes.names(probes.PUBLISHED) if self.published else ()))
        drawn = self.run.values("n", "limit", "nulls")
        return prepare(RunConfig(**self.common, **drawn, domains=(MIXED, MATH), probes=names, out=str(self.run.out)))

    @cached_property
    def subject(self) -> Any:
        """The model, loaded once."""
        return self.run.load(self.located)

    @cached_property
    def scans(self) -> dict[str, Record]:
        """The records of both scans."""
        return {folder.name: record for folder, record in perform(self.plan, self.subject)}

    def record(self, name: str) -> Record:
        """The record of the run of this name, made as its command would make it."""
        if name in (MIXED, MATH):
            return self.scans[name]
        options = {**self.common, "out": str(Path(str(self.run.out)) / name)}
        if name == ABLATE:
            # All positions: at the final token of the last layer alone little passes through its values.
            edits = ablate.RunConfig(**options, sula="two-point", positions="all", controls=self.run.controls)
            job = ablate.prepare(edits)
        else:
            protocol: evidence.Protocol = "published" if name == SULA_PUBLISHED else "sound"
            job = evidence.prepare(evidence.RunConfig(**options, nulls=self.run.nulls, protocol=protocol))
        with within(name):
            return job.perform(self.subject)[1]


def next_steps(config: Any, out: Path) -> Iterator[NextStep]:
    """The next step of plain descent on each model: on mixed prompts, or on a tunnel's own task."""
    from llmgeom.papers import paper2

    for run, located in _found(config, out):

        def read(run: ModelRuns = run, located: hub.Located = located) -> Record:
            task = hub.tunnel_task(located.path) if hub.tunnel(located.path) else ""
            batch = paper2.inputs(task, run.n, run.seed)
            return paper2.next_step(run.load(located), batch, controls=run.nulls, seed=run.seed)

        record = recorded(Path(str(run.out)) / "step", {"run": _spec(run, located)}, read)
        yield paper2.NextStep(run.model, record)
