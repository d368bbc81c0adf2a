"""Answers by writing every possibility out, in plain Python: nothing here is shared with what it judges."""

import math
from collections import defaultdict
from itertools import pairwise, permutations, product
from math import prod

Matrix = list[list[float]]
# A drawn sequence: its probability, its inputs, and at each query (position, outcome, latent state or None).
Drawn = tuple[float, tuple[int, ...], list[tuple[int, int, object]]]


def conditionals(sequences: list[Drawn]) -> dict[tuple[int, ...], tuple[dict, dict]]:
    """For the inputs up to each query: P(outcome) and P(latent state)."""
    outcomes, states = defaultdict(lambda: defaultdict(float)), defaultdict(lambda: defaultdict(float))
    for weight, inputs, queries in sequences:
        for position, outcome, state in queries:
            outcomes[inputs[: position + 1]][outcome] += weight
            states[inputs[: position + 1]][state] += weight

    def shares(weights):
        return {key: weight / sum(weights.values()) for key, weight in weights.items()}

    return {prefix: (shares(outcomes[prefix]), shares(states[prefix])) for prefix in outcomes}


def bijections(vocab: int, pairs: int, replacement: bool) -> list[Drawn]:
    """k1 v1 k2 v2 ... kL, keys from 0 and values from `vocab`."""
    found = []
    for values in permutations(range(vocab)):
        for keys in product(range(vocab), repeat=pairs) if replacement else permutations(range(vocab), pairs):
            tokens = [token for key in keys for token in (key, vocab + values[key])]
            queries = [(2 * i, values[key], values) for i, key in enumerate(keys)]
            found.append((1.0, tuple(tokens[:-1]), queries))
    return found


def recalls(pairs, queries, filler, keys, values, papers=False, distinct=True) -> list[Drawn]:
    """Written after the list of tokens in the papers' generator, one append a token."""
    found = []
    first_key, first_value = (10, 10 + keys) if papers else (0, keys)
    choices = permutations(range(values), pairs) if distinct else product(range(values), repeat=pairs)
    for stored, taken in product(permutations(range(keys), pairs), choices):
        for asked in permutations(range(pairs), queries):
            tokens, at = [], []
            for key, value in zip(stored, taken, strict=True):
                pair = (first_key + key, first_value + value)
                tokens += [1, pair[0], 4, pair[1]] if papers else pair
            tokens += [2 if papers else keys + values] * filler
            for j, i in enumerate(asked):
                tokens += [3] if papers else []
                tokens.append(first_key + stored[i])
                at.append((len(tokens) - 1, taken[i], None))
                tokens.append(0 if papers else first_value + taken[i])
                tokens += [2] * (filler // 2) if papers and j < queries - 1 else []
            found.append((1.0, tuple(tokens if papers else tokens[:-1]), at))
    return found


def recurrences(p: int, steps: int, program: float, opaque: bool = False) -> list[Drawn]:
    """Every program from every start, and every sequence by chance; state 0 is a program, 1 chance."""
    plain = []
    for a, b, x in product(range(p), repeat=3):
        numbers = [x]
        while len(numbers) < steps:
            numbers.append((a * numbers[-1] + b) % p)
        plain.append((program / p**3, numbers, 0))
    plain += [((1 - program) / p**steps, list(numbers), 1) for numbers in product(range(p), repeat=steps)]
    found = []
    for name in permutations(range(p)) if opaque else [range(p)]:
        header = [2 * p, *(p + i for i in name), 2 * p + 1] if opaque else []
        for weight, numbers, state in plain:
            named = [name[x] for x in numbers]
            tokens = header + [x + p if opaque else x for x in named[:-1]]
            queries = [(len(header) + t, named[t + 1], state) for t in range(steps - 1)]
            found.append((weight, tuple(tokens), queries))
    return found


def given_cause(shares: Matrix, prior: list[float], steps: int, opening: tuple[int, ...]) -> list[Drawn]:
    """Symbols drawn independently with the shares of one of a few causes."""
    found = []
    for cause, symbols in product(range(len(prior)), product(range(len(shares[0])), repeat=steps)):
        weight = prior[cause] * prod(shares[cause][symbol] for symbol in symbols)
        queries = [(len(opening) - 1 + t, symbol, cause) for t, symbol in enumerate(symbols)]
        found.append((weight, (*opening, *symbols[:-1]), queries))
    return found


def simplex(counts: list[int], a: list[float]) -> float:
    """The mean of prod_j theta_j^n_j over Dirichlet(a): prod_j G(a_j + n_j) / G(a_j), times G(A) / G(A + n)."""
    log = sum(math.lgamma(own + n) - math.lgamma(own) for own, n in zip(a, counts, strict=True))
    return math.exp(log + math.lgamma(sum(a)) - math.lgamma(sum(a) + sum(counts)))


def of_shares(a: list[float], steps: int) -> list[Drawn]:
    """Symbols drawn independently with shares from Dirichlet(a)."""
    found = []
    for symbols in product(range(len(a)), repeat=steps):
        weight = simplex([symbols.count(j) for j in range(len(a))], a)
        found.append((weight, (len(a), *symbols[:-1]), [(t, symbol, None) for t, symbol in enumerate(symbols)]))
    return found


def visible_chains(many: int, steps: int, a: float) -> list[Drawn]:
    """Chains whose rows are from Dirichlet(a, ..., a)."""
    found = []
    for chain in product(range(many), repeat=steps + 1):
        weight = prod(
            simplex([[*pairwise(chain)].count((row, j)) for j in range(many)], [a] * many) for row in range(many)
        )
        found.append((weight, chain[:-1], [(t, chain[t + 1], None) for t in range(steps)]))
    return found


def edges(moves: list[Matrix], first: list[float], steps: int) -> list[Drawn]:
    """Every possible path of states and the symbols on its edges, moves[symbol][from][to]."""
    paths = [(weight, (), (state,)) for state, weight in enumerate(first) if weight]
    for _ in range(steps + 1):
        paths = [
            (weight * move[path[-1]][to], (*symbols, x), (*path, to))
            for weight, symbols, path in paths
            for x, move in enumerate(moves)
            for to in range(len(first))
            if move[path[-1]][to]
        ]
    return [
        (weight, symbols[:-1], [(t, symbols[t + 1], path[t + 1]) for t in range(steps)])
        for weight, symbols, path in paths
    ]


def ring(many: int, stay: float) -> Matrix:
    """The sticky ring, a row at a time."""
    rows = []
    for i in range(many):
        weight = [1 / min(abs(i - j), many - abs(i - j)) if i != j else stay for j in range(many)]
        rows.append([(1 - stay) * w / sum(weight) + stay * (i == j) for j, w in enumerate(weight)])
    return rows


def mixing(many: int, p: float) -> Matrix:
    """p on the diagonal, the rest shared evenly."""
    return [[p if i == j else (1 - p) / (many - 1) for j in range(many)] for i in range(many)]


def arriving(move: Matrix, shows: Matrix) -> list[Matrix]:
    """A state moves, then a symbol shows where it arrived: a matrix for each symbol."""
    states = range(len(move))
    return [[[move[i][j] * shows[j][x] for j in states] for i in states] for x in range(len(shows[0]))]


def mixture(stays, weights, r: float, steps: int) -> list[Drawn]:
    """Chain by chain, two states each."""
    blocks, states = [mixing(2, stay) for stay in stays], range(2 * len(stays))
    move = [[blocks[i // 2][i % 2][j % 2] if i // 2 == j // 2 else 0 for j in states] for i in states]
    first = [w / sum(weights) / 2 for w in weights for _ in range(2)]
    return edges(arriving(move, mixing(2, r) * len(stays)), first, steps)


def rrxor(steps: int) -> list[Drawn]:
    """Before the first bit; after a first bit of 0 or of 1; before an exclusive or of 1 or of 0."""
    moves = [[[0.0] * 5 for _ in range(5)] for _ in range(2)]
    moves[0][0][1] = moves[1][0][2] = moves[0][1][4] = moves[1][1][3] = moves[0][2][3] = moves[1][2][4] = 0.5
    moves[1][3][0] = moves[0][4][0] = 1.0
    return edges(moves, [1 / 3, 1 / 6, 1 / 6, 1 / 6, 1 / 6], steps)


def stated(reliabilities, priors, steps: int) -> list[Drawn]:
    """Of every pair of stated numbers, in tenths."""
    found = []
    for r, p in product(reliabilities, priors):
        found += given_cause(mixing(2, r / 10), [p / 10, 1 - p / 10], steps, (p + 1, r + 10))
    return found


def regression(x: list[float], y: list[float], at: float, noise: float, scale: float) -> tuple[float, float]:
    """Mean and variance of the value at `at` for one weight: a sum over a fine grid of weights."""
    grid = [scale * (i / 500 - 8) for i in range(8001)]
    log_weight = [
        -((w / scale) ** 2) / 2 - sum((b - w * a) ** 2 for a, b in zip(x, y, strict=True)) / (2 * noise**2)
        for w in grid
    ]
    top = max(log_weight)
    weight = [math.exp(value - top) for value in log_weight]
    mean = sum(p * w for p, w in zip(weight, grid, strict=True)) / sum(weight)
    spread = sum(p * (w - mean) ** 2 for p, w in zip(weight, grid, strict=True)) / sum(weight)
    return mean * at, spread * at**2 + noise**2


# ---- hidden chains whose matrices precede the observations ----------------------------------------------------------


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
