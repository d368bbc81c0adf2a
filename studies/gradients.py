"""Gradients of the loss with respect to attention: scores, values, queries and keys, head by head.

Paper II section 5.1. For a query i and the keys j that it sees, in one head,

    s_ij = scale q_i . k_j,   alpha_ij = softmax_j(s_ij),   z_i = sum_j alpha_ij v_j,

with the loss L, the gradient u_i = dL/dz_i at the head's output, b_ij = u_i . v_j and the mean
E_i b = sum_j alpha_ij b_ij = u_i . z_i:

    dL/ds_ij = alpha_ij (b_ij - E_i b)          dL/dv_j = sum_i alpha_ij u_i
    dL/dq_i  = scale sum_j (dL/ds_ij) k_j       dL/dk_j = scale sum_i (dL/ds_ij) q_i

A_ij = -(b_ij - E_i b) is the advantage: descent on the scores raises s_ij where it is positive. Derived here for cases
that the paper does not treat: queries that share a key and value head add up in dL/dk and dL/dv; if scores are capped,
c tanh(s / c), dL/ds has the factor 1 - tanh(s / c)^2; a learned sink is one more key whose value is 0, so the weights
of a row sum to less than 1 and its score gradients to E_i b times the sink's weight, which the sink's own gradient
balances. Queries and keys are those of attention, after rotary embedding and norms. All in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from llmgeom.batch import Batch, Rows, Tokens
from llmgeom.dynamics.gradients import Attended, agreed, counted, doubled, forward, losses, require_attention, targets
from llmgeom.errors import Unavailable
from llmgeom.model.attention import Recorder, recording
from llmgeom.model.model import Model
from studies.unrolled import Gradients, Unrolled, scan_of

DECREASE = 1e-4  # target decrease of the loss by a step: small enough for a derivative, far above rounding


@dataclass(frozen=True, eq=False)
class Mixing:
    """The mixing of values in one layer, and the gradient of the loss with respect to it; float64.

    Attributes:
        weight: alpha_ij, or w_ij of an unrolled scan; 0 if i does not see j.
        score: s_ij, before a cap; for a scan log|w_ij|.
        u, b: dL/dz_i and b_ij.
        seen: the pairs that count: i sees j, i is a real position, and the loss depends on z_i.
        law, autograd: the gradients by the formulas and by automatic differentiation.
        scan: whether the weights belong to a scan: they have signs and do not sum to 1 (studies/unrolled.py).
    """

    weight: Float[Tensor, "batch head query key"]
    score: Float[Tensor, "batch head query key"]
    u: Float[Tensor, "batch head query head_dim"]
    b: Float[Tensor, "batch head query key"]
    seen: Bool[Tensor, "batch head query key"]
    law: Gradients
    autograd: Gradients
    scan: bool = False

    @property
    def share(self) -> Float[Tensor, "batch head query key"]:
        """|weight_ij| over its sum along the row; for attention without a sink alpha_ij itself."""
        return shares(self.weight)

    @property
    def worth(self) -> Float[Tensor, "batch head query key"]:
        """Gain in loss per unit of share on key j: b_ij; for a scan f_ij = g_i sign(w_ij) b_ij."""
        return self.b * self.weight.sign() * self.weight.abs().sum(-1, keepdim=True) if self.scan else self.b

    @property
    def advantage(self) -> Float[Tensor, "batch head query key"]:
        """A_ij = E_i b - b_ij, for a scan E_i f - f_ij; 0 if the pair does not count."""
        of = self.share if self.scan else self.weight
        return ((of * self.worth).sum(-1, keepdim=True) - self.worth).masked_fill(~self.seen, 0)

    @property
    def errors(self) -> Mapping[str, Float[Tensor, " head"]]:
        """Largest |law - autograd| of each head over the largest |autograd| of the layer, by kind of gradient."""
        found = {}
        for field in fields(self.law):
            ours, theirs = (getattr(gradients, field.name) for gradients in (self.law, self.autograd))
            largest = theirs.abs().max().clamp_min(torch.finfo(theirs.dtype).tiny)
            found[field.name] = (ours - theirs).abs().amax((0, 2, 3)) / largest
        return found


@dataclass(frozen=True, eq=False)
class Routing:
    """One forward and backward pass: the loss in nats, mean over the queries, and every layer's mixing."""

    loss: float
    queries: int
    layers: tuple[Mixing, ...]


def scans(subject: Model) -> bool:
    """Whether the module mixes positions by a selective scan."""
    mixed = getattr(subject.model, "without_attention", "")  # a wind tunnel's: transformers' Mamba has another layout
    return bool(mixed) and subject.facts["model_type"] in ("mamba2", "mamba")


def shares(weight: Float[Tensor, "*row key"]) -> Float[Tensor, "*row key"]:
    """|weight| over its sum along the row; 0 if the sum is 0."""
    size = weight.abs()
    return size / size.sum(-1, keepdim=True).clamp_min(torch.finfo(size.dtype).tiny)


def law(layer: Attended, u: Tensor) -> Gradients:
    """The formulas of this module for attention."""
    shared = layer.query.shape[1] // layer.key.shape[1]
    key, value = (x.repeat_interleave(shared, 1) for x in (layer.key, layer.value))

    def over_group(x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, shared)).sum(2)

    b = u @ value.mT
    score = layer.weight * (b - (layer.weight * b).sum(-1, keepdim=True))
    if layer.softcap:
        score = score * (1 - (layer.score / layer.softcap).tanh().square())
    return Gradients(
        score=score,
        value=over_group(layer.weight.mT @ u),
        query=layer.scale * score @ key,
        key=over_group(layer.scale * score.mT @ layer.query),
    )


def _prepared(subject: Model, batch: Batch) -> tuple[Model, Tokens | Rows, Tensor, Tensor]:
    """The float64 copy, its inputs, and their targets."""
    if not scans(subject):
        require_attention(subject)
    subject = doubled(subject)
    inputs = subject.tokens(batch)
    return subject, inputs, *targets(batch, inputs)


def _forward(
    subject: Model, inputs: Tokens | Rows, where: Tensor, target: Tensor, compare: bool = True
) -> tuple[list[Attended] | list[Unrolled], Tensor]:
    """`gradients.forward`; for a scan, with explicit weights in its place."""
    if not scans(subject):
        return forward(subject, inputs, where, target, compare)
    found: list[Unrolled] = []
    asked = (subject.blocks, where.nonzero(as_tuple=True), frozenset(), (), (torch.arange(len(where)), where))
    mixers = [block.layer.get_submodule("mixer") for block in subject.blocks]

    def logits() -> Tensor:
        with recording(Recorder(*asked), subject.blocks, subject.model.get_output_embeddings()):
            return subject.forward.logits(inputs.data)

    with torch.no_grad():
        usual = logits() if compare else None
    for mixer in mixers:
        mixer.forward = scan_of(mixer, found.append)
    try:
        written = logits()
    finally:
        for mixer in mixers:
            del mixer.forward
    apart = 0.0 if usual is None else float((written.detach() - usual).abs().max() / usual.square().mean().sqrt())
    agreed(subject, len(found), apart)
    return found, losses(written, target.to(written.device)).mean()


def routing(subject: Model, batch: Batch) -> Routing:
    """The gradients of the batch's mean loss at every head, by the law and by autograd.

    The loss is the cross-entropy in nats of the drawn outcome over the whole vocabulary (for a real number, minus its
    log density), mean over the queried positions of a task; for prompts, of every next token. Raises Unavailable:
    gradients of attention cannot be computed (`llmgeom.dynamics.gradients.doubled`), or the batch has no target.
    """
    subject, inputs, where, target = _prepared(subject, batch)
    mixed, loss = _forward(subject, inputs, where, target)
    return Routing(float(loss.detach()), len(target), _backward(mixed, loss, inputs.lengths)[0])


@dataclass(frozen=True, eq=False)
class Step:
    """One step of plain gradient descent on all parameters together, in float64.

    Attributes:
        before: the gradients of the step.
        expected, found: decrease of the loss in nats, to first order and measured; nearly equal if the step is small.
        score: change of s_ij (for a scan, of log|w_ij|), layer by layer.
        share: change of log alpha_ij (for a scan, of log pi_ij). It measures routing: a change that all keys of a row
            have in common leaves it unchanged.
    """

    before: Routing
    expected: float
    found: float
    score: tuple[Float[Tensor, "batch head query key"], ...]
    share: tuple[Float[Tensor, "batch head query key"], ...]


def step(subject: Model, batch: Batch, decrease: float = DECREASE) -> Step:
    """Take one step of gradient descent that lowers the loss, to first order, by `decrease` times min(loss, 1 nat).

    W <- W - eta dL/dW with eta = expected / |dL/dW|^2 over all parameters. Raises Unavailable as `routing` does.
    """
    subject, inputs, where, target = _prepared(subject, batch)
    mixed, loss = _forward(subject, inputs, where, target)
    parameters = list(subject.model.parameters())
    layers, gradients = _backward(mixed, loss, inputs.lengths, parameters)
    before = Routing(float(loss.detach()), len(target), layers)
    expected, size = decrease * min(1.0, abs(before.loss)), sum(float(g.square().sum()) for g in gradients)
    if size == 0:
        raise Unavailable(f"{subject.name}: the loss has no gradient on this batch; no step can be taken")
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.sub_(gradient, alpha=expected / size)
        del mixed, gradients
        after, loss = _forward(subject, inputs, where, target, compare=False)
    score, share = [], []
    for old, new in zip(before.layers, after, strict=True):
        kept = old.seen & (old.weight != 0) & (new.weight != 0)
        # A sink is a key too: attention's weights include it, shares among the tokens do not.
        one, other = (shares(w) if old.scan else w for w in (old.weight, new.weight))
        score.append((new.score - old.score).masked_fill(~kept, 0))
        share.append((other.where(kept, 1) / one.where(kept, 1)).log())
    return Step(before, expected, before.loss - float(loss), tuple(score), tuple(share))


def _backward(
    layers: Sequence[Attended | Unrolled],
    loss: Tensor,
    lengths: Int[Tensor, " batch"],
    parameters: Sequence[Tensor] = (),
) -> tuple[tuple[Mixing, ...], list[Tensor]]:
    """Gradients of every layer by autograd and by the law, and those of the parameters."""

    def wanted(layer: Attended | Unrolled) -> tuple[Tensor, ...]:
        """The tensors of the gradients, in their order; the output last."""
        if isinstance(layer, Unrolled):
            return layer.wanted
        return layer.score, layer.value, layer.query, layer.key, layer.z

    every = iter(
        torch.autograd.grad(
            loss, [*(x for layer in layers for x in wanted(layer)), *parameters], materialize_grads=True
        )
    )
    mixed = []
    for layer in layers:
        *by_autograd, u = (next(every) for _ in wanted(layer))
        with torch.no_grad():
            gradients = layer.law(u) if isinstance(layer, Unrolled) else law(layer, u)
            value = layer.value.repeat_interleave(u.shape[1] // layer.value.shape[1], 1)
            mixed.append(
                Mixing(
                    weight=layer.weight.detach(),
                    score=layer.score.detach(),
                    u=u,
                    b=u @ value.mT,
                    seen=counted(layer, u, lengths),
                    law=gradients,
                    autograd=type(gradients)(*by_autograd),
                    scan=isinstance(layer, Unrolled),
                )
            )
    return tuple(mixed), list(every)
