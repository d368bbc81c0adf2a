"""Provenance: where a record's numbers come from, and what varies between equal runs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llmgeom import __version__, claims

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from llmgeom.batch import Batch, Rows, Tokens
    from llmgeom.model.subject import Subject
    from llmgeom.probe import Probe


ALIKE = 0.5  # share of words that two fillings of one template have in common, and two other prompts hardly ever
MOST_ALIKE = 0.3  # of the prompts: as far from the 16 % of independent ones as from the 78 % of fillings, in ratio
FEW_PAIRS = 20  # of labels, below which intervals are too narrow; the default words make 40
CONTROLS = 20  # the fewest draws with which p = 1 / (draws + 1) can be under .05


def provenance(batch: Batch, tokens: Tokens | Rows, seed: int, controls: int) -> dict[str, Any]:
    """The facts that every record carries, whatever was measured."""
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
    """What varies between equal runs, and the program that made it; `started` is a time.time()."""
    from llmgeom.cache.keys import of_program

    return {
        "seconds": round(time.time() - started, 3),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "program": of_program(),
    }


def versions() -> dict[str, str]:
    """Versions of the libraries that decide numbers."""
    import numpy as np
    import torch
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}


def subset_note(batch: Batch, subset: Tensor | None, probes: Mapping[str, Probe]) -> list[str]:
    """The warning that controls read a part of the prompts, where they do."""
    if subset is None:
        return []
    every = [name for name, probe in probes.items() if probe.NEEDS.all_prompts]
    note = f"controls read {len(subset)} of the {len(batch)} prompts, drawn at random"
    return [note + (f"; measured on all: {', '.join(every)}" if every else "")]


def caveats(subject: Subject, batch: Batch, tokens: Tokens | Rows, controls: int | None) -> Iterator[str]:
    """What could overturn a verdict; `controls` draws of each control, None where no verdict depends on them."""
    from llmgeom.batch import Text
    from llmgeom.model.tokenizing import has_template

    window, longest = subject.facts.get("window"), int(tokens.lengths.max())
    if window and longest <= window:
        yield f"window inactive: the longest prompt has {longest} tokens, the sliding window {window}"
    if batch.source.get("kind") == "domain" and not subject.name.startswith("pocket:"):
        yield "synthetic prompts: written for llmgeom and filled in by its grammars, not found text"
    if isinstance(batch.inputs, Text) and has_template(subject.tokenizer) and not subject.facts.get("chat"):
        yield "the tokenizer has a chat template, and prompts were read as plain text: --chat reads them as messages"
    if subject.edits:
        places = [f"{edit.point} of layers {[*edit.on(len(subject.blocks))]}" for edit in subject.edits]
        yield f"every pass of the model is edited, at {' and at '.join(places)}: no command can repeat this record"
    if subject.facts.get("note"):
        yield subject.facts["note"]
    yield from few_draws(controls) if controls is not None else ()
    if batch.source.get("kind") == "sula" and (pairs := len(set(batch.cluster))) < FEW_PAIRS:
        yield (
            f"only {pairs} pairs of labels: simulated 95 % intervals of 6 to 12 pairs covered 84 to 88 % where a model "
            "has habits about words. Name more words with --labels: 80 make 40 pairs"
        )
    alone = max(Counter(batch.cluster).values()) == 1
    if alone and isinstance(batch.inputs, Text) and batch.source.get("kind") in ("file", "strings"):
        yield from filled_templates(batch.inputs.strings)


def filled_templates(texts: Sequence[str]) -> Iterator[str]:
    """The warning that prompts without a named template look like fillings of templates, which are not independent."""
    if len(texts) < 10:
        return
    alike = float((shared_words(texts) >= ALIKE).mean())
    if alike >= MOST_ALIKE:
        yield (
            f"{alike:.0%} of the prompts share half of their words or more with another, as fillings of one template "
            "do, and each counts as independent: intervals are too narrow. A column 'template' of a "
            "file or frame says which belong together"
        )


def shared_words(texts: Sequence[str]) -> np.ndarray:
    """[prompt] The largest share of words and marks that a prompt has in common with any other (fraction, 0-1).

    Of two prompts: the different words of both, over the different words of the one that has more. Derived here. Of
    prompts from different templates of our domains 0 to 16 % share half; of 20 templates filled three times each, 78
    to 87 %; of one to ten templates such as "The capital of ... is", all. Of many prompts, 1,000 spread over the list
    are compared with all.
    """
    import numpy as np
    from sklearn.feature_extraction.text import CountVectorizer

    words = CountVectorizer(binary=True, token_pattern=r"\w+|[^\w\s]", dtype=np.float32).fit_transform(texts)
    size = np.asarray(words.sum(1)).ravel()
    rows = np.unique(np.linspace(0, len(texts) - 1, min(len(texts), 1000)).astype(int))
    both = (words[rows] @ words.T).toarray()
    both[np.arange(len(rows)), rows] = 0
    return (both / np.maximum(size[rows, None], size)).max(1)


def few_draws(controls: int) -> list[str]:
    """The warning about few draws of a control; nothing where there are enough."""
    return [
        f"only {controls} draws of each control, too few to know how much they vary; {CONTROLS} are the default"
    ] * (controls < CONTROLS)
