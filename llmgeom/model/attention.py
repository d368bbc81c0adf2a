"""The one attention function, registered with transformers, through which every family alike is read and edited.

transformers hands it query, key and value per head, after rotary embedding and norms, grouped heads not repeated. It
keeps what is asked for, recomputes the attention rows of the queried positions in float32 (O(T) a row, no T x T matrix
is kept), applies edits, and delegates to the implementation the model had before.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from llmgeom.errors import UnsupportedModel, UserError
from llmgeom.model.capture import ROWS, Key, Site
from llmgeom.model.edits import Edit, Point, Resumed, Where
from llmgeom.model.layers import Block, attending

# transformers looks for magic substrings in these names ("sdpa", "flash", "flex_attention", "paged|", "/"): avoid them.
FUSED, PLAIN = "llmgeom_fused", "llmgeom_plain"
# Tensor arguments that do not change which positions attend to which. Anything else could replace the mask in silence.
HARMLESS = frozenset({"position_ids", "cache_position", "s_aux"})
INSTEAD = "its residual stream, entropy and logit lens are"
# Eager attention is row-independent: run in chunks of queries it gives the same numbers without a T x T matrix.
CHUNK = 256

active: ContextVar[Recorder | None] = ContextVar("llmgeom_recorder", default=None)
_attached: dict[int, tuple[int, str]] = {}
_lock = threading.Lock()


class Recorder:
    """Keeps and edits activations of one forward pass. It lives for that pass and is found through a ContextVar.

    Attributes:
        rows: (prompt in the pass, position) of every row, two int64 tensors of equal length.
        sites: Kept at these rows.
        everywhere: Sites kept at all real positions, `positions`, for observers.
        kept, kept_everywhere: (site, layer) -> tensor, filled during the pass.
        seen: Layers in the order in which attention was entered.
        masks: layer -> the mask that its attention was given.
        touched: Edits that were applied at least once.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        rows: tuple[Tensor, Tensor],
        sites: frozenset[Site],
        edits: Sequence[Edit],
        where: tuple[Tensor, Tensor],
        everywhere: frozenset[Site] = frozenset(),
        positions: tuple[Tensor, Tensor] | None = None,
        tokens: Tensor | None = None,
        resumed: Resumed | None = None,
    ) -> None:
        layers: dict[nn.Module | None, list[int]] = defaultdict(list)
        self.resumed = resumed
        for index in attending(blocks)[resumed.start if resumed else 0 :]:
            layers[blocks[index].attention].append(index)  # Zamba's layers share one module
        self.layer = {module: iter(indices) for module, indices in layers.items()}
        self.rows = rows
        self.one_each = torch.equal(rows[0], torch.arange(len(where[0])))
        self.sites = sites
        self.everywhere, self.positions = everywhere, positions or rows
        self.where = where
        self.tokens = tokens
        self.edits: dict[tuple[Point, int], list[Edit]] = defaultdict(list)
        for edit in edits:
            for index in edit.on(len(blocks)):
                self.edits[edit.point, index].append(edit)
        self.kept: dict[Key, Tensor] = {}
        self.kept_everywhere: dict[Key, Tensor] = {}
        self.seen: list[int] = []
        self.masks: dict[int, Tensor | None] = {}
        self.touched: set[int] = set()
        self._on: dict[torch.device, tuple[Tensor, ...]] = {}
        self._closed: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        """Rows, edit context and all real positions on a device; moved once per pass, not once per layer."""
        if device not in self._on:
            self._on[device] = tuple(t.to(device) for t in (*self.rows, *self.where, *self.positions))
        return self._on[device]

    @cached_property
    def wanted(self) -> frozenset[Site]:
        """Sites kept at any position."""
        return self.sites | self.everywhere

    def closed(self, mask: Tensor | None, prompt: Tensor, position: Tensor, width: int) -> Tensor:
        """Which keys each row (prompt, position) of the pass may not attend to: [row 1 key] bool.

        The layers of one mask share them. mask: bool [batch 1 seq seq], or of one prompt for all, True = attend; None
        where a row sees what comes before it.
        """
        at = id(mask), id(prompt)
        if at not in self._closed:
            if mask is None:
                closed = (torch.arange(width, device=position.device) > position[:, None])[:, None]
            else:
                closed = ~mask[prompt if mask.shape[0] > 1 else torch.zeros_like(prompt), :, position]
            self._closed[at] = mask, closed  # with its mask, so that no later mask gets its id
        return self._closed[at][1]

    def keep(self, site: Site, layer: int, x: Tensor) -> None:
        """Keep the queried rows of x [batch position ...]. Indexing copies, so no view keeps a layer alive."""
        prompt, position, _, _, every_prompt, every_position = self.on(x.device)
        if site in self.sites:
            self.kept[site, layer] = x[prompt, position]
        if site in self.everywhere:
            self.kept_everywhere[site, layer] = x[every_prompt, every_position]

    def asked(self, x: Tensor) -> tuple[Tensor]:
        """Keep the input of the output embedding, x [batch position d_model], and return its queried rows alone.

        [row 1 d_model]: logits over the whole vocabulary are then computed for queried positions only.
        """
        # The last MLP could read these rows alone, too. It spares 3 % of the time of 410M and 1B shapes and 8 % of 70M,
        # and logits would no longer have the bits of the bare model.
        prompt, position, *_ = self.on(x.device)
        self.keep(Site.FINAL, -1, x)
        return (x[prompt, position][:, None],)

    def keep_rows(self, layer: int, device: torch.device, rows: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Keep statistics of attention weights; `rows(prompt, position)` computes the weights, [row head key]."""
        prompt, position, _, _, every_prompt, every_position = self.on(device)
        if sites := self.sites & ROWS:
            weights = rows(prompt, position)
            self.kept |= {(site, layer): row_statistic(site, weights) for site in sites}
        if sites := self.everywhere & ROWS:
            weights = rows(every_prompt, every_position)
            self.kept_everywhere |= {(site, layer): row_statistic(site, weights) for site in sites}

    def edit(self, point: Point, layer: int, x: Tensor) -> Tensor:
        """x [batch position ...] after the edits of this point and layer."""
        for edit in self.edits.get((point, layer), ()):
            _, _, prompts, query, *_ = self.on(x.device)
            tokens = None if self.tokens is None else self.tokens.to(x.device)
            at = None if self.resumed is None else self.resumed.position.to(x.device)
            x = edit.apply(x, Where(prompts, query, layer, tokens, at))
            self.touched.add(id(edit))
        return x

    def attend(self, kind: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask, **kwargs):
        layer = next(self.layer.get(module, iter(())), None)
        if layer is None:
            raise UnsupportedModel(
                f"{type(module).__name__} attends where no layer is, or more than once in one; {INSTEAD}"
            )
        if query.shape[2] != key.shape[2]:
            raise UserError(
                "capturing while decoding from a cache is not supported; pass the whole text in one forward"
            )
        self.seen.append(layer)
        self.masks[layer] = mask
        states: tuple[tuple[Point, Tensor], ...] = (("query", query), ("key", key), ("value", value))
        query, key, value = (
            self.edit(point, layer, x.transpose(1, 2)).transpose(1, 2) if (point, layer) in self.edits else x
            for point, x in states
        )
        for site, x in ((Site.QUERY, query), (Site.KEY, key), (Site.VALUE, value)):
            if site in self.wanted:
                self.keep(site, layer, x.transpose(1, 2))
        if self.resumed is not None:
            key, value, mask = self.resumed.joined(layer, key, value, mask)
        if ("scores", layer) in self.edits or ("attention", layer) in self.edits:
            z = self._written_out(kind, layer, query, key, value, mask, **kwargs)
        else:
            if self.wanted & ROWS:
                # Eager attention rounds its scores to the model's dtype: a row is to be the one that was used.
                dtype = query.dtype if kind == PLAIN else torch.float32

                def rows(prompt: Tensor, position: Tensor) -> Tensor:
                    one_each = self.one_each and len(prompt) == len(self.rows[0])
                    closed = self.closed(mask, prompt, position, key.shape[2])
                    return attention_rows(
                        query, key, closed, prompt, position, one_each=one_each, dtype=dtype, **kwargs
                    )

                self.keep_rows(layer, query.device, rows)
            z = _delegate(kind, module, query, key, value, mask, **kwargs)
        z = self.edit("z", layer, z)
        self.keep(Site.Z, layer, z)
        return z.contiguous()  # JetMoE views it in another shape

    def _written_out(self, kind: str, layer: int, query, key, value, mask, *, scaling=None, **kwargs) -> Tensor:
        """Attention with its whole matrix of weights, so that scores and weights can be edited: z as `_delegate`."""
        heads, width, dim = query.shape[1:]
        group, dtype = heads // key.shape[1], query.dtype if kind == PLAIN else torch.float32
        scores = query.to(dtype) @ key.to(dtype).repeat_interleave(group, 1).mT
        scores = (scores * (dim**-0.5 if scaling is None else scaling)).transpose(1, 2)
        places = torch.arange(width, device=query.device)
        closed = (places > places[:, None])[None, :, None] if mask is None else ~mask.transpose(1, 2)
        weights = softmaxed(scores, closed, edit=lambda x: self.edit("scores", layer, x), **kwargs)
        # What a query may not look at stays closed: a constant would open the future, and the pads of other prompts.
        weights = self.edit("attention", layer, weights).masked_fill(closed, 0.0)
        if self.wanted & ROWS:
            self.keep_rows(layer, query.device, lambda prompt, position: weights[prompt, position])
        mixed = weights.transpose(1, 2).to(value.dtype) @ value.repeat_interleave(group, 1)
        return mixed.transpose(1, 2)


def row_statistic(site: Site, weights: Tensor) -> Tensor:
    """The statistic of attention weights [row head key] that a site of `ROWS` keeps; see Site."""
    if site is Site.ATTENTION:
        return weights
    if site is Site.ATTENTION_ENTROPY:
        return torch.special.entr(weights).sum(-1)
    if site is Site.ATTENTION_FIRST:
        return weights[..., 0].clone()
    rest = weights[..., 1:]
    rest = rest / rest.sum(-1, keepdim=True).clamp_min(torch.finfo(rest.dtype).tiny)
    return torch.special.entr(rest).sum(-1)


def attention_rows(
    query: Tensor,
    key: Tensor,
    closed: Tensor,
    prompt: Tensor,
    position: Tensor,
    *,
    one_each: bool = False,
    dtype: torch.dtype = torch.float32,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_,
) -> Tensor:
    """softmax(scaling q . k + mask) in float32 for the rows (prompt, position) only: [row head seq] float32.

    query [batch head seq dim], key [batch kv_head seq dim], closed as `Recorder.closed`. Query head h reads kv head
    h // (heads / kv_heads). one_each: row i is prompt i, for every prompt. dtype: of the scores before the softmax.
    softcap c: scores become c tanh(s / c) (Gemma-2). s_aux [head]: a learned sink logit that takes part in the softmax
    and is then dropped (gpt-oss).
    """
    heads, width, dim = query.shape[1], key.shape[2], query.shape[3]
    kv_heads = key.shape[1]
    factor = dim**-0.5 if scaling is None else scaling
    if not len(prompt):  # a batch may have no queried position at all
        return query.new_zeros(0, heads, width, dtype=torch.float32)
    if query.device.type == "cpu" and len(prompt) >= 4 * len(key):
        # Many rows of a prompt: each prompt's keys are read once, not gathered for every row (a fifth of the time).
        parts, seen = [], 0
        for one, rows in zip(*(x.tolist() for x in prompt.unique_consecutive(return_counts=True)), strict=True):
            q = query[one][:, position[seen : seen + rows]].to(dtype).view(kv_heads, -1, dim)
            scores = (q @ key[one].to(dtype).mT).mul_(factor).view(heads, rows, width).transpose(0, 1)
            parts.append(softmaxed(scores, closed[seen : seen + rows], softcap=softcap, s_aux=s_aux))
            seen += rows
        return torch.cat(parts)
    # Each prompt's keys are gathered once a row: bound the copy when a prompt has many rows.
    step = len(prompt) if one_each else max(1, 2**24 // (kv_heads * width * dim))
    parts = []
    for at in range(0, len(prompt), step):
        b, t = prompt[at : at + step], position[at : at + step]
        k = (key if one_each else key[b]).to(dtype)
        q = query[b, :, t].to(dtype).view(len(b), kv_heads, heads // kv_heads, dim)
        scores = (q @ k.mT).mul_(factor).view(len(b), heads, width)
        parts.append(softmaxed(scores, closed[at : at + step], softcap=softcap, s_aux=s_aux))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def softmaxed(
    scores: Tensor,
    closed: Tensor,
    *,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    edit: Callable[[Tensor], Tensor] | None = None,
    **_,
) -> Tensor:
    """Weights [... head key] float32 of scaled scores, which `edit` may change once they are capped and masked."""
    if softcap:
        scores = (scores / softcap).tanh_().mul_(softcap)
    scores = scores.float().masked_fill(closed, float("-inf"))
    if edit is not None:
        scores = edit(scores).masked_fill(closed, float("-inf"))
    if s_aux is None:
        return scores.softmax(-1)
    sink = s_aux.float()[:, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1].contiguous()


def _delegate(kind: str, module: nn.Module, query, key, value, mask, **kwargs) -> Tensor:
    """The model's own attention output, [batch seq head dim]."""
    if kind == FUSED:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **kwargs)[0]
    eager = sys.modules[type(module).__module__].eager_attention_forward
    length = query.shape[2]
    outputs = []
    for at in range(0, length, CHUNK):
        rows = slice(at, min(at + CHUNK, length))
        if mask is None:
            columns = torch.arange(key.shape[2], device=query.device)
            allowed = (columns <= columns[rows, None])[None, None]
        else:
            allowed = mask[:, :, rows]
        added = torch.zeros(allowed.shape, dtype=query.dtype, device=query.device)
        added = added.masked_fill_(~allowed, torch.finfo(query.dtype).min)
        outputs.append(eager(module, query[:, :, rows], key, value, added, **kwargs)[0])
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _attend(kind: str, module, query, key, value, attention_mask=None, **kwargs):
    strange = sorted(k for k, v in kwargs.items() if isinstance(v, Tensor) and k not in HARMLESS)
    strange += sorted(k for k in ("indices", "block_indices") if kwargs.get(k) is not None and k not in strange)
    if strange:
        raise UnsupportedModel(
            f"{type(module).__name__} passes {', '.join(strange)} to its attention, which may replace the mask: "
            f"such sparse attention is not read; {INSTEAD}"
        )
    if attention_mask is not None and attention_mask.dtype is not torch.bool:
        raise UnsupportedModel(
            f"{type(module).__name__} adds numbers of its own to its attention scores where others pass a mask: "
            f"such attention is not read; {INSTEAD}"
        )
    recorder = active.get()
    if recorder is None:
        return _delegate(kind, module, query, key, value, attention_mask, **kwargs), None
    return recorder.attend(kind, module, query, key, value, attention_mask, **kwargs), None


for _name in (FUSED, PLAIN):
    AttentionInterface.register(_name, partial(_attend, _name))
    # Without a mask function of the same name every mask is dropped in silence. The boolean form serves both kinds.
    AttentionMaskInterface.register(_name, sdpa_mask)


def interface_kind(model: PreTrainedModel, name: str) -> str:
    """Which of our two functions replaces the model's own attention.

    Raises UnsupportedModel: its own attention leaves out the cap of its scores.
    """
    kind, cap = implementation(model), getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    if kind == "sdpa" and cap:
        raise UnsupportedModel(
            f"{name}: its scores are capped, and sdpa leaves the cap out; call model.set_attn_implementation('eager')"
        )
    return PLAIN if kind == "eager" else FUSED


def implementation(model: PreTrainedModel) -> str:
    """The name of the model's own attention now, also while ours stands in its place."""
    config: Any = model.config.get_text_config()
    with _lock:
        return _attached[id(config)][1] if id(config) in _attached else config._attn_implementation


@contextmanager
def attached(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Switch the text decoder to our attention function; its config is restored when the last user leaves.

    Counted by config object, since two models, or two threads, may share one. The config is set directly:
    set_attn_implementation walks all modules to end in the same assignment, which a small model feels.
    """
    config: Any = model.config.get_text_config()
    key = id(config)
    kind = interface_kind(model, name)
    with _lock:
        users, before = _attached.get(key, (0, config._attn_implementation))
        if users == 0:
            config._attn_implementation = kind
        _attached[key] = (users + 1, before)
    try:
        yield
    finally:
        with _lock:
            users, before = _attached.pop(key)
            if users > 1:
                _attached[key] = (users - 1, before)
            else:
                config._attn_implementation = before


@contextmanager
def recording(recorder: Recorder, blocks: Sequence[Block], output: nn.Module | None) -> Iterator[Recorder]:
    """Let `recorder` see one forward of this context. Hooks of another pass on the same model do not answer to it.

    output: the output embedding, which is given the queried rows alone (final soft-caps still apply).
    """
    shape, resumed = recorder.where[1].shape, recorder.resumed
    begin = resumed.start if resumed is not None else 0  # layer 0 reads the tokens themselves

    # kwargs may be missing: torch notes with_kwargs after the hook itself, and another thread may be in between.
    def enter(index, module, args, kwargs: Any = None):
        if active.get() is not recorder:
            return None
        x = args[0] if args else kwargs["hidden_states"]
        if x.dim() != 3 or x.shape[:2] != shape:  # Gemma-3n puts its streams first, DeepSeek-V4 before the width
            raise UnsupportedModel(
                f"{type(module).__name__} {index} reads numbers of shape {tuple(x.shape)}, not one residual stream of "
                f"{tuple(shape)} inputs and positions; models with several are not read"
            )
        if resumed is not None and 0 < index == begin:
            x = resumed.stream(x.device)
        x = recorder.edit("residual", index, x)
        recorder.keep(Site.RESIDUAL, index, x)
        if ("residual", index) not in recorder.edits and not 0 < index == begin:
            return None
        x = x.contiguous()  # layers reshape their input; an edit may return any strides
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})

    def leave(_module, _args, out):
        if active.get() is recorder:
            recorder.keep(Site.RESIDUAL, len(blocks), out[0] if isinstance(out, tuple | list) else out)

    def write(index, site, scale, _module, _args, out):
        if active.get() is not recorder:
            return None
        first = out[0] if isinstance(out, tuple | list) else out
        # OPT flattens batch and position before its MLP; an edit may return any strides.
        x = first.reshape(*shape, first.shape[-1])
        x = recorder.edit(site.value, index, x if scale == 1 else x * scale)
        recorder.keep(site, index, x)
        if (site.value, index) not in recorder.edits:
            return None
        x = (x if scale == 1 else x / scale).reshape(first.shape)
        return (x, *out[1:]) if isinstance(out, tuple | list) else x

    def last(_module, args):
        return recorder.asked(args[0]) if active.get() is recorder else None

    with ExitStack() as hooks:
        for index, block in enumerate(blocks):
            if 0 < index == begin or Site.RESIDUAL in recorder.wanted or ("residual", index) in recorder.edits:
                handle = block.layer.register_forward_pre_hook(partial(enter, index), with_kwargs=True)
                hooks.callback(handle.remove)
            for module, site in ((block.attention_writer, Site.ATTN_OUT), (block.mlp_writer, Site.MLP_OUT)):
                if module is not None and (site in recorder.wanted or (site.value, index) in recorder.edits):
                    hook = partial(write, index, site, block.scale)
                    hooks.callback(module.register_forward_hook(hook).remove)
        if Site.RESIDUAL in recorder.wanted:
            hooks.callback(blocks[-1].layer.register_forward_hook(leave).remove)
        if output is not None:
            hooks.callback(output.register_forward_pre_hook(last).remove)
        token = active.set(recorder)
        try:
            yield recorder
        finally:
            active.reset(token)
