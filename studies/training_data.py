"""Training data of a pocket model: texts of our grammars and label sequences as token windows; its test texts."""

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from random import Random

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int16
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from llmgeom.prompts.domains import MIXED, fill, known, templates
from llmgeom.prompts.surfaces import LABELS, Part, pairs
from studies import corpus, label_sequences

END = "<|endoftext|>"
SETS = ("held-out", "seen")


@dataclass(frozen=True)
class LabelTargets:
    """Where the next token is a label, and how likely each of the two is by the process that draws the sequence.

    Attributes:
        named: the next token is a label of a lead-in, which nothing foretells.
        labels: ids of the two labels where the next token is an observed one, 0 elsewhere.
        share: P(next label is the one) given the lead-in and the labels so far (fraction), 0 elsewhere.
    """

    named: Bool[Tensor, "window seq"]
    labels: Int16[Tensor, "window seq 2"]
    share: Float32[Tensor, "window seq 2"]


@dataclass(frozen=True)
class TrainingData:
    """What was read of the two streams, the tokenizer trained on both, and the windows of tokens.

    Attributes:
        texts, ids: the texts of the grammars, and their ids without separator.
        sequences: the label sequences.
        evidence: which windows hold label sequences; the others hold texts.
        targets: the labels to predict in these, and how likely each is.
    """

    texts: tuple[str, ...]
    ids: tuple[list[int], ...]
    sequences: tuple[str, ...]
    tokenizer: PreTrainedTokenizerBase
    windows: Int16[Tensor, "window seq"]
    evidence: Bool[Tensor, " window"]
    targets: LabelTargets


def domains() -> tuple[str, ...]:
    """Every domain that has templates of its own."""
    return tuple(name for name in known() if name != MIXED)


def training_data(
    n: int,
    context: int,
    vocabulary: int,
    seed: int,
    at_once: int,
    split: float = 0.0,
    share: float = 0.0,
    first: float = 0.0,
    informative: bool = True,
) -> TrainingData:
    """`n` windows of `context` tokens from two streams: texts of all domains and label sequences, neither held out.

    A window holds label sequences with probability `share`, else texts, never both; the `first` (a fraction) all hold
    label sequences. The tokenizer is learnt on the first `at_once` texts; `at_once` more of either are drawn whenever
    they run out. In the texts' windows a fraction `split` of the words is cut in two (see `pieces`); `ids` are whole.

    Each window starts with a whole item, as a prompt does, and runs on through separators; the item that does not fit
    is cut, and the next window of its stream starts with the one after it.
    """
    rng, lots = Random(f"llmgeom/split/{seed}"), Random(f"llmgeom/mix/{seed}")
    stream = corpus.texts(domains(), seed)
    opening = list(islice(stream, at_once))
    tokenizer = learn_tokenizer(opening, vocabulary, context)
    texts = _Reader(chain(opening, stream), tokenizer, at_once)
    sequences = _Reader(label_sequences.sequences(seed, informative), tokenizer, at_once)
    windows = torch.zeros(n, context, dtype=torch.int16)
    evidence = torch.tensor([lots.random() < share or i < first * n for i in range(n)], dtype=torch.bool)
    for window, labelled in zip(windows, evidence.tolist(), strict=True):
        column, reader = 0, sequences if labelled else texts
        while column < context:
            text, ids = reader.read()
            broken = pieces(text, tokenizer, rng, split) if split and not labelled else ids
            part = torch.tensor([*broken, tokenizer.eos_token_id][: context - column])
            window[column : column + len(part)] = part
            column += len(part)
    kept = tuple(texts.texts[: texts.used]), tuple(texts.ids[: texts.used])
    targets = label_targets(windows, evidence, tokenizer, informative)
    return TrainingData(*kept, tuple(sequences.texts[: sequences.used]), tokenizer, windows, evidence, targets)


def label_targets(
    windows: Int16[Tensor, "window seq"],
    evidence: Bool[Tensor, " window"],
    tokenizer: PreTrainedTokenizerBase,
    informative: bool,
) -> LabelTargets:
    """The targets in windows of label sequences, read token by token, all windows at once; none in the others."""
    ids = windows[evidence].numpy().astype(np.int64)
    rows = np.arange(len(ids))
    named = np.zeros(ids.shape, dtype=bool)
    labels, share = (np.zeros((*ids.shape, 2), dtype=kind) for kind in (np.int16, np.float32))
    place = np.zeros(len(ids), dtype=np.int64)
    pair, seen = np.zeros((len(ids), 2), dtype=np.int64), np.zeros((len(ids), 2))
    links = {name: tokenizer(form.link)["input_ids"][-1] for name, form in label_sequences.FORMATS.items()}
    for t in range(ids.shape[1] - 1):
        begun = ids[:, t] == tokenizer.eos_token_id
        place[begun], seen[begun] = 0, 0
        following = ids[:, t + 1]
        for name, link in links.items():
            linked = ids[:, t] == link
            place += linked
            for which in (0, 1):
                lead = rows[linked & (place == which + 1)]
                named[lead, t], pair[lead, which] = True, following[lead]
            asks = rows[linked & (place > 2)]
            labels[asks, t] = pair[asks]
            exact = label_sequences.PRIORS[name].predictive(*seen[asks].T) if informative else np.log(0.5)
            share[asks, t] = np.exp(exact)
            seen[asks] += pair[asks] == following[asks, None]
    return LabelTargets(*(_spread(torch.from_numpy(found), evidence) for found in (named, labels, share)))


def _spread(rows: Tensor, chosen: Bool[Tensor, " window"]) -> Tensor:
    """The rows at the windows chosen, zeros at the others."""
    found = torch.zeros(len(chosen), *rows.shape[1:], dtype=rows.dtype)
    found[chosen] = rows
    return found


def apart(tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> Bool[Tensor, "vocab vocab"]:
    """Which tokens are two labels that are never trained together."""
    found = torch.zeros(vocabulary, vocabulary, dtype=torch.bool)
    for pair in pairs(Part.HELD_OUT):
        one, other = (tokenizer(f" {label}")["input_ids"][0] for label in pair)
        found[one, other] = found[other, one] = True
    return found


class _Reader:
    """A stream of texts, one at a time with its ids; tokenized `at_once`."""

    def __init__(self, stream: Iterator[str], tokenizer: PreTrainedTokenizerBase, at_once: int) -> None:
        self.stream, self.tokenizer, self.at_once = stream, tokenizer, at_once
        self.texts: list[str] = []
        self.ids: list[list[int]] = []
        self.used = 0

    def read(self) -> tuple[str, list[int]]:
        if self.used == len(self.texts):
            more = list(islice(self.stream, self.at_once))
            self.texts += more
            self.ids += self.tokenizer(more)["input_ids"]
        self.used += 1
        return self.texts[self.used - 1], self.ids[self.used - 1]


def pieces(text: str, tokenizer: PreTrainedTokenizerBase, rng: Random, split: float) -> list[int]:
    """The text's ids with a fraction `split` of its words cut in two at random before they become tokens.

    A word never met comes as short pieces, and a model that has seen only whole words knows nothing of those. It is
    BPE dropout (Provilkov, Emelianenko & Voita 2020) in a coarser form: that of `tokenizers` cannot be seeded.
    """
    bpe, found = tokenizer.backend_tokenizer, []
    for word, _ in bpe.pre_tokenizer.pre_tokenize_str(text):
        cut = 1 + int(rng.random() * (len(word) - 1)) if rng.random() < split and len(word) > 1 else len(word)
        found += [token.id for part in (word[:cut], word[cut:]) for token in bpe.model.tokenize(part)]
    return found


def learn_tokenizer(texts: Sequence[str], vocabulary: int, context: int) -> PreTrainedTokenizerBase:
    """Byte-level BPE: any UTF-8 has tokens, none is unknown; nothing is put before a text. Each label after a space is
    one token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(LABELS),
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens([AddedToken(f" {label}", normalized=False) for label in LABELS])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=END, eos_token=END, unk_token=END, model_max_length=context
    )


def examination(fillings: int, seed: int, exclude: Collection[str] = ()) -> list[dict[str, str]]:
    """Up to `fillings` texts of every template, in two sets: "held-out" templates and "seen" ones filled afresh.

    Texts in `exclude` (those trained on) are passed over, so a seen template with few fillings gives fewer, or none.
    """
    rows = []
    for domain in domains():
        unseen = corpus.held_out(domain)
        for template in templates(domain):
            rng = Random(f"llmgeom/examination/{template.id}/{seed}")
            drawn = dict.fromkeys(fill(template, rng) for _ in range(10 * fillings))
            fresh = [text for text in drawn if text not in exclude][:fillings]
            known = {"set": SETS[template.id not in unseen], "domain": domain, "template": template.id}
            rows += [{**known, "text": text} for text in fresh]
    return rows


def sha256(texts: Sequence[str]) -> str:
    """Of the texts, NUL between them: does the grammar still say what a model was trained on?"""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()
