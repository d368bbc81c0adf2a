"""How fast this machine runs a shape: one layer of random weights, timed for two seconds."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

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
