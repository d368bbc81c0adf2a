"""Jacobian lenses: one matrix a layer, which carries the residual stream to the last layer before it is unembedded."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from llmgeom.batch import Prompts
from llmgeom.errors import UserError, brief, first_line
from llmgeom.files import write_whole
from llmgeom.model.attention import Recorder
from llmgeom.model.capture import Site
from llmgeom.model.edits import Edit, Where
from llmgeom.progress import tell, watched

TOKENS = 256  # in a pass whose activations stay for gradients
SAME = 1e-2  # how far the last layer's matrix may be from the identity that it is by definition (float16 files)


@dataclass(frozen=True, eq=False)
class Transport:
    """The matrices of a Jacobian lens, h -> J_l h, by the number l of the layer whose output h is.

    J_l is the mean over prompts and positions t of the sum over t' >= t of the Jacobian of the last layer's output at
    t' by the output of layer l at t (Gurnee et al. 2026). The last layer's is the identity.

    Attributes:
        matrices: Layer -> [d_model d_model].
        attrs: Of a fit: `prompts`, `prompts a row`, and `error`, by layer the standard error of the whole matrix over
            prompts, relative to its Frobenius norm.
    """

    matrices: Mapping[int, Tensor]
    attrs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str) -> Transport:
        """Read a file: safetensors, npz, or the published .pt, of which tensors alone are read, never code.

        A name ends in the number of the layer; an array of three axes holds one matrix after another.

        Raises:
            UserError: The file cannot be read, holds other objects than tensors, or no matrix by layer.
        """
        try:
            if path.endswith(".npz"):
                with np.load(path, allow_pickle=False) as arrays:
                    found: Any = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
            elif path.endswith(".safetensors"):
                found = load(Path(path).read_bytes())
            else:
                with warnings.catch_warnings(action="ignore"):  # of another pickle protocol; the refusal says it
                    found = torch.load(path, map_location="cpu", weights_only=True)
        except OSError as error:
            raise UserError(f"transport {path}: {first_line(error)}; expected .safetensors, .npz or .pt") from error
        except Exception as error:  # three libraries, each with errors of its own
            raise UserError(
                f"transport {path}: it is cut, or holds other objects than tensors; expected .safetensors, .npz or .pt"
            ) from error
        found = found.get("J", found) if isinstance(found, dict) else found
        if isinstance(found, Tensor) and found.dim() == 3:
            found = dict(enumerate(found))
        named = (
            {}
            if not isinstance(found, dict)
            else {
                int(end[0]): each
                for name, each in found.items()
                if (end := re.findall(r"\d+$", str(name)))
                and isinstance(each, Tensor)
                and each.dim() == 2
                and each.is_floating_point()
            }
        )
        if not named:
            keys = ", ".join(map(str, found)) if isinstance(found, dict) else brief(type(found).__name__)
            raise UserError(f"transport {path} holds {keys[:200]}: expected matrices, named by their layer's number")
        return cls({layer: named[layer].float() for layer in sorted(named)})

    def save(self, path: str) -> None:
        """Write the matrices as safetensors, float16 as published lenses have them; `load` reads it."""
        tensors = {f"J.{layer}": matrix.half().contiguous() for layer, matrix in self.matrices.items()}
        write_whole(Path(path), save(tensors))

    def of(self, subject: Any) -> dict[int, Tensor]:
        """The matrices by the row of the lens that they carry, layer + 1, the last row's identity left out.

        Raises:
            UserError: A matrix of another width or of a layer that this model has not, or a number that is not finite;
                a matrix of the last layer that is not the identity: layers were counted by their input.
        """
        width, depth = subject.facts["d_model"], len(subject.blocks)
        for layer, matrix in self.matrices.items():
            if matrix.shape != (width, width) or not 0 <= layer < depth or not matrix.isfinite().all():
                raise UserError(
                    f"transport: the matrix of layer {layer} has shape {tuple(matrix.shape)}; {subject.name} has "
                    f"layers 0 to {depth - 1} and reads {width} x {width} finite numbers"
                )
        last = self.matrices.get(depth - 1)
        if last is not None and (last - torch.eye(width)).abs().max() > SAME:
            raise UserError(
                f"transport: the matrix of layer {depth - 1}, the last, is not the identity; matrix l belongs to the "
                "output of layer l"
            )
        return {layer + 1: matrix for layer, matrix in self.matrices.items() if layer < depth - 1}


@watched()
@torch.enable_grad()
def fit_lens(subject: Any, prompts: Prompts, rows: int | None = None, skip: int = 16) -> Transport:
    """Fit a Jacobian lens: the average Jacobian of the last layer's output by each earlier layer's, by autograd.

    J_l = mean over prompts and positions t of the sum over t' >= t of dh_L(t') / dh_l(t) (Gurnee et al. 2026). One
    backward pass gives one row of every layer's matrix: a prompt costs d_model of them, which is why `rows` spreads
    the rows over prompts, an unbiased estimate with more error.

    Args:
        prompts: Texts of the kind that the lens will read.
        rows: How many rows of the matrices a prompt measures; all by default.
        skip: The first positions of a text, left out as the attention sink is; so is the last one.

    Returns:
        For `lens(transport=...)`; `attrs["error"]` is the standard error by layer, relative to the matrix, and
        `save(path)` writes it.

    Raises:
        UserError: Fewer than two prompts for each row; a prompt of skip + 1 tokens or fewer.
    """
    tokens, depth, width = subject.tokens(prompts), len(subject.blocks), subject.facts["d_model"]
    lengths, each = tokens.lengths, width if rows is None else rows
    if depth < 2 or not 1 <= each <= width or skip < 0:
        raise UserError(
            f"fit_lens(rows={rows}, skip={skip}) of {depth} layers: expected 1 to {width} rows, no negative skip, and "
            "two layers or more"
        )
    parts = -(-width // each)  # parts of the rows; prompt i measures part i % parts
    if len(lengths) < 2 * parts:
        raise UserError(
            f"fit_lens of {len(lengths)} prompts, {each} of {width} rows in each: a standard error needs "
            f"{2 * parts} prompts or more, so that two measure each row"
        )
    if int(lengths.min()) < skip + 2:
        raise UserError(
            f"prompt {int(lengths.argmin()) + 1} has {int(lengths.min())} tokens: fit_lens leaves out the first {skip} "
            f"and the last one; give longer texts, or a smaller skip"
        )
    sums = torch.zeros(2, depth - 1, width, width, dtype=torch.float32)  # of a prompt's rows, and of their squares
    counts = torch.zeros(width)
    done, passes = 0, len(lengths) * each
    for part in range(parts):
        members = torch.arange(part, len(lengths), parts)
        measured = range(part * each, min((part + 1) * each, width))
        for some in members.split(max(1, TOKENS // int(lengths.max()))):
            final, leaves, mean = _pass(subject, tokens, some, skip)
            for row in measured:
                slopes = torch.autograd.grad(final[:, row].sum(), leaves, retain_graph=row != measured[-1])
                for layer, slope in enumerate(slopes):
                    means = torch.einsum("bt,btd->bd", mean, slope.float()).cpu()
                    sums[0, layer, row] += means.sum(0)
                    sums[1, layer, row] += means.square().sum(0)
                done += len(some)
                tell("rows of Jacobians", done, passes)
            counts[list(measured)] += len(some)
    n = counts[:, None]
    matrices, squares = sums[0] / n, sums[1] / n
    variance = (squares - matrices.square()).clamp_min(0) / (n - 1)
    error = variance.sum((1, 2)).sqrt() / matrices.square().sum((1, 2)).sqrt()
    facts = {"prompts": len(lengths), "prompts a row": int(counts.min()), "error": error.tolist()}
    return Transport(dict(enumerate(matrices)), facts)


def _pass(subject: Any, tokens: Any, members: Tensor, skip: int) -> tuple[Tensor, list[Tensor], Tensor]:
    """Of some prompts: the last layer's output at the valid positions [row d_model], zeros added to the output of each
    earlier layer, and 1 / the number of a prompt's valid positions at these, else 0 [prompt position]."""
    width = int(tokens.lengths[members].max())
    place = torch.arange(width)
    valid = (place >= skip) & (place < tokens.lengths[members][:, None] - 1)
    depth, leaves = len(subject.blocks), {}

    def watched(x: Tensor, where: Where) -> Tensor:
        leaves[where.layer] = torch.zeros_like(x, requires_grad=True)
        return x + leaves[where.layer]

    edits = [*subject.edits, Edit("residual", watched, tuple(range(1, depth)))]
    rows = valid.nonzero(as_tuple=True)
    recorder = Recorder(subject.blocks, rows, frozenset({Site.RESIDUAL}), edits, (members, valid))
    with subject.forward.attached(bool(subject.edits)):
        subject.forward.run(recorder, tokens.data[members, :width])
    final = recorder.kept[Site.RESIDUAL, depth].float()
    mean = (valid / valid.sum(1, keepdim=True)).float().to(final.device)
    return final, [leaves[layer] for layer in range(1, depth)], mean
