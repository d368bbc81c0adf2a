"""Modular recurrence: does a sequence follow x -> ax + b modulo p, or chance?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from llmgeom.sampling import Generator, constants, integers, permutations, uniforms, with_another_symbol
from llmgeom.world import Categorical, Sequences, World


@dataclass(frozen=True)
class Recurrence(World):
    """The next number of a sequence that follows a program, or is random.

    The number n(x_0 .. x_(k-1)) of programs (a, b) that agree with k numbers is p^2 for k = 1, p for k = 2, then 1 or
    0, or if x_1 = x_0 p or 0. P(x_0 .. x_(k-1) | program) = n / p^3 against p^-k by chance: a Bayes factor of
    n p^(k-3) (the "construction boundary" code that accompanies Paper I). The answer is the mixture of the remaining
    programs and chance.

    Attributes:
        modulus: p, a prime.
        steps: Numbers drawn. Each but the last is a query for the next, so the last is never shown.
        program: pi, the probability of x_(t+1) = a x_t + b mod p, with a, b, x_0 drawn uniformly. Otherwise every
            number is drawn uniformly.
        horizon: The training loss covers x_1 ... x_horizon; 0: all.
        opaque: The numbers have new names in every sequence, which starts with ORD, the names of 0 .. p - 1, and SEP.
            Names are tokens p .. 2p - 1, ORD is 2p and SEP 2p + 1. Otherwise number i is token i.
    """

    TEXT: ClassVar = {"modulus": 5}
    KS: ClassVar = (3, 4, 8)

    modulus: int = 17
    steps: int = 16
    program: float = 0.5
    horizon: int = 0
    opaque: bool = False

    def __post_init__(self) -> None:
        p = self.modulus
        is_prime = p >= 2 and all(p % divisor for divisor in range(2, math.isqrt(p) + 1))
        self.require(is_prime, "a prime modulus, so that every difference has an inverse")
        self.require(self.steps >= 4, "steps of 4 or more")
        self.require(0 < self.program < 1, "program, a probability above 0 and below 1")
        self.require(0 <= self.horizon < self.steps, f"horizon of 0 (all), or 1 to {self.steps - 1}")

    @property
    def vocabulary(self) -> int:
        return 2 * self.modulus + 2 if self.opaque else self.modulus

    @property
    def header(self) -> int:
        """Tokens before the first number."""
        return self.modulus + 2 if self.opaque else 0

    @property
    def length(self) -> int:
        return self.header + self.steps - 1

    @property
    def answers(self) -> Categorical:
        first = self.modulus if self.opaque else 0
        return Categorical(tuple(range(first, first + self.modulus)))

    @property
    def log2_hypotheses(self) -> float:
        """log2 (p^2 + 1): the programs, and chance."""
        return math.log2(self.modulus**2 + 1)

    def showing(self, k: int) -> Recurrence:
        return replace(self, steps=k + 1)

    def hypothesis(self, n: int, generator: Generator) -> Tensor:
        """[n 3 + steps]: 1 for a program and 0 for chance, a, b, and all numbers of the sequence."""
        p = self.modulus
        by_program = uniforms(generator, n) < self.program
        a, b, *numbers = integers(p, generator, 2 + self.steps, n).unbind(0)
        for t in range(1, self.steps):
            numbers[t] = torch.where(by_program, (a * numbers[t - 1] + b) % p, numbers[t])
        return torch.stack([by_program.long(), a, b, *numbers], 1)

    def split_key(self, hypothesis: Tensor) -> Tensor:
        """The first three numbers, by program or chance: no training sequence has a held-out beginning."""
        return hypothesis[:, 3:6]

    def draw(self, hypothesis: Tensor, generator: Generator, training: bool = False) -> Sequences:
        numbers = hypothesis[:, 3:]
        if not self.opaque:
            return Sequences(numbers[:, :-1], numbers[:, 1:])
        n, p = len(hypothesis), self.modulus
        names = permutations(n, p, generator)
        renamed = names.gather(1, numbers)
        ord_, sep = (torch.full((n, 1), token, device=names.device) for token in (2 * p, 2 * p + 1))
        return Sequences(torch.cat([ord_, names + p, sep, renamed[:, :-1] + p], 1), renamed[:, 1:])

    def log_predictive(self, inputs: Tensor) -> Tensor:
        p, numbers = self.modulus, self._numbers(inputs)
        following, uncertain = self._program(numbers)[:2]
        known = one_hot(following, p).double().log()
        by_program = torch.where(uncertain[..., None], -math.log(p), known)
        belief = self.log_belief(inputs)
        mixed = torch.logaddexp(belief[..., :1] + by_program, belief[..., 1:] - math.log(p))
        if not self.opaque:
            return mixed
        return mixed.gather(2, self._number_of_name(inputs)[:, None].expand_as(mixed))

    def log_belief(self, inputs: Tensor) -> Tensor:
        """log P(program) and log P(chance) given the numbers so far."""
        p = self.modulus
        *_, log_consistent, seen = self._program(self._numbers(inputs))
        program = math.log(self.program) + log_consistent - 3 * math.log(p)
        chance = (math.log1p(-self.program) - seen * math.log(p)).expand_as(program)
        return torch.stack([program, chance], -1).log_softmax(-1)

    def counterfactual(self, inputs: Tensor, generator: Generator) -> Tensor:
        """Another number at one step, but not the last one shown; chance could have drawn it."""
        before, numbers = inputs.split([self.header, self.steps - 1], 1)
        first = self.answers.tokens[0]
        return torch.cat([before, with_another_symbol(numbers - first, self.modulus, generator) + first], 1)

    def trivial(self, inputs: Tensor) -> Mapping[str, Tensor]:
        """memoryless: the answer after only the last number. A program stays at its number with probability
        1 - (1 - 1/p)^2 from x_1 on (x_1 = x_0, or a = 0), and moves to every other number with equal probability."""
        p = self.modulus
        step = torch.arange(self.steps - 1, device=inputs.device)[:, None]
        stays = torch.where(step == 0, 1 / p, constants([1 - (1 - 1 / p) ** 2], inputs.device))
        stays = self.program * stays + (1 - self.program) / p
        last = one_hot(inputs[:, self.header :] - self.answers.tokens[0], p).bool()
        return {"memoryless": torch.where(last, stays, (1 - stays) / (p - 1)).log()}

    def _numbers(self, inputs: Tensor) -> Tensor:
        """The numbers behind the tokens, [sequence query]."""
        if not self.opaque:
            return inputs
        return self._number_of_name(inputs).gather(1, inputs[:, self.header :] - self.modulus)

    def _number_of_name(self, inputs: Tensor) -> Tensor:
        """[sequence name]: the number behind each name."""
        return (inputs[:, 1 : self.modulus + 1] - self.modulus).argsort(1)

    def _program(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """At each query: the next number of an agreeing program, whether agreeing programs differ, log n, and k.

        If x_1 = x_0, every program that agrees stays there, as a = 0, b = x_1 does.
        """
        p, device = self.modulus, x.device
        residues = torch.arange(p, device=device)
        inverse = ((residues[:, None] * residues) % p == 1).long().argmax(1)  # 0 of 0
        step = x.diff(dim=1)[:, :2]
        stays = step[:, :1] == 0
        a = (step[:, 1:] * inverse[step[:, :1]]) % p
        b = (x[:, 1:2] - a * x[:, :1]) % p
        following = (a * x + b) % p
        agrees = pad(following[:, :-1] == x[:, 1:], (1, 0), value=True).cummin(1).values
        seen = torch.arange(1, self.steps, dtype=torch.float64, device=device)
        uncertain = (seen == 1) | (seen == 2) & ~stays
        powers = torch.where(seen == 1, 2, ((seen == 2) | stays).double())  # n as a power of p
        return following, uncertain, (powers * math.log(p)).where(agrees, -math.inf), seen
