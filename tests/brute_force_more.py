"""Exact answers the slow way: every sequence a task can draw is written out, and the ones that go on alike are counted.

Plain Python, and nothing of the package: what is checked against this cannot share its mistakes.
"""

import math
from collections import defaultdict
from itertools import permutations, product

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


def recalls(pairs: int, queries: int, filler: int, keys: int, values: int, papers: bool) -> list[Drawn]:
    """Written after the list of tokens in the papers' generator, one append a token."""
    found = []
    first_key, first_value = (10, 10 + keys) if papers else (0, keys)
    for stored, taken in product(permutations(range(keys), pairs), permutations(range(values), pairs)):
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


def coin(flips: list[int], prior: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """P(heads), P(tails) and P(bias) after flips (0 is heads) for a list of (bias, weight)."""
    joint = [weight * math.prod(bias if flip == 0 else 1 - bias for flip in flips) for bias, weight in prior]
    belief = [weight / sum(joint) for weight in joint]
    heads = sum(weight * bias for weight, (bias, _) in zip(belief, prior, strict=True))
    return [heads, 1 - heads], belief


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
