"""Hidden Markov filtering: the matrices precede the observations, and the belief about the state must be updated."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import one_hot, pad

from llmgeom.sampling import Generator, integers, with_another_symbol
from llmgeom.wind_tunnels.chains import LEAST, HiddenChains, emit, logs, walk
from llmgeom.world import Categorical, Sequences, seeded

TRANS, EMIT, SEP, OBS, SYMBOL = 96, 97, 98, 99, 100  # tokens 0 .. 95 are probabilities .05 .. 1.00


@dataclass(frozen=True)
class HMM(HiddenChains):
    """Hidden Markov filtering.

    T_ij = P(s_t+1 = j | s_t = i) and E_io = P(o_t = o | s_t = i) are new in every sequence: rows of Dirichlet(1, ...),
    in hundredths and none below .05 (`hundredths`). With ~ for "in proportion to", the belief is
    a_1(j) ~ E_j,o_1 / S, then a_t+1(j) ~ E_j,o_t+1 sum_i a_t(i) T_ij; the next observation is o with probability
    sum_ij a_t(i) T_ij E_jo (Paper I's HMM task, as its production code formats it). There the target is a_t itself,
    here the drawn outcome; rows and the next observation are ours.

    Matrices drawn like this forget fast. With the defaults, a predictor of the next observation that sees only the last
    one is .004 bits of KL from exact (uniform: .148); of the state it is .141 bits (uniform: .375).

    Attributes:
        encoding: rows: as in `HiddenChains`, one-hot(o_t) is shown. tokens (the papers' format): [TRANS] T row by row,
            [EMIT] E row by row, [SEP], then [OBS] o_t for each observation; the states are tokens after the symbols.
        predict: state: s_t at o_t, the state the sequence was in. observation: o_t+1 at o_t.
        fixed: One pair of matrices for all sequences, and no header.
        horizon: The training loss covers the first `horizon` observations; 0: all.
    """

    encoding: str = "rows"
    predict: str = "state"
    fixed: bool = False
    horizon: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.encoding in ("rows", "tokens"), "encoding rows or tokens")
        self.require(self.predict in ("state", "observation"), "predict state or observation")
        self.require(0 <= self.horizon <= self.steps, f"horizon of 0 to the {self.steps} steps")

    @property
    def memorisable(self) -> str:
        return "the two matrices are the same in every sequence, so they can be memorised" if self.fixed else ""

    @property
    def outcomes(self) -> int:
        return self.states if self.predict == "state" else self.symbols

    @property
    def header(self) -> int:
        if self.fixed:
            return 0
        return self.states if self.encoding == "rows" else self.states * (self.states + self.symbols) + 3

    @property
    def vocabulary(self) -> int:
        if self.encoding == "rows":
            return self.outcomes
        return SYMBOL + self.symbols + (self.states if self.predict == "state" else 0)

    @property
    def features(self) -> int:
        if self.encoding == "tokens":
            return 0
        return self.symbols if self.fixed else 2 * (self.states + self.symbols)

    @property
    def length(self) -> int:
        return self.header + self.steps * (1 if self.encoding == "rows" else 2)

    @property
    def query(self) -> tuple[int, ...]:
        every = range(self.header, self.length)
        return tuple(every if self.encoding == "rows" else every[1::2])

    @property
    def answers(self) -> Categorical:
        first = 0 if self.encoding == "rows" else SYMBOL + (self.symbols if self.predict == "state" else 0)
        return Categorical(tuple(range(first, first + self.outcomes)))

    @property
    def log2_hypotheses(self) -> float:
        return 0.0 if self.fixed else super().log2_hypotheses

    def hypothesis(self, n: int, generator: Generator) -> Tensor:
        """[T E] in hundredths, [n state state+symbol]."""
        if self.fixed:
            return _fixed(self.states, self.symbols, generator.device).expand(n, -1, -1)
        return super().hypothesis(n, generator)

    def draw(self, hypothesis: Tensor, generator: Generator, training: bool = False) -> Sequences:
        # One step more than the inputs show: the last query may concern the next observation.
        lots = integers(100, generator, len(hypothesis), 1, self.steps)
        first = integers(self.states, generator, len(hypothesis), 1, 1)
        states = walk(hypothesis[..., : self.states], lots, first)[:, 0]
        symbols = emit(hypothesis, states, generator)
        target = states[:, :-1] if self.predict == "state" else symbols[:, 1:]
        return Sequences(self._inputs(hypothesis, symbols[:, :-1]), target)

    def _inputs(self, hypothesis: Tensor, symbols: Tensor) -> Tensor:
        if self.encoding == "rows":
            shown = one_hot(symbols, self.symbols).float()
            return shown if self.fixed else self.rows(hypothesis, shown)
        pairs = pad((symbols + SYMBOL)[..., None], (1, 0), value=OBS).flatten(1)
        if self.fixed:
            return pairs
        parts = (hypothesis - LEAST).split([self.states, self.symbols], -1)
        move, emission = (part.flatten(1) for part in parts)
        header = pad(move, (1, 0), value=TRANS), pad(emission, (1, 0), value=EMIT), torch.full_like(move[:, :1], SEP)
        return torch.cat([*header, pairs], 1)

    def _read(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """[T E] in hundredths and the observations, read back from the inputs."""
        s, o = self.states, self.symbols
        shown = inputs[:, self.header :]
        symbols = shown[..., -o:].argmax(-1) if self.encoding == "rows" else shown[:, 1::2] - SYMBOL
        if self.fixed:
            return _fixed(s, o, inputs.device).expand(len(inputs), -1, -1), symbols
        if self.encoding == "rows":
            return self.read_rows(inputs), symbols
        moves, emissions = inputs[:, 1 : 1 + s * s], inputs[:, 2 + s * s : 2 + s * s + s * o]
        return torch.cat([moves.unflatten(1, (s, s)), emissions.unflatten(1, (s, o))], -1) + LEAST, symbols

    def log_belief(self, inputs: Tensor) -> Float[Tensor, "sequence step state"]:
        log_move, _, likelihood = logs(*self._read(inputs))
        return self.filtered(log_move[:, None], likelihood)

    def log_predictive(self, inputs: Tensor) -> Tensor:
        belief = self.log_belief(inputs)
        return belief if self.predict == "state" else self._next(inputs, belief)

    def _next(self, inputs: Tensor, belief: Tensor) -> Tensor:
        """log P(o_t+1) under a belief about s_t."""
        log_move, log_emit, _ = logs(*self._read(inputs))
        ahead = (belief[..., None] + log_move[:, None]).logsumexp(-2)
        return (ahead[..., None] + log_emit[:, None]).logsumexp(-2)

    def counterfactual(self, inputs: Tensor, generator: Generator) -> Tensor | None:
        """Another observation at one step, but not the last one: every symbol can come from every state."""
        if self.steps < 2:
            return None
        hypothesis, symbols = self._read(inputs)
        return self._inputs(hypothesis, with_another_symbol(symbols, self.symbols, generator))

    def trivial(self, inputs: Tensor) -> Mapping[str, Tensor]:
        """memoryless: the belief from only the last observation, ~ E_j,o_t. bag of values: from all so far in any
        order, as if the state never moved, ~ prod_u E_j,o_u. Both predict the next observation from their belief as the
        exact answer does."""
        likelihood = logs(*self._read(inputs))[2]
        beliefs = {"memoryless": likelihood.log_softmax(-1), "bag of values": likelihood.cumsum(1).log_softmax(-1)}
        if self.predict == "state":
            return beliefs
        return {name: self._next(inputs, belief) for name, belief in beliefs.items()}


@functools.cache
def _fixed(states: int, symbols: int, device: torch.device) -> Tensor:
    """The one pair of matrices of `fixed`. Drawn on the CPU: the same on every device."""
    # Seed 6: with three states and symbols, neither the last observation alone nor a constant nearly answers either
    # question. With seed 0 the prediction of the next observation would not depend on the observations.
    return HMM(states, symbols).hypothesis(1, seeded("hmm/fixed", 6)).to(device)
