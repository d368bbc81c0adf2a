"""Size of the loss gradient at attention scores and at values, layer by layer.

For a query i and the keys j that it sees, in one head, s_ij = scale q_i . k_j, alpha_ij = softmax_j(s_ij) and
z_i = sum_j alpha_ij v_j; with the loss L, u_i = dL/dz_i and b_ij = u_i . v_j. Paper II (section 5.1) argues that
dL/ds_ij = alpha_ij (b_ij - sum_k alpha_ik b_ik) vanishes before dL/dv_j = sum_i alpha_ij u_i. Queries and keys are
those of attention, after rotary embedding and norms. All by automatic differentiation, in float64.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from llmgeom.answers import Gaussian
from llmgeom.batch import Batch, Rows, Tokens
from llmgeom.errors import Unavailable
from llmgeom.model.attention import Recorder, attached, recording
from llmgeom.model.capture import Site
from llmgeom.model.layers import attending
from llmgeom.model.model import Model
from llmgeom.model.weights import whole

LARGEST = 2_000_000_000  # most parameters of a model that is copied in float64
AGREE = 1e-4  # largest distance of our logits from the model's, over their rms
PULLS = ("score_gradient", "value_gradient")
ENTRIES = 2**24  # weights in memory at once, over heads and pairs of positions


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


class Explicit(Recorder):
    """Attention written out in float64 and kept on the graph: `found`, layer by layer."""

    def __init__(self, found: list[Attended], *args) -> None:
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


def doubled(subject: Model) -> Model:
    """A float64 copy of a subject that may be differentiated and changed.

    Raises Unavailable: gradients cannot be computed for this model: it is read through TransformerLens, edited, spread
    over devices, or larger than 2e9 parameters.
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
    whole(subject)
    model = copy.deepcopy(subject.model).double().requires_grad_(True)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the fused product of experts does not support float64
    return Model.of(model, subject.tokenizer, subject.name)


def require_attention(subject: Model) -> None:
    """Raises Unavailable: some layer has no attention."""
    if len(read := attending(subject.blocks)) < len(subject.blocks):
        why = f"only layers {', '.join(map(str, read))} have attention" if read else subject.unavailable({Site.VALUE})
        raise Unavailable(f"{subject.name}: {why}")


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


def forward(
    subject: Model, inputs: Tokens | Rows, where: Tensor, target: Tensor, compare: bool = True
) -> tuple[list[Attended], Tensor]:
    """One pass with attention written out, layer by layer, and its mean loss, on the autograd graph.

    Raises Unavailable: the model's own logits differ, if they are compared.
    """
    found: list[Attended] = []
    asked: Any = (subject.blocks, where.nonzero(as_tuple=True), frozenset(), (), (torch.arange(len(where)), where))
    head, apart = subject.model.get_output_embeddings(), 0.0
    with attached(subject.model, subject.name):
        with recording(Explicit(found, *asked), subject.blocks, head):
            logits = subject.forward.logits(inputs.data)
        if compare:
            with torch.no_grad(), recording(Recorder(*asked), subject.blocks, head):
                usual = subject.forward.logits(inputs.data)
            apart = float((logits.detach() - usual).abs().max() / usual.square().mean().sqrt())
    agreed(subject, len(found), apart)
    return found, losses(logits, target.to(logits.device)).mean()


def agreed(subject: Model, layers: int, apart: float) -> None:
    """Raises Unavailable where some layer was not written out, or logits lie so far from the model's own."""
    if layers != len(subject.blocks) or not apart <= AGREE:
        raise Unavailable(
            f"{subject.name}: its weights written out give logits that lie {apart:.2g} of their rms from its own; how "
            f"model type {subject.facts['model_type']!r} mixes positions is not known here"
        )


def counted(layer: Attended, u: Tensor, lengths: Tensor) -> Tensor:
    """[batch head query key] the pairs that count (`signals`)."""
    live = (u != 0).any(-1) & (torch.arange(u.shape[2]) < lengths[:, None])[:, None].to(u.device)
    return (layer.allowed & live[..., None]).expand_as(layer.weight)


def signals(subject: Model, batch: Batch) -> dict[str, Float[np.ndarray, " layer"]]:
    """Size of the gradients of the batch's loss at scores and values, in as many passes as memory needs.

    The loss is the cross-entropy in nats of the drawn outcome over the whole vocabulary (for a real number, minus its
    log density), at the queried positions of a task; for prompts, of every next token. It is summed over the queries,
    so that the size of the batch does not matter.

    Returns:
        score_gradient: the root mean square of dL/ds_ij over the pairs that count: i sees j, i is a real position, and
        the loss depends on z_i. value_gradient: that of dL/dv_j over real positions and coordinates.

    Raises:
        Unavailable: gradients cannot be computed (see `doubled`), some layer has no attention, or the batch has no
            target.
    """
    require_attention(subject)
    subject = doubled(subject)
    inputs = subject.tokens(batch)
    where, target = targets(batch, inputs)
    rows = where.sum(1).cumsum(0).tolist()
    total = np.zeros((len(subject.blocks), 4))  # sum and number of the squares by scores, and by values
    most = max(1, ENTRIES // (subject.facts["heads"] * inputs.data.shape[1] ** 2))
    for at in range(0, len(inputs), most):
        part = list(range(at, min(at + most, len(inputs))))
        answers = target[slice(rows[at - 1] if at else 0, rows[part[-1]])]
        width = int(inputs.lengths[part].max())
        taken = type(inputs)(inputs.data[part, :width], inputs.lengths[part])
        with torch.enable_grad():
            layers, mean = forward(subject, taken, where[part, :width], answers)
            summed = mean * len(answers)
        wanted = [tensor for layer in layers for tensor in (layer.score, layer.value, layer.z)]
        found = iter(torch.autograd.grad(summed, wanted, materialize_grads=True))
        with torch.no_grad():
            for at_layer, layer in zip(total, layers, strict=True):
                by_score, by_value, u = next(found), next(found), next(found)
                seen = counted(layer, u, taken.lengths)
                coordinates = int(taken.lengths.sum()) * by_value.shape[1] * by_value.shape[-1]
                at_layer[:2] += float(by_score[seen].square().sum()), float(seen.sum())
                # The gradient by values is 0 beyond a sequence's end.
                at_layer[2:] += float(by_value.square().sum()), coordinates
    return {name: np.sqrt(total[:, i] / total[:, i + 1].clip(1)) for i, name in ((0, PULLS[0]), (2, PULLS[1]))}


def over_layers(found: Mapping[str, Float[np.ndarray, " layer"]]) -> dict[str, float]:
    """The root mean square over layers of each of `signals`."""
    return {name: float(np.sqrt(np.square(layers).mean())) for name, layers in found.items()}
