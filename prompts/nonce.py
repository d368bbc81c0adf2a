"""Label sequences: nouns with one of two nonce labels, written so that the next label has one exact distribution.

`Left: dax, right: zok. owl: dax, fern: zok, bell:`   colon: one label rules; each observation shows it 9 times in 10
`This is dax. That is zok. owl is dax. bell is`       is: the share of the first label is uniform on 0..1

The nouns carry no information about the labels. Half of the pairs of labels, half of the nouns and one lead-in of each
format are never in a training sequence; every label is, since a label that training never shows as an answer never
becomes one. There are many labels because with 20 a model memorises the pairs and misreads held-out pairs: measured,
skill .91 on trained pairs and .56 on others, against .81 and .72 with 96 labels after the same 800 steps. No word of
the grammars begins with a label, which the tokenizer would split off.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations

from llmgeom.prompts.chance import sha256
from llmgeom.prompts.grammar import lexicon

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
CONSONANTS, VOWELS = "bdfgjklmnprstvwz", "aeiou"
LEAST_PAIRS = 35  # least number of trained pairs of each label


class Part(StrEnum):
    TRAINED = "trained"
    HELD_OUT = "held-out"


@dataclass(frozen=True)
class Format:
    """A way of writing a sequence.

    Attributes:
        leads: lead-ins that name both labels, so that the pair is known before any evidence; the last is held out. They
            put labels after the link, too, so that a model reads both in the same way.
        link, gap: between a carrier and its label; between observations. A label follows a space.
    """

    leads: tuple[str, ...]
    link: str
    gap: str


FORMATS = {
    "colon": Format(
        leads=(
            "First: {}, second: {}.",
            "Left: {}, right: {}.",
            "Here: {}, there: {}.",
            "Heads: {}, tails: {}.",
            "Old: {}, new: {}.",
            "Day: {}, night: {}.",
            "In: {}, out: {}.",
            "More: {}, less: {}.",
            "Sun: {}, rain: {}.",
            "Up: {}, down: {}.",
        ),
        link=":",
        gap=",",
    ),
    "is": Format(
        leads=(
            "One is {}. The other is {}.",
            "This is {}. That is {}.",
            "Black is {}. White is {}.",
            "East is {}. West is {}.",
            "Some of it is {}. The rest is {}.",
            "High is {}. Low is {}.",
            "Winter is {}. Summer is {}.",
            "Mine is {}. Yours is {}.",
            "The first is {}. The second is {}.",
            "Yes is {}. No is {}.",
        ),
        link=" is",
        gap=".",
    ),
}


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


def leads(name: str, part: Part) -> tuple[str, ...]:
    """The lead-ins of a format: the last is held out."""
    return FORMATS[name].leads[-1:] if part is Part.HELD_OUT else FORMATS[name].leads[:-1]


def written(form: Format, lead: str, named: Sequence[str], nouns: Sequence[str], labels: Sequence[str]) -> str:
    """The lead-in, which names two labels, and the observations; an extra noun at the end queries the next label."""
    seen = [f"{noun}{form.link} {label}" for noun, label in zip(nouns, labels, strict=False)]
    asked = [f"{noun}{form.link}" for noun in nouns[len(labels) :]]
    return f"{lead.format(*named)} {f'{form.gap} '.join(seen + asked)}"
