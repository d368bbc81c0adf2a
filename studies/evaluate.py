"""Evaluation of a small language model: its loss on held-out text next to its rivals', and its use of evidence."""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from llmgeom.batch import Batch
from llmgeom.errors import UserError
from llmgeom.model.model import Model
from llmgeom.prompts import surfaces
from llmgeom.prompts.domains import MIXED, Domain
from llmgeom.prompts.surfaces import Part
from llmgeom.stats.information import best_constant, bits, entropy, kl, skill
from llmgeom.stats.resampling import jackknife
from studies import label_sequences
from studies.label_sequences import Evidence
from studies.ngram import KneserNey

SPANNED = ("math", MIXED)
PAIRS = 200
QUANTILES = (0, 5, 25, 50, 75, 95, 100)
Rows = Sequence[Mapping[str, str]]
PARTS = {  # of pairs, carriers and leads
    "held-out": (Part.HELD_OUT, Part.TRAINED, Part.TRAINED),
    "held-out, nouns too": (Part.HELD_OUT, Part.HELD_OUT, Part.TRAINED),
    "held-out, lead-in too": (Part.HELD_OUT, Part.HELD_OUT, Part.HELD_OUT),
    "trained": (Part.TRAINED, Part.TRAINED, Part.TRAINED),
}


@dataclass(frozen=True)
class Demands:
    """What a model must reach to be shipped: loss on held-out templates as fractions, entropy span in bits, skills.

    Attributes:
        of_trigram: of the better trigram's loss (see `rivals`).
        skills: least and largest `skill` on held-out pairs, by format (see `evidence`).
    """

    of_unigram: float = 0.6
    of_trigram: float = 0.95
    span: float = 3.0
    skills: Mapping[str, tuple[float, float]] = field(default_factory=lambda: {"colon": (0.8, 1.0), "is": (0.5, 1.0)})


DEMANDS = Demands()
# For a model trained on uninformative label sequences: as good in text, and no use of evidence.
INDIFFERENT = Demands(skills={name: (-0.1, 0.1) for name in label_sequences.FORMATS})


def skill_by_count(exact: np.ndarray, model: np.ndarray, count: np.ndarray) -> float:
    """Skill over the best constant: 1 - sum KL(exact || model) / sum KL(exact || c_k), unitless.

    c_k is the best constant for prompts with k observations: the mean of their exact distributions, which minimises
    the sum (derived here). 1 is the exact answer; 0 is the best answer that ignores the observations.

    Args:
        exact: Exact log-probabilities in nats, none of them -inf, [prompt outcome].
        model: The model's log-probabilities in nats, [prompt outcome].
        count: Number of observations in each prompt, [prompt].
    """
    return skill(kl(exact, model), kl(exact, best_constant(exact, count)))


def stored(folder: str | os.PathLike) -> Model:
    """The model in a folder as every command reads it: offline, bfloat16 loaded to float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, use_safetensors=True, local_files_only=True
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return Model.of(model, tokenizer, f"pocket:{Path(folder).name}")


def measure(subject: Model, rows: Rows, training: Sequence[Sequence[int]], few: int, per_cell: int) -> dict[str, Any]:
    """The whole examination: losses of the model and its rivals in each set, entropies over prompts of two domains,
    and skills with label sequences."""
    model, others = losses(subject, rows), rivals(subject, rows, training, few)
    return {
        "losses": {which: {**model[which], **others[which]} for which in model},
        "entropy_bits": {name: entropies(subject, name) for name in SPANNED},
        "skills": evidence(subject, per_cell),
    }


@torch.no_grad()
def nats(subject: Model, texts: Sequence[str], at_once: int = 32) -> list[np.ndarray]:
    """-log P of each text's tokens from the second on, and of the separator after it, in nats, one array a text.

    The first token is left out: like a prompt, a text is read without a separator before it.
    """
    ids = [torch.tensor(row) for row in subject.tokenizer(list(texts))["input_ids"]]
    end = subject.tokenizer.eos_token_id
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    by_text: list[np.ndarray] = [np.empty(0)] * len(ids)
    for members in (order[i : i + at_once] for i in range(0, len(order), at_once)):
        padded = torch.nn.utils.rnn.pad_sequence([ids[i] for i in members], batch_first=True, padding_value=end)
        log_p = subject.model(padded, use_cache=False).logits.float().log_softmax(-1)
        for i, row in zip(members, log_p, strict=True):
            target = torch.cat([ids[i][1:], torch.tensor([end])])
            by_text[i] = -row[torch.arange(len(target)), target].double().numpy()
    return by_text


def losses(subject: Model, rows: Rows) -> dict[str, dict[str, Any]]:
    """For each "set" of the rows: the model's mean loss in nats a token, its standard error, and each domain's loss."""
    each = nats(subject, [row["text"] for row in rows])
    found: dict[str, dict[str, Any]] = {}
    for which in _sets(rows):
        domains = sorted({row["domain"] for row in rows if row["set"] == which})
        inside = {domain: _mean(rows, each, "model", set=which, domain=domain)["model"] for domain in domains}
        found[which] = _mean(rows, each, "model", set=which) | {"model_by_domain": inside}
    return found


def rivals(subject: Model, rows: Rows, training: Sequence[Sequence[int]], few: int) -> dict[str, dict[str, float]]:
    """Baselines on the same tokens in nats: n-grams fitted to the `training` ids, and their unigram entropy.

    Returns:
        unigram: entropy of the evaluated tokens' own frequencies: no model without context can do better.
        trigram: interpolated Kneser-Ney on all of `training`, as much as the model read.
        trigram_few, fivegram_few: on the first `few` texts, the latter with two more tokens of context. Where each
            template was filled hundreds of times nothing in it looks rare, so the full fit leaves next to no mass for
            new text: it is the stronger rival on seen templates, and these on those held out.
    """
    ids = subject.tokenizer([row["text"] for row in rows])["input_ids"]
    end, vocabulary = subject.tokenizer.eos_token_id, subject.facts["vocabulary"]
    by_set: dict[str, dict[str, float]] = {which: {} for which in _sets(rows)}
    cases = (("trigram", 3, training), ("trigram_few", 3, training[:few]), ("fivegram_few", 5, training[:few]))
    for name, order, texts in cases:
        flat = KneserNey.fit(texts, vocabulary, end, order).nats(ids)
        by_text = [part[1:] for part in np.split(flat, np.cumsum([len(row) + 1 for row in ids])[:-1])]
        for which in by_set:
            by_set[which] |= _mean(rows, by_text, name, set=which)
    for which in by_set:
        tokens = [t for row, i in zip(rows, ids, strict=True) if row["set"] == which for t in (*i[1:], end)]
        share = np.unique(tokens, return_counts=True)[1] / len(tokens)
        by_set[which] |= {"unigram": float(entropy(np.log(share)))}
    return by_set


def prompts(name: str, n: int = 300) -> Batch:
    """The prompts of a domain whose entropies are taken, or all it has where they are fewer."""
    domain = Domain(name)
    return domain.sample(min(n, domain.size()), 0)


def entropies(subject: Model, name: str) -> dict[str, Any]:
    """Entropy of the next token after prompts of a domain, in bits: quantiles, and span = largest minus least."""
    batch = prompts(name)
    found = subject.entropy(batch)
    quantiles = {f"{q}%": float(np.percentile(found, q)) for q in QUANTILES}
    return {"prompts": len(batch), "seed": batch.source["seed"], "span": float(np.ptp(found)), "quantiles": quantiles}


# ---- evidence -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def answers(subject: Model, batch: Batch, at_once: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """What a model says of the two labels after each prompt: log P given that it is one of them [prompt 2], in nats,
    and log P that it is. Raises UserError where a label is not one token.
    """
    ids, end = subject.tokenizer(list(batch.text))["input_ids"], subject.tokenizer.eos_token_id
    named = zip(batch.columns["first"], batch.columns["second"], strict=True)
    label = {word: subject.tokenizer(f" {word}")["input_ids"] for word in surfaces.LABELS}
    if several := [word for word, row in label.items() if len(row) > 1]:
        raise UserError(f"the labels {', '.join(several)} are several tokens each; learn the tokenizer on more texts")
    outcome = torch.tensor([label[first] + label[second] for first, second in named])
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    log_p = torch.empty(len(ids), 2, dtype=torch.float64)
    for rows in (order[i : i + at_once] for i in range(0, len(order), at_once)):
        read = [torch.tensor(ids[i]) for i in rows]
        padded = torch.nn.utils.rnn.pad_sequence(read, batch_first=True, padding_value=end)
        logits = subject.model(padded, use_cache=False).logits
        last = logits[torch.arange(len(rows)), torch.tensor([len(row) - 1 for row in read])]
        log_p[rows] = last.float().log_softmax(-1).gather(1, outcome[rows]).double()
    mass = log_p.logsumexp(1)
    return (log_p - mass[:, None]).numpy(), mass.numpy()


def evidence(subject: Model, per_cell: int, sets: Collection[str] = tuple(PARTS)) -> dict[str, Any]:
    """Skill by format and set, over k = 1..8 observations together and by k, with 95 % intervals over label pairs.

    Args:
        per_cell: prompts of every pair and k, so that every k has as many; at most 200 pairs, drawn by seed 0.

    Returns:
        label_mass: mean probability of the two labels together (fraction).
        kl_bits: mean KL(exact || model) in bits, and that of the best constant.
    """
    names = label_sequences.FORMATS
    return {name: {which: _graded(subject, name, which, per_cell) for which in sets} for name in names}


def _graded(subject: Model, name: str, which: str, per_cell: int) -> dict[str, Any]:
    source = Evidence(name, *PARTS[which])
    pairs = len(surfaces.pairs(source.pairs))
    batch = source.sample(per_cell * min(pairs, PAIRS) * (source.most - source.least + 1), 0)
    model, mass = answers(subject, batch)
    exact, k = batch.exact.predictive[:, -1].numpy(), np.array(batch.columns["k"])
    cluster, p = np.array(batch.columns["pair"]), np.exp(exact)

    def measured(rows: np.ndarray) -> dict[str, float | int]:
        span = jackknife(lambda kept: skill_by_count(exact[kept], model[kept], k[kept]), rows, cluster[rows])
        value = skill_by_count(exact[rows], model[rows], k[rows])
        return {"skill": value, "low": span.low, "high": span.high, "n": len(rows)}

    return {
        **measured(np.arange(len(batch))),
        "pairs": min(pairs, PAIRS),
        "label_mass": float(np.exp(mass).mean()),
        "kl_bits": bits(float((p * (exact - model)).sum(1).mean())),
        "constant_kl_bits": bits(float((p * (exact - best_constant(exact, k))).sum(1).mean())),
        "by_k": {str(one): measured(np.flatnonzero(k == one)) for one in np.unique(k)},
    }


# ---- acceptance criteria --------------------------------------------------------------------------------------------


def missed(measured: Mapping[str, Any], demands: Demands) -> list[str]:
    """Every demand that is missed, and by how much."""
    loss = measured["losses"]["held-out"]
    better = min("trigram", "trigram_few", key=lambda name: loss[name])
    misses = [
        f"{loss['model']:.3f} nats a token on held-out templates, at most {share} of {rival}'s {loss[rival]:.3f} asked"
        for rival, share in (("unigram", demands.of_unigram), (better, demands.of_trigram))
        if loss["model"] > share * loss[rival]
    ]
    misses += [
        f"next-token entropies on {name} span {spans['span']:.2f} bits, at least {demands.span} asked"
        for name, spans in measured["entropy_bits"].items()
        if spans["span"] < demands.span
    ]
    skills = {name: measured["skills"][name]["held-out"]["skill"] for name in demands.skills}
    return misses + [
        f"skill {skills[name]:.3f} in label sequences with {name!r} on held-out pairs, {low:g} to {high:g} asked"
        for name, (low, high) in demands.skills.items()
        if not low <= skills[name] <= high
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
