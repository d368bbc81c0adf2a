"""What a small language model has learnt: its loss on held-out text beside its rivals', and its entropies."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from llmgeom.capture import Site
from llmgeom.experiments.trigram import KneserNey
from llmgeom.information import bits
from llmgeom.prompts.domains import MIXED, Domain
from llmgeom.subject import Subject

QUANTILES = (0, 5, 25, 50, 75, 95, 100)
Rows = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Demands:
    """What a model must reach to be shipped: loss on held-out templates as fractions, entropy span in bits.

    of_trigram    of the better trigram's loss (see `rivals`).
    """

    of_unigram: float = 0.6
    of_trigram: float = 0.95
    span: float = 3.0


DEMANDS = Demands()


def stored(folder: str | os.PathLike) -> Subject:
    """The model in a folder as every command reads it: offline, bfloat16 loaded to float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return Subject.of(model, tokenizer, f"pocket:{Path(folder).name}")


def sit(subject: Subject, rows: Rows, training: Sequence[Sequence[int]], few: int) -> dict[str, Any]:
    """The whole examination: losses of the model and its rivals in each set, entropies over prompts of two domains."""
    model, others = losses(subject, rows), rivals(subject, rows, training, few)
    return {
        "losses": {which: {**model[which], **others[which]} for which in model},
        "entropy_bits": {name: entropies(subject, name) for name in ("math", MIXED)},
    }


@torch.no_grad()
def nats(subject: Subject, texts: Sequence[str], at_once: int = 32) -> list[np.ndarray]:
    """-log P of each text's tokens from the second on, and of the separator after it, in nats, one array a text.

    The first token is left out: like a prompt, a text is read without a separator before it.
    """
    ids = [torch.tensor(row) for row in subject.tokenizer(list(texts))["input_ids"]]
    end = subject.tokenizer.eos_token_id
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    found: list[np.ndarray] = [np.empty(0)] * len(ids)
    for members in (order[i : i + at_once] for i in range(0, len(order), at_once)):
        padded = torch.nn.utils.rnn.pad_sequence([ids[i] for i in members], batch_first=True, padding_value=end)
        log_p = subject.model(padded, use_cache=False).logits.float().log_softmax(-1)
        for i, row in zip(members, log_p, strict=True):
            target = torch.cat([ids[i][1:], torch.tensor([end])])
            found[i] = -row[torch.arange(len(target)), target].double().numpy()
    return found


def losses(subject: Subject, rows: Rows) -> dict[str, dict[str, Any]]:
    """For each "set" of the rows: the model's mean loss in nats a token, its standard error, and each domain's loss."""
    each = nats(subject, [row["text"] for row in rows])
    found: dict[str, dict[str, Any]] = {}
    for which in _sets(rows):
        domains = sorted({row["domain"] for row in rows if row["set"] == which})
        inside = {domain: _mean(rows, each, "model", set=which, domain=domain)["model"] for domain in domains}
        found[which] = _mean(rows, each, "model", set=which) | {"model_by_domain": inside}
    return found


def rivals(subject: Subject, rows: Rows, training: Sequence[Sequence[int]], few: int) -> dict[str, dict[str, float]]:
    """What knows less, on the same tokens in nats: n-grams fitted to the `training` ids, and their unigram entropy.

    unigram        entropy of the evaluated tokens' own frequencies: no model without context can do better.
    trigram        interpolated Kneser-Ney on all of `training`, as much as the model read.
    trigram_few    on the first `few` texts, fivegram_few likewise with two more tokens of context. Where each template
                   was filled hundreds of times nothing in it looks rare, so the full fit leaves next to no mass for
                   new text: it is the stronger rival on seen templates, and this one on those held out.
    """
    ids = subject.tokenizer([row["text"] for row in rows])["input_ids"]
    end, vocabulary = subject.tokenizer.eos_token_id, subject.facts["vocabulary"]
    found: dict[str, dict[str, float]] = {which: {} for which in _sets(rows)}
    cases = (("trigram", 3, training), ("trigram_few", 3, training[:few]), ("fivegram_few", 5, training[:few]))
    for name, order, texts in cases:
        flat = KneserNey.fit(texts, vocabulary, end, order).nats(ids)
        each = [part[1:] for part in np.split(flat, np.cumsum([len(row) + 1 for row in ids])[:-1])]
        for which in found:
            found[which] |= _mean(rows, each, name, set=which)
    for which in found:
        kept = [t for row, i in zip(rows, ids, strict=True) if row["set"] == which for t in (*i[1:], end)]
        share = np.unique(kept, return_counts=True)[1] / len(kept)
        found[which] |= {"unigram": float(-(share * np.log(share)).sum())}
    return found


def entropies(subject: Subject, name: str, n: int = 300, seed: int = 0) -> dict[str, Any]:
    """Entropy of the next token after prompts of a domain, in bits: quantiles, and span = largest minus least."""
    domain = Domain(name)
    batch = domain.sample(min(n, domain.size()), seed)
    found = bits(subject.capture(batch, {Site.ENTROPY}).entropy.double().numpy())
    quantiles = {f"{q}%": float(np.percentile(found, q)) for q in QUANTILES}
    return {"prompts": len(batch), "seed": seed, "span": float(np.ptp(found)), "quantiles": quantiles}


def missed(measured: Mapping[str, Any], demands: Demands) -> list[str]:
    """Every demand that is missed, and by how much."""
    loss = measured["losses"]["held-out"]
    better = min("trigram", "trigram_few", key=lambda name: loss[name])
    found = [
        f"{loss['model']:.3f} nats a token on held-out templates, at most {share} of {rival}'s {loss[rival]:.3f} asked"
        for rival, share in (("unigram", demands.of_unigram), (better, demands.of_trigram))
        if loss["model"] > share * loss[rival]
    ]
    return found + [
        f"next-token entropies on {name} span {found['span']:.2f} bits, at least {demands.span} asked"
        for name, found in measured["entropy_bits"].items()
        if found["span"] < demands.span
    ]


def _sets(rows: Rows) -> list[str]:
    return sorted({row["set"] for row in rows})


def _mean(rows: Rows, each: Sequence[np.ndarray], name: str, **only: str) -> dict[str, float]:
    """Mean over the tokens of some rows. Its error counts templates, not tokens: sqrt(sum_t (S_t - m N_t)^2) / N."""
    sums: dict[str, np.ndarray] = {}
    texts = 0
    for row, part in zip(rows, each, strict=True):
        if all(row[column] == value for column, value in only.items()):
            sums[row["template"]] = sums.get(row["template"], 0) + np.array([part.sum(), len(part)])
            texts += 1
    total, tokens = np.stack(list(sums.values())).T
    mean = total.sum() / tokens.sum()
    error = np.sqrt(((total - mean * tokens) ** 2).sum()) / tokens.sum()
    counts = {"templates": len(sums), "texts": texts, "tokens": int(tokens.sum())}
    return counts | {name: float(mean), f"{name}_se": float(error)}
