"""Bijection elimination: an unknown one-to-one map of keys to values is shown pair by pair."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from llmgeom.answers import evenly
from llmgeom.sampling import Generator, exchanged, integers, permutations, same_earlier, uniforms
from llmgeom.world import Categorical, Sequences, World, uniform


@dataclass(frozen=True)
class Bijection(World):
    """A one-to-one map of keys to values, shown pair by pair.

    A key seen before has its value; another key has each of the V - m unused values, where m distinct keys were seen:
    entropy log2(V - m) bits (Paper I section 3, in the format of its production code: k1, v1, k2, v2, ..., kL).

    Attributes:
        vocab: V keys and V values; tokens 0 .. V - 1 are keys, V .. 2V - 1 values.
        pairs: L pairs; each key is a query for its value.
        replacement: Keys may be repeated. Without it keys carry no information: only the unused values matter.
        sticky: With replacement, in training only: the probability that a key was seen before, else it is new. The
            exact answer does not depend on how keys are chosen. With uniformly drawn keys, as in grading, training
            stays at its initial loss for a long time.
    """

    TEXT: ClassVar = {"vocab": 5, "pairs": 2, "replacement": True}
    PRIMITIVE: ClassVar = "bind"

    vocab: int = 8
    pairs: int = 7
    replacement: bool = False
    sticky: float = 0.5

    def __post_init__(self) -> None:
        self.require(
            self.vocab >= 2 and self.pairs >= 1 and 0 <= self.sticky <= 1,
            "vocab of 2 or more, pairs of 1 or more, sticky between 0 and 1",
        )
        self.require(
            self.pairs <= self.vocab or self.replacement,
            f"replacement=true for {self.pairs} pairs of {self.vocab} keys",
        )

    @property
    def vocabulary(self) -> int:
        return 2 * self.vocab

    @property
    def length(self) -> int:
        return 2 * self.pairs - 1

    @property
    def query(self) -> tuple[int, ...]:
        return tuple(range(0, self.length, 2))

    @property
    def answers(self) -> Categorical:
        return Categorical(tuple(range(self.vocab, 2 * self.vocab)))

    @property
    def log2_hypotheses(self) -> float:
        """log2 V!"""
        return math.lgamma(self.vocab + 1) / math.log(2)

    def showing(self, k: int) -> Bijection:
        return replace(self, pairs=k + 1)

    def hypothesis(self, n: int, generator: Generator) -> Tensor:
        """The value of each key, [n vocab]."""
        return permutations(n, self.vocab, generator)

    def draw(self, hypothesis: Tensor, generator: Generator, training: bool = False) -> Sequences:
        n = len(hypothesis)
        if self.replacement and training:
            keys = self._sticky_keys(n, generator)
        elif self.replacement:
            keys = integers(self.vocab, generator, n, self.pairs)
        else:
            keys = permutations(n, self.vocab, generator)[:, : self.pairs]
        values = hypothesis.gather(1, keys)
        tokens = torch.stack([keys, values + self.vocab], -1).flatten(1)
        return Sequences(tokens[:, :-1], values)

    def _sticky_keys(self, n: int, generator: Generator) -> Tensor:
        """Keys [n pairs]: with probability `sticky` a uniformly drawn seen key, else an unseen one."""
        order = permutations(n, self.vocab, generator)
        lots = uniforms(generator, 2, n, self.pairs)
        fresh = lots[0] >= self.sticky
        fresh[:, 0] = True
        seen = (fresh.cumsum(1) - fresh.long()).clamp(max=self.vocab)  # distinct keys before each place
        again = (lots[1] * seen).long().clamp(max=self.vocab - 1)
        return order.gather(1, torch.where(fresh & (seen < self.vocab), seen.clamp(max=self.vocab - 1), again))

    def log_predictive(self, inputs: Tensor) -> Tensor:
        keys, values = self._pairs(inputs)
        # [sequence query earlier value]: the values of earlier pairs with the queried key.
        known = (same_earlier(keys)[:, :, :-1, None] & one_hot(values, self.vocab).bool()[:, None]).any(2)
        return evenly(torch.where(known.any(-1, keepdim=True), known, ~self._used(values)))

    def sufficient(self, inputs: Tensor) -> Tensor:
        """Without replacement the used values, [... vocab] of 0 or 1. With it the queried key, and the value of each
        key seen so far (0: not seen)."""
        keys, values = self._pairs(inputs)
        if not self.replacement:
            return self._used(values).long()
        shown = one_hot(keys[:, :-1], self.vocab) * (values + 1)[..., None]
        return torch.cat([keys[..., None], pad(shown.cummax(1).values, (0, 0, 1, 0))], -1)

    def bearing(self, inputs: Tensor) -> Tensor:
        """The positions on which the answer depends.

        Without replacement: all values shown before; no key bears, nor does the query. With replacement: key and value
        of the pairs with the queried key, or all values if there are none; the query bears once something was shown. A
        pair shown twice is changed at both places. Elimination of the last value, once all others are shown, does not
        count.
        """
        earlier = torch.ones(self.pairs, self.pairs, dtype=torch.bool, device=inputs.device).tril(-1)
        same = same_earlier(self._pairs(inputs)[0]) & self.replacement
        query = torch.eye(self.pairs, dtype=torch.bool, device=inputs.device) & earlier.any(1) & self.replacement
        values = torch.where(same.any(2, keepdim=True), same, earlier)
        return torch.stack([same | query, values], -1).flatten(2)[..., :-1]

    def counterfactual(self, inputs: Tensor, generator: Generator) -> Tensor | None:
        """A shown value, at a random place, exchanged with one not shown (or with another, if all are shown).

        These are the inputs of another map at the same keys.
        """
        if self.pairs < 2:
            return None
        n, values = len(inputs), self._pairs(inputs)[1]
        value = values.gather(1, integers(self.pairs - 1, generator, n, 1))
        lots = uniforms(generator, n, self.vocab) - self._used(values)[:, -1].float()
        other = lots.scatter(1, value, -2.0).argmax(1, keepdim=True)
        return exchanged(inputs, value + self.vocab, other + self.vocab)

    def trivial(self, inputs: Tensor) -> Mapping[str, Tensor]:
        """memoryless: uniform, since a key alone says nothing. bag of values: uniform over the unused values, or over
        the used ones if the key came before; it does not know which key had which. Without replacement it is exact."""
        keys, values = self._pairs(inputs)
        repeated = same_earlier(keys).any(2)
        bag = evenly(self._used(values) == repeated[..., None])
        return {"memoryless": uniform(inputs, self.pairs, self.vocab), "bag of values": bag}

    def _pairs(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [sequence query] and the values shown, one fewer."""
        return inputs[:, 0::2], inputs[:, 1::2] - self.vocab

    def _used(self, values: Tensor) -> Tensor:
        """Which values were shown before each query, [sequence query value] bool."""
        return pad(one_hot(values, self.vocab).cumsum(1), (0, 0, 1, 0)) > 0
