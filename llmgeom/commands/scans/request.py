"""The options of a scan: the flags of `llmgeom scan` and the keywords of `llmgeom.scan`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llmgeom.commands import config
from llmgeom.flags import LARGEST_SEED, measure_flag, output_flag, prompt_flag
from llmgeom.probes import left_out

FEWEST = 10  # prompts
SPARED = ", ".join(left_out())  # probes


@dataclass(frozen=True)
class RunConfig(config.SelectionConfig, config.ChatConfig):
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
        None,
        f"Names with commas between, or all. [default: all{f'; on prompts all but {SPARED}' if SPARED else ''}]",
        listed=True,
    )
    batch_tokens: int = measure_flag(4096, "Tokens that run at the same time.", least=1, most=LARGEST_SEED)
    nulls: int = config.draws_flag("Untrained copies, and shuffles of the prompts where used", group="Controls")
    out: str | None = output_flag(None, "Run folder. [default: runs/MODEL-DOMAINS-HASH]")
