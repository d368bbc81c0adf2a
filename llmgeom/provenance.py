"""What a record says besides its results: where its numbers come from, doubts about them, and its prompts.

A prompt is a row: its columns, each token as text, the likeliest next tokens, and the attention of its final query.
"""

from __future__ import annotations

import base64
import math
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmgeom import __version__, claims
from llmgeom.batch import Batch, Rows, Text, Tokens, recorded
from llmgeom.cache import keys
from llmgeom.model import tokenizing
from llmgeom.model.capture import Capture, Site
from llmgeom.model.model import Model
from llmgeom.model.passes import Observer, Step

# A run of letters and digits, or one sign of a script without spaces: kana, Chinese, Thai.
WORD = r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff]|[^\W\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff]+"
ALIKE = 0.6  # share of words that fillings of one template have in common; other prompts hardly ever reach it
MOST_ALIKE = 0.1  # share of such prompts: independent prompts have at most .002, fillings .17 and more
LEAST_SPREAD = 0.05  # bits that entropy must vary by; declared in advance, so that no metric ranks rounding
CONTROLS = 8  # draws of each control; docs/claims.md has what fewer and more give
UNCLAIMED = 4  # of one that no claim of the record names
# Number of attention weights in a record, one byte each: the page of two records stays under 3 MB.
SHOWN_WEIGHTS = 200_000
# Number of attention weights in a capture: 1,000 prompts of 20 tokens through 24 layers of 16 heads are 7.7 MB.
KEPT_WEIGHTS = 2**26
ATTENTION_ROWS = "attention rows"  # the name of the observer


def provenance(batch: Batch, tokens: Tokens | Rows, seed: int, controls: int) -> dict[str, Any]:
    """The facts of every record, whatever was measured."""
    import transformers

    # Libraries that influence numbers.
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}
    return {
        "llmgeom": __version__,
        "seed": seed,
        "nulls": controls,
        "prompts_hash": keys.of_tokens(tokens),
        "claims_hash": claims.digest(),
        "prompts": len(batch),
        "clusters": len(set(batch.cluster)),
        "versions": versions,
    }


def took(started: float) -> dict[str, Any]:
    """Facts that vary between equal runs, and the program's version; `started` is a time.time()."""
    return {
        "seconds": round(time.time() - started, 3),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "program": keys.of_program(),
    }


def flat_entropy(batch: Batch, entropy: np.ndarray, vocabulary: int) -> dict[str, str]:
    """The sentence above all claims where next-token entropy, in bits, does not vary over the prompts; else empty."""
    if len(entropy) < 2 or batch.posterior is not None or entropy.std() >= LEAST_SPREAD:
        return {}
    even, mean = math.log2(vocabulary), entropy.mean()
    near = abs(mean - even) < LEAST_SPREAD
    what = f"log2 {vocabulary:,} = {mean:.3f} bits, an even answer," if near else f"{mean:.3f} bits"
    return {"flat entropy": f"Next-token entropy is {what} on every prompt: nothing that rests on it is measured."}


def caveats(
    subject: Model, batch: Batch, tokens: Tokens | Rows, controls: int | None, claimed: bool = True
) -> Iterator[str]:
    """Reasons to doubt a verdict; `controls` is the number of draws, None if no verdict depends on them, `claimed`
    whether there is any claim."""
    window, longest = subject.facts.get("window"), int(tokens.lengths.max())
    if window and longest <= window:
        yield f"window inactive: the longest prompt has {longest} tokens, the sliding window {window}"
    if batch.source.get("kind") == "domain" and not subject.name.startswith("pocket:"):
        yield "synthetic prompts: written for llmgeom and filled in by its grammars, not found text"
    plain = isinstance(batch.inputs, Text) and batch.source.get("kind") != "process"  # those by choice
    if plain and tokenizing.has_template(subject.tokenizer) and not subject.facts.get("chat"):
        yield (
            "the tokenizer has a chat template, and prompts were read as plain text: --chat, where a command takes it, "
            "reads them as messages"
        )
    if subject.edits:
        places = [f"{edit.point} of layers {[*edit.on(len(subject.blocks))]}" for edit in subject.edits]
        yield f"every pass of the model is edited, at {' and at '.join(places)}: no command can repeat this record"
    if subject.facts.get("note"):
        yield subject.facts["note"]
    if isinstance(batch.inputs, Text):
        yield from tokenizing.caveats(subject.tokenizer, batch.inputs.strings)
    yield from few_draws(controls, claimed) if controls is not None else ()
    alone = max(Counter(batch.cluster).values()) == 1
    if alone and isinstance(batch.inputs, Text) and batch.source.get("kind") in ("file", "strings"):
        given = (name for name in batch.columns.get("template", ()) if not re.fullmatch(r"(row|line)-\d+", name))
        yield from filled_templates(batch.inputs.strings, bool(batch.source.get("cluster")) or any(given))


def filled_templates(texts: Sequence[str], named: bool = False) -> Iterator[str]:
    """The warning that prompts look like fillings of templates and not independent; `named`: templates are given."""
    if len(texts) < 10:
        return
    alike = float((shared_words(texts) >= ALIKE).mean())
    if alike >= MOST_ALIKE:
        remedy = "" if named else ". A column 'template' of a file or frame says which belong together"
        yield (
            f"{alike:.0%} of the prompts share most of their words with another, as fillings of one template do, and "
            f"each counts as independent: intervals are too narrow{remedy}"
        )


def shared_words(texts: Sequence[str]) -> np.ndarray:
    """[prompt] The largest share of words that a prompt has in common with any other (fraction, 0-1).

    For two prompts it is the number of different shared words over the different words of the prompt with more; 0 if
    they share at most one word. In scripts without spaces each sign is a word. Derived here. In prompts from different
    templates of our domains 0 to .2 % share .6; with 20 templates filled three times each, 17 to 65 %; with one to ten
    templates such as "The capital of ... is", all. Of more than 1,000 prompts, it uses 1,000 spread over the list.
    """
    from sklearn.feature_extraction.text import CountVectorizer

    rows = np.unique(np.linspace(0, len(texts) - 1, min(len(texts), 1000)).astype(int))
    if not any(re.search(WORD, text) for text in texts):
        return np.zeros(len(rows))
    words: Any = CountVectorizer(binary=True, token_pattern=WORD).fit_transform(texts)
    words = words.astype(np.float32)
    size = np.asarray(words.sum(1)).ravel()
    both = (words[rows] @ words.T).toarray()
    both[np.arange(len(rows)), rows] = 0
    both[both < 2] = 0
    return (both / np.maximum(np.maximum(size[rows, None], size), 1)).max(1)


def few_draws(controls: int, claimed: bool = True) -> list[str]:
    """The warning about few draws of a control; empty if there are enough."""
    draws = f"{controls} draw{'s' * (controls != 1)}"
    text = f"only {draws} of each control, too few to know how much they vary: take {CONTROLS} or more"
    return [text] * (controls < (CONTROLS if claimed else UNCLAIMED))


# ---- the prompts of a record ---------------------------------------------------------------------------------------


def _rows(step: Step) -> dict[str, Tensor]:
    layers = step.layers(Site.ATTENTION)
    alike = len({layer.shape for layer in layers}) == 1
    return {"weights": (255 * torch.stack(layers, 1)).round().to(torch.uint8)} if alike else {}


def attention_observer(subject: Model, batch: Batch) -> tuple[Observer, ...]:
    """An observer of the attention of each prompt's final query; none if there is no attention or too much of it.

    Prompts with several queried positions get no observer: their rows would take as much memory as the whole pass.
    """
    row = (subject.facts["layers"] or 0) * (subject.facts["heads"] or 0) * batch.tokens.data.shape[1]
    fits = batch.query is None and 0 < len(batch) * row <= KEPT_WEIGHTS
    found = Observer(ATTENTION_ROWS, _rows, frozenset({Site.ATTENTION}), version="1", row_bytes=row)
    return (found,) if fits and not subject.unavailable({Site.ATTENTION}) else ()


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
            if (f"{ATTENTION_ROWS}.weights", -1) in capture.tensors:
                rows = capture.observed(f"{ATTENTION_ROWS}.weights").numpy()
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
