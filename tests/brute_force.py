"""Answers by writing every possibility out, in plain Python: nothing here is shared with what it judges."""

from fractions import Fraction
from itertools import pairwise, product
from math import factorial, prod

Matrix = list[list[float]]


def normal(weights: list[float]) -> list[float]:
    return [w / sum(weights) for w in weights]


def path_weight(path, symbols, move: Matrix, emit: Matrix) -> float:
    """P(states, symbols) of one chain that begins evenly."""
    steps = prod(move[a][b] for a, b in pairwise(path))
    return steps * prod(emit[state][symbol] for state, symbol in zip(path, symbols, strict=False)) / len(move)


def filtered(symbols: list[int], move: Matrix, emit: Matrix) -> list[list[float]]:
    """P(s_t | o_1 .. o_t) at each t, by all S^t paths."""
    found = []
    for t in range(1, len(symbols) + 1):
        weights = [0.0] * len(move)
        for path in product(range(len(move)), repeat=t):
            weights[path[-1]] += path_weight(path, symbols, move, emit)
        found.append(normal(weights))
    return found


def next_symbol(symbols: list[int], move: Matrix, emit: Matrix) -> list[list[float]]:
    """P(o_t+1 | o_1 .. o_t) at each t, by all paths of t + 1 states and each symbol that might follow."""
    found = []
    for t in range(1, len(symbols) + 1):
        weights = [
            sum(
                path_weight(path, [*symbols[:t], following], move, emit)
                for path in product(range(len(move)), repeat=t + 1)
            )
            for following in range(len(emit[0]))
        ]
        found.append(normal(weights))
    return found


def keyed(symbols: list[int], keys: list[int], chains: int, move: Matrix, emit: Matrix) -> list[list[float]]:
    """P(state that emitted o_t | symbols and keys up to t), by all paths of every chain together."""
    found = []
    for t in range(1, len(symbols) + 1):
        own = [[symbol for symbol, key in zip(symbols[:t], keys, strict=False) if key == c] for c in range(chains)]
        weights = [0.0] * len(move)
        for paths in product(*(product(range(len(move)), repeat=len(seen)) for seen in own)):
            weight = prod(path_weight(path, seen, move, emit) for path, seen in zip(paths, own, strict=True))
            weights[paths[keys[t - 1]][-1]] += weight
        found.append(normal(weights))
    return found


def hmm_of_tokens(ids: list[int], states: int, symbols: int) -> tuple[Matrix, Matrix, list[int]]:
    """T, E and the observations of a sequence in the papers' format, read from left to right."""
    rest = iter(ids)

    def matrix(mark: int, columns: int) -> Matrix:
        assert next(rest) == mark
        return [[(next(rest) + 5) / 100 for _ in range(columns)] for _ in range(states)]

    move, emit = matrix(96, states), matrix(97, symbols)
    assert next(rest) == 98
    return move, emit, observations_of_tokens(list(rest))


def observations_of_tokens(ids: list[int]) -> list[int]:
    assert set(ids[0::2]) == {99}
    return [token - 100 for token in ids[1::2]]


def hmm_of_rows(rows: Matrix, states: int, symbols: int) -> tuple[Matrix, Matrix, Matrix]:
    """T, E and what stands below and beside them. Everything that must be zero or a mark is looked at."""
    header, below = rows[:states], rows[states:]
    for state, row in enumerate(header):
        assert row[states + symbols :] == [float(i == state) for i in range(len(row) - states - symbols)]
    for row in below:
        assert row[: 2 * states + symbols] == [0.0] * (2 * states + symbols)
    halves = [[round(50 * value) / 100 for value in row] for row in header]
    move, emit = [row[:states] for row in halves], [row[states : states + symbols] for row in halves]
    return move, emit, [row[2 * states + symbols :] for row in below]


def hot(row: list[float]) -> int:
    """Which of a row is 1, the others being 0."""
    assert sorted(row) == [0.0] * (len(row) - 1) + [1.0]
    return row.index(1.0)


def hundredths(share: list[float]) -> list[int]:
    """A row of probabilities in whole hundredths of at least 5, mended one unit at a time."""
    raised = normal([max(p, 0.05) for p in share])
    clusters = [max(round(100 * p), 5) for p in raised]
    rising = sorted(range(len(clusters)), key=lambda i: clusters[i])
    turn = 0
    while sum(clusters) < 100:
        clusters[rising[turn % len(clusters)]] += 1
        turn += 1
    turn = 0
    while sum(clusters) > 100:
        largest = rising[::-1][turn % len(clusters)]
        if clusters[largest] > 5:
            clusters[largest] -= 1
        turn += 1
    return clusters


def chance_of_chain(symbols: list[int], many: int) -> Fraction:
    """P(y_1 .. y_t) of a chain whose rows are even over the simplex: for each row the integral of prod_j p_j^n_j is
    (S - 1)! prod_j n_j! / (n + S - 1)!."""
    total = Fraction(1, many)
    for row in range(many):
        followers = [b for a, b in pairwise(symbols) if a == row]
        ways = prod(factorial(followers.count(j)) for j in range(many))
        total *= Fraction(factorial(many - 1) * ways, factorial(len(followers) + many - 1))
    return total


def chain_next(symbols: list[int], many: int) -> list[list[Fraction]]:
    """P(y_t+1 | y_1 .. y_t) at each t, as a ratio of two such chances."""
    return [
        [chance_of_chain([*symbols[:t], j], many) / chance_of_chain(symbols[:t], many) for j in range(many)]
        for t in range(1, len(symbols) + 1)
    ]
