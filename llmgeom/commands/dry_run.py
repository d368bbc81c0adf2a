"""What a command will run: prompts, tokens, passes, disk, memory and minutes, from config, tokenizer and prompts alone.

Minutes come from products of random numbers of the model's shape on this machine.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import transformers

from llmgeom.batch import Prompts
from llmgeom.commands.config import ModelConfig
from llmgeom.model import hub
from llmgeom.model.forward import probe_batch
from llmgeom.model.loading import default_dtype, usable
from llmgeom.model.resume import FEW
from llmgeom.optional import undisturbed
from llmgeom.plan import MAIN, Plan
from llmgeom.probe import UNTRAINED, Batch, Model

# Measured on one core: seconds to start, and that a probe measures, a row, layer and model; bytes of a page, and held
# by libraries. A run holds at most this many times its weights, besides.
START, MEASURING, PAGE, HELD, FACTOR = 8.0, 6e-5, 3 * 2**20, 350 * 2**20, 1.5
CHECKS = 3  # passes of the self-check at load
WIDTH = 100  # of a line


@dataclass(frozen=True, eq=False)
class Weightless(Model):
    """A model's shapes without its weights: its tokens are real, its entropies random numbers.

    Attributes:
        pools: tokens of the prompts of each pool whose entropy was asked for.
    """

    pools: list[np.ndarray] = field(default_factory=list)

    @classmethod
    def found(cls, settings: ModelConfig, located: hub.Located) -> Weightless:
        """From the config, on torch's meta device. Raises UserError where the model could not be captured."""
        tokenizer, config = settings.described(located)
        try:
            device = usable(settings.device)
            dtype = default_dtype(settings.dtype, device, config)
            with undisturbed(located.local_only), torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        except Exception as error:
            raise hub.explain(error, located) from error
        # There are no weights to check; and the device decides how inputs are divided into batches.
        facts = {**hub.tunnel_facts(located.path), "self_check": {}, "device": device}
        who = cls.of(model, tokenizer, located.name, **facts)
        in_place = settings.backend == "transformers" and not (settings.quantize or settings.device_map)
        return replace(settings.reading(who), in_place=in_place)

    def entropy(self, batch: Prompts, **options: Any) -> np.ndarray:
        """Random: which prompts are drawn is not what the run will draw; how many, and about how long, is."""
        batch = Batch.of(batch)
        self.pools.append(self.tokens(batch).lengths.numpy())
        return np.random.default_rng(len(batch)).random(len(batch))

    @property
    def weight_hash(self) -> str:
        """Of no weights: nothing is stored under it."""
        return ""

    @property
    def unembed(self) -> Any:
        """Not found without weights; whether it can be is decided when the model is loaded."""


def price(
    settings: ModelConfig, located: hub.Located, asks: Iterable[Callable[[Model], Plan]], out: Path
) -> dict[str, Any]:
    """What the plans read, as plain data; raises UserError as the command would.

    A source has its prompts and clusters, and passes and tokens of the model and of every draw of its controls, without
    padding; of edits, those of the layers and positions that run. `edits` names probes that make passes of their own
    that are not counted. capture_bytes lie in the store; disk_bytes adds a page, and the weights where controls are
    drawn in their memory.
    """
    process, who = psutil.Process().memory_info().rss, Weightless.found(settings, located)
    facts, weights = who.facts, who.facts["parameters"] * who.model.dtype.itemsize
    checked = CHECKS * int(probe_batch(facts).tokens.lengths.sum())
    sources: dict[str, dict[str, Any]] = {}
    rows, draws, measuring = 0, 0, 0.0
    for ask in asks:
        who.pools.clear()
        plan = ask(who)
        works = [work for _, _, work in plan.every()]
        pooled = np.concatenate([*who.pools, np.zeros(0, dtype=np.int64)])
        copies, edited = len(plan.draws.get(UNTRAINED, ())), 0
        priced: list[Any] = [probe for probe in plan.probes.values() if hasattr(probe, "priced")]
        for probe in priced:
            edited += probe.priced(who, plan.inputs[MAIN])
            if UNTRAINED in probe.NEEDS.controls:
                read = min(copies, getattr(probe, "copies", copies))
                edited += read * probe.priced(who, plan.inputs[MAIN], control=True)
        # Of a pass whose last positions run alone, some inputs run whole before, too (`model.resume.alone`).
        read = sum(int(work.runs.sum()) + work.alone * int(work.tokens.lengths[:FEW].sum() + FEW) for work in works)
        sources[str(plan.batch.source.get("name", "prompts"))] = {
            "prompts": len(plan.batch),
            "clusters": len(set(plan.batch.cluster)),
            "passes": len(works) + CHECKS + len(who.pools),
            "tokens": read + checked + int(pooled.sum()) + round(edited),
            "edited": round(edited),
            "longest": max(int(batch.tokens.lengths.max()) for batch in plan.inputs.values()),
            "capture_bytes": sum(sum(work.sizes) for work in works) + 4 * len(pooled),
            "edits": [
                name for name, needs in plan.needs.items() if needs.examine and not hasattr(plan.probes[name], "priced")
            ],
        }
        rows += sum(int(work.where.sum()) for work in works) + len(pooled)
        measuring += MEASURING * len(plan.batch) * facts["layers"] * len(plan.probes) * (1 + copies)
        draws = max(draws, plan.controls)
    tokens, device = sum(source["tokens"] for source in sources.values()), usable(settings.device)
    products = tokens * facts["parameters"] + rows * facts["vocabulary"] * facts["d_model"]
    return {
        "parameters": facts["parameters"],
        "weight_bytes": weights,
        "memory_bytes": process + HELD + round(FACTOR * weights * (1 if who.in_place else 2)),
        "disk_bytes": PAGE + weights * who.in_place + sum(source["capture_bytes"] for source in sources.values()),
        "minutes": round((START + measuring + products * product(who, device)) / 60, 2),
        "device": device,
        "layers": facts["layers"],
        "nulls": draws,
        "sources": sources,
        "out": str(out),
    }


@torch.no_grad()
def product(who: Model, device: str) -> float:
    """Seconds of one multiplication in a product of 64 rows with a matrix as wide as the model, the fastest of five."""
    x = torch.randn(64, who.facts["d_model"], device=device, dtype=who.model.dtype)
    matrix = torch.randn(who.facts["d_model"], 8192, device=device, dtype=who.model.dtype)
    took = []
    for _ in range(6):  # the first one is slower
        start = time.perf_counter()
        x @ matrix
        if device != "cpu":
            torch.accelerator.synchronize()
        took.append(time.perf_counter() - start)
    return min(took) / (64 * matrix.numel())


def lines(plan: Mapping[str, Any]) -> list[str]:
    """The cost for a terminal."""
    parameters = plan["parameters"]
    said = [
        f"{f'{parameters / 1e6:.1f}M' if parameters >= 1e5 else f'{parameters:,}'} parameters, "
        f"{plan['weight_bytes'] / 2**20:.0f} MiB of weights; about {plan['memory_bytes'] / 2**30:.1f} GiB of memory, "
        f"{plan['disk_bytes'] / 2**20:.0f} MiB on disk, {plan['minutes']:.2g} minutes on this machine "
        f"({plan['device']}); out: {plan['out']}"
    ]
    for name, row in plan["sources"].items():
        said.append(
            f"{name}: {row['prompts']} prompts from {row['clusters']} clusters; {row['passes']} passes, "
            f"{row['tokens']:,} tokens, longest {row['longest']}, with {plan['nulls']} draws of each control"
        )
        if row["edited"]:
            said.append(f"  {row['edited']:,} of them in edited passes, as far as layers and positions run")
        if row["edits"]:
            said.append(f"  not counted: the edits and gradients of {', '.join(row['edits'])}")
    # A path stays whole.
    wrapped = textwrap.TextWrapper(WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return [line for text in said for line in wrapped.wrap(text)]
