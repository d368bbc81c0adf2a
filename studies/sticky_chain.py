"""Paper II's sticky chain: one attention head on one noisy sequence, trained by many schedules of learning rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmgeom.files import digest
from llmgeom.progress import tell
from llmgeom.reports.text import grid
from llmgeom.stats.information import bits
from llmgeom.wind_tunnels.worlds.markov import Markov
from llmgeom.world import seeded
from studies.trainings import computed

SEEDS = (42, 2024, 1337, 7777, 9999)
TUNING = (1, 2)  # seeds that choose the rates and are not judged
READ, KEYS, VALUES = 20, 10, 15  # d_x, d_k, d_v
SLOW, FAST = 0.01, 0.1
MULTIPLES = (30.0, 100.0, 300.0, 1000.0)  # of SLOW: rates tried for each part, in a quarter of the steps
RIDGES = (1e-4, 1e-3, 1e-2)  # tried in a quarter of the steps
PARTS = {"V": (2,), "O": (3,), "QK": (0, 1), "all": (0, 1, 2, 3)}  # the matrices, of Q K V O, that a method speeds up
SIZES = (READ * KEYS, READ * KEYS, READ * VALUES, VALUES * 8)
PLAIN, ALTERNATING = "plain descent", "values in closed form"
SHAPES = {True: {"length": 500, "steps": 400}, False: {"length": 2000, "steps": 1000}}  # by --quick
TEN, EQUAL, WEIGHED, TUNED = "ten times", "equal sum", "equal sum by size", "tuned"
Rates = tuple[float, float, float, float]


@dataclass(frozen=True)
class Cell:
    """One training.

    Attributes:
        rates: Learning rates of W_Q, W_K, W_V, W_O. With a ridge, the rate of W_V is not used.
        seed: Seed of the sequence and the weights.
        length: Number of symbols in the sequence.
        steps: Number of steps of full-batch descent.
        ridge: Penalty of the values in closed form; 0 if they are updated by descent like the rest.
        until: Training loss in nats at which training stops; 0 runs all steps.
    """

    rates: Rates
    seed: int
    length: int
    steps: int
    ridge: float = 0.0
    until: float = 0.0


# ---- the model and its gradients ------------------------------------------------------------------------------------


def chain(seed: int, length: int, purpose: str = "train") -> tuple[Tensor, Tensor]:
    """Inputs [step 20] and targets [step]: x_t = mu_{y_{t-1}} + N(0, I), target y_t.

    y is the sticky ring of 8 symbols; mu_s ~ N(0, I), the same for every seed.
    """
    task = Markov(steps=length)
    generator = seeded(f"paper2 {purpose}", seed)
    drawn = task.draw(task.hypothesis(1, generator), generator)
    means = torch.randn(task.symbols, READ, generator=seeded("paper2 means", 0))
    noise = torch.randn(length, READ, generator=generator)
    return means[drawn.inputs[0]] + noise, drawn.target[0]


def fresh_weights(seed: int) -> list[Tensor]:
    """W_Q, W_K, W_V, W_O ~ 0.1 N(0, 1)."""
    generator = seeded("paper2 weights", seed)
    shapes = (READ, KEYS), (READ, KEYS), (READ, VALUES), (VALUES, 8)
    return [0.1 * torch.randn(m, n, generator=generator) for m, n in shapes]


def least() -> float:
    """H_min in nats: the mean entropy of a row of the ring, 1.829188."""
    return float(torch.special.entr(Markov().ring()).sum(1).mean())


def gradients(
    x: Tensor, y: Tensor, weights: Sequence[Tensor], block: int = 100, wanted: bool = True
) -> tuple[float, list[Tensor], Tensor]:
    """Loss and gradients of one causal head with logits W_O' sum_j alpha_ij W_V' x_j.

    Args:
        x: Inputs [step 20].
        y: Targets [step].
        weights: W_Q, W_K, W_V, W_O.
        block: Queries at a time: a block needs only its own past and fits the processor's cache.
        wanted: Whether gradients are computed.

    Returns:
        The mean loss in nats; its gradients with respect to the four matrices, by the law of
        studies/gradients.py; and alpha X, [step 20].
    """
    w_q, w_k, w_v, w_o = weights
    scale = w_q.shape[1] ** -0.5
    q, k, v = scale * (x @ w_q), x @ w_k, x @ w_v
    dq, dk, dv, do, mixed = (torch.zeros_like(of) for of in (q, k, v, w_o, x))
    loss, n = 0.0, len(x)
    future = torch.ones(block, block, dtype=torch.bool).triu(1)
    for at in range(0, n, block):
        end = min(at + block, n)
        score = q[at:end] @ k[:end].T
        score[:, at:].masked_fill_(future[: end - at, : end - at], -math.inf)
        alpha = score.softmax(-1)
        mixed[at:end] = alpha @ x[:end]
        z = mixed[at:end] @ w_v
        log_p = (z @ w_o).log_softmax(-1)
        target = y[at:end, None]
        loss -= float(log_p.gather(1, target).sum())
        if not wanted:
            continue
        missed = log_p.exp().scatter_add_(1, target, -torch.ones_like(log_p[:, :1])) / n
        do += z.T @ missed
        u = missed @ w_o.T
        dv[:end] += alpha.T @ u
        pull = torch.addmm(-(u * z).sum(1, keepdim=True), u, v[:end].T).mul_(alpha)
        dq[at:end] = pull @ k[:end]
        dk[:end] += pull.T @ q[at:end]
    return loss / n, [scale * (x.T @ dq), x.T @ dk, x.T @ dv, do], mixed


def closed_form(mixed: Tensor, by_values: Tensor, w_v: Tensor, w_o: Tensor, ridge: float) -> Tensor:
    """The W_V that minimises an upper bound of loss + ridge |W_V|^2 / 2, with alpha and W_O fixed. Derived here.

    With h_i = sum_j alpha_ij x_j, rows of H (`mixed`), logits are W_O' W_V' h_i, and the Hessian of the cross-entropy
    in them is at most (I - 11'/C) / 2 (Boehning 1992). So for a change D of W_V, with the gradient G = dL/dW_V,

        L(W_V + D) <= L + <G, D> + tr(D' A D B) / 2,   A = H'H / T,   B = W_O (I - 11'/C) W_O' / 2,

    and the minimum of the bound with the ridge satisfies A D B + ridge D = -(G + ridge W_V), solved in the eigenvectors
    of A and B. Each repetition with alpha fixed lowers loss + ridge |W_V|^2 / 2, without a rate.
    """
    h, v, o = mixed.double(), w_v.double(), w_o.double()
    a, left = torch.linalg.eigh(h.T @ h / len(h))
    b, right = torch.linalg.eigh(o @ (torch.eye(o.shape[1]).to(o) - 1 / o.shape[1]) @ o.T / 2)
    wanted = left.T @ -(by_values.double() + ridge * v) @ right
    change = left @ (wanted / (a[:, None].clamp_min(0) * b.clamp_min(0) + ridge)) @ right.T
    return (v + change).to(w_v.dtype)


def trained(cell: Cell) -> dict[str, Any]:
    """Train one cell.

    A step computes one loss with its gradients. With a ridge, two kinds of steps alternate: values in closed form with
    fixed attention, then a step of plain descent on the rest with fixed values.

    Returns:
        "losses": nats before every step and at the end; "fresh": nats on a fresh sequence; "finite": whether both are.
    """
    x, y = chain(cell.seed, cell.length)
    weights, losses = fresh_weights(cell.seed), []
    for turn in range(cell.steps):
        loss, by_weight, mixed = gradients(x, y, weights)
        losses.append(loss)
        if loss <= cell.until or not math.isfinite(loss):
            break
        if cell.ridge and turn % 2 == 0:
            weights[2] = closed_form(mixed, by_weight[2], weights[2], weights[3], cell.ridge)
            continue
        for i, (gradient, rate) in enumerate(zip(by_weight, cell.rates, strict=True)):
            if not (cell.ridge and i == 2):
                weights[i] = weights[i] - rate * gradient
    else:
        losses.append(gradients(x, y, weights, wanted=False)[0])
    fresh = gradients(*chain(cell.seed, cell.length, "fresh"), weights, wanted=False)[0]
    finite = math.isfinite(losses[-1]) and math.isfinite(fresh)
    return {"losses": losses if finite else [], "fresh": fresh if finite else 0.0, "finite": finite}


# ---- methods ---------------------------------------------------------------------------------------------------------


def rates(part: str, fast: float) -> Rates:
    """`fast` for the matrices of a part, SLOW for the others."""
    q, k, v, o = (fast if i in PARTS[part] else SLOW for i in range(4))
    return q, k, v, o


def equal(part: str, by_size: bool = False) -> Rates:
    """Rates with the budget of the published schedule, spent on this part: its matrices share the budget above SLOW.

    Budget: the sum of the rates of the four matrices, 0.13; with `by_size` the sum over their 820 numbers.
    """
    size = SIZES if by_size else (1, 1, 1, 1)
    return rates(part, SLOW + (FAST - SLOW) * size[2] / sum(size[i] for i in PARTS[part]))


def schedules() -> dict[str, Rates]:
    """The trainings of full length by name."""
    found = {PLAIN: (SLOW,) * 4} | {f"{part}, {TEN}": rates(part, FAST) for part in PARTS}
    return found | {f"{part}, {EQUAL}": equal(part) for part in ("QK", "all")}  # of one matrix: ten times the rate


@dataclass(frozen=True)
class Method:
    """One method: its rates, steps to plain descent's final loss by seed, and final losses in bits by seed; none if
    training stopped at arrival."""

    name: str
    rates: tuple[float, ...]
    steps: tuple[int, ...]
    train: tuple[float, ...] = ()
    fresh: tuple[float, ...] = ()


def compare_methods(
    shape: Mapping[str, int], folder: Path
) -> tuple[tuple[Method, ...], dict[Any, dict[str, Any]], dict[str, float]]:
    """Train every method on every seed, unless the folder has it.

    Returns:
        The methods; the result of `trained` by (method, seed); and the rates and the ridge that the tuning seeds chose.
    """
    run = partial(_run, folder)

    def plain(seeds: Sequence[int], **changes: Any) -> dict[Any, Cell]:
        return {seed: Cell((SLOW,) * 4, seed, **{**shape, **changes}) for seed in seeds}

    # Trainings of full length: the schedules, and alternating steps with the ridge that is best on the tuning seeds.
    whole = schedules()
    ran = run({(name, seed): Cell(rate, seed, **shape) for name, rate in whole.items() for seed in SEEDS}, "schedules")
    quarter = shape["steps"] // 4
    by_ridge = {ridge: run(plain(TUNING, steps=quarter, ridge=ridge), f"ridge {ridge:g}") for ridge in RIDGES}
    best_ridge = min(RIDGES, key=lambda ridge: sum(fresh_loss(by_ridge[ridge][seed]) for seed in TUNING))
    alternating = run(plain(SEEDS, ridge=best_ridge), ALTERNATING)
    ran |= {(ALTERNATING, seed): training for seed, training in alternating.items()}
    # Plain descent's final loss: the other methods arrive when they reach it.
    tuning = run(plain(TUNING), "plain descent, tuning seeds")
    ends = {seed: ran[PLAIN, seed]["losses"][-1] for seed in SEEDS}
    ends |= {seed: training["losses"][-1] for seed, training in tuning.items()}
    # Trainings that stop at arrival.
    best_rate = _best_rates(run, shape, ends)
    short = {f"{part}, {WEIGHED}": equal(part, by_size=True) for part in PARTS if part != "V"}
    short |= {f"{part}, {TUNED}": rates(part, best_rate[part]) for part in PARTS}
    ran |= run(
        {(name, s): Cell(rate, s, **shape, until=ends[s]) for name, rate in short.items() for s in SEEDS},
        "equal budgets and tuned rates",
    )

    def method(name: str, rate: Rates) -> Method:
        trainings = [ran[name, seed] for seed in SEEDS]
        arrived = tuple(arrival(x, ends[seed], shape["steps"]) for x, seed in zip(trainings, SEEDS, strict=True))
        final = () if name in short else zip(*map(ends_of, trainings), strict=True)
        return Method(name, rate, arrived, *final)

    methods = {**whole, ALTERNATING: (SLOW, SLOW, 0.0, SLOW), **short}
    chosen = {f"rate of {part}": rate for part, rate in best_rate.items()} | {"ridge": best_ridge}
    return tuple(method(name, rate) for name, rate in methods.items()), ran, chosen


def _run(folder: Path, cells: Mapping[Any, Cell], stage: str) -> dict[Any, dict[str, Any]]:
    """The result of `trained` for each cell, from the folder if it has it."""
    trainings = {}
    for i, (name, cell) in enumerate(cells.items()):
        spec = asdict(cell)
        trainings[name] = computed(folder / f"{digest(spec)[:16]}.json", spec, partial(trained, cell))
        tell(stage, i + 1, len(cells))
    return trainings


def _best_rates(run: Callable[..., dict], shape: Mapping[str, int], ends: Mapping[int, float]) -> dict[str, float]:
    """For each part the rate that arrives first, summed over the tuning seeds, in a quarter of the steps."""
    quarter = {**shape, "steps": shape["steps"] // 4}
    tries = {
        (part, multiple, seed): Cell(rates(part, SLOW * multiple), seed, **quarter, until=ends[seed])
        for part in PARTS
        for multiple in MULTIPLES
        for seed in TUNING
    }
    tried = run(tries, "tuning")

    def steps_of(part: str, multiple: float) -> int:
        return sum(arrival(tried[part, multiple, seed], ends[seed], shape["steps"]) for seed in TUNING)

    return {part: SLOW * min(MULTIPLES, key=partial(steps_of, part)) for part in PARTS}


def ends_of(training: Mapping[str, Any]) -> tuple[float, float]:
    """The final losses in bits: in training, and on the fresh sequence."""
    return bits(training["losses"][-1]), bits(training["fresh"])


def arrival(training: Mapping[str, Any], end: float, steps: int) -> int:
    """The first step with a loss of at most `end`; one more than all steps if there is none."""
    return next((step for step, loss in enumerate(training["losses"]) if loss <= end), steps + 1)


def fresh_loss(training: Mapping[str, Any]) -> float:
    """The loss on the fresh sequence; infinite if the training diverged."""
    return training["fresh"] if training["finite"] else math.inf


def lines(methods: Sequence[Method]) -> list[str]:
    """The methods, for a terminal."""
    floor = bits(least())
    head = ("rates Q K V O", "steps", "by seed", "train bits", "fresh bits", "fresh - H_min")
    cells = [
        (
            method.name,
            " ".join(f"{rate:.3g}" for rate in method.rates),
            f"{np.mean(method.steps):.0f}",
            " ".join(map(str, method.steps)),
            *([f"{np.mean(x):.4f}" for x in (method.train, method.fresh)] if method.train else ["", ""]),
            f"{np.mean(method.fresh) - floor:+.4f}" if method.fresh else "",
        )
        for method in methods
    ]
    title = f"steps to plain descent's final loss; losses after all steps; H_min {floor:.4f} bits, uniform 3"
    return [title, *grid("method", head, cells)]
