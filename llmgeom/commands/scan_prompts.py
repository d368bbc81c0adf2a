"""What a scan is asked: its flags, and the prompts that it chooses from, by the source that they name."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from llmgeom.batch import Batch
from llmgeom.commands import config
from llmgeom.errors import NO_TOKENIZER, UserError
from llmgeom.flags import LARGEST_SEED, measure_flag, output_flag, places, positions, prompt_flag
from llmgeom.model import hub
from llmgeom.record import Record

FEWEST = 10  # prompts
SEQUENCES = 200  # of a task, where they cost nothing
DOCUMENTS = "hf:"

SITES = (
    "value", "key", "query", "attention", "attention_entropy", "attention_first", "attention_rest", "z",
    "attn_out", "mlp_out", "residual",
)  # fmt: skip


@dataclass(frozen=True)
class RunConfig(config.ChatConfig):
    """The options of `llmgeom scan`."""

    VERB: ClassVar[str] = "scan"

    domains: tuple[str, ...] = prompt_flag(
        (), "Prompt domain. Repeat for several. [default: mixed and math]", name="--domain"
    )
    tasks: tuple[str, ...] = prompt_flag(
        (), "Wind-tunnel task, e.g. bijection:vocab=20. Repeat for several. [default: the model's own]", name="--task"
    )
    processes: tuple[str, ...] = prompt_flag(
        (),
        "Evidence in text with an exact answer, e.g. markov (`llmgeom list worlds`). Repeat for several.",
        name="--process",
    )
    prompts_file: str | None = prompt_flag(
        None, "Your own prompts: .jsonl, .csv, .parquet, .txt, hf:DATASET, or -.", name="--prompts"
    )
    prompts_from: str | None = prompt_flag(None, "Use the prompts of an earlier run folder.")
    n: int | None = prompt_flag(
        None, "Prompts in each domain, spread evenly over entropy. [default: 75; fewer of a small file]", least=FEWEST
    )
    limit: int | None = prompt_flag(
        None,
        "Read only the first LIMIT prompts of a file, or choose from LIMIT candidates. [default: 4 N, 300 to 1000]",
        least=FEWEST,
    )
    seed: int = prompt_flag(0, "Fixes prompts and controls.", least=0, most=LARGEST_SEED)
    probes: tuple[str, ...] | None = measure_flag(
        None, "Names with commas between, or all. [default: all]", listed=True
    )
    batch_tokens: int = measure_flag(4096, "Tokens that run at the same time.", least=1, most=LARGEST_SEED)
    layers: str = measure_flag("all", "Layers to keep: numbers and slices with commas between, e.g. 0:12:2,-1.")
    sites: tuple[str, ...] | None = measure_flag(
        None, f"Sites to keep, of {', '.join(SITES)}. [default: what the probes read]", listed=True
    )
    positions: str = measure_flag(
        "last", "Positions of each prompt that are read: last, all, or as --layers, e.g. -4:."
    )
    nulls: int = config.draws_flag("Untrained copies, and shuffles of the prompts where used", group="Controls")
    out: str | None = output_flag(None, "Run folder. [default: runs/MODEL-DOMAINS-HASH]")

    def __post_init__(self) -> None:
        super().__post_init__()
        places("--layers", self.layers, 1, strict=False)
        self.read(1)
        if self.sites == ():
            raise UserError("--sites names no site; leave it out for those that the probes read")
        if unknown := [site for site in self.sites or () if site not in SITES]:
            raise UserError(f"--sites {unknown[0]}: expected some of {', '.join(SITES)}, with commas between")

    def read(self, length: int) -> tuple[int, ...]:
        """The positions that are read of a prompt of so many tokens."""
        return positions(self.positions, length)

    @property
    def selected(self) -> dict[str, Any]:
        """The selection as arguments of `llmgeom.plan.Plan.of`; empty if everything is read."""
        changed = self.changed
        return self.values(*(name for name in ("layers", "sites", "positions") if name in changed))


def pools(settings: RunConfig, located: hub.Located) -> dict[str, Batch]:
    """Candidates by the name of their set. Raises UserError for a source that is not there, or gives too few."""
    drawn = min(settings.n or SEQUENCES, settings.limit or sys.maxsize)
    path, folder = settings.prompts_file, settings.prompts_from
    if settings.processes:  # prompts of each process, in words that are single tokens of the model's tokenizer
        from llmgeom.prompts import text
        from llmgeom.wind_tunnels import load_world

        worlds = [load_world(spec, text=True) for spec in settings.processes]
        tokenizer, described = settings.described(located)
        if tokenizer is None:
            raise UserError(f"{located.name} {NO_TOKENIZER}")
        most = getattr(described.get_text_config(), "max_position_embeddings", None)
        return {
            text.title(one): text.sample(one, max(drawn // len(one.KS), 1), settings.seed, tokenizer, positions=most)
            for one in worlds
        }
    if settings.tasks:
        from llmgeom import wind_tunnels

        tasks = map(wind_tunnels.load_world, settings.tasks)
        return {task.title: task.truncated(drawn, settings.seed, task.test_split) for task in tasks}
    if folder is not None:  # prompts of an earlier run keep their name, so that pages do not name one set twice
        if Path(folder).is_file():
            raise UserError(
                f"--prompts-from {folder} is a file: give the folder of an earlier run, or --prompts {folder}"
            )
        source = Record.load_one(folder).source  # refuses what is no whole run
        if source.get("kind") == "task":
            raise UserError(
                f"--prompts-from {folder}: a task's sequences are no text; give --task {source['name']}, and a model "
                "that was trained on it"
            )
        batch = _file(str(Path(folder) / "prompts.jsonl"), settings.limit)
        return {"prompts": replace(batch, source={**batch.source, "name": str(source.get("name", "prompts"))})}
    from llmgeom.prompts.pool import candidates

    most = candidates(settings.n, settings.limit)
    if path is None:
        from llmgeom.prompts.domains import Domain

        found = {}
        for name in settings.domains or ("mixed", "math"):
            size = min(most, (domain := Domain(name)).size())
            if settings.n is not None and settings.n > size:
                raise UserError(f"--n {settings.n}: {name} gives a pool of {size} prompts; ask for at most that")
            found[name] = domain.sample(size, settings.seed)
        return found
    if path.startswith(DOCUMENTS):  # of a data set of the hub
        from llmgeom.prompts import files

        pool = files.read_documents(path, most, settings.seed, offline=settings.offline)
        if len(pool) < (least := max(settings.n or FEWEST, FEWEST)):
            raise UserError(f"{path} gave {len(pool)} prompts of at least {least} that are needed")
        return {"+".join(re.findall(r"[\w.-]+", path.removeprefix(DOCUMENTS))): pool}
    return {"stdin" if path == "-" else Path(path).stem: _file(path, settings.limit)}


def _file(path: str, limit: int | None) -> Batch:
    """The first prompts of a file."""
    from llmgeom.prompts import files

    batch = files.read(path)
    batch = batch.take(range(min(len(batch), limit or len(batch))))
    if len(batch) < FEWEST:
        raise UserError(f"{path} holds {len(batch)} prompts; a scan needs at least {FEWEST}")
    return batch
