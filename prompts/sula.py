"""In-context evidence (SULA): prompts that show k labelled words and ask for the next label, with the exact answer.

Labels of two kinds are drawn with a share from a prior; the words are irrelevant. So the next label has one exact
distribution, and so has the latent class: which label rules (two-point) or is more frequent (Beta).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from itertools import combinations
from random import Random
from typing import Any

import numpy as np

from llmgeom.batch import Batch, Posterior, Text
from llmgeom.errors import NO_TOKENIZER, UserError, unknown
from llmgeom.prompts import nonce
from llmgeom.prompts.chance import pick, shuffled
from llmgeom.prompts.marks import neutral
from llmgeom.prompts.nonce import FORMATS, Format, Part
from llmgeom.stats import conjugate as exact

MASK = "[MASK]"
LEAST_PAIRS = 5  # an interval needs at least 5 clusters
MOST = 24  # observations: a prompt of the longest sentence template then has about 200 tokens


def exactly(number: float, shift: int = 0) -> str:
    """The number times 10^shift in decimals, without rounding, since the exact answer must fit the stated prior.

    With rounding, a reliability of .875 was stated as 88 times in 100.
    """
    return f"{Decimal(repr(float(number))).scaleb(shift).normalize():f}"


@dataclass(frozen=True)
class TwoPoint:
    """One of two labels rules, with probability 1/2 each; each observation shows it with probability `reliability`."""

    reliability: float = 0.9

    def __post_init__(self) -> None:
        if not 0.5 < self.reliability < 1:
            raise UserError(f"reliability {self.reliability:g}: give a probability above 0.5 and below 1")

    def share(self, u: float) -> float:
        return self.reliability if u < 0.5 else 1 - self.reliability

    def predictive(self, n1: np.ndarray, n2: np.ndarray) -> np.ndarray:
        return exact.two_point(n1, n2, self.reliability)

    def belief(self, n1: np.ndarray, n2: np.ndarray) -> np.ndarray:
        return exact.two_point_belief(n1, n2, self.reliability)

    @property
    def instructions(self) -> tuple[str, ...]:
        chance = f"{exactly(self.reliability, shift=2)} times in 100"
        return (
            f"One of the two marks {{}} and {{}} is the true one. Each word is given the true mark {chance}.",
            f"A clerk marks words with {{}} or {{}}. One mark is right for all of them, and he writes it {chance}.",
            f"Each word was meant to get one and the same mark, {{}} or {{}}; the machine hits it {chance}.",
            f"The mark is {{}} or {{}}, the same for the whole list, and each entry shows it correctly {chance}.",
            f"Somebody chose {{}} or {{}} by a fair coin and wrote the chosen mark beside a word {chance}.",
        )


@dataclass(frozen=True)
class Beta:
    """The share of the first label has a Beta(a, b) prior; labels are independent given the share."""

    a: float = 1.0
    b: float = 1.0

    def __post_init__(self) -> None:
        if not (self.a > 0 and self.b > 0 and math.isfinite(self.a + self.b)):
            raise UserError(f"Beta({self.a:g}, {self.b:g}): both must be above 0, and finite")

    def share(self, u: float) -> float:
        from scipy.stats import beta

        return float(beta.ppf(u, self.a, self.b))

    def predictive(self, n1: np.ndarray, n2: np.ndarray) -> np.ndarray:
        return exact.beta_bernoulli(n1, n2, self.a, self.b)

    def belief(self, n1: np.ndarray, n2: np.ndarray) -> np.ndarray:
        return exact.beta_majority(n1, n2, self.a, self.b)

    @property
    def instructions(self) -> tuple[str, ...]:
        prior = (
            "any share is as likely as any other"
            if self.a == self.b == 1
            else f"it is known as well as from {exactly(self.a)} of the first kind and {exactly(self.b)} of the second"
        )
        return (
            f"Words are marked {{}} or {{}}. A fixed share of them gets the first mark; {prior}.",
            f"Each word gets the mark {{}} or {{}} by chance, the first with a fixed probability; of that, {prior}.",
            f"A bent coin decides between {{}} and {{}} for each word. How bent is not known: {prior}.",
            f"The marks {{}} and {{}} are drawn from one urn and put back. As to how much is the first, {prior}.",
            f"A list of words, each with {{}} or {{}}. The share of the first does not change; {prior}.",
        )


Prior = TwoPoint | Beta


def prior(text: str) -> Prior:
    """`two-point`, `two-point:0.8`, `beta`, `beta:2,1`. Raises UserError for anything else."""
    name, _, given = text.partition(":")
    kinds: dict[str, type[Prior]] = {"two-point": TwoPoint, "beta": Beta}
    try:
        numbers = [float(number) for number in given.split(",")] if given else []
        if name not in kinds or len(numbers) not in (0, len(dataclasses.fields(kinds[name]))):
            raise ValueError
    except ValueError:
        raise UserError(f"--prior {text}: expected two-point, two-point:0.8, beta or beta:2,1") from None
    return kinds[name](*numbers)


def available(tokenizer: Any) -> tuple[str, ...]:
    """Words that are one token after a space, for use as labels: those of pocket models, of others `marks.neutral`.

    They are many, since each is in one pair: if a model has biases for words, intervals of 8 pairs cover .85, of 40
        .92.

    Raises:
        UserError: fewer than 10 words (an interval needs 5 pairs), or no tokenizer.
    """
    from llmgeom.model.tokenizing import after_space

    if tokenizer is None:
        raise UserError(f"the model {NO_TOKENIZER}")
    found = [word for word in nonce.LABELS if len(after_space(word, tokenizer)) == 1]
    if len(found) < len(nonce.LABELS):  # no pocket model's tokenizer
        found = [word for word in neutral() if len(after_space(word, tokenizer)) == 1]
    if len(found) < 2 * LEAST_PAIRS:
        raise UserError(
            f"{len(found)} syllables are single tokens of this tokenizer; name at least {2 * LEAST_PAIRS} with --labels"
        )
    return tuple(found[: len(nonce.LABELS)])


CONDITIONS = {
    "main": "labels drawn from the prior",
    "remap": "the same labels drawn, written with another pair of words",
    "swap": "each label exchanged for the other, the lead-in as it was",
    "permuted": "the same labels in another order",
    "consistent": "the first label throughout",
    "alternating": "the two labels in turn",
    "shuffled": "labels drawn 1/2 each (published control)",
    "no words": "every word replaced by [MASK] (published control)",
    "then first": "one more word, with the first label",
    "then second": "one more word, with the second label",
}
TEMPLATES = ("colon", "is", "plain", "instructed")


@dataclass(frozen=True)
class Sula:
    """Prompts of one prior, template and condition; the same seed gives the same draws in every condition.

    Attributes:
        template: colon, is: a lead-in that names both labels (prompts/nonce.py); plain: as published, no lead-in;
            instructed: a sentence that names both and states the prior.
        labels: the words used as labels; two that a pocket model saw together in training are never paired.
        ks: numbers of labelled words before the question.
        condition: one of CONDITIONS.

    Raises:
        UserError: a value is impossible.
    """

    labels: tuple[str, ...]
    prior: Prior = TwoPoint()
    template: str = "colon"
    ks: tuple[int, ...] = (0, 1, 2, 4, 8)
    condition: str = "main"

    def __post_init__(self) -> None:
        for what, value, known in (
            ("template", self.template, TEMPLATES),
            ("condition", self.condition, tuple(CONDITIONS)),
        ):
            if value not in known:
                raise unknown(what, value, known)
        wrong = [k for k in self.ks if not 0 <= k <= MOST]
        if wrong or not self.ks or len(set(self.ks)) < len(self.ks):
            raise UserError(f"--k {','.join(map(str, self.ks))}: expected different numbers from 0 to {MOST}")
        if len(set(self.labels)) < len(self.labels) or len(self.pairs) < LEAST_PAIRS:
            raise UserError(
                f"the labels {', '.join(self.labels)} give {len(self.pairs)} pairs that share no word; "
                f"{LEAST_PAIRS} are needed: name {2 * LEAST_PAIRS} or more different ones with --labels"
            )

    @cached_property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Pairs of labels, which are the clusters. Each pair always has the same lead-in, so that what a probe learns
        from some lead-ins is tested on other pairs.

        No word is in two pairs, and a word without a partner is in none. A model has biases for words: with every pair
        of 16 words (61 clusters) the intervals of such models covered .62; with 80 words in 40 pairs they cover .92.
        """
        trained = frozenset(nonce.pairs(Part.TRAINED))
        free = {word: set[str]() for word in self.labels}
        for pair in combinations(sorted(free), 2):
            if pair not in trained:
                for word, partner in (pair, pair[::-1]):
                    free[word].add(partner)
        matched = []
        while some := [word for word in free if free[word]]:  # words with the fewest partners first, so few are left
            word = min(some, key=lambda word: (len(free[word]), word))
            partner = min(free[word], key=lambda partner: (len(free[partner]), partner))
            matched.append((min(word, partner), max(word, partner)))
            del free[word], free[partner]
            for partners in free.values():
                partners -= {word, partner}
        return tuple(sorted(matched))

    @property
    def _format(self) -> Format:
        """The format of the prompts, with the lead-ins in use."""
        if self.template in FORMATS:
            return dataclasses.replace(FORMATS[self.template], leads=nonce.leads(self.template, Part.TRAINED))
        return Format(self.prior.instructions if self.template == "instructed" else ("",), link=":", gap=",")

    def sample(self, n: int, seed: int) -> Batch:
        """`n` prompts for each number of observations. Columns: k, pair, lead, first, second (the labels in the order
        of the lead-in), seen (0 first, 1 second), n1, latent and next (both drawn), item.

        The posterior has one position, the last: `predictive`, log P(next label), and `belief`, log P(latent class), of
        an observer with this prior, whatever the condition changed. Raises UserError for n below 1.
        """
        import torch

        if n < 1:
            raise UserError(f"--n {n}: ask for at least 1 prompt a number of observations")
        rows = [self._item(k, i, seed) for k in self.ks for i in range(n)]
        columns = {name: tuple(row[name] for row in rows) for name in rows[0] if name != "text"}
        n1, k = (np.array(columns[name], dtype=np.float64) for name in ("n1", "k"))
        predictive, belief = (
            torch.from_numpy(of(n1, k - n1))[:, None] for of in (self.prior.predictive, self.prior.belief)
        )
        return Batch(
            inputs=Text(tuple(row["text"] for row in rows)),
            cluster=columns["pair"],
            source={
                "kind": "sula",
                "name": f"SULA, {self.template}",
                **self.spec,
                "n": n,
                "seed": seed,
                "available": len(self.pairs),
            },
            columns=columns,
            posterior=Posterior(predictive, belief),
        )

    @property
    def spec(self) -> dict[str, Any]:
        """As plain data."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return fields | {"prior": {"kind": type(self.prior).__name__, **dataclasses.asdict(self.prior)}}

    def _item(self, k: int, i: int, seed: int) -> dict[str, Any]:
        """One prompt; its random draws have the same order in every condition."""
        rng = Random(f"llmgeom/sula/{seed}/{k}/{i}")
        pairs, form = shuffled(Random(f"llmgeom/sula/{seed}/{k}"), self.pairs), self._format
        pair, turned = pairs[i % len(pairs)], rng.random() < 0.5
        share = self.prior.share(rng.random())
        *seen, following = [int(rng.random() >= share) for _ in range(k + 1)]
        nouns = shuffled(rng, nonce.carriers(Part.HELD_OUT))[: k + 2]
        other = pick(rng, [candidate for candidate in pairs if not {*candidate} & {*pair}] or pairs)
        permuted, even = shuffled(rng, seen), [int(rng.random() >= 0.5) for _ in seen]
        first = seen[0] if seen else 0
        seen = {
            "swap": [1 - label for label in seen],
            "permuted": permuted,
            "consistent": [first] * k,
            "alternating": [(first + j) % 2 for j in range(k)],
            "shuffled": even,
            "then first": [*seen, 0],
            "then second": [*seen, 1],
        }.get(self.condition, seen)
        written = other if self.condition == "remap" else pair
        named = written[::-1] if turned else written
        nouns = [MASK] * (k + 2) if self.condition == "no words" else nouns
        lead = form.leads[self.pairs.index(pair) % len(form.leads)]
        labels = [named[label] for label in seen]
        return {
            "k": len(seen),
            "pair": "-".join(pair),
            "lead": lead,
            "first": named[0],
            "second": named[1],
            "seen": "".join(map(str, seen)),
            "n1": seen.count(0),
            "latent": int(share <= 0.5),
            "next": following,
            "item": i,
            "text": nonce.written(form, lead, named, nouns[: len(seen) + 1], labels).strip(),
        }
