"""Long sequences of a world in a model's context, and what readers of them know at each symbol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmgeom.errors import UserError, unknown
from llmgeom.model.tokenizing import special_tokens
from llmgeom.world import World

SUFFIXES, ORDERS = (1, 2, 3, 4, 5, 6), (0, 1, 2, 3)
DECAYS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
LETTERS = tuple("ABCDEFGHJKLMNOPQRSTUVWXYZ")
WORDS = (
    "apple", "river", "stone", "chair", "paper", "cloud", "horse", "glass", "table", "bread",
    "light", "water", "music", "plant", "tower", "sheep", "metal", "beach", "storm", "clock",
)  # fmt: skip
# What stands between two symbols, and what they are.
RENDERINGS = {
    "spaces": (" ", LETTERS),
    "commas": (", ", LETTERS),
    "lines": ("\n", LETTERS),
    "words": (" ", WORDS),
    "anew": (" ", LETTERS),  # drawn anew for each sequence
}


def long(world: World | str, length: int) -> World:
    """A world whose sequences have `length` symbols. Raises UserError for one that shows anything else."""
    from llmgeom.wind_tunnels import load_world

    world = load_world(world, text=True) if isinstance(world, str) else world
    if length < 16:
        raise UserError(f"{length} symbols of {world.title}: expected 16 or more")
    world = world.showing(length)
    more = world.features or world.header or len(world.query) != world.length
    if more or len(world.answers.tokens) < world.vocabulary:
        raise UserError(
            f"{world.title}: expected a world that shows one symbol a step and nothing else, such as edge-hmm or markov"
        )
    return world


def exact(world: World, symbols: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """[sequence symbol state] the exact belief after each symbol, and [sequence symbol next] the distribution of the
    next one. Where no state is hidden both are the latter."""
    predictive = world.log_predictive(symbols).double().exp().numpy()
    belief = world.log_belief(symbols)
    return predictive if belief is None else belief.double().exp().numpy(), predictive


def mixture(worlds: Sequence[World], symbols: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """`exact` for one who knows that a sequence comes from one of these worlds, each with the same probability.

    P(world | o_1 .. o_t) follows from the probabilities that each gave to the symbols; belief and next symbol are the
    means under it. States have the same names in all of them.
    """
    known = [exact(world, symbols) for world in worlds]
    evidence = []
    for world, (_, predictive) in zip(worlds, known, strict=True):
        ahead = world.log_first().expand(len(symbols), 1, -1)
        told = torch.cat([ahead, torch.from_numpy(predictive[:, :-1]).log()], 1)
        evidence.append(told.gather(2, symbols[..., None])[..., 0].cumsum(1))
    share = torch.stack(evidence).softmax(0).numpy()[..., None]  # [world sequence symbol 1]
    belief, predictive = (np.stack(one) for one in zip(*known, strict=True))  # [world sequence symbol number]
    return (share * belief).sum(0), (share * predictive).sum(0)


def written(
    subject: Any, symbols: Tensor, vocabulary: int, rendering: str, seed: int
) -> tuple[Tensor, list[int], Tensor]:
    """The sequences as tokens: ids [sequence place], the place after each symbol where the next one is predicted, and
    [sequence symbol] the token of each symbol of the world.

    The tokens are drawn once for all sequences, since a linear read-out cannot know which letter of another sequence
    stands for which symbol. A wind tunnel reads the symbols themselves.
    """
    if rendering not in RENDERINGS:
        raise unknown("rendering", rendering, RENDERINGS)
    if subject.tokenizer is None:
        return symbols, list(range(symbols.shape[1])), torch.arange(vocabulary).expand(len(symbols), -1)
    encode = lambda text: subject.tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    first = subject.tokenizer("a")["input_ids"][: special_tokens(subject.tokenizer)[0]]
    between, candidates = RENDERINGS[rendering]
    after = encode(cut) if (cut := between.removesuffix(" ")) else []  # the rest of it begins the next symbol's token
    single = [ids[0] for one in candidates if len(ids := encode(" " * between.endswith(" ") + one)) == 1]
    if len(single) < vocabulary:
        raise UserError(
            f"{subject.name}: {len(single)} of {', '.join(candidates)} are one token; the world needs {vocabulary}"
        )
    rng = np.random.default_rng([seed, 7])
    draws = len(symbols) if rendering == "anew" else 1
    drawn = np.stack([rng.choice(single, vocabulary, replace=False) for _ in range(draws)])
    tokens = torch.from_numpy(drawn).expand(len(symbols), -1)
    step = 1 + len(after)
    ids = torch.zeros(len(symbols), len(first) + step * symbols.shape[1], dtype=torch.int64)
    ids[:, : len(first)] = torch.tensor(first, dtype=torch.int64)
    ids[:, len(first) :: step] = tokens.gather(1, symbols)
    for j, token in enumerate(after, start=1):
        ids[:, len(first) + j :: step] = token
    limit = subject.facts["positions"]
    if limit is not None and ids.shape[1] > limit:
        raise UserError(f"{ids.shape[1]} tokens a sequence: {subject.name} reads {limit}; ask for fewer symbols")
    return ids, list(range(len(first) + len(after), ids.shape[1], step)), tokens


def rivals(worlds: Sequence[World], which: np.ndarray, symbols: np.ndarray) -> dict[str, np.ndarray]:
    """Reader -> [sequence symbol feature]: beliefs of suffix readers, counts in the context, exponential filters.

    Args:
        which: [sequence] the number of the world that each comes from.
    """
    (sequences, width), count = symbols.shape, worlds[0].vocabulary
    found: dict[str, np.ndarray] = {}
    for k in SUFFIXES:  # the exact belief after the last k symbols alone; of fewer at the beginning
        parts = []
        for i, row in enumerate(symbols):
            windows = np.lib.stride_tricks.sliding_window_view(row, k)
            flat, back = np.unique(windows, axis=0, return_inverse=True)
            later = exact(worlds[which[i]].showing(k), torch.from_numpy(flat.copy()))[0][:, -1][back.ravel()]
            begin = exact(worlds[which[i]].showing(k), torch.from_numpy(row[None, :k].copy()))[0][0, : k - 1]
            parts.append(np.concatenate([begin, later]))
        found[f"last {k} symbol{'s' * (k > 1)}"] = np.stack(parts)
    for k in ORDERS:
        found[f"counts of order {k}"] = _counts(symbols, k, count)
    one_hot = np.eye(count)[symbols]
    states, decays = np.zeros((sequences, len(DECAYS), count)), np.array(DECAYS)[:, None]
    filters = np.empty((sequences, width, len(DECAYS) * count))
    for i in range(width):
        states = states * decays + one_hot[:, i, None]
        filters[:, i] = (states * (1 - decays)).reshape(sequences, -1)
    found["six exponential filters"] = filters
    return found


def _counts(symbols: np.ndarray, order: int, count: int) -> np.ndarray:
    """[sequence symbol next]: frequencies, 1/2 added to each, of what has followed the last `order` symbols so far."""
    found = np.empty((*symbols.shape, count))
    for s, row in enumerate(symbols):
        seen: dict[tuple[int, ...], np.ndarray] = {}
        for i in range(len(row)):
            if i >= order:
                seen.setdefault(tuple(row[i - order : i]), np.full(count, 0.5))[row[i]] += 1
            now = seen.get(tuple(row[i - order + 1 : i + 1]), np.full(count, 0.5))
            found[s, i] = now / now.sum()
    return found
