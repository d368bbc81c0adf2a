"""The direction of the last layer's values that the output weights turn into the log-odds of two tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from llmgeom.model import weights
from llmgeom.probe import Subject, Unavailable


def readout_direction(subject: Subject, pair: Tensor) -> Tensor:
    """Direction d of the last layer's values that raises the log-odds of one token over another.

    For each kv head, d = sum over its query heads of W_O (g * (u_A - u_B)), with u the rows of the output embedding and
    g the gain of the final norm. Derived here; the last MLP and norms after attention are left out.

    Args:
        pair: [prompt 2] token ids A and B.

    Returns:
        [prompt coordinate] float64, kv heads concatenated.

    Raises:
        Unavailable: the layout of W_O is unknown (`model.weights`), or the module between the last layer and the output
            embedding is unknown or not a norm.
    """
    heads, kv_heads = subject.facts["heads"], subject.facts["kv_heads"]
    output = [weights.output_weight(subject, len(subject.blocks) - 1, head).double().cpu() for head in range(heads)]
    rows = subject.model.get_output_embeddings().weight.detach()
    u = rows[pair.to(rows.device)].double().cpu()
    target = norm_gain(subject.unembed.norm, subject.facts["d_model"]) * (u[:, 0] - u[:, 1])
    by_head = torch.stack([target @ w.T for w in output], 1)
    return by_head.unflatten(1, (kv_heads, heads // kv_heads)).sum(2).flatten(1)


@torch.no_grad()
def norm_gain(norm: nn.Module, width: int) -> Tensor:
    """[width] float64 the gain of a norm at each coordinate, however the family stores it (Gemma stores gain - 1).

    (N(v) - N(-v)) / 2v for v = 1, -1, 1, -1 ..., with mean 0 and mean square 1: bias and eps cancel. Derived here.
    Raises Unavailable: the output has another width, as that of a projection.
    """
    v = 1 - 2.0 * (torch.arange(width) % 2)
    x = v.to(next(norm.parameters(), v))[None, None]
    gain = ((norm(x) - norm(-x)) / 2)[0, 0].double().cpu()
    if len(gain) != width:
        raise Unavailable(f"a {type(norm).__name__} from {width} to {len(gain)} coordinates has no gain for each")
    return gain * v
