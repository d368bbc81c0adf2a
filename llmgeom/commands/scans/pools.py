"""The prompts that a scan chooses from, by the source that its flags name."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

from llmgeom.batch import Batch
from llmgeom.commands.scans.request import FEWEST, RunConfig
from llmgeom.errors import NO_TOKENIZER, UserError
from llmgeom.model import hub
from llmgeom.record import Record

SEQUENCES = 200  # of a task, where they cost nothing
DOCUMENTS = "hf:"


def pools(settings: RunConfig, located: hub.Located) -> dict[str, Batch]:
    """Candidates by the name of their set. Raises UserError for a source that is not there, or gives too few."""
    if settings.processes:
        return _evidence(settings, located)
    if settings.tasks:
        return _sequences(settings)
    if settings.prompts_from is not None:
        return {"prompts": _earlier(settings.prompts_from, settings.limit)}
    path = settings.prompts_file
    if path is None:
        return {name: _domain(settings, name) for name in dict.fromkeys(settings.domains or ("mixed", "math"))}
    if path.startswith(DOCUMENTS):
        return {"+".join(re.findall(r"[\w.-]+", path.removeprefix(DOCUMENTS))): _documents(settings, path)}
    return {"stdin" if path == "-" else Path(path).stem: _file(path, settings.limit)}


def _evidence(settings: RunConfig, located: hub.Located) -> dict[str, Batch]:
    """Prompts of each process, in words that are single tokens of the model's tokenizer."""
    from llmgeom.prompts.processes import load_process

    processes = [load_process(spec) for spec in settings.processes]
    tokenizer, described = settings.described(located)
    if tokenizer is None:
        raise UserError(f"{located.name} {NO_TOKENIZER}")
    positions = getattr(described.get_text_config(), "max_position_embeddings", None)
    n = min(settings.n or SEQUENCES, settings.limit or sys.maxsize)
    return {
        process.title: process.sample(max(n // len(process.KS), 1), settings.seed, tokenizer, positions=positions)
        for process in processes
    }


def _sequences(settings: RunConfig) -> dict[str, Batch]:
    """Sequences of each task."""
    from llmgeom import wind_tunnels

    tasks = [wind_tunnels.load_task(spec) for spec in settings.tasks]
    n = min(settings.n or SEQUENCES, settings.limit or sys.maxsize)
    return {task.title: task.truncated(n, settings.seed, task.test_split) for task in tasks}


def _domain(settings: RunConfig, name: str) -> Batch:
    """Prompts of a domain."""
    from llmgeom.prompts.domains import Domain
    from llmgeom.prompts.pool import candidates

    domain = Domain(name)
    size = min(candidates(settings.n, settings.limit), domain.size())
    if settings.n is not None and settings.n > size:
        raise UserError(f"--n {settings.n}: {name} gives a pool of {size} prompts; ask for at most that")
    return domain.sample(size, settings.seed)


def _documents(settings: RunConfig, path: str) -> Batch:
    """Documents of a data set of the hub."""
    from llmgeom.prompts import documents
    from llmgeom.prompts.pool import candidates

    pool = documents.read(path, candidates(settings.n, settings.limit), settings.seed, offline=settings.offline)
    if len(pool) < (least := max(settings.n or FEWEST, FEWEST)):
        raise UserError(f"{path} gave {_counted(pool)}; at least {least} are needed")
    return pool


def _earlier(folder: str, limit: int | None) -> Batch:
    """The prompts of an earlier run. They keep their name, so that pages do not name one set twice."""
    if Path(folder).is_file():
        raise UserError(f"--prompts-from {folder} is a file: give the folder of an earlier run, or --prompts {folder}")
    source = Record.load_one(folder).source  # refuses what is no whole run
    if source.get("kind") == "task":
        raise UserError(
            f"--prompts-from {folder}: a task's sequences are no text; give --task {source['name']}, and a model that "
            "was trained on it"
        )
    batch = _file(str(Path(folder) / "prompts.jsonl"), limit)
    return replace(batch, source={**batch.source, "name": str(source.get("name", "prompts"))})


def _file(path: str, limit: int | None) -> Batch:
    """The first prompts of a file."""
    from llmgeom.prompts import files

    batch = files.read(path)
    batch = batch.take(range(min(len(batch), limit or len(batch))))
    if len(batch) < FEWEST:
        raise UserError(f"{path} holds {_counted(batch)}; a scan needs at least {FEWEST}")
    return batch


def _counted(batch: Batch) -> str:
    return f"{len(batch)} prompt{'s' * (len(batch) != 1)}"
