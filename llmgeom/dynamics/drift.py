"""Distance of attention, values and answers from the end of training, and the step at which a curve has settled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from llmgeom.batch import Batch
from llmgeom.errors import UserError
from llmgeom.model.capture import Capture, Site
from llmgeom.model.passes import Observer, Step
from llmgeom.model.subject import Subject
from llmgeom.probes.posterior.answers import score_model
from llmgeom.stats.information import bits, kl
from llmgeom.stats.similarity import cka
from llmgeom.task import Task

LEVEL = 0.05  # a curve has settled below this fraction of its first value
TINY = 1e-9  # a smaller drift is rounding


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


def state(subject: Subject, batch: Batch, task: Task | None, store: str | None = None) -> State:
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


def loss_of(subject: Subject, batch: Batch, store: str | None = None) -> float:
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


@dataclass(frozen=True)
class Distances:
    """How far one snapshot is from the last of its run: all that is kept of it once its `State` is freed.

    Attributes:
        values: curve of `Drifts` -> its value at this snapshot.
        undefined: curve -> (the head without CKA, why).
    """

    values: Mapping[str, float]
    undefined: Mapping[str, tuple[str, str]]


def distances(state: State, last: State) -> Distances:
    """Distances of a snapshot from the last of its run, which may be the snapshot itself."""
    values: dict[str, float] = {}
    undefined: dict[str, tuple[str, str]] = {}
    for name, what, now, end in (
        ("frame", "attention", state.attention, last.attention),
        ("value", "values", state.value, last.value),
    ):
        by_head = []
        for layer, (a, b) in enumerate(zip(now, end, strict=True)):
            for head in range(a.shape[1]):
                try:
                    by_head.append(1 - cka(a[:, head], b[:, head]))
                except UserError as refusal:
                    undefined.setdefault(name, (f"{what} of layer {layer}, head {head}", str(refusal)))
        values |= {} if name in undefined else {name: float(np.mean(by_head))}
    pairs = zip(state.attention, last.attention, strict=True)
    values["tv"] = float(np.mean([np.abs(a - b).sum(-1).mean() / 2 for a, b in pairs]))
    if state.kl is not None:
        values["precision"] = state.kl
    elif state.log_probs is not None and last.log_probs is not None:
        values["precision"] = _from_last(state.log_probs, last.log_probs)
    return Distances(values, undefined)


def _from_last(log_probs: np.ndarray, last: np.ndarray) -> float:
    """KL(last snapshot || this one) in bits, mean over prompts."""
    return float(bits(kl(last.astype(np.float64), log_probs.astype(np.float64))).mean())


@dataclass(frozen=True)
class Drifts:
    """Curves over the snapshots t of one run; the last snapshot T is the reference.

    Attributes:
        frame: F(t) = 1 - CKA(attention_t, attention_T), mean over layers and heads; features: the weight on each key.
        value: V(t) = 1 - CKA(value_t, value_T), mean over layers and key-value heads.
        tv: mean total variation between attention_t and attention_T over layers, heads and rows.
        precision: P(t) in bits: KL(exact || model_t) in a wind tunnel; else KL(model_T || model_t), which ends at 0.
        missing: curve -> why it has no CKA at some snapshot; its array is empty.
    """

    frame: np.ndarray
    value: np.ndarray
    tv: np.ndarray
    precision: np.ndarray
    missing: Mapping[str, str] = field(default_factory=dict)


def drifts(snapshots: Sequence[Distances]) -> Drifts:
    """The curves of a run, from the distances of its snapshots in order."""
    missing: dict[str, str] = {}
    for place, snapshot in enumerate(snapshots, 1):
        for name, (head, why) in snapshot.undefined.items():
            missing.setdefault(name, f"{head}, snapshot {place} of {len(snapshots)} and the last: {why}")

    def curve(name: str) -> np.ndarray:
        return np.array([] if name in missing else [snapshot.values[name] for snapshot in snapshots])

    return Drifts(curve("frame"), curve("value"), curve("tv"), curve("precision"), missing)


@dataclass(frozen=True)
class Settled:
    """The step at which a curve has settled.

    Attributes:
        censored: whether the step is right-censored: the curve crosses between the last two snapshots, or never (then
            `step` is the last). A curve that is compared with its own end always crosses, so such a step says only
            how long the run was.
        between: the first and the last step at which the curve may have settled: two snapshots are read, and none
            between them.
    """

    step: float
    censored: bool
    between: tuple[int, int]


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
        return Settled(float(steps[-1]), True, (steps[-1], steps[-1]))
    x, (above, below) = np.log1p(steps), curve[over : over + 2]
    part = (above - level * whole) / (above - below)
    step = float(np.expm1(x[over] + part * (x[over + 1] - x[over])))
    return Settled(step, over == len(curve) - 2, (steps[over] + 1, steps[over + 1]))


def fallen(precision: np.ndarray) -> np.ndarray:
    """The remaining part of the fall of log P: (log P_t - log P_T) / (log P_0 - log P_T), from 1 to 0.

    Raises UserError: precision does not fall, or ends at 0.
    """
    if not 0 < precision[-1] < precision[0]:
        raise UserError(f"log P does not fall: P goes from {precision[0]:.3g} to {precision[-1]:.3g} bits")
    logs = np.log(precision)
    return (logs - logs[-1]) / (logs[0] - logs[-1])


Bound = Literal["", "least", "most", "open"]


@dataclass(frozen=True)
class Ratio:
    """The first of two settling steps over the second; below 1 the first curve settles first.

    Attributes:
        bound: what a right-censored step makes of the ratio. least: the first is censored, so a longer run gives this
            ratio or a larger one. most: the second is, so it gives this ratio or a smaller one. open: both are, so the
            ratio says nothing.
        ends: the least and the largest ratio that the snapshots allow: the interpolated one follows what is left of
            each curve at the snapshots around its crossing. None for a ratio that is not one of steps.
        unordered: whether both curves cross between the same two snapshots: which of them does so first was not seen.
    """

    value: float
    bound: Bound = ""
    ends: tuple[float, float] | None = None
    unordered: bool = False

    @classmethod
    def of(cls, first: Settled, second: Settled) -> Ratio:
        bounds: dict[tuple[bool, bool], Bound] = {(True, True): "open", (True, False): "least", (False, True): "most"}
        bound = bounds.get((first.censored, second.censored), "")
        ends = (first.between[0] / second.between[1], first.between[1] / second.between[0])
        return cls(first.step / second.step, bound, ends, first.between == second.between)

    def at(self, end: Literal[0, 1]) -> Ratio:
        """The ratio at its least (0) or its largest (1) value; the same where it is not one of steps."""
        return replace(self, value=self.ends[end]) if self.ends else self
