"""The options of a scan: the flags of `llmgeom scan` and the keywords of `llmgeom.scan`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from llmgeom.commands import config
from llmgeom.flags import LARGEST_SEED, flag
from llmgeom.probes import left_out

FEWEST = 10  # prompts
SPARED = ", ".join(left_out())  # probes


@dataclass(frozen=True)
class RunConfig(config.SelectionConfig, config.ChatConfig):
    """The options of `llmgeom scan`."""

    VERB: ClassVar[str] = "scan"

    domains: tuple[str, ...] = flag(
        (), "Prompt domain. Repeat for several. [default: mixed and math]", name="--domain", group="Prompts"
    )
    tasks: tuple[str, ...] = flag(
        (),
        "Wind-tunnel task, e.g. bijection:vocab=20. Repeat for several. [default: the model's own]",
        name="--task",
        group="Prompts",
    )
    processes: tuple[str, ...] = flag(
        (),
        "Evidence in text with an exact answer, e.g. markov (`llmgeom list processes`). Repeat for several.",
        name="--process",
        group="Prompts",
    )
    prompts_file: str | None = flag(
        None, "Your own prompts: .jsonl, .csv, .parquet, .txt, hf:DATASET, or -.", name="--prompts", group="Prompts"
    )
    prompts_from: str | None = flag(None, "Use the prompts of an earlier run folder.", group="Prompts")
    n: int | None = flag(
        None,
        "Prompts in each domain, spread evenly over entropy. [default: 75; fewer of a small file]",
        least=FEWEST,
        group="Prompts",
    )
    limit: int | None = flag(
        None,
        "Read only the first LIMIT prompts of a file, or choose from LIMIT candidates. [default: 5 N, 400 to 1000]",
        least=FEWEST,
        group="Prompts",
    )
    seed: int = flag(0, "Fixes prompts and controls.", least=0, most=LARGEST_SEED, group="Prompts")
    probes: tuple[str, ...] | None = flag(
        None,
        f"Names with commas between, or all. [default: all{f'; on prompts all but {SPARED}' if SPARED else ''}]",
        listed=True,
        group="Measure",
    )
    protocol: Literal["sound", "published"] = flag(
        "sound", "published: the papers' own definitions, flaws included (`llmgeom reproduce`).", group="Measure"
    )
    batch_tokens: int = flag(4096, "Tokens that run at the same time.", least=1, most=LARGEST_SEED, group="Measure")
    shard: str | None = flag(
        None, "In a job array: i/n captures every n-th shard and stops (docs/store.md).", group="Measure"
    )
    nulls: int | None = config.draws_flag("Untrained copies, and shuffles of the prompts where used", group="Controls")
    stability: bool = flag(
        False, "Scan again in another precision, in smaller batches and with BOS toggled.", group="Controls"
    )
    out: str | None = flag(None, "Run folder. [default: runs/MODEL-DOMAINS-HASH]", group="Output")
