"""The flags of `llmgeom evidence`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from llmgeom.commands.processes.chat_lists import ChatListConfig
from llmgeom.flags import LARGEST_SEED, flag

Protocol = Literal["sound", "published"]


@dataclass(frozen=True)
class RunConfig(ChatListConfig):
    """What `llmgeom evidence` is asked for."""

    VERB: ClassVar[str] = "evidence"

    processes: tuple[str, ...] = flag(
        (),
        "Draw the evidence from another process, e.g. markov:labels=3 (`llmgeom list processes`), or all. "
        "Repeat for several.",
        name="--process",
        group="Process",
    )
    surfaces: tuple[str, ...] = flag((), "With --process: list, sentences, code. [default: all]", listed=True,
                                     name="--surface", group="Process")  # fmt: skip
    fuzz: bool = flag(
        False,
        "With --process: find the shortest evidence at which the model differs from the exact answer, and save it.",
        group="Process",
    )
    bound: float = flag(
        0.5, "With --fuzz: the KL(exact || answer) in bits that counts as a failure.", least=0, group="Process"
    )
    prior: str = flag("two-point", "two-point, two-point:0.8, beta (uniform) or beta:2,1.")
    template: Literal["colon", "is", "plain", "instructed"] | None = flag(
        None,
        "colon: `w: label`. is: `w is label`. plain: no lead-in, as published. instructed: the prior is stated."
        " [default: colon; plain with --protocol published]",
    )
    protocol: Protocol = flag("sound", "published: the papers' own definitions, flaws included.")
    ks: tuple[int, ...] = flag(
        (),
        "Numbers of labelled words shown. [default: 0,1,2,4,8; a process has its own default]",
        name="--k",
        listed=True,
    )
    labels: tuple[str, ...] = flag((), "Labels. [default: syllables that are one token]", listed=True)
    n: int = flag(50, "Prompts for each number of labelled words.", least=10)
    nulls: int = flag(20, "Untrained copies, and shuffles of the prompts where used, as controls.", least=1)
    seed: int = flag(0, "Fixes prompts and controls.", least=0, most=LARGEST_SEED)
    batch_tokens: int = flag(4096, "Tokens in a batch.", least=1, most=LARGEST_SEED)
    out: str | None = flag(None, "Run folder. [default: runs/MODEL-sula-PRIOR-TEMPLATE-HASH]", group="Output")
