"""Edge-emitting hidden Markov chains with fixed matrices: the symbol comes with the step from one state to the next."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from llmgeom.sampling import Generator, uniforms, with_another_symbol
from llmgeom.wind_tunnels.worlds.hmm import HMM
from llmgeom.world import Sequences, World

ROUNDING = 1e-6  # a matrix in float32 sums to 1 within 1e-7


@dataclass(frozen=True)
class EdgeHMM(World):
    """Edge-emitting hidden Markov chains: Mess3, RRXOR, a product, or matrices of your own.

    T^x_ij = P(o_t = x, s_t = j | s_t-1 = i), one matrix a symbol, the same in every sequence. The first state comes
    from the stationary distribution pi of sum_x T^x. With ~ for "in proportion to", the belief is a_0 = pi,
    a_t ~ a_t-1 T^(o_t), and the next observation is x with probability sum_ij (a_t)_i T^x_ij.

    - mess3 (Marzen and Crutchfield 2017, with the numbers of Shai et al., arXiv 2405.15943): three states that stay
      with `stay`; the symbol is that of the state arrived at with `emit`. Beliefs form a fractal in a triangle. The
      distribution of the next observation is a linear map of the belief that can be inverted.
    - rrxor (Shai et al.): two random bits, then their exclusive or; a sequence starts at an unknown one of the three.
      Five states and two symbols. A linear map of the distribution of the next observation gives .25 of the belief's
      variance, and no function of it more than .48 (40,000 queries of 10 steps).
    - hmm: three states and symbols, whose moves and emissions are those of the world `hmm:fixed=true`.
    - mess3+rrxor: both side by side, a symbol for each pair of symbols. The belief is the product of both beliefs.

    A subclass in a file of your own overrides `matrices`; `--task FILE:CLASS` reads it.

    Attributes:
        process: mess3, rrxor, hmm, or several with + between.
        stay, emit: Of mess3, see there.
        steps: K observations, each a query for the next one.
        horizon: The training loss covers the first `horizon` observations; 0: all.
    """

    PRIMITIVE: ClassVar = "transport"
    KS: ClassVar = (1, 2, 4, 8, 16)

    process: str = "mess3"
    steps: int = 10
    horizon: int = 0
    stay: float = 0.9
    emit: float = 0.85

    def __post_init__(self) -> None:
        self.require(self.steps >= 1, "steps of 1 or more")
        self.require(0 <= self.horizon <= self.steps, f"horizon of 0 to the {self.steps} steps")
        self.require(0 <= self.stay < 1 and 0 <= self.emit <= 1, "stay of 0 to below 1, and emit of 0 to 1")
        given = self.matrices()
        try:
            moves = torch.as_tensor(given, dtype=torch.float64)
        except (TypeError, ValueError) as error:  # lists of unequal length, or no numbers
            self.require(False, f"matrices [symbol state state] of numbers ({error})")
            raise
        square = moves.dim() == 3 and moves.shape[1] == moves.shape[2]
        self.require(square, f"matrices [symbol state state], not of shape {list(moves.shape)}")
        proper = bool((moves >= 0).all()) and bool(((moves.sum((0, 2)) - 1).abs() < ROUNDING).all())
        self.require(proper, "probabilities: each state's numbers in all matrices sum to 1, none below 0")
        self.first()

    def matrices(self) -> Float[Tensor, "symbol state state"]:
        """T^x_ij = P(x, j | i), as numbers or a tensor. Raises UserError for a process that is not known."""
        product = torch.ones(1, 1, 1, dtype=torch.float64)
        for name in self.process.split("+"):
            self.require(name in PROCESSES, f"a process of {', '.join(PROCESSES)}, or several with + between")
            product = torch.stack([torch.kron(a, b) for a in product for b in PROCESSES[name](self)])
        return product

    def first(self) -> Float[Tensor, " state"]:
        """The distribution of the first state: that which a step leaves as it is. Raises UserError if several do."""
        stationary = _stationary(torch.as_tensor(self.matrices(), dtype=torch.float64))
        self.require(len(stationary) == 1, "one set of states that is never left; there are several")
        return stationary[0]

    def showing(self, k: int) -> EdgeHMM:
        return replace(self, steps=k)

    @property
    def memorisable(self) -> str:
        return "the matrices are the same in every sequence, so they can be memorised"

    @property
    def log2_hypotheses(self) -> float:
        return 0.0

    @property
    def vocabulary(self) -> int:
        return len(_chain(self, torch.device("cpu"))[0])

    @property
    def length(self) -> int:
        return self.steps

    def draw(self, hypothesis: Tensor, generator: Generator, training: bool = False) -> Sequences:
        moves, first = _chain(self, generator.device)
        states = moves.shape[1]
        # From each state, the bounds of its edges (symbol and next state) in the unit interval.
        bounds = moves.transpose(0, 1).flatten(1).cumsum(1)[:, :-1]
        begin, *lots = uniforms(generator, len(hypothesis), self.steps + 2).double().unbind(1)
        at = (begin[:, None] >= first.cumsum(0)[:-1]).sum(-1)
        symbols = []
        for lot in lots:
            edge = (lot[:, None] >= bounds[at]).sum(-1)
            symbols.append(edge // states)
            at = edge % states
        shown = torch.stack(symbols, 1)
        return Sequences(shown[:, :-1], shown[:, 1:])

    def log_belief(self, inputs: Tensor) -> Float[Tensor, "sequence step state"]:
        """log P(s_t | o_1 .. o_t). After a symbol that the chain cannot show it is log pi."""
        moves, first = _chain(self, inputs.device)
        beliefs = [first.expand(len(inputs), -1)]
        for symbol in inputs.unbind(1):
            beliefs.append(_updated(beliefs[-1], moves[symbol], first))
        return torch.stack(beliefs[1:], 1).log()

    def log_predictive(self, inputs: Tensor) -> Tensor:
        return self._next(self.log_belief(inputs).exp())

    def log_first(self) -> Tensor:
        return self._next(self.first())

    def _next(self, belief: Tensor) -> Tensor:
        """log P(o_t+1) under beliefs [... state] about s_t."""
        return (belief @ _chain(self, belief.device)[0].sum(2).T).log()

    def counterfactual(self, inputs: Tensor, generator: Generator) -> Tensor | None:
        """Another symbol at one step, but not the last one; None if some state cannot emit every symbol."""
        moves, _ = _chain(self, inputs.device)
        if self.steps < 2 or len(moves) < 2 or not (moves.sum(2) > 0).all():
            return None
        return with_another_symbol(inputs, len(moves), generator)

    def trivial(self, inputs: Tensor) -> Mapping[str, Tensor]:
        """memoryless: the next observation under the belief from only the last observation, ~ pi T^(o_t)."""
        moves, first = _chain(self, inputs.device)
        return {"memoryless": self._next(_updated(first, moves, first)[inputs])}


def mess3(task: EdgeHMM) -> Float[Tensor, "symbol state state"]:
    """Three states and symbols; see `EdgeHMM`."""
    same = torch.eye(3, dtype=torch.float64)
    # 15 digits: half of 1 - .9 is .05, as in .9 + .05 + .05.
    move, emit = (p * same + round((1 - p) / 2, 15) * (1 - same) for p in (task.stay, task.emit))
    return move * emit.T[:, None]


def rrxor(task: EdgeHMM) -> Float[Tensor, "symbol state state"]:
    """States: before the first bit, after a first bit of 0 or 1, before an exclusive or of 1 or 0; see `EdgeHMM`."""
    start, zero, one, true, false = range(5)
    moves = torch.zeros(2, 5, 5, dtype=torch.float64)
    moves[0, start, zero] = moves[1, start, one] = 0.5
    moves[0, zero, false] = moves[1, zero, true] = moves[0, one, true] = moves[1, one, false] = 0.5
    moves[1, true, start] = moves[0, false, start] = 1.0
    return moves


def hidden(task: EdgeHMM) -> Float[Tensor, "symbol state state"]:
    """Moves and emissions of the world `hmm:fixed=true`, T^x_ij = T_ij E_jx; see `EdgeHMM`."""
    hmm = HMM(fixed=True)
    (both,) = hmm.hypothesis(1, torch.Generator()).double() / 100
    move, emit = both.split([hmm.states, hmm.symbols], 1)
    return move * emit.T[:, None]


PROCESSES = {"mess3": mess3, "rrxor": rrxor, "hmm": hidden}


@functools.lru_cache(maxsize=32)
def _chain(task: EdgeHMM, device: torch.device) -> tuple[Tensor, Tensor]:
    """The matrices and pi on a device. They are copied there once: a CUDA graph cannot record a copy from the host."""
    moves = torch.as_tensor(task.matrices(), dtype=torch.float64)
    moves = moves / moves.sum((0, 2))[:, None]
    return moves.to(device), task.first().to(device)


def _stationary(moves: Tensor) -> Float[Tensor, "distribution state"]:
    """The distributions that a step leaves as they are, one for each set of states that is never left."""
    from scipy.sparse.csgraph import connected_components

    step, distributions = moves.sum(0), []
    count, part = connected_components((step > 0).numpy(), connection="strong")
    for states in (torch.from_numpy(part == number) for number in range(count)):
        if (step[states][:, ~states] > 0).any():
            continue
        within = step[states][:, states]
        equations = torch.cat([within.T - torch.eye(len(within), dtype=torch.float64), torch.ones_like(within[:1])])
        right = torch.zeros(len(equations), 1, dtype=torch.float64)
        right[-1] = 1
        pi = torch.zeros(len(step), dtype=torch.float64)
        pi[states] = torch.linalg.lstsq(equations, right).solution[:, 0].clamp_min(0)
        distributions.append(pi / pi.sum())
    return torch.stack(distributions)


def _updated(belief: Tensor, moves: Tensor, first: Tensor) -> Tensor:
    """Beliefs [... state] after a step by matrices [... state state]; `first` where the step is impossible."""
    ahead = (belief[..., None, :] @ moves)[..., 0, :]
    total = ahead.sum(-1, keepdim=True)
    return torch.where(total > 0, ahead / total.clamp_min(torch.finfo(total.dtype).tiny), first)
