"""Tasks of hidden and visible Markov chains, and independent readers of their sequences."""

from llmgeom.task import seeded
from llmgeom.wind_tunnels.tasks.hmm import HMM
from llmgeom.wind_tunnels.tasks.keyed_hmm import KeyedHMM
from llmgeom.wind_tunnels.tasks.markov import Markov
from tests import brute_force

WAYS = [(e, p, f) for e in ("rows", "tokens") for p in ("state", "observation") for f in (False, True)]
EVERY = [
    *(HMM(3, 4, 6, encoding, predict, fixed) for encoding, predict, fixed in WAYS),
    KeyedHMM(3, 2, 7, chains=2),
    Markov(4, 6),
    Markov(3, 6, fixed=False),
]


def spelt(task):
    return task.title


def read(task, inputs):
    """T, E and the observations of one sequence of an HMM task, by the independent reader."""
    if task.fixed:
        pair = task.hypothesis(1, seeded("any", 0))[0].double() / 100
        rows = inputs.tolist()
        shown = brute_force.observations_of_tokens(rows) if task.encoding == "tokens" else map(brute_force.hot, rows)
        return pair[:, : task.states].tolist(), pair[:, task.states :].tolist(), list(shown)
    if task.encoding == "tokens":
        return brute_force.hmm_of_tokens(inputs.tolist(), task.states, task.symbols)
    move, emit, shown = brute_force.hmm_of_rows(inputs.tolist(), task.states, task.symbols)
    return move, emit, [brute_force.hot(row) for row in shown]


def read_keyed(task, inputs):
    move, emit, shown = brute_force.hmm_of_rows(inputs.tolist(), task.states, task.symbols)
    symbols = [brute_force.hot(row[: task.symbols]) for row in shown]
    return move, emit, symbols, [brute_force.hot(row[task.symbols :]) for row in shown]
