"""Exact answers of processes in text, by enumeration from the prompt itself; shares no code with the sources."""

import re
from dataclasses import dataclass
from itertools import pairwise, permutations, product

import numpy as np
from scipy.special import roots_jacobi

NUMBERS = re.compile(r"(\w+) in (\d) of 10 lists, (\w+) in (\d) of 10\. Each entry shows the right mark (\d) times")


@dataclass(frozen=True)
class Parsed:
    """What a person reads in a prompt: the marks in the order named, pairs of item and mark, and the item asked for."""

    marks: tuple[str, ...]
    pairs: tuple[tuple[str, str], ...]
    asked: str
    prior: dict[str, float]
    reliability: float

    @property
    def seen(self) -> list[int]:
        return [self.marks.index(mark) for _, mark in self.pairs]


def parse(text: str) -> Parsed:
    """A prompt in any surface."""
    prior, reliability = {}, 0.0
    if stated := NUMBERS.search(text):
        first, p, second, q, r = stated.groups()
        prior, reliability = {first: int(p) / 10, second: int(q) / 10}, int(r) / 10
        text = text[stated.end() :].split("in 10.", 1)[1].removeprefix(" */").strip()
    if " = " in text:
        *lines, last = text.split("; ")
        assignments = [tuple(line.split(" = ")) for line in lines]
        asked = last.removesuffix(" =")
    elif text.startswith("The first is"):
        *lines, last = text.split(". ")
        assignments = [tuple(line.removeprefix("The ").split(" is ")) for line in lines]
        asked = last.removesuffix(" is")
    else:
        opening, rest = text.split(". ", 1)
        *lines, last = rest.split(", ")
        assignments = [tuple(line.split(": ")) for line in (*opening.lower().split(", "), *lines)]
        asked = last.removesuffix(":")
    ordinals = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
    marks = [mark for item, mark in assignments if item in ordinals]
    assert [item for item, _ in assignments][: len(marks)] == list(ordinals[: len(marks)])
    pairs = tuple((item, mark) for item, mark in assignments[len(marks) :])
    return Parsed(tuple(marks), pairs, asked, prior, reliability)


def two_point(prompt: Parsed, reliability: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
    """Sum over the ruling mark, observation by observation. Predictive and belief."""
    return _ruled(prompt.seen, (0.5, 0.5), reliability)


def stated(prompt: Parsed) -> tuple[np.ndarray, np.ndarray]:
    return _ruled(prompt.seen, [prompt.prior[mark] for mark in prompt.marks], prompt.reliability)


def _ruled(seen, prior, reliability):
    joint = np.array(prior, dtype=float)
    for outcome in seen:
        joint *= [reliability if ruling == outcome else 1 - reliability for ruling in (0, 1)]
    belief = joint / joint.sum()
    return np.array(
        [sum(belief[y] * (reliability if y == x else 1 - reliability) for y in (0, 1)) for x in (0, 1)]
    ), belief


def dirichlet(seen: list[int], labels: int, a: float) -> np.ndarray:
    """The integral of theta_x times the likelihood over the simplex, by stick breaking and Gauss-Jacobi quadrature.

    theta_1 = v_1, theta_2 = (1 - v_1) v_2, ...; v_i ~ Beta(a, a (labels - i)). The likelihood is a polynomial in each
    v_i, of degree len(seen) + 1 at most, so that 20 nodes are exact.
    """
    nodes = [_beta_nodes(a, a * (labels - 1 - i)) for i in range(labels - 1)]
    weights = np.ones(1)
    shares, left = np.ones((0, 1)), np.ones(1)
    for v, w in nodes:
        weights = np.outer(weights, w).ravel()
        shares = np.concatenate([np.repeat(shares, len(v), 1), np.outer(left, v).reshape(1, -1)])
        left = np.outer(left, 1 - v).ravel()
    shares = np.concatenate([shares, left[None]])
    likelihood = weights * np.prod([shares[outcome] for outcome in seen], axis=0)
    joint = (shares * likelihood).sum(1)
    return joint / joint.sum()


def _beta_nodes(a: float, b: float) -> tuple[np.ndarray, np.ndarray]:
    x, w = roots_jacobi(20, b - 1, a - 1)
    return (x + 1) / 2, w / w.sum()


def beta_majority(seen: list[int], a: int) -> np.ndarray:
    """P(share of the first > 1/2) by Gauss-Legendre quadrature on each half, exact for whole a."""
    x, w = np.polynomial.legendre.leggauss(40)
    halves = []
    for low in (0.5, 0.0):
        theta = low + (x + 1) / 4
        halves.append((w * theta ** (seen.count(0) + a - 1) * (1 - theta) ** (seen.count(1) + a - 1)).sum())
    return np.array(halves) / sum(halves)


def markov(prompt: Parsed, a: float) -> np.ndarray:
    """The row of the last mark is a Dirichlet draw of its own: only the steps from that mark bear on it."""
    seen, labels = prompt.seen, len(prompt.marks)
    if not seen:
        return np.full(labels, 1 / labels)
    return dirichlet([seen[i + 1] for i in range(len(seen) - 1) if seen[i] == seen[-1]], labels, a)


def hmm(prompt: Parsed, stays, weights, reliability: float) -> tuple[np.ndarray, np.ndarray]:
    """Sum over chains and over every path of the hidden state, the next one included."""
    seen, labels = prompt.seen, len(prompt.marks)
    off = (1 - reliability) / (labels - 1)
    predictive, belief = np.zeros(labels), np.zeros((len(stays), labels))
    for c, (stay, weight) in enumerate(zip(stays, weights, strict=True)):
        for path in product(range(labels), repeat=len(seen) + 1):
            p = weight / sum(weights) / labels
            for before, after in pairwise(path):
                p *= stay if before == after else (1 - stay) / (labels - 1)
            for state, mark in zip(path, seen, strict=False):
                p *= reliability if state == mark else off
            if seen:
                belief[c, path[-2]] += p
            else:
                belief[c, path[0]] += p
            for mark in range(labels):
                predictive[mark] += p * (reliability if path[-1] == mark else off)
    return predictive / predictive.sum(), belief.ravel() / belief.sum()


def recall(prompt: Parsed) -> np.ndarray:
    """Sum over every assignment of marks to the items, each as likely."""
    items = sorted({item for item, _ in prompt.pairs} | {prompt.asked})
    return _consistent(prompt, items, product(prompt.marks, repeat=len(items)))


def bijection(prompt: Parsed) -> np.ndarray:
    """Sum over every one-to-one assignment of marks to the items that occur."""
    items = sorted({item for item, _ in prompt.pairs} | {prompt.asked})
    return _consistent(prompt, items, permutations(prompt.marks, len(items)))


def _consistent(prompt, items, assignments):
    counts = dict.fromkeys(prompt.marks, 0)
    for marks in assignments:
        of = dict(zip(items, marks, strict=True))
        if all(of[item] == mark for item, mark in prompt.pairs):
            counts[of[prompt.asked]] += 1
    return np.array(list(counts.values())) / sum(counts.values())
