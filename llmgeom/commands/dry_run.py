"""What a command will run: prompts, tokens, passes, disk, memory and minutes, from config, tokenizer and prompts alone.

Minutes come from two seconds of one layer of random weights of this shape on this machine.
"""

from __future__ import annotations

import copy
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from llmgeom.optional import undisturbed
from llmgeom.plan import Reading, planned
from llmgeom.probe import Batch, Subject
from llmgeom.run import Question

# Measured on one core: seconds to start, and that a probe measures, a row, layer and model; bytes of a page, and held
# by libraries. A run holds at most this many times its weights, besides.
START, MEASURING, PAGE, HELD, FACTOR = 8.0, 6e-5, 3 * 2**20, 350 * 2**20, 1.5
WIDTH = 100  # of a line
# What a family raises whose config cannot be cut to one layer (Falcon-H1): it is timed by products of its parameters.
UNCUT = (ValueError, TypeError, RuntimeError, LookupError, AttributeError)


@dataclass(frozen=True, eq=False)
class Weightless(Subject):
    """A model's shapes without its weights: its tokens are real, its entropies random numbers.

    Attributes:
        pools: lengths of the prompts of each pool whose entropy was asked for.
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
    def unembed(self) -> Any:
        """Not found without weights; whether it can be is decided when the model is loaded."""


def price(
    settings: ModelConfig, located: hub.Located, asks: Sequence[Callable[[Subject], Question]], out: Path
) -> dict[str, Any]:
    """`cost` of a command that asks one model some questions, each made from the model's shapes."""
    who = Weightless.found(settings, located)
    return cost(who, (ask(who) for ask in asks), settings.device, out)


def cost(who: Weightless, questions: Iterable[Question], device: str | None, out: Path) -> dict[str, Any]:
    """What the questions run, as plain data; raises UserError as the command would.

    A source has its prompts and clusters, and passes and tokens of the model and of every draw of its controls, without
    padding; of edits, those of the layers and positions that run. `edits` names probes that make passes of their own
    that are not counted. capture_bytes lie in
    the store; disk_bytes adds a page, and the weights where controls are drawn in their memory.
    """
    facts, process = who.facts, psutil.Process().memory_info().rss
    sources: dict[str, dict[str, Any]] = {}
    tokens, rows, draws = 0, 0.0, 0
    for question in questions:
        row, queried = _source(who, question)
        sources[str(question.batch.source.get("name", "prompts"))] = row
        tokens, rows, draws = tokens + row["tokens"], rows + queried, max(draws, question.controls)
        who.pools.clear()
    weights = facts["parameters"] * who.model.dtype.itemsize
    on_device = usable(device)
    seconds = START + sum(row.pop("measuring") for row in sources.values()) + timed(who, on_device, tokens, rows)
    return {
        "parameters": facts["parameters"],
        "weight_bytes": weights,
        "memory_bytes": process + HELD + round(FACTOR * weights * (1 if who.in_place else 2)),
        "disk_bytes": PAGE + weights * who.in_place + sum(row["capture_bytes"] for row in sources.values()),
        "minutes": round(seconds / 60, 2),
        "device": on_device,
        "layers": facts["layers"],
        "nulls": draws,
        "sources": sources,
        "out": str(out),
    }


def _source(who: Weightless, question: Question) -> tuple[dict[str, Any], float]:
    """One question as a row of `cost`, and the rows of logits that it computes."""
    passes, measured, _ = question.plan(who)
    check = probe_batch(who.facts).tokens.lengths.numpy()
    ran: list[tuple[int, np.ndarray, float, int]] = [(3, check, 1.0, 0)]  # times, lengths, queries of each, bytes
    ran += [(1, lengths, 1.0, 4 * len(lengths)) for lengths in who.pools]

    def read(times: int, readings: Iterable[Reading]) -> None:
        for reading in readings:
            work = planned(who, None, replace(reading, edits=()), batch_tokens=question.batch_tokens)
            queried = float(work.where.sum(1).double().mean())
            ran.append((times, work.tokens.lengths.numpy() - work.shared, queried, sum(work.sizes)))

    read(1, passes.own.readings)
    read(len(passes.untrained), passes.control.readings)
    read(len(passes.permuted), [passes.permuted_reading])
    if passes.shuffles:
        read(len(passes.shuffles), [passes.shuffled(0)])
    read(1, passes.without_context())
    ran = [one for one in ran if one[0] and len(one[1])]
    batch, models = question.batch, 1 + len(passes.untrained)
    edited = 0
    for probe in [probe for probe in measured.values() if hasattr(probe, "priced")]:
        copies = len(passes.untrained) if probe.NEEDS.untrained else 0
        edited += round(probe.priced(who, passes.main) + copies * probe.priced(who, passes.main, control=True))
    row = {
        "prompts": len(batch),
        "clusters": len(set(batch.cluster)),
        "passes": sum(times for times, *_ in ran),
        "tokens": sum(times * int(lengths.sum()) for times, lengths, *_ in ran) + edited,
        "edited": edited,
        "longest": max(int(reading.batch.tokens.lengths.max()) for reading in passes.own.readings),
        "capture_bytes": sum(times * kept for times, *_, kept in ran),
        "edits": [name for name, probe in measured.items() if probe.NEEDS.examine and not hasattr(probe, "priced")],
        "measuring": MEASURING * len(batch) * who.facts["layers"] * len(measured) * models,
    }
    return row, sum(times * len(lengths) * queried for times, lengths, queried, _ in ran)


# ---- how fast this machine runs the shape ---------------------------------------------------------------------------


def timed(who: Any, device: str, tokens: int, rows: float) -> float:
    """Seconds that so many tokens take in all layers, and so many rows of logits over the vocabulary."""
    facts, dtype = who.facts, who.model.dtype
    columns = min(facts["vocabulary"], 8192)
    x = torch.randn(64, facts["d_model"], device=device, dtype=dtype)
    head = torch.randn(facts["d_model"], columns, device=device, dtype=dtype)
    product = _fastest(lambda: (x @ head).float().log_softmax(-1), device) / 64
    try:
        token = facts["layers"] * _layer(who, device)
    except UNCUT:
        token = product / head.numel() * facts["parameters"]
    return tokens * token + rows * product * facts["vocabulary"] / columns


def _layer(who: Any, device: str, width: int = 32) -> float:
    """Seconds of a token in one layer of random weights, in a batch of up to 4e10 multiplications."""
    config = copy.deepcopy(who.model.config)
    text = config.get_text_config()
    layers, text.num_hidden_layers, text.vocab_size = text.num_hidden_layers, 1, min(text.vocab_size, 64)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, None)
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == layers:
            setattr(text, name, value[:1])
    with torch.random.fork_rng(devices=[]):
        block = transformers.AutoModelForCausalLM.from_config(config).to(device, who.model.dtype).eval()
    features, numbers = who.facts.get("features"), max(sum(weight.numel() for weight in block.parameters()), 1)
    count = max(2, int(min(4096, 4e10 / numbers)) // width)
    inputs = {"input_ids": torch.zeros(count, width, dtype=torch.long, device=device)}
    if features:
        inputs = {"rows": torch.zeros(count, width, features, dtype=who.model.dtype, device=device)}
    return _fastest(lambda: block(**inputs, use_cache=False), device) / (count * width)


@torch.no_grad()
def _fastest(run: Callable[[], Any], device: str, most: float = 1.0) -> float:
    """Seconds of the fastest of up to five runs: what others do on this machine is no property of it."""
    took: list[float] = []
    run()
    begun = time.perf_counter()
    while len(took) < 5 and (not took or time.perf_counter() - begun < most):
        start = time.perf_counter()
        run()
        if device != "cpu":
            torch.accelerator.synchronize()
        took.append(time.perf_counter() - start)
    return min(took)


def lines(plan: Mapping[str, Any]) -> Iterator[str]:
    """The cost for a terminal."""
    parameters = plan["parameters"]
    yield from _wrapped(
        f"{f'{parameters / 1e6:.1f}M' if parameters >= 1e5 else f'{parameters:,}'} parameters, "
        f"{plan['weight_bytes'] / 2**20:.0f} MiB of weights; about {plan['memory_bytes'] / 2**30:.1f} GiB of memory, "
        f"{plan['disk_bytes'] / 2**20:.0f} MiB on disk, {plan['minutes']:.2g} minutes on this machine "
        f"({plan['device']}); out: {plan['out']}"
    )
    for name, row in plan["sources"].items():
        yield from _wrapped(
            f"{name}: {row['prompts']} prompts from {row['clusters']} clusters; {row['passes']} passes, "
            f"{row['tokens']:,} tokens, longest {row['longest']}, with {plan['nulls']} draws of each control"
        )
        if row["edited"]:
            yield from _wrapped(f"  {row['edited']:,} of them in edited passes, as far as layers and positions run")
        if row["edits"]:
            yield from _wrapped(f"  not counted: the edits and gradients of {', '.join(row['edits'])}")


def _wrapped(text: str) -> list[str]:
    """A sentence in lines, in which a path stays whole."""
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
