"""Hidden Markov chains whose matrices precede the observations: drawing, encoding and decoding them."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from llmgeom.sampling import Generator, dirichlet, integers
from llmgeom.world import World

LEAST = 5  # hundredths: the least probability in a matrix


def check_sizes(task: World, states: int, symbols: int, steps: int) -> None:
    """Raises UserError for matrices that cannot be drawn and for sequences without steps."""
    task.require(2 <= states <= 10 and 2 <= symbols <= 10, "2 to 10 states and symbols; each has at least .05 of a row")
    task.require(steps >= 1, "steps of 1 or more")


def matrices(n: int, states: int, symbols: int, generator: Generator) -> Int[Tensor, "n state column"]:
    """n pairs of transition and emission matrices [T E], rows of Dirichlet(1, ..., 1) in hundredths."""
    return torch.cat([hundredths(dirichlet((n, states, columns), generator)) for columns in (states, symbols)], -1)


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


def log2_matrices(states: int, symbols: int) -> float:
    """log2 of the number of matrix pairs: a row of c entries of at least 5 that sum to 100 is one of
    C(100 - 5c + c - 1, c - 1)."""
    return states * sum(math.log2(math.comb(99 - (LEAST - 1) * c, c - 1)) for c in (states, symbols))


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


def header_rows(hypothesis: Int[Tensor, "n state column"], features: int) -> Float[Tensor, "n state feature"]:
    """[2 T_s, 2 E_s, one-hot(s), 0]; probabilities are doubled to match the size of the ones."""
    n, states, columns = hypothesis.shape
    which = torch.eye(states, device=hypothesis.device).expand(n, -1, -1)
    return pad(torch.cat([hypothesis / 50, which], -1), (0, features - columns - states))


def read_rows(inputs: Float[Tensor, "n seq feature"], states: int, symbols: int) -> Int[Tensor, "n state column"]:
    """[T E] in hundredths, read back from the header rows."""
    return (inputs[:, :states, : states + symbols].double() * 50).round().long()


def logs(hypothesis: Int[Tensor, "n state column"], symbols: Int[Tensor, "n step"]) -> tuple[Tensor, Tensor, Tensor]:
    """log T, log E, and the log-likelihood of each state at each step [n step state], all float64."""
    states = hypothesis.shape[1]
    log_move, log_emit = (hypothesis.double() / 100).log().split([states, hypothesis.shape[2] - states], -1)
    likelihood = log_emit.mT.gather(1, symbols[..., None].expand(-1, -1, states))
    return log_move, log_emit, likelihood


def log_even(states: int, like: Tensor) -> Float[Tensor, " state"]:
    """The uniform distribution over states, in nats."""
    return torch.full((states,), -math.log(states), dtype=like.dtype, device=like.device)
