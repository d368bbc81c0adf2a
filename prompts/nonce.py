"""Label sequences: nouns with one of two nonce labels, written so that the next label has one exact distribution.

`Left: dax, right: zok. owl: dax, fern: zok, bell:`   colon: one of the two labels rules, each is it 9 times in 10
`This is dax. That is zok. owl is dax. bell is`       is: the share of either label is anything, uniformly

The nouns say nothing about the labels. Half of the pairs of labels, half of the nouns and one lead-in of each format
are never in a training sequence; each label is, since one that is never trained as an answer never becomes one. There
are many labels because with 20 a model learns by heart which go together, and reads held-out pairs wrongly: measured,
skill .91 on trained pairs and .56 on others, against .81 and .72 with 96 after the same 800 steps. No word of the
grammars begins with a label, which would be cut off it as a token.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations, cycle, islice
from random import Random

import numpy as np

from llmgeom.batch import Batch, Posterior, Text
from llmgeom.errors import UserError, unknown
from llmgeom.prompts.chance import pick, sha256, shuffled
from llmgeom.prompts.lexicon import lexicon
from llmgeom.stats import conjugate as exact

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
LONGEST = 10  # observations of a training sequence: most answers are asked early, where they are hardest
LEAST_PAIRS = 35  # trained pairs that each label is in


class Part(StrEnum):
    TRAINED = "trained"
    HELD_OUT = "held-out"


@dataclass(frozen=True)
class Format:
    """A way of writing a sequence, and the one prior it stands for.

    Attributes:
        leads: name both labels, so that the pair is known before any evidence; the last is held out. A label stands
            there after the link too: one way of reading serves both.
        link, gap: between a carrier and its label; between observations. A label stands after a space.
        share: of the first label, from a uniform number: a draw from the prior.
        predictive: log P(next label | counts of the first and second), [... 2] in nats.
    """

    leads: tuple[str, ...]
    link: str
    gap: str
    share: Callable[[float], float]
    predictive: Callable[[np.ndarray, np.ndarray], np.ndarray]


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
        share=lambda u: 0.9 if u < 0.5 else 0.1,
        predictive=exact.two_point,
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
        share=lambda u: u,
        predictive=exact.beta_bernoulli,
    ),
}


@functools.cache
def pairs(part: Part) -> tuple[tuple[str, str], ...]:
    """The pairs of labels of a part, each in alphabetical order: the half with the least sha256 is held out.

    A pair stays trained where one of its labels would else be in fewer than LEAST_PAIRS trained pairs.
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
    """The nouns of a part: the half with the least sha256 is held out."""
    every = _nouns()
    out = frozenset(sorted(every, key=sha256)[: len(every) // 2])
    return tuple(word for word in every if (word in out) == (part is Part.HELD_OUT))


@functools.cache
def _nouns() -> tuple[str, ...]:
    """Single words of the lexicon that name one thing."""
    found: set[str] = set()
    for name in _TABLES.split():
        columns, rows = lexicon()[name]
        at = columns.index("one") if "one" in columns else 0
        found |= {row[at] for row in rows if re.fullmatch("[a-z]{3,10}", row[at])}
    return tuple(sorted(found))


def leads(name: str, part: Part) -> tuple[str, ...]:
    """The lead-ins of a format: the last is held out."""
    return FORMATS[name].leads[-1:] if part is Part.HELD_OUT else FORMATS[name].leads[:-1]


@dataclass(frozen=True)
class Evidence:
    """Prompts of one format that end where the next label is asked for, after least..most observations.

    Attributes:
        pairs, carriers, leads: which part of each is used, trained or held out.

    Raises:
        UserError: for an unknown format and numbers of observations that cannot be.
    """

    format: str = "colon"
    pairs: Part = Part.HELD_OUT
    carriers: Part = Part.HELD_OUT
    leads: Part = Part.TRAINED
    least: int = 1
    most: int = 8

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise unknown("format", self.format, FORMATS)
        if not 0 <= self.least <= self.most <= LONGEST:
            raise UserError(f"{self.least} to {self.most} observations: give numbers from 0 to {LONGEST}, least first")

    def sample(self, n: int, seed: int) -> Batch:
        """`n` prompts: every number of observations in turn, then the next pair, in an order that the seed permutes.

        All are as often as each other where n is a multiple of pairs times numbers. The posterior has one position, the
        last, and two outcomes, columns `first` and `second`; `n1` of the k observations are the first.

        Raises:
            UserError: for n below 1.
        """
        import torch

        if n < 1:
            raise UserError(f"{n} prompts of {self.format!r} were asked for; ask for at least 1")
        rng = Random(f"llmgeom/sula/{self.format}/{self.pairs}/{self.carriers}/{self.leads}/{seed}")
        turns = (
            (k, pair) for pair in cycle(shuffled(rng, pairs(self.pairs))) for k in range(self.least, self.most + 1)
        )
        kept, opening = carriers(self.carriers), leads(self.format, self.leads)
        form, texts, rows = FORMATS[self.format], [], []
        for k, pair in islice(turns, n):
            lead, labels = pick(rng, opening), _labels(rng, pair, form.share(rng.random()), k)
            texts.append(_written(form, lead, shuffled(rng, pair), shuffled(rng, kept)[: k + 1], labels))
            rows.append((k, "-".join(pair), self.format, lead, *pair, labels.count(pair[0])))
        columns = dict(
            zip(("k", "pair", "format", "lead", "first", "second", "n1"), zip(*rows, strict=True), strict=True)
        )
        n1 = np.array(columns["n1"])
        answer = form.predictive(n1, np.array(columns["k"]) - n1)
        return Batch(
            inputs=Text(tuple(texts)),
            cluster=tuple(f"{pair}/{i}" for i, pair in enumerate(columns["pair"])),
            source={"kind": "evidence", **dataclasses.asdict(self), "n": n, "seed": seed},
            columns=columns,
            posterior=Posterior(torch.from_numpy(answer)[:, None]),
        )


def sequences(seed: int, informative: bool = True) -> Iterator[str]:
    """Training sequences without end: 1 to LONGEST observations, both formats, trained pairs, carriers and lead-ins.

    Args:
        informative: False draws each label 1/2, whatever came before; all else stays letter by letter the same.
    """
    rng = Random(f"llmgeom/sula/{seed}")
    nouns, together = carriers(Part.TRAINED), pairs(Part.TRAINED)
    while True:
        name, pair = pick(rng, tuple(FORMATS)), pick(rng, together)
        form, lead, k = FORMATS[name], pick(rng, leads(name, Part.TRAINED)), 1 + int(rng.random() * LONGEST)
        share = form.share(rng.random())
        labels = _labels(rng, pair, share if informative else 0.5, k)
        yield _written(form, lead, shuffled(rng, pair), shuffled(rng, nouns)[:k], labels) + "."


def _labels(rng: Random, pair: tuple[str, str], share: float, k: int) -> list[str]:
    return [pair[rng.random() >= share] for _ in range(k)]


def _written(form: Format, lead: str, named: Sequence[str], nouns: Sequence[str], labels: Sequence[str]) -> str:
    """The lead-in and the observations; a noun more than there are labels asks for the next."""
    seen = [f"{noun}{form.link} {label}" for noun, label in zip(nouns, labels, strict=False)]
    asked = [f"{noun}{form.link}" for noun in nouns[len(labels) :]]
    return f"{lead.format(*named)} {f'{form.gap} '.join(seen + asked)}"
