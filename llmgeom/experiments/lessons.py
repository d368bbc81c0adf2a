"""What a pocket model reads: texts of our grammars as token windows, and fresh texts that examine it."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random

import torch
from jaxtyping import Int16
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from llmgeom.prompts import corpus
from llmgeom.prompts.domains import MIXED, known
from llmgeom.prompts.grammar import fill, templates

END = "<|endoftext|>"
SETS = ("held-out", "seen")


@dataclass(frozen=True)
class Lessons:
    """Training material: the texts used, their ids without separator, the tokenizer learnt on them, and the windows."""

    texts: tuple[str, ...]
    ids: tuple[list[int], ...]
    tokenizer: PreTrainedTokenizerBase
    windows: Int16[Tensor, "window seq"]


def domains() -> tuple[str, ...]:
    """Every domain that has templates of its own."""
    return tuple(name for name in known() if name != MIXED)


def lessons(n: int, context: int, vocabulary: int, seed: int, at_once: int, split: float = 0.0) -> Lessons:
    """`n` windows of `context` tokens from the stream of all domains; held-out templates are in none.

    The tokenizer is learnt on the first `at_once` texts; that many more are drawn whenever they run out. In the windows
    a fraction `split` of the words is cut in two (see `pieces`); `ids` are whole.

    Each window starts with a whole text, as a prompt does, and runs on through separators; the text that does not fit
    is cut, and the next window starts with the one after it.
    """
    stream = corpus.texts(domains(), seed)
    rng = Random(f"llmgeom/split/{seed}")
    texts = list(islice(stream, at_once))
    tokenizer = learn_tokenizer(texts, vocabulary, context)
    ids = tokenizer(texts)["input_ids"]
    windows = torch.zeros(n, context, dtype=torch.int16)
    used = 0
    for window in windows:
        column = 0
        while column < context:
            if used == len(texts):
                more = list(islice(stream, at_once))
                texts, ids = texts + more, ids + tokenizer(more)["input_ids"]
            broken = pieces(texts[used], tokenizer, rng, split) if split else ids[used]
            part = torch.tensor([*broken, tokenizer.eos_token_id][: context - column])
            window[column : column + len(part)] = part
            used, column = used + 1, column + len(part)
    return Lessons(tuple(texts[:used]), tuple(ids[:used]), tokenizer, windows)


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
    """Byte-level BPE: any UTF-8 has tokens, none is unknown; nothing is put before a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
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
            drawn = dict.fromkeys(fill(template, rng).text for _ in range(10 * fillings))
            fresh = [text for text in drawn if text not in exclude][:fillings]
            known = {"set": SETS[template.id not in unseen], "domain": domain, "template": template.id}
            rows += [{**known, "text": text} for text in fresh]
    return rows


def sha256(texts: Sequence[str]) -> str:
    """Of the texts, NUL between them: does the grammar still say what a model was trained on?"""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()
