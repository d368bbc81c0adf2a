"""Associative recall: pairs of keys and values are stored, then values are asked by key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from llmgeom.errors import UserError
from llmgeom.task import Categorical, Sequences, Task, renamed, uniform

PAD, STORE, FILLER, QUERY, SEP = range(5)
FIRST_KEY = 10  # in the papers' layout


@dataclass(frozen=True)
class Recall(Task):
    """Values asked by key, some time after both were stored.

    pairs     N, stored: distinct keys with distinct values.
    queries   M, at most N: which stored keys are asked for, none twice.
    filler    F tokens between the pairs and the queries.
    keys      from which stored keys are drawn, without replacement.
    values    likewise.
    layout    compact: k v k v ..., F fillers, q a q a ... q. Tokens: keys, values after them, then the filler. An
              answer stands after its query, so that later answers are told what is taken.
              papers: STORE k SEP v a pair, F fillers, QUERY q PAD a query, F // 2 fillers between queries; the answer
              is asked at q and never shown. Tokens: PAD 0, STORE 1, FILLER 2, QUERY 3, SEP 4, keys from 10, values
              after them. Length 4N + F + 3M + (M - 1)(F // 2). As the papers' generator has it; no script
              of theirs trains on it.

    The answer is the value stored with the key: entropy 0, and all is in finding it.
    """

    pairs: int = 4
    queries: int = 4
    filler: int = 0
    keys: int = 8
    values: int = 8
    layout: str = "compact"

    def __post_init__(self) -> None:
        if self.layout not in ("compact", "papers"):
            raise UserError(f"{self.title}: layout {self.layout!r}; expected compact or papers")
        if not 1 <= self.queries <= self.pairs <= min(self.keys, self.values) or self.filler < 0:
            raise UserError(
                f"{self.title}: expected 1 or more queries, no more than pairs ({self.pairs}), which are no more than "
                f"keys ({self.keys}) and values ({self.values}), and filler of 0 or more"
            )

    @property
    def first_key(self) -> int:
        return FIRST_KEY if self.layout == "papers" else 0

    @property
    def first_value(self) -> int:
        return self.first_key + self.keys

    @property
    def vocabulary(self) -> int:
        own = self.first_value + self.values
        return own if self.layout == "papers" or not self.filler else own + 1

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
        """log2 of choose(keys, N) values! / (values - N)!: which keys, and an ordered choice of values for them."""
        return math.log2(math.comb(self.keys, self.pairs) * math.perm(self.values, self.pairs))

    def hypothesis(self, n: int, generator: torch.Generator) -> Tensor:
        """Keys and values as they are stored, [n 2 pair], both counted from 0."""
        device = generator.device
        chosen = [
            torch.rand(n, size, generator=generator, device=device).argsort(1) for size in (self.keys, self.values)
        ]
        return torch.stack([order[:, : self.pairs] for order in chosen], 1)

    def split_key(self, hypothesis: Tensor) -> Tensor:
        """In the order of the keys: the same pairs stored in another order are the same hypothesis."""
        order = hypothesis[:, :1].argsort(2).expand_as(hypothesis)
        return super().split_key(hypothesis.gather(2, order))

    def draw(self, hypothesis: Tensor, generator: torch.Generator, training: bool = False) -> Sequences:
        n, device = len(hypothesis), generator.device
        asked = torch.rand(n, self.pairs, generator=generator, device=device).argsort(1)[:, : self.queries]
        tokens = torch.stack([hypothesis[:, 0] + self.first_key, hypothesis[:, 1] + self.first_value], 1)
        asked_tokens = tokens.gather(2, asked[:, None].expand(n, 2, -1))
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
            inputs[:, first + 1 :: step] = asked_tokens[:, 1, :-1]
        inputs[:, first::step] = asked_tokens[:, 0]
        return Sequences(inputs, asked_tokens[:, 1] - self.first_value)

    def log_predictive(self, inputs: Tensor) -> Tensor:
        keys, values = self._stored(inputs)
        same = inputs[:, list(self.query), None] == keys[:, None]  # [sequence query pair]
        found = values.gather(1, same.long().argmax(-1))
        return torch.nn.functional.one_hot(found, self.values).double().log()

    def bearing(self, inputs: Tensor) -> Tensor:
        """The stored key that is asked about, its value, and the query. That the last answer can also be had by
        elimination where all keys are asked is not counted."""
        step, query = 4 if self.layout == "papers" else 2, list(self.query)
        same = inputs[:, query, None] == self._stored(inputs)[0][:, None]  # [sequence query pair]
        found = torch.zeros(*same.shape[:2], self.length, dtype=torch.bool, device=inputs.device)
        found[..., step // 2 - 1 : step * self.pairs : step] = same
        found[..., step - 1 : step * self.pairs : step] = same
        found[:, range(self.queries), query] = True
        return found

    def counterfactual(self, inputs: Tensor, generator: torch.Generator) -> Tensor | None:
        """The values of two stored pairs exchanged, and with them the answers that are shown."""
        if self.pairs < 2:
            return None
        values = self._stored(inputs)[1] + self.first_value
        two = torch.rand(values.shape, generator=generator, device=generator.device).argsort(1)[:, :2]
        return renamed(inputs, *values.gather(1, two).split(1, 1))

    def trivial(self, inputs: Tensor) -> Mapping[str, Tensor]:
        """memoryless: each value alike, since a key alone tells nothing. bag of values: the stored ones alike, less
        those shown as answers: log2 (N!) / N bits a query in the mean where M = N (1.146 for N = 4)."""
        stored = torch.nn.functional.one_hot(self._stored(inputs)[1], self.values).sum(1)
        left = stored[:, None].expand(-1, self.queries, -1)
        if self.layout == "compact":
            shown = inputs[:, self.query[0] + 1 :: 2] - self.first_value
            used = torch.nn.functional.one_hot(shown, self.values).cumsum(1)
            left = left - torch.nn.functional.pad(used, (0, 0, 1, 0))
        bag = left.double().log() - left.sum(-1, keepdim=True).log()
        return {"memoryless": uniform(inputs, self.queries, self.values), "bag of values": bag}

    def _stored(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The keys as tokens and the values counted from 0, [sequence pair]."""
        step = 4 if self.layout == "papers" else 2
        stored = inputs[:, : step * self.pairs]
        return stored[:, step // 2 - 1 :: step], stored[:, step - 1 :: step] - self.first_value
