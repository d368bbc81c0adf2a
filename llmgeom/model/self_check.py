"""The self-check: do captured activations agree with the model itself?"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import Context
from dataclasses import replace
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from llmgeom.batch import Batch, Rows, Tokens
from llmgeom.errors import UnsupportedModel, UserError
from llmgeom.model.capture import Site
from llmgeom.model.forward import Forward, Reader, full_float32
from llmgeom.model.layers import without_attention


@full_float32()
def check(reader: Reader) -> dict[str, Any]:
    """Compares captured activations with the model itself, at every load; the record carries the result.

    On two random sequences:
        logits: Largest |difference| of log-probabilities with and without capture.
        rows: Captured attention rows times values against the model's own attention output, largest |difference| over
            the output, or over its rms where that is larger.
        residual: Residual in + writes against residual out, likewise. Where it fails, as in post-norm families,
            `writes` says that they are unavailable.

    Raises:
        UnsupportedModel: Logits or rows differ, or a layer was not entered exactly once.
    """
    # Without edits; and it captures the writes, whatever an earlier check says of them.
    reader = replace(reader, edits=(), facts={**reader.facts, "self_check": {}})
    batch = probe_batch(reader.facts)
    tokens = reader.tokens(batch)
    length = int(tokens.lengths[0])
    plain = _plain_log_probs(reader, tokens)
    final = reader.capture(batch, {Site.LOG_PROBS}, batch_tokens=2 * length)
    report: dict[str, Any] = {"logits": float((final.log_probs - plain).abs().max())}
    exact = reader.facts["dtype"] == "float32" and not reader.facts.get("quantised")
    tolerance = 1e-4 if exact else 5e-2
    if why := without_attention(reader.model):
        _refuse_above(tolerance, report, reader)
        return report | {"writes": f"unavailable: {why}"}
    known = all(block.attention_writer is not None and block.mlp_writer is not None for block in reader.blocks)
    sites = {Site.ATTENTION, Site.VALUE, Site.Z, Site.RESIDUAL, Site.LOG_PROBS}
    writes = {Site.ATTENTION_WRITE, Site.MLP_WRITE} if known else set()
    seen = reader.capture(batch, sites | writes, positions="all", batch_tokens=2 * length)
    report["rows"] = max(
        _relative(_mix(row, value, seen.prompt), z)
        for row, value, z in zip(seen.layers(Site.ATTENTION), seen.layers(Site.VALUE), seen.layers(Site.Z), strict=True)
    )
    _refuse_above(tolerance, report, reader)
    if not writes:
        return report | {"writes": "unavailable: the modules that write to the residual stream are not known"}
    stream = seen.layers(Site.RESIDUAL)
    # Added in the order of sequential and of parallel layers: in bfloat16 a sum depends on its order.
    report["residual"] = max(
        min(_relative(stream[i] + a + m, stream[i + 1]), _relative(a + m + stream[i], stream[i + 1]))
        for i, (a, m) in enumerate(zip(seen.layers(Site.ATTENTION_WRITE), seen.layers(Site.MLP_WRITE), strict=True))
    )
    if report["residual"] > tolerance:
        report["writes"] = "unavailable: residual in + writes is not residual out"
    return report


_reports: WeakKeyDictionary[Forward, dict[str, Any]] = WeakKeyDictionary()


def writes(reader: Reader) -> str:
    """Why writes to the residual stream are unavailable; empty where they are what is added to it.

    A model in memory is checked when it is first asked for them, and once, however it is edited; in a context without
    recorder, since that may be within an edit of another pass.
    """
    if (report := _known(reader)) is None:
        try:
            report = Context().run(check, reader)
        except UserError as refusal:
            report = {"writes": f"unavailable: {refusal}"}
        _reports[reader.forward] = report
    return report.get("writes", "")


def alike(control: Reader, reader: Reader) -> None:
    """Take over the check of a model's writes for its control: both have the same architecture."""
    if (report := _known(reader)) is not None:
        _reports[control.forward] = report


def _known(reader: Reader) -> dict[str, Any] | None:
    return reader.facts.get("self_check", _reports.get(reader.forward))


def _refuse_above(tolerance: float, report: Mapping[str, float], reader: Reader) -> None:
    if not max(report.values()) <= tolerance:
        raise UnsupportedModel(
            f"{reader.name} ({reader.facts['model_type']}) fails the self-check {report}: what would be captured "
            f"is not what the model computes; {reader.forward.remedy}"
        )


def probe_batch(facts: Mapping[str, Any]) -> Batch:
    """Two random input sequences for a model with these facts, long enough for a small sliding window to act."""
    generator = torch.Generator().manual_seed(0)
    length = min(24, facts["positions"] or 24)
    if facts["window"] and facts["window"] < 64:
        length = min(2 * facts["window"], facts["positions"] or 128)
    lengths = torch.tensor([length, length - 3 if length > 4 else length])
    inputs: Rows | Tokens
    if facts["features"]:
        inputs = Rows(torch.randn(2, length, facts["features"], generator=generator), lengths)
    else:
        inputs = Tokens(torch.randint(facts["vocabulary"], (2, length), generator=generator), lengths)
    return Batch(inputs, ("a", "b"), {"kind": "self_check"})


@torch.no_grad()
def _plain_log_probs(reader: Reader, tokens: Tokens | Rows) -> Tensor:
    """Log-probabilities at the final tokens, without our attention function."""
    rows = (torch.arange(len(tokens)), tokens.lengths - 1)
    here = get_ident()  # another thread may run a pass of the same model meanwhile
    hook = reader.model.get_output_embeddings().register_forward_pre_hook(
        lambda _m, args: (args[0][rows][:, None],) if get_ident() == here else None
    )
    try:
        return reader.forward.logits(tokens.data).float().log_softmax(-1).cpu()
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


def _relative(x: Tensor, y: Tensor) -> float:
    """Largest |x - y| over |y|, or over the rms of y where that is larger; where y is 0 throughout, |x - y| itself.

    A number is rounded by a share of itself: over the rms alone, half a bit of a coordinate that is 16 times as large
    (real models have such) is more than the tolerance of bfloat16.
    """
    x, y = x.float(), y.float()
    scale = float(y.square().mean().sqrt()) or 1.0
    return float(((x - y).abs() / y.abs().clamp_min(scale)).max())
