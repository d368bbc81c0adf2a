"""The prompts of a record, column by column, with each token as text and the likeliest next tokens."""

from __future__ import annotations

import base64
import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from llmgeom.batch import Batch, Rows, Text, Tokens, recorded
from llmgeom.model.capture import Capture, Site
from llmgeom.model.model import Model
from llmgeom.model.passes import Observer, Step

# Number of attention weights in a record, one byte each: the page of two records stays under 3 MB.
SHOWN_WEIGHTS = 200_000
# Number of attention weights in a capture: 1,000 prompts of 20 tokens through 24 layers of 16 heads are 7.7 MB.
KEPT_WEIGHTS = 2**26


def _rows(step: Step) -> dict[str, Tensor]:
    layers = step.layers(Site.ATTENTION)
    alike = len({layer.shape for layer in layers}) == 1
    return {"weights": (255 * torch.stack(layers, 1)).round().to(torch.uint8)} if alike else {}


ATTENTION_ROWS = Observer("attention rows", _rows, frozenset({Site.ATTENTION}), version="1")


def attention_observer(subject: Model, batch: Batch) -> tuple[Observer, ...]:
    """An observer of the attention of each prompt's final query; none if there is no attention or too much of it.

    Prompts with several queried positions get no observer: their rows would take as much memory as the whole pass.
    """
    row = (subject.facts["layers"] or 0) * (subject.facts["heads"] or 0) * batch.tokens.data.shape[1]
    fits = batch.query is None and 0 < len(batch) * row <= KEPT_WEIGHTS
    return (replace(ATTENTION_ROWS, row_bytes=row),) if fits and not subject.unavailable({Site.ATTENTION}) else ()


def prompt_table(
    subject: Model, batch: Batch, tokens: Tokens | Rows, entropy: np.ndarray, capture: Capture | None = None
) -> dict[str, tuple]:
    """A record's prompts, column by column. Tokens without text are decoded.

    Args:
        subject: the model, whose tokenizer decodes.
        batch: the original prompts; tokens: the prompts as the model reads them.
        entropy: [prompt] bits, next-token entropy (mean over the queried positions of a prompt).
        capture: with Site.LIKELY, gives the column "next tokens": the likeliest at the last queried position,
            [piece, probability] each; with ATTENTION_ROWS, the column "attention": the final query's weights on the
            prompt's tokens, one text per layer, base64 of uint8 [head token] in 1/255. If there are more than
            SHOWN_WEIGHTS, only prompts evenly spread over the order of entropies have them; the others have ().
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
        **{name: recorded(column) for name, column in batch.columns.items()},
        "template": batch.cluster,  # the independent units, even if a file names another column as clusters
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
            if (f"{ATTENTION_ROWS.name}.weights", -1) in capture.tensors:
                rows = capture.observed(f"{ATTENTION_ROWS.name}.weights").numpy()
                table["attention"] = _attention(rows, tokens.lengths.numpy(), entropy)
    return table


def _piece(subject: Model, *ids: int) -> str:
    """The text that the last of one or two tokens adds to the one before (some tokenizers write no space before a
    text's first token). A token that is part of a character keeps its own name."""
    if subject.tokenizer is None:
        return str(ids[-1])
    before, whole = (subject.tokenizer.decode(each, clean_up_tokenization_spaces=False) for each in (ids[:-1], ids))
    piece = whole.removeprefix(before)
    if piece and "\ufffd" not in whole:
        return piece
    # Embeddings may be padded beyond the existing tokens.
    return subject.tokenizer.convert_ids_to_tokens(ids[-1]) or f"token {ids[-1]}"


def _likely(subject: Model, tokens: Tokens, capture: Capture) -> tuple[tuple[tuple[str, float], ...], ...]:
    last = {prompt: row for row, prompt in enumerate(capture.prompt.tolist())}
    before, likely = tokens.ids[capture.prompt, capture.position].tolist(), capture.likely.tolist()
    rows = []
    for _, row in sorted(last.items()):
        ids, log_p = likely[row]
        pieces = [_piece(subject, before[row], int(token)) for token in ids]
        rows.append(tuple((piece, round(math.exp(p), 6)) for piece, p in zip(pieces, log_p, strict=True)))
    return tuple(rows)


def _attention(weights: np.ndarray, lengths: np.ndarray, entropy: np.ndarray) -> tuple[tuple[str, ...], ...]:
    """weights [prompt layer head key] uint8; the first `lengths` keys of a prompt are its tokens."""
    n, layers, heads, _ = weights.shape
    fitting = min(n, SHOWN_WEIGHTS // max(int(lengths.mean()) * layers * heads, 1))
    shown = set(np.argsort(entropy, kind="stable")[np.linspace(0, n - 1, fitting).round().astype(int)].tolist())
    return tuple(
        tuple(base64.b64encode(layer[:, :length].tobytes()).decode() for layer in prompt) if i in shown else ()
        for i, (prompt, length) in enumerate(zip(weights, lengths.tolist(), strict=True))
    )
