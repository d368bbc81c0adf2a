"""Paper II: the sticky chain with the controls it lacked, the gradient law, and what settles first in training."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from llmgeom import wind_tunnels
from llmgeom.bench.sweep import sweep
from llmgeom.commands import dynamics
from llmgeom.errors import UserError
from llmgeom.files import digest, write_whole
from llmgeom.model.subject import Subject
from llmgeom.papers import paper1, routing_law
from llmgeom.papers.published_numbers import Check
from llmgeom.papers.routing_law import NAME
from llmgeom.papers.verdicts import Bench, over_seeds
from llmgeom.progress import Progress
from llmgeom.record import Record
from llmgeom.reports.text import grid
from llmgeom.result import Estimate, Figure, Measured, Result, quantity
from llmgeom.run import run_probes
from llmgeom.stats.information import bits
from llmgeom.stats.resampling import mean_intervals
from llmgeom.task import seeded
from llmgeom.wind_tunnels.tasks.markov import Markov

if TYPE_CHECKING:
    from llmgeom.commands.reproduce import RunConfig

SEEDS = (42, 2024, 1337, 7777, 9999)
TUNING = (1, 2)  # seeds on which rates are chosen, and nothing is judged
READ, KEYS, VALUES = 20, 10, 15  # d_x, d_k, d_v
SLOW, FAST = 0.01, 0.1
WHOLE = 12**-0.5  # the standard deviation that counting whole steps adds
MULTIPLES = (30.0, 100.0, 300.0, 1000.0)  # of SLOW, tried for the free rate of a method in a quarter of the steps
RIDGES = (1e-4, 1e-3, 1e-2)  # tried in a quarter of the steps
PARTS = {"V": (2,), "O": (3,), "QK": (0, 1), "all": (0, 1, 2, 3)}  # which of W_Q, W_K, W_V, W_O a method speeds up
SIZES = (READ * KEYS, READ * KEYS, READ * VALUES, VALUES * 8)
PLAIN, ALTERNATING = "plain descent", "values in closed form"
SHAPES = {True: {"length": 500, "steps": 400}, False: {"length": 2000, "steps": 1000}}  # by --quick
TEN, EQUAL, WEIGHED, TUNED = "ten times", "equal sum", "equal sum by size", "tuned"
Rates = tuple[float, float, float, float]


@dataclass(frozen=True)
class Cell:
    """One training.

    rates   of W_Q, W_K, W_V, W_O; in closed form that of W_V is not used.
    ridge   of the values in closed form; 0 where they are descended on as the rest.
    until   training loss in nats at which it stops, 0 to run all steps.
    """

    rates: Rates
    seed: int
    length: int
    steps: int
    ridge: float = 0.0
    until: float = 0.0


# ---- the model and its gradients ------------------------------------------------------------------------------------


def chain(seed: int, length: int, purpose: str = "train") -> tuple[Tensor, Tensor]:
    """Inputs [step 20] and targets [step]: x_t = mu_{y_{t-1}} + N(0, I), target y_t, y the sticky ring of 8 symbols;
    mu_s ~ N(0, I), the same for every seed.
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
    return [0.1 * torch.randn(m, n, generator=generator) for m, n in _shapes()]


def least() -> float:
    """H_min in nats: the mean entropy of a row of the ring, 1.829188."""
    ring = Markov().ring()
    return float(torch.special.entr(ring).sum(1).mean())


def gradients(
    x: Tensor, y: Tensor, weights: Sequence[Tensor], block: int = 100, wanted: bool = True
) -> tuple[float, list[Tensor], Tensor]:
    """Mean loss in nats; its gradients by W_Q, W_K, W_V, W_O, by the law of
    llmgeom/model/attention_gradients.py; and alpha X, [step 20].

    One causal head, logits W_O' sum_j alpha_ij W_V' x_j. A block of queries at a time, which sees only its own past
    and stays in the cache.
    """
    w_q, w_k, w_v, w_o = weights
    scale = w_q.shape[1] ** -0.5
    q, k, v = scale * (x @ w_q), x @ w_k, x @ w_v
    dq, dk, dv, do, mixed = (torch.zeros_like(one) for one in (q, k, v, w_o, x))
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
    """The W_V that minimises an upper bound of loss + ridge |W_V|^2 / 2, alpha and W_O held fixed. Derived here.

    With h_i = sum_j alpha_ij x_j, rows of H (`mixed`), logits are W_O' W_V' h_i, and the Hessian of the cross-entropy
    in them is at most (I - 11'/C) / 2 (Boehning 1992). So for a change D of W_V, with the gradient G = dL/dW_V,

        L(W_V + D) <= L + <G, D> + tr(D' A D B) / 2,   A = H'H / T,   B = W_O (I - 11'/C) W_O' / 2,

    and the bound with the ridge is least where A D B + ridge D = -(G + ridge W_V), solved in the eigenvectors of A and
    B. Repeated with alpha fixed it lowers loss + ridge |W_V|^2 / 2 every time, and needs no rate.
    """
    h, v, o = mixed.double(), w_v.double(), w_o.double()
    a, left = torch.linalg.eigh(h.T @ h / len(h))
    b, right = torch.linalg.eigh(o @ (torch.eye(o.shape[1]).to(o) - 1 / o.shape[1]) @ o.T / 2)
    wanted = left.T @ -(by_values.double() + ridge * v) @ right
    change = left @ (wanted / (a[:, None].clamp_min(0) * b.clamp_min(0) + ridge)) @ right.T
    return (v + change).to(w_v.dtype)


def trained(cell: Cell) -> dict[str, Any]:
    """Train one cell: loss in nats before every step and at the end, that on a fresh sequence, and whether both are
    finite.

    A step is one loss with its gradients. In closed form they alternate: values in closed form with attention held
    fixed, then a step of plain descent on the rest with values held fixed.
    """
    x, y = chain(cell.seed, cell.length)
    weights, losses = fresh_weights(cell.seed), []
    for turn in range(cell.steps):
        loss, found, mixed = gradients(x, y, weights)
        losses.append(loss)
        if loss <= cell.until or not math.isfinite(loss):
            break
        if cell.ridge and turn % 2 == 0:
            weights[2] = closed_form(mixed, found[2], weights[2], weights[3], cell.ridge)
            continue
        for i, (gradient, rate) in enumerate(zip(found, cell.rates, strict=True)):
            if not (cell.ridge and i == 2):
                weights[i] = weights[i] - rate * gradient
    else:
        losses.append(gradients(x, y, weights, wanted=False)[0])
    other = gradients(*chain(cell.seed, cell.length, "fresh"), weights, wanted=False)[0]
    finite = math.isfinite(losses[-1]) and math.isfinite(other)
    return {"losses": losses if finite else [], "fresh": other if finite else 0.0, "finite": finite}


def _shapes() -> tuple[tuple[int, int], ...]:
    return (READ, KEYS), (READ, KEYS), (READ, VALUES), (VALUES, 8)


# ---- methods ---------------------------------------------------------------------------------------------------------


def rates(part: str, fast: float) -> Rates:
    """SLOW, and `fast` for the matrices of a part."""
    q, k, v, o = (fast if i in PARTS[part] else SLOW for i in range(4))
    return q, k, v, o


def equal(part: str, by_size: bool = False) -> Rates:
    """Rates with the budget of the published schedule, spent on this part: what is over SLOW, shared by its matrices.

    Budget: the sum of the rates of the four matrices, 0.13; by_size: the sum over their 820 numbers.
    """
    size = SIZES if by_size else (1, 1, 1, 1)
    return rates(part, SLOW + (FAST - SLOW) * size[2] / sum(size[i] for i in PARTS[part]))


def schedules() -> dict[str, Rates]:
    """The trainings of full length by name."""
    found = {PLAIN: (SLOW,) * 4}
    found |= {f"{part}, {TEN}": rates(part, FAST) for part in PARTS}
    found |= {f"{part}, {EQUAL}": equal(part) for part in ("QK", "all")}  # of one matrix it is ten times the rate
    return found


# ---- what is said ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Schedules(Result):
    """What every schedule reaches, and how fast."""

    TITLE: ClassVar[str] = "Schedules on the sticky chain"
    MEANING: ClassVar[str] = (
        "Paper II reads value updates as the M-step of an EM algorithm and concludes that they should be fast and "
        "routing slow; its evidence is that W_V at ten times the rate reaches plain descent's final loss in 0.43 of "
        "its steps. What decides is whether the same budget does more when it is spent on W_V than on anything else."
    )
    COMPUTED: ClassVar[str] = (
        "One causal attention head on one noisy sequence of 8 sticky symbols, full-batch descent, five seeds, as "
        "published. Steps: the first at which the training loss is below the one that plain descent (0.01 on all) ends "
        "with, for the same seed. Equal sum: rates of the four matrices add up to the published 0.13; equal sum by "
        "size: weighted by how many numbers a matrix has. Tuned: the free rate of each method, others at 0.01, that "
        "needs the fewest steps on two seeds that are not judged. Values in closed form: W_V minimises an upper bound "
        "of the loss with attention held fixed (a ridge regression; the ridge with the least fresh loss on those two "
        "seeds), then one plain step of the rest with values held fixed; each counts as a step. Fresh: the loss on a "
        "sequence never trained on. Ratios and intervals: Student's t over seeds, paired, on the log scale."
    )
    NULL: ClassVar[str] = "No difference: a ratio of 1. Losses: ln 8 (3 bits), uniform, and H_min = 2.639 bits."
    FAILURE_MODES: ClassVar[str] = (
        "A model of 820 numbers on 2,000 symbols, far from H_min where plain descent ends: speed is that of leaving a "
        "uniform answer. A budget is a convention; two are shown. A tuned rate is the best of a coarse grid. Five "
        "seeds. The two steps of the alternation maximise no common likelihood: in the model p = softmax(W_O' sum_j "
        "alpha_ij v_j) attention is mixed inside the exponent, and EM's responsibilities are those of another model."
    )

    train: np.ndarray = quantity(
        "method", "bits", "training loss at the end, mean over seeds", Figure("curve", interval="train_interval")
    )
    train_interval: np.ndarray = quantity("method bound", "bits", "95 % interval over seeds")
    fresh: np.ndarray = quantity(
        "method",
        "bits",
        "loss on a fresh sequence, mean over seeds",
        Figure("curve", interval="fresh_interval", beside="least"),
    )
    fresh_interval: np.ndarray = quantity("method bound", "bits", "95 % interval over seeds")
    least: np.ndarray = quantity("method", "bits", "H_min")
    steps: np.ndarray = quantity(
        "schedule",
        "steps",
        "to plain descent's final loss, mean over seeds",
        Figure("curve", interval="steps_interval"),
    )
    steps_interval: np.ndarray = quantity("schedule bound", "steps", "95 % interval over seeds")
    steps_seed: np.ndarray = quantity(
        "schedule seed", "steps", "to plain descent's final loss; one more than all: never"
    )
    loss: np.ndarray = quantity("method step", "bits", "training loss at every fiftieth step, mean over seeds")

    estimates: tuple[Estimate, ...]
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    ticks: Mapping[str, tuple] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One method: its rates, steps to plain descent's final loss by seed, and the losses at the end in bits, [seed];
    empty where it was stopped on its arrival."""

    name: str
    rates: tuple[float, ...]
    steps: tuple[int, ...]
    train: tuple[float, ...] = ()
    fresh: tuple[float, ...] = ()


def table(rows: Sequence[Row]) -> list[str]:
    """The methods, for a terminal."""
    floor = bits(least())
    head = ("rates Q K V O", "steps", "by seed", "train bits", "fresh bits", "fresh - H_min")
    cells = [
        (
            row.name,
            " ".join(f"{rate:.3g}" for rate in row.rates),
            f"{np.mean(row.steps):.0f}",
            " ".join(map(str, row.steps)),
            *([f"{np.mean(x):.4f}" for x in (row.train, row.fresh)] if row.train else ["", ""]),
            f"{np.mean(row.fresh) - floor:+.4f}" if row.fresh else "",
        )
        for row in rows
    ]
    said = f"steps to plain descent's final loss; losses after all steps; H_min {floor:.4f} bits, uniform 3"
    return [said, *grid("method", head, cells)]


# ---- the whole -------------------------------------------------------------------------------------------------------


def planned(asked: RunConfig, tests: Sequence[Check]) -> list[str]:
    """The cells that a run would train."""
    shape = SHAPES[asked.quick]
    return [
        f"sticky chain: one head of {sum(SIZES)} numbers, {shape['length']} symbols, {shape['steps']} steps, "
        f"{len(SEEDS)} seeds of {len(schedules()) + 8} methods, and tuning on {len(TUNING)} others",
        *(f"{test.measure}: {', '.join(test.of.values())}" for test in tests if test.measure in ("law", "settles")),
    ]  # fmt: skip


def benches(asked: RunConfig, tests: Sequence[Check], out: Path, progress: Progress | None = None) -> Iterator[Chain]:
    """Train what is not yet trained of the chain; one bench."""
    rows, ran, chosen = chained(SHAPES[asked.quick], out / "cells", progress)
    yield Chain(rows, _result(rows, ran, chosen).lowered(), asked.quick, out, progress)


@dataclass(frozen=True)
class Chain(Bench):
    """The methods on the sticky chain, and where small tunnels are trained."""

    rows: tuple[Row, ...]
    schedules: Measured
    quick: bool
    out: Path
    progress: Progress | None = None
    label: str = "paper2"

    def sections(self) -> Mapping[str, Measured]:
        return {"schedules": self.schedules}

    def lines(self) -> list[str]:
        return table(self.rows)

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)


def chained(
    shape: Mapping[str, int], folder: Path, progress: Progress | None = None
) -> tuple[tuple[Row, ...], dict[Any, dict[str, Any]], dict[str, float]]:
    """Every method by seed; the losses of each training; and what was chosen on the tuning seeds."""
    folder.mkdir(parents=True, exist_ok=True)
    steps = shape["steps"]

    def run(each: Mapping[Any, Cell], stage: str) -> dict[Any, dict[str, Any]]:
        found = {}
        for i, (name, cell) in enumerate(each.items()):
            found[name] = _held(folder / f"{digest(asdict(cell))[:16]}.json", cell)
            if progress:
                progress(stage, i + 1, len(each))
        return found

    named = schedules()
    whole = {(name, seed): Cell(rate, seed, **shape) for name, rate in named.items() for seed in SEEDS}
    ran = run(whole, "schedules")
    quarter = {**shape, "steps": steps // 4}
    ridges = run(
        {(ridge, seed): Cell((SLOW,) * 4, seed, **quarter, ridge=ridge) for ridge in RIDGES for seed in TUNING}, "ridge"
    )
    ridge = min(RIDGES, key=lambda r: sum(_fresh(ridges[r, seed]) for seed in TUNING))
    ran |= run({(ALTERNATING, seed): Cell((SLOW,) * 4, seed, **shape, ridge=ridge) for seed in SEEDS}, ALTERNATING)
    ends = {seed: ran[PLAIN, seed]["losses"][-1] for seed in SEEDS}
    ends |= {
        seed: one["losses"][-1]
        for seed, one in run({s: Cell((SLOW,) * 4, s, **shape) for s in TUNING}, "plain descent, tuning seeds").items()
    }
    tried = run(
        {
            (part, multiple, seed): Cell(rates(part, SLOW * multiple), seed, **quarter, until=ends[seed])
            for part in PARTS
            for multiple in MULTIPLES
            for seed in TUNING
        },
        "tuning",
    )
    best = {
        part: min(MULTIPLES, key=lambda m: sum(_reached(tried[part, m, s], ends[s], steps) for s in TUNING))
        for part in PARTS
    }
    short = {f"{part}, {WEIGHED}": equal(part, by_size=True) for part in PARTS if part != "V"}
    short |= {f"{part}, {TUNED}": rates(part, SLOW * best[part]) for part in PARTS}
    ran |= run(
        {(name, seed): Cell(rate, seed, **shape, until=ends[seed]) for name, rate in short.items() for seed in SEEDS},
        "equal budgets and tuned rates",
    )
    rows = tuple(
        Row(
            name,
            rate,
            tuple(_reached(ran[name, seed], ends[seed], steps) for seed in SEEDS),
            *([()] * 2 if name in short else _ends(ran, name)),
        )
        for name, rate in {**named, ALTERNATING: (SLOW, SLOW, 0.0, SLOW), **short}.items()
    )
    chosen = {f"rate of {part}": SLOW * multiple for part, multiple in best.items()} | {"ridge": ridge}
    return rows, ran, chosen


def _held(path: Path, cell: Cell) -> dict[str, Any]:
    """A finished cell is read, another trained and kept."""
    with contextlib.suppress(OSError, ValueError):  # a damaged one is trained again
        found = json.loads(path.read_text())
        if isinstance(found, dict) and "finite" in found:
            return found
    found = trained(cell)
    write_whole(path, json.dumps(found).encode())
    return found


def _reached(one: Mapping[str, Any], end: float, steps: int) -> int:
    """The first step with a loss of at most `end`; one more than all steps where there is none."""
    return next((step for step, loss in enumerate(one["losses"]) if loss <= end), steps + 1)


def _fresh(one: Mapping[str, Any]) -> float:
    """The loss on the fresh sequence; what diverged has none, and is not the least."""
    return one["fresh"] if one["finite"] else math.inf


def _ends(ran: Mapping, name: str) -> list[tuple[float, ...]]:
    """Losses at the end in bits by seed: of training, and on the fresh sequence."""
    cells = [ran[name, seed] for seed in SEEDS]
    return [tuple(bits(one["losses"][-1]) for one in cells), tuple(bits(one["fresh"]) for one in cells)]


def _result(rows: Sequence[Row], ran: Mapping, chosen: Mapping[str, float]) -> Schedules:
    whole = [row for row in rows if row.train]

    def column(get: Callable[[Row], Sequence[float]], of: Sequence[Row]) -> dict[str, np.ndarray]:
        values = np.array([get(row) for row in of], float)
        return {"": values.mean(1), "_interval": mean_intervals(values)}

    columns = {
        "train": (lambda r: r.train, whole),
        "fresh": (lambda r: r.fresh, whole),
        "steps": (lambda r: r.steps, rows),
    }
    arrays = {f"{name}{end}": x for name, (get, of) in columns.items() for end, x in column(get, of).items()}
    curves = [[ran[row.name, seed]["losses"][::50] for seed in SEEDS] for row in whole]
    return Schedules(
        **arrays,
        least=np.full(len(whole), bits(least())),
        steps_seed=np.array([row.steps for row in rows], float),
        loss=bits(np.array(curves).mean(1)),
        estimates=(),
        notes=tuple(f"chosen on seeds {TUNING}: {what} {value:g}" for what, value in chosen.items()),
        warnings=tuple(
            f"{row.name}: {sum(s > max(rows[0].steps) for s in row.steps)} of {len(row.steps)} seeds did not arrive"
            for row in rows
            if max(row.steps) > max(rows[0].steps)
        ),
        ticks={
            "method": tuple(row.name for row in whole),
            "schedule": tuple(row.name for row in rows),
            "seed": SEEDS,
        },
    )


# ---- measures --------------------------------------------------------------------------------------------------------


def speed(bench: Chain, test: Check, method: str, controls: Sequence[str]) -> Estimate:
    """How many times fewer steps a method needs than each control, seed by seed; who leaves it least decides."""
    under, made = bench.row(method).steps, []
    for name in controls:
        over = bench.row(name).steps
        least = WHOLE / min(*under, *over)
        made.append(over_seeds(np.divide(over, under), test.unit, "log", (f"no difference from {name}", 1.0), least))
    return min(made, key=lambda h: h.low)


def steps(bench: Chain, test: Check, method: str) -> Estimate:
    """Steps to plain descent's final loss."""
    return over_seeds(bench.row(method).steps, test.unit, least=WHOLE)


def fall(bench: Chain, test: Check, method: str) -> Estimate:
    """How much of the way from a uniform answer to H_min the loss on a fresh sequence has gone."""
    return over_seeds([(3 - x) / (3 - bits(least())) for x in bench.row(method).fresh], test.unit)


def law(bench: Chain, test: Check, arch: str, metric: str) -> Estimate:
    """A metric of the gradient law in a small trained tunnel."""
    spec = paper1.training("quick", "bijection", arch)
    told = sweep({f"law/{arch}": spec}, bench.out / "tunnels", 200, bench.progress, "tunnels of the law")
    if why := told[f"law/{arch}"].get("refused"):
        raise UserError(why)
    folder = bench.out / "tunnels/law" / arch
    if not (folder / "scan/record.json").exists():
        batch = wind_tunnels.load_task(spec.task).truncated(200, 0, "held-out")
        run_probes(Subject.load(str(folder)), batch, {NAME: routing_law}).save(folder / "scan")
    return _estimate(Record.load(folder / "scan"), NAME, metric)


def settles(bench: Chain, test: Check, section: str, metric: str) -> Estimate:
    """A metric of `llmgeom dynamics` on the bijection: five trainings, and five on random targets."""
    folder = bench.out / "dynamics"
    if not (folder / "record.json").exists():
        asked = dynamics.RunConfig(task="bijection", quick=bench.quick, probes=(), out=str(folder))
        dynamics.perform(asked, bench.progress)
    return _estimate(Record.load(folder), section, metric)


def _estimate(record: Record, section: str, name: str) -> Estimate:
    if section in record.unmeasured:
        raise UserError(record.unmeasured[section])
    measured = record.results[section]
    found = next((h for h in measured.estimates if h.name == name), None)
    if found is None:
        raise UserError(f"it has no '{name}': {'; '.join((*measured.notes, *measured.warnings))}")
    return found


Chain.MEASURES = {one.__name__: one for one in (speed, steps, fall, law, settles)}
