"""Several hidden chains in one sequence; a key says at each step which chain emits: transport with binding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import one_hot, pad

from llmgeom.sampling import Generator, integers, same_earlier, with_another_symbol
from llmgeom.wind_tunnels.chains import HiddenChains, emit, logs, walk
from llmgeom.world import Sequences


@dataclass(frozen=True)
class KeyedHMM(HiddenChains):
    """Several hidden chains, told apart by keys.

    Rows as in `HiddenChains`; each step shows one-hot(o_t) and one-hot(k_t). Chain k_t emits o_t from its state, then
    moves; the others stay. The query at a step is the state that emitted, which is never shown, so one row may contain
    key and observation.

    With a_c the belief about chain c's next emitting state, at first uniform, the answer is p(j) ~ a_k(j) E_j,o with
    k = k_t and o = o_t. Then a_k(j) becomes sum_i p(i) T_ij, and every other a_c stays (derived here: given the keys
    the chains are independent, each a hidden Markov chain in its own time).

    Attributes:
        steps: K observations, of all chains together.
        chains: C chains with the same matrices; the key of a step is drawn uniformly.
    """

    chains: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.chains >= 1, "chains of 1 or more")

    @property
    def vocabulary(self) -> int:
        return self.states

    @property
    def features(self) -> int:
        return 2 * (self.states + self.symbols) + self.chains

    def draw(self, hypothesis: Tensor, generator: Generator, training: bool = False) -> Sequences:
        n = len(hypothesis)
        keys = integers(self.chains, generator, n, self.steps)
        moves_before = same_earlier(keys).sum(-1)  # of the chain that emits, in its own time
        lots = integers(100, generator, n, self.chains, self.steps - 1)
        paths = walk(hypothesis[..., : self.states], lots, integers(self.states, generator, n, self.chains, 1))
        states = paths.flatten(1).gather(1, keys * self.steps + moves_before)
        symbols = emit(hypothesis, states, generator)
        shown = torch.cat([one_hot(symbols, self.symbols), one_hot(keys, self.chains)], -1).float()
        return Sequences(self.rows(hypothesis, shown), states)

    def _read(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T E] in hundredths, the observations and the keys, read back from the inputs."""
        shown = inputs[:, self.states :, -self.symbols - self.chains :]
        symbols, keys = (part.argmax(-1) for part in shown.split([self.symbols, self.chains], -1))
        return self.read_rows(inputs), symbols, keys

    def log_belief(self, inputs: Tensor) -> Float[Tensor, "sequence step state"]:
        """The belief about the chain that emits, at each step."""
        hypothesis, symbols, keys = self._read(inputs)
        log_move, _, likelihood = logs(hypothesis, symbols)
        # [sequence chain step]: each chain is filtered through all steps. At the steps of other chains it emits nothing
        # and stays.
        turn = one_hot(keys, self.chains).mT.bool()
        stay = torch.eye(self.states, dtype=likelihood.dtype, device=likelihood.device).log()
        moves = torch.where(turn[..., None, None], log_move[:, None, None], stay)
        beliefs = self.filtered(moves, likelihood[:, None] * turn[..., None])
        return beliefs.gather(1, keys[:, None, :, None].expand(-1, -1, -1, self.states))[:, 0]

    def log_predictive(self, inputs: Tensor) -> Tensor:
        return self.log_belief(inputs)

    def bearing(self, inputs: Tensor) -> Tensor:
        """The header, and the steps of the same chain so far, the query included.

        In some sequences these are too many, if the matrices make an observation uninformative (two equal rows of T).
        """
        own = torch.eye(self.steps, dtype=torch.bool, device=inputs.device)
        return pad(same_earlier(self._read(inputs)[2]) | own, (self.states, 0), value=True)

    def counterfactual(self, inputs: Tensor, generator: Generator) -> Tensor | None:
        """Another observation of the same chain at one step, but not the last one."""
        if self.steps < 2:
            return None
        symbols = with_another_symbol(self._read(inputs)[1], self.symbols, generator)
        other = inputs.clone()
        other[:, self.states :, -self.symbols - self.chains : -self.chains] = one_hot(symbols, self.symbols).float()
        return other

    def trivial(self, inputs: Tensor) -> Mapping[str, Tensor]:
        """memoryless: the belief from only the last observation. one chain: ignores the keys, as if one chain had
        emitted everything (transport without binding)."""
        log_move, _, likelihood = logs(*self._read(inputs)[:2])
        return {"memoryless": likelihood.log_softmax(-1), "one chain": self.filtered(log_move[:, None], likelihood)}
