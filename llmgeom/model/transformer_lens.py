"""A model read through TransformerLens: for families that keep attention to themselves, and as a second opinion.

GPT-J, GPT-Neo and BLOOM do not send their attention through transformers' interface. TransformerLens' bridge knows
their layouts and has hooks of its own; only those are used here. The price: a layer's whole pattern
[batch head seq seq] exists while that layer runs, in the model's dtype, and rows are read from it.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from typing import Any, ClassVar

from torch import Tensor

from llmgeom.errors import Unavailable, UnsupportedModel, first_line
from llmgeom.model.attention import Recorder
from llmgeom.model.capture import ROWS, Site
from llmgeom.model.edits import Point
from llmgeom.model.forward import Backend, Forward
from llmgeom.model.layers import THROUGH_TL, Block, blocks

HOOKS = {
    Site.VALUE: "attn.hook_v",
    Site.ATTENTION: "attn.hook_pattern",
    Site.Z: "attn.hook_z",
    Site.ATTN_OUT: "hook_attn_out",
    Site.MLP_OUT: "hook_mlp_out",
    Site.RESIDUAL: "hook_resid_pre",
}
POINTS: tuple[Point, ...] = ("residual", "value", "z", "attn_out", "mlp_out")  # as their sites are called
# hook_q and hook_k are projections. Attention consumes them as they are in these families only, as their modelling
# files say: position enters elsewhere and nothing follows.
AS_PROJECTED = frozenset({"gpt2", "gpt_neo", "bloom", "mpt"})
OTHERWISE = "leave --backend tl out: transformers reads its residual stream, and attention where it can"
# The bridge's hooks answer to every pass of the bridge, whichever thread runs it.
_one_pass = threading.RLock()


@dataclass(frozen=True, eq=False)
class BridgeForward(Forward):
    """Runs `bridge`, a TransformerBridge around a copy of `model`.

    `model` is not changed: the self-check compares with it. The copy shares its parameters, but where a family keeps
    query, key and value in one matrix the bridge holds them a second time, split.
    """

    bridge: Any = field(repr=False)
    backend: ClassVar[Backend] = "tl"

    @property
    def attention(self) -> str:
        return f"eager, read by {_version()}"

    @property
    def concurrent(self) -> bool:
        return False  # its hooks are those of the whole model

    def run(self, recorder: Recorder, inputs: Tensor) -> Tensor:
        acts = self._acts(recorder)
        known, fired = self.bridge.hook_dict, set()

        def noted(name, act, x, hook):
            fired.add(name)
            return act(x)

        for name, (site, _) in acts.items():
            if name not in known:
                raise self._unavailable(site, name)
        hooks = [(name, partial(noted, name, act)) for name, (_, act) in acts.items()]
        with _one_pass, self.bridge.hooks(fwd_hooks=hooks):
            output = self.bridge.original_model.get_output_embeddings()
            handle = output.register_forward_pre_hook(lambda _module, args: recorder.asked(args[0]))
            try:
                # No position_ids: BLOOM knows none, and what the others assume is 0, 1, 2 ... as well.
                inputs = inputs.to(self.model.get_input_embeddings().weight.device)
                logits = self.bridge.original_model(input_ids=inputs, use_cache=False).logits[:, 0]
            finally:
                handle.remove()
        for name, (site, _) in acts.items():
            if name not in fired:  # some hook points exist and never run; an edit there would change nothing, silently
                raise self._unavailable(site, name)
        return logits

    def _acts(self, recorder: Recorder) -> dict[str, tuple[Site, Callable[[Tensor], Tensor | None]]]:
        """Name of a hook of the bridge -> the site it serves and what to do with the tensor that arrives there."""
        depth = len(self.blocks)
        for point, _ in recorder.edits:
            if point not in POINTS:
                raise Unavailable(
                    f"{self.name}: an edit at {point} cannot be made through TransformerLens; edit one of "
                    f"{', '.join(POINTS)}, or leave --backend tl out where transformers reads the model"
                )
        # Whether attention consumes keys and queries as they are projected. MPT may clip them; OPT scales its queries.
        config = self.model.config
        clipped = getattr(getattr(config, "attn_config", None), "clip_qkv", None)
        as_projected = config.model_type in AS_PROJECTED and not clipped
        key = "attn.hook_k" if as_projected or config.model_type == "opt" else "attn.hook_rot_k"
        hooks = HOOKS | {Site.KEY: key, Site.QUERY: "attn.hook_q" if as_projected else "attn.hook_rot_q"}
        sites = recorder.wanted | {Site.Z} | ({Site.ATTENTION} if recorder.wanted & ROWS else set())
        acts: dict[str, tuple[Site, Callable[[Tensor], Tensor | None]]] = {
            f"blocks.{layer}.{hook}": (site, partial(self._act, recorder, site, layer))
            for layer in range(depth)
            for site, hook in hooks.items()
            if site in sites or (site.value, layer) in recorder.edits
        }
        if Site.RESIDUAL in sites:
            last = partial(self._act, recorder, Site.RESIDUAL, depth)
            acts[f"blocks.{depth - 1}.hook_resid_post"] = (Site.RESIDUAL, last)
        return acts

    def _act(self, recorder: Recorder, site: Site, layer: int, x: Tensor) -> Tensor | None:
        """Keeps, and edits, what arrives at a hook: the whole attention pattern of a layer, or x [batch position ...].

        The edited tensor; None where it stays as it is.
        """
        if site is Site.ATTENTION:
            recorder.keep_rows(layer, x.device, lambda prompt, position: x[prompt, :, position].float())
            return None
        heads, dim = self.bridge.cfg.n_heads, self.bridge.cfg.d_head
        if site in (Site.VALUE, Site.KEY):
            heads = self.bridge.cfg.n_key_value_heads or heads
        if site is Site.Z:
            recorder.seen.append(layer)
        y = x
        if site in (Site.VALUE, Site.KEY, Site.QUERY, Site.Z):
            if x[0, 0].numel() != heads * dim:
                raise UnsupportedModel(
                    f"{self.name}: {site.value} of layer {layer} has shape {tuple(x.shape)} in TransformerLens, "
                    f"which is not {heads} heads of {dim}; {OTHERWISE}"
                )
            y = x.reshape(*x.shape[:2], heads, -1)
        edited: list[Point] = [point for point in POINTS if point == site.value and (point, layer) in recorder.edits]
        for point in edited:
            y = recorder.edit(point, layer, y)
        recorder.keep(site, layer, y)
        return y.reshape(x.shape) if edited else None

    def _unavailable(self, site: Site, hook: str) -> Unavailable:
        why = f"its hook {hook} does not exist or does not run for this family"
        if site in (Site.KEY, Site.QUERY):
            turned = any("rotary" in type(module).__name__.lower() for module in self.model.modules())
            turned = turned or hasattr(self.model.config, "rotary_dim")  # GPT-J and CodeGen have no module for it
            after = "rotary embedding" if turned else "what this family does to them next"
            why = f"it shows them before {after} only, and attention consumes them after it"
            why += "" if self.model.config.model_type in THROUGH_TL else "; leave --backend tl out"
        what = f"{self.name} ({self.model.config.model_type}): {site.value}"
        return Unavailable(f"{what} is not available from {_version()}; {why}")


def through_transformer_lens(model: Any, name: str) -> tuple[BridgeForward, tuple[Block, ...], dict[str, Any]]:
    """How to run a model, its layers, and its facts where they differ from those of its config.

    The bridge is around a copy of the model, for it rewrites what it is given. It reads no network and no files.

    Raises UnsupportedModel: TransformerLens cannot wrap the model, or one of its layers.
    """
    copied = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    if copied._can_set_attn_implementation():
        copied.set_attn_implementation("eager")
    else:
        copied.config._attn_implementation = "eager"
    config = copy.deepcopy(copied.config)
    with warnings.catch_warnings():
        # Its import changes the warning filters of the whole process, and its advice on loading is not for our readers.
        warnings.simplefilter("ignore")
        from transformer_lens.model_bridge.sources import build_bridge_from_module

        try:
            bridge = build_bridge_from_module(copied, type(model).__name__, hf_config=config, model_name=name)
        except Exception as error:  # an adapter fails in its own way on a variant that it was not written for
            raise UnsupportedModel(
                f"{name}: TransformerLens cannot wrap {type(model).__name__} "
                f"({type(error).__name__}: {first_line(error)}); {OTHERWISE}"
            ) from error
    layers = []
    for index, block in enumerate(blocks(model, name)):
        # Where attention keeps to itself, the module that mixes positions is it.
        attention, writer = block.attention or block.mixer, block.attention_writer or block.mixer
        if attention is None or block.mlp_writer is None:
            raise UnsupportedModel(
                f"{name}: layer {index} is not attention and MLP, so TransformerLens cannot read it; {OTHERWISE}"
            )
        layers.append(replace(block, attention=attention, attention_writer=writer, mixer=None))
    found = tuple(layers)
    forward = BridgeForward(model, name, found, bridge)
    facts: dict[str, Any] = {
        "kv_heads": bridge.cfg.n_key_value_heads or bridge.cfg.n_heads,
        "head_dim": bridge.cfg.d_head,
        "attention": forward.attention,
        "backend": _version(),
    }
    if "local" in getattr(model.config, "attention_layers", ()):
        facts["window"] = model.config.window_size
    return forward, found, facts


def _version() -> str:
    return f"transformer_lens {version('transformer-lens')}"
