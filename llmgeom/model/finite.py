"""Refuses numbers that are not finite, and names the prompt and the layer that they come from."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from llmgeom.errors import UserError
from llmgeom.model.attention import Recorder
from llmgeom.model.capture import Key, Site
from llmgeom.model.forward import Reader
from llmgeom.model.passes import CapturePlan


def check_logits(reader: Reader, plan: CapturePlan, finite: Tensor, prompts: list[int]) -> None:
    """Raises UserError where logits are not finite, with the first layer whose output is not.

    Args:
        finite: [row] bool.
    """
    if finite.all():
        return
    prompt = prompts[int((~finite).nonzero()[0, 0])]
    length = int(plan.tokens.lengths[prompt])
    rows = (torch.zeros(length, dtype=torch.int64), torch.arange(length))
    where = (torch.tensor([prompt]), plan.examined[[prompt], :length])
    inputs = plan.tokens.data[[prompt], :length]
    tokens = None if inputs.is_floating_point() else inputs
    recorder = Recorder(reader.blocks, rows, frozenset({Site.RESIDUAL}), plan.edits, where, tokens=tokens)
    reader.forward.run(recorder, inputs)
    bad = [layer for (_, layer), t in sorted(recorder.kept.items()) if not torch.isfinite(t).all()]
    place = "the output embedding" if not bad else "the input embedding" if bad[0] == 0 else f"layer {bad[0] - 1}"
    raise UserError(
        f"{reader.name} gives logits that are not finite on {_name(reader, plan, prompt)}; the first numbers that "
        f"are not finite come from {place}: {_remedy(plan)}"
    )


def check_rows(reader: Reader, plan: CapturePlan, tensors: Mapping[Key, Tensor], members: list[int]) -> None:
    """Raises UserError where a captured row is not finite although its logits are, as a soft-cap can make them."""
    for (site, layer), tensor in tensors.items():
        if torch.isfinite(tensor.sum(dtype=torch.float32)):  # reads once, where isfinite makes two copies
            continue
        rows = (~torch.isfinite(tensor.reshape(len(tensor), -1))).any(1).nonzero()
        if len(rows):
            prompt = members[int(plan.where[members].nonzero()[rows[0, 0], 0])]
            what = site.replace("_", " ") + (f" of layer {layer}" if layer >= 0 else "")
            raise UserError(
                f"{reader.name}: {what} is not finite on {_name(reader, plan, prompt)}, and nothing is "
                f"averaged over it: {_remedy(plan)}"
            )


def _remedy(plan: CapturePlan) -> str:
    points = ", ".join(dict.fromkeys(edit.point for edit in plan.edits))
    return (f"check what the edits return ({points}), " if points else "") + "try --dtype float32, or check the weights"


def _name(reader: Reader, plan: CapturePlan, prompt: int) -> str:
    if plan.batch.source.get("kind") == "self_check":
        return f"prompt {prompt + 1} (random tokens, the self-check at load)"
    if reader.tokenizer is None:
        return f"prompt {prompt + 1}"
    text = reader.tokenizer.decode(plan.tokens.data[prompt, : plan.tokens.lengths[prompt]])
    return f"prompt {prompt + 1} ({text[:60]!r})"
