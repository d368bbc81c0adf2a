"""Alternative explanations of a label: confounds as columns of a regression, and a bag of the prompt's tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from llmgeom.probe import Capture, Tokens, Unavailable, UserError
from llmgeom.stats.tests import rank_spline

LENGTH, FINAL = "length", "final_token"
AUTOMATIC = (LENGTH, FINAL)
LEAST = 5  # rows of a level with its own column
FEW = 6  # up to so many different numbers, each is a level
MOST_TOKENS = 2000


def confound(capture: Capture, name: str) -> Float[np.ndarray, "row column"]:
    """One confound as columns.

    A number gives itself and a spline in its ranks, so that smooth curved relations are removed too. A category, or a
    number of at most 6 values, gives an indicator for each level with 5 rows or more; rarer levels are joined. There is
    no column if no level is repeated.

    Args:
        capture: The prompts, one row each.
        name: "length" (tokens), "final_token", or a column of the batch.

    Raises:
        UserError: no such column, or bad cells in it.
    """
    prompts = capture.prompt.numpy()
    if name == LENGTH and name not in capture.batch.columns:
        return _number(capture.lengths.numpy()[prompts].astype(np.float64))
    if name == FINAL and name not in capture.batch.columns:
        return _levels(_final(capture))
    column = np.array(capture.batch.column(name))[prompts]
    return _number(column.astype(np.float64)) if column.dtype.kind in "if" else _levels(column.astype(str).tolist())


def design(capture: Capture, names: Sequence[str]) -> Float[np.ndarray, "row column"] | None:
    """The columns of all confounds; None if there are none.

    Raises UserError: more columns than a fifth of the prompts.
    """
    columns = {name: confound(capture, name) for name in names}
    width = {name: x.shape[1] for name, x in columns.items()}
    rows = len(capture.prompt)
    if sum(width.values()) > rows / 5:
        most = max(width, key=lambda name: width[name])
        raise UserError(
            f"the confounds take {sum(width.values())} columns ({most!r} alone {width[most]}) for {rows} prompts; at "
            f"most a fifth can be removed: give more prompts, or leave {most!r} out of --given"
        )
    return np.hstack(list(columns.values())) if sum(width.values()) else None


def bag_of_tokens(capture: Capture) -> Float[np.ndarray, "row token"]:
    """Square roots of the counts of each token in a prompt, for tokens that occur in two prompts or more.

    At most 2,000 tokens, those that occur in the most prompts. Raises Unavailable: inputs are not tokens, or no two
    prompts share a token.
    """
    tokens = capture.batch.tokens
    if not isinstance(tokens, Tokens):
        raise Unavailable("these inputs are rows of numbers: there is no bag of tokens")
    counts = [Counter(ids) for ids in tokens.real]
    prompts = Counter(token for counter in counts for token in counter)
    shared = [token for token, n in sorted(prompts.items(), key=lambda item: (-item[1], item[0])) if n > 1][
        :MOST_TOKENS
    ]
    if not shared:
        raise Unavailable("no two prompts share a token: there is no bag of tokens")
    place = {token: i for i, token in enumerate(shared)}
    bag = np.zeros((len(counts), len(shared)))
    for row, counter in enumerate(counts):
        for token, n in counter.items():
            if token in place:
                bag[row, place[token]] = np.sqrt(n)
    return bag[capture.prompt.numpy()]


def _final(capture: Capture) -> list[str]:
    tokens = capture.batch.tokens
    if not isinstance(tokens, Tokens):
        return [""] * len(capture.prompt)
    return [str(int(i)) for i in tokens.ids[capture.prompt, capture.position]]


def _number(x: np.ndarray) -> np.ndarray:
    if len(set(x.tolist())) <= FEW:
        return _levels([str(value) for value in x.tolist()])
    return np.column_stack([(x - x.mean()) / x.std(), rank_spline(x)])


def _levels(values: Sequence[str]) -> np.ndarray:
    count = Counter(values)
    levels = sorted(value for value, n in count.items() if n >= LEAST)
    if len(levels) == len(count):  # the last level follows from the others
        levels = levels[:-1]
    return np.array([[float(value == level) for level in levels] for value in values]).reshape(len(values), len(levels))
