"""Prompt positions of a label probe: a token counted from the end, or the mean over all tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Literal

import numpy as np
import torch

from llmgeom.batch import Batch, Rows, Tokens, row_numbers
from llmgeom.probe import Capture, UserError

LAST: Final = "last"
MEAN: Final = "mean"
Position = Literal["last", "mean"] | int  # -2 is the token before the last


def read_positions(words: Sequence[str]) -> tuple[Position, ...]:
    """The positions of `--positions` without repetitions; -1 is the last token.

    Raises UserError: a word is neither last, mean nor a whole number below 0.
    """
    positions: list[Position] = []
    for word in words:
        try:
            place = int(word) if word not in (LAST, MEAN) else 0
        except ValueError:
            place = 1
        if place > 0 or word == "0":
            raise UserError(f"--positions {word}: expected last, mean, or a place counted from the end, e.g. -2")
        positions.append(MEAN if word == MEAN else LAST if place in (0, -1) else place)
    return tuple(dict.fromkeys(positions))


def queried(batch: Batch, tokens: Tokens | Rows, positions: Sequence[Position]) -> Batch:
    """The batch with the query positions of the probe.

    Raises UserError: some prompts are too short for a position; the message names their rows.
    """
    if tuple(positions) == (LAST,):
        return batch
    lengths = tokens.lengths[:, None]
    places = [-1 if position == LAST else position for position in positions if position != MEAN]
    if short := [i + 1 for i, n in enumerate(lengths[:, 0].tolist()) if n < -min(places, default=0)]:
        raise UserError(
            f"--positions {min(places)}: {row_numbers(short)} of the prompts have fewer tokens; leave them out, or "
            "give a position nearer to the end"
        )
    place = torch.arange(tokens.data.shape[1])
    at = [
        place < lengths if position == MEAN else place == lengths + (-1 if position == LAST else int(position))
        for position in positions
    ]
    query = torch.stack(at).any(0)
    query[torch.arange(len(query)), lengths[:, 0] - 1] = True  # the record's entropy is that of the next token
    return replace(batch, query=query)


def at_ends(capture: Capture) -> Capture:
    """The final position of each prompt, without activations, for confounds and the bag of tokens."""
    return replace(capture, prompt=torch.arange(len(capture.lengths)), position=capture.lengths - 1, tensors={})


def pooled(capture: Capture, layers: Sequence, layer: int, position: Position) -> np.ndarray:
    """[prompt coordinate] float64: the activations of one layer at one position, heads concatenated."""
    x = layers[layer].double().flatten(1)
    prompt, place = capture.prompt, capture.position
    if position == MEAN:
        count = torch.bincount(prompt, minlength=len(capture.lengths))[:, None]
        return (torch.zeros(len(count), x.shape[1], dtype=x.dtype).index_add_(0, prompt, x) / count).numpy()
    at = place == capture.lengths[prompt] + (-1 if position == LAST else int(position))
    return x[at].numpy() if not at.all() else x.numpy()
