"""Distance of attention, values and answers from the end of training, and the step at which a curve has settled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llmgeom.batch import Batch
from llmgeom.errors import UserError
from llmgeom.model.capture import Capture, Site
from llmgeom.model.model import Model
from llmgeom.model.passes import Observer, Step
from llmgeom.probes.posterior.grading import score_model
from llmgeom.stats.information import bits, kl
from llmgeom.stats.similarity import cka
from llmgeom.world import World

LEVEL = 0.05  # a curve has settled below this fraction of its first value
TINY = 1e-9  # a smaller drift is rounding
FARTHEST = 1e6  # the largest ratio of two steps that is told from a larger one


@dataclass(frozen=True)
class State:
    """The arrays of one snapshot from which its distances are computed.

    Attributes:
        attention: by layer, [row head key]: softmax weights of every query, 0 on later keys.
        value: by layer, [row kv_head head_dim]: values at every position, as attention reads them.
        log_probs: [row outcome] nats: answers at the final token of each prompt; None in a wind tunnel.
        kl: KL(exact || model) in bits, mean over queries; None if no exact answer is known.
        loss: nats per token of the prompts themselves; None in a wind tunnel.
    """

    attention: tuple[np.ndarray, ...]
    value: tuple[np.ndarray, ...]
    log_probs: np.ndarray | None = None
    kl: float | None = None
    loss: float | None = None


def state(subject: Model, batch: Batch, task: World | None, store: str | None = None) -> State:
    """Capture one snapshot: attention at the queries of a wind tunnel, or at every position of prompts.

    A language model was trained to predict at every position of a prompt; a wind tunnel at its queries only. Raises
    Unavailable: the model has no attention.
    """
    observers = [LOSS] if task is None else []
    capture = subject.capture(batch, {Site.ATTENTION, Site.VALUE}, positions="all", store=store, observers=observers)
    queried = slice(None) if batch.query is None else batch.query[capture.prompt, capture.position]
    rows = tuple(layer[queried].float().numpy() for layer in capture.layers(Site.ATTENTION))
    values = tuple(layer.float().numpy() for layer in capture.layers(Site.VALUE))
    if task is not None:
        return State(rows, values, kl=float(score_model(subject, task, batch).kl[:, : task.trained_queries].mean()))
    log_probs = subject.capture(batch, {Site.LOG_PROBS}).log_probs.numpy()
    return State(rows, values, log_probs, loss=_mean_loss(capture))


def loss_of(subject: Model, batch: Batch, store: str | None = None) -> float:
    """`State.loss` by itself, for a model whose state cannot be captured."""
    return _mean_loss(subject.capture(batch, (), positions="all", store=store, observers=[LOSS]))


def _losses(step: Step) -> dict[str, Tensor]:
    """[row] nats of the token that follows each position; 0 after the last."""
    last = step.position == step.lengths[step.prompt] - 1
    following = step.tokens[step.prompt, torch.where(last, step.position, step.position + 1)]
    device = step.log_probs.device
    nats = -step.log_probs.gather(1, following[:, None].to(device))[:, 0]
    return {"nats": nats.masked_fill(last.to(device), 0.0)}


LOSS = Observer("loss", _losses, version="1", row_bytes=4)


def _mean_loss(capture: Capture) -> float:
    """Mean of the nats that LOSS observed, over all positions but the last of each prompt."""
    inner = (capture.position < capture.lengths[capture.prompt] - 1).numpy()
    return float(capture.observed("loss.nats").double().numpy()[inner].mean())


def distances(now: State, last: State) -> dict[str, float | str]:
    """How far a snapshot is from the last of its run, or why that is not known: all that is kept of it.

    frame, value: 1 - CKA of attention (features: the weight on each key) and of values, mean over layers and heads. tv:
    mean total variation of attention over layers, heads and rows. precision, in bits: KL(exact || model) in a wind
    tunnel; else KL(last snapshot || this one), which ends at 0.
    """
    found: dict[str, float | str] = {}
    for name, what, ours, theirs in (
        ("frame", "attention", now.attention, last.attention),
        ("value", "values", now.value, last.value),
    ):
        by_head = []
        for layer, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            for head in range(a.shape[1]):
                try:
                    by_head.append(1 - cka(a[:, head], b[:, head]))
                except UserError as refusal:
                    found.setdefault(name, f"{what} of layer {layer}, head {head}: {refusal}")
        found.setdefault(name, float(np.mean(by_head)))
    pairs = zip(now.attention, last.attention, strict=True)
    found["tv"] = float(np.mean([np.abs(a - b).sum(-1).mean() / 2 for a, b in pairs]))
    if now.kl is not None:
        found["precision"] = now.kl
    elif now.log_probs is not None and last.log_probs is not None:
        both = (x.astype(np.float64) for x in (last.log_probs, now.log_probs))
        found["precision"] = float(bits(kl(*both)).mean())
    return found


@dataclass(frozen=True)
class Settled:
    """The step at which a curve has settled.

    Attributes:
        step: interpolated between two snapshots; the last step where the curve never crosses.
        first, last: the earliest and the latest step at which it may have settled: two snapshots are read, and none
            between them. The last is infinite where the curve crosses between the last two snapshots, or never: a curve
            that is compared with its own end always crosses, so such a step says only how long the run was.
    """

    step: float
    first: float
    last: float

    @property
    def censored(self) -> bool:
        """Whether the end of the run sets the step."""
        return math.isinf(self.last)

    def over(self, other: Settled) -> tuple[float, float, float]:
        """The ratio of the two steps, below 1 if this curve settles first; the least and the largest that the snapshots
        allow, cut to FARTHEST and its inverse."""
        low, high = self.first / other.last, self.last / other.first
        return self.step / other.step, max(low, 1 / FARTHEST), min(high, FARTHEST)


def settled(steps: Sequence[int], curve: np.ndarray, level: float = LEVEL, whole: float | None = None) -> Settled:
    """The first step after which the curve stays at or below `level` times `whole`, by default its first value.

    Between two snapshots the curve is linear in log(1 + step). Raises UserError: `whole` is not above 0, so the curve
    cannot fall.
    """
    whole = float(curve[0]) if whole is None else whole
    if not whole > TINY:
        raise UserError(f"a curve over training begins at {whole:.2g}; there is nothing to fall from")
    over = int(np.flatnonzero(curve > level * whole)[-1])
    if over == len(curve) - 1:
        return Settled(float(steps[-1]), steps[-1], math.inf)
    x, (above, below) = np.log1p(steps), curve[over : over + 2]
    part = (above - level * whole) / (above - below)
    step = float(np.expm1(x[over] + part * (x[over + 1] - x[over])))
    return Settled(step, steps[over] + 1, math.inf if over == len(curve) - 2 else steps[over + 1])


def fallen(precision: np.ndarray) -> np.ndarray:
    """The remaining part of the fall of log P: (log P_t - log P_T) / (log P_0 - log P_T), from 1 to 0.

    Raises UserError: precision does not fall, or ends at 0.
    """
    if not 0 < precision[-1] < precision[0]:
        raise UserError(f"log P does not fall: P goes from {precision[0]:.3g} to {precision[-1]:.3g} bits")
    logs = np.log(precision)
    return (logs - logs[-1]) / (logs[0] - logs[-1])
