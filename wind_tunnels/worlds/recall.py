"""Associative recall: pairs of keys and values are stored, then values are queried by key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from llmgeom.sampling import Generator, exchanged, integers, permutations
from llmgeom.world import Categorical, Sequences, World, uniform

PAD, STORE, FILLER, QUERY, SEP = range(5)
FIRST_KEY = 10  # in the papers' layout


@dataclass(frozen=True)
class Recall(World):
    """Values queried by key, some time after both were stored.

    The answer is the value stored with the key: entropy 0; the difficulty is to find it.

    Attributes:
        pairs: N stored pairs, distinct keys with distinct values.
        queries: M queries, at most N: different stored keys.
        filler: F tokens between the pairs and the queries.
        keys: The number of keys from which pairs are drawn, without replacement.
        values: The same for values.
        distinct: Stored values differ. Otherwise each is drawn uniformly.
        layout: compact: k v k v ..., F fillers, q a q a ... q. Tokens: keys, values after them, then the filler. An
            answer follows its query, so later queries show which values are used.
            papers: STORE k SEP v for a pair, F fillers, QUERY q PAD a query, F // 2 fillers between queries; the query
            is q and its answer is never shown. Tokens: PAD 0, STORE 1, FILLER 2, QUERY 3, SEP 4, keys from 10, values
            after them. Length 4N + F + 3M + (M - 1)(F // 2). As in the papers' generator; no script of theirs trains
            on it.
    """

    TEXT: ClassVar = {"values": 4, "distinct": False}
    PRIMITIVE: ClassVar = "bind"

    pairs: int = 4
    queries: int = 4
    filler: int = 0
    keys: int = 8
    values: int = 8
    layout: str = "compact"
    distinct: bool = True

    def __post_init__(self) -> None:
        self.require(self.layout in ("compact", "papers"), "layout compact or papers")
        self.require(
            1 <= self.queries <= self.pairs <= min(self.keys, self.values if self.distinct else self.pairs)
            and self.filler >= 0,
            "1 or more queries, at most as many as pairs, which are at most as many as keys and distinct values; "
            "filler of 0 or more",
        )
        self.require(self.values >= 2, "values of 2 or more")

    def showing(self, k: int) -> Recall:
        return replace(self, pairs=k, queries=1, keys=max(self.keys, k))

    @property
    def first_key(self) -> int:
        return FIRST_KEY if self.layout == "papers" else 0

    @property
    def first_value(self) -> int:
        return self.first_key + self.keys

    @property
    def vocabulary(self) -> int:
        end = self.first_value + self.values
        return end if self.layout == "papers" or not self.filler else end + 1

    @property
    def length(self) -> int:
        return self.query[-1] + (2 if self.layout == "papers" else 1)

    @property
    def query(self) -> tuple[int, ...]:
        if self.layout == "papers":
            return tuple(4 * self.pairs + self.filler + j * (3 + self.filler // 2) + 1 for j in range(self.queries))
        return tuple(2 * self.pairs + self.filler + 2 * j for j in range(self.queries))

    @property
    def answers(self) -> Categorical:
        return Categorical(tuple(range(self.first_value, self.first_value + self.values)))

    @property
    def log2_hypotheses(self) -> float:
        """log2 of choose(keys, N) values! / (values - N)!: which keys, and an ordered choice of values for them; of
        values^N choices where they may be equal."""
        choices = math.perm(self.values, self.pairs) if self.distinct else self.values**self.pairs
        return math.log2(math.comb(self.keys, self.pairs) * choices)

    def hypothesis(self, n: int, generator: Generator) -> Tensor:
        """Keys and values in the order of storage, [n 2 pair], both counted from 0."""
        keys = permutations(n, self.keys, generator)[:, : self.pairs]
        if not self.distinct:
            return torch.stack([keys, integers(self.values, generator, n, self.pairs)], 1)
        return torch.stack([keys, permutations(n, self.values, generator)[:, : self.pairs]], 1)

    def split_key(self, hypothesis: Tensor) -> Tensor:
        """In the order of the keys: the same pairs stored in another order are the same hypothesis."""
        order = hypothesis[:, :1].argsort(2).expand_as(hypothesis)
        return super().split_key(hypothesis.gather(2, order))

    def draw(self, hypothesis: Tensor, generator: Generator, training: bool = False) -> Sequences:
        n, device = len(hypothesis), generator.device
        queried = permutations(n, self.pairs, generator)[:, : self.queries]
        tokens = torch.stack([hypothesis[:, 0] + self.first_key, hypothesis[:, 1] + self.first_value], 1)
        queried_tokens = tokens.gather(2, queried[:, None].expand(n, 2, -1))
        filler = FILLER if self.layout == "papers" else self.first_value + self.values
        inputs = torch.full((n, self.length), filler, device=device)
        first, step = self.query[0], (3 + self.filler // 2 if self.layout == "papers" else 2)
        if self.layout == "papers":
            stored = inputs[:, : 4 * self.pairs]
            stored[:, 0::4], stored[:, 1::4], stored[:, 2::4], stored[:, 3::4] = STORE, tokens[:, 0], SEP, tokens[:, 1]
            inputs[:, first - 1 :: step] = QUERY
            inputs[:, first + 1 :: step] = PAD
        else:
            inputs[:, 0 : 2 * self.pairs : 2], inputs[:, 1 : 2 * self.pairs : 2] = tokens[:, 0], tokens[:, 1]
            inputs[:, first + 1 :: step] = queried_tokens[:, 1, :-1]
        inputs[:, first::step] = queried_tokens[:, 0]
        return Sequences(inputs, queried_tokens[:, 1] - self.first_value)

    def log_predictive(self, inputs: Tensor) -> Tensor:
        value = self._stored(inputs)[1].gather(1, self._matches(inputs).long().argmax(-1))
        return one_hot(value, self.values).double().log()

    def sufficient(self, inputs: Tensor) -> Tensor:
        """The queried key, and the value stored with each key (0: none)."""
        keys, values = self._stored(inputs)
        stored = (one_hot(keys - self.first_key, self.keys) * (values + 1)[..., None]).sum(1)
        queried = inputs[:, list(self.query), None] - self.first_key
        return torch.cat([queried, stored[:, None].expand(-1, self.queries, -1)], -1)

    def bearing(self, inputs: Tensor) -> Tensor:
        """The stored key that is queried, its value, and the query.

        Elimination of the last answer, if all keys are queried, does not count.
        """
        step, matches = 4 if self.layout == "papers" else 2, self._matches(inputs)
        bears = torch.zeros(*matches.shape[:2], self.length, dtype=torch.bool, device=inputs.device)
        bears[..., step // 2 - 1 : step * self.pairs : step] = matches
        bears[..., step - 1 : step * self.pairs : step] = matches
        bears[:, range(self.queries), list(self.query)] = True
        return bears

    def counterfactual(self, inputs: Tensor, generator: Generator) -> Tensor | None:
        """The values of two stored pairs exchanged, and their shown answers, too."""
        if self.pairs < 2:
            return None
        values = self._stored(inputs)[1] + self.first_value
        pair = permutations(len(values), values.shape[1], generator)[:, :2]
        return exchanged(inputs, *values.gather(1, pair).split(1, 1))

    def trivial(self, inputs: Tensor) -> Mapping[str, Tensor]:
        """memoryless: uniform, since a key alone says nothing. bag of values: uniform over the stored values, without
        those shown as answers: log2(N!) / N bits a query on average if M = N (1.146 for N = 4)."""
        stored = one_hot(self._stored(inputs)[1], self.values).sum(1)
        left = stored[:, None].expand(-1, self.queries, -1)
        if self.layout == "compact":
            shown = inputs[:, self.query[0] + 1 :: 2] - self.first_value
            left = left - pad(one_hot(shown, self.values).cumsum(1), (0, 0, 1, 0))
        bag = left.double().log() - left.sum(-1, keepdim=True).log()
        return {"memoryless": uniform(inputs, self.queries, self.values), "bag of values": bag}

    def _stored(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The keys as tokens and the values counted from 0, [sequence pair]."""
        step = 4 if self.layout == "papers" else 2
        stored = inputs[:, : step * self.pairs]
        return stored[:, step // 2 - 1 :: step], stored[:, step - 1 :: step] - self.first_value

    def _matches(self, inputs: Tensor) -> Tensor:
        """[sequence query pair] bool: which stored pair has the queried key."""
        return inputs[:, list(self.query), None] == self._stored(inputs)[0][:, None]
