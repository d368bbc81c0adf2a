"""The logit lens and the attention pattern of one prompt."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmgeom.batch import Prompts
from llmgeom.errors import UserError, brief
from llmgeom.model.capture import Site
from llmgeom.verbs.reading import Reading, called

ROWS = 256  # positions whose log-probabilities over the vocabulary are in memory at once


def lens(subject: Any, prompt: Prompts) -> Reading:
    """See `Verbs.lens`."""
    ids, tokens = one_prompt(subject, prompt)
    seen = subject.capture([ids], {Site.RESIDUAL, Site.LOG_PROBS}, positions="all")
    layers, final = seen.layers(Site.RESIDUAL), seen.log_probs
    answer = final.argmax(-1)
    numbers: dict[str, list[Tensor]] = {"probability": [], "token": [], "rank": [], "entropy": [], "KL": []}
    for layer in range(len(layers)):
        parts = [_read(subject.unembed(layers[layer][at : at + ROWS]), final[at : at + ROWS], answer[at : at + ROWS])
                 for at in range(0, len(ids), ROWS)]  # fmt: skip
        for name, each in zip(numbers, zip(*parts, strict=True), strict=True):
            numbers[name].append(torch.cat(each))
    values = {name: torch.stack(every).numpy() for name, every in numbers.items()}
    values["token"] = np.array([texts_of(subject, row) for row in values["token"].tolist()])
    return Reading(
        f"{called(subject)}, logit lens: top token after each layer",
        {"layer": tuple(range(len(layers))), "position": tuple(range(len(ids)))},
        values,
        units={"entropy": "bits", "KL": "bits"},
        ticks={"position": tokens},
        text="token",
        attrs={"answers": texts_of(subject, answer.tolist())},
    )


def _read(here: Tensor, final: Tensor, answer: Tensor) -> tuple[Tensor, ...]:
    """Of log-probabilities [position vocabulary]: the top one, its token, the rank of the answer, bits of entropy and
    of KL(final, here)."""
    top = here.max(-1)
    rank = 1 + (here > here.gather(-1, answer[:, None])).sum(-1)
    entropy = -(here.exp() * here).nan_to_num(0.0).sum(-1) / math.log(2)
    divergence = (final.exp() * (final - here)).nan_to_num(0.0).sum(-1) / math.log(2)
    return top.values.exp(), top.indices, rank, entropy, divergence.clamp_min(0.0)


def attention(subject: Any, prompt: Prompts, layer: int, head: int) -> Reading:
    """See `Verbs.attention`."""
    ids, tokens = one_prompt(subject, prompt)
    rows = subject.capture([ids], Site.ATTENTION, positions="all", layers=layer)["attention"][0]
    if not -rows.shape[1] <= head < rows.shape[1]:
        raise UserError(f"head={head}: layer {layer} has heads 0 to {rows.shape[1] - 1}")
    places = tuple(range(len(ids)))
    return Reading(
        f"{called(subject)}, attention of layer {layer}, head {head}",
        {"query": places, "key": places},
        {"attention": rows[:, head].numpy()},
        ticks={"query": tokens, "key": tokens},
    )


def one_prompt(subject: Any, prompt: Prompts) -> tuple[list[int], tuple[str, ...]]:
    """The token ids of one prompt, special tokens among them, and their texts. Raises UserError for several prompts."""
    rows = subject.tokens(prompt).real
    if len(rows) != 1:
        raise UserError(f"{len(rows)} prompts: expected one, as a string or as its token ids")
    return rows[0], texts_of(subject, rows[0])


def texts_of(subject: Any, ids: list[int]) -> tuple[str, ...]:
    """The text of each token, its space included; its number where the model has no tokenizer."""
    if subject.tokenizer is None:
        return tuple(map(str, ids))
    return tuple(subject.tokenizer.decode([token]) for token in ids)


def token_of(subject: Any, answer: str | int) -> int:
    """The id of an answer: a token's text as it follows the prompt, its space included, or an id.

    Raises UserError where the text is several tokens, which are named, or the id is none of the model's.
    """
    if not isinstance(answer, str):
        try:
            token = int(answer)
        except (TypeError, ValueError):
            raise UserError(f"answer {brief(answer)}: expected a token's text or its id") from None
        if not 0 <= token < subject.facts["vocabulary"]:
            raise UserError(f"answer {token}: {subject.name} has tokens 0 to {subject.facts['vocabulary'] - 1}")
        return token
    from llmgeom.model.tokenizing import after_space

    if subject.tokenizer is None:
        raise UserError(f"answer {answer!r}: {subject.name} has no tokenizer; give the token's id")
    ids = subject.tokenizer(answer, add_special_tokens=False)["input_ids"]
    if len(ids) != 1 and answer.startswith(" "):
        ids = after_space(answer[1:], subject.tokenizer)  # some tokenizers put a second space before " word"
    if len(ids) != 1:
        pieces = ", ".join(map(repr, texts_of(subject, list(ids))))
        raise UserError(
            f"answer {answer!r} is {len(ids)} tokens of {subject.name} ({pieces}): give one token or its id"
        )
    return ids[0]
