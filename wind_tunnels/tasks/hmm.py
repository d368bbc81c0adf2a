"""Hidden Markov filtering: the matrices stand in front of the observations, and the state must be carried along."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import one_hot, pad

from llmgeom.errors import UserError
from llmgeom.task import Categorical, Sequences, Task, altered, seeded

LEAST = 5  # hundredths, of every probability
TRANS, EMIT, SEP, OBS, SYMBOL = 96, 97, 98, 99, 100  # tokens 0 .. 95 are probabilities .05 .. 1.00


@dataclass(frozen=True)
class HMM(Task):
    """Hidden Markov filtering.

    states    S hidden states, the first one drawn evenly.
    symbols   O symbols.
    steps     K observations; at each one something is asked.
    encoding  rows: S header rows [2 T_s, 2 E_s, one-hot(s), 0] of T's and E's row for state s, then a row
              [0, 0, 0, one-hot(o_t)] for each observation. tokens, the papers' format: [TRANS] T row by row, [EMIT] E
              row by row, [SEP], then [OBS] o_t for each observation; the states are tokens after the symbols.
    predict   state: s_t at o_t; the target is the state the sequence was in. observation: o_t+1 at o_t.
    fixed     one pair of matrices, always the same, and no header.
    horizon   a loss is on the first so many observations only; 0: on all.

    T_ij = P(s_t+1 = j | s_t = i) and E_io = P(o_t = o | s_t = i) are new in every sequence: rows of Dirichlet(1, ...),
    in hundredths and none below .05 (`hundredths`). The belief is a_1(j) ~ E_j,o_1 / S and then
    a_t+1(j) ~ E_j,o_t+1 sum_i a_t(i) T_ij, where ~ is "in proportion to"; the next observation is o with probability
    sum_ij a_t(i) T_ij E_jo (Paper I's HMM task, as its production code formats it. There the target is a_t itself, here
    what was drawn; rows, and the next observation, are ours).

    Matrices drawn so forget fast: of the next observation the last one alone tells nearly all there is (.004 bits of KL
    are left with the defaults, .148 by an even guess). It is the state that has to be carried along (.141 of .375).
    """

    states: int = 3
    symbols: int = 3
    steps: int = 12
    encoding: str = "rows"
    predict: str = "state"
    fixed: bool = False
    horizon: int = 0

    def __post_init__(self) -> None:
        check_sizes(self, self.states, self.symbols, self.steps)
        if self.encoding not in ("rows", "tokens"):
            raise UserError(f"{self.title}: encoding {self.encoding!r}; expected rows or tokens")
        if self.predict not in ("state", "observation"):
            raise UserError(f"{self.title}: predict {self.predict!r}; expected state or observation")
        if not 0 <= self.horizon <= self.steps:
            raise UserError(f"{self.title}: horizon {self.horizon}; expected 0 to the {self.steps} steps")

    @property
    def memorisable(self) -> str:
        return "the two matrices are the same in every sequence, and are learnt by heart" if self.fixed else ""

    @property
    def outcomes(self) -> int:
        return self.states if self.predict == "state" else self.symbols

    @property
    def header(self) -> int:
        """Positions in front of the observations."""
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
        if self.encoding == "rows":
            return tuple(range(self.header, self.length))
        return tuple(range(self.header + 1, self.length, 2))

    @property
    def answers(self) -> Categorical:
        if self.encoding == "rows":
            return Categorical(tuple(range(self.outcomes)))
        first = SYMBOL + (self.symbols if self.predict == "state" else 0)
        return Categorical(tuple(range(first, first + self.outcomes)))

    @property
    def trained_queries(self) -> int:
        return self.horizon or self.steps

    @property
    def log2_hypotheses(self) -> float:
        return 0.0 if self.fixed else log2_matrices(self.states, self.symbols)

    def hypothesis(self, n: int, generator: torch.Generator) -> Tensor:
        """[T E] in hundredths, [n state state+symbol]."""
        if self.fixed:
            return _fixed(self.states, self.symbols, generator.device).expand(n, -1, -1)
        return matrices(n, self.states, self.symbols, generator)

    def draw(self, hypothesis: Tensor, generator: torch.Generator, training: bool = False) -> Sequences:
        # One step more than is shown: at the last one the next may be asked.
        lots = torch.randint(100, (len(hypothesis), 1, self.steps), generator=generator, device=generator.device)
        states = walk(hypothesis[..., : self.states], lots, generator)[:, 0]
        symbols = emit(hypothesis, states, generator)
        target = states[:, :-1] if self.predict == "state" else symbols[:, 1:]
        return Sequences(self._inputs(hypothesis, symbols[:, :-1]), target)

    def _inputs(self, hypothesis: Tensor, symbols: Tensor) -> Tensor:
        if self.encoding == "rows":
            shown = one_hot(symbols, self.symbols).float()
            if self.fixed:
                return shown
            blank = self.features - self.symbols
            return torch.cat([header_rows(hypothesis, self.features), pad(shown, (blank, 0))], 1)
        pairs = pad((symbols + SYMBOL)[..., None], (1, 0), value=OBS).flatten(1)
        if self.fixed:
            return pairs
        parts = (hypothesis - LEAST).split([self.states, self.symbols], -1)
        move, emission = (part.flatten(1) for part in parts)
        header = pad(move, (1, 0), value=TRANS), pad(emission, (1, 0), value=EMIT), torch.full_like(move[:, :1], SEP)
        return torch.cat([*header, pairs], 1)

    def _read(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """[T E] in hundredths and the observations, back from the inputs."""
        s, o = self.states, self.symbols
        shown = inputs[:, self.header :]
        symbols = shown[..., -o:].argmax(-1) if self.encoding == "rows" else shown[:, 1::2] - SYMBOL
        if self.fixed:
            return _fixed(s, o, inputs.device).expand(len(inputs), -1, -1), symbols
        if self.encoding == "rows":
            return read_rows(inputs, s, o), symbols
        moves, emissions = inputs[:, 1 : 1 + s * s], inputs[:, 2 + s * s : 2 + s * s + s * o]
        return torch.cat([moves.unflatten(1, (s, s)), emissions.unflatten(1, (s, o))], -1) + LEAST, symbols

    def log_belief(self, inputs: Tensor) -> Float[Tensor, "sequence step state"]:
        log_move, _, seen = logs(*self._read(inputs))
        return forward_filter(log_even(self.states, seen), log_move[:, None], seen)

    def log_predictive(self, inputs: Tensor) -> Tensor:
        belief = self.log_belief(inputs)
        return belief if self.predict == "state" else self._next(inputs, belief)

    def _next(self, inputs: Tensor, belief: Tensor) -> Tensor:
        """What a belief about s_t says of o_t+1."""
        log_move, log_emit, _ = logs(*self._read(inputs))
        ahead = (belief[..., None] + log_move[:, None]).logsumexp(-2)
        return (ahead[..., None] + log_emit[:, None]).logsumexp(-2)

    def counterfactual(self, inputs: Tensor, generator: torch.Generator) -> Tensor | None:
        """Another observation at one step, the last excepted: every symbol can come from every state."""
        if self.steps < 2:
            return None
        hypothesis, symbols = self._read(inputs)
        other = torch.cat([altered(symbols[:, :-1], self.symbols, generator), symbols[:, -1:]], 1)
        return self._inputs(hypothesis, other)

    def trivial(self, inputs: Tensor) -> Mapping[str, Tensor]:
        """memoryless: the belief from the last observation alone, ~ E_j,o_t. bag of values: from all so far, whatever
        their order, as if the state never moved, ~ prod_u E_j,o_u. The next observation is predicted from either as
        from the exact belief."""
        seen = logs(*self._read(inputs))[2]
        beliefs = {"memoryless": seen.log_softmax(-1), "bag of values": seen.cumsum(1).log_softmax(-1)}
        if self.predict == "state":
            return beliefs
        return {name: self._next(inputs, belief) for name, belief in beliefs.items()}


# ---- what hidden chains with their matrices in front share -----------------------------------------------------------


def check_sizes(task: Task, states: int, symbols: int, steps: int) -> None:
    """Raises UserError for matrices that cannot be drawn and sequences of nothing."""
    if not (2 <= states <= 10 and 2 <= symbols <= 10):
        raise UserError(f"{task.title}: expected 2 to 10 states and symbols; each has at least .05 of a row")
    if steps < 1:
        raise UserError(f"{task.title}: steps {steps}; expected at least 1")


def dirichlet(shape: tuple[int, ...], generator: torch.Generator) -> Float[Tensor, "..."]:
    """Rows of Dirichlet(1, ..., 1), the shares of exponential variables."""
    weight = torch.empty(shape, device=generator.device).exponential_(generator=generator)
    return weight / weight.sum(-1, keepdim=True)


def matrices(n: int, states: int, symbols: int, generator: torch.Generator) -> Int[Tensor, "n state column"]:
    """n pairs of matrices [T E] in hundredths."""
    return torch.cat([hundredths(dirichlet((n, states, columns), generator)) for columns in (states, symbols)], -1)


def hundredths(share: Float[Tensor, "*row column"]) -> Int[Tensor, "*row column"]:
    """Probabilities in whole hundredths of at least 5: clamped to .05, renormalised, rounded, again at least 5; what is
    then missing to 100 is added one by one from the smallest entry up, what is too much is taken one by one from the
    largest down, in turns, never below 5 (Paper I's production code)."""
    columns, share = share.shape[-1], share.clamp_min(LEAST / 100)
    rounded = (share / share.sum(-1, keepdim=True) * 100).round().long().clamp_min(LEAST)
    entries, place = rounded.sort(dim=-1, stable=True)
    excess = entries.sum(-1, keepdim=True) - 100
    # Only rounding makes a row too small, by less than half of an entry each: one turn is enough.
    entries = entries + (torch.arange(columns, device=share.device) < -excess)
    # Clamping makes it too large: where j of c entries are raised, by j^2 / (4 + j / 5) + (c - j) / 2 at most, and each
    # turn takes one or more. A fixed number of turns, so that nothing waits for the device.
    for _ in range(columns**2 // 4):
        spare = entries > LEAST
        taken = spare & (spare.flip(-1).cumsum(-1).flip(-1) <= excess)
        entries, excess = entries - taken.long(), excess - taken.sum(-1, keepdim=True)
    return torch.empty_like(entries).scatter_(-1, place, entries)


def log2_matrices(states: int, symbols: int) -> float:
    """log2 of the number of matrix pairs: a row of c entries of 5 or more with sum 100 can be had in
    C(100 - 5c + c - 1, c - 1) ways."""
    return states * sum(math.log2(math.comb(99 - (LEAST - 1) * c, c - 1)) for c in (states, symbols))


@functools.cache
def _fixed(states: int, symbols: int, device: torch.device) -> Tensor:
    """The one pair of matrices of `fixed`. Sequences on the CPU, so that it is the same on every device."""
    # A seed with which, for three states and symbols, both questions are far from what the last observation alone tells
    # and from a constant; with seed 0 the next observation would be the same whatever was seen.
    return matrices(1, states, symbols, seeded("hmm/fixed", 6)).to(device)


def walk(
    move: Shaped[Tensor, "n state state"], lots: Shaped[Tensor, "n chain step"], generator: torch.Generator
) -> Int[Tensor, "n chain after"]:
    """States of independent chains with the same transition matrix, the first drawn evenly, then one for each lot: a
    number evenly spread over 0 to what the matrix's rows sum to."""
    n, states, _ = move.shape
    # Where each state would lead at each step; then only the state itself has to be followed in turn.
    leads = (lots[..., None, None] >= move[..., :-1].cumsum(-1)[:, None, None]).sum(-1)
    found = [torch.randint(states, (n, lots.shape[1], 1), generator=generator, device=generator.device)]
    for lead in leads.unbind(2):
        found.append(lead.gather(-1, found[-1]))
    return torch.cat(found, -1)


def emit(
    hypothesis: Int[Tensor, "n state column"], states: Int[Tensor, "n step"], generator: torch.Generator
) -> Int[Tensor, "n step"]:
    """A symbol from each state."""
    bounds = hypothesis[..., hypothesis.shape[1] : -1].cumsum(-1)
    lots = torch.randint(100, (*states.shape, 1), generator=generator, device=generator.device)
    return (lots >= bounds.gather(1, states[..., None].expand(-1, -1, bounds.shape[-1]))).sum(-1)


def header_rows(hypothesis: Int[Tensor, "n state column"], features: int) -> Float[Tensor, "n state feature"]:
    """[2 T_s, 2 E_s, one-hot(s), 0], twice the probabilities so that their size is that of the ones."""
    n, states, columns = hypothesis.shape
    which = torch.eye(states, device=hypothesis.device).expand(n, -1, -1)
    return pad(torch.cat([hypothesis / 50, which], -1), (0, features - columns - states))


def read_rows(inputs: Float[Tensor, "n seq feature"], states: int, symbols: int) -> Int[Tensor, "n state column"]:
    """[T E] in hundredths, back from the header rows."""
    return (inputs[:, :states, : states + symbols].double() * 50).round().long()


def logs(hypothesis: Int[Tensor, "n state column"], symbols: Int[Tensor, "n step"]) -> tuple[Tensor, Tensor, Tensor]:
    """log T, log E and the log-likelihood of each state at each step [n step state], float64."""
    states = hypothesis.shape[1]
    log_move, log_emit = (hypothesis.double() / 100).log().split([states, hypothesis.shape[2] - states], -1)
    seen = log_emit.mT.gather(1, symbols[..., None].expand(-1, -1, states))
    return log_move, log_emit, seen


def log_even(states: int, like: Tensor) -> Float[Tensor, " state"]:
    return torch.full((states,), -math.log(states), dtype=like.dtype, device=like.device)


def forward_filter(
    log_first: Float[Tensor, "#*at state"],
    log_move: Float[Tensor, "#*at #move state state"],
    log_seen: Float[Tensor, "*at step state"],
) -> Float[Tensor, "*at step state"]:
    """log P(s_t | o_1 .. o_t) in nats for every t, s_t the hidden state of a Markov chain: the forward algorithm.

    log_first is log P(s_1); log_move[t, i, j] is log P(s_t+1 = j | s_t = i), one matrix for all t or one for each;
    log_seen[t, i] is log P(o_t | s_t = i). With ~ for "in proportion to", a_1(i) ~ P(s_1 = i) P(o_1 | s_1 = i) and
    a_t+1(j) ~ P(o_t+1 | s_t+1 = j) sum_i a_t(i) P(s_t+1 = j | s_t = i) (Paper I's filtering posterior).
    Probabilities of 0 are allowed as long as what was seen is possible.
    """
    log_move = log_move.expand(*log_move.shape[:-3], log_seen.shape[-2], *log_move.shape[-2:])
    ahead, found = log_first, []
    for seen, move in zip(log_seen.unbind(-2), log_move.unbind(-3), strict=True):
        belief = (ahead + seen).log_softmax(-1)
        ahead = (belief[..., :, None] + move).logsumexp(-2)
        found.append(belief)
    return torch.stack(found, -2)
