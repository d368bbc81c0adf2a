"""Steering, and the text that a model writes with its edits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from llmgeom.batch import Prompts
from llmgeom.errors import UserError
from llmgeom.files import sha256
from llmgeom.model.capture import Site
from llmgeom.verbs.lens import one_prompt


def place(direction: Any, layer: int | None) -> tuple[Any, int, str]:
    """The vector, layer and edit point of a direction: of a label probe its own, of numbers the residual stream.

    Raises UserError: numbers without a layer; a probe of several classes, of stored activations or of single heads.
    """
    if not hasattr(direction, "direction"):
        if layer is None:
            raise UserError("a direction of numbers has no layer of its own: give layer=")
        return direction, layer, "residual"
    if direction.direction is None:
        raise UserError(f"a label of {len(direction.classes_)} classes has no one direction: probe two of them")
    if direction.site not in ("residual", "attn_out", "mlp_out"):
        raise UserError(f"a direction at {direction.site} lies in single heads: probe residual, attn_out or mlp_out")
    return direction.direction, direction.layer if layer is None else layer, direction.site


def added(subject: Any, direction: Any, dose: float) -> tuple[Callable[[torch.Tensor], torch.Tensor], dict[str, Any]]:
    """x -> x + dose direction, and what it does as plain data. Raises UserError for another width or no number."""
    numbers = direction.detach().cpu().float().numpy() if isinstance(direction, torch.Tensor) else direction
    vector = np.asarray(numbers, dtype=np.float64)
    if vector.shape != (subject.facts["d_model"],) or not np.isfinite(vector).all() or not math.isfinite(dose):
        raise UserError(
            f"steer with a direction of shape {vector.shape} and dose {dose}: expected {subject.facts['d_model']} "
            "finite numbers, one for each dimension of the residual stream"
        )
    step = torch.from_numpy(dose * vector)
    return lambda x: x + step.to(x), {"steer": sha256(vector.tobytes()), "dose": float(dose)}


class Generated(str):
    """What a model wrote after a prompt: a string, with `tokens`, the ids that it is made of."""

    tokens: tuple[int, ...]


def generate(subject: Any, prompt: Prompts, tokens: int, temperature: float, seed: int) -> Generated:
    """See `Verbs.generate`."""
    if tokens < 1 or temperature < 0:
        raise UserError(
            f"generate(tokens={tokens}, temperature={temperature}): expected 1 token or more, and 0 or more"
        )
    ids, _ = one_prompt(subject, prompt)
    limit, start = subject.facts["positions"], len(ids)
    stops = getattr(getattr(subject.model, "generation_config", None), "eos_token_id", None)
    ends = set(stops if isinstance(stops, list) else [stops])
    ends.add(getattr(subject.tokenizer, "eos_token_id", None))
    generator = torch.Generator().manual_seed(seed)
    while len(ids) < start + tokens and (limit is None or len(ids) < limit):
        log_probs = subject.capture([ids], Site.LOG_PROBS).log_probs[0]
        if temperature:
            token = int(torch.multinomial((log_probs / temperature).softmax(-1), 1, generator=generator))
        else:
            token = int(log_probs.argmax())
        ids = [*ids, token]
        if token in ends:
            break
    new = ids[start:]
    text = Generated(
        subject.tokenizer.decode(new, skip_special_tokens=True) if subject.tokenizer else " ".join(map(str, new))
    )
    text.tokens = tuple(new)
    return text
