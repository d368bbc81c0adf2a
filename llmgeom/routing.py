"""What one gradient step asks of attention: how scores, values, queries and keys should move, head by head.

Paper II section 5.1. For a query i and the keys j that it sees, in one head,

    s_ij = scale q_i . k_j,   alpha_ij = softmax_j(s_ij),   z_i = sum_j alpha_ij v_j,

L the loss and u_i = dL/dz_i whatever back-propagates to the head's output; with b_ij = u_i . v_j and the mean
E_i b = sum_j alpha_ij b_ij = u_i . z_i

    dL/ds_ij = alpha_ij (b_ij - E_i b)          dL/dv_j = sum_i alpha_ij u_i
    dL/dq_i  = scale sum_j (dL/ds_ij) k_j       dL/dk_j = scale sum_i (dL/ds_ij) q_i

A_ij = -(b_ij - E_i b) is the advantage: descent raises s_ij where it is positive. Derived here for what the paper does not
have: queries that share a key and value head add up in dL/dk and dL/dv; where scores are capped, c tanh(s / c), dL/ds has
the factor 1 - tanh(s / c)^2; a learned sink is one more key whose value is 0, so that the weights of a row sum to less than
1 and its score gradients to E_i b times the sink's weight, which the sink's own gradient balances.

Queries and keys are those that attention consumed, after rotary embedding and norms. One forward and backward in float64.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from llmgeom.attention import Recorder, attached, recording
from llmgeom.batch import Batch, Rows, Tokens
from llmgeom.blocks import without_attention
from llmgeom.errors import Unavailable
from llmgeom.subject import Subject

LARGEST = 2_000_000_000  # parameters of which a float64 copy is made
AGREE = 1e-4  # of the rms of the logits: how far ours may lie from the model's own
ENTRIES = 2**24  # weights in memory at once, over heads and pairs of positions


@dataclass(frozen=True, eq=False)
class Gradients:
    """Of the loss in nats: by score, value, query and key, as attention consumed them."""

    score: Float[Tensor, "batch head query key"]
    value: Float[Tensor, "batch kv_head seq head_dim"]
    query: Float[Tensor, "batch head seq head_dim"]
    key: Float[Tensor, "batch kv_head seq head_dim"]


@dataclass(frozen=True, eq=False)
class Mixing:
    """How one layer mixed values, and how the loss would have it changed; float64.

    weight    alpha_ij, 0 where j is not seen.
    u, b      dL/dz_i and b_ij.
    seen      which pairs count: j is seen from i, i is a real position, and the loss depends on z_i.
    law, autograd   the gradients by the formulas and by automatic differentiation.
    """

    weight: Float[Tensor, "batch head query key"]
    u: Float[Tensor, "batch head query head_dim"]
    b: Float[Tensor, "batch head query key"]
    seen: Bool[Tensor, "batch head query key"]
    law: Gradients
    autograd: Gradients

    @property
    def advantage(self) -> Float[Tensor, "batch head query key"]:
        """A_ij = E_i b - b_ij, 0 where the pair does not count."""
        mean = (self.weight * self.b).sum(-1, keepdim=True)
        return (mean - self.b).masked_fill(~self.seen, 0)

    @property
    def spread(self) -> Float[Tensor, "batch head query"]:
        """sd of b_ij over the keys that i sees, weighted by alpha_ij; 0 where all of them would serve alike."""
        share = self.weight / self.weight.sum(-1, keepdim=True).clamp_min(torch.finfo(self.weight.dtype).tiny)
        mean = (share * self.b).sum(-1, keepdim=True)
        return (share * (self.b - mean).square()).sum(-1).sqrt()

    @property
    def errors(self) -> Mapping[str, Float[Tensor, " head"]]:
        """Largest |law - autograd| of each head over the largest |autograd| of the layer, by kind of gradient."""
        found = {}
        for field in fields(Gradients):
            ours, theirs = (getattr(gradients, field.name) for gradients in (self.law, self.autograd))
            largest = theirs.abs().max().clamp_min(torch.finfo(theirs.dtype).tiny)
            found[field.name] = (ours - theirs).abs().amax((0, 2, 3)) / largest
        return found


@dataclass(frozen=True, eq=False)
class Routing:
    """One forward and backward: the loss in nats, mean over the queries, and every layer's mixing."""

    loss: float
    queries: int
    layers: tuple[Mixing, ...]


@dataclass(frozen=True)
class Signals:
    """How strongly the loss pulls at routing and at values, [layer] each; 0 is no pull.

    Of the loss summed over the queries, in nats, so that a longer batch says the same:

    score_gradient  rms of dL/ds_ij over the pairs that count (see Mixing.seen).
    value_gradient  rms of dL/dv_j over real positions and coordinates.
    spread          mean over query rows, of at least two keys, of the sd of b_ij weighted by alpha_ij.
    loss            nats, mean over the queries.
    """

    score_gradient: np.ndarray
    value_gradient: np.ndarray
    spread: np.ndarray
    loss: float


def doubled(subject: Subject) -> Subject:
    """A copy in float64 to be differentiated; `routing` and `signals` make their own where they are not given one.

    Raises Unavailable for a model whose gradients are not had: read through TransformerLens, edited, spread over devices or
    larger than 2e9 parameters.
    """
    if type(subject) is not Subject:
        raise Unavailable(
            f"{subject.name} is read through TransformerLens, which gives no gradients: leave out --backend"
        )
    if subject.edits:
        raise Unavailable(f"{subject.name} is edited; gradients are those of the model as it is")
    if subject.facts["parameters"] > LARGEST or any(p.is_meta for p in subject.model.parameters()):
        raise Unavailable(
            f"{subject.name} has {subject.facts['parameters']:.2g} parameters; its gradients take a copy in float64, "
            f"which is made up to {LARGEST:.0e} on one device"
        )
    why = without_attention(subject.model)
    if why:
        raise Unavailable(f"{subject.name}: {why}")
    if subject.facts["dtype"] == "float64":
        return subject
    model = copy.deepcopy(subject.model).double().requires_grad_(True)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the fused product of experts knows no float64
    return Subject.of(model, subject.tokenizer, subject.name)


def routing(subject: Subject, batch: Batch) -> Routing:
    """The gradients of the batch's mean loss at every head, by the law and by autograd.

    The loss is the cross-entropy in nats of the outcome that was drawn, over the whole vocabulary (minus its log density
    where it is a real number), mean over the queried positions of a task; for prompts, that of every next token.
    Raises Unavailable where attention is not what is differentiated here (see `doubled`), or nothing is asked.
    """
    subject = doubled(subject)
    inputs = subject.tokens(batch)
    where, target = asked(batch, inputs)
    recorder, loss = _forward(subject, inputs, where, target)
    return Routing(float(loss.detach()), len(target), _backward(recorder, loss, inputs.lengths))


def signals(subject: Subject, batch: Batch) -> Signals:
    """What `routing` finds, in a few numbers a layer; in as many passes as memory asks for."""
    subject = doubled(subject)
    inputs = subject.tokens(batch)
    where, target = asked(batch, inputs)
    rows = where.sum(1).cumsum(0).tolist()
    total, loss = None, 0.0
    for part in _parts(inputs, subject.facts["heads"]):
        answers = target[slice(rows[part[0] - 1] if part[0] else 0, rows[part[-1]])]
        width = int(inputs.lengths[part].max())
        taken = type(inputs)(inputs.data[part, :width], inputs.lengths[part])
        recorder, mean = _forward(subject, taken, where[part, :width], answers)
        summed = mean * len(answers)
        loss += float(summed.detach())
        sums = np.stack([_sums(each, taken.lengths) for each in _backward(recorder, summed, taken.lengths)])
        total = sums if total is None else total + sums
    score, value, spread = (total[:, i] / total[:, i + 1].clip(1) for i in (0, 2, 4))
    return Signals(np.sqrt(score), np.sqrt(value), spread, loss / len(target))


def asked(batch: Batch, inputs: Tokens | Rows) -> tuple[Bool[Tensor, "batch seq"], Tensor]:
    """Where an answer is asked for, and what would have been right there, row by row: tokens or real numbers.

    Raises Unavailable where nothing is asked.
    """
    place = torch.arange(inputs.data.shape[1])
    real, last = place < inputs.lengths[:, None], place == inputs.lengths[:, None] - 1
    if batch.target is None or batch.posterior is None:
        if not isinstance(inputs, Tokens):
            raise Unavailable("rows of real numbers without targets ask for nothing: there is no loss to differentiate")
        where = real & ~last
        target = inputs.ids.roll(-1, 1)[where]
    else:
        where = last if batch.query is None else batch.query
        target = batch.target.flatten()[real[where]]
        where = where & real
        if batch.posterior.outcomes:
            target = torch.tensor(batch.posterior.outcomes)[target]
    if not len(target):
        raise Unavailable("no position is asked, or no prompt has a second token: there is no loss to differentiate")
    return where, target


def losses(logits: Float[Tensor, "row output"], target: Tensor) -> Float[Tensor, " row"]:
    """Nats: -log p(token); of a real number y, whose logits are mean m and log variance l,
    (log 2 pi + l + (y - m)^2 exp(-l)) / 2."""
    if not target.is_floating_point():
        return cross_entropy(logits, target, reduction="none")
    m, log_v = logits.unbind(-1)
    return (math.log(2 * math.pi) + log_v + (target.to(m.dtype) - m).square() * (-log_v).exp()) / 2


@dataclass(frozen=True, eq=False)
class Attended:
    """What one layer's attention computed, still on the graph; scores before a cap, weights without the sink."""

    query: Tensor
    key: Tensor
    value: Tensor
    score: Tensor
    weight: Tensor
    z: Tensor
    allowed: Tensor
    scale: float
    softcap: float | None

    def law(self, u: Tensor) -> Gradients:
        """The formulas of this module."""
        shared = self.query.shape[1] // self.key.shape[1]
        key, value = (x.repeat_interleave(shared, 1) for x in (self.key, self.value))

        def over_group(x: Tensor) -> Tensor:
            return x.unflatten(1, (-1, shared)).sum(2)

        b = u @ value.mT
        score = self.weight * (b - (self.weight * b).sum(-1, keepdim=True))
        if self.softcap:
            score = score * (1 - (self.score / self.softcap).tanh().square())
        return Gradients(
            score=score,
            value=over_group(self.weight.mT @ u),
            query=self.scale * score @ key,
            key=over_group(self.scale * score.mT @ self.query),
        )


class Explicit(Recorder):
    """Attention written out in float64, kept on the graph: `attended`, layer by layer."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.attended: dict[int, Attended] = {}

    def attend(self, kind: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask, **kwargs):
        scale = kwargs.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        softcap, sink = kwargs.get("softcap"), kwargs.get("s_aux")
        if query.shape[2] != key.shape[2] or module not in self.layer:
            raise Unavailable(f"{type(module).__name__} attends to more than its own sequence; its law is not known")
        given = query.dtype
        query, key, value = query.double(), key.double(), value.double()
        shared = query.shape[1] // key.shape[1]
        score = scale * query @ key.repeat_interleave(shared, 1).mT
        place = torch.arange(score.shape[-1], device=score.device)
        allowed = (place <= place[:, None])[None, None] if mask is None else mask
        capped = (softcap * (score / softcap).tanh() if softcap else score).masked_fill(~allowed, -math.inf)
        if sink is None:
            weight = capped.softmax(-1)
        else:
            beside = sink.double().view(1, -1, 1, 1).expand(*capped.shape[:3], 1)
            weight = torch.cat([capped, beside], -1).softmax(-1)[..., :-1]
        z = weight @ value.repeat_interleave(shared, 1)
        layer = self.layer[module]
        self.seen.append(layer)
        self.attended[layer] = Attended(query, key, value, score, weight, z, allowed, scale, softcap)
        return z.transpose(1, 2).to(given).contiguous()


def _forward(subject: Subject, inputs: Tokens | Rows, where: Tensor, target: Tensor) -> tuple[Explicit, Tensor]:
    """One pass through explicit attention, and its mean loss. Raises Unavailable where the model itself says another."""
    rows = where.nonzero(as_tuple=True)
    given = (subject.blocks, rows, frozenset(), (), (torch.arange(len(where)), where))
    head = subject.model.get_output_embeddings()
    recorder = Explicit(*given)
    with attached(subject.model, subject.name):
        with torch.no_grad(), recording(Recorder(*given), subject.blocks, head):
            own = subject.logits(inputs.data)
        with torch.enable_grad(), recording(recorder, subject.blocks, head):
            logits = subject.logits(inputs.data)
    apart = float((logits.detach() - own).abs().max() / own.square().mean().sqrt())
    if sorted(recorder.seen) != list(range(len(subject.blocks))) or not apart <= AGREE:
        raise Unavailable(
            f"{subject.name}: attention written out gives logits that lie {apart:.2g} of their rms from the model's own; "
            f"how model type {subject.facts['model_type']!r} attends is not known here"
        )
    return recorder, losses(logits, target.to(logits.device)).mean()


def _backward(recorder: Explicit, loss: Tensor, lengths: Int[Tensor, " batch"]) -> tuple[Mixing, ...]:
    """Every layer's gradients, by autograd and by the law."""
    found = [recorder.attended[layer] for layer in sorted(recorder.attended)]
    names = ("score", "value", "query", "key", "z")
    wanted = [getattr(one, name) for one in found for name in names]
    every = iter(torch.autograd.grad(loss, wanted, materialize_grads=True))
    mixed = []
    for one in found:
        *by_autograd, u = (next(every) for _ in names)
        real = torch.arange(u.shape[2]) < lengths[:, None]
        live = (u != 0).any(-1) & real[:, None].to(u.device)
        with torch.no_grad():
            value = one.value.repeat_interleave(u.shape[1] // one.value.shape[1], 1)
            mixed.append(
                Mixing(
                    weight=one.weight.detach(),
                    u=u,
                    b=u @ value.mT,
                    seen=(one.allowed & live[..., None]).expand_as(one.weight),
                    law=one.law(u),
                    autograd=Gradients(*by_autograd),
                )
            )
    return tuple(mixed)


def _sums(mixing: Mixing, lengths: Tensor) -> np.ndarray:
    """Sum and count of squared score gradients, of squared value gradients, and of spreads."""
    gradient, value = mixing.autograd.score, mixing.autograd.value
    several = mixing.seen.sum(-1) > 1
    coordinates = int(lengths.sum()) * value.shape[1] * value.shape[-1]
    pairs = (
        (gradient[mixing.seen].square().sum(), mixing.seen.sum()),
        (value.square().sum(), coordinates),  # beyond a sequence's end there is no gradient
        (mixing.spread[several].sum(), several.sum()),
    )
    return np.array([float(x) for pair in pairs for x in pair])


def _parts(inputs: Tokens | Rows, heads: int) -> Iterator[Sequence[int]]:
    """Sequences that run together: as many as keep one layer's weights in bounds."""
    most = max(1, ENTRIES // (heads * inputs.data.shape[1] ** 2))
    for at in range(0, len(inputs), most):
        yield list(range(at, min(at + most, len(inputs))))
