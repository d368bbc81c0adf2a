"""The self-check: do captured activations agree with the model itself?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import Context
from dataclasses import replace
from functools import partial
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from llmgeom.batch import Rows, Tokens
from llmgeom.errors import UnsupportedModel, UserError
from llmgeom.model.capture import Capture, Site
from llmgeom.model.forward import Forward, Reader, full_float32, probe_batch
from llmgeom.model.layers import Block, attending


@full_float32()
def check(reader: Reader) -> dict[str, Any]:
    """Compares captured activations with the model itself, at every load; the record carries the result.

    On two random sequences:
        logits: Largest |difference| of log-probabilities with and without capture.
        states: Captured residual stream against the hidden states that transformers returns itself, largest
            |difference| over the state, or over its rms where that is larger; absent where it returns none.
        rows: Captured attention rows times values against the model's own attention output, likewise. Where attention
            is computed in a way that is not read, `attention` says so, and all else can be captured.
        residual: Residual in + writes against residual out, likewise. Where it fails, as in post-norm families,
            `writes` says that they are unavailable.

    Raises:
        UnsupportedModel: Logits, states or rows differ; the model has several residual streams.
    """
    # Without edits; and it captures the writes, whatever an earlier check says of them.
    reader = replace(reader, edits=(), facts={**reader.facts, "self_check": {}})
    batch = probe_batch(reader.facts)
    tokens = reader.tokens(batch)
    exact = reader.facts["dtype"] == "float32" and not reader.facts.get("quantised")
    tolerance = 1e-4 if exact else 5e-2

    def seen(*sites: Site, positions: Any = "all") -> Capture:
        return reader.capture(batch, {*sites}, positions=positions, batch_tokens=2 * int(tokens.lengths[0]))

    read = attending(reader.blocks)
    writing = [Site.MLP_OUT] if any(block.mlp_writer is not None for block in reader.blocks) else []
    whole = seen(Site.RESIDUAL, *writing, *([Site.ATTN_OUT] if read else []))
    plain, states, mixers = _plain(reader, tokens)
    report: dict[str, Any] = {}
    outcome = {Site.LOG_PROBS}
    if read:
        try:
            inner = seen(Site.ATTENTION, Site.VALUE, Site.Z)
            errors = []
            for rows, value, z in zip(*map(inner.layers, (Site.ATTENTION, Site.VALUE, Site.Z)), strict=True):
                group, mixed = rows.shape[1] // value.shape[1], []
                for row, prompt in zip(rows, inner.prompt, strict=True):  # its weights times its own prompt's values
                    mine = value[inner.prompt == prompt].float().repeat_interleave(group, dim=1)
                    mixed.append(torch.einsum("hk,khd->hd", row[:, : len(mine)], mine))
                errors.append(_relative(torch.stack(mixed), z))
            report["rows"] = max(errors)
            outcome.add(Site.ATTENTION_FIRST)  # so that the pass goes through our attention function
        except UnsupportedModel as refusal:
            report["attention"] = str(refusal)
    report["logits"] = float((seen(*outcome, positions="query").log_probs - plain).abs().max())
    stream = whole.layers(Site.RESIDUAL)
    if states:
        # They begin before the first layer, or after it (Mamba, RWKV). Most families normalise the last one.
        starts = ([_relative(x, y) for x, y in zip(stream[at:], states[:-1], strict=False)] for at in (0, 1))
        report["states"] = min(map(max, starts))
    if not max(value for value in report.values() if not isinstance(value, str)) <= tolerance:
        remedy = "try --backend tl"
        if reader.forward.backend == "tl":
            remedy = "TransformerLens computes something else (below float32 rounding may do: --dtype float32)"
        raise UnsupportedModel(
            f"{reader.name} ({reader.facts['model_type']}) fails the self-check {report}: what would be captured "
            f"is not what the model computes; {remedy}"
        )
    report |= _writes(reader.blocks, whole, mixers, tolerance)
    return report


def _writes(blocks: Sequence[Block], seen: Capture, mixed: Mapping[int, Tensor], tolerance: float) -> dict[str, Any]:
    """How far residual in + writes are from residual out.

    Args:
        blocks: The layers.
        seen: The residual stream and the writes, at all positions.
        mixed: What other mixers than attention add, by layer.
    """
    stream, errors = seen.layers(Site.RESIDUAL), []
    for i, block in enumerate(blocks):
        if block.attention_writer is block.mlp_writer is block.mixer is None:
            return {"writes": "unavailable: the modules that write to the residual stream are not known"}
        added = [
            *([seen.tensors[Site.ATTN_OUT, i]] if block.attention_writer is not None else []),
            *([mixed[i] * block.scale] if i in mixed else []),
            *([seen.tensors[Site.MLP_OUT, i]] if block.mlp_writer is not None else []),
        ]
        # Added in the order of sequential and of parallel layers: in bfloat16 a sum depends on its order.
        sequential, parallel = sum(added, start=stream[i]), sum(added[1:], start=added[0]) + stream[i]
        errors.append(min(_relative(sequential, stream[i + 1]), _relative(parallel, stream[i + 1])))
    if max(errors) > tolerance:
        return {"residual": max(errors), "writes": "unavailable: residual in + writes is not residual out"}
    return {"residual": max(errors)}


_reports: WeakKeyDictionary[Forward, dict[str, Any]] = WeakKeyDictionary()


def writes(reader: Reader) -> str:
    """Why writes to the residual stream are unavailable; empty where they are what is added to it.

    A model in memory is checked when it is first asked for them, and once, however it is edited; in a context without
    recorder, since that may be within an edit of another pass.
    """
    if (report := reader.facts.get("self_check", _reports.get(reader.forward))) is None:
        try:
            report = Context().run(check, reader)
        except UserError as refusal:
            report = {"writes": f"unavailable: {refusal}"}
        _reports[reader.forward] = report
    return report.get("writes", "")


def alike(control: Reader, reader: Reader) -> None:
    """Take over the check of a model's writes for its control: both have the same architecture."""
    if (report := reader.facts.get("self_check", _reports.get(reader.forward))) is not None:
        _reports[control.forward] = report


@torch.no_grad()
def _plain(reader: Reader, tokens: Tokens | Rows) -> tuple[Tensor, list[Tensor], dict[int, Tensor]]:
    """Of a pass without our attention function: log-probabilities at the final tokens [input vocabulary]; the hidden
    states that transformers returns, at every real position [row d_model], none if it returns none; and by layer what
    its mixer adds, where its attention is not read."""
    rows = (torch.arange(len(tokens)), tokens.lengths - 1)
    every = (torch.arange(tokens.data.shape[1]) < tokens.lengths[:, None]).nonzero(as_tuple=True)
    here = get_ident()  # another thread may run a pass of the same model meanwhile
    mixed: dict[int, Tensor] = {}
    states: list[Tensor] = []

    def asked(_module: Any, args: Any) -> Any:
        return (args[0][rows][:, None], *args[1:]) if get_ident() == here else None

    def mixes(layer: int, _module: Any, _args: Any, out: Any) -> None:
        if get_ident() == here:
            mixed[layer] = (out[0] if isinstance(out, tuple | list) else out)[every].cpu()

    def whole(_module: Any, _args: Any, out: Any) -> None:
        if get_ident() == here:
            states.extend(state[every].cpu() for state in getattr(out, "hidden_states", None) or ())

    with ExitStack() as hooks:
        hooks.enter_context(_unmarked(reader.model))
        hooks.callback(reader.model.get_output_embeddings().register_forward_pre_hook(asked).remove)
        hooks.callback(reader.model.register_forward_hook(whole).remove)
        for layer, block in enumerate(reader.blocks):
            if block.mixer is not None:
                hooks.callback(block.mixer.register_forward_hook(partial(mixes, layer)).remove)
        logits = reader.forward.logits(tokens.data, output_hidden_states=True)
    return logits.float().log_softmax(-1).cpu(), states, mixed


@contextmanager
def _unmarked(model: Any) -> Iterator[None]:
    """When it is first asked for hidden states, transformers leaves hooks on the model, and marks it: both go again."""
    mark = "_output_capturing_hooks_installed"
    marked = {module for module in model.modules() if mark in vars(module)}
    try:
        yield
    finally:
        fresh = [module for module in model.modules() if mark in vars(module) and module not in marked]
        for module in fresh:
            delattr(module, mark)
        for module in model.modules() if fresh else ():
            for key, hook in [*module._forward_hooks.items()]:
                if "output_capturing_hook" in getattr(hook, "__qualname__", ""):
                    del module._forward_hooks[key]


def _relative(x: Tensor, y: Tensor) -> float:
    """Largest |x - y| over |y|, or over the rms of y where that is larger; where y is 0 throughout, |x - y| itself.

    A number is rounded by a share of itself: over the rms alone, half a bit of a coordinate that is 16 times as large
    (real models have such) is more than the tolerance of bfloat16.
    """
    x, y = x.float(), y.float()
    scale = float(y.square().mean().sqrt()) or 1.0
    return float(((x - y).abs() / y.abs().clamp_min(scale)).max())
