"""Provenance: the origin of a record's numbers, and facts that vary between equal runs."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmgeom import __version__, claims

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from llmgeom.batch import Batch, Rows, Tokens
    from llmgeom.model.model import Model
    from llmgeom.probe import Needs


# A run of letters and digits, or one sign of a script without spaces: kana, Chinese, Thai.
WORD = r"[\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff]|[^\W\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff]+"
ALIKE = 0.6  # share of words that fillings of one template have in common; other prompts hardly ever reach it
MOST_ALIKE = 0.1  # share of such prompts: independent prompts have at most .002, fillings .17 and more
LEAST_SPREAD = 0.05  # bits that entropy must vary by; declared in advance, so that no metric ranks rounding
CONTROLS = 8  # draws of each control; docs/claims.md has what fewer and more give
UNCLAIMED = 4  # of one that no claim of the record names


def provenance(batch: Batch, tokens: Tokens | Rows, seed: int, controls: int) -> dict[str, Any]:
    """The facts of every record, whatever was measured."""
    from llmgeom.cache.keys import of_tokens

    return {
        "llmgeom": __version__,
        "seed": seed,
        "nulls": controls,
        "prompts_hash": of_tokens(tokens),
        "claims_hash": claims.digest(),
        "prompts": len(batch),
        "clusters": len(set(batch.cluster)),
        "versions": versions(),
    }


def took(started: float) -> dict[str, Any]:
    """Facts that vary between equal runs, and the program's version; `started` is a time.time()."""
    from llmgeom.cache.keys import of_program

    return {
        "seconds": round(time.time() - started, 3),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "program": of_program(),
    }


def versions() -> dict[str, str]:
    """Versions of the libraries that influence numbers."""
    import numpy as np
    import torch
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}


def subset_note(batch: Batch, subset: Tensor | None, needs: Mapping[str, Needs]) -> list[str]:
    """The warning that controls read a subset of the prompts, if they do; `needs` by probe."""
    if subset is None:
        return []
    every = [name for name, need in needs.items() if need.control_prompts]
    note = f"controls read {len(subset)} of the {len(batch)} prompts, drawn at random"
    return [note + (f"; measured on all: {', '.join(every)}" if every else "")]


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
    from llmgeom.batch import Text
    from llmgeom.model import tokenizing

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
    import numpy as np
    from sklearn.feature_extraction.text import CountVectorizer

    rows = np.unique(np.linspace(0, len(texts) - 1, min(len(texts), 1000)).astype(int))
    if not any(re.search(WORD, text) for text in texts):
        return np.zeros(len(rows))
    words = CountVectorizer(binary=True, token_pattern=WORD, dtype=np.float32).fit_transform(texts)
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
