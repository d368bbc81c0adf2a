"""Bijection elimination: an unknown one-to-one map of keys to values is shown pair by pair."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from llmgeom.errors import UserError
from llmgeom.task import Categorical, Sequences, Task, renamed, uniform


@dataclass(frozen=True)
class Bijection(Task):
    """A one-to-one map of keys to values, shown pair by pair.

    vocab         V keys and V values; tokens 0 .. V - 1 are keys, V .. 2V - 1 values (the papers' production format:
                  k1, v1, k2, v2, ..., kL).
    pairs         L; at each key its value is asked.
    replacement   keys may come again. Without it keys tell nothing, and what values are left is all there is to know.
    sticky        with replacement, in training only: the probability that a key is one seen before, else it is a new
                  one. The exact answer does not depend on how keys are chosen; with keys drawn evenly, as they are in
                  grading, nothing is learnt for a long time.

    A key seen before has its value; another key has each of the V - m values not yet used, m being the number of
    distinct keys seen: entropy log2(V - m) bits (Paper I section 3, as its production code formats it).
    """

    vocab: int = 8
    pairs: int = 7
    replacement: bool = False
    sticky: float = 0.5

    def __post_init__(self) -> None:
        if self.vocab < 2 or self.pairs < 1 or not 0 <= self.sticky <= 1:
            raise UserError(f"{self.title}: expected vocab of 2 or more, pairs of 1 or more, sticky between 0 and 1")
        if self.pairs > self.vocab and not self.replacement:
            raise UserError(f"{self.title}: {self.pairs} pairs of {self.vocab} keys need replacement=true")

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

    def hypothesis(self, n: int, generator: torch.Generator) -> Tensor:
        """The value of each key, [n vocab]."""
        return torch.rand(n, self.vocab, generator=generator, device=generator.device).argsort(1)

    def draw(self, hypothesis: Tensor, generator: torch.Generator, training: bool = False) -> Sequences:
        n, device = len(hypothesis), generator.device
        if self.replacement and training:
            keys = self._stuck(n, generator)
        elif self.replacement:
            keys = torch.randint(self.vocab, (n, self.pairs), generator=generator, device=device)
        else:
            keys = torch.rand(n, self.vocab, generator=generator, device=device).argsort(1)[:, : self.pairs]
        values = hypothesis.gather(1, keys)
        tokens = torch.stack([keys, values + self.vocab], -1).flatten(1)
        return Sequences(tokens[:, :-1], values)

    def _stuck(self, n: int, generator: torch.Generator) -> Tensor:
        """Keys [n pairs]: with probability `sticky` one of those seen before, each alike, else one not yet seen."""
        order = torch.rand(n, self.vocab, generator=generator, device=generator.device).argsort(1)
        lots = torch.rand(2, n, self.pairs, generator=generator, device=generator.device)
        fresh = lots[0] >= self.sticky
        fresh[:, 0] = True
        seen = (fresh.cumsum(1) - fresh.long()).clamp(max=self.vocab)  # distinct keys before each place
        again = (lots[1] * seen).long().clamp(max=self.vocab - 1)
        return order.gather(1, torch.where(fresh & (seen < self.vocab), seen.clamp(max=self.vocab - 1), again))

    def log_predictive(self, inputs: Tensor) -> Tensor:
        keys, values = self._pairs(inputs)
        used = self._used(values)
        # [sequence query earlier]: which earlier pairs have the key that is asked about.
        same = (keys[:, :, None] == keys[:, None, :]).tril(-1)
        shown = torch.nn.functional.one_hot(values, self.vocab).bool()
        known = (same[:, :, :-1, None] & shown[:, None]).any(2)
        possible = torch.where(known.any(-1, keepdim=True), known, ~used).double()
        return (possible / possible.sum(-1, keepdim=True)).log()

    def bearing(self, inputs: Tensor) -> Tensor:
        """Without replacement: the values shown before, in every sequence alike; no key bears, nor does the query.
        With it: the pairs that hold the key asked about, key and value; where there is none, the values. A pair that is
        shown twice is changed wherever it stands. The query bears once something was shown. That a value can also be
        had by elimination once all V are shown is not counted."""
        keys = self._pairs(inputs)[0]
        earlier = torch.ones(self.pairs, self.pairs, dtype=torch.bool, device=inputs.device).tril(-1)
        same = (keys[:, :, None] == keys[:, None, :]) & earlier & self.replacement
        own = torch.eye(self.pairs, dtype=torch.bool, device=inputs.device) & earlier.any(1) & self.replacement
        told = torch.where(same.any(2, keepdim=True), same, earlier)
        return torch.stack([same | own, told], -1).flatten(2)[..., :-1]

    def counterfactual(self, inputs: Tensor, generator: torch.Generator) -> Tensor | None:
        """A value that is shown, at a place drawn evenly, and one that is not (or where all are, another) exchanged:
        what another map would have shown at the same keys."""
        if self.pairs < 2:
            return None
        n, device = len(inputs), generator.device
        values = self._pairs(inputs)[1]
        one = values.gather(1, torch.randint(self.pairs - 1, (n, 1), generator=generator, device=device))
        lots = torch.rand(n, self.vocab, generator=generator, device=device)
        lots = (lots - self._used(values)[:, -1].float()).scatter(1, one, -2.0)
        return renamed(inputs, one + self.vocab, lots.argmax(1, keepdim=True) + self.vocab)

    def trivial(self, inputs: Tensor) -> Mapping[str, Tensor]:
        """memoryless: each value alike, since a key alone tells nothing. bag of values: those not yet used, alike,
        or the used ones where the key came before; which key had which is not told. Without replacement it is exact."""
        keys, values = self._pairs(inputs)
        again = (keys[:, :, None] == keys[:, None, :]).tril(-1).any(2)
        possible = (self._used(values) == again[..., None]).double()
        bag = (possible / possible.sum(-1, keepdim=True)).log()
        return {"memoryless": uniform(inputs, self.pairs, self.vocab), "bag of values": bag}

    def _pairs(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [sequence query] and the values shown, one fewer."""
        return inputs[:, 0::2], inputs[:, 1::2] - self.vocab

    def _used(self, values: Tensor) -> Tensor:
        """Which values were shown before each query, [sequence query value] bool."""
        shown = torch.nn.functional.one_hot(values, self.vocab)
        return torch.nn.functional.pad(shown.cumsum(1), (0, 0, 1, 0)) > 0
