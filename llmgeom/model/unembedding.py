"""A model's own way from its last residual to its logits, through which a logit lens reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from llmgeom.errors import Unavailable
from llmgeom.model.capture import Site
from llmgeom.model.forward import Reader
from llmgeom.model.self_check import probe_batch


@dataclass(frozen=True, eq=False)
class Unembedding:
    """Final norm (or the identity), output embedding, and what follows it (a soft-cap, a scale, or nothing)."""

    norm: nn.Module
    head: nn.Module
    after: Callable[[Tensor], Tensor]

    @torch.no_grad()
    def __call__(self, residual: Float[Tensor, "row d_model"]) -> Float[Tensor, "row vocabulary"]:
        """Log-probabilities in nats, float32, where the residual is."""
        hidden = self.norm(_placed_with(self.head, residual)[:, None])
        return self.after(self.head(hidden)[:, 0].float()).log_softmax(-1).to(residual.device)


@torch.no_grad()
def unembedding_of(reader: Reader) -> Unembedding:
    """Found by trial on two random sequences.

    The norm is the module next to the layers that maps the last residual to the input of the output embedding; `after`
    is what then gives the model's own log-probabilities. Raises Unavailable: None does, or the output embedding is not
    in memory.
    """
    plain = replace(reader, edits=())  # an edit at a token or a place may not meet it here
    seen = plain.capture(probe_batch(reader.facts), {Site.RESIDUAL, Site.FINAL, Site.LOG_PROBS})
    last, final = seen.layers(Site.RESIDUAL)[-1], seen.final
    head = reader.model.get_output_embeddings()
    if head is None or next(head.parameters()).is_meta:
        raise Unavailable(f"{reader.name} has no output embedding in memory; a logit lens reads through it")
    near = 1e-3 if reader.facts["dtype"] == "float32" else 3e-2

    def same(ours: Tensor, theirs: Tensor) -> bool:
        return ours.shape == theirs.shape and bool((ours - theirs).abs().max() <= near * theirs.abs().max())

    norms: list[nn.Module] = [nn.Identity()]
    for owner in reader.model.modules():
        if any(isinstance(child, nn.ModuleList) for child in owner.children()):
            norms += [child for child in owner.children() if not isinstance(child, nn.ModuleList | nn.Embedding)]
    config = reader.model.config.get_text_config()
    cap, scale = getattr(config, "final_logit_softcapping", None), getattr(config, "logit_scale", None) or 1.0
    ways: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda logits: logits,
        lambda logits: cap * (logits / cap).tanh() if cap else logits,
        lambda logits: logits * scale,
    )
    for norm in norms:
        try:
            hidden = norm(_placed_with(head, last)[:, None])[:, 0].cpu()
        except (TypeError, RuntimeError, ValueError):  # not a module of one tensor: no norm
            continue
        if same(hidden.float(), final.float()):
            logits = head(_placed_with(head, final)).float().cpu()
            for after in ways:
                if same(after(logits).log_softmax(-1), seen.log_probs):
                    return Unembedding(norm, head, after)
    raise Unavailable(
        f"{reader.name}: how model type {reader.facts['model_type']!r} goes from its last layer to its logits is not "
        "known; a logit lens would not be its own"
    )


def _placed_with(head: nn.Module, x: Tensor) -> Tensor:
    parameter = next(head.parameters())
    return x.to(parameter.device, parameter.dtype)
