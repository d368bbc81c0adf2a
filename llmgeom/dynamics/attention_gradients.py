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

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from llmgeom.answers import Gaussian
from llmgeom.batch import Batch, Rows, Tokens
from llmgeom.dynamics.unrolled import Gradients, Unrolled, scan_of
from llmgeom.errors import Unavailable
from llmgeom.model.attention import Recorder, attached, recording
from llmgeom.model.capture import Site
from llmgeom.model.layers import attending
from llmgeom.model.subject import Subject
from llmgeom.model.weights import whole

LARGEST = 2_000_000_000  # most parameters of a model that is copied in float64
AGREE = 1e-4  # largest distance of our logits from the model's, over their rms
DECREASE = 1e-4  # target decrease of the loss by a step: small enough for a derivative, far above rounding
CHANNELS = 2048  # weights per pair of positions in a scan, states included: those of a wide tunnel
ENTRIES = 2**24  # weights in memory at once, over heads and pairs of positions


@dataclass(frozen=True, eq=False)
class Mixing:
    """The mixing of values in one layer, and the gradient of the loss with respect to it; float64.

    Attributes:
        weight: alpha_ij, or w_ij of an unrolled scan; 0 if i does not see j.
        score: s_ij, before a cap; for a scan log|w_ij|.
        u, b: dL/dz_i and b_ij.
        seen: the pairs that count: i sees j, i is a real position, and the loss depends on z_i.
        law, autograd: the gradients by the formulas and by automatic differentiation.
        scan: whether the weights belong to a scan: they have signs and do not sum to 1 (llmgeom/dynamics/unrolled.py).
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
    def spread(self) -> Float[Tensor, "batch head query"]:
        """sd of `worth` over the keys that i sees, weighted by `share`; 0 if all keys are equally useful."""
        mean = (self.share * self.worth).sum(-1, keepdim=True)
        return (self.share * (self.worth - mean).square()).sum(-1).sqrt()

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


@dataclass(frozen=True)
class Signals:
    """Size of the loss gradient with respect to routing and to values, [layer] each.

    The loss is summed over the queries, in nats, so that the size of the batch does not matter.

    Attributes:
        score_gradient: rms of dL/ds_ij over the pairs that count (see Mixing.seen).
        value_gradient: rms of dL/dv_j over real positions and coordinates.
        spread: mean over query rows, of at least two keys, of the sd of b_ij weighted by alpha_ij.
        loss: nats, mean over the queries.
    """

    score_gradient: np.ndarray
    value_gradient: np.ndarray
    spread: np.ndarray
    loss: float


def doubled(subject: Subject) -> Subject:
    """A float64 copy of a subject that may be differentiated and changed.

    Raises Unavailable: gradients cannot be computed for this model: it is read through TransformerLens, edited, spread
    over devices, larger than 2e9 parameters, or has no weights on other positions.
    """
    if subject.forward.backend != "transformers":
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
    if not scans(subject) and len(read := attending(subject.blocks)) < len(subject.blocks):
        why = f"only layers {', '.join(map(str, read))} have attention" if read else subject.unavailable({Site.VALUE})
        raise Unavailable(f"{subject.name}: {why}")
    whole(subject)
    model = copy.deepcopy(subject.model).double().requires_grad_(True)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the fused product of experts does not support float64
    return Subject.of(model, subject.tokenizer, subject.name)


def scans(subject: Subject) -> bool:
    """Whether the module mixes positions by a selective scan."""
    mixed = getattr(subject.model, "without_attention", "")  # a wind tunnel's: transformers' Mamba has another layout
    return bool(mixed) and subject.facts["model_type"] in ("mamba2", "mamba")


def shares(weight: Float[Tensor, "*row key"]) -> Float[Tensor, "*row key"]:
    """|weight| over its sum along the row; 0 if the sum is 0."""
    size = weight.abs()
    return size / size.sum(-1, keepdim=True).clamp_min(torch.finfo(size.dtype).tiny)


def routing(subject: Subject, batch: Batch) -> Routing:
    """The gradients of the batch's mean loss at every head, by the law and by autograd.

    The loss is the cross-entropy in nats of the drawn outcome over the whole vocabulary (for a real number, minus its
    log density), mean over the queried positions of a task; for prompts, of every next token. Raises Unavailable:
    gradients of attention cannot be computed (see `doubled`), or the batch has no target.
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


def step(subject: Subject, batch: Batch, decrease: float = DECREASE) -> Step:
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
        after, loss = _written(subject, inputs, where, target)
    score, share = [], []
    for old, new in zip(before.layers, after, strict=True):
        kept = old.seen & (old.weight != 0) & (new.weight != 0)
        # A sink is a key too: attention's weights include it, shares among the tokens do not.
        one, other = (shares(w) if old.scan else w for w in (old.weight, new.weight))
        score.append((new.score - old.score).masked_fill(~kept, 0))
        share.append((other.where(kept, 1) / one.where(kept, 1)).log())
    return Step(before, expected, before.loss - float(loss), tuple(score), tuple(share))


def signals(subject: Subject, batch: Batch) -> Signals:
    """Summaries of `routing` per layer, computed in as many passes as memory needs."""
    subject, inputs, where, target = _prepared(subject, batch)
    rows = where.sum(1).cumsum(0).tolist()
    sums, loss = [], 0.0
    for part in _parts(inputs, subject.facts["heads"] or CHANNELS):
        answers = target[slice(rows[part[0] - 1] if part[0] else 0, rows[part[-1]])]
        width = int(inputs.lengths[part].max())
        taken = type(inputs)(inputs.data[part, :width], inputs.lengths[part])
        mixed, mean = _forward(subject, taken, where[part, :width], answers)
        summed = mean * len(answers)
        loss += float(summed.detach())
        sums.append([_sums(each, taken.lengths) for each in _backward(mixed, summed, taken.lengths)[0]])
    total = np.sum(sums, 0)
    score, value, spread = (total[:, i] / total[:, i + 1].clip(1) for i in (0, 2, 4))
    return Signals(np.sqrt(score), np.sqrt(value), spread, loss / len(target))


def _prepared(subject: Subject, batch: Batch) -> tuple[Subject, Tokens | Rows, Tensor, Tensor]:
    """The float64 copy, its inputs, and their targets."""
    subject = doubled(subject)
    inputs = subject.tokens(batch)
    return subject, inputs, *targets(batch, inputs)


def targets(batch: Batch, inputs: Tokens | Rows) -> tuple[Bool[Tensor, "batch seq"], Tensor]:
    """Queried positions and the correct answer at each, row by row: tokens or real numbers.

    Raises Unavailable: the batch has no targets.
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
        elif batch.posterior.answers is not None:
            target = batch.posterior.answers.flatten(0, 1)[real[where]].gather(1, target[:, None])[:, 0]
    if not len(target):
        raise Unavailable("no position is asked, or no prompt has a second token: there is no loss to differentiate")
    return where, target


def losses(logits: Float[Tensor, "row output"], target: Tensor) -> Float[Tensor, " row"]:
    """Nats: -log p(token); for a real number, whose logits are mean and log variance, minus its log density."""
    if target.is_floating_point():
        return Gaussian().loss(logits, target.to(logits.dtype))
    return cross_entropy(logits, target, reduction="none")


@dataclass(frozen=True, eq=False)
class Attended:
    """Tensors of one layer's attention on the autograd graph; scores before a cap, weights without the sink."""

    query: Tensor
    key: Tensor
    value: Tensor
    score: Tensor
    weight: Tensor
    z: Tensor
    allowed: Tensor
    scale: float
    softcap: float | None

    @property
    def wanted(self) -> tuple[Tensor, ...]:
        """The tensors of the gradients, in their order; the output last."""
        return (self.score, self.value, self.query, self.key, self.z)

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


Mixed = Attended | Unrolled


class Explicit(Recorder):
    """Attention written out in float64 and kept on the graph: `found`, layer by layer."""

    def __init__(self, found: list[Mixed], *args) -> None:
        super().__init__(*args)
        self.found = found

    def attend(self, kind: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask, **kwargs):
        scale = kwargs.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        softcap, sink = kwargs.get("softcap"), kwargs.get("s_aux")
        if query.shape[2] != key.shape[2] or next(self.layer.get(module, iter(())), None) != len(self.found):
            raise Unavailable(f"{type(module).__name__} is not entered layer by layer, once each; its law is not known")
        dtype = query.dtype
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
        self.found.append(Attended(query, key, value, score, weight, z, allowed, scale, softcap))
        return z.transpose(1, 2).to(dtype).contiguous()


def _forward(subject: Subject, inputs: Tokens | Rows, where: Tensor, target: Tensor) -> tuple[list[Mixed], Tensor]:
    """One pass with explicit weights, layer by layer, and its mean loss, on the autograd graph.

    Raises Unavailable: the model's own logits differ.
    """
    recorder = Recorder(*_passing(subject, where))
    with (
        torch.no_grad(),
        _attached(subject),
        recording(recorder, subject.blocks, subject.model.get_output_embeddings()),
    ):
        logits = subject.forward.logits(inputs.data)
    with torch.enable_grad():
        found, loss = _written(subject, inputs, where, target, logits)
    return found, loss


def _written(
    subject: Subject, inputs: Tokens | Rows, where: Tensor, target: Tensor, usual: Tensor | None = None
) -> tuple[list[Mixed], Tensor]:
    """The pass, compared with the model's own logits if these are given."""
    layers: list[Mixed] = []
    explicit, head = Explicit(layers, *_passing(subject, where)), subject.model.get_output_embeddings()
    with _attached(subject), _written_out(subject, layers), recording(explicit, subject.blocks, head):
        logits = subject.forward.logits(inputs.data)
    apart = 0.0 if usual is None else float((logits.detach() - usual).abs().max() / usual.square().mean().sqrt())
    if len(layers) != len(subject.blocks) or not apart <= AGREE:
        raise Unavailable(
            f"{subject.name}: its weights written out give logits that lie {apart:.2g} of their rms from its own; how "
            f"model type {subject.facts['model_type']!r} mixes positions is not known here"
        )
    return layers, losses(logits, target.to(logits.device)).mean()


def _passing(subject: Subject, where: Tensor) -> tuple:
    """Arguments of a Recorder that neither keeps nor edits anything."""
    return subject.blocks, where.nonzero(as_tuple=True), frozenset(), (), (torch.arange(len(where)), where)


def _attached(subject: Subject):
    return nullcontext() if scans(subject) else attached(subject.model, subject.name)


@contextmanager
def _written_out(subject: Subject, layers: list[Mixed]):
    """A context in which explicit weights replace each scan of the copy."""
    mixers = [block.layer.get_submodule("mixer") for block in subject.blocks] if scans(subject) else []
    for mixer in mixers:
        mixer.forward = scan_of(mixer, layers.append)
    try:
        yield
    finally:
        for mixer in mixers:
            del mixer.forward


def _backward(
    layers: list[Mixed], loss: Tensor, lengths: Int[Tensor, " batch"], parameters: Sequence[Tensor] = ()
) -> tuple[tuple[Mixing, ...], list[Tensor]]:
    """Gradients of every layer by autograd and by the law, and those of the parameters."""
    wanted = [tensor for layer in layers for tensor in layer.wanted]
    every = iter(torch.autograd.grad(loss, [*wanted, *parameters], materialize_grads=True))
    mixed = []
    for layer in layers:
        *by_autograd, u = (next(every) for _ in layer.wanted)
        live = (u != 0).any(-1) & (torch.arange(u.shape[2]) < lengths[:, None])[:, None].to(u.device)
        with torch.no_grad():
            law = layer.law(u)
            value = layer.value.repeat_interleave(u.shape[1] // layer.value.shape[1], 1)
            mixed.append(
                Mixing(
                    weight=layer.weight.detach(),
                    score=layer.score.detach(),
                    u=u,
                    b=u @ value.mT,
                    seen=(layer.allowed & live[..., None]).expand_as(layer.weight),
                    law=law,
                    autograd=type(law)(*by_autograd),
                    scan=isinstance(layer, Unrolled),
                )
            )
    return tuple(mixed), list(every)


def _sums(mixing: Mixing, lengths: Tensor) -> np.ndarray:
    """Sum and count of squared score gradients, of squared value gradients, and of spreads."""
    gradient, value = mixing.autograd.score, mixing.autograd.value
    several = mixing.seen.sum(-1) > 1
    coordinates = int(lengths.sum()) * value.shape[1] * value.shape[-1]
    pairs = (
        (gradient[mixing.seen].square().sum(), mixing.seen.sum()),
        (value.square().sum(), coordinates),  # the gradient is 0 beyond a sequence's end
        (mixing.spread[several].sum(), several.sum()),
    )
    return np.array([float(x) for pair in pairs for x in pair])


def _parts(inputs: Tokens | Rows, heads: int) -> Iterator[Sequence[int]]:
    """Number of sequences per pass that keeps one layer's weights within the memory limit."""
    most = max(1, ENTRIES // (heads * inputs.data.shape[1] ** 2))
    for at in range(0, len(inputs), most):
        yield list(range(at, min(at + most, len(inputs))))
