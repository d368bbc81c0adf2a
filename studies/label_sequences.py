"""Label sequences: nouns with one of two nonce labels, written so that the next label has one exact distribution.

`Left: dax, right: zok. owl: dax, fern: zok, bell:`   colon: one label rules; each observation shows it 9 times in 10
`This is dax. That is zok. owl is dax. bell is`       is: the share of the first label is uniform on 0..1

Pocket models learn them and are examined on them. The nouns carry no information about the labels. Half of the pairs of
labels, half of the nouns (`prompts.surfaces`) and one lead-in of each format are never in a training sequence.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from random import Random

import numpy as np
import torch

from llmgeom.batch import Batch, Posterior, Text
from llmgeom.errors import UserError, unknown
from llmgeom.prompts import surfaces
from llmgeom.prompts.domains import pick, shuffled
from llmgeom.prompts.surfaces import Part
from studies import conjugate

LONGEST = 10  # observations of a training sequence: most answers are asked early, where they are hardest


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


def leads(name: str, part: Part) -> tuple[str, ...]:
    """The lead-ins of a format: the last is held out."""
    return FORMATS[name].leads[-1:] if part is Part.HELD_OUT else FORMATS[name].leads[:-1]


def written(form: Format, lead: str, named: Sequence[str], nouns: Sequence[str], labels: Sequence[str]) -> str:
    """The lead-in, which names two labels, and the observations; an extra noun at the end queries the next label."""
    seen = [f"{noun}{form.link} {label}" for noun, label in zip(nouns, labels, strict=False)]
    asked = [f"{noun}{form.link}" for noun in nouns[len(labels) :]]
    return f"{lead.format(*named)} {f'{form.gap} '.join(seen + asked)}"


@dataclass(frozen=True)
class Prior:
    """The prior over the share of the first label that a format stands for.

    Attributes:
        share: of the first label, from a uniform number: a draw from the prior.
        predictive: log P(next label | counts of the first and second), [... 2] in nats.
    """

    share: Callable[[float], float]
    predictive: Callable[[np.ndarray, np.ndarray], np.ndarray]


PRIORS = {
    "colon": Prior(lambda u: 0.9 if u < 0.5 else 0.1, conjugate.two_point),
    "is": Prior(lambda u: u, conjugate.beta_bernoulli),
}


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
        if n < 1:
            raise UserError(f"{n} prompts of {self.format!r} were asked for; ask for at least 1")
        rng = Random(f"llmgeom/sula/{self.format}/{self.pairs}/{self.carriers}/{self.leads}/{seed}")
        ks, order = range(self.least, self.most + 1), shuffled(rng, surfaces.pairs(self.pairs))
        turns = ((k, pair) for pair in cycle(order) for k in ks)
        kept, opening = surfaces.carriers(self.carriers), leads(self.format, self.leads)
        form, prior, texts, rows = FORMATS[self.format], PRIORS[self.format], [], []
        for k, pair in islice(turns, n):
            lead, labels = pick(rng, opening), _labels(rng, pair, prior.share(rng.random()), k)
            texts.append(written(form, lead, shuffled(rng, pair), shuffled(rng, kept)[: k + 1], labels))
            rows.append((k, "-".join(pair), self.format, lead, *pair, labels.count(pair[0])))
        columns = dict(
            zip(("k", "pair", "format", "lead", "first", "second", "n1"), zip(*rows, strict=True), strict=True)
        )
        n1 = np.array(columns["n1"])
        answer = prior.predictive(n1, np.array(columns["k"]) - n1)
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
    nouns, together = surfaces.carriers(Part.TRAINED), surfaces.pairs(Part.TRAINED)
    while True:
        name, pair = pick(rng, tuple(FORMATS)), pick(rng, together)
        form, lead, k = FORMATS[name], pick(rng, leads(name, Part.TRAINED)), 1 + int(rng.random() * LONGEST)
        share = PRIORS[name].share(rng.random())
        labels = _labels(rng, pair, share if informative else 0.5, k)
        yield written(form, lead, shuffled(rng, pair), shuffled(rng, nouns)[:k], labels) + "."


def _labels(rng: Random, pair: tuple[str, str], share: float, k: int) -> list[str]:
    return [pair[rng.random() >= share] for _ in range(k)]
