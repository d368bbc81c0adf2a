"""The logit lens and the attention pattern of one prompt, and scores of every head on repeated random tokens."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmgeom.batch import Batch, Prompts, Tokens
from llmgeom.errors import UserError, brief
from llmgeom.model.capture import Site
from llmgeom.model.passes import Observer, Step
from llmgeom.model.tokenizing import after_space, special_tokens
from llmgeom.verbs.reading import Reading, called

ROWS = 256  # positions whose log-probabilities over the vocabulary are in memory at once
KINDS = ("induction", "previous token", "duplicate token", "first token")


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


def heads(subject: Any, length: int, sequences: int, seed: int) -> Reading:
    """See `Verbs.heads`."""
    if length < 2 or sequences < 1:
        raise UserError(
            f"heads(length={length}, sequences={sequences}): expected 2 tokens or more, in 1 sequence or more"
        )
    ids, before = repeated(subject, length, sequences, seed)

    def scores(step: Step) -> dict[str, Tensor]:
        """[row layer head kind]: the weight on each kind's key; rows are the queries of the second half."""
        t = step.position
        keys = torch.stack([t - length + 1, t - 1, t - length, torch.zeros_like(t)], 1)
        every = [rows.gather(2, keys.to(rows.device)[:, None].expand(-1, rows.shape[1], -1))
                 for rows in step.layers(Site.ATTENTION)]  # fmt: skip
        return {"scores": torch.stack(every, 1)}

    query = (torch.arange(ids.shape[1]) >= before + length).expand(ids.shape)
    source = {"kind": "tokens", "name": "repeated random tokens", "seed": seed}
    batch = Batch(Tokens(ids, torch.full((sequences,), ids.shape[1])), tuple(map(str, range(sequences))), source, query)
    observer = Observer("heads", scores, frozenset({Site.ATTENTION}))
    seen = subject.capture(batch, {Site.ENTROPY}, observers=[observer])
    by_row = seen.observed("heads.scores").double().numpy()
    mean = by_row.mean(0)
    by_sequence = np.stack([by_row[seen.prompt.numpy() == i].mean(0) for i in range(sequences)])
    error = by_sequence.std(0, ddof=1) / sequences**0.5 if sequences > 1 else np.zeros_like(mean)
    values = {kind: mean[:, :, k] for k, kind in enumerate(KINDS)}
    values |= {f"error of {kind}": error[:, :, k] for k, kind in enumerate(KINDS)}
    return Reading(
        f"{called(subject)}, attention heads on {sequences} x 2 x {length} repeated random tokens",
        {"layer": tuple(range(mean.shape[0])), "head": tuple(range(mean.shape[1]))},
        values,
        attrs={"even attention": float((1.0 / (seen.position.double() + 1)).mean()), "sequences": sequences},
    )


def repeated(subject: Any, length: int, sequences: int, seed: int) -> tuple[Tensor, int]:
    """[sequence token] ids: what the tokenizer puts before a text, then `length` random tokens twice; and how many
    stand before. No token is drawn twice in a sequence, so that only one earlier place holds the same one."""
    known = subject.facts["vocabulary"]
    special: set[int] = set()
    prefix: list[int] = []
    if subject.tokenizer is not None:
        known = min(known, len(subject.tokenizer))
        special = set(getattr(subject.tokenizer, "all_special_ids", ()))
        prefix = list(subject.tokenizer("a")["input_ids"][: special_tokens(subject.tokenizer)[0]])
    usable = np.array([token for token in range(known) if token not in special])
    if length > len(usable):
        raise UserError(f"heads(length={length}): {subject.name} has {len(usable)} tokens to draw from")
    rng = np.random.default_rng(seed)
    drawn = np.stack([rng.choice(usable, length, replace=False) for _ in range(sequences)])
    ids = np.concatenate([np.tile(prefix, (sequences, 1)), drawn, drawn], 1).astype(np.int64)
    return torch.from_numpy(ids), len(prefix)
