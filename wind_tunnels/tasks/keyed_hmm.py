"""Several hidden chains in one sequence, and a key that says at each step whose turn it is: transport with binding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import one_hot, pad

from llmgeom.errors import UserError
from llmgeom.task import Categorical, Sequences, Task, altered
from llmgeom.wind_tunnels.tasks.hmm import (
    check_sizes,
    emit,
    forward_filter,
    header_rows,
    log2_matrices,
    log_even,
    logs,
    matrices,
    read_rows,
    walk,
)


@dataclass(frozen=True)
class KeyedHMM(Task):
    """Several hidden chains, told apart by keys.

    states    S hidden states of each chain, each first one drawn evenly.
    symbols   O symbols.
    steps     K observations, of all chains together.
    chains    C chains with the same matrices; the key of a step is drawn evenly.

    Rows as in `hmm`: S header rows [2 T_s, 2 E_s, one-hot(s), 0, 0], then a row [0, 0, 0, one-hot(o_t), one-hot(k_t)]
    for each step: chain k_t emits o_t from its state, and then it moves and the others do not. There the state that
    emitted is asked; it is never shown, so that one row may hold key and observation.

    With a_c the belief about chain c's next emitting state, evenly spread at first, the answer is
    p(j) ~ a_k(j) E_j,o with k = k_t and o = o_t; then a_k(j) becomes sum_i p(i) T_ij, and every other a_c stays
    (derived here: given the keys the chains are independent, each a hidden Markov chain in its own time).
    """

    states: int = 3
    symbols: int = 3
    steps: int = 12
    chains: int = 2

    def __post_init__(self) -> None:
        check_sizes(self, self.states, self.symbols, self.steps)
        if self.chains < 1:
            raise UserError(f"{self.title}: chains {self.chains}; expected at least 1")

    @property
    def vocabulary(self) -> int:
        return self.states

    @property
    def features(self) -> int:
        return 2 * (self.states + self.symbols) + self.chains

    @property
    def length(self) -> int:
        return self.states + self.steps

    @property
    def query(self) -> tuple[int, ...]:
        return tuple(range(self.states, self.length))

    @property
    def answers(self) -> Categorical:
        return Categorical(tuple(range(self.states)))

    @property
    def log2_hypotheses(self) -> float:
        return log2_matrices(self.states, self.symbols)

    def hypothesis(self, n: int, generator: torch.Generator) -> Tensor:
        """[T E] in hundredths, [n state state+symbol]."""
        return matrices(n, self.states, self.symbols, generator)

    def draw(self, hypothesis: Tensor, generator: torch.Generator, training: bool = False) -> Sequences:
        n, device = len(hypothesis), generator.device
        keys = torch.randint(self.chains, (n, self.steps), generator=generator, device=device)
        # How often the chain of a step has moved before it: its own time.
        moved = (keys[:, :, None] == keys[:, None, :]).tril(-1).sum(-1)
        lots = torch.randint(100, (n, self.chains, self.steps - 1), generator=generator, device=device)
        paths = walk(hypothesis[..., : self.states], lots, generator)
        states = paths.flatten(1).gather(1, keys * self.steps + moved)
        symbols = emit(hypothesis, states, generator)
        shown = torch.cat([one_hot(symbols, self.symbols), one_hot(keys, self.chains)], -1).float()
        blank = self.features - shown.shape[-1]
        return Sequences(torch.cat([header_rows(hypothesis, self.features), pad(shown, (blank, 0))], 1), states)

    def _read(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T E] in hundredths, the observations and the keys, back from the inputs."""
        shown = inputs[:, self.states :, -self.symbols - self.chains :]
        symbols, keys = (part.argmax(-1) for part in shown.split([self.symbols, self.chains], -1))
        return read_rows(inputs, self.states, self.symbols), symbols, keys

    def log_belief(self, inputs: Tensor) -> Float[Tensor, "sequence step state"]:
        """Of the chain that emits, at each step."""
        hypothesis, symbols, keys = self._read(inputs)
        log_move, _, seen = logs(hypothesis, symbols)
        # [sequence chain step]: each chain is filtered through all steps; where it is not its turn it shows nothing
        # and stays where it is.
        turn = one_hot(keys, self.chains).mT.bool()
        stay = torch.eye(self.states, dtype=seen.dtype, device=seen.device).log()
        moves = torch.where(turn[..., None, None], log_move[:, None, None], stay)
        beliefs = forward_filter(log_even(self.states, seen), moves, seen[:, None] * turn[..., None])
        return beliefs.gather(1, keys[:, None, :, None].expand(-1, -1, -1, self.states))[:, 0]

    def log_predictive(self, inputs: Tensor) -> Tensor:
        return self.log_belief(inputs)

    def bearing(self, inputs: Tensor) -> Tensor:
        """The header, and the steps of the same chain so far, the query among them. Of single sequences it says too
        much where the matrices are such that an observation tells nothing (two equal rows of T, say)."""
        keys = self._read(inputs)[2]
        return pad((keys[:, :, None] == keys[:, None, :]).tril(), (self.states, 0), value=True)

    def counterfactual(self, inputs: Tensor, generator: torch.Generator) -> Tensor | None:
        """Another observation at one step, the last excepted, of the same chain."""
        if self.steps < 2:
            return None
        symbols = altered(self._read(inputs)[1][:, :-1], self.symbols, generator)
        other = inputs.clone()
        other[:, self.states : -1, -self.symbols - self.chains : -self.chains] = one_hot(symbols, self.symbols).float()
        return other

    def trivial(self, inputs: Tensor) -> Mapping[str, Tensor]:
        """memoryless: the belief from the last observation alone. one chain: keys are ignored, as if one chain had
        emitted everything; transport without binding."""
        log_move, _, seen = logs(*self._read(inputs)[:2])
        one = forward_filter(log_even(self.states, seen), log_move[:, None], seen)
        return {"memoryless": seen.log_softmax(-1), "one chain": one}
