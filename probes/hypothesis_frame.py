"""Do heads write hypotheses into the directions in which they are read out, and keep them by the same directions?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from llmgeom.batch import Batch, Posterior, Rows, Tokens
from llmgeom.claims import Null, declared, estimate, layer_band
from llmgeom.errors import Unavailable, UserError
from llmgeom.model.capture import Site
from llmgeom.model.self_check import probe_batch
from llmgeom.model.subject import Subject
from llmgeom.model.weights import key_weight, output_weight, query_weight, value_bias, value_weight
from llmgeom.probe import Needs, ProbeInput
from llmgeom.probes.key_orthogonality import token_ids
from llmgeom.result import Estimate, Figure, quantity
from llmgeom.result import Result as Base
from llmgeom.stats.resampling import LEAST_CLUSTERS, band, jackknife

MOST_TOKENS = 32
NOTHING = 1e-10  # of the largest eigenvalue: a direction shorter than its root is rounding
CLAIMS = declared("hypothesis_frame")
VALUE_OUT, KEY_VALUE = "value frame in output frame, last layer", "key frame in value frame, first layer"
UNTRAINED = "re-initialised"


@dataclass(frozen=True)
class Frames:
    """Inner products in the residual stream of what a head does with each hypothesis token, and of its readout.

    x_i is the token's input embedding after the layer's input norm; v_i = x_i W_V W_O what the head would write of it;
    k_i = (x_i W_K) W_Q' g the direction that a query's residual must have to find it at distance 0, g the input norm's
    gain; u_i its row of the output embedding, times the final norm's gain. Biases are common to all tokens and drop out
    when these are centred. All three stay the same under W_V R, R^-1 W_O; W_Q R, W_K R^-1' (where no rotary embedding
    acts); and when a norm's gain is put into the weights behind it (derived here).

    value, key            [layer head token token] v_i.v_j, k_i.k_j;   out [token token] u_i.u_j.
    value_out, key_value  [layer head token token] v_i.u_j, k_i.v_j.
    head_dim, d_model     widths.
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
        """Directions in a frame, r: half of a head's width, beyond which it would be all the head can write whatever
        the tokens; two fewer than tokens, as centring takes one and the interval leaves one token out."""
        return min(len(self.out) - 2, self.head_dim // 2)

    def of(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """By name, [layer head]: overlap of the frames of these tokens, and how well v_i and u_i match."""
        value, key, out, value_out, key_value = (
            centred(x[..., rows[:, None], rows])
            for x in (self.value, self.key, self.out, self.value_out, self.key_value)
        )
        # Of a centred Gram, rounding may leave a square just under 0.
        size = np.sqrt(_diagonal(value).clip(0) * _diagonal(out).clip(0))
        cosine = np.divide(_diagonal(value_out), size, out=np.zeros_like(size), where=size > 0)
        return {
            VALUE_OUT: overlap(value, np.broadcast_to(out, value.shape), value_out, self.rank),
            KEY_VALUE: overlap(key, value, key_value, self.rank),
            "match": cosine.mean(-1),
        }


def centred(gram: np.ndarray) -> np.ndarray:
    """Inner products of vectors less the mean of theirs, on both sides."""
    gram = gram - gram.mean(-1, keepdims=True)
    return gram - gram.mean(-2, keepdims=True)


def overlap(xx: np.ndarray, yy: np.ndarray, xy: np.ndarray, rank: int) -> np.ndarray:
    """||U'W||_F^2 / min(r_U, r_W), [...]: the mean squared cosine of the principal angles of two subspaces (0-1).

    U, W: orthonormal bases of the first `rank` principal directions (fewer where there are no more) of vectors x and y,
    from their inner products x_i.x_j, y_i.y_j, x_i.y_j: U = X'a / sqrt(l) with a an eigenvector of xx, l its
    eigenvalue. 0 where one of them has no direction. The authors' measure of their J-space.
    """

    def basis(gram: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        values, vectors = np.linalg.eigh(gram)
        values, vectors = values[..., -rank:], vectors[..., -rank:]
        there = values > NOTHING * values.max(-1, keepdims=True).clip(0)
        return vectors * np.where(there, np.where(there, values, 1) ** -0.5, 0)[..., None, :], there.sum(-1)

    (a, r_u), (b, r_w) = basis(xx), basis(yy)
    return np.square(np.swapaxes(a, -1, -2) @ xy @ b).sum((-2, -1)) / np.minimum(r_u, r_w).clip(1)


def haar(r_u: int, r_w: int, dim: int) -> float:
    """Expected overlap of two subspaces of which one is drawn evenly (Haar), max(r_u, r_w) / dim.

    Derived here: in a random subspace of r_w dimensions a fixed unit vector has squared length r_w / dim in the mean,
    so that E ||U'W||_F^2 = r_u r_w / dim; over min(r_u, r_w). Raises UserError for a subspace larger than the space.
    """
    if not 0 < min(r_u, r_w) <= max(r_u, r_w) <= dim:
        raise UserError(f"subspaces of {r_u} and {r_w} dimensions in {dim}: give 1 to {dim}")
    return max(r_u, r_w) / dim


@dataclass(frozen=True)
class Reading:
    """frames of the hypotheses; others, of as many tokens that are none; names of the hypotheses, as text.

    A task has no others: what holds a place there are keys and punctuation. It gives its outcomes twice.
    """

    frames: Frames
    others: Frames
    names: tuple[str, ...]


def read(subject: Subject, batch: Batch) -> Reading:
    """Frames of one model. Hypotheses are a task's outcomes; of prompts the 32 tokens most likely next, by the mean
    over prompts of the model's own probability, special tokens left out.

    A re-initialised model is read at `others`, the 32 tokens that the prompts hold most often: its own likeliest ones
    would be chosen by the output embedding that they are held against, while its embeddings of any other tokens
    are exchangeable. Raises Unavailable or UserError.
    """
    if isinstance(batch.inputs, Rows):
        raise Unavailable("the model reads rows of real numbers: hypotheses have no embedding, and so no frame")
    if batch.posterior is not None:
        likely = others = _outcomes(batch.posterior, batch.tokens)
    else:
        common = token_ids(subject, batch)[:MOST_TOKENS]
        special = subject.tokenizer.all_special_ids if subject.tokenizer is not None else []
        likely, others = _likely(subject, batch, special, len(common)), common
    if len(likely) < LEAST_CLUSTERS:
        raise UserError(f"{len(likely)} hypotheses span no frame to be told from chance; {LEAST_CLUSTERS} are needed")
    names = map(str, likely) if subject.tokenizer is None else (repr(subject.tokenizer.decode([i])) for i in likely)
    frames = _frames(subject, likely)
    return Reading(frames, frames if others == likely else _frames(subject, others), tuple(names))


def _outcomes(posterior: Posterior, tokens: Tokens | Rows) -> list[int]:
    outcomes = list(posterior.outcomes)
    shown = set(tokens.data[torch.arange(tokens.data.shape[1]) < tokens.lengths[:, None]].tolist())
    unseen = [token for token in outcomes if token not in shown]
    if unseen:
        raise UserError(
            f"outcome {unseen[0]} of this task is never shown to the model: its input embedding was never trained; "
            "give more sequences (--n), or a task that shows its answers"
        )
    return outcomes


def _likely(subject: Subject, batch: Batch, special: list[int], many: int) -> list[int]:
    p = subject.capture(batch, {Site.LOG_PROBS}).log_probs.double().exp().mean(0)
    p[special] = -1
    return p.topk(many).indices.tolist()


@torch.no_grad()
def _frames(subject: Subject, ids: list[int]) -> Frames:
    facts = subject.facts
    embedding = subject.model.get_input_embeddings().weight
    e = embedding[torch.tensor(ids, device=embedding.device)]
    final, rows = subject.unembed.norm, subject.model.get_output_embeddings().weight
    u = rows[torch.tensor(ids, device=rows.device)].double().cpu() * _gain(final, e)
    group, found = facts["heads"] // facts["kv_heads"], []
    for layer, norm in enumerate(input_norms(subject)):
        x, gain = norm(e[:, None])[:, 0].double().cpu(), _gain(norm, e)
        for head in range(facts["heads"]):
            w_q, w_k, w_v, w_o = (
                weight(subject, layer, one).double().cpu()
                for weight, one in (
                    (query_weight, head),
                    (key_weight, head // group),
                    (value_weight, head // group),
                    (output_weight, head),
                )
            )
            v, k = x @ w_v @ w_o, x @ w_k @ w_q.T * gain
            found.append(torch.stack([v @ v.T, k @ k.T, v @ u.T, k @ v.T]))
    each = torch.stack(found).unflatten(0, (-1, facts["heads"])).numpy()
    value, key, value_out, key_value = (each[:, :, i] for i in range(4))
    return Frames(value, key, (u @ u.T).numpy(), value_out, key_value, w_v.shape[1], len(w_q))


@torch.no_grad()
def _gain(norm: nn.Module, like: Tensor) -> Tensor:
    """What a norm multiplies each coordinate by, from a vector of mean 0 and mean square 1, less its bias."""
    x = torch.ones(1, 1, like.shape[1], dtype=like.dtype, device=like.device)
    x[..., 1::2] = -1
    return ((norm(x) - norm(-x)) / 2 / x)[0, 0].double().cpu()


@torch.no_grad()
def input_norms(subject: Subject) -> list[nn.Module]:
    """The norm in front of each layer's attention, or none: that with which residual and W_V give the captured values.

    Raises Unavailable where none of a layer's norms does.
    """
    seen = subject.capture(probe_batch(subject.facts), {Site.RESIDUAL, Site.VALUE})
    near, found = 1e-3 if subject.facts["dtype"] == "float32" else 3e-2, []
    for layer, block in enumerate(subject.blocks):
        weight, bias = value_weight(subject, layer, 0), value_bias(subject, layer, 0)
        residual = seen.layers(Site.RESIDUAL)[layer].to(weight.device)
        theirs = seen.layers(Site.VALUE)[layer][:, 0].to(weight.device)
        norms = [child for child in block.layer.children() if "norm" in type(child).__name__.lower()]
        for norm in (nn.Identity(), *norms):
            ours = norm(residual[:, None])[:, 0] @ weight + bias
            if (ours - theirs).abs().max() <= near * theirs.abs().max():
                found.append(norm)
                break
        else:
            raise Unavailable(
                f"{subject.name}: what stands between the residual stream and the values of layer {layer} is not known "
                f"for model type {subject.facts['model_type']!r}; a frame of values would not be its own"
            )
    return found


NEEDS = Needs(
    frozenset({Site.KEY}), shuffled=False, examine=lambda subject, captures: read(subject, captures[""].batch)
)


@dataclass(frozen=True, kw_only=True)
class Result(Base):
    """Overlap of the frames of hypotheses in keys, values and the output embedding, by layer and head."""

    TITLE = "Hypothesis frame"
    MEANING = (
        "1 means that a head would write what tells hypotheses apart wholly within the directions in which the "
        "output embedding tells them apart; the value for random subspaces, that it does not know of them. The match "
        "says how: near 1 a head that writes a hypothesis raises its own logit, near -1 it lowers it (elimination), "
        "near 0 neither."
    )
    COMPUTED = (
        "From weights, for each hypothesis token: its input embedding after the layer's input norm, through W_V and "
        "W_O (value frame) and through W_K and W_Q' (key frame: where a query must point to find it, at distance 0); "
        "its row of the output embedding (output frame); all centred over tokens, norms' gains included. Overlap of "
        "the first r principal directions of two frames: ||U'W||_F^2 / r, r the smaller of half the head's width and "
        "two fewer than tokens. Match: mean cosine of value and output of the same token. Declared places: the last "
        "layer for value and output, the first for key and value, mean over heads. Intervals are jackknifed over "
        "tokens."
    )
    NULL = (
        "The same model re-initialised: with the same outcomes in a wind tunnel, elsewhere with as many tokens of "
        "the prompts, as a re-initialised model's tokens are exchangeable. The value for random subspaces, r / "
        "d_model, is printed and decides nothing."
    )
    FAILURE_MODES = (
        "In layers after the first this is the direct path only: the token's embedding as it enters the residual "
        "stream, without what earlier layers add, which may be all that such a head reads. A tied output embedding, "
        "or a head that copies any token, overlaps without any inference: see the other tokens in the notes. "
        "Position embeddings are left out; keys are at distance 0, and where queries and keys are normalised after "
        "their projection the key frame is that without this norm. Where a norm follows attention (Gemma-2, OLMo-2) "
        "values are those before it. A frame that is there is not one that is used."
    )

    value_out: np.ndarray = quantity("layer head", "overlap", "value frame in output frame", Figure("heatmap"))
    value_out_mean: np.ndarray = quantity(
        "layer", "overlap", "value frame in output frame, mean over heads", Figure("curve", band="value_out_null")
    )
    value_out_null: np.ndarray = quantity("layer bound", "overlap", "the same, re-initialised models")
    key_value: np.ndarray = quantity("layer head", "overlap", "key frame in value frame", Figure("heatmap"))
    key_value_mean: np.ndarray = quantity(
        "layer", "overlap", "key frame in value frame, mean over heads", Figure("curve", band="key_value_null")
    )
    key_value_null: np.ndarray = quantity("layer bound", "overlap", "the same, re-initialised models")
    match: np.ndarray = quantity("layer head", "cos", "value and output of the same token", Figure("heatmap"))
    match_null: np.ndarray = quantity("bound", "cos", "the same, any head of re-initialised models")
    random: float = quantity("", "overlap", "expected of random subspaces of as many dimensions")
    rank: int = quantity("", "directions", "in each frame")
    estimates: tuple[Estimate, ...]
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def measure(view: ProbeInput) -> Result:
    """Overlaps and match with their nulls. Raises UserError without re-initialised models."""
    if not view.control_observations:
        raise UserError("no re-initialised model was read, and nothing else decides here: scan with --nulls 20")
    own, n = view.observations.frames, len(view.observations.names)
    every = np.arange(n)
    found, untrained = own.of(every), [control.others.of(every) for control in view.control_observations]
    estimates = []
    for name, layer in ((VALUE_OUT, -1), (KEY_VALUE, 0)):

        def statistic(rows: np.ndarray, name: str = name, layer: int = layer) -> float:
            return float(own.of(rows)[name][layer].mean())

        draws = np.array([control[name][layer].mean() for control in untrained])
        value, span = statistic(every), jackknife(statistic, every, every)
        estimates.append(estimate(CLAIMS[name], value, span, [Null.of(UNTRAINED, value, draws)], n=n, clusters=n))
    notes = [f"{n} hypotheses: {', '.join(view.observations.names)}"]
    if view.observations.others is not own:
        others = view.observations.others.of(every)
        notes.append(
            f"of as many other tokens, those that the prompts hold most often: {others[VALUE_OUT][-1].mean():.3f} "
            f"({VALUE_OUT}) and {others[KEY_VALUE][0].mean():.3f} ({KEY_VALUE})"
        )
    curves = {
        field: {
            field: found[name],
            f"{field}_mean": found[name].mean(1),
            f"{field}_null": layer_band({UNTRAINED: np.array([control[name].mean(1) for control in untrained])}),
        }
        for field, name in (("value_out", VALUE_OUT), ("key_value", KEY_VALUE))
    }
    return Result(
        **curves["value_out"],
        **curves["key_value"],
        match=found["match"],
        match_null=np.array(band(np.array([control["match"] for control in untrained]).ravel())),
        random=haar(own.rank, own.rank, own.d_model),
        rank=own.rank,
        estimates=tuple(estimates),
        notes=tuple(notes),
    )


def _diagonal(x: np.ndarray) -> np.ndarray:
    return np.diagonal(x, axis1=-2, axis2=-1)
