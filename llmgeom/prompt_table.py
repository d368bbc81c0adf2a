"""The prompts of a record, column by column, with each token as text and the likeliest next tokens."""

from __future__ import annotations

import math

import numpy as np

from llmgeom.batch import Batch, Rows, Text, Tokens
from llmgeom.model.capture import Capture
from llmgeom.model.subject import Subject


def prompt_table(
    subject: Subject, batch: Batch, tokens: Tokens | Rows, entropy: np.ndarray, capture: Capture | None = None
) -> dict[str, tuple]:
    """A record's prompts, column by column. Tokens without text are decoded.

    Args:
        subject: its tokenizer decodes.
        batch: the prompts as they were given; tokens: as the model reads them.
        entropy: [prompt] bits, next-token entropy (mean over the queried positions of a prompt).
        capture: with Site.LIKELY, gives the column "next tokens": the likeliest at the last queried position,
            [piece, probability] each.
    """
    n = len(batch)
    if isinstance(batch.inputs, Text):
        text = batch.text
    elif isinstance(tokens, Rows):
        text = tuple(
            f"{n} rows of {cluster}" for n, cluster in zip(tokens.lengths.tolist(), batch.cluster, strict=True)
        )
    elif subject.tokenizer is not None:
        text = tuple(subject.tokenizer.decode(ids) for ids in tokens.real)
    else:
        text = tuple(" ".join(map(str, ids)) for ids in tokens.real)
    table = {
        "tags": ("",) * n,
        "domain": (str(batch.source.get("name", "")),) * n,
        "template": batch.cluster,
        **{name: _cells(column) for name, column in batch.columns.items()},
        "text": text,
        "entropy": tuple(round(float(h), 6) for h in entropy),
        "tokens": tuple(tokens.lengths.tolist()),
    }
    if isinstance(tokens, Tokens):
        table["pieces"] = tuple(
            tuple(_piece(subject, *ids[max(i - 1, 0) : i + 1]) for i in range(len(ids))) for ids in tokens.real
        )
        if capture is not None:
            table["next tokens"] = _likely(subject, tokens, capture)
    return table


def _cells(column: tuple) -> tuple:
    """A column as a record holds it: finite numbers as they are, everything else as text; a missing cell is ""."""
    if all(isinstance(cell, int | float) and not isinstance(cell, bool) and math.isfinite(cell) for cell in column):
        return column
    return tuple("" if cell is None else str(cell) for cell in column)


def _piece(subject: Subject, *ids: int) -> str:
    """The last of one or two tokens as text: what it adds to the one before, since some tokenizers write no space
    before a text's first token. A token that is part of a character keeps its own name."""
    if subject.tokenizer is None:
        return str(ids[-1])
    before, whole = (subject.tokenizer.decode(each, clean_up_tokenization_spaces=False) for each in (ids[:-1], ids))
    piece = whole.removeprefix(before)
    if piece and "\ufffd" not in whole:
        return piece
    # Embeddings may be padded beyond the tokens that exist.
    return subject.tokenizer.convert_ids_to_tokens(ids[-1]) or f"token {ids[-1]}"


def _likely(subject: Subject, tokens: Tokens, capture: Capture) -> tuple[tuple[tuple[str, float], ...], ...]:
    last = {prompt: row for row, prompt in enumerate(capture.prompt.tolist())}
    rows = []
    for prompt, row in sorted(last.items()):
        before, (ids, log_p) = int(tokens.ids[prompt, capture.position[row]]), capture.likely[row].tolist()
        pieces = [_piece(subject, before, int(token)) for token in ids]
        rows.append(tuple((piece, round(math.exp(p), 6)) for piece, p in zip(pieces, log_p, strict=True)))
    return tuple(rows)
