"""Hidden Markov chains whose matrices precede the observations: what hmm and keyed-hmm have in common."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from llmgeom.answers import forward_filter
from llmgeom.sampling import Generator, dirichlet, integers
from llmgeom.world import World

LEAST = 5  # hundredths: the least probability in a matrix


@dataclass(frozen=True)
class HiddenChains(World):
    """Chains with matrices T_ij = P(next state j | state i) and E_io = P(symbol o | state i), new in every sequence.

    As rows of numbers a sequence is S header rows [2 T_s, 2 E_s, one-hot(s), 0], then a row [0, 0, 0, what is shown]
    for each step; probabilities are doubled to match the size of the ones.

    Attributes:
        states: S hidden states of a chain, the first one drawn uniformly.
        symbols: O symbols.
        steps: K observations, each a query.
    """

    states: int = 3
    symbols: int = 3
    steps: int = 12

    def __post_init__(self) -> None:
        self.require(
            2 <= self.states <= 10 and 2 <= self.symbols <= 10,
            "2 to 10 states and symbols; each has at least .05 of a row",
        )
        self.require(self.steps >= 1, "steps of 1 or more")

    @property
    def header(self) -> int:
        return self.states

    @property
    def length(self) -> int:
        return self.header + self.steps

    @property
    def log2_hypotheses(self) -> float:
        """A row of c entries of at least 5 that sum to 100 is one of C(100 - 5c + c - 1, c - 1)."""
        rows = (math.comb(99 - (LEAST - 1) * c, c - 1) for c in (self.states, self.symbols))
        return self.states * sum(map(math.log2, rows))

    def hypothesis(self, n: int, generator: Generator) -> Int[Tensor, "n state column"]:
        """n pairs of transition and emission matrices [T E], rows of Dirichlet(1, ..., 1) in hundredths."""
        parts = ((n, self.states, columns) for columns in (self.states, self.symbols))
        return torch.cat([hundredths(dirichlet(part, generator)) for part in parts], -1)

    def rows(
        self, hypothesis: Int[Tensor, "n state column"], shown: Float[Tensor, "n step shown"]
    ) -> Float[Tensor, "n seq feature"]:
        """The header rows, and a row for each step."""
        which = torch.eye(self.states, device=hypothesis.device).expand(len(hypothesis), -1, -1)
        header = torch.cat([hypothesis / 50, which], -1)
        return torch.cat([pad(header, (0, shown.shape[-1])), pad(shown, (header.shape[-1], 0))], 1)

    def read_rows(self, inputs: Float[Tensor, "n seq feature"]) -> Int[Tensor, "n state column"]:
        """[T E] in hundredths, read back from the header rows."""
        return (inputs[:, : self.states, : self.states + self.symbols].double() * 50).round().long()

    def filtered(
        self, log_move: Float[Tensor, "#*at #move state state"], likelihood: Float[Tensor, "*at step state"]
    ) -> Float[Tensor, "*at step state"]:
        """log P(state | observations so far) of chains whose first state is uniform, as `answers.forward_filter`."""
        even = torch.full_like(likelihood.flatten(0, -2)[0], -math.log(self.states))
        return forward_filter(even, log_move, likelihood)


def hundredths(share: Float[Tensor, "*row column"]) -> Int[Tensor, "*row column"]:
    """Probabilities in whole hundredths of at least 5, as in Paper I's production code.

    They are clamped to .05, renormalised, rounded, and again at least 5. A deficit to 100 is added one by one from the
    smallest entry up; an excess is taken one by one from the largest entry down, in turns, never below 5.
    """
    columns, share = share.shape[-1], share.clamp_min(LEAST / 100)
    rounded = (share / share.sum(-1, keepdim=True) * 100).round().long().clamp_min(LEAST)
    entries, place = rounded.sort(dim=-1, stable=True)
    excess = entries.sum(-1, keepdim=True) - 100
    # Only rounding makes a row too small, by less than half of an entry each: one turn is enough.
    entries = entries + (torch.arange(columns, device=share.device) < -excess)
    # Clamping makes a row too large: if j of c entries are raised, by j^2 / (4 + j / 5) + (c - j) / 2 at most, and each
    # turn takes one or more. The number of turns is fixed, so that nothing waits for the device.
    for _ in range(columns**2 // 4):
        spare = entries > LEAST
        taken = spare & (spare.flip(-1).cumsum(-1).flip(-1) <= excess)
        entries, excess = entries - taken.long(), excess - taken.sum(-1, keepdim=True)
    return torch.empty_like(entries).scatter_(-1, place, entries)


def walk(
    move: Shaped[Tensor, "n state state"], lots: Shaped[Tensor, "n chain step"], first: Int[Tensor, "n chain 1"]
) -> Int[Tensor, "n chain after"]:
    """States of independent chains with one transition matrix: the first, then one for each lot.

    Lots are uniform between 0 and the sum of the matrix's rows.
    """
    # The successor of every state at each step; then the loop only has to follow the current state.
    leads = (lots[..., None, None] >= move[..., :-1].cumsum(-1)[:, None, None]).sum(-1)
    states = [first]
    for lead in leads.unbind(2):
        states.append(lead.gather(-1, states[-1]))
    return torch.cat(states, -1)


def emit(
    hypothesis: Int[Tensor, "n state column"], states: Int[Tensor, "n step"], generator: Generator
) -> Int[Tensor, "n step"]:
    """A symbol from each state."""
    bounds = hypothesis[..., hypothesis.shape[1] : -1].cumsum(-1)
    lots = integers(100, generator, *states.shape, 1)
    return (lots >= bounds.gather(1, states[..., None].expand(-1, -1, bounds.shape[-1]))).sum(-1)


def logs(hypothesis: Int[Tensor, "n state column"], symbols: Int[Tensor, "n step"]) -> tuple[Tensor, Tensor, Tensor]:
    """log T, log E, and the log-likelihood of each state at each step [n step state], all float64."""
    states = hypothesis.shape[1]
    log_move, log_emit = (hypothesis.double() / 100).log().split([states, hypothesis.shape[2] - states], -1)
    likelihood = log_emit.mT.gather(1, symbols[..., None].expand(-1, -1, states))
    return log_move, log_emit, likelihood
