"""Does what is captured agree with the model itself?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llmgeom.batch import Batch, Rows, Tokens
from llmgeom.errors import UnsupportedModel
from llmgeom.model.capture import Site
from llmgeom.model.layers import without_attention

if TYPE_CHECKING:
    from llmgeom.model.subject import Subject


def check(subject: Subject) -> dict[str, Any]:
    """Does what is captured agree with the model itself? Run at every load; the record carries the answer.

    On two random sequences: each layer is entered once (else UnsupportedModel); largest |difference| of the logits
    with and without capture; of each captured row times the values against the model's own attention output
    (relative to its rms); and of residual in + writes against residual out (relative to its rms). Where the last
    fails, the writes are marked unavailable, as in post-norm families.
    """
    batch = probe_batch(subject)
    tokens = subject.tokens(batch)
    length = int(tokens.lengths[0])
    plain = _plain_log_probs(subject, tokens)
    final = subject.capture(batch, {Site.LOG_PROBS}, batch_tokens=2 * length)
    report: dict[str, Any] = {"logits": _largest(final.log_probs - plain)}
    whole = subject.facts["dtype"] == "float32" and not subject.facts.get("quantised")
    tolerance = 1e-4 if whole else 5e-2
    if why := without_attention(subject.model):
        _held(subject, report, tolerance)
        return report | {"writes": f"unavailable: {why}"}
    known = all(block.attention_writer is not None and block.mlp_writer is not None for block in subject.blocks)
    sites = {Site.ATTENTION, Site.VALUE, Site.Z, Site.RESIDUAL, Site.LOG_PROBS}
    writes = {Site.ATTENTION_WRITE, Site.MLP_WRITE} if known else set()
    seen = subject.capture(batch, sites | writes, positions="all", batch_tokens=2 * length)
    report["rows"] = max(
        _relative(_mix(row, value, seen.prompt), z)
        for row, value, z in zip(seen.layers(Site.ATTENTION), seen.layers(Site.VALUE), seen.layers(Site.Z), strict=True)
    )
    _held(subject, report, tolerance)
    if writes:
        stream = seen.layers(Site.RESIDUAL)
        # Added in the order of sequential and of parallel layers: in bfloat16 a sum depends on its order.
        report["residual"] = max(
            min(_relative(stream[i] + a + m, stream[i + 1]), _relative(a + m + stream[i], stream[i + 1]))
            for i, (a, m) in enumerate(zip(seen.layers(Site.ATTENTION_WRITE), seen.layers(Site.MLP_WRITE), strict=True))
        )
        if report["residual"] > tolerance:
            report["writes"] = "unavailable: residual in + writes is not residual out"
    else:
        report["writes"] = "unavailable: the modules that write to the residual stream are not known"
    return report


def _held(subject: Subject, report: dict[str, float], tolerance: float) -> None:
    if not max(report.values()) <= tolerance:
        raise UnsupportedModel(
            f"{subject.name} ({subject.facts['model_type']}) fails the parity check {report}: what would be captured "
            f"is not what the model computes; {subject.remedy}"
        )


def probe_batch(subject: Subject) -> Batch:
    """Two random sequences of what the model reads, long enough for a small sliding window to act."""
    generator = torch.Generator().manual_seed(0)
    length = min(24, subject.facts["positions"] or 24)
    if subject.facts["window"] and subject.facts["window"] < 64:
        length = min(2 * subject.facts["window"], subject.facts["positions"] or 128)
    lengths = torch.tensor([length, length - 3 if length > 4 else length])
    if subject.facts["features"]:
        rows = Rows(torch.randn(2, length, subject.facts["features"], generator=generator), lengths)
        return Batch(rows, ("a", "b"), {"kind": "parity"})
    tokens = Tokens(torch.randint(subject.facts["vocabulary"], (2, length), generator=generator), lengths)
    return Batch(tokens, ("a", "b"), {"kind": "parity"})


@torch.no_grad()
def _plain_log_probs(subject: Subject, tokens: Tokens | Rows) -> Tensor:
    """Log-probabilities at the final tokens with our function out of the way and the same logits kept."""
    rows = (torch.arange(len(tokens)), tokens.lengths - 1)
    hook = subject.model.get_output_embeddings().register_forward_pre_hook(lambda _m, a: (a[0][rows][:, None],))
    try:
        return subject.logits(tokens.data).float().log_softmax(-1).cpu()
    finally:
        hook.remove()


def _mix(row: Tensor, value: Tensor, prompt: Tensor) -> Tensor:
    """Each row's weights times the values of its own prompt: [row head head_dim] float32."""
    out = []
    group = row.shape[1] // value.shape[1]
    for i in range(len(row)):
        mine = value[prompt == prompt[i]].float().repeat_interleave(group, dim=1)
        out.append(torch.einsum("hk,khd->hd", row[i, :, : len(mine)], mine))
    return torch.stack(out)


def _largest(x: Tensor) -> float:
    return float(x.abs().max())


def _relative(x: Tensor, y: Tensor) -> float:
    """Largest |x - y| over the rms of y; where y is 0 throughout, itself."""
    return float((x.float() - y.float()).abs().max() / (y.float().square().mean().sqrt() or 1.0))
