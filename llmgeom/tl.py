"""A subject read through TransformerLens: for models that keep attention to themselves, and as a second opinion.

GPT-J, GPT-Neo, BLOOM and Falcon do not send their attention through transformers' interface. TransformerLens' bridge
knows their layout and has hooks of its own; only those are used here. The price: a full pattern a layer (batch x head
x seq x seq) lives while the layer runs.
"""

from __future__ import annotations

import copy
import threading
import warnings
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from llmgeom.attention import Recorder
from llmgeom.blocks import Block
from llmgeom.capture import Site
from llmgeom.edits import Point
from llmgeom.errors import Refused, Unavailable, UnsupportedModel
from llmgeom.subject import Subject, describe

# The bridge's hook of each site of a layer; query and key depend on the model (BridgeSubject._hook_names).
HOOKS = {
    Site.VALUE: "attn.hook_v",
    Site.ATTENTION: "attn.hook_pattern",
    Site.Z: "attn.hook_z",
    Site.ATTENTION_WRITE: "hook_attn_out",
    Site.MLP_WRITE: "hook_mlp_out",
    Site.RESIDUAL: "hook_resid_pre",
}
POINT: dict[Site, Point] = {
    Site.VALUE: "value",
    Site.Z: "z",
    Site.ATTENTION_WRITE: "attention_write",
    Site.MLP_WRITE: "mlp_write",
}
ROWS = frozenset({Site.ATTENTION, Site.ATTENTION_ENTROPY, Site.ATTENTION_FIRST})
# These scale the query after the projection that the bridge hooks: hook_q is not what attention consumes.
SCALE_LATER = frozenset({"opt", "xglm", "biogpt"})
# The bridge's hooks answer to every forward of the bridge, whichever thread runs it.
_one_pass = threading.Lock()


@dataclass(frozen=True, eq=False)
class BridgeSubject(Subject):
    """A Subject whose passes run in `bridge`, a TransformerBridge around a copy of `model`.

    `model` stays as it was given and is what the parity check compares with. The copy shares its parameters; where a
    family keeps query, key and value in one matrix, the bridge holds them once more, split.
    """

    bridge: Any = field(default=None, repr=False)
    remedy = "neither backend reads this model"

    @classmethod
    def of(cls, model: Any, tokenizer: Any = None, name: str = "model", **facts: Any) -> BridgeSubject:
        """A subject from a transformers causal LM in memory; it is put in eval mode and otherwise left alone.

        Raises UnsupportedModel where TransformerLens has no adapter for the family, or not for all of its layers.
        """
        model = getattr(model, "_orig_mod", model).eval()
        bridge = _boot(model, name)
        lens = f"transformer_lens {version('transformer-lens')}"
        window = getattr(model.config, "window_size", None) if "local" in _kinds(model.config) else None
        found = {
            **describe(model, name),
            "kv_heads": bridge.cfg.n_key_value_heads or bridge.cfg.n_heads,
            "head_dim": bridge.cfg.d_head,
            "attention": f"eager, read by {lens}",
            "backend": lens,
        }
        found["window"] = found["window"] or window
        return cls(model, tokenizer, name, {**found, **facts}, _blocks(model, bridge, name), bridge=bridge)

    def check(self) -> dict[str, Any]:
        return {"backend": self.facts["backend"], **super().check()}

    def _attached(self):
        return _one_pass

    def _logits(self, ids: Tensor, model: nn.Module | None = None) -> Tensor:
        # No position ids: BLOOM has none, and the default of the others is the same 0, 1, 2 ...
        ids = ids.to(self.model.get_input_embeddings().weight.device)
        return (model or self.model)(input_ids=ids, use_cache=False).logits[:, 0]

    def _run(self, recorder: Recorder, ids: Tensor) -> Tensor:
        hooks = self._hooks(recorder)
        fired: set[str] = set()

        def named(name, hook):
            def run(x, hook_point=None, **_):
                fired.add(name)
                return hook(x)

            return run

        def last(_module, args):
            prompt, position, *_ = recorder.on(args[0].device)
            return (args[0][prompt, position][:, None], *args[1:])

        handle = self.bridge.original_model.get_output_embeddings().register_forward_pre_hook(last)
        try:
            with self.bridge.hooks(fwd_hooks=[(name, named(name, hook)) for name, hook in hooks.items()]):
                logits = self._logits(ids, self.bridge.original_model)
        finally:
            handle.remove()
        silent = [name for name in hooks if name not in fired]
        if silent:
            raise self._unavailable(silent[0])
        return logits
