"""The logit lens, of one prompt by position or of many at their last token, and the attention pattern of one prompt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmgeom.batch import Batch, Prompts
from llmgeom.errors import UserError, brief
from llmgeom.model.capture import Site
from llmgeom.model.tokenizing import after_space, shuffle, special_tokens
from llmgeom.progress import tell, watched
from llmgeom.stats.information import bits, entropy, kl
from llmgeom.stats.resampling import mean_intervals
from llmgeom.verbs.reading import Reading, called
from llmgeom.verbs.transport import Transport

ROWS = 256  # positions whose log-probabilities over the vocabulary are in memory at once
NUMBERS = ("probability", "token", "rank", "entropy", "KL")
JACOBIAN = "Jacobian {}"  # how an array of the Jacobian lens is called


@watched()
def lens(
    subject: Any, prompts: Prompts, controls: int = 0, seed: int = 0, transport: str | Transport | None = None
) -> Reading:
    """The logit lens: what each layer's residual stream predicts (nostalgebraist 2020).

    Row 0 is the input of the first layer, row l the output of layer l - 1; the last row is the model's own answer.

    Args:
        prompts: One, a string or its token ids, is read at every position; several at their last token.
        controls: Of several prompts: how many untrained copies, and shuffles of each prompt's tokens, make a band.
        seed: Of the controls.
        transport: A Jacobian lens, of `fit_lens` or a published file: its matrices carry the stream to the last
            layer before it is unembedded (Gurnee et al. 2026), at the layers that have one. Each array stands a
            second time, as "Jacobian KL" and so on, with the same bands.

    Returns:
        Of one prompt, over layer and position: `probability` of the top `token`; `rank` of the token that the model
        itself ends in, 1 for the top; `entropy` in bits; `KL` from the final distribution to this one, in bits.
        Of several, over layer: means of `entropy` and `KL`, and `decided`, the share of prompts whose answer is on
        top in this layer and all later ones, with 95 % intervals over prompts and the range of each control's
        draws; in `attrs` the mean first layer from which the answer stays on top.

    Raises:
        Unavailable: How this model goes from its residual stream to logits is not known.
    """
    batch, carried = Batch.of(prompts), None
    if transport is not None:
        carried = (transport if isinstance(transport, Transport) else Transport.load(str(transport))).of(subject)
    rows = subject.tokens(batch).real
    if len(rows) > 1:
        return _at_the_last_token(subject, batch, controls, seed, carried)
    ids, tokens = rows[0], texts_of(subject, rows[0])
    values, answer = _by_layer(subject, [ids], "all", carried)
    for name in {"token", JACOBIAN.format("token")} & values.keys():
        values[name] = np.array([texts_of(subject, row) for row in values[name].tolist()])
    return Reading(
        f"{called(subject)}, logit lens: top token after each layer",
        {"layer": _layers(subject, carried), "position": tuple(range(len(ids)))},
        values,
        units={name: "bits" for name in values if name.endswith(("entropy", "KL"))},
        ticks={"position": tokens},
        text={name: JACOBIAN.format("token") if name.startswith(JACOBIAN[:8]) else "token" for name in values},
        attrs={"answers": texts_of(subject, answer.tolist())},
    )


def _layers(subject: Any, carried: Mapping[int, Tensor] | None) -> tuple[int, ...]:
    """The rows of a lens: all, or those that a Jacobian lens has a matrix for, and the model's own answer."""
    depth = len(subject.blocks)
    return tuple(range(depth + 1)) if carried is None else (*sorted(carried), depth)


def _by_layer(
    subject: Any, prompts: Any, positions: str, carried: Mapping[int, Tensor] | None
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Name -> [layer row] of what `_read` returns, and the model's own top token at each row; with matrices of a
    Jacobian lens also of the stream that they carried to the last layer."""
    seen = subject.capture(prompts, {Site.RESIDUAL, Site.LOG_PROBS}, positions=positions)
    final, answer = seen.log_probs, seen.log_probs.argmax(-1)
    stream, layers = seen.layers(Site.RESIDUAL), _layers(subject, carried)
    ways = {"{}": [stream[layer] for layer in layers]}
    if carried is not None:
        ways[JACOBIAN] = [
            stream[layer].float() @ carried[layer].T.to(stream[layer].device) if layer in carried else stream[layer]
            for layer in layers
        ]
    numbers = {}
    for way, streams in ways.items():
        read = []
        for rows in streams:
            parts = [
                _read(subject.unembed(rows[at : at + ROWS]), final[at : at + ROWS], answer[at : at + ROWS])
                for at in range(0, len(final), ROWS)
            ]
            read.append([torch.cat(each) for each in zip(*parts, strict=True)])
        for name, by_layer in zip(NUMBERS, zip(*read, strict=True), strict=True):
            numbers[way.format(name)] = torch.stack(by_layer).numpy()
    return numbers, answer.numpy()


def _at_the_last_token(
    subject: Any, batch: Batch, controls: int, seed: int, carried: Mapping[int, Tensor] | None
) -> Reading:
    """The lens at the last token of each prompt: means over prompts, with their intervals and the controls' bands."""
    values, _ = _by_layer(subject, batch, "last", carried)
    layers, n = _layers(subject, carried), len(batch)
    ways = ("{}",) if carried is None else ("{}", JACOBIAN)
    curves: dict[str, np.ndarray] = {}
    where: dict[str, Any] = {}
    for way in ways:
        ranks = values[way.format("rank")]
        on_top = np.flip(np.minimum.accumulate(np.flip(ranks == 1, 0), 0), 0)  # from this layer to the last
        for name, rows in (
            ("entropy", values[way.format("entropy")]),
            ("KL", values[way.format("KL")]),
            ("decided", on_top.astype(float)),
        ):
            curves[way.format(name)] = rows.mean(1)
            curves[f"{way.format(name)}, low"], curves[f"{way.format(name)}, high"] = mean_intervals(rows).T
        first = np.array(layers)[len(layers) - on_top.sum(0)]
        where[way.format("first layer")] = float(first.mean())
        where[way.format("first layer interval")] = tuple(mean_intervals(first[None])[0].tolist())
    bands = {"95 % interval over prompts": ("{}, low", "{}, high")}
    tokens, special = subject.tokens(batch), special_tokens(subject.tokenizer)
    drawn: dict[str, list[dict[str, np.ndarray]]] = {"untrained copies": [], "shuffled prompts": []}
    for i in range(controls):
        tell("lens of shuffled prompts", i, controls)
        order = replace(batch, inputs=shuffle(tokens, special[0], seed + i, special[1]))
        drawn["shuffled prompts"].append(_by_layer(subject, order, "last", carried)[0])
    with subject.controls() as control:
        for i in range(controls):
            tell("lens of untrained copies", i, controls)
            drawn["untrained copies"].append(_by_layer(control(seed + i), batch, "last", carried)[0])
        control(None)
    for band, draws in drawn.items():
        if draws:
            bands[band] = (f"{{}}, lowest of {band}", f"{{}}, highest of {band}")
            for name in (way.format(name) for way in ways for name in ("entropy", "KL")):
                means = np.stack([draw[name].mean(1) for draw in draws])
                curves[f"{name}, lowest of {band}"], curves[f"{name}, highest of {band}"] = means.min(0), means.max(0)
    drawn_of = {name: "share of prompts" if name == "decided" else "bits" for name in ("entropy", "KL", "decided")}
    return Reading(
        f"{called(subject)}, logit lens at the last token of {n} prompts",
        {"layer": layers},
        curves,
        units={way.format(name): unit for way in ways for name, unit in drawn_of.items()},
        bands=bands,
        lines={name: {(other := JACOBIAN.format(name)): curves[other]} for name in drawn_of} if carried else {},
        attrs={"n": n, "draws of each control": controls, **where},
    )


def _read(here: Tensor, final: Tensor, answer: Tensor) -> tuple[Tensor, ...]:
    """Of log-probabilities [position vocabulary]: the top one, its token, the rank of the answer, bits of entropy and
    of KL(final, here)."""
    top = here.max(-1)
    rank = 1 + (here > here.gather(-1, answer[:, None])).sum(-1)
    return top.values.exp(), top.indices, rank, bits(entropy(here)), bits(kl(final, here)).clamp_min(0.0)


def attention(subject: Any, prompt: Prompts, layer: int, head: int) -> Reading:
    """The attention pattern of one head on one prompt: `attention` over query and key position; rows sum to 1.

    Args:
        prompt: A string, or its token ids.
        layer, head: Which; a query head.
    """
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


def asking(ids: Tensor, places: Iterable[int]) -> Batch:
    """Sequences of one length, ids [sequence place], each its own cluster, queried at some places."""
    query = torch.isin(torch.arange(ids.shape[1]), torch.tensor([*places]))
    return replace(Batch.of(ids.tolist()), query=query.expand(ids.shape))


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
