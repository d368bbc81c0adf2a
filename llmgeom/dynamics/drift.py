"""When do attention and values stop moving in training? Drifts from the final weights, by one functional for both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llmgeom.batch import Batch
from llmgeom.errors import UserError
from llmgeom.model.capture import Site
from llmgeom.model.passes import Observer, Step
from llmgeom.model.subject import Subject
from llmgeom.probes.posterior.answers import score_model
from llmgeom.stats.information import bits, kl
from llmgeom.stats.similarity import cka
from llmgeom.task import Task

LEVEL = 0.05  # of its initial value: what is left of a curve that has settled
TINY = 1e-9  # a drift that is only rounding
SEEDS = 5  # training runs, the fewest over which an interval is worth a verdict


@dataclass(frozen=True)
class State:
    """What is kept of one snapshot.

    attention   one a layer, [row head key]: softmax weights of every query asked, 0 beyond it.
    value       one a layer, [row kv_head head_dim]: the values at every position, as attention reads them.
    log_probs   [row outcome], nats: answers at the final token of each prompt; None in a tunnel.
    kl          bits, KL(exact || model), mean over queries; None where no exact answer is known.
    loss        nats a token of the prompts themselves; None in a tunnel.
    """

    attention: tuple[np.ndarray, ...]
    value: tuple[np.ndarray, ...]
    log_probs: np.ndarray | None = None
    kl: float | None = None
    loss: float | None = None


def state(subject: Subject, batch: Batch, task: Task | None, store: str | None = None) -> State:
    """Of a tunnel's batch the attention at its queries; of prompts, at every position, since all were trained on."""
    observers = [Observer("loss", _losses, version="1", row_bytes=4)] if task is None else []
    found = subject.capture(batch, {Site.ATTENTION, Site.VALUE}, positions="all", store=store, observers=observers)
    asked = slice(None) if batch.query is None else batch.query[found.prompt, found.position]
    rows = tuple(layer[asked].float().numpy() for layer in found.layers(Site.ATTENTION))
    values = tuple(layer.float().numpy() for layer in found.layers(Site.VALUE))
    if task is not None:
        return State(rows, values, kl=float(score_model(subject, task, batch).kl[:, : task.trained_queries].mean()))
    inner = (found.position < subject.tokens(batch).lengths[found.prompt] - 1).numpy()
    loss = float(found.observed("loss.nats").double().numpy()[inner].mean())
    return State(rows, values, subject.capture(batch, {Site.LOG_PROBS}).log_probs.numpy(), loss=loss)


def _losses(step: Step) -> dict[str, Tensor]:
    """[row] nats of the token that follows each position; 0 after the last."""
    last = step.position == step.lengths[step.prompt] - 1
    following = step.tokens[step.prompt, torch.where(last, step.position, step.position + 1)]
    nats = -step.log_probs.gather(1, following[:, None].to(step.log_probs.device))[:, 0]
    return {"nats": nats.masked_fill(last, 0.0)}


@dataclass(frozen=True)
class Drifts:
    """Curves over the snapshots of one run, each against the last of them.

    frame      F(t) = 1 - CKA(attention_t, attention_T), mean over layers and heads; features: the weight on each key.
    value      V(t), the same functional of the values, mean over layers and key-value heads.
    tv         mean total variation between attention_t and attention_T over layers, heads and rows.
    precision  P(t) in bits: KL(exact || model_t) in a tunnel, else KL(model_T || model_t), at which it ends in 0.
    """

    frame: np.ndarray
    value: np.ndarray
    tv: np.ndarray
    precision: np.ndarray


def drifts(states: Sequence[State]) -> Drifts:
    """Of snapshots in order; the last is the reference."""
    last = states[-1]
    exact = [one.kl for one in states if one.kl is not None]
    said = [one.log_probs for one in states if one.log_probs is not None]

    def apart(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float:
        each = [1 - cka(a[:, head], b[:, head]) for a, b in zip(one, other, strict=True) for head in range(a.shape[1])]
        return float(np.mean(each))

    def from_last(log_probs: np.ndarray) -> float:
        return float(bits(kl(said[-1].astype(np.float64), log_probs.astype(np.float64))).mean())

    return Drifts(
        frame=np.array([apart(one.attention, last.attention) for one in states]),
        value=np.array([apart(one.value, last.value) for one in states]),
        tv=np.array(
            [
                np.mean([np.abs(a - b).sum(-1).mean() / 2 for a, b in zip(one.attention, last.attention, strict=True)])
                for one in states
            ]
        ),
        precision=np.array(exact or [from_last(one) for one in said]),
    )


@dataclass(frozen=True)
class Settled:
    """Where a curve has settled: the step, and whether that step is `pinned` by the end of the run.

    Pinned: the curve crosses between the last two snapshots, or not at all (then step is the last). A curve that is
    compared with its own end always crosses, so that such a step says how long the run was.
    """

    step: float
    pinned: bool


def settled(steps: Sequence[int], curve: np.ndarray, level: float = LEVEL, whole: float | None = None) -> Settled:
    """The first step from which on the curve stays at or below `level` of `whole`, its first value unless given.

    Between two snapshots the curve is taken as straight in log(1 + step). UserError where `whole` is not above 0:
    there is nothing to fall.
    """
    whole = float(curve[0]) if whole is None else whole
    if not whole > TINY:
        raise UserError(f"a curve over training begins at {whole:.2g}; there is nothing to fall from")
    over = int(np.flatnonzero(curve > level * whole)[-1])
    if over == len(curve) - 1:
        return Settled(float(steps[-1]), True)
    x, (above, below) = np.log1p(steps), curve[over : over + 2]
    part = (above - level * whole) / (above - below)
    return Settled(float(np.expm1(x[over] + part * (x[over + 1] - x[over]))), over == len(curve) - 2)


def fallen(precision: np.ndarray) -> np.ndarray:
    """What is left of the fall of log P, 1 at the first snapshot and 0 at the last: (log P_t - log P_T) / (log P_0 -
    log P_T). Raises UserError where precision does not fall, or ends in 0."""
    if not 0 < precision[-1] < precision[0]:
        raise UserError(f"log P does not fall: P goes from {precision[0]:.3g} to {precision[-1]:.3g} bits")
    logs = np.log(precision)
    return (logs - logs[-1]) / (logs[0] - logs[-1])


@dataclass(frozen=True)
class Ratio:
    """Of two settling steps: how many times the second the first is; below 1 the first settles first.

    open   neither curve settles before the run's last two snapshots, so that the ratio says nothing.
    """

    value: float
    open: bool

    @classmethod
    def of(cls, first: Settled, second: Settled) -> Ratio:
        return cls(first.step / second.step, first.pinned and second.pinned)
