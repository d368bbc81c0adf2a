"""What a label probe takes from prompts: the label, its other explanations, and the positions that are read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Final, Literal

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from llmgeom.batch import Batch, Tokens, row_numbers
from llmgeom.columns import MESSAGES
from llmgeom.errors import Unavailable, UserError, unknown
from llmgeom.model.capture import Capture
from llmgeom.model.model import Model
from llmgeom.model.tokenizing import has_template, token_ids
from llmgeom.stats.label_scores import Kind
from llmgeom.stats.tests import rank_spline

LEAST = 5  # least rows of a class, and of a level of a confound that has its own column
MOST_CLASSES = 30
Wanted = Literal["auto", "binary", "classes", "number"]
LENGTH, FINAL = "length", "final_token"
FEW = 6  # up to so many different numbers of a confound, each is a level
MOST_TOKENS = 2000
LAST: Final = "last"
MEAN: Final = "mean"
# In the last turn of a chat, or in the text of a column `span`.
PLACES = tuple(f"{part}-{where}" for part in ("user", "assistant", "span") for where in ("first", "last", "mean"))
Position = str | int  # "last", "mean", one of PLACES; -2 is the token before the last


# ---- the label -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A label: its kind, its value for each prompt, and its classes in order of value (none for a number)."""

    name: str
    kind: Kind
    label: np.ndarray
    classes: tuple[str, ...]


def read_target(batch: Batch, name: str, kind: Wanted = "auto") -> Target:
    """A column as a label.

    With kind "auto", two values are a binary label, more numbers are a number, and more texts are classes. The positive
    value of a binary label is the second in sorted order; numbers are sorted as numbers. Raises UserError: no such
    column, bad cells, one value, a class of fewer than 5 rows, or too many classes.
    """
    if name not in batch.columns:
        raise _no_column(batch, name, kind)
    column = batch.column(name)
    values = sorted(set(column))
    if len(values) < 2:
        raise UserError(f"column {name!r} is {values[0]!r} in all {len(column)} rows: a label needs two values")
    numeric = not isinstance(column[0], str | bool)
    if kind == "auto":
        kind = "binary" if len(values) == 2 else "number" if numeric else "classes"
    if kind == "number":
        if not numeric:
            size = " of at most 64 bits" * str(values[0]).lstrip("+-").isdigit()  # a longer one is read as a name
            raise UserError(f"--kind number: column {name!r} holds {values[0]!r}, which is no number{size}")
        return Target(name, kind, np.array(column, dtype=np.float64), ())
    if kind == "binary" and len(values) > 2:
        raise UserError(f"--kind binary: column {name!r} has {len(values)} values; two are expected, or --kind classes")
    count = Counter(column)
    if len(count) > MOST_CLASSES:
        raise UserError(
            f"column {name!r} has {len(count)} classes in {len(column)} rows; at most {MOST_CLASSES} can be read: "
            "join classes, or give --kind number if it counts something"
        )
    if rare := {value for value, n in count.items() if n < LEAST}:
        rows = [i for i, cell in enumerate(column, 1) if cell in rare]
        raise UserError(
            f"column {name!r} has fewer than {LEAST} rows of {', '.join(map(repr, sorted(rare)))} "
            f"({row_numbers(rows)}): add prompts of this class, or remove these rows"
        )
    names = {value: str(value) for value in values}  # by value: 1 and 1.0 are one class
    return Target(name, kind, np.array([names[cell] for cell in column]), tuple(names.values()))


def _no_column(batch: Batch, name: str, kind: Wanted) -> UserError:
    """The error for a missing column; it names the columns that can be a label."""
    labels = []
    for column in batch.columns:
        with suppress(UserError):
            labels.append(read_target(batch, column, kind).name)
    if not labels:
        return UserError(
            f"--target {name}: there is no such column, and none that can be a label; add one with two values or more, "
            f"each in at least {LEAST} rows"
        )
    varied = [column for column, cells in batch.columns.items() if len(set(cells)) > 1]
    near = get_close_matches(name, varied, n=1)  # if the close column cannot be a label, the next error says why
    return unknown("column of --target", name, labels, ", the columns that can be a label", near)


def transferred(batch: Batch, target: Target, column: str) -> Shaped[np.ndarray, " row"]:
    """The cells of a transfer column: each of its values is predicted from the others.

    Raises UserError: fewer than 3 values, a value without 5 rows of every class, or a cluster with two values.
    """
    cells, clusters = np.array([str(cell) for cell in batch.column(column)]), np.asarray(batch.cluster)
    values = np.unique(cells)
    if len(values) < 3:
        raise UserError(
            f"--transfer {column}: it has {len(values)} values; at least 3 are needed, since the penalty is "
            "chosen by holding out a second one"
        )
    for value, rows in ((value, cells == value) for value in values):
        short = [name for name in target.classes if (target.label[rows] == name).sum() < LEAST]
        if short or rows.sum() < LEAST:
            raise UserError(f"--transfer {column}: {str(value)!r} has fewer than {LEAST} prompts of {short or 'any'}")
    if mixed := [name for name in set(clusters.tolist()) if len(set(cells[clusters == name])) > 1]:
        raise UserError(f"--transfer {column}: cluster {mixed[0]!r} has several of its values; clusters stay whole")
    return cells


# ---- its other explanations ------------------------------------------------------------------------------------------


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
        tokens = capture.batch.tokens
        ids = (
            tokens.ids[capture.prompt, capture.position].tolist() if isinstance(tokens, Tokens) else [0] * len(prompts)
        )
        return _levels([str(i) for i in ids])
    column = np.array(capture.batch.column(name))[prompts]
    return _number(column.astype(np.float64)) if column.dtype.kind in "if" else _levels(column.astype(str).tolist())


def design(
    capture: Capture, names: Sequence[str], label: str, truth: Float[np.ndarray, "row label"]
) -> Float[np.ndarray, "row column"] | None:
    """The columns of all confounds; None if there are none.

    Raises UserError: more columns than a fifth of the prompts; confounds that determine the label (its name, and
    `truth`), so that nothing of it is left to read.
    """
    columns = {name: confound(capture, name) for name in names}
    width = {name: x.shape[1] for name, x in columns.items()}
    rows, every = len(capture.prompt), sum(width.values())
    if not every:
        return None
    if every > rows / 5:
        most = max(width, key=lambda name: width[name])
        raise UserError(
            f"the confounds take {every} columns ({most!r} alone {width[most]}) for {rows} prompts; at "
            f"most a fifth can be removed: give more prompts, or leave {most!r} out of --given"
        )

    def left(columns: np.ndarray) -> bool:
        x = np.column_stack([np.ones(len(columns)), columns])
        missed = truth - x @ np.linalg.lstsq(x, truth, rcond=None)[0]
        return bool(np.square(missed).sum() > 1e-9 * np.square(truth - truth.mean(0)).sum())

    joined = np.hstack(list(columns.values()))
    if not left(joined):
        it = next((name for name, x in columns.items() if not left(x)), " and ".join(columns))
        raise UserError(
            f"the label {label!r} is a function of {it}: the same {it} has the same label in every prompt, so nothing "
            f"is left to read once it is held fixed; give prompts in which they differ, or leave {it} out of --given"
        )
    return joined


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


# ---- positions -------------------------------------------------------------------------------------------------------


def read_positions(words: Sequence[str]) -> tuple[Position, ...]:
    """The positions of `--positions` without repetitions; -1 is the last token.

    Raises UserError: a word is neither last, mean, a place in a part of the prompt nor a whole number below 0.
    """
    positions: list[Position] = []
    for word in words:
        try:
            place = int(word) if word not in (LAST, MEAN, *PLACES) else 0
        except ValueError:
            place = 1
        if place > 0 or word == "0":
            raise UserError(
                f"--positions {word}: expected last, mean, a place counted from the end, e.g. -2, or one in a chat or "
                f"span: {', '.join(PLACES)}"
            )
        positions.append(word if word in (MEAN, *PLACES) else LAST if place in (0, -1) else place)
    return tuple(dict.fromkeys(positions))


def located(model: Model, batch: Batch, positions: Sequence[Position]) -> Batch:
    """Chats in the tokenizer's template, as tokens, with the first and last token of each part that a position names as
    columns. Parts: "user" and "assistant", the content of the last such turn; "span", the column's text where it stands
    last. Without chats and parts the batch is returned as it is.

    Raises UserError: no tokenizer, or none with a template and offsets; a
    prompt without such a part.
    """
    parts = list(dict.fromkeys(p.partition("-")[0] for p in positions if p in PLACES))
    chats = batch.columns.get(MESSAGES)
    if not parts and chats is None:
        return batch
    tokenizer: Any = model.tokenizer
    if not getattr(tokenizer, "is_fast", False) or (chats is not None and not has_template(tokenizer)):
        needed = "a chat template" if getattr(tokenizer, "is_fast", False) else "a fast tokenizer, which gives offsets"
        raise UserError(f"{model.name}: chats and their parts need {needed}")
    written = model.facts.get("chat") or chats is not None
    rows: list[Tensor] = []
    found: dict[str, list[int]] = {f"{part} {end}": [] for part in parts for end in ("first", "last")}
    for i, text in enumerate(batch.text):
        turns = json.loads(chats[i]) if chats is not None else [{"role": "user", "content": text}]
        if written:
            asks = turns[-1]["role"] != "assistant"
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=asks)
        coded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = coded["input_ids"] if written else token_ids(tokenizer, [text])[0]
        rows.append(torch.tensor(ids))
        shift, before = len(ids) - len(coded["input_ids"]), len(text)
        for part in parts[::-1]:  # the assistant's turn before the user's, which it may repeat
            content = (
                str(batch.column("span")[i])
                if part == "span"
                else next((turn["content"].strip() for turn in turns[::-1] if turn["role"] == part), "")
            )
            start = text.rfind(content, 0, len(text) if part == "span" else before) if content else -1
            if start < 0:
                raise UserError(f"--positions {part}-...: prompt {i + 1} has no such part; leave the prompt out")
            before = start if part == "assistant" and turns[-1]["role"] == "assistant" else before
            at = [k for k, (a, b) in enumerate(coded["offset_mapping"]) if a < start + len(content) and b > start]
            found[f"{part} first"].append(shift + at[0])
            found[f"{part} last"].append(shift + at[-1])
    tokens = Tokens(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor([*map(len, rows)]))
    kept = {name: cells for name, cells in batch.columns.items() if name != MESSAGES}
    return replace(batch, inputs=tokens, columns=kept | {name: tuple(cells) for name, cells in found.items()})


def _there(position: Position, place: Tensor, lengths: Tensor, batch: Batch, rows: Tensor) -> Tensor:
    """Whether places in these rows of the batch are at a position."""
    if position == MEAN:
        return place < lengths
    if position not in PLACES:
        return place == lengths + (-1 if position == LAST else int(position))
    part, where = str(position).split("-")
    first, last = (torch.tensor(batch.columns[f"{part} {end}"])[rows] for end in ("first", "last"))
    return (place >= (last if where == "last" else first)) & (place <= (first if where == "first" else last))


def queried(model: Model, batch: Batch, positions: Sequence[Position]) -> Batch:
    """The batch with the query positions of the probe; chats as tokens.

    Raises UserError: some prompts are too short for a position, the message names their rows; and as `located`.
    """
    batch = located(model, batch, positions)
    if tuple(positions) == (LAST,):
        return batch
    tokens = model.tokens(batch)
    lengths = tokens.lengths[:, None]
    places = [int(position) for position in positions if not isinstance(position, str)]
    if short := [i + 1 for i, n in enumerate(lengths[:, 0].tolist()) if n < -min(places, default=0)]:
        raise UserError(
            f"--positions {min(places)}: {row_numbers(short)} of the prompts have fewer tokens; leave them out, or "
            "give a position nearer to the end"
        )
    place, rows = torch.arange(tokens.data.shape[1]), torch.arange(len(lengths))[:, None]
    query = torch.stack([_there(position, place, lengths, batch, rows) for position in positions]).any(0)
    query[rows[:, 0], lengths[:, 0] - 1] = True  # the record's entropy is that of the next token
    return replace(batch, query=query)


def pooled(capture: Capture, layers: Any, layer: int, position: Position) -> np.ndarray:
    """[prompt coordinate] float64: the activations of one layer at one position, heads concatenated."""
    x, prompt = layers[layer].double().flatten(1), capture.prompt
    at = _there(position, capture.position, capture.lengths[prompt], capture.batch, prompt)
    if not str(position).endswith(MEAN):
        return x[at].numpy() if not at.all() else x.numpy()
    count = torch.bincount(prompt[at], minlength=len(capture.lengths))[:, None]
    return (torch.zeros(len(count), x.shape[1], dtype=x.dtype).index_add_(0, prompt[at], x[at]) / count).numpy()
