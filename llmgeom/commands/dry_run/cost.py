"""What a question costs: tokens, bytes, memory, and minutes that a trial of this machine measures."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import transformers

from llmgeom.commands.config import ModelConfig
from llmgeom.commands.dry_run.findable import findable
from llmgeom.commands.dry_run.stages import CHECK, EXAMINED, UNTRAINED, Source, Stage, Weightless
from llmgeom.model import hub
from llmgeom.model.batching import BatchRules
from llmgeom.model.loading import usable
from llmgeom.model.running import IN_MEMORY
from llmgeom.model.subject import Subject
from llmgeom.plan import MOST
from llmgeom.run import Question

# Measured on one core: seconds to start, and that a probe measures, a row, layer and model. Bytes of a report; and held
# by libraries (150 MiB) and by the allocator, which keeps some of what is freed.
START, MEASURING = 8.0, 6e-5
PAGE, HELD = 3 * 2**20, 200 * 2**20
# A layer's widest activations in numbers of its width; bytes of a row of logits, a word of the vocabulary, besides the
# logits themselves: log-probabilities, probabilities, their product and a copy, in float32.
WIDEST, LOGITS = 8, 16


def price(
    settings: ModelConfig, located: hub.Located, asks: Sequence[Callable[[Subject], Question]], out: Path
) -> dict[str, Any]:
    """`costs` of a command that asks one model some questions, each made from the model's shapes."""
    who = Weightless.found(settings, located)
    sources, questions = [], []
    for ask in asks:
        who.pools.clear()
        questions.append(question := ask(who))
        source = Source.of(who, question, question.batch)
        sources.append((str(question.batch.source.get("name", "prompts")), source))
    return costs(who, sources, settings.device, questions[0].batch_tokens, out)


def costs(
    who: Weightless,
    sources: Iterable[tuple[str, Source]],
    device: str | None,
    batch_tokens: int,
    out: Path,
    patience: float | None = None,
    part: str = "",
) -> dict[str, Any]:
    """Prompts, tokens, bytes, memory and minutes of each source, and what its claims can find, as plain data.

    tokens are those of one scan's passes, without padding. capture_bytes lie in the store and in memory. memory_bytes
    adds the weights, those of an untrained control where it is a second copy, the captures that are not left on disk,
    the largest batch and this process. cpu_share: processor seconds for each second of the trial. Other programs make
    it smaller than the number of threads; the minutes assume that they keep running. disk_bytes, with the weights that
    are in a file while controls are drawn in their memory. patience: 0 for a command that writes a preview;
    first_page_minutes then says after how long. part: what a command does that does not make a whole run.
    Raises UserError as the command would.
    """
    facts, item = who.facts, who.model.dtype.itemsize
    # Before the trial, which takes memory too.
    process = psutil.Process().memory_info().rss
    device, speed = usable(device), None
    rows: dict[str, dict[str, Any]] = {}
    memory, drawn, first_page, draws = 0.0, False, 0.0, 0
    for name, source in sources:
        most = BatchRules.of(facts, getattr(who.model, "config", None)).most or batch_tokens
        speed = speed or Speed.of(who, device, _usual_width(source), min(batch_tokens, most))
        minutes, until_page = _minutes(source, batch_tokens, speed)
        first_page, draws = first_page or START / 60 + until_page, source.draws
        drawn = drawn or any(stage.stage == UNTRAINED for stage in source.stages)
        memory = max(memory, _memory(source, facts, item, batch_tokens))
        rows[name] = _row(source, minutes)
        rows[name]["claims"] = list(findable(source)) if source.judged else []
    weights = facts["parameters"] * item
    # Controls are a second copy in memory, or drawn in the memory of the model, whose weights are then in a file.
    second, on_disk = (0, weights * drawn) if who.in_place else (weights * drawn, 0)
    waits = patience is not None and first_page * 60 >= patience
    return {
        "parameters": facts["parameters"],
        "weight_bytes": weights,
        "memory_bytes": process + HELD + weights + second + round(memory),
        "disk_bytes": PAGE + on_disk + sum(row["capture_bytes"] for row in rows.values()),
        "cpu_share": round(speed.cpu_share, 2) if speed else 1.0,
        "minutes": round(START / 60 + sum(sum(row["minutes"].values()) for row in rows.values()), 2),
        **({"first_page_minutes": round(first_page, 2)} if waits else {}),
        **({"part": part} if part else {}),
        "device": device,
        "layers": facts["layers"],
        "nulls": draws,
        "sources": rows,
        "out": str(out),
    }


def _row(source: Source, minutes: Mapping[str, float]) -> dict[str, Any]:
    """Prompts, passes, tokens, bytes in the store and minutes by stage of one source."""
    prompts = [stage for stage in source.stages if not stage.stage.startswith((CHECK, EXAMINED))]
    return {
        "pool": len(source.pool),
        "prompts": len(source.batch),
        "clusters": len(set(source.batch.cluster)),
        "pool_clusters": len(set(source.pool.cluster)),
        "kind": source.pool.source.get("kind", ""),
        "cluster": source.pool.source.get("cluster", ""),
        "passes": sum(stage.passes for stage in source.stages),
        "tokens": sum(stage.tokens for stage in source.stages),
        "longest": max(int(stage.lengths.max()) for stage in prompts),
        "capture_bytes": round(sum(stage.times * stage.kept * stage.share for stage in source.stages)),
        "minutes": {stage: round(value, 3) for stage, value in minutes.items()},
    }


def _memory(source: Source, facts: Mapping[str, Any], item: int, batch_tokens: int) -> float:
    """Bytes of the captures that are not left on disk, of the largest batches, and of measuring what controls read."""
    in_memory = sum(stage.times * stage.kept for stage in source.stages if stage.kept <= IN_MEMORY and source.modules)
    computed = max(_computed(stage, facts, item, batch_tokens) for stage in source.stages)
    share, needs = min(1.0, MOST / len(source.batch)), [probe.NEEDS for probe in source.modules.values()]
    return in_memory + computed + max((need.memory(share * source.most_rows(need)) for need in needs), default=0.0)


def _computed(stage: Stage, facts: Mapping[str, Any], item: int, batch_tokens: int) -> float:
    """Bytes of activations and logits of the largest batches of a stage that run at the same time."""
    a_token = WIDEST * facts["d_model"] * (item + 8 * bool(stage.everywhere)) + stage.everywhere
    a_row = facts["vocabulary"] * (item + LOGITS)
    largest = max(tokens * a_token + rows * a_row for tokens, rows in stage.batches(batch_tokens))
    return stage.at_once(batch_tokens) * largest


def _minutes(source: Source, batch_tokens: int, speed: Speed) -> tuple[dict[str, float], float]:
    """Minutes by stage, and before a first page: every token passes every layer, every prompt has a row of logits,
    every control is drawn. A first page needs what the model itself reads, and its part of the measuring.
    """
    layers, parameters = source.subject.facts["layers"], source.subject.facts["parameters"]
    minutes: dict[str, float] = {}
    first = 0.0
    for work in source.stages:
        ran = work.batches(batch_tokens)
        tokens, rows = map(sum, zip(*ran, strict=True))
        took = (layers * (tokens * speed.token + len(ran) * speed.call) + rows * speed.logit) * work.share
        stage = "edits and gradients" if work.stage.startswith(EXAMINED) else work.stage
        minutes[stage] = minutes.get(stage, 0) + took / 60
        first += took / 60 * work.own
    if source.controls:
        minutes[UNTRAINED] = minutes.get(UNTRAINED, 0) + source.controls * parameters * speed.number / 60
    rows = min(max(source.rows.values()), MOST)
    measuring = MEASURING * rows * layers * len(source.modules) / 60
    return minutes | {"measuring": measuring * (1 + source.controls)}, first + measuring


def _usual_width(source: Source) -> int:
    """Tokens of the middle prompt of the stage that runs most of them."""
    return max(1, int(np.median(max(source.stages, key=lambda one: one.tokens).lengths)))


# ---- how fast this machine runs a shape: one layer of random weights, timed for two seconds -------------------------


# What a family raises whose config cannot be cut to one layer (Falcon-H1): it is priced by products of its parameters.
UNCUT = (ValueError, TypeError, RuntimeError, LookupError, AttributeError)


@dataclass(frozen=True)
class Speed:
    """Of this machine for this shape, by a trial of two seconds with random weights.

    Attributes:
        call: seconds a layer and batch, however short.
        token: seconds a layer and token.
        logit: seconds a row of logits over the vocabulary.
        number: seconds a random number of an untrained control.
        cpu_share: processor seconds a second of the trial.
    """

    call: float
    token: float
    logit: float
    number: float
    cpu_share: float = 1.0

    @classmethod
    def of(cls, reader: Any, device: str, width: int, batch_tokens: int) -> Speed:
        """Times one layer, logits and random numbers; of prompts of `width` tokens in batches of `batch_tokens`."""
        facts, dtype = reader.facts, reader.model.dtype
        columns, begun = min(facts["vocabulary"], 8192), (time.process_time(), time.perf_counter())
        x = torch.randn(64, facts["d_model"], device=device, dtype=dtype)
        head = torch.randn(facts["d_model"], columns, device=device, dtype=dtype)
        product = seconds(lambda: (x @ head).float().log_softmax(-1), device) / 64
        try:
            call, token = _layer(reader, device, width, batch_tokens)
        except UNCUT:
            call, token = 0.0, product / head.numel() * facts["parameters"] / facts["layers"]
        numbers = torch.empty(2**20, device=device, dtype=dtype)
        number = seconds(numbers.normal_, device) / 2**20
        cpu, clock = time.process_time() - begun[0], time.perf_counter() - begun[1]
        return cls(call, token, product * facts["vocabulary"] / columns, number, cpu / clock)


def _layer(reader: Any, device: str, width: int, batch_tokens: int) -> tuple[float, float]:
    """Seconds of a layer for each call and for each token, from one prompt and a batch of them.

    A batch of the plan, or as much of one as 4e10 multiplications allow: a token costs the same in either.
    """
    block, features = _one_layer(reader.model, device), reader.facts.get("features")
    parameters = max(sum(weight.numel() for weight in block.parameters()), 1)
    rows = max(2, int(min(batch_tokens, 4e10 / parameters)) // width)

    def forward(count: int) -> Callable[[], Any]:
        inputs = torch.zeros(count, width, dtype=torch.long, device=device)
        if features:
            inputs = torch.zeros(count, width, features, dtype=reader.model.dtype, device=device)
        return lambda: block(**{"rows" if features else "input_ids": inputs}, use_cache=False)

    one, many = seconds(forward(1), device), seconds(forward(rows), device)
    token = (many - one) / ((rows - 1) * width)
    token = token if token > 0 else many / (rows * width)
    return max(one - width * token, 0.0), token


def _one_layer(like: Any, device: str) -> Any:
    """The model with one layer and a small vocabulary, of random weights."""
    config = copy.deepcopy(like.config)
    text = config.get_text_config()
    text.num_hidden_layers, text.vocab_size = 1, min(text.vocab_size, 64)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, None)
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == like.config.get_text_config().num_hidden_layers:
            setattr(text, name, value[:1])
    with torch.random.fork_rng(devices=[]):
        return transformers.AutoModelForCausalLM.from_config(config).to(device, like.dtype).eval()


@torch.no_grad()
def seconds(run: Callable[[], Any], device: str, most: float = 0.4) -> float:
    """The fastest of up to five runs within `most` seconds: what others do on this machine is no property of it."""
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
