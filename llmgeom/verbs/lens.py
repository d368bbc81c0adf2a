"""The logit lens, of one prompt by position or of many at their last token, and the attention pattern of one prompt."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor

from llmgeom.batch import Batch, Prompts
from llmgeom.errors import UserError, brief
from llmgeom.model.capture import Site
from llmgeom.model.tokenizing import after_space, shuffle, special_tokens
from llmgeom.progress import tell
from llmgeom.verbs.reading import Reading, called

ROWS = 256  # positions whose log-probabilities over the vocabulary are in memory at once


def lens(subject: Any, prompts: Prompts, controls: int, seed: int) -> Reading:
    """See `Verbs.lens`."""
    batch = Batch.of(prompts)
    rows = subject.tokens(batch).real
    if len(rows) > 1:
        return _at_the_last_token(subject, batch, controls, seed)
    ids, tokens = rows[0], texts_of(subject, rows[0])
    values, answer = _by_layer(subject, [ids], "all")
    values["token"] = np.array([texts_of(subject, row) for row in values["token"].tolist()])
    return Reading(
        f"{called(subject)}, logit lens: top token after each layer",
        {"layer": tuple(range(len(subject.blocks) + 1)), "position": tuple(range(len(ids)))},
        values,
        units={"entropy": "bits", "KL": "bits"},
        ticks={"position": tokens},
        text="token",
        attrs={"answers": texts_of(subject, answer.tolist())},
    )


def _by_layer(subject: Any, prompts: Any, positions: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Name -> [layer row] of what `_read` returns, and the model's own top token at each row."""
    seen = subject.capture(prompts, {Site.RESIDUAL, Site.LOG_PROBS}, positions=positions)
    layers, final = seen.layers(Site.RESIDUAL), seen.log_probs
    answer = final.argmax(-1)
    numbers: dict[str, list[Tensor]] = {"probability": [], "token": [], "rank": [], "entropy": [], "KL": []}
    for layer in range(len(layers)):
        parts = [_read(subject.unembed(layers[layer][at : at + ROWS]), final[at : at + ROWS], answer[at : at + ROWS])
                 for at in range(0, len(final), ROWS)]  # fmt: skip
        for name, each in zip(numbers, zip(*parts, strict=True), strict=True):
            numbers[name].append(torch.cat(each))
    return {name: torch.stack(every).numpy() for name, every in numbers.items()}, answer.numpy()


def _at_the_last_token(subject: Any, batch: Batch, controls: int, seed: int) -> Reading:
    """The lens at the last token of each prompt: means over prompts, with their intervals and the controls' bands."""
    values, _ = _by_layer(subject, batch, "last")
    on_top = np.flip(np.minimum.accumulate(np.flip(values["rank"] == 1, 0), 0), 0)  # from this layer to the last
    first = len(on_top) - on_top.sum(0)
    own = {"entropy": values["entropy"], "KL": values["KL"], "decided": on_top.astype(float)}
    curves = {name: rows.mean(1) for name, rows in own.items()}
    for name, rows in own.items():
        curves[f"{name}, low"], curves[f"{name}, high"] = interval(rows)
    bands = {"95 % interval over prompts": ("{}, low", "{}, high")}
    tokens, special = subject.tokens(batch), (0, 0)
    if subject.tokenizer is not None:
        special = special_tokens(subject.tokenizer)
    drawn: dict[str, list[dict[str, np.ndarray]]] = {"untrained copies": [], "shuffled prompts": []}
    for i in range(controls):
        tell("lens of shuffled prompts", i, controls)
        order = replace(batch, inputs=shuffle(tokens, special[0], seed + i, special[1]))
        drawn["shuffled prompts"].append(_by_layer(subject, order, "last")[0])
    with subject.controls() as control:
        for i in range(controls):
            tell("lens of untrained copies", i, controls)
            drawn["untrained copies"].append(_by_layer(control(seed + i), batch, "last")[0])
        control(None)
    for band, draws in drawn.items():
        if draws:
            bands[band] = (f"{{}}, lowest of {band}", f"{{}}, highest of {band}")
            for name in ("entropy", "KL"):
                means = np.stack([draw[name].mean(1) for draw in draws])
                curves[f"{name}, lowest of {band}"], curves[f"{name}, highest of {band}"] = means.min(0), means.max(0)
    low, high = interval(first[None])
    where = {"first layer": float(first.mean()), "first layer interval": (float(low[0]), float(high[0]))}
    return Reading(
        f"{called(subject)}, logit lens at the last token of {len(first)} prompts",
        {"layer": tuple(range(len(on_top)))},
        curves,
        units={"entropy": "bits", "KL": "bits", "decided": "share of prompts"},
        bands=bands,
        attrs={"n": len(first), "draws of each control": controls, **where},
    )


def interval(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Student's 95 % interval of the mean over the last axis."""
    n = rows.shape[-1]
    half = student.ppf(0.975, n - 1) * rows.std(-1, ddof=1) / n**0.5
    return rows.mean(-1) - half, rows.mean(-1) + half


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


def following(subject: Any, answer: str) -> str:
    """An answer as it follows a prompt: with the space before it, where that is one token."""
    try:
        token_of(subject, f" {answer}")
    except UserError:
        return answer
    return f" {answer}"
