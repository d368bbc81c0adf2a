"""Label sequences of prompts/nonce.py under the prior of their format: what pocket models learn and are examined on."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from random import Random

import numpy as np
import torch

from llmgeom.batch import Batch, Posterior, Text
from llmgeom.errors import UserError, unknown
from llmgeom.prompts import nonce
from llmgeom.prompts.chance import pick, shuffled
from llmgeom.prompts.nonce import Part
from studies import conjugate

LONGEST = 10  # observations of a training sequence: most answers are asked early, where they are hardest


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
        if self.format not in nonce.FORMATS:
            raise unknown("format", self.format, nonce.FORMATS)
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
        ks, order = range(self.least, self.most + 1), shuffled(rng, nonce.pairs(self.pairs))
        turns = ((k, pair) for pair in cycle(order) for k in ks)
        kept, opening = nonce.carriers(self.carriers), nonce.leads(self.format, self.leads)
        form, prior, texts, rows = nonce.FORMATS[self.format], PRIORS[self.format], [], []
        for k, pair in islice(turns, n):
            lead, labels = pick(rng, opening), _labels(rng, pair, prior.share(rng.random()), k)
            texts.append(nonce.written(form, lead, shuffled(rng, pair), shuffled(rng, kept)[: k + 1], labels))
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
    nouns, together = nonce.carriers(Part.TRAINED), nonce.pairs(Part.TRAINED)
    while True:
        name, pair = pick(rng, tuple(nonce.FORMATS)), pick(rng, together)
        form, lead, k = nonce.FORMATS[name], pick(rng, nonce.leads(name, Part.TRAINED)), 1 + int(rng.random() * LONGEST)
        share = PRIORS[name].share(rng.random())
        labels = _labels(rng, pair, share if informative else 0.5, k)
        yield nonce.written(form, lead, shuffled(rng, pair), shuffled(rng, nouns)[:k], labels) + "."


def _labels(rng: Random, pair: tuple[str, str], share: float, k: int) -> list[str]:
    return [pair[rng.random() >= share] for _ in range(k)]
