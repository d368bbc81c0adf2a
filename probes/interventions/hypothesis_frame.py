"""Do heads write hypotheses along the directions of the output, and keep keys and values in the same directions?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from llmgeom.claims import Null, declared
from llmgeom.model.weights import key_weight, norm_gain, output_weight, query_weight, value_bias, value_weight
from llmgeom.probe import (
    UNTRAINED,
    Batch,
    Model,
    Needs,
    ProbeInput,
    Rows,
    Site,
    Unavailable,
    UserError,
    probe_batch,
)
from llmgeom.probes.key_orthogonality import token_ids
from llmgeom.probes.shared.nulls import compare, null_band
from llmgeom.result import Figure, Labelled, Result, labelled, line
from llmgeom.stats.resampling import LEAST_CLUSTERS, band

PROBE = "hypothesis_frame"
MOST_TOKENS = 32
ROUNDING = 1e-10  # share of the largest eigenvalue; a direction with a smaller one is rounding
VALUE_OUT, KEY_VALUE = "value frame in output frame, last layer", "key frame in value frame, first layer"


@dataclass(frozen=True)
class Frames:
    """Inner products, in the residual stream, of each hypothesis token's value, key and output vectors.

    Let x_i be the token's input embedding after the layer's input norm. v_i = x_i W_V W_O is the vector that the head
    writes for it; k_i = (x_i W_K) W_Q' g is the direction of a query's residual that attends to it at distance 0, g the
    input norm's gain; u_i is its row of the output embedding, times the final norm's gain. Biases are common to all
    tokens and drop out of centred vectors. All three are invariant under W_V R, R^-1 W_O; under W_Q R, W_K R^-1'
    (without a rotary embedding); and when a norm's gain is moved into the weights behind it (derived here).

    Attributes:
        value, key: [layer head token token] v_i.v_j and k_i.k_j.
        out: [token token] u_i.u_j.
        value_out, key_value: [layer head token token] v_i.u_j and k_i.v_j.
    """

    value: np.ndarray
    key: np.ndarray
    out: np.ndarray
    value_out: np.ndarray
    key_value: np.ndarray
    head_dim: int
    d_model: int

    @property
    def rank(self) -> int:
        """Number r of directions in a frame.

        At most half of a head's width: a larger frame is nearly the whole space that the head can write, whatever the
        tokens. At most tokens - 2: centring removes one direction, and the jackknife one token.
        """
        return min(len(self.out) - 2, self.head_dim // 2)

    def measures(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """[layer head] by name: overlaps of the frames of these tokens, and the mean cosine of v_i and u_i (match)."""
        value, key, out, value_out, key_value = (
            centred(x[..., rows[:, None], rows])
            for x in (self.value, self.key, self.out, self.value_out, self.key_value)
        )
        # Rounding may make a square of a centred Gram matrix slightly negative.
        size = np.sqrt(_diagonal(value).clip(0) * _diagonal(out).clip(0))
        cosine = np.divide(_diagonal(value_out), size, out=np.zeros_like(size), where=size > 0)
        return {
            VALUE_OUT: overlap(value, np.broadcast_to(out, value.shape), value_out, self.rank),
            KEY_VALUE: overlap(key, value, key_value, self.rank),
            "match": cosine.mean(-1),
        }


def centred(gram: np.ndarray) -> np.ndarray:
    """Inner products of centred vectors: both means are subtracted."""
    gram = gram - gram.mean(-1, keepdims=True)
    return gram - gram.mean(-2, keepdims=True)


def overlap(xx: np.ndarray, yy: np.ndarray, xy: np.ndarray, rank: int) -> np.ndarray:
    """||U'W||_F^2 / min(r_U, r_W), [...]: the mean squared cosine of the principal angles of two subspaces (0-1).

    U and W are orthonormal bases of the first `rank` principal directions (or fewer, if there are no more) of vectors x
    and y, from the inner products x_i.x_j, y_i.y_j and x_i.y_j: U = X'a / sqrt(l) with a an eigenvector of xx and l its
    eigenvalue. 0 if x or y has no direction. The authors use this measure for their J-space.
    """

    def basis(gram: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        values, vectors = np.linalg.eigh(gram)
        values, vectors = values[..., -rank:], vectors[..., -rank:]
        nonzero = values > ROUNDING * values.max(-1, keepdims=True).clip(0)
        scale = np.where(nonzero, np.where(nonzero, values, 1) ** -0.5, 0)
        return vectors * scale[..., None, :], nonzero.sum(-1)

    (a, r_u), (b, r_w) = basis(xx), basis(yy)
    return np.square(np.swapaxes(a, -1, -2) @ xy @ b).sum((-2, -1)) / np.minimum(r_u, r_w).clip(1)


def random_overlap(r_u: int, r_w: int, dim: int) -> float:
    """Expected overlap of two subspaces of which one is uniform (Haar) in dim dimensions: max(r_u, r_w) / dim.

    Derived here: the projection of a fixed unit vector on a random subspace of r_w dimensions has mean squared length
    r_w / dim, so E ||U'W||_F^2 = r_u r_w / dim; divide by min(r_u, r_w). Raises UserError: a subspace larger than the
    space.
    """
    if not 0 < min(r_u, r_w) <= max(r_u, r_w) <= dim:
        raise UserError(f"subspaces of {r_u} and {r_w} dimensions in {dim}: give 1 to {dim}")
    return max(r_u, r_w) / dim


@dataclass(frozen=True)
class HypothesisFrames:
    """Frames of one model.

    Attributes:
        frames: frames of the hypotheses.
        others: frames of as many other tokens. For a task these are the hypotheses again, since its other tokens are
            keys and punctuation.
        names: the hypotheses as text.
    """

    frames: Frames
    others: Frames
    names: tuple[str, ...]


def read_frames(subject: Model, batch: Batch) -> HypothesisFrames:
    """Frames of the hypotheses of a batch: a task's outcomes, or for prompts the 32 likeliest next tokens.

    The likeliest tokens have the largest probability by the model, mean over prompts, without special tokens. An
    untrained model is compared at `others`, the 32 most frequent tokens of the prompts: its likeliest tokens would be
    selected by the same output embedding with which they are compared, while its embeddings of all other tokens are
    exchangeable.

    Raises:
        Unavailable: inputs are rows of real numbers, or the layout of the weights is unknown.
        UserError: fewer than 5 hypotheses; an outcome that is never an input.
    """
    if isinstance(batch.inputs, Rows):
        raise Unavailable("the model reads rows of real numbers: hypotheses have no embedding, and so no frame")
    if batch.posterior is not None:
        likely = others = list(batch.posterior.outcomes)
        real = torch.arange(batch.tokens.data.shape[1]) < batch.tokens.lengths[:, None]
        inputs = set(batch.tokens.data[real].tolist())
        if unseen := [token for token in likely if token not in inputs]:
            raise UserError(
                f"outcome {unseen[0]} of this task is never an input: its input embedding was never trained; give more "
                "sequences (--n), or a task that shows its answers"
            )
    else:
        others = token_ids(subject, batch)[:MOST_TOKENS]
        p = subject.capture(batch, {Site.LOG_PROBS}).log_probs.double().exp().mean(0)
        p[subject.tokenizer.all_special_ids if subject.tokenizer is not None else []] = -1
        likely = p.topk(len(others)).indices.tolist()
    if len(likely) < LEAST_CLUSTERS:
        raise UserError(f"{len(likely)} hypotheses are too few for a frame; {LEAST_CLUSTERS} are needed")
    names = map(str, likely) if subject.tokenizer is None else (repr(subject.tokenizer.decode([i])) for i in likely)
    frames = frames_of(subject, likely)
    return HypothesisFrames(frames, frames if others == likely else frames_of(subject, others), tuple(names))


@torch.no_grad()
def frames_of(subject: Model, ids: list[int]) -> Frames:
    """Frames of these tokens, from weights. Raises Unavailable if the layout of the weights is unknown."""
    facts = subject.facts
    embedding = subject.model.get_input_embeddings().weight
    e = embedding[torch.tensor(ids, device=embedding.device)]
    width, rows = facts["d_model"], subject.model.get_output_embeddings().weight
    final_gain = norm_gain(subject.unembed.norm, width)
    u = rows[torch.tensor(ids, device=rows.device)].double().cpu() * final_gain
    group, grams = facts["heads"] // facts["kv_heads"], []
    for layer, norm in enumerate(input_norms(subject)):
        x, gain = norm(e[:, None])[:, 0].double().cpu(), norm_gain(norm, width)
        for head in range(facts["heads"]):
            w_q, w_k, w_v, w_o = (
                weight(subject, layer, index).double().cpu()
                for weight, index in (
                    (query_weight, head),
                    (key_weight, head // group),
                    (value_weight, head // group),
                    (output_weight, head),
                )
            )
            v, k = x @ w_v @ w_o, x @ w_k @ w_q.T * gain
            grams.append(torch.stack([v @ v.T, k @ k.T, v @ u.T, k @ v.T]))
    by_head = torch.stack(grams).unflatten(0, (-1, facts["heads"])).numpy()
    value, key, value_out, key_value = (by_head[:, :, i] for i in range(4))
    return Frames(value, key, (u @ u.T).numpy(), value_out, key_value, facts["head_dim"], width)


@torch.no_grad()
def input_norms(subject: Model) -> list[nn.Module]:
    """The norm (or identity) before each layer's attention that, with W_V, turns the residual into the values.

    Raises Unavailable: no norm of a layer does.
    """
    capture = subject.capture(probe_batch(subject.facts), {Site.RESIDUAL, Site.VALUE})
    tolerance, norms = 1e-3 if subject.facts["dtype"] == "float32" else 3e-2, []
    for layer, block in enumerate(subject.blocks):
        weight, bias = value_weight(subject, layer, 0), value_bias(subject, layer, 0)
        residual = capture.layers(Site.RESIDUAL)[layer].to(weight.device)
        value = capture.layers(Site.VALUE)[layer][:, 0].to(weight.device)
        children = [child for child in block.layer.children() if "norm" in type(child).__name__.lower()]
        for norm in (nn.Identity(), *children):
            computed = norm(residual[:, None])[:, 0] @ weight + bias
            if (computed - value).abs().max() <= tolerance * value.abs().max():
                norms.append(norm)
                break
        else:
            raise Unavailable(
                f"{subject.name}: what stands between the residual stream and the values of layer {layer} is not known "
                f"for model type {subject.facts['model_type']!r}; a frame of values would not be its own"
            )
    return norms


NEEDS = Needs(
    controls=frozenset({UNTRAINED}),
    examine=lambda subject, captures: read_frames(subject, captures[""].batch),
)


def measure(data: ProbeInput) -> Result:
    """The result of a run of this module as a probe."""
    return measure_frames(data.observations, data.control_observations)


def measure_frames(trained: HypothesisFrames, untrained: Sequence[HypothesisFrames]) -> Result:
    """Overlaps and match, compared with untrained copies. Raises UserError without untrained copies."""
    if not untrained:
        raise UserError(
            "no untrained copy was measured, and this metric has no other control: give --control-models 20"
        )
    n, frames, claims = len(trained.names), trained.frames, declared(PROBE)
    every = np.arange(n)
    values, controls = frames.measures(every), [control.others.measures(every) for control in untrained]
    estimates = []
    for name, layer in ((VALUE_OUT, -1), (KEY_VALUE, 0)):

        def statistic(of: Frames, rows: np.ndarray, name: str = name, layer: int = layer) -> float:
            return float(of.measures(rows)[name][layer].mean())

        null = Null.of(UNTRAINED, np.array([control[name][layer].mean() for control in controls]))
        estimates.append(compare(claims[name], statistic, frames, every, {}, [null]))
    notes = [f"{n} hypotheses: {', '.join(trained.names)}"]
    if trained.others is not frames:
        others = trained.others.measures(every)
        notes.append(
            f"as many other tokens, the most frequent of the prompts, have {others[VALUE_OUT][-1].mean():.3f} "
            f"({VALUE_OUT}) and {others[KEY_VALUE][0].mean():.3f} ({KEY_VALUE})"
        )

    def overlap(key: str, name: str, said: str) -> dict[str, Labelled | None]:
        mean, *drawn = (of[name].mean(1) for of in (values, *controls))
        null = ("the same, untrained copies", null_band({UNTRAINED: drawn}))
        return {
            key: labelled(values[name], "layer head", "overlap", said, Figure("heatmap")),
            **line(f"{key}_mean", mean, "layer", "overlap", f"{said}, mean over heads", null=null),
        }

    match, random = "value and output of the same token", random_overlap(frames.rank, frames.rank, frames.d_model)
    of_copies = band(np.array([control["match"] for control in controls]).ravel())
    return Result.of(
        "Hypothesis frame",
        {
            **overlap("value_out", VALUE_OUT, "value frame in output frame"),
            **overlap("key_value", KEY_VALUE, "key frame in value frame"),
            "match": labelled(values["match"], "layer head", "cos", match, Figure("heatmap")),
            "match_null": labelled(of_copies, "bound", "cos", "the same, any head of untrained copies"),
            "random": labelled(random, "", "overlap", "expected of random subspaces of as many dimensions"),
            "rank": labelled(frames.rank, "", "directions", "in each frame"),
        },
        __name__,
        estimates=tuple(estimates),
        notes=tuple(notes),
    )


def _diagonal(x: np.ndarray) -> np.ndarray:
    return np.diagonal(x, axis1=-2, axis2=-1)
