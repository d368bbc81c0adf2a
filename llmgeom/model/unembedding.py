"""A model's own way from its last residual to its logits, through which a logit lens reads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from llmgeom.errors import Unavailable
from llmgeom.model.capture import Site
from llmgeom.model.forward import Reader
from llmgeom.model.self_check import probe_batch


@dataclass(frozen=True, eq=False)
class Unembedding:
    """Final norm (or the identity), and the model's own code from there to its logits: its output embedding and what
    stands before and after it (a soft-cap, a scale, a dense layer, or nothing).

    Attributes:
        norm: The module between the last layer and the output embedding.
        head: The output embedding.
        logits: Normalised states [row 1 d_model] -> logits [row 1 vocabulary].
        after: What the output embedding returns, of any shape -> logits.
        dtype: Of the residual stream, which Mamba keeps in float32.
    """

    norm: nn.Module
    head: nn.Module
    logits: Callable[[Tensor], Tensor]
    after: Callable[[Tensor], Tensor]
    dtype: torch.dtype

    @torch.no_grad()
    def __call__(self, residual: Float[Tensor, "row d_model"]) -> Float[Tensor, "row vocabulary"]:
        """Log-probabilities in nats, float32, where the residual is."""
        hidden = self.norm(residual.to(next(self.head.parameters()).device, self.dtype)[:, None])
        return self.logits(hidden)[:, 0].float().log_softmax(-1).to(residual.device)


class _Given(nn.Module):
    """Stands in the place of a model's decoder: it returns the states that it is given."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.of = [decoder]  # not a child: it answers for what a head reads of it (Falcon-H1's lm_head_multiplier)
        self.state = torch.empty(0)

    def __getattr__(self, name: str) -> Any:
        return vars(self)[name] if name in vars(self) else getattr(vars(self)["of"][0], name)

    def forward(self, *_: Any, **__: Any) -> Any:
        return _Output(last_hidden_state=self.state)


class _Output(SimpleNamespace):
    """What a decoder returns: fields that are not there are None, as transformers has it; also a tuple."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def __getitem__(self, at: Any) -> Any:
        return (self.last_hidden_state,)[at]


def _own_head(model: Any, **given: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """The model's forward with states in the place of its decoder's, so that whatever a family does there is done.

    `given` stands in the place of further modules of the model.
    """
    prefix = getattr(model, "base_model_prefix", "")
    decoder = model._modules.get(prefix)
    if decoder is None:
        return None

    def logits(states: Tensor) -> Tensor:
        shallow, place = copy.copy(model), _Given(decoder)
        place.state = states
        shallow._modules = {**model._modules, prefix: place, **given}
        tokens = torch.zeros(states.shape[:2], dtype=torch.int64, device=states.device)
        # Of the class: accelerate puts a forward on the object, which would move to another device.
        return type(model).forward(shallow, input_ids=tokens, use_cache=False).logits

    return logits


@torch.no_grad()
def unembedding_of(reader: Reader) -> Unembedding:
    """Found by trial on two random sequences: the norm is the module next to the layers from which the model's own
    head, or its output embedding alone, gives the model's own log-probabilities.

    Raises Unavailable: none does, or the output embedding is not in memory.
    """
    plain = replace(reader, edits=())  # an edit at a token or a place may not meet it here
    seen = plain.capture(probe_batch(reader.facts), {Site.RESIDUAL, Site.LOG_PROBS})
    last = seen.layers(Site.RESIDUAL)[-1]
    head = reader.model.get_output_embeddings()
    if head is None or next(head.parameters()).is_meta:
        raise Unavailable(f"{reader.name} has no output embedding in memory; a logit lens reads through it")
    # The same code on the same numbers: what differs is the shape of a batch, which rounds otherwise.
    near = 1e-4 if reader.facts["dtype"] == "float32" else 3e-2
    spread = float(seen.log_probs.std(-1).mean())
    names = [name for name, child in reader.model.named_children() if child is head]
    own = (_own_head(reader.model), _own_head(reader.model, **dict.fromkeys(names, nn.Identity())))
    for norm in _norms(reader.model):
        for logits, after in (own, (head, nn.Identity())):
            if logits is None or after is None:
                continue
            found = Unembedding(norm, head, logits, partial(_one_row, after), last.dtype)
            try:
                ours = found(last)
            except (TypeError, RuntimeError, ValueError, AttributeError):  # not a module of one tensor: no norm
                continue
            if ours.shape == seen.log_probs.shape and (ours - seen.log_probs).abs().max() <= near * spread:
                return found
    raise Unavailable(
        f"{reader.name}: how model type {reader.facts['model_type']!r} goes from its last layer to its logits is not "
        "known; a logit lens would not be its own"
    )


def _norms(model: nn.Module) -> list[nn.Module]:
    """Modules next to a list of layers; the norm is mostly one. Two in their order, too: OPT-350m projects after it."""
    norms: list[nn.Module] = []
    for owner in model.modules():
        if any(isinstance(child, nn.ModuleList) for child in owner.children()):
            norms += [child for child in owner.children() if not isinstance(child, nn.ModuleList | nn.Embedding)]
    return [*norms, nn.Identity()]


def _one_row(after: Callable[[Tensor], Tensor], logits: Tensor) -> Tensor:
    return after(logits.reshape(1, 1, -1)).view_as(logits)
