"""The options of a training in a wind tunnel (no torch)."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from llmgeom import wind_tunnels
from llmgeom.errors import UserError
from llmgeom.files import digest
from llmgeom.flags import LARGEST_SEED, argument, check, flag

LONGEST = 10**9  # steps, or parameters, of a training


Evidence = Literal["kept", "exchanged", "unbound", "sheet", "memoryless", "bag"]
# Kinds of evidence whose targets come from a predictor of the task that does not infer (`World.trivial`).
TRIVIAL = {"memoryless": "memoryless", "bag": "bag of values"}


@dataclass(frozen=True)
class Training:
    """The options of a training: everything that determines the weights. Its fields are the flags of `train`.

    Attributes:
        task: See `wind_tunnels.load_world`.
        arch: See `wind_tunnels.models`. `width`, `layers` and `heads` are its shape.
        heads: 0 means two, or four in gqa, whose four heads share one pair of keys and values.
        parameters: If not 0, the width is chosen so that the model has this many, within 2 %.
        batch: Fresh sequences in each step.
        lr: The highest learning rate, or "auto": chosen by successive halving on held-out sequences.
        schedule: After `warmup` steps: "cosine" to 0, or "constant".
        weight_decay: Weight decay of AdamW with betas .9 and .98, only on matrices.
        targets: "hard": the drawn outcome, so that the model has to find Bayes' rule. "soft": the exact predictive,
            which is quicker and teaches the answer itself.
        corrupt: The fraction of targets that are redrawn uniformly over the outcomes; see `answers.corrupt_targets`.
        evidence: What the model learns from. "exchanged": the targets of another sequence; every position keeps its
            outcomes, and nothing can be inferred. "unbound": the inputs at the queries are another sequence's; the
            values shown matter, their keys do not. "sheet": targets drawn from the exact answers to one fixed sequence;
            they depend on position only. "memoryless" and "bag": targets drawn from the exact answer to the last
            observation, or to the values shown in any order.
        hold_out: Held out from training, besides the held-out hypotheses. "states": the loss leaves out a tenth of the
            states of the evidence (`World.held_out_states`), so that no table of states can answer there.
        precision: Precision of the forward pass; "bf16" is autocast, and the weights stay float32.
        graph: On a GPU, one CUDA graph per step.
        snapshots: At steps that grow geometrically, step 0 and the last step among them.
        start: Fine-tune this model instead of a fresh one.
    """

    task: str = argument()
    arch: str = flag("neox", "Architecture; see `llmgeom list architectures`.")
    width: int = flag(64, "Width of the residual stream.", least=1)
    layers: int = flag(2, "Layers.", least=1)
    heads: int = flag(0, "Attention heads, or heads of a mamba2 mixer. [default: 2; gqa: 4]", least=0)
    parameters: int = flag(
        0, "Choose the width for this many parameters, within 2 %.", name="--match-params", least=0, most=LONGEST
    )
    steps: int = flag(1000, "Optimiser steps.", least=1, most=LONGEST)
    batch: int = flag(128, "Sequences in each step, drawn afresh.", least=1)
    lr: str = flag("3e-3", "Highest learning rate, or auto: successive halving chooses it.")
    schedule: Literal["cosine", "constant"] = flag("cosine", "Learning rate after the warm-up.")
    warmup: int = flag(50, "Steps of linear warm-up.", least=0, most=LONGEST)
    weight_decay: float = flag(0.01, "Weight decay of AdamW, on matrices.", least=0)
    clip: float = flag(1.0, "Largest norm of the gradient.")
    targets: Literal["hard", "soft"] = flag(
        "hard", "hard: the outcome drawn, so that Bayes' rule has to be found. soft: the exact answer itself."
    )
    corrupt: float = flag(0.0, "Fraction of the hard targets that are drawn again, evenly.", least=0, most=1)
    evidence: Evidence = flag(
        "kept",
        "Train on corrupted evidence instead. exchanged: targets are shuffled across sequences. unbound: the queried "
        "keys are shuffled. sheet: targets depend on position only. memoryless: on the last observation only. bag: on "
        "the values shown, in any order.",
    )
    hold_out: Literal["hypotheses", "states"] = flag(
        "hypotheses",
        "What training never shows. states: also no loss in a tenth of the states of the evidence, e.g. of the sets of "
        "used values, which a table of few entries could answer.",
    )
    precision: Literal["float32", "bf16"] = flag("float32", "Precision of the forward pass.")
    compile: bool = flag(False, "Use torch.compile; it pays for itself in long runs.")
    graph: bool = flag(False, "Use one CUDA graph for each step.", name="--cuda-graph")
    snapshots: int = flag(12, "Snapshots, step 0 and the last step included.", least=2, most=1000)
    start: str | None = flag(None, "Fine-tune this model: a folder, pocket:NAME or a hub id.", name="--from")
    seed: int = flag(0, "Fixes weights and data.", least=0, most=LARGEST_SEED)

    def __post_init__(self) -> None:
        check(self)
        if 12 * self.layers * self.width**2 > LONGEST:
            raise UserError(
                f"--width {self.width} --layers {self.layers}: more than {LONGEST:,} parameters; a wind tunnel takes "
                "fewer"
            )
        if self.evidence != "kept" and self.targets == "soft":
            raise UserError(
                f"--evidence {self.evidence}: soft targets are the exact answer itself; leave --targets out"
            )
        if not 0 < self.clip < math.inf:
            raise UserError(f"--clip {self.clip}: expected a number above 0")
        if self.lr != "auto":
            try:
                good = 0 < float(self.lr) < math.inf
            except ValueError:
                good = False
            if not good:
                raise UserError(f"--lr {self.lr}: expected a number above 0, or auto")

    def rate(self, step: int) -> float:
        """The learning rate of a step over the highest: linear warm-up, then cosine to 0 or constant."""
        warm = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        if self.schedule == "constant":
            return warm
        return min(warm, (1 + math.cos(math.pi * step / self.steps)) / 2)


def default_folder(asked: Training) -> Path:
    """runs/TASK-ARCH-HASH, safe on every file system."""
    title = wind_tunnels.load_world(asked.task).title
    safe = "".join(c if c.isalnum() or c in "._=+" else "-" for c in title.rsplit("/", 1)[-1])
    return Path("runs") / f"{safe}-{asked.arch}-{digest(asdict(asked))[:8]}"
