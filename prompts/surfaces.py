"""How evidence is written: surfaces (a list, sentences or code; an answer always follows a space), nouns, and marks,
neutral words that are one token of a tokenizer after a space, in sets that share no word."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.resources import files
from itertools import combinations
from typing import Any

from llmgeom import prompts
from llmgeom.errors import UserError
from llmgeom.model.tokenizing import token_ids
from llmgeom.prompts.domains import lexicon, sha256

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
LETTERS = "BCDEFGHJKLMNOPQRSTUVWXYZ"  # without A and I, which are words
LEAST_SETS, MOST_SETS = 5, 40  # an interval needs at least five clusters


@dataclass(frozen=True)
class Surface:
    """One way to write observations; each has the form item, link, mark.

    Attributes:
        opening: The form of a mark in the lead-in, with {nth} and {mark}.
        between, close: Between the marks of the lead-in, and after them.
        link, gap: Between an item and its mark; between observations.
        remark: The form of a sentence about the process, with {}.
        capital: Whether the lead-in begins with a capital letter.
    """

    opening: str
    between: str
    close: str
    link: str
    gap: str
    remark: str = "{} "
    capital: bool = False

    def lead(self, marks: Sequence[str]) -> str:
        """The lead-in, which names every mark, so that the answers are known before any evidence."""
        named = [self.opening.format(nth=nth, mark=mark) for nth, mark in zip(ORDINALS, marks, strict=False)]
        text = self.between.join(named) + self.close
        return text[0].upper() + text[1:] if self.capital else text

    def prompt(self, statement: str, marks: Sequence[str], items: Sequence[str], seen: Sequence[str]) -> str:
        """The lead-in, the observations and the queried item: there is one more item than marks."""
        remark = self.remark.format(statement) if statement else ""
        shown = [f"{item}{self.link} {mark}" for item, mark in zip(items, seen, strict=False)]
        return f"{remark}{self.lead(marks)} {self.gap.join([*shown, f'{items[-1]}{self.link}'])}"


SURFACES = {
    "list": Surface("{nth}: {mark}", ", ", ".", ":", ", ", capital=True),
    "sentences": Surface("The {nth} is {mark}.", " ", "", " is", ". "),
    "code": Surface("{nth} = {mark};", " ", "", " =", "; ", remark="/* {} */ "),
}
_LINKS = "|".join(sorted({re.escape(surface.link) for surface in SURFACES.values()}))
# The end of a list: its last item, and its mark if one follows.
QUESTION = re.compile(rf"\S+(?:{_LINKS})(?: \S+)?$")


# ---- the words of pocket models -------------------------------------------------------------------------------------

# Nonce labels. There are many because with 20 a model memorises the pairs and misreads held-out pairs: measured, skill
# .91 on trained pairs and .56 on others, against .81 and .72 with 96 labels after the same 800 steps. No word of the
# grammars begins with a label, which the tokenizer would split off. Every label is trained, since a label that training
# never shows as an answer never becomes one.
_WORDS = """
bap bav bom boz buv dax fik fim fof gek gep gox gug jaz jed jep jik jip jiv jod juk kad kap kek kem kez kog koz kub
kug kup kut lok maf mev mez mib mip miz mok nax nez niv niz nok nuk nup pak pif pik pok puf rak ruk sas saz sib siv
sok sov suv taf tef tek tez tig tiv tuf vag vax veb vib vif vok von yos yug yuv yuz zuz
"""
_TABLES = """
animal bird building dish fruit job landscape metal object organ relative rock room science_bone science_creature
science_labware science_mineral sport thing tool trade tree vehicle vessel
"""
LABELS = tuple(_WORDS.split())
LEAST_PAIRS = 35  # least number of trained pairs of each label


class Part(StrEnum):
    """Half of the pairs of labels and half of the nouns are never in a training sequence."""

    TRAINED = "trained"
    HELD_OUT = "held-out"


@functools.cache
def pairs(part: Part) -> tuple[tuple[str, str], ...]:
    """The pairs of labels of a part, each in alphabetical order: the half with the least sha256 is held out.

    A pair stays trained if otherwise one of its labels would be in fewer than LEAST_PAIRS trained pairs.
    """
    every = list(combinations(LABELS, 2))
    left = dict.fromkeys(LABELS, len(LABELS) - 1)
    out: set[tuple[str, str]] = set()
    for pair in sorted(every, key=lambda pair: sha256("-".join(pair))):
        if len(out) < len(every) // 2 and min(left[label] for label in pair) > LEAST_PAIRS:
            out.add(pair)
            for label in pair:
                left[label] -= 1
    return tuple(pair for pair in every if (pair in out) == (part is Part.HELD_OUT))


@functools.cache
def carriers(part: Part) -> tuple[str, ...]:
    """The nouns of a part, single words of the lexicon that name one thing: the half with the least sha256 is held
    out."""
    nouns: set[str] = set()
    for name in _TABLES.split():
        columns, rows = lexicon()[name]
        at = columns.index("one") if "one" in columns else 0
        nouns |= {row[at] for row in rows if re.fullmatch("[a-z]{3,10}", row[at])}
    out = frozenset(sorted(nouns, key=sha256)[: len(nouns) // 2])
    return tuple(word for word in sorted(nouns) if (word in out) == (part is Part.HELD_OUT))


# ---- marks ----------------------------------------------------------------------------------------------------------


@functools.cache
def neutral() -> tuple[str, ...]:
    """Syllables that are words of none of the ten most used languages and no part of an insult, in the order of sha256.

    The list and its sources: `data/labels.list`, made by studies/neutral_labels.py.
    """
    lines = files(prompts).joinpath("data/labels.list").read_text(encoding="utf-8").splitlines()
    return tuple(sorted((line for line in lines if not line.startswith("#")), key=sha256))


@functools.lru_cache(maxsize=32)  # in a chat template it takes longer than all else of a sample
def single_tokens(tokenizer: Any, words: tuple[str, ...]) -> dict[str, int]:
    """Word -> token id, for the words that are one and the same token after every surface's question.

    A word w counts if the tokens of `question + " " + w` are those of `question` and one more. " w" encoded alone may
    differ: some tokenizers add a space before a text.
    """
    ids: dict[str, set[int]] = {word: set() for word in words}
    for surface in SURFACES.values():
        question = surface.prompt("", ("B", "C"), ("stone",), ())
        before, *after = token_ids(tokenizer, [question, *(f"{question} {word}" for word in words)])
        for word, whole in zip(words, after, strict=True):
            ids[word].add(whole[-1] if len(whole) == len(before) + 1 and whole[:-1] == before else -1)
    single = {word: ids[word].pop() for word in words if len(ids[word]) == 1}
    return {word: token for word, token in single.items() if token >= 0}


def answer_tokens(tokenizer: Any, prompts: Sequence[str], marks: Sequence[Sequence[str]]) -> list[list[int]]:
    """[prompt mark] the token of each mark as the next word of its own prompt.

    Raises UserError: In some prompt a mark is not exactly one token.
    """
    texts = [f"{prompt} {mark}" for prompt, row in zip(prompts, marks, strict=True) for mark in row]
    encoded, before = iter(token_ids(tokenizer, texts)), token_ids(tokenizer, prompts)
    tokens: list[list[int]] = []
    for ids, row in zip(before, marks, strict=True):
        tokens.append([])
        for mark in row:
            whole = next(encoded)
            if len(whole) != len(ids) + 1 or whole[:-1] != ids:
                raise UserError(f"{mark!r} is not one token after {tokenizer.decode(ids[-8:])!r}; choose other labels")
            tokens[-1].append(whole[-1])
    return tokens


def mark_sets(tokenizer: Any, size: int) -> tuple[tuple[str, ...], ...]:
    """Disjoint sets of `size` marks, at most MOST_SETS, the same for the same tokenizer.

    The words are syllables of `neutral`, then capital letters where these are too few for LEAST_SETS. No two sets share
    a word, so that a model's bias for a word affects one cluster only. Without a tokenizer, or with that of a pocket
    model, the words are those of the pocket models; two that such a model saw together in training are never in one
    set. Raises UserError: the tokenizer gives fewer than 5 sets.
    """
    words = [*LABELS]
    # In a pocket model's tokenizer other words of one token are pieces of words, which were never marks in training: 10
    # of 26 sets of four contained one.
    if tokenizer is not None and len(single_tokens(tokenizer, tuple(words))) < len(words):
        words = list(single_tokens(tokenizer, neutral()))
        if len(words) < LEAST_SETS * size:
            words += [*single_tokens(tokenizer, tuple(LETTERS))]
    together = frozenset(pairs(Part.TRAINED))
    left = words
    sets: list[tuple[str, ...]] = []
    while len(left) >= size and len(sets) < MOST_SETS:
        chosen: list[str] = []
        for word in left:
            if len(chosen) < size and not any(tuple(sorted((word, other))) in together for other in chosen):
                chosen.append(word)
        if len(chosen) < size:
            left = left[1:]  # the first word has too few partners left
        else:
            sets.append(tuple(chosen))
            left = [word for word in left if word not in chosen]
    if len(sets) < LEAST_SETS:
        raise UserError(
            f"this tokenizer has {len(words)} neutral words of one token, enough for {len(sets)} sets of {size} "
            f"labels; {LEAST_SETS} are needed: use a process with fewer labels, or a model with a larger vocabulary"
        )
    return tuple(sets)
